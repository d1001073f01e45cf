"""Options that several commands share: a log and how to read it, settings, where work
runs.
"""

from __future__ import annotations

import functools
import glob
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from koffline.cli.completion import complete_tools
from koffline.data.spaces import SpaceRequest, requested_space
from koffline.errors import ConfigError, DataError
from koffline.jobs import AUTOMATIC, PassSettings
from koffline.ope.stream_settings import DEFAULT_MEMORY, StreamSettings, remove_saved
from koffline.store.files import MINARI
from koffline.untrusted.limits import one_line_errors

Command = Callable[..., Any]
Option = Callable[[Command], Command]
_PREFIX = "table_"  # of parameters about tables
INSIDE = click.FloatRange(0.0, 1.0, min_open=True, max_open=True)
_OF_LARGE_LOGS = ("sample_rows", "memory", "workers", "ray")


class LogCommand(click.Command):
    """A command that reads a log: its help has headings for large logs and for
    tables.
    """

    def format_options(
        self, ctx: click.Context, formatter: click.HelpFormatter
    ) -> None:
        """Write the options, the most useful first."""
        sections: dict[str, list[tuple[str, str]]] = {
            "Options": [],
            "Large logs": [],
            "Tables": [],
        }
        for parameter in self.get_params(ctx):
            heading = "Options"
            if str(parameter.name).startswith(_PREFIX):
                heading = "Tables"
            elif parameter.name in _OF_LARGE_LOGS:
                heading = "Large logs"
            if isinstance(parameter, click.Option):
                record = parameter.get_help_record(ctx)
                if record:
                    sections[heading].append(record)
        for heading, records in sections.items():
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)


def added(options: Sequence[Any]) -> Option:
    """Combine options into one decorator, in the order of the help."""
    return lambda command: functools.reduce(
        lambda inner, option: option(inner), reversed(options), command
    )


def known_name(estimator: str) -> str:
    """The name of an estimator; one given as package.module:name is imported.

    Raises ConfigError if it is no estimator, PolicyError if it cannot be imported.
    """
    if ":" not in estimator:
        return estimator
    from koffline.ope.estimators.registry import name_of

    return name_of(estimator)


def whole(flag: str, least: int = 1, **attributes: Any) -> Option:
    """An option for a whole number of at least ``least``."""
    return click.option(
        flag, type=click.IntRange(least), **{"metavar": "INTEGER", **attributes}
    )


def gamma_option(
    text: str = "Discount factor; default: the log's. May be near 1 if episodes end.",
    **attributes: Any,
) -> Option:
    """``--gamma``, strictly between 0 and 1."""
    return click.option(
        "--gamma", type=INSIDE, metavar="NUMBER", help=text, **attributes
    )


def set_option(text: str, **attributes: Any) -> Option:
    """``--set KEY=VALUE``, the parameter ``assignments``."""
    return click.option(
        "--set",
        "assignments",
        multiple=True,
        metavar="KEY=VALUE",
        help=text,
        **attributes,
    )


QUIET = click.option("--quiet", is_flag=True, help="No progress messages on stderr.")
SEED = whole(
    "--seed", 0, default=0, show_default=True, help="Seed of everything random."
)
_RAY = click.option(
    "--ray", metavar="ADDRESS", help="Run on Ray: local, auto or an address."
)
_CORES: Any = {
    "help": "Processes, one core each.",
    "callback": lambda _, __, n: PassSettings(n).workers,
}
WORKERS = whole("--workers", default=1, show_default=True, **_CORES)


def _count_of_cores(
    ctx: click.Context, param: click.Parameter, text: str | None
) -> int | str | None:
    """A number of cores from its text, or auto."""
    if text is None or text == AUTOMATIC:
        return text
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise click.BadParameter(f"'{text}' is no number of cores; give 1, 2 … or auto")
    return int(text)


_OLD_CORES = ("threads", "workers")  # options that --cores replaces


