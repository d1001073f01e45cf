"""Options that say what the columns of a table are, for every command that reads a log."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import click

from koffline.errors import DataError

_MANY = "--observations", "--action", "--next-observations"
_OPTIONS: tuple[tuple[str, str, str], ...] = (
    ("--observations", "COLUMNS", "Table: columns of the state; 'x_*' takes all that fit, repeatable."),
    ("--action", "COLUMN", "Table: column of the action; several make a vector."),
    ("--reward", "COLUMN", "Table: column of the reward."),
    ("--episode", "COLUMN", "Table: column that tells episodes apart."),
    ("--time", "COLUMN", "Table: column that orders the rows of an episode."),
    ("--terminal", "COLUMN", "Table: column that is true where the world ended."),
    ("--truncated", "COLUMN", "Table: column that is true where recording stopped."),
    ("--behavior-probability", "COLUMN", "Table: probability of the logged action."),
    ("--behavior-log-probability", "COLUMN", "Table: its logarithm."),
    ("--weight", "COLUMN", "Table: weight of the row."),
    ("--next-observations", "COLUMNS", "Table: columns of the next state, if it has them."),
    ("--action-names", "A,B,…", "Table: values of the action in the order of their numbers."),
    ("--impute", "[COLUMN=]METHOD", "Table: replace missing values by zero, mean, forward or a number."),
)
_PREFIX = "table_"


def table_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of a table; the command gets ``mapping``: a TableMapping, or None for no option."""

    @functools.wraps(command)
    def run(*args: Any, **options: Any) -> Any:
        given = {name: options.pop(name) for name in list(options) if name.startswith(_PREFIX)}
        return command(*args, mapping=requested_mapping(given), **options)

    text = "Table: YAML file with these options; what is given here wins."
    run = click.option("--mapping", _PREFIX + "mapping", metavar="FILE", help=text)(run)
    for flag, metavar, text in reversed(_OPTIONS):
        several = flag in (*_MANY, "--impute")
        name = _PREFIX + flag[2:].replace("-", "_")
        run = click.option(flag, name, multiple=several, metavar=metavar, help=text)(run)
    return run


def requested_mapping(given: Mapping[str, Any]) -> Any:
    """The mapping of a file, what is given beside it winning. Raises DataError."""
    said = {name.removeprefix(_PREFIX): value for name, value in given.items() if value not in (None, ())}
    if not said:
        return None
    from pathlib import Path

    from koffline.data.table.mapping import mapping_from_dict
    from koffline.data.table.mapping_file import read_mapping_file

    file = said.pop("mapping", None)
    settled = dict(read_mapping_file(Path(file))) if file is not None else {}
    if "action_names" in said:
        said["action_names"] = [name.strip() for name in said["action_names"].split(",")]
    if "impute" in said:
        said["impute"] = _imputations(said["impute"])
    for one, other in (
        ("behavior_probability", "behavior_log_probability"),
        ("behavior_log_probability", "behavior_probability"),
    ):
        if one in said and other not in said:
            settled.pop(other, None)
    return mapping_from_dict({**settled, **said}, "the mapping" if file is None else f"mapping file {file}")


def _imputations(texts: tuple[str, ...]) -> dict[str, str]:
    """``("mean", "x_3=zero")`` as column to method; the empty column stands for all observations."""
    pairs = {}
    for text in texts:
        column, equals, method = text.rpartition("=")
        if equals and not (column and method):
            raise DataError(f"--impute received '{text}'; write METHOD or COLUMN=METHOD")
        pairs[column] = method
    return pairs
