"""``koffline repeat`` and ``reproduce``: a run again, its numbers compared, and the paper again."""

from __future__ import annotations

import csv
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import click
from pydantic import BaseModel, Field, ValidationError

from koffline.cli.options import SEED, worker_options
from koffline.errors import ConfigError, printable
from koffline.experiments import ENVIRONMENTS, NAMES, PARTS
from koffline.store.run_record import FILE, digests_of, shown_command, versions, without_place
from koffline.store.targets import check_name
from koffline.untrusted.limits import read_json

_REPEAT = """Run again what made the folder RUN, into another folder, and compare the numbers.

RUN/run.json holds the command line, the numbers of threads and the digests of the inputs. Call this where the
command was called. The command line is shown, and runs once you agree: a record from someone else is a
command from someone else.

What is compared is every value in the JSON and CSV files, except run.json and files of times. Exit code 0
where all are the same; else 1.

\b
Examples:
  koffline repeat runs/a
  koffline repeat runs/a --out runs/a-again --yes
"""


class _Call(BaseModel):
    """Command line that made the results, from their record."""

    arguments: list[str] = Field(min_length=1)
    directory: str
    inputs: dict[str, str]
    threads: dict[str, str | int | None]
    versions: dict[str, str]


@click.command(help=_REPEAT, no_args_is_help=True)
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--out", metavar="DIR", help="A new folder for the repetition; default RUN.repeat.")
@click.option("--yes", is_flag=True, help="Run the command without asking.")
def repeat(run: Path, out: str | None, yes: bool) -> None:
    """Repeat the run, compare the values, and print the comparison."""
    folder = check_name(run.with_name(f"{run.resolve().name}.repeat") if out is None else out)
    if folder.exists() or run.resolve() in folder.resolve().parents:
        raise ConfigError(f"{folder} exists or lies in {run}; name a new folder beside it (--out)")
    try:
        call = _Call.model_validate(read_json(run / FILE)["call"])
    except (OSError, ValueError, KeyError, TypeError, ValidationError):
        message = f"{run} holds no {FILE} that names its command line; run the command itself"
        raise ConfigError(message) from None
    found = digests_of(call.inputs)
    for name, digest in call.inputs.items():
        if found.get(name) != digest:
            raise ConfigError(f"{name} is not what the run read; call this in {call.directory}, put it back")
    words = [*without_place(call.arguments), "--out", str(folder)]
    click.echo(printable(shlex.join(["koffline", *words])), err=True)
    if not yes:
        click.confirm("Run this?", abort=True, err=True)
    threads = {name: value for name, value in call.threads.items() if isinstance(value, str)}
    command, environment = [sys.executable, "-m", "koffline", *words], {**os.environ, **threads}
    done = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=False)
    if not folder.exists():
        raise ConfigError(f"the command ended with exit code {done.returncode} and no results")
    before, after = _values(run), _values(folder)
    for name in sorted(before.keys() | after.keys()):
        if (then := before.get(name, "nothing")) != (value := after.get(name, "nothing")):
            click.echo(printable(f"{name}: {then}, now {value}"))
    for name, version in versions().items():
        if (then := call.versions.get(name, version)) != version:
            click.echo(printable(f"note: {name} was {then}, is {version}"), err=True)
    click.echo(f"{'' if before == after else 'not '}the same: {run} and {folder}")
    raise SystemExit(before != after)


def _values(folder: Path) -> dict[str, str]:
    """Values of all JSON and CSV files by file and position, without records and times."""
    found: dict[str, str] = {}
    for path in (*folder.rglob("*.json"), *folder.rglob("*.csv")):
        if path.name != FILE and not path.name.startswith(("time_", "timing")):
            rows = (
                read_json(path)
                if path.suffix == ".json"
                else [*csv.reader(path.read_text("utf-8").splitlines())]
            )
            found |= dict(_leaves(rows, path.relative_to(folder).as_posix()))
    return found


def _leaves(value: Any, place: str) -> Iterator[tuple[str, str]]:
    if not isinstance(value, dict | list):
        yield place, str(value)
        return
    for key, part in value.items() if isinstance(value, dict) else enumerate(value):
        yield from _leaves(part, f"{place} {key}")


_REPRODUCE = """Reproduce a figure of the paper, the ablation, or the table of its claims.

NAME is figure-toy, figure-puddle, figure-bench, ablation, memory, figure-mujoco or claims. Writes
DIR/NAME.json, .png, .svg, .md and the curves; a killed run continues where it was.

figure-mujoco takes many hours: --only and --part choose environments and parts of it (search, final, noise,
paper-search, paper), and what is finished in DIR is shown whatever was asked for.

\b
Examples:
  koffline reproduce figure-toy
  koffline reproduce figure-puddle --quick --out runs/quick
  koffline reproduce claims --workers 2 --out runs/full
  koffline reproduce figure-bench --ray auto
  koffline reproduce figure-mujoco --only InvertedPendulum --part final --workers 2
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
def reproduce(
    name: str, quick: bool, out: str, seed: int, workers: int, ray: str | None, force: bool, **chosen: Any
) -> None:
    """Run the experiment, print its table and where the files are."""
    chosen = {option: value for option, value in chosen.items() if value}
    if chosen and name != "figure-mujoco":
        raise ConfigError(f"{name} has no environments or parts to choose; only figure-mujoco has")
    from koffline.experiments.cells import Run, Scale
    from koffline.experiments.reproduce import reproduce as run_experiment

    folder = check_name(out, is_whole=False)
    run = Run(name, folder, Scale(quick, seed), workers, ray, shown_command(), force, **chosen)
    try:
        results = run_experiment(run)
    except KeyboardInterrupt:
        message = f"interrupted; what is finished is in {run.cells_folder}: the same command goes on"
        click.echo(message, err=True)
        raise SystemExit(130) from None
    click.echo((run.folder / f"{name}.md").read_text(encoding="utf-8"))
    click.echo(f"{results.seconds:.0f} s; figure {run.folder / name}.png, numbers {run.folder / name}.json")
