"""``koffline data inspect | info | validate | convert | split``: contents and errors of
a log.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from koffline.cli.completion import complete_tools
from koffline.cli.options import INSIDE, Log, LogCommand, log_options, whole
from koffline.cli.output import say
from koffline.cli.targets import claim, claim_log
from koffline.data.labels import LAYOUT
from koffline.data.sources import FORMATS
from koffline.data.spaces import ACTIONS, ENCODINGS, NAMES, Features
from koffline.errors import ConfigError, counted, printable

if TYPE_CHECKING:
    from koffline.data.table.inspection import Inspection

_WIDTH = 160  # least width of tables that are not printed on a terminal
_MOST_LINES = 12  # lines on the coverage of actions


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def data() -> None:
    """Show, check, convert and split logs.

    \b
    SOURCE is a koffline, D4RL or d3rlpy HDF5 file, an NPZ archive, a Parquet, Arrow or
    CSV table, JSON objects, a folder of shards or of a LeRobot dataset, a Minari folder
    or minari:<id>. koffline tells which by the content (CSV and JSON by the name).
    Options under "Tables" say what the columns of a table are.
    """


@data.command()
@click.argument("source")
@click.option(
    "--out",
    metavar="FILE",
    help="Write the guessed mapping there (YAML), for you to edit.",
)
@whole("--rows", default=100_000, show_default=True, help="Look at the first N rows.")
@click.option(
    "--action",
    multiple=True,
    metavar="COLUMN",
    help="Column of the action, if no name says so; repeatable.",
)
@click.option("--reward", metavar="COLUMN", help="Column of the reward.")
@click.option("--episode", metavar="COLUMN", help="Column that tells episodes apart.")
@click.option("--time", metavar="COLUMN", help="Column that orders an episode's rows.")
@click.option(
    "--format",
    "format_",
    metavar="NAME",
    shell_complete=complete_tools,
    help="The tool that wrote the table (robomimic, rllib, …); else it is recognised.",
)
@click.option("--force", is_flag=True, help="Replace --out if it exists.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object and nothing else."
)
def inspect(
    source: str,
    out: str | None,
    rows: int,
    format_: str | None,
    force: bool,
    as_json: bool,
    **columns: Any,
) -> None:
    """Show a table's columns, what each may be, all problems, and a mapping to edit.

    \b
    Examples:
      koffline data inspect log.csv --out mapping.yaml
      koffline data inspect log.csv --out mapping.yaml --action move --reward points
      koffline evaluate log.csv --mapping mapping.yaml --policy policy.pt --gamma 0.99
    """
    from koffline.data.table.inspection import inspect_table
    from koffline.store.files import atomic_file, check_target

    if out is not None:
        check_target(claim(out), force)
    known: dict[str, tuple[str, ...]] = {}
    for role, column in columns.items():
        if isinstance(column, tuple):
            known[role] = column
        elif column is not None:
            known[role] = (column,)
    inspection = inspect_table(source, rows, known, format_)
    if out is not None:
        with atomic_file(Path(out), force) as temporary:
            temporary.write_text(inspection.to_yaml(), encoding="utf-8")
    if as_json:
        say(json.dumps(inspection.to_json(), default=str))
    else:
        _print_inspection(inspection, out)


def _print_inspection(inspection: Inspection, out: str | None) -> None:
    """Print columns, problems, notes and, unless it was written to a file, the
    mapping.
    """
    from koffline.display import make_console

    inspection.show(make_console(_WIDTH))
    for line in inspection.lines():
        say(line)
    if out is not None:
        first = "edit it"
        if inspection.open:
            first = f"answer what is open in it ({', '.join(inspection.open)})"
        say(
            f"{out}: {first}, then koffline evaluate {inspection.source} --mapping {out}"
            " --policy POLICY --gamma 0.99"
        )
    elif inspection.mapping:
        say(f"\n{inspection.to_yaml()}")


def _print_notes(notes: Iterable[str]) -> None:
    for note in notes:
        say(f"note: {printable(note)}")


@data.command(cls=LogCommand)
@log_options("source")
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object and nothing else."
)
def info(log: Log, as_json: bool) -> None:
    """Summarise a log: rows, episodes, spaces, returns, time limits, coverage of the
    actions.

    \b
    Examples:
      koffline data info log.hdf5
      koffline data info minari:D4RL/door/human-v2 --json
      koffline data info buffer.h5 --discrete 4
      koffline data info log.parquet --observations 'x_*' --action a --reward r --episode id --time t
      koffline data info shards/ --workers 8
    """
    from koffline.data.sources import layout_of
    from koffline.data.statistics import summarise

    rows = log.open()
    if log.stays_on_disk:
        summary = summarise(rows, log.stream, progress=True)
    else:
        summary = summarise(rows)
    summary["layout"] = layout_of(log.source, log.mapping)
    if as_json:
        say(json.dumps(summary, default=str))
        return
    from koffline.display import make_console, print_table

    print_table(
        make_console(), str(summary["source"]), (), _summary_lines(rows, summary)
    )


def _summary_lines(log: Any, summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The summary of a log as pairs of name and text."""
    features = log.metadata.features
    yield "layout", str(summary["layout"])
    if "shards" in summary:
        yield "shards", f"{summary['shards']}"
    yield "rows", f"{summary['rows']}"
    if summary["episodes"]:
        yield "episodes", f"{summary['episodes']}"
    else:
        yield "episodes", "none: every row stands alone"
    yield (
        "observations",
        f"shape {summary['observation_shape']}, {summary['observation_dtype']}",
    )
    yield "actions", str(log.action_space)
    yield "rewards", _text(summary["rewards"])
    if summary["episodes"]:
        yield "returns", f"{_text(summary['returns'])} (undiscounted, as logged)"
        yield "episode lengths", _text(summary["lengths"])
    yield "ends", _ends(summary)
    yield from _coverage(summary)
    optional = ("log_probabilities", "weights", "clusters", "action_masks")
    for name in [f"has_{column}" for column in optional]:
        answer = "no"
        if summary[name]:
            answer = "yes"
        yield name.removeprefix("has_").replace("_", "-"), answer
    if summary["gamma"] is not None:
        yield "gamma (hint)", f"{summary['gamma']:.10g}"
    if features is not None:
        yield from _features(features)
    for key, value in summary["extra"].items():
        if features is None or key not in (NAMES, ENCODINGS, LAYOUT):
            yield printable(str(key)), printable(str(value))
    for sign in summary["structure"]:
        yield "warning", printable(sign)
    for note in summary["notes"]:
        yield "note", printable(note)
    yield "sha256 of the rows", str(summary["sha256"])