def cores_options(command: Command) -> Command:
    """``--cores N|auto``, and its older names; the command gets ``cores: int | None``
    and ``ray: str | None``.
    """

    @functools.wraps(command)
    def run(*, cores: int | str | None, **options: Any) -> Any:
        older = {name: options.pop(name) for name in _OLD_CORES}
        older = {name: count for name, count in older.items() if count is not None}
        PassSettings(older.get("workers", 1))  # refuses far more than there are
        for name, count in older.items():
            click.echo(
                f"note: --{name} is an older name of --cores; write --cores {count}",
                err=True,
            )
        if cores is None and older:
            cores = max(older.values())
        if cores == AUTOMATIC:
            cores = None
        return command(cores=cores, **options)

    choices: list[Option] = [
        click.option(
            "--cores",
            callback=_count_of_cores,
            metavar="N|auto",
            help="Cores that compute; default auto: those that are free.",
        ),
        _RAY,
    ]
    for name in _OLD_CORES:
        choices.append(whole(f"--{name}", hidden=True))
    return added(choices)(run)


_SETTINGS = (
    (
        "--initial-states",
        "FILE",
        "Start states (.npy, .npz or a log) instead of DATA's.",
    ),
    ("--config", "FILE", "YAML file of settings (see --set); options override it."),
)
_TABLE = (
    (
        "--observations",
        "COLUMNS",
        "Columns of the state; 'x_*' takes all whose names fit; repeatable.",
    ),
    ("--action", "COLUMN", "Column of the action; several make a vector."),
    ("--reward", "COLUMN", "Column of the reward, or a formula: 'spend - 0.1 * cost'."),
    ("--episode", "COLUMN", "Column that tells episodes apart."),
    (
        "--starts",
        "COLUMN",
        "Column, true in the first row of every episode, if no column has ids.",
    ),
    ("--time", "COLUMN", "Column that orders the rows of an episode."),
    (
        "--time-format",
        "FORM",
        "How texts of times are written, as in '%d/%m/%Y %H:%M'.",
    ),
    (
        "--time-zone",
        "ZONE",
        "Zone of times without a UTC offset, as in Europe/Berlin.",
    ),
    (
        "--terminal",
        "COLUMN",
        "Column, true where an episode really ended; or a formula: status == 'died'.",
    ),
    (
        "--truncated",
        "COLUMN",
        "Column, true where only the recording stopped; or a formula.",
    ),
    (
        "--last-row",
        "terminal|cut",
        "What last rows without a flag are: terminal (the episode ended) or cut.",
    ),
    (
        "--final-state",
        "yes|no",
        "Whether last rows hold the final state alone, with a dummy action.",
    ),
    (
        "--no-action",
        "A,B,…",
        "Values of the action that mean that none was taken.",
    ),
    (
        "--reward-row",
        "previous|drop",
        "A reward without an action is the row's above, or does not count.",
    ),
    (
        "--drop-duplicates",
        "exact|first|last",
        "Of rows at one time keep: one if equal, the first, the last.",
    ),
    ("--behavior-probability", "COLUMN", "Probability of the logged action."),
    ("--behavior-log-probability", "COLUMN", "Logarithm of that probability."),
    ("--weight", "COLUMN", "Weight of the row."),
    ("--cluster", "COLUMN", "Column of what several episodes share, such as a user."),
    (
        "--action-mask",
        "COLUMNS",
        "Available actions: a column of 0 and 1 for each, or one of lists.",
    ),
    (
        "--next-action-mask",
        "COLUMNS",
        "Those of the next state, if the table has them.",
    ),
    (
        "--next-observations",
        "COLUMNS",
        "Columns of the next state, if the table has them.",
    ),
    (
        "--action-names",
        "A,B,…",
        "Values of the action, in the order of a policy's outputs.",
    ),
    (
        "--encode",
        "COLUMN=HOW",
        "Turn categories into numbers: one-hot, ordinal, ordinal:s,m,l; repeatable.",
    ),
    (
        "--impute",
        "[COLUMN=]HOW",
        "Fill missing values: zero, mean, forward, a number; or cut the episode.",
    ),
    ("--mapping", "FILE", "YAML file with these options; options override it."),
)
_SEVERAL = ("--observations", "--action", "--next-observations", "--impute", "--encode")
_COMMA = "Read the text 1,5 as the number 1.5."
_ONE_STEP = "Each row is an episode (any log); or all rows are one episode (tables)."
_LOW_HIGH = "Actions are continuous, within these bounds."


def _named(rows: Sequence[tuple[str, str, str]], prefix: str = "") -> list[Option]:
    """Text options from rows of flag, metavar and help."""
    return [
        click.option(
            flag,
            prefix + flag[2:].replace("-", "_"),
            multiple=flag in _SEVERAL,
            metavar=metavar,
            help=text,
        )
        for flag, metavar, text in rows
    ]


