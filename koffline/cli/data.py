"""``koffline data info | validate | convert``: what is in a log, what is wrong with it, other formats."""

from __future__ import annotations

import json
from functools import partial
from pathlib import PurePath
from typing import Any

import click

from koffline.cli.options import (
    action_space_options,
    pass_options,
    requested_space,
    table_options,
    worker_options,
)
from koffline.cli.targets import claim
from koffline.data.sources import FORMATS, SUFFIXES
from koffline.data.spaces import SpaceRequest
from koffline.errors import DataError
from koffline.jobs.mapping import PassSettings

_LAZY = click.option(
    "--lazy",
    is_flag=True,
    help="Leave the rows on disk and read them by blocks; folders of shards always are.",
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def data() -> None:
    """Look into logs, check them, convert them.

    \b
    SOURCE is a koffline, D4RL or d3rlpy HDF5 file, an NPZ archive, a Parquet, Arrow or CSV table, a folder
    of shards, a Minari folder or minari:<id>; its content decides, not its name (but for CSV).
    Options marked "Table" say what the columns of a table are.
    """


@data.command()
@click.argument("source")
@action_space_options
@table_options
@_LAZY
@pass_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def info(
    source: str,
    discrete: int | None,
    continuous: tuple[float, float] | None,
    mapping: Any,
    lazy: bool,
    as_json: bool,
    **passes: Any,
) -> None:
    """What is in a log: rows, episodes, spaces, returns, time limits, coverage of the actions.

    \b
    Examples:
      koffline data info log.hdf5
      koffline data info minari:D4RL/door/human-v2 --json
      koffline data info buffer.h5 --discrete 4
      koffline data info log.parquet --observations 'x_*' --action a --reward r --episode id --time t
      koffline data info shards/ --workers 8
    """
    from koffline.data.sources import open_transitions
    from koffline.data.summary import print_summary, summarise

    space, settings = requested_space(discrete, continuous), PassSettings(**passes)
    if _stays_on_disk(source, lazy, settings):
        log = open_transitions(source, space, lazy=True, mapping=mapping)
        found = summarise(log, settings, progress=True)
    else:
        found = summarise(open_transitions(source, space, mapping=mapping))
    for reason in found.left_out:
        click.echo(f"left out: {reason}", err=True)
    if as_json:
        click.echo(json.dumps(found.to_json(), default=str))
        return
    print_summary(found)


def _stays_on_disk(source: str, lazy: bool, settings: PassSettings) -> bool:
    """Whether a log is read by blocks: when asked, and where several shards or workers make it worth it."""
    from koffline.data.disk.shards import is_shard_folder

    return lazy or settings != PassSettings() or is_shard_folder(source)


@data.command()
@click.argument("source")
@action_space_options
@table_options
@_LAZY
@worker_options
def validate(
    source: str,
    discrete: int | None,
    continuous: tuple[float, float] | None,
    mapping: Any,
    lazy: bool,
    **passes: Any,
) -> None:
    """What is wrong with a log: all errors at once, then warnings. Exit code 2 on errors, else 0.

    \b
    Examples:
      koffline data validate log.npz
      koffline data validate d4rl.hdf5 --continuous -1 1
      koffline data validate shards/ --ray auto
    """
    from koffline.data.findings import inspect_log
    from koffline.data.sources import open_raw, open_transitions

    space, settings = requested_space(discrete, continuous), PassSettings(**passes)
    if _stays_on_disk(source, lazy, settings):
        log = open_transitions(source, space, lazy=True, mapping=mapping)
        rows, metadata = len(log), log.metadata
        findings = inspect_log(log, settings, progress=True)
    else:
        raw = open_raw(source, space, mapping)
        rows, metadata = len(raw.columns["rewards"]), raw.metadata
        findings = inspect_log(raw)
    for note in metadata.notes:
        click.echo(f"note: {note}")
    for finding in findings:
        click.echo(f"{finding.severity}: {finding.message}", err=finding.severity == "error")
    errors = sum(finding.severity == "error" for finding in findings)
    if errors:
        click.get_current_context().exit(2)
    count = len(findings)
    warnings = "no warnings" if not count else "1 warning" if count == 1 else f"{count} warnings"
    click.echo(f"{source}: {rows} rows, no errors, {warnings}")


@data.command()
@click.argument("source")
@click.argument("target")
@click.option(
    "--format",
    "format_",
    type=click.Choice(FORMATS),
    default=None,
    help="Format; else told by TARGET's name.",
)
@click.option(
    "--shard-rows",
    type=int,
    metavar="N",
    help="Write a folder of shards of at most N rows, for logs larger than memory.",
)
@click.option("--force", is_flag=True, help="Replace TARGET if it exists.")
@action_space_options
@table_options
def convert(
    source: str,
    target: str,
    format_: str | None,
    shard_rows: int | None,
    force: bool,
    discrete: int | None,
    continuous: tuple[float, float] | None,
    mapping: Any,
) -> None:
    """Write a log in another format, whole or not at all.

    \b
    Examples:
      koffline data convert minari:cartpole/mixed-v0 cartpole.hdf5
      koffline data convert cartpole.hdf5 minari:cartpole/copy-v0
      koffline data convert cartpole.hdf5 buffer.h5 --format d3rlpy
      koffline data convert large.hdf5 shards --shard-rows 1000000
      koffline data convert table.csv log.hdf5 --mapping columns.yaml
    """
    from koffline.data.sources import open_transitions, write_transitions
    from koffline.store.files import MINARI, check_target

    is_path = not target.startswith(MINARI)  # folders of Minari's are made when written
    check = partial(check_target, force=force) if is_path else None
    claim(target, "TARGET", check)
    if shard_rows is not None:
        space = requested_space(discrete, continuous)
        _convert_to_shards(source, target, format_, shard_rows, force, space, mapping)
        return
    log = open_transitions(source, requested_space(discrete, continuous), mapping=mapping)
    written = write_transitions(log, target, format_, force)
    for note in log.metadata.notes:
        click.echo(f"note: {note}")
    click.echo(f"{written.target} ({written.format}): {log}")


def _convert_to_shards(
    source: str,
    target: str,
    format_: str | None,
    shard_rows: int,
    force: bool,
    space: SpaceRequest | None,
    mapping: Any,
) -> None:
    from koffline.data.sources import convert_to_shards

    if format_ is not None:
        raise DataError(f"--format {format_} and --shard-rows were both given; shards are HDF5, choose one")
    suffix = PurePath(target).suffix
    if suffix.lower() in SUFFIXES:
        raise DataError(
            f"{target} ends in {suffix} like a file, and --shard-rows writes a folder; name a folder, or "
            "leave --shard-rows out"
        )
    log = convert_to_shards(source, target, shard_rows, force, space, mapping)
    for note in log.metadata.notes:
        click.echo(f"note: {note}")
    click.echo(f"{target} (shards): {log}")
