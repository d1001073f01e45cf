"""``koffline repeat``: a recorded run again, and whether it gives the same bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from koffline.repeat.repeating import Repetition

_HELP = """Run again what made RUN, into another folder, and compare every result byte by byte.

RUN is a folder that evaluate, diagnose, select, train, sweep or online wrote, NAME.json of reproduce, or a
dataset of build. Its record (run.json, NAME.run.json, the manifest) holds the command line, the settings, the
seed, the numbers of threads and the digests of the inputs; an input that has changed ends in one line.
The command line is shown before it runs. A record from someone else may name code: Python modules
(module:name policies and models, module:Name-v0 environments), TorchScript programs, Ray clusters. What it
names is listed and refused until --allow-code is given.

Records, clocks and checkpoints (run.json, time*.csv, checkpoint.pt, checkpoints/, cells/) are no results.
Exit code 0 where all results are the same, and seed, settings and inputs in both records; else 1.

\b
Examples:
  koffline repeat runs/a
  koffline repeat runs/a --out runs/a-again --json
  koffline repeat logs/cartpole.hdf5
  koffline repeat out/reproduce/figure-toy.json
"""


@click.command(help=_HELP, no_args_is_help=True)
@click.argument("run")
@click.option("--out", metavar="DIR", help="A new folder for the repetition; default RUN.repeat.")
@click.option(
    "--allow-code",
    is_flag=True,
    help="Run also the Python modules, TorchScript programs and clusters that the record names.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def repeat(run: str, out: str | None, allow_code: bool, as_json: bool) -> None:
    """Repeat, compare, say it."""
    from koffline.repeat.repeating import repeat_run
    from koffline.targets import check_name

    path = Path(run)
    folder = check_name(path.with_name(f"{path.resolve().name}.repeat") if out is None else out)
    done = repeat_run(path, folder, allow_code, say=lambda line: click.echo(line, err=True))
    if as_json:
        click.echo(json.dumps(_as_json(done), indent=2, ensure_ascii=False))
    else:
        _print(done)
    if not done.is_equal:
        raise SystemExit(1)


def _print(done: Repetition) -> None:
    for remark in done.remarks:
        click.echo(f"note: {remark}", err=True)
    found = done.comparison
    for line in [*done.records, *found.lines()]:
        click.echo(line)
    count = len(found.same)
    files = "1 file" if count == 1 else f"{count} files"
    where = f"{done.run.folder} and {done.out}"
    click.echo(f"the same: {files} of {where}" if done.is_equal else f"not the same: {where}")


def _as_json(done: Repetition) -> dict[str, object]:
    found = done.comparison
    return {
        "equal": done.is_equal,
        "same": list(found.same),
        "different": list(found.different),
        "missing": list(found.missing),
        "new": list(found.new),
        "records": list(done.records),
        "remarks": list(done.remarks),
        "out": str(done.out),
    }