def settings_options(command: Command) -> Command:
    """``--initial-states``, ``--config`` and ``--set``; the command gets ``settings``.

    ``settings`` holds all settings that the user gave, also those with an option of their own.
    Options override --set, and --set overrides the file. They are checked before a
    large log is read; gamma may still come from the log.
    """

    @functools.wraps(command)
    def run(
        *args: Any, config: str | None, assignments: tuple[str, ...], **options: Any
    ) -> Any:
        from koffline.config import (
            ANY_GAMMA,
            EvaluationSettings,
            make_settings,
            parse_assignments,
            read_yaml,
        )
        from koffline.ope.names import AUTO, DEFAULT, having

        written = {}
        if config is not None:
            written = read_yaml(config)
        typed = parse_assignments(assignments)
        for name in EvaluationSettings.model_fields:
            value = options.pop(name, None)
            if value is not None:
                typed[name] = value
        with one_line_errors(
            f"config file {config}", "a setting in it is wrong", "mend it", ConfigError
        ):
            # what the file alone settles, without what the command line overrides
            of_file = make_settings(
                {"gamma": ANY_GAMMA}, {**written, **dict.fromkeys(typed)}
            )
            names = map(str.strip, of_file.estimator.split(","))
            having(
                DEFAULT,
                [known_name(name) for name in names if name not in ("", "all", AUTO)],
            )
            having(of_file.interval)
        make_settings({"gamma": ANY_GAMMA}, typed)
        settings = {
            name: value
            for name, value in {**written, **typed}.items()
            if value is not None
        }
        return command(*args, settings=settings, **options)

    return added([*_named(_SETTINGS), set_option("One setting, e.g. steps=2000.")])(run)


_LOG = (
    click.option(
        "--discrete", type=int, metavar="N", help="Actions are discrete, 0 … N − 1."
    ),
    click.option(
        "--continuous", nargs=2, type=float, metavar="LOW HIGH", help=_LOW_HIGH
    ),
    *_named(_TABLE, _PREFIX),
    click.option(
        "--decimal-comma",
        f"{_PREFIX}decimal_comma",
        is_flag=True,
        default=None,
        help=_COMMA,
    ),
    click.option(
        "--one-step/--one-record", f"{_PREFIX}one_step", default=None, help=_ONE_STEP
    ),
)


_TOOL = f"{_PREFIX}format"
_FORMAT = click.option(
    "--format",
    _TOOL,
    metavar="NAME",
    shell_complete=complete_tools,
    help="The tool that wrote the table (rllib, robomimic, …), as of data inspect.",
)


def worker_options(command: Command) -> Command:
    """``--workers N`` and ``--ray ADDRESS``: the parameters ``workers: int`` and ``ray:
    str | None``.
    """
    return WORKERS(_RAY(command))


_MEMORY = (
    "--memory",
    "SIZE",
    f"Memory for rows read at once; default {DEFAULT_MEMORY}.",
)
# older commands have it
_ON_DISK = click.option("--lazy", is_flag=True, expose_value=False, hidden=True)
_READING = (_ON_DISK, *_named([_MEMORY]))


@dataclass(frozen=True)
class Log:
    """A log as named on the command line, and how to read it."""

    source: str
    space: SpaceRequest | None
    mapping: Any
    stream: StreamSettings

    @property
    def stays_on_disk(self) -> bool:
        """Whether the log is read in blocks from disk, as folders of shards are."""
        from koffline.data.kinds import is_shard_folder

        return self.mapping is None and is_shard_folder(self.source)

    def open(self, lazy: Any = None) -> Any:
        """Open the transitions, in memory or on disk. Raises DataError."""
        from koffline.data.sources import open_transitions

        if lazy is None:
            lazy = self.stays_on_disk
        return open_transitions(
            self.source, self.space, lazy=lazy, mapping=self.mapping
        )

    def open_by(self, by: str | None) -> tuple[Any, Any]:
        """Open the transitions, and groups of episodes by a column or a feature.

        Raises DataError.
        """
        by = by or getattr(self.mapping, "by", None)
        if by is None or not hasattr(self.mapping, "by"):
            return self.open(), by
        from koffline.data.sources import open_labelled

        return open_labelled(self.source, self.space, self.mapping, by)


def _taken_reading(options: dict[str, Any]) -> dict[str, Any]:
    """What options say on how a large log is read, by the fields of `StreamSettings`;
    these are removed from ``options``.
    """
    reading = {}
    for name in ("memory", "workers", "ray"):
        value = options.pop(name, None)
        if value is not None:
            reading[name] = value
    return reading


