"""Output paths of commands: reserved until the command ends, and different from its inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import click

from koffline.store.run_record import named_in
from koffline.store.targets import check_apart, check_name, claimed, local_name

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
