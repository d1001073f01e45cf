"""Where results of commands go: paths different from all inputs, reserved until the end; stdout, a report."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from koffline.cli.options import QUIET, Command, Option, added
from koffline.store.run_record import named_in, start_run
from koffline.store.targets import check_apart, check_name, claimed, local_name

if TYPE_CHECKING:
    from koffline.report import Report

# Options whose texts are never file names, even if a file of that name exists.
_NO_FILES = frozenset((
    "--device", "--env", "--estimator", "--format", "--interval",
    "--memory", "--metric", "--only", "--part", "--ray",
))  # fmt: skip
_WORDS = ("uniform", "kloss", "fqe")  # a file of such a name is given as ./uniform


def claim(
    out: str | Path,
    option: str = "--out",
    check: Callable[[Path], object] | None = None,
    adds: str | None = None,
    reads: Iterable[str | Path | None] | None = None,
) -> Path:
    """Check the output path of a command and reserve it until the command ends.

    option: its name. check: a further check of the path, raising KofflineError. adds: the file that marks a
    folder to which results are added; without it ``out`` itself is replaced. reads: the inputs, by default
    all that the command line names. Raises ConfigError before anything is written.
    """
    path = check_name(local_name(str(out)), option, is_whole=adds is None)
    if adds is None or reads is not None:
        check_apart(named_beside(option) if reads is None else reads, out, option)
    if "://" in str(out) and path == Path(out):  # storage elsewhere has no locks
        return path
    if check is not None:
        check(path)
    click.get_current_context().with_resource(claimed(path if adds is None else path / adds))
    return path


def named_beside(option: str) -> Iterator[str]:
    """Yield the files that the running command's parameters may name, other than the one of ``option``.

    Numbers, choices and other texts that are never file names are skipped.
    """
    context = click.get_current_context(silent=True)
    for parameter in context.command.params if context is not None else ():
        names = (*parameter.opts, parameter.human_readable_name)
        is_column = str(parameter.name).startswith("table_") and parameter.name != "table_mapping"
        is_text = isinstance(parameter.type, click.types.StringParamType)
        if not is_text or is_column or option in names or _NO_FILES.intersection(names):
            continue
        assert context is not None
        value = context.params.get(str(parameter.name))
        for word in value if isinstance(value, tuple) else (value,):
            if word and word not in _WORDS:
                yield from named_in(["", word])


@dataclass(frozen=True)
class Result:
    """Output of a command's result: a folder, and JSON or a table on stdout."""

    out: str | None
    force: bool
    as_json: bool
    quiet: bool = False

    def present(
        self, marker: str, title: str, find: Callable[[Any], Any], report: Callable[[Any], Report]
    ) -> None:
        """Claim the folder (identified by ``marker``), compute, write the report with its record, print.

        find: computes the result; its argument is the progress bar named ``title``. A user's policy may print
        while it is imported or called: stdout belongs to the result alone.
        """
        from koffline.ope.results import plain
        from koffline.progress import training_bar
        from koffline.report import check_output_directory

        run = page = None
        if self.out is not None:
            claim(self.out, check=lambda path: check_output_directory(path, self.force, marker))
            run = start_run(str(click.get_current_context().info_name))
        with training_bar(title, self.quiet) as bar, contextlib.redirect_stdout(sys.stderr):
            found = find(bar)
        shown = report(found)
        if run is not None:
            seconds = round(found.seconds, 3)
            record = run.finish(seed=found.seed, settings=plain(found.settings), seconds=seconds)
            page = shown.write(Path(str(self.out)), self.force, record)
        if self.as_json:
            click.echo(found.to_json())
        else:
            shown.print(page)


def result_options(file: str) -> Option:
    """``--out``, ``--force``, ``--json``, ``--quiet``, as ``result: Result``. file: what --out gets."""

    def add(command: Command) -> Command:
        @functools.wraps(command)
        def run(*args: Any, out: str | None, force: bool, as_json: bool, quiet: bool, **options: Any) -> Any:
            return command(*args, result=Result(out, force, as_json, quiet), **options)

        json_text = "Print one JSON object on stdout and nothing else there."
        return added([
            click.option("--out", metavar="DIR", help=f"Write {file}, plots and report.html there."),
            click.option("--force", is_flag=True, help="Replace earlier results in --out."),
            click.option("--json", "as_json", is_flag=True, help=json_text),
            QUIET,
        ])(run)  # fmt: skip

    return add