def _folder_of_sums(result: Any) -> Path | None:
    """The hidden folder beside the output in which a killed run leaves its sums; None
    without an output. result: the command's options of that name, if it has them.
    """
    out = Path(getattr(result, "out", None) or "")
    if not out.name:
        return None
    return out.absolute().with_name(f".{out.name}.partial")


def log_options(
    argument: str,
    in_parts: bool = True,
    with_workers: bool = True,
    with_format: bool = True,
) -> Option:
    """Decorator for the log's argument and options; the command gets ``log: Log``.

    in_parts: there are also options for how a large log is read in parts. with_workers:
    among them ``--workers`` and ``--ray``; a command with `cores_options` has its own.
    with_format: ``--format`` names the tool that wrote the log.
    """

    def add(command: Command) -> Command:
        """The command with ``log`` in place of the options that describe it."""

        @functools.wraps(command)
        def run(*args: Any, **options: Any) -> Any:
            of_table = {
                name: options.pop(name)
                for name in list(options)
                if name.startswith(_PREFIX)
            }
            space = requested_space(options.pop("discrete"), options.pop("continuous"))
            partial = _folder_of_sums(options.get("result"))
            stream = StreamSettings(**_taken_reading(options), partial=partial)
            source = options.pop(argument)
            tool = of_table.pop(_TOOL, None)
            if tool is not None:
                from koffline.data.table.tools import check_name

                check_name(tool)
            mapping = requested_mapping(of_table, is_complete=tool is None)
            check_source(source)
            if tool is not None:
                from koffline.data.table.by_tool import mapping_of_tool

                mapping = mapping_of_tool(source, tool, mapping)
            log = Log(source, space, mapping, stream)
            result = command(*args, log=log, **options)
            if partial is not None and partial.is_dir():
                remove_saved(partial)
            return result

        choices = [*_LOG]
        if with_format:
            choices.append(_FORMAT)
        if in_parts:
            choices += _READING
        if in_parts and with_workers:
            choices.append(worker_options)
        return click.argument(argument)(added(choices)(run))

    return add


def check_source(source: str | None) -> None:
    """Raise DataError for a path that does not exist, before heavy imports."""
    text = source or ""
    if not (
        text.startswith(MINARI)
        or "://" in text
        or glob.has_magic(text)
        or Path(text).exists()
    ):
        raise DataError(f"{source} does not exist; check the path")


def requested_mapping(options: Mapping[str, Any], is_complete: bool = True) -> Any:
    """Mapping from a file, overridden by single options; None if there is neither.

    options: the parameters about tables by name, None or () where unused. A dict of
    one_step and encode alone comes back as it is, since arrays understand these too;
    and any dict where the mapping is not to be complete (``is_complete``). Raises
    DataError.
    """
    typed = {
        name.removeprefix(_PREFIX): value
        for name, value in options.items()
        if value not in (None, ())
    }
    if not typed:
        return None
    from koffline.data.table.mapping import as_mapping
    from koffline.untrusted.limits import read_yaml_file

    file = typed.pop("mapping", None)
    written = {}
    if file is not None:
        written = read_yaml_file(Path(file), f"mapping file {file}", DataError)
    for name in ("action_names", "no_action"):
        if name in typed:
            typed[name] = [text.strip() for text in typed[name].split(",")]
    for name in ("impute", "encode"):
        if name in typed:
            typed[name] = dict(_by_column(f"--{name}", text) for text in typed[name])
    is_of_any_log = (
        typed.keys() <= {"one_step", "encode"} and typed.get("one_step") is not False
    )
    if is_of_any_log and file is None:
        return typed
    # the two forms of the behavior probability replace each other
    probabilities = {"behavior_probability", "behavior_log_probability"}
    if probabilities & typed.keys():
        for name in probabilities - typed.keys():
            written.pop(name, None)
    if not is_complete:
        return {**written, **typed}
    return as_mapping({**written, **typed})


def _by_column(flag: str, text: str) -> tuple[str, str]:
    """Parse ``x_3=zero`` into column and method; an empty column means all
    observations.
    """
    column, equals, method = text.rpartition("=")
    if equals and not (column and method):
        raise DataError(f"{flag} received '{text}'; write METHOD or COLUMN=METHOD")
    return column, method
