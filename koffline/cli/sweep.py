"""``koffline sweep``: a config file, a grid and seeds in; runs, a ranked table and a picture out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from koffline.cli.options import worker_options
from koffline.store.run_record import shown_command

_HELP = """Train CONFIG with every combination of the --grid values and several seeds.

Writes DIR/runs/NAME (a run directory each), summary.json, .md and .png (interquartile mean over seeds with a
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


@click.command(help=_HELP, no_args_is_help=True)
@click.argument("config")
@click.option(
    "--grid",
    multiple=True,
    metavar="KEY=A,B,…",
    help="Values of one setting, e.g. algo.params.gamma=0.98,0.99; may be given several times.",
)
@click.option("--seeds", type=int, default=5, show_default=True, help="How many, from train.seed on.")
@click.option(
    "--set",
    "assignments",
    multiple=True,
    metavar="KEY=VALUE",
    help="One setting of all runs, e.g. train.n_steps=5000; wins over the file.",
)
@click.option("--data", metavar="SOURCE", help="The log, instead of data.source.")
@click.option("--out", metavar="DIR", help="Folder of the sweep; default sweeps/ and the name of CONFIG.")
@click.option("--metric", help="What counts: an evaluator or a loss; default the return in an environment.")
@click.option(
    "--maximize/--minimize", default=None, help="Default: errors, losses and distances are minimised."
)
@worker_options
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda or cuda:N.")
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
    from koffline.train.sweep_plan import make_plan

    plan = make_plan(config, **asked)
    # After the plan: what is misspelt is said before torch is loaded.
    from koffline.cli.targets import claim
    from koffline.train.sweep import RECORD, SweepSettings, inputs_of, run_sweep
    from koffline.train.sweep_summary import print_summary

    folder = Path("sweeps") / Path(config).stem if out is None else out
    folder = claim(folder, adds=RECORD, reads=None if resume else [config, *inputs_of(plan)])
    settings = SweepSettings(folder, workers, ray, device, force=not resume, command=shown_command())
    try:
        summary = run_sweep(plan, settings)
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
