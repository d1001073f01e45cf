"""``koffline online``: a config file in, policies, curves, replays and a summary over seeds out."""

from __future__ import annotations

import contextlib
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from koffline.cli.options import set_option, whole
from koffline.cli.targets import claim
from koffline.errors import ConfigError

if TYPE_CHECKING:
    from koffline.online.run import OnlineResult
    from koffline.online.summary import Score

_HELP = """Train Trust-PCL in a Gymnasium environment with a growing replay and several seeds.

CONFIG is a YAML file that states only what differs from the defaults; configs/online/ has one for each of the
paper's environments, and paper.yaml with the paper's own settings. The critic is kloss, fvi, td0 or rg. All
seeds learn in one stack.

The folder of the run gets seed_<k>/evaluation.csv (return of the mean action, of sampled actions),
metrics.csv, model.d3 and replay.hdf5 (a log for koffline evaluate and koffline train), summary.json over the
seeds, config.yaml, learning_curve.png and checkpoints. A killed run goes on to the bit with --resume.

\b
Examples:
  koffline online configs/online/inverted_pendulum.yaml --out runs/pendulum
  koffline online configs/online/swimmer.yaml --set critic=td0 --set steps=500000 --workers 2
  koffline online configs/online/ant.yaml --set environment_options.ctrl_cost_weight=0.1 --seed-count 3
  koffline online --resume runs/pendulum
"""


@click.command(help=_HELP, no_args_is_help=True)
@click.argument("config", required=False)
@set_option("One setting, e.g. critic=fvi; wins over the file.")
@whole("--seed-count", help="How many seeds; default 6.")
@whole("--seed", 0, help="The first one; default 0.")
@click.option("--out", metavar="DIR", help="Folder of the run; default runs/ENVIRONMENT-CRITIC.")
@click.option("--resume", metavar="DIR", help="Go on with the run in DIR; CONFIG may be left out.")
@whole("--workers", default=1, show_default=True, help="Processes, one core each.")
def online(
    config: str | None,
    assignments: tuple[str, ...],
    out: str | None,
    resume: str | None,
    **options: Any,
) -> None:
    """Check the config, train, print a table over the seeds and where everything is."""
    from koffline.online.config import load_config
    from koffline.online.run import default_folder, train
    from koffline.store.run_folders import CONFIG, RECORD

    if config is None and resume is None:
        raise click.UsageError("give CONFIG, or --resume DIR")
    source = config if config is not None else Path(resume or "") / CONFIG
    if resume is not None and not Path(resume).is_dir():
        raise click.UsageError(f"--resume {resume}: there is no such folder")
    settings = load_config(source, assignments)
    option = "--out" if resume is None else "--resume"
    folder = resume if resume is not None else default_folder(settings) if out is None else out
    folder = claim(folder, option, adds=RECORD)
    try:
        # Environments may print: stdout belongs to the result alone.
        with contextlib.redirect_stdout(sys.stderr):
            result = train(settings, out, resume=resume, show_progress=sys.stderr.isatty(), **options)
    except KeyboardInterrupt:
        hint = f"; go on with koffline online --resume {folder}" if (folder / CONFIG).exists() else ""
        click.echo(f"interrupted{hint}", err=True)
        raise SystemExit(130) from None
    _print(result)
    if diverged := result.summary.diverged:  # what is there is kept
        names = ", ".join(f"{seed} (by step {step})" for seed, step in diverged.items())
        raise ConfigError(
            f"training diverged with seed {names}: the gradient is not finite; lower learning_rate or "
            "max_grad_norm, or scale the rewards with reward_scale"
        )


def _print(result: OnlineResult) -> None:
    from rich.console import Console
    from rich.table import Table

    from koffline.spread import LEVEL

    summary = result.summary
    title = f"{summary.environment}, {summary.critic}: {summary.steps} steps per seed"
    table = Table("seed", title=title, title_justify="left")
    for name in ("return", "sampled return", "length"):
        table.add_column(name, justify="right")
    scores = summary.last
    for place, seed in enumerate(summary.seeds):
        ends = place == len(summary.seeds) - 1
        table.add_row(str(seed), *(_number(score.per_seed[place]) for score in scores), end_section=ends)
    table.add_row("IQM", *(_number(score.spread.iqm) for score in scores))
    table.add_row(f"{LEVEL:.0%} interval", *map(_interval, scores))
    table.add_row(summary.best_name.replace("_", " "), *(_number(score.best) for score in scores))
    console = Console(emoji=False)
    console.print(table)
    speed = f"{summary.seconds:.1f} s, {summary.steps_per_second:.0f} environment steps per second"
    console.print(speed, soft_wrap=True, highlight=False)
    console.print(f"run: {result.out}", soft_wrap=True, highlight=False)


def _number(value: float) -> str:
    return f"{value:.5g}" if math.isfinite(value) else "–"


def _interval(score: Score) -> str:
    low, high = score.spread.low, score.spread.high
    return "–" if math.isnan(low) else f"{_number(low)} … {_number(high)}"
