"""``koffline improve``: from a log to a better policy with a certificate."""

from __future__ import annotations

import shlex
from typing import Any

import click

from koffline.cli.options import (
    INSIDE,
    Log,
    LogCommand,
    cores_options,
    gamma_option,
    log_options,
    set_option,
    whole,
)
from koffline.cli.output import say
from koffline.cli.targets import Result, result_options
from koffline.errors import ConfigError


@click.command(cls=LogCommand, no_args_is_help=True)
@gamma_option()
@click.option(
    "--level",
    type=INSIDE,
    default=0.95,
    show_default=True,
    metavar="NUMBER",
    help="Of the lower ends of all finalists together.",
)
@whole("--seed", 0, default=0, help="Seed of everything random; default 0.")
@click.option("--budget", metavar="TIME", help="Time for the search: 10m, 1h.")
@click.option(
    "--by", metavar="COLUMN", help="Also the value of groups of start states."
)
@click.option(
    "--constraint",
    metavar="'COLUMN <= X'",
    help="A second return of the table, certified to be at most X.",
)
@click.option("--resume", is_flag=True, help="Go on with an interrupted search.")
@cores_options
@set_option("One setting, e.g. finalists=2.")
@result_options("improvement.json")
@log_options("data", with_workers=False)
def improve(
    log: Log,
    level: float,
    budget: str | None,
    by: str | None,
    constraint: str | None,
    resume: bool,
    assignments: tuple[str, ...],
    result: Result,
    **options: Any,
) -> None:
    """Find a policy that is certified to be worth more than the one that wrote the log
    DATA, or say why to keep that one.

    Policies learn from one part of the log, are chosen on another, and certified on a
    third; small one-step logs do so in five folds. A policy that is truly worse is
    recommended with a probability of at most 1 − level. DIR gets policy.npz (for
    koffline evaluate), policy.pt, policy.onnx, report.html, model_card.md,
    improvement.json and run.json.

    \b
    Examples:
      koffline improve log.hdf5 --gamma 0.99 --out runs/better
      koffline improve log.parquet --mapping columns.yaml --gamma 0.95 --by segment --out runs/better
      koffline improve log.hdf5 --gamma 0.99 --budget 10m --cores 4 --out runs/better
      koffline improve log.csv --mapping columns.yaml --gamma 0.9 --constraint 'cost <= 2.5' --out runs/safe
      koffline improve log.hdf5 --gamma 0.99 --out runs/better --resume
    """
    from koffline.config import parse_assignments
    from koffline.improvement.settings import make_improve_settings, seconds_of

    settings = make_improve_settings(parse_assignments(assignments))
    seconds_of(budget)
    if resume and result.out is None:
        raise ConfigError("--resume goes on beside --out; name the folder with --out")
    # after the checks: it imports torch
    from koffline.improvement.procedure import search_better
    from koffline.improvement.work import is_kept, work_folder, work_place
    from koffline.report.improvement import report_improvement

    source: Any = log.source
    if log.stays_on_disk:
        source = log.open()
    if result.out is not None and not resume and is_kept(result.out):
        say(
            f"note: {work_place(result.out)} holds what an earlier search has done;"
            " this one begins anew (with --resume it would go on)",
            err=True,
        )
    try:
        with work_folder(result.out, resume) as folder:

            def find(bar: Any) -> Any:
                return search_better(
                    source,
                    folder,
                    action_space=log.space,
                    mapping=log.mapping,
                    level=level,
                    budget=budget,
                    by=by,
                    constraint=constraint,
                    resume=resume,
                    settings=settings,
                    stream=log.stream,
                    progress=bar,
                    **options,
                )

            result.present(f"improving on {log.source}", find, report_improvement)
    except KeyboardInterrupt:
        if result.out is None:
            raise
        where = shlex.quote(result.out)
        say(
            f"interrupted; what is done is kept beside {where}: the same command with"
            " --resume goes on",
            err=True,
        )
        raise SystemExit(130) from None
