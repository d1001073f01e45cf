"""Results of a command: its folder claimed before the work, its report and record written after it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from koffline.cli.targets import claim
from koffline.store.run_record import StartedRun, start_run


def begin(kind: str, out: str | None, force: bool, marker: str) -> StartedRun | None:
    """Claim the folder of the results and begin the record; None where none is asked for. Raises ConfigError.

    marker: the file that makes a folder one of such results.
    """
    if out is None:
        return None
    from koffline.report.folder import check_output_directory

    claim(out, check=lambda path: check_output_directory(path, force, marker))
    return start_run(kind)


def end(
    found: Any,
    run: StartedRun | None,
    as_json: bool,
    write: Callable[[dict[str, Any]], Path],
    show: Callable[[Path | None], None],
) -> None:
    """Write the report where a folder was claimed, then print JSON or a table.

    found: has seed, settings, seconds and to_json. write: the report with this record. show: the table, with
    the report's page.
    """
    from koffline.ope.estimate import plain

    page = None
    if run is not None:
        page = write(
            run.finish(seed=found.seed, settings=plain(found.settings), seconds=round(found.seconds, 3))
        )
    if as_json:
        click.echo(found.to_json())
    else:
        show(page)
