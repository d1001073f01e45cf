"""``koffline repeat`` and ``reproduce``: a run again, compared byte by byte, and the paper again."""

from __future__ import annotations

import filecmp
import os
import re
import shlex
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import click
from pydantic import BaseModel, Field, ValidationError

from koffline.cli.options import SEED, worker_options
from koffline.errors import ConfigError, printable
from koffline.experiments import ENVIRONMENTS, NAMES, PARTS
from koffline.store.run_record import (
    FILE,
    FORMAT,
    THREADS,
    digests_of,
    shown_command,
    versions,
    without_place,
)
from koffline.store.targets import check_name, locked
from koffline.untrusted.limits import WITHOUT_CODE, read_json

# What differs from one day to the next (seconds, dates, the machine), and the state to go on from.
NO_RESULTS = re.compile(
    r"(^|/)(run\.json|[^/]*\.run\.json|\.[^/]*|timing_[^/]*\.csv|time_[^/]*\.csv|timing\.json|checkpoint\.pt"
    r"|errors\.txt|(checkpoints|cells|tensorboard|packed|errors)/.*)$"
)
_KINDS = ("build", "diagnose", "evaluate", "online", "reproduce", "select", "sweep", "train")
_REPEAT = """Run again what made RUN, into another folder, and compare every result byte by byte.

RUN is a folder that evaluate, diagnose, select, train, sweep or online wrote, NAME.json of reproduce, or a
dataset of build. Its record (run.json, NAME.run.json, the manifest) holds the command line, the numbers of
threads and the digests of the inputs; an input that has changed ends in one line. The command line is shown
before it runs. Code that it names (Python modules, TorchScript programs, Ray clusters) runs only with
--allow-code.

Records, clocks and checkpoints (run.json, time*.csv, checkpoint.pt, checkpoints/, cells/) are no results.
Exit code 0 where all results are the same; else 1.

\b
Examples:
  koffline repeat runs/a
  koffline repeat runs/a --out runs/a-again
  koffline repeat logs/cartpole.hdf5
  koffline repeat out/reproduce/figure-toy.json
"""


class _Call(BaseModel):
    arguments: list[str] = Field(min_length=1)
    directory: str
    inputs: dict[str, str]
    threads: dict[str, Any] = {}
    versions: dict[str, str] = {}


class _Made(NamedTuple):
    """Where results lie, what their names match, what --out named there, and the call."""

    folder: Path
    names: str
    target: str
    call: _Call


@click.command(help=_REPEAT, no_args_is_help=True)
@click.argument("run")
@click.option("--out", metavar="DIR", help="A new folder for the repetition; default RUN.repeat.")
@click.option("--allow-code", is_flag=True, help="Code that the command line names may run.")
def repeat(run: str, out: str | None, allow_code: bool) -> None:
    """Repeat, compare, say it."""
    path = Path(run)
    folder = check_name(path.with_name(f"{path.resolve().name}.repeat") if out is None else out)
    made = _read(path)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"--out {folder} exists already; name a new folder")
    if path.resolve() in folder.resolve().parents:
        raise ConfigError(f"--out {folder} lies in {run}, with which it is compared; name a folder beside it")
    with locked(folder.with_name(f"{folder.name}.repeated")):  # the command locks its target itself
        _run(made, (folder / made.target).absolute(), allow_code)
    lines = compare_folders(made.folder, folder, made.names)
    there, here = made.call.versions, versions()
    for name in there:
        if there[name] != here.get(name):
            click.echo(f"note: {name} was {there[name]}, is {here.get(name, 'absent')}", err=True)
    click.echo("\n".join([*lines, f"{'not ' if lines else ''}the same: {made.folder} and {folder}"]))
    if lines:
        raise SystemExit(1)


def compare_folders(first: Path, second: Path, names: str = "") -> list[str]:
    """A line for every result that one of two folders lacks, or that has other bytes."""
    before, after = results_of(first, names), results_of(second, names)
    _, different, _ = filecmp.cmpfiles(first, second, [n for n in before if n in after], shallow=False)
    return [
        *(f"differs: {name}" for name in different),
        *(f"missing: {name}" for name in before if name not in after),
        *(f"new: {name}" for name in after if name not in before),
    ]


def results_of(folder: Path, names: str = "") -> list[str]:
    """Names of the result files in a folder, in order: all but records, clocks and states to go on from."""
    found = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(name for name in found if re.match(names, name) and not NO_RESULTS.search(name))


def _read(run: Path) -> _Made:
    """What the record of a folder, of an experiment or of a dataset says. Raises ConfigError."""
    beside, manifest = run.with_name(f"{run.stem}.run.json"), run.parent / "manifest.json"
    record: Any
    if (run / FILE).is_file():
        folder, names, target, record = run, "", "", _load(run / FILE)
    elif beside.is_file():
        folder, names, target, record = run.parent, re.escape(run.stem) + r"\.[^/]*$", "", _load(beside)
    elif manifest.is_file() and isinstance(record := _load(manifest).get(run.name), dict):
        folder, names, target = run.parent, re.escape(run.name) + "(/|$)", run.name
    else:
        raise ConfigError(
            f"{run} has no {FILE} and no entry in a manifest.json beside it; name the folder of a run, "
            "NAME.json of an experiment, or a dataset that koffline build wrote"
        )
    if record.get("format", FORMAT) != FORMAT:
        raise ConfigError(f"{run} has records of format {record['format']}, this koffline knows {FORMAT}")
    try:
        call = _Call.model_validate(record.get("call"))
    except ValidationError:
        call = None
    if call is None or call.arguments[0] not in _KINDS:
        raise ConfigError(f"{run} does not say by which command line it was made; run the command itself")
    if target:
        call.directory = str(run.parent / call.directory)
    return _Made(folder, names, target, call)