def _features(features: Features) -> Iterator[tuple[str, str]]:
    """Names of a table's columns, and the categories of those that were encoded."""
    yield "features", printable(", ".join(features.names))
    for column, encoding in features.encodings.items():
        yield (
            f"{printable(column)}, {encoding.kind}",
            printable(", ".join(encoding.categories)),
        )


def _ends(summary: Mapping[str, Any]) -> str:
    """How episodes end: their flags, and the time limit."""
    ends = f"{summary['terminated']} terminated, {summary['truncated']} truncated"
    if summary["unfinished"]:
        ends += f", {summary['unfinished']} without a flag"
    if not summary["episodes"]:
        return ends
    if summary["time_limit"]:
        return f"{ends}; time limit: {summary['time_limit']} steps"
    return f"{ends}; time limit: none that all cut episodes share"


def _coverage(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Ranges of continuous actions, or counts of discrete ones; the first dozen."""
    names = summary["extra"].get(ACTIONS)  # texts of the actions in the original table
    if not isinstance(names, list):
        names = []
    lines = []
    for action, spread in enumerate(summary["action_ranges"] or ()):
        lines.append((f"action[{action}]", _text(spread)))
    for action, count in enumerate(summary["action_counts"] or ()):
        label = f"action {action}"
        if action < len(names):
            label += f" ({printable(str(names[action]))})"
        lines.append((label, f"{count} rows ({count / summary['rows']:.1%})"))
    yield from lines[:_MOST_LINES]
    if len(lines) > _MOST_LINES:
        yield "…", f"{len(lines) - _MOST_LINES} more"


def _text(spread: Mapping[str, float]) -> str:
    return f"{spread['min']:.6g} … {spread['max']:.6g}, mean {spread['mean']:.6g}"


@data.command(cls=LogCommand)
@log_options("source")
def validate(log: Log) -> None:
    """Check a log: print all errors at once, then warnings. Exit code 2 on errors, else
    0.

    \b
    Examples:
      koffline data validate log.npz
      koffline data validate d4rl.hdf5 --continuous -1 1
      koffline data validate shards/ --ray auto
    """
    from koffline.data.findings import inspect_log
    from koffline.data.sources import open_raw

    if log.stays_on_disk:
        rows = log.open()
        count = len(rows)
        metadata = rows.metadata
        findings = inspect_log(rows, log.stream, progress=True)
    else:
        raw = open_raw(log.source, log.space, log.mapping)
        count = len(raw.columns["rewards"])
        metadata = raw.metadata
        findings = inspect_log(raw)
    _print_notes(metadata.notes)
    for finding in findings:
        say(
            f"{finding.severity}: {printable(finding.message)}",
            err=finding.severity == "error",
        )
    if any(finding.severity == "error" for finding in findings):
        click.get_current_context().exit(2)
    if findings:
        warnings = counted(len(findings), "warning")
    else:
        warnings = "no warnings"
    say(f"{log.source}: {count} rows, no errors, {warnings}")


@data.command(cls=LogCommand)
@log_options("source", in_parts=False, with_format=False)
@click.argument("target")
@click.option(
    "--format",
    "format_",
    type=click.Choice(FORMATS),
    help="Format; else told by TARGET's name.",
)
@whole(
    "--shard-rows",
    metavar="N",
    help="Write shards of at most N rows, for logs larger than memory.",
)
@click.option("--force", is_flag=True, help="Replace TARGET if it exists.")
def convert(
    log: Log, target: str, format_: str | None, shard_rows: int | None, force: bool
) -> None:
    """Write a log in another format. A failed conversion leaves no partial TARGET.

    \b
    Examples:
      koffline data convert minari:cartpole/mixed-v0 cartpole.hdf5
      koffline data convert cartpole.hdf5 minari:cartpole/copy-v0
      koffline data convert cartpole.hdf5 buffer.h5 --format d3rlpy
      koffline data convert large.hdf5 shards --shard-rows 1000000
      koffline data convert table.csv log.hdf5 --mapping columns.yaml
    """
    from koffline.data.sources import convert_to_shards, write_transitions

    _, form = claim_log(target, format_, shard_rows, force, "TARGET")
    if shard_rows is None:
        rows = log.open(lazy=False)
        write_transitions(rows, target, form, force)
    else:
        rows = convert_to_shards(
            log.source, target, shard_rows, force, log.space, log.mapping
        )
    _print_notes(rows.metadata.notes)
    say(f"{target} ({form}): {rows}")


@data.command(cls=LogCommand)
@log_options("source", in_parts=False)
@click.argument("target")
@click.argument("rest")
@click.option(
    "--held-out",
    type=INSIDE,
    default=0.3,
    show_default=True,
    help="Share of the episodes that REST gets.",
)
@whole("--seed", 0, default=0, show_default=True, help="Seed of the draw.")
@click.option("--force", is_flag=True, help="Replace TARGET and REST if they exist.")
def split(
    log: Log, target: str, rest: str, held_out: float, seed: int, force: bool
) -> None:
    """Split a log: train a policy on TARGET, evaluate it on REST. Episodes and clusters
    stay whole.

    \b
    Examples:
      koffline data split log.hdf5 train.hdf5 test.hdf5
      koffline data split log.csv train.hdf5 test.hdf5 --mapping columns.yaml --held-out 0.5
    """
    from koffline.data.sources import write_transitions
    from koffline.data.splitting import split_transitions

    target_path, target_form = claim_log(target, None, None, force, "TARGET")
    rest_path, rest_form = claim_log(rest, None, None, force, "REST")
    if target_path.resolve() == rest_path.resolve():
        raise ConfigError(f"TARGET and REST are both {target}; give two names")
    rows = log.open(lazy=False)
    kept, held_out_rows = split_transitions(rows, held_out, seed)
    notes = rows.metadata.notes
    of_split = kept.metadata.notes[len(notes) :]
    _print_notes((*notes, *of_split))
    for name, form, part in (
        (target, target_form, kept),
        (rest, rest_form, held_out_rows),
    ):
        write_transitions(part, name, form, force)
        say(f"{name} ({form}): {part}")
