"""Where the results of a command go: its own until it ends, and nothing that it reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import click

from koffline.store.run_record import named_in
from koffline.store.targets import check_apart, check_name, claimed, local_name

# Texts that name no files; a file or folder of that name is there by chance.
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
    """The path that a command line names for results: checked, and this command's alone until it ends.

    option: how it was named. check: what else may be wrong with the path, raising KofflineError. adds: the
    file that makes a folder ours where results are added to one; else ``out`` itself gives way. reads: what
    the command reads, by default what its words name. Raises ConfigError before anything is written.
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
    """What the parameters of the command that runs may name besides the target that ``option`` names.

    Numbers, choices and names of other things than files are passed over, whatever lies here by such a name.
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
