"""``koffline reproduce``: the paper's figures and claims, each by one command."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import click

_HELP = """Reproduce a figure of the paper, the ablation, or the table of its claims.

NAME is figure-toy, figure-puddle, figure-bench, ablation or claims. Writes DIR/NAME.json, .png, .svg, .md and
the curves; a killed run continues where it was.

\b
Examples:
  koffline reproduce figure-toy
  koffline reproduce figure-puddle --quick --out runs/quick
  koffline reproduce claims --workers 2 --out runs/full
  koffline reproduce figure-bench --ray auto
"""


@click.command(help=_HELP, no_args_is_help=True)
@click.argument("name")
@click.option("--quick", is_flag=True, help="A twentieth of the epochs, three seeds: minutes.")
@click.option("--out", metavar="DIR", default="out/reproduce", show_default=True, help="Where results go.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of logs and truths.")
@click.option("--workers", type=int, default=1, show_default=True, help="Processes, one core each.")
@click.option("--ray", metavar="ADDRESS", help="Run the jobs on Ray: local, auto or an address.")
@click.option("--force", is_flag=True, help="Replace results of another scale or seed in --out.")
def reproduce(
    name: str, quick: bool, out: str, seed: int, workers: int, ray: str | None, force: bool
) -> None:
    """Run the experiment, print its table and where the files are."""
    from koffline.experiments.reproduce import Run
    from koffline.experiments.reproduce import reproduce as run_experiment
    from koffline.experiments.settings import Scale

    command = shlex.join(["koffline", *sys.argv[1:]])
    run = Run(name, Path(out), Scale(quick, seed), workers, ray, command, force)
    try:
        results = run_experiment(run)
    except KeyboardInterrupt:
        click.echo(
            f"interrupted; what is finished is in {run.cells_folder}: the same command goes on", err=True
        )
        raise SystemExit(130) from None
    click.echo((run.folder / f"{name}.md").read_text(encoding="utf-8"))
    click.echo(f"{results.seconds:.0f} s; figure {run.folder / name}.png, numbers {run.folder / name}.json")
