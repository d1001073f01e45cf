"""``koffline reproduce``: figures of the paper, and the table of its claims."""

from __future__ import annotations

from functools import partial
from typing import Any

import click

from koffline.cli.options import SEED, worker_options
from koffline.cli.targets import claim
from koffline.errors import ConfigError
from koffline.experiments import ENVIRONMENTS, NAMES, PARTS
from koffline.store.run_record import shown_command

_of_mujoco = partial(click.option, help="Of figure-mujoco; see above.")


@click.command(no_args_is_help=True)
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
    """Reproduce a figure of the paper, the ablation, or the table of its claims.

    NAME is figure-toy, figure-puddle, figure-bench, ablation, memory, figure-mujoco or claims. Writes
    DIR/NAME.json, .png, .svg, .md and the curves; a killed run continues where it was.

    figure-mujoco takes many hours: --only and --part choose environments and parts of it (search, final,
    noise, paper-search, paper), and what is finished in DIR is shown whatever was asked for.

    \b
    Examples:
      koffline reproduce figure-toy
      koffline reproduce figure-puddle --quick --out runs/quick
      koffline reproduce claims --workers 2 --out runs/full
      koffline reproduce figure-bench --ray auto
      koffline reproduce figure-mujoco --only InvertedPendulum --part final --workers 2
    """
    chosen = {option: value for option, value in chosen.items() if value}
    if chosen and name != "figure-mujoco":
        raise ConfigError(f"{name} has no environments or parts to choose; only figure-mujoco has")
    from koffline.experiments.cells import Run, Scale
    from koffline.experiments.reproduce import reproduce as run_experiment

    folder = claim(out, is_whole=False)
    run = Run(name, folder, Scale(quick, seed), workers, ray, shown_command(), force, **chosen)
    try:
        results = run_experiment(run)
    except KeyboardInterrupt:
        message = f"interrupted; what is finished is in {run.cells_folder}: the same command goes on"
        click.echo(message, err=True)
        raise SystemExit(130) from None
    click.echo((run.folder / f"{name}.md").read_text(encoding="utf-8"))
    click.echo(f"{results.seconds:.0f} s; figure {run.folder / name}.png, numbers {run.folder / name}.json")
