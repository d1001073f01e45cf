"""``koffline train``: a config file in, a d3rlpy run directory out."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import click

from koffline.errors import printable

_HELP = """Train the algorithm of CONFIG, d3rlpy's or koffline's, over a log.

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


@click.command(help=_HELP, no_args_is_help=True)
@click.argument("config")
@click.option(
    "--set",
    "assignments",
    multiple=True,
    metavar="KEY=VALUE",
    help="One setting, e.g. algo.params.gamma=0.98; wins over the file.",
)
@click.option("--data", metavar="SOURCE", help="The log, instead of data.source.")
@click.option("--out", metavar="DIR", help="Folder of the run; default runs/ and the name of CONFIG.")
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda or cuda:N.")
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
