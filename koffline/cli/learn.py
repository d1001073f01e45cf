"""Training: ``koffline train | sweep | online | reproduce``."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from koffline.bundled import ONLINE
from koffline.cli.completion import complete_configs, list_option
from koffline.cli.options import (
    QUIET,
    SEED,
    WORKERS,
    Option,
    check_source,
    set_option,
    whole,
    worker_options,
)
from koffline.cli.output import say
from koffline.cli.targets import OptionText, claim, long_part
from koffline.errors import ConfigError, printable, without_controls
from koffline.experiments import ENVIRONMENTS, NAMES, PARTS, STAGES, WORLDS
from koffline.store import stored_run
from koffline.store.run_record import shown_command

if TYPE_CHECKING:
    from koffline.display import Row
    from koffline.online.run import OnlineResult

_DATA: Option = click.option(
    "--data", metavar="SOURCE", help="The log, instead of data.source."
)
_only = partial(
    click.option,
    help="Only this one of figure-mujoco or choices; repeatable.",
    multiple=True,
)
_GRID = "Values of one setting, e.g. algo.params.gamma=0.98,0.99; repeatable."
_BEGIN_AGAIN = "nothing was finished; the same command begins again"
_DEVICE: Option = click.option(
    "--device", default="cpu", show_default=True, help="cpu, cuda or cuda:N."
)


@click.command(no_args_is_help=True)
@click.argument("config", shell_complete=complete_configs(""))
@list_option("")
@set_option("One setting, e.g. algo.params.gamma=0.98; overrides CONFIG.")
@_DATA
@click.option(
    "--out",
    metavar="DIR",
    help="Folder of the run; default runs/ and the name of CONFIG.",
)
@_DEVICE
@click.option(
    "--resume",
    is_flag=True,
    help="Continue the run in --out after its last complete epoch.",
)
@QUIET
def train(
    config: str,
    assignments: tuple[str, ...],
    data: OptionText,
    out: OptionText,
    device: str,
    resume: bool,
    quiet: bool,
) -> None:
    """Train a policy from a log, by an algorithm of d3rlpy or koffline.

    CONFIG is a YAML file with the sections data, algo, train, evaluators and logger,
    which states only what differs from the defaults, or the name of a bundled one:
    there is one for each algorithm (--list). The run's folder gets d3rlpy's files
    (params.json, a CSV per metric, model_*.d3), config.yaml, run.json and
    checkpoint.pt.

    \b
    Examples:
      koffline train kloss_dqn --out runs/a
      koffline train cql --set algo.params.gamma=0.98 --set train.n_steps=5000
      koffline train my_config.yaml --data minari:pendulum/medium-v0 --out runs/b
      koffline train my_config.yaml --out runs/b --resume
    """
    target: str | Path = Path("runs") / Path(config).stem
    if out is not None:
        target = out
    folder = claim(target, is_whole=False)
    check_source(data)
    stored_run(folder, "train", resume)
    from koffline.train.config import load_config

    settings = load_config(config, assignments, data)
    # After the checks: what is wrong is said before torch is loaded.
    from koffline.train.run import CHECKPOINT
    from koffline.train.run import train as run

    kept = f"the epochs that had ended are in {folder}; go on with --resume"
    with long_part(
        folder / CHECKPOINT, kept, "no epoch had ended; begin again with --resume"
    ):
        result = run(
            settings, folder, device=device, resume=resume, show_progress=not quiet
        )
    metrics = {
        name: value
        for name, value in result.metrics.items()
        if not name.startswith("time_")
    }
    rows = [(printable(name), f"{value:.5g}") for name, value in metrics.items()]
    right = ("last epoch",)
    title = f"{result.steps} steps in {result.seconds:.1f} s"
    _print_numbers(
        title, ("metric", "last epoch"), [rows], right, f"model: {result.model}"
    )


@click.command(no_args_is_help=True)
@click.argument("config", shell_complete=complete_configs(""))
@list_option("")
@click.option("--grid", multiple=True, metavar="KEY=A,B,…", help=_GRID)
@click.option(
    "--seeds",
    type=int,
    default=5,
    show_default=True,
    help="Number of seeds, from train.seed on.",
)
@set_option("One setting of all runs, e.g. train.n_steps=5000; overrides CONFIG.")
@_DATA
@click.option(
    "--out",
    metavar="DIR",
    help="Folder of the sweep; default sweeps/ and the name of CONFIG.",
)
@click.option(
    "--metric",
    help="Compare by this evaluator or loss; default the return in an environment.",
)
@click.option(
    "--maximize/--minimize",
    default=None,
    help="Default: minimise errors, losses, distances only.",
)
@worker_options
@_DEVICE
@click.option(
    "--resume/--force",
    "resume",
    default=True,
    help="Go on in --out (default) or delete its runs.",
)
@QUIET
def sweep(
    config: str,
    out: str | None,
    workers: int,
    ray: Any,
    device: str,
    resume: bool,
    quiet: bool,
    **options: Any,
) -> None:
    """Train CONFIG with every combination of --grid values and several seeds, and
    compare.

    DIR gets runs/NAME (a run's folder each), best.yaml, summary.json and summary.md:
    the last epoch's metric, interquartile mean over seeds with a bootstrap interval,
    the best setting first. The same command continues a killed sweep. With another
    grid, seeds or settings it trains only the missing runs, with another --metric
    nothing. If a run fails, the others go on, and the summary says why. CONFIG is as in
    'koffline train'.

    \b
    Examples:
      koffline sweep kloss_dqn --grid algo.params.learning_rate=1e-3,3e-4 --seeds 5 --workers 2
      koffline sweep iql --grid algo.params.expectile=0.7,0.9 --metric environment
      koffline sweep cql --grid data.source=a.hdf5,b.hdf5 --seeds 5 --ray auto --out sweeps/cql
    """
    check_source(options["data"])
    from koffline.train.config import make_plan

    plan = make_plan(config, **options)
    # after the config's errors: what trains imports torch
    from rich.markdown import Markdown

    from koffline.display import make_console
    from koffline.train.sweep import as_markdown, run_sweep

    target: str | Path = Path("sweeps") / Path(config).stem
    if out is not None:
        target = out
    inputs = None
    if not resume:
        inputs = [config, *plan.inputs]
    folder = claim(target, is_whole=False, inputs=inputs)
    kept = f"what is trained is in {folder}/runs: the same command goes on"
    with long_part(folder / "runs", kept, _BEGIN_AGAIN):
        summary = run_sweep(
            plan, folder, workers, ray, device, not resume, shown_command(), not quiet
        )
    make_console().print(Markdown(without_controls(as_markdown(summary))))
    runs = len(plan.settings) * len(plan.seeds)
    say(f"{runs} runs in {folder}/runs; summary {folder}/summary.json")
    failed = summary.failures
    if failed:
        name, error = next(iter(failed.items()))
        raise ConfigError(
            f"{len(failed)} of {runs} runs failed, {name} first: {error}; see"
            f" {folder}/summary.json, the same command runs them again"
        )


@click.command(no_args_is_help=True)
@click.argument("config", required=False, shell_complete=complete_configs(ONLINE))
@list_option(ONLINE)
@set_option("One setting, e.g. critic=fvi; overrides CONFIG.")
@whole("--seeds", help="Number of seeds, from --seed on; default 6.")
@whole("--seed-count", hidden=True)
@whole("--seed", 0, help="First seed; default 0.")
@click.option(
    "--streaming", is_flag=True, help="Learn from each step once, without a replay."
)
@click.option(
    "--out", metavar="DIR", help="Folder of the run; default runs/ENVIRONMENT-CRITIC."
)
@click.option(
    "--resume", metavar="DIR", help="Continue the run in DIR; CONFIG may be left out."
)
@WORKERS
@QUIET
def online(
    config: str | None,
    assignments: tuple[str, ...],
    streaming: bool,
    out: str | None,
    resume: str | None,
    quiet: bool,
    seeds: int | None,
    seed_count: int | None,
    **options: Any,
) -> None:
    """Train a policy by playing in a Gymnasium environment: Trust-PCL, several seeds at
    once.

    CONFIG is a YAML file that states only what differs from the defaults, or the name
    of a bundled one (--list): there is one for each of the paper's environments, and
    'paper' with the settings that the paper states; the defaults differ from it (kernel
    on standardised states, no trust region). --set env=NAME can replace it. The critic
    is kloss, kloss_slow, memory, fvi, td0 or rg.

    The run's folder gets seed_<k>/evaluation.csv (return of the mean action, of sampled
    actions), metrics.csv, model.d3 and replay.hdf5 (a log for koffline evaluate and
    koffline train); summary.json over the seeds, config.yaml, learning_curve.png and
    checkpoints. --resume continues a killed run exactly.

    \b
    Examples:
      koffline online inverted_pendulum --out runs/pendulum
      koffline online swimmer --set critic=td0 --set steps=500000 --workers 2
      koffline online ant --set env_options.ctrl_cost_weight=0.1 --seeds 3
      koffline online --set env=Pendulum-v1 --set critic=kloss_slow --set steps=50000
      koffline online --resume runs/pendulum
    """
    from koffline.online.config import load_config
    from koffline.store import CONFIG, RECORD

    if config is None and resume is None and not assignments:
        raise click.UsageError("give CONFIG, --set env=NAME, or --resume DIR")
    if seed_count is not None:
        click.echo(
            "note: --seed-count is an older name of --seeds; write --seeds"
            f" {seed_count}",
            err=True,
        )
        if seeds is None:
            seeds = seed_count
    if resume is not None and not Path(resume).is_dir():
        raise click.UsageError(f"--resume {resume}: there is no such folder")
    source: Any = config
    if not source:
        source = {}
        if resume is not None:
            source = Path(resume) / CONFIG
    if streaming:
        assignments = (*assignments, "streaming=true")
    settings = load_config(source, assignments)
    from koffline.online import run  # after the config's errors: it imports torch

    option = "--out"
    target: str | Path
    if resume is not None:
        option = "--resume"
        target = resume
    elif out is not None:
        target = out
    else:
        target = run.default_folder(settings)
    folder = claim(target, option, is_whole=False)
    kept = f"go on with koffline online --resume {shlex.quote(str(folder))}"
    with long_part(folder / RECORD, kept, _BEGIN_AGAIN):
        result = run.train(
            settings, out, seeds, resume=resume, show_progress=not quiet, **options
        )
    _print_scores(result)
    diverged = result.diverged
    if diverged:  # existing files are kept
        names = ", ".join(f"{seed} (by step {step})" for seed, step in diverged.items())
        raise ConfigError(
            f"training diverged with seed {names}: the gradient is not finite; lower"
            " learning_rate or max_grad_norm, or scale the rewards with reward_scale"
        )


def _print_scores(result: OnlineResult) -> None:
    """Print the last evaluation of each seed and over all seeds, the speed and the
    run's folder.
    """
    from koffline.report.words import ends, number
    from koffline.spread import LEVEL

    names = ("return", "sampled return", "length")
    last = result.last.values()
    heads = ("IQM", f"{LEVEL:.0%} interval", result.best_name.replace("_", " "))
    labels = [*map(str, result.seeds), *heads]
    columns = [
        [*score.per_seed, score.spread.iqm, ends(score.spread), score.best]
        for score in last
    ]
    rows = [
        (label, *(number(column[place]) for column in columns))
        for place, label in enumerate(labels)
    ]
    seeds = len(result.seeds)
    speed = (
        f"{result.seconds:.1f} s, {result.steps_per_second:.0f} environment steps per"
        " second"
    )
    title = (
        f"{result.config.env}, {result.config.critic}: {result.steps} steps per seed"
    )
    parts = [rows[:seeds], rows[seeds:]]
    _print_numbers(title, ("seed", *names), parts, names, speed, f"run: {result.out}")


def _print_numbers(
    title: str, columns: Row, parts: Sequence[Any], right: Row, *lines: str
) -> None:
    """Print a table of numbers and lines below it.

    columns: headings. parts: lists of rows, with a line between two of them. right:
    headings of the columns that are aligned on the right.
    """
    from koffline.display import make_console, print_table

    console = make_console()
    print_table(console, title, columns, *parts, right=right)
    for line in lines:
        console.print(line, soft_wrap=True, highlight=False)


# The experiments that --only-finished shows again.
_SHOWN_AGAIN = ("choices", "claims", "figure-puddle")


@click.command(no_args_is_help=True)
@click.argument("name", metavar="NAME", type=click.Choice(NAMES))
@click.option(
    "--quick",
    is_flag=True,
    help="Take minutes: a twentieth of the epochs, three seeds.",
)
@click.option(
    "--out",
    metavar="DIR",
    default="out/reproduce",
    show_default=True,
    help="Where results go.",
)
@SEED
@worker_options
@click.option(
    "--force", is_flag=True, help="Replace results of another scale or seed in --out."
)
@_only(
    "--only",
    "places",
    metavar="ENVIRONMENT|WORLD",
    type=click.Choice((*ENVIRONMENTS, *WORLDS)),
)
@_only("--part", "parts", metavar="PART", type=click.Choice((*PARTS, *STAGES)))
@click.option(
    "--half-epochs",
    is_flag=True,
    help="choices: half the epochs except on Puddle World.",
)
@click.option(
    "--only-finished",
    is_flag=True,
    help="choices, claims, figure-puddle: train nothing, show what is in --out.",
)
@QUIET
def reproduce(  # noqa: PLR0913
    name: str,
    quick: bool,
    out: str,
    seed: int,
    quiet: bool,
    places: tuple[str, ...],
    parts: tuple[str, ...],
    half_epochs: bool,
    only_finished: bool,
    **where: Any,
) -> None:
    """Reproduce a figure of the paper, the ablation, or the table of its claims.

    NAME is figure-toy, figure-puddle, figure-bench, ablation, memory, choices,
    figure-mujoco or claims. DIR gets NAME.json, .png, .svg, .md and the curves. The
    same command continues a killed run.

    figure-mujoco takes many hours: choose environments (--only) and parts (--part
    search, final, noise, paper-search, paper). It shows all finished parts in DIR.
    search, final and noise have our learner, a kernel on standardised states; those
    named paper have the settings that the paper states, and our weight of the diagonal.

    choices varies what the paper leaves open and takes days: choose worlds (--only
    puddle_world, cart_pole, gymnasium_pole, mountain_car) and stages (--part
    temperature, single, factorial). It too shows all that is finished in DIR; with
    --only-finished it trains nothing.

    claims judges the paper's sentences by all results in DIR. With --only-finished it
    and figure-puddle make their pages again from DIR, for example after more of choices
    is finished.

    \b
    Examples:
      koffline reproduce figure-toy
      koffline reproduce figure-puddle --quick --out runs/quick
      koffline reproduce claims --workers 2 --out runs/full
      koffline reproduce figure-mujoco --only InvertedPendulum --part final --workers 2
      koffline reproduce choices --only puddle_world --part temperature --out runs/choices
    """
    chosen = _chosen_parts(name, places, parts)
    if half_epochs and name != "choices":
        raise ConfigError(
            f"--half-epochs belongs to choices, not to {name}; leave it out"
        )
    if only_finished and name not in _SHOWN_AGAIN:
        raise ConfigError(
            f"--only-finished belongs to {', '.join(_SHOWN_AGAIN)}, not to {name};"
            " leave it out"
        )
    from koffline.figures import load_matplotlib

    # before the experiments import it with the settings of the current folder
    load_matplotlib()
    from koffline.experiments.cells import Run, Scale
    from koffline.experiments.reproduce import reproduce as run_experiment

    folder = claim(out, is_whole=False)
    chosen |= {
        "command": shown_command(),
        "show_progress": not quiet,
        "only_finished": only_finished,
    }
    run = Run(name, folder, Scale(quick, seed, half_epochs), **where, **chosen)
    kept = f"what is finished is in {run.cells_folder}: the same command goes on"
    with long_part(run.cells_folder, kept, _BEGIN_AGAIN):
        results = run_experiment(run)
    say((run.folder / f"{name}.md").read_text(encoding="utf-8"))
    say(
        f"{results.seconds:.0f} s; figure {run.folder / name}.png, numbers"
        f" {run.folder / name}.json"
    )


def _chosen_parts(
    name: str, places: tuple[str, ...], parts: tuple[str, ...]
) -> dict[str, Any]:
    """Fields of `Run` from --only (``places``) and --part (``parts``) of an experiment.

    Raises ConfigError for those of another experiment.
    """
    fields = {
        "figure-mujoco": (("environments", ENVIRONMENTS), ("parts", PARTS)),
        "choices": (("worlds", WORLDS), ("stages", STAGES)),
    }
    if not places and not parts:
        return {}
    if name not in fields:
        raise ConfigError(
            f"{name} has no environments or parts to choose; only figure-mujoco has,"
            " and choices has worlds"
        )
    chosen: dict[str, Any] = {}
    for option, values, (field, known) in zip(
        ("--only", "--part"), (places, parts), fields[name], strict=True
    ):
        for value in values:
            if value not in known:
                raise ConfigError(f"{option} is {value}; {name} has {', '.join(known)}")
        if values:
            chosen[field] = values
    return chosen
