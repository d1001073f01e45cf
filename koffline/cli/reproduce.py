"""``koffline reproduce``: the paper's figures and claims, each by one command."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from koffline.cli.options import worker_options
from koffline.experiments import DESCRIPTIONS
from koffline.store.run_record import shown_command

if TYPE_CHECKING:
    from koffline.experiments.mujoco_plan import MujocoRequest

_HELP = """Reproduce a figure of the paper, the ablation, or the table of its claims.

NAME is figure-toy, figure-puddle, figure-bench, ablation, figure-mujoco or claims. Writes DIR/NAME.json,
.png, .svg, .md and the curves; a killed run continues where it was.

figure-mujoco takes many hours: --only and --part choose some of it, and what is finished in DIR is shown
whatever was asked for. Its parts are search, final, noise, paper-search and paper; DIR/cells/*.log tells how
far a run is.

\b
Examples:
  koffline reproduce figure-toy
  koffline reproduce figure-puddle --quick --out runs/quick
  koffline reproduce claims --workers 2 --out runs/full
  koffline reproduce figure-bench --ray auto
  koffline reproduce figure-mujoco --only InvertedPendulum --part final --workers 2
  koffline reproduce figure-mujoco --only Swimmer --part final --steps 400000 --set learning_rate=0.001
"""


@click.command(help=_HELP, no_args_is_help=True)
@click.argument("name", metavar="NAME", type=click.Choice(list(DESCRIPTIONS)))
@click.option("--quick", is_flag=True, help="A twentieth of the epochs, three seeds: minutes.")
@click.option("--out", metavar="DIR", default="out/reproduce", show_default=True, help="Where results go.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of logs and truths.")
@worker_options
@click.option("--force", is_flag=True, help="Replace results of another scale or seed in --out.")
@click.option(
    "--only", metavar="ENVIRONMENT", multiple=True, help="figure-mujoco: one of its six; repeatable."
)
@click.option("--part", metavar="PART", multiple=True, help="figure-mujoco: one of its parts.")
@click.option("--steps", type=int, help="figure-mujoco: environment steps of a run that is no search.")
@click.option("--seed-count", type=int, help="figure-mujoco: seeds of a run that is no search.  [default: 6]")
@click.option("--set", "changes", metavar="KEY=VALUE", multiple=True, help="figure-mujoco: of every run.")
def reproduce(
    name: str,
    quick: bool,
    out: str,
    seed: int,
    workers: int,
    ray: str | None,
    force: bool,
    only: tuple[str, ...],
    part: tuple[str, ...],
    steps: int | None,
    seed_count: int | None,
    changes: tuple[str, ...],
) -> None:
    """Run the experiment, print its table and where the files are."""
    from koffline.experiments.cells import Scale
    from koffline.experiments.reproduce import Run
    from koffline.experiments.reproduce import reproduce as run_experiment
    from koffline.store.targets import check_name

    mujoco = _mujoco_request(only, part, steps, seed_count, changes, quick)
    folder = check_name(out, is_whole=False)
    run = Run(name, folder, Scale(quick, seed), workers, ray, shown_command(), force, mujoco)
    try:
        results = run_experiment(run)
    except KeyboardInterrupt:
        click.echo(
            f"interrupted; what is finished is in {run.cells_folder}: the same command goes on", err=True
        )
        raise SystemExit(130) from None
    click.echo((run.folder / f"{name}.md").read_text(encoding="utf-8"))
    click.echo(f"{results.seconds:.0f} s; figure {run.folder / name}.png, numbers {run.folder / name}.json")


def _mujoco_request(
    only: tuple[str, ...],
    parts: tuple[str, ...],
    steps: int | None,
    seed_count: int | None,
    changes: tuple[str, ...],
    quick: bool,
) -> MujocoRequest | None:
    """None where nothing was chosen. Raises ConfigError."""
    if not (only or parts or changes) and steps is None and seed_count is None:
        return None
    from koffline.experiments.mujoco_plan import BUDGETS, PARTS, MujocoRequest, as_setting, read_changes

    setting = as_setting(read_changes(changes))
    return MujocoRequest(only or tuple(BUDGETS), parts or PARTS, steps, seed_count, setting, quick)
