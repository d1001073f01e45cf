"""``koffline train`` and ``koffline sweep``: a config file in, run directories and a ranked table out."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

import click

from koffline.cli.options import Option, set_option, worker_options
from koffline.cli.targets import claim
from koffline.errors import printable
from koffline.store.run_record import shown_command

_DATA: Option = click.option("--data", metavar="SOURCE", help="The log, instead of data.source.")
_DEVICE: Option = click.option("--device", default="cpu", show_default=True, help="cpu, cuda or cuda:N.")
_TRAIN = """Train the algorithm of CONFIG, d3rlpy's or koffline's, over a log.

CONFIG is a YAML file: data (source, split), algo ({type, params} with only the differences from d3rlpy's
defaults), train, evaluators, logger; configs/ has one per algorithm. The folder of the run is d3rlpy's
(params.json, a CSV per metric, model_*.d3) plus config.yaml, run.json and checkpoint.pt.

\b
Examples:
  koffline train configs/kloss_dqn.yaml --out runs/a
  koffline train configs/cql.yaml --set algo.params.gamma=0.98 --set train.n_steps=5000
  koffline train configs/kloss_sac.yaml --data minari:pendulum/medium-v0 --out runs/b
  koffline train configs/kloss_sac.yaml --out runs/b --resume
"""
_SWEEP = """Train CONFIG with every combination of the --grid values and several seeds.

Writes DIR/runs/NAME (a run directory each), summary.json, summary.md (interquartile mean over seeds with a
bootstrap interval, the best setting first) and best.yaml. The same command goes on with a killed sweep, runs
in the middle too; any other grid, seeds or settings in the same DIR train only what is not there yet. A run
that fails does not stop the others; errors.txt says why. The summary's metric is that of the last epoch:
changing --metric trains nothing again.

\b
Examples:
  koffline sweep configs/kloss_dqn.yaml --grid algo.params.learning_rate=1e-3,3e-4 --seeds 5 --workers 2
  koffline sweep configs/iql.yaml --grid algo.params.expectile=0.7,0.9 --metric td_error --minimize
  koffline sweep configs/cql.yaml --grid data.source=a.hdf5,b.hdf5 --seeds 5 --ray auto --out sweeps/cql
"""


@click.command(help=_TRAIN, no_args_is_help=True)
@click.argument("config")
@set_option("One setting, e.g. algo.params.gamma=0.98; wins over the file.")
@_DATA
@click.option("--out", metavar="DIR", help="Folder of the run; default runs/ and the name of CONFIG.")
@_DEVICE
@click.option("--resume", is_flag=True, help="Go on with the run in --out where its last epoch ended.")
def train(
    config: str, assignments: tuple[str, ...], data: str | None, out: str | None, device: str, resume: bool
) -> None:
    """Check the config, train, print the last metrics and where the model is."""
    from koffline.train.config import load_config

    settings = load_config(config, assignments, data)
    # After the settings: what is misspelt is said before torch is loaded.
    from koffline.cli.targets import claim
    from koffline.store.run_folders import RECORD
    from koffline.train.run import train as run

    folder = claim(Path("runs") / Path(config).stem if out is None else out, adds=RECORD)
    try:
        # Environments and loggers may print: stdout belongs to the result alone.
        with contextlib.redirect_stdout(sys.stderr):
            result = run(settings, folder, device=device, resume=resume, show_progress=sys.stderr.isatty())
    except KeyboardInterrupt:
        hint = "; go on with --resume" if (folder / "checkpoint.pt").exists() else ""
        click.echo(f"interrupted; the epochs that had ended are in {folder}{hint}", err=True)
        raise SystemExit(130) from None
    _print(result.metrics, f"{result.steps} steps in {result.seconds:.1f} s", str(result.model))


def _print(metrics: dict[str, float], title: str, model: str) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("metric", title=title, title_justify="left")
    table.add_column("last epoch", justify="right")
    for name, value in metrics.items():
        if not name.startswith("time_"):
            table.add_row(printable(name), f"{value:.5g}")
    console = Console(emoji=False)
    console.print(table)
    console.print(f"model: {model}", soft_wrap=True, highlight=False)


@click.command(help=_SWEEP, no_args_is_help=True)
@click.argument("config")
@click.option(
    "--grid",
    multiple=True,
    metavar="KEY=A,B,…",
    help="Values of one setting, e.g. algo.params.gamma=0.98,0.99; may be given several times.",
)
@click.option("--seeds", type=int, default=5, show_default=True, help="How many, from train.seed on.")
@set_option("One setting of all runs, e.g. train.n_steps=5000; wins over the file.")
@_DATA
@click.option("--out", metavar="DIR", help="Folder of the sweep; default sweeps/ and the name of CONFIG.")
@click.option("--metric", help="What counts: an evaluator or a loss; default the return in an environment.")
@click.option(
    "--maximize/--minimize", default=None, help="Default: errors, losses and distances are minimised."
)
@worker_options
@_DEVICE
@click.option(
    "--resume/--force",
    "resume",
    default=True,
    help="Go on with the sweep in --out (the default), or delete its runs and begin again.",
)
def sweep(
    config: str, out: str | None, workers: int, ray: str | None, device: str, resume: bool, **asked: Any
) -> None:
    """Check every config, train, print the table and where the files are."""
    from koffline.store.run_folders import RECORD
    from koffline.train.sweep import inputs_of, make_plan, run_sweep
    from koffline.train.sweep_summary import print_summary

    plan = make_plan(config, **asked)
    folder = Path("sweeps") / Path(config).stem if out is None else out
    folder = claim(folder, adds=RECORD, reads=None if resume else [config, *inputs_of(plan)])
    try:
        summary = run_sweep(plan, folder, workers, ray, device, not resume, shown_command())
    except KeyboardInterrupt:
        click.echo(f"interrupted; what is trained is in {folder}/runs: the same command goes on", err=True)
        raise SystemExit(130) from None
    print_summary(summary)
    runs = len(plan.settings) * len(plan.seeds)
    click.echo(f"{runs} runs in {folder}/runs; summary {folder}/summary.json")
    if summary.failures:
        first = summary.failures[0]
        click.echo(
            f"error: {len(summary.failures)} of {runs} runs failed, {first.name} first: {first.reason}; see "
            f"{folder}/errors.txt, the same command runs them again",
            err=True,
        )
        raise SystemExit(2)