def _load(path: Path) -> dict[str, Any]:
    try:
        content = read_json(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read ({type(error).__name__}); the run is damaged") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} is no record of a run; name the folder of a run")
    return content


def _run(made: _Made, target: Path, allow_code: bool) -> None:
    """The command in its directory, with other results. Raises ConfigError where it cannot be the same."""
    call, place, here = made.call, Path(made.call.directory), Path.cwd()
    os.chdir(place)  # where the names of the inputs count from
    try:
        found = digests_of(call.inputs)
    finally:
        os.chdir(here)
    for name, digest in call.inputs.items():
        if name not in found:
            raise ConfigError(f"the input {name} is gone from {place}; put it back to repeat the run")
        if found[name] != digest:
            raise ConfigError(f"the input {name} is not what the run read; put the old one back to repeat it")
    words = [*without_place(call.arguments), "--out", str(target)]
    click.echo(printable(f"running in {place}: {shlex.join(['koffline', *words])}"), err=True)
    threads = {name: str(call.threads[name]) for name in THREADS if call.threads.get(name)}
    kept = {name: value for name, value in os.environ.items() if name not in (*THREADS, WITHOUT_CODE)}
    target.parent.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        [*_python(place, allow_code), *words],
        cwd=place,
        env={**kept, **threads, **({} if allow_code else {WITHOUT_CODE: "1"})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode != 0 and not target.exists():
        failure = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise ConfigError(f"the command failed this time: {failure.removeprefix('error: ')}")


def _python(place: Path, allow_code: bool) -> list[str]:
    """How koffline is started: without code no module of the recorded directory can stand for another."""
    if allow_code:
        return [sys.executable, "-m", "koffline"]
    away = (place.resolve(), Path.cwd().resolve())
    own = str(Path(__file__).resolve().parents[2])
    kept = [own, *(part for part in sys.path if part and Path(part).resolve() not in away)]
    start = f"import sys; sys.path[:] = {kept!r}; from koffline.cli import cli; cli(prog_name='koffline')"
    return [sys.executable, "-I", "-c", start]


_REPRODUCE = """Reproduce a figure of the paper, the ablation, or the table of its claims.

NAME is figure-toy, figure-puddle, figure-bench, ablation, figure-mujoco or claims. Writes DIR/NAME.json,
.png, .svg, .md and the curves; a killed run continues where it was.

figure-mujoco takes many hours: --only and --part choose environments and parts of it (search, final, noise,
paper-search, paper), --steps, --seed-count and --set are of its runs, and what is finished in DIR is shown
whatever was asked for. DIR/cells/*.log tells how far a run is.

\b
Examples:
  koffline reproduce figure-toy
  koffline reproduce figure-puddle --quick --out runs/quick
  koffline reproduce claims --workers 2 --out runs/full
  koffline reproduce figure-bench --ray auto
  koffline reproduce figure-mujoco --only InvertedPendulum --part final --workers 2
  koffline reproduce figure-mujoco --only Swimmer --part final --steps 400000 --set learning_rate=0.001
"""


_of_mujoco = partial(click.option, help="Of figure-mujoco; see above.")


@click.command(help=_REPRODUCE, no_args_is_help=True)
@click.argument("name", metavar="NAME", type=click.Choice(NAMES))
@click.option("--quick", is_flag=True, help="A twentieth of the epochs, three seeds: minutes.")
@click.option("--out", metavar="DIR", default="out/reproduce", show_default=True, help="Where results go.")
@SEED
@worker_options
@click.option("--force", is_flag=True, help="Replace results of another scale or seed in --out.")
@_of_mujoco("--only", "environments", metavar="ENVIRONMENT", type=click.Choice(ENVIRONMENTS), multiple=True)
@_of_mujoco("--part", "parts", metavar="PART", type=click.Choice(PARTS), multiple=True)
@_of_mujoco("--steps", type=click.IntRange(1))
@_of_mujoco("--seed-count", type=click.IntRange(1))
@_of_mujoco("--set", "changes", metavar="KEY=VALUE", multiple=True)
def reproduce(
    name: str, quick: bool, out: str, seed: int, workers: int, ray: str | None, force: bool, **chosen: Any
) -> None:
    """Run the experiment, print its table and where the files are."""
    chosen = {option: value for option, value in chosen.items() if value}
    if chosen and name != "figure-mujoco":
        raise ConfigError(f"{name} has no environments, parts or settings to choose; only figure-mujoco has")
    from koffline.experiments.cells import Run, Scale
    from koffline.experiments.reproduce import reproduce as run_experiment

    folder, request = check_name(out, is_whole=False), None
    if chosen:
        from koffline.experiments.mujoco_plan import MujocoRequest, read_changes

        chosen["changes"] = read_changes(chosen.get("changes", ()))
        request = MujocoRequest(**chosen, quick=quick)
    run = Run(name, folder, Scale(quick, seed), workers, ray, shown_command(), force, request)
    try:
        results = run_experiment(run)
    except KeyboardInterrupt:
        message = f"interrupted; what is finished is in {run.cells_folder}: the same command goes on"
        click.echo(message, err=True)
        raise SystemExit(130) from None
    click.echo((run.folder / f"{name}.md").read_text(encoding="utf-8"))
    click.echo(f"{results.seconds:.0f} s; figure {run.folder / name}.png, numbers {run.folder / name}.json")
