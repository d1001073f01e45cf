"""Where results of commands go: paths that differ from all inputs; stdout, a report."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from koffline.cli.options import QUIET, Command, Option, added
from koffline.cli.output import say
from koffline.errors import ConfigError, KofflineError
from koffline.store import check_apart
from koffline.store.files import MINARI, check_target, minari_folder, probe_place
from koffline.store.run_record import check_results, named_in, now, start_run
from koffline.untrusted.user_code import current_folder

if TYPE_CHECKING:
    from koffline.report import Report

# Parameters that name what a command reads.
_INPUTS = (
    "data",
    "source",
    "config",
    "policy",
    "policies",
    "specs",
    "model",
    "model_path",
    "trained_on",
    "truth",
    "initial_states",
    "table_mapping",
    "assignments",
    "grid",
)
_WORDS = ("uniform", "kloss", "fqe")  # a file of such a name is given as ./uniform
OptionText = str | None  # text of an option that may be left out


def claim(
    out: str | Path,
    option: str = "--out",
    is_whole: bool = True,
    inputs: Iterable[str | Path] | None = None,
) -> Path:
    """Check the output path of a command before its work. Raises ConfigError.

    option: the option's name, for messages. is_whole: the path will be replaced;
    otherwise files are added to it. inputs: inputs that must not be overwritten;
    default: all inputs named on the command line, if the path will be replaced.
    """
    text = str(out).removeprefix("file://")
    if not text.strip():
        raise ConfigError(f"{option} is empty; name a file or a folder")
    if text.startswith(MINARI):
        path = minari_folder(text)
    else:
        path = Path(text)
    try:
        place = path.resolve()
        if not is_whole and path.is_file():
            raise ConfigError(f"{option} {out} is a file; name a folder")
        here = current_folder()
        if is_whole and here is not None and place in (Path(here), *Path(here).parents):
            raise ConfigError(
                f"{option} {out} is the current folder or holds it; name another one"
            )
        probe_place(place, is_whole)
    except (OSError, ValueError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise ConfigError(
            f"{option} {out} cannot be written ({reason}); choose another place"
        ) from None
    if inputs is None and is_whole:
        inputs = _named_inputs()
    check_apart(inputs or (), out, option)
    return path


def claim_log(
    out: str,
    format_: str | None,
    shard_rows: int | None,
    force: bool,
    option: str = "--out",
) -> tuple[Path, str]:
    """Check before a command's work where it writes a log; return the path, and the
    format or "shards".

    Raises ConfigError, and DataError if the log would replace something else, or needs
    --force.
    """
    from koffline.data.kinds import OWN_FILES
    from koffline.data.sources import target_format

    place = claim(out, option)
    if shard_rows is not None and (format_ is not None or out.startswith(MINARI)):
        other = f"{option} {out}"
        if format_ is not None:
            other = f"--format {format_}"
        raise ConfigError(
            f"{other} and --shard-rows were both given; shards are HDF5 files,"
            " choose one"
        )
    if shard_rows is not None:
        form = "shards"
    else:
        form = target_format(out, format_)
    # Minari creates its folders when writing
    if os.path.lexists(place) or not out.startswith(MINARI):
        check_target(place, force, OWN_FILES.get(form))
    return place, form


def _named_inputs() -> Iterator[str]:
    """All names in the running command's parameters that may be input files."""
    parameters = click.get_current_context().params
    for value in map(parameters.get, _INPUTS):
        words = (value,)
        if isinstance(value, tuple):
            words = value
        yield from named_in(word for word in words if word and word not in _WORDS)


@contextlib.contextmanager
def long_part(kept: Path, if_kept: str, if_nothing: str) -> Iterator[None]:
    """Context for the long part of a command. Ctrl-C ends it with exit code 130 and a
    line on what is kept.

    kept: the file or folder that holds it, if there was time to write it. if_kept: says
    where it is and how to go on. if_nothing: says how to go on if nothing is kept.

    Environments and loggers may print, so stdout is redirected: it is for the result
    only.
    """
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except KeyboardInterrupt:
        if kept.is_dir():
            is_kept = any(kept.iterdir())
        else:
            is_kept = kept.exists()
        advice = if_nothing
        if is_kept:
            advice = if_kept
        say(f"interrupted; {advice}", err=True)
        raise SystemExit(130) from None


@dataclass(frozen=True)
class Result:
    """Where a command's result goes: a folder, and JSON or a table on stdout."""

    out: str | None
    force: bool
    as_json: bool
    quiet: bool = False

    def present(
        self, title: str, find: Callable[[Any], Any], report: Callable[[Any], Report]
    ) -> None:
        """Compute the result, write the report with its record, and print.

        find: computes the result; its argument is the progress bar named ``title``. A
        user's policy may print when it is imported or called, so stdout is redirected
        meanwhile: it is for the result only.
        """
        from koffline.ope.results import plain
        from koffline.progress import progress_bar

        run = None
        page = None
        if self.out is not None:
            run = start_run(str(click.get_current_context().info_name))
        with (
            progress_bar(title, None, not self.quiet) as bar,
            contextlib.redirect_stdout(sys.stderr),
        ):
            answer = find(bar)
        shown = report(answer)
        problem: KofflineError | OSError | None = None
        if run is not None:
            run |= {
                "seed": answer.seed,
                "settings": plain(answer.settings),
                "seconds": round(answer.seconds, 3),
            }
            try:
                page = shown.write(
                    Path(str(self.out)), self.force, {**run, "finished": now()}
                )
            except (KofflineError, OSError) as error:
                problem = error  # a full disk, say; the answer is printed still
        if self.as_json:
            say(answer.to_json())
        else:
            shown.print(page)
        if problem is not None:
            raise problem


def result_options(file: str) -> Option:
    """``--out``, ``--force``, ``--json``, ``--quiet`` as ``result: Result``. file:
    result file in --out.
    """

    def add(command: Command) -> Command:
        @functools.wraps(command)
        def run(
            *args: Any,
            out: str | None,
            force: bool,
            as_json: bool,
            quiet: bool,
            **options: Any,
        ) -> Any:
            if out is not None:
                place = claim(out)
                missing = [folder for folder in place.parents if not folder.exists()]
                check_results(place, force, file)
                # remove them; they are made again for the result
                with contextlib.suppress(OSError):
                    for folder in missing:
                        folder.rmdir()
            return command(*args, result=Result(out, force, as_json, quiet), **options)

        return added(
            [
                click.option(
                    "--out",
                    metavar="DIR",
                    help=f"Write {file}, plots and report.html there.",
                ),
                click.option(
                    "--force", is_flag=True, help="Replace earlier results in --out."
                ),
                click.option(
                    "--json",
                    "as_json",
                    is_flag=True,
                    help="Print only one JSON object on stdout.",
                ),
                QUIET,
            ]
        )(run)

    return add
