"""Options that several commands share: columns of a table, actions, how a log is read, where work runs."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from koffline.data.spaces import Bounds, Discrete, SpaceRequest
from koffline.errors import DataError
from koffline.ope.stream_settings import DEFAULT_MEMORY, StreamSettings

if TYPE_CHECKING:
    from koffline.data.disk.log import LazyTransitions
    from koffline.data.transitions import Transitions

Command = TypeVar("Command", bound=Callable[..., Any])

_WORKERS = "Processes, one core each."
_RAY = "Run on Ray: local, auto or an address."
_SKIP = "Leave out shards that cannot be read, and name them."
_LAZY = "Implies --lazy."  # a pass over shards is asked for

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


def action_space_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --discrete N and --continuous LOW HIGH; read them with ``requested_space``."""
    command = click.option(
        "--continuous",
        nargs=2,
        type=float,
        default=None,
        metavar="LOW HIGH",
        help="Declare continuous actions within these bounds.",
    )(command)
    return click.option(
        "--discrete", type=int, default=None, metavar="N", help="Declare the N discrete actions 0 … N − 1."
    )(command)


def requested_space(discrete: int | None, continuous: tuple[float, float] | None) -> SpaceRequest | None:
    """The space asked for on the command line, if any. Raises DataError for both at once."""
    if discrete is not None and continuous is not None:
        raise DataError("--discrete and --continuous were both given; choose one")
    if discrete is not None:
        return Discrete(discrete)
    return Bounds(*continuous) if continuous is not None else None


def settings_options(command: Command) -> Command:
    """``--initial-states``, ``--config``, ``--set`` (the parameter ``assignments``) and ``--threads``."""
    for option in (
        click.option("--threads", type=int, help="Threads of this process; default 1."),
        click.option(
            "--set", "assignments", multiple=True, metavar="KEY=VALUE", help="One setting, e.g. steps=2000."
        ),
        click.option(
            "--config", metavar="FILE", help="YAML file of settings (see --set); options here win over it."
        ),
        click.option(
            "--initial-states", metavar="FILE", help="Start states (.npy, .npz or a log), not the log's."
        ),
    ):
        command = option(command)
    return command


def result_options(file: str) -> Callable[[Command], Command]:
    """``--out``, ``--force`` and ``--json`` (the parameter ``as_json``). file: what is written into --out."""

    def add(command: Command) -> Command:
        text = "Print one JSON object on stdout and nothing else there."
        command = click.option("--json", "as_json", is_flag=True, help=text)(command)
        command = click.option("--force", is_flag=True, help="Replace earlier results in --out.")(command)
        about = f"Write {file}, plots and report.html there."
        return click.option("--out", metavar="DIR", help=about)(command)

    return add


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
    from koffline.data.table.mapping import mapping_from_dict, read_mapping_file

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


def worker_options(command: Command) -> Command:
    """``--workers N`` and ``--ray ADDRESS``: the parameters ``workers: int`` and ``ray: str | None``."""
    return _workers_and_ray(command, _WORKERS, _RAY)


def pass_options(command: Command) -> Command:
    """`worker_options`, and ``--skip-bad-shards``: the parameter ``skip_bad_shards: bool``.

    For commands that leave the log on disk where one of them is given.
    """
    command = click.option("--skip-bad-shards", is_flag=True, help=f"{_SKIP} {_LAZY}")(command)
    workers = f"{_WORKERS} More than one: {_LAZY[0].lower()}{_LAZY[1:]}"
    return _workers_and_ray(command, workers, f"{_RAY} {_LAZY}")


def _workers_and_ray(command: Command, workers: str, ray: str) -> Command:
    command = click.option("--ray", metavar="ADDRESS", help=ray)(command)
    return click.option("--workers", type=int, default=1, show_default=True, help=workers)(command)


@dataclass(frozen=True)
class Reading:
    """How DATA is to be read. ``lazy``: left on disk as long as it is not needed; ``stream``: by what."""

    lazy: bool
    stream: StreamSettings


def reading_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """``--lazy``, ``--memory`` and those of `pass_options`; the command gets ``reading``."""

    @click.option("--lazy", is_flag=True, help="Leave the log on disk; the result is the same.")
    @click.option(
        "--memory", metavar="SIZE", help=f"What a process may hold; default {DEFAULT_MEMORY}. Implies --lazy."
    )
    @pass_options
    @functools.wraps(command)
    def run(
        *args: Any,
        lazy: bool,
        memory: str | None,
        workers: int,
        ray: str | None,
        skip_bad_shards: bool,
        **options: Any,
    ) -> Any:
        out = Path(options.get("out") or "")
        partial = out.absolute().with_name(f".{out.name}.partial") if out.name else None
        stream = StreamSettings(memory or DEFAULT_MEMORY, workers, ray, skip_bad_shards, partial)
        asked = lazy or workers > 1 or skip_bad_shards or memory is not None or ray is not None
        found = command(*args, reading=Reading(asked, stream), **options)
        if partial is not None:
            shutil.rmtree(partial, ignore_errors=True)
        return found

    return run


def open_for_reading(
    source: str, space: SpaceRequest | None, mapping: Any, reading: Reading
) -> Transitions | LazyTransitions:
    """The log, in memory or on disk: shards are left there, whatever was asked. Raises DataError."""
    from koffline.data.disk.shards import is_shard_folder
    from koffline.data.sources import open_transitions

    if reading.lazy or (mapping is None and is_shard_folder(source)):
        return open_transitions(source, space, lazy=True, mapping=mapping)
    return open_transitions(source, space, mapping=mapping)
