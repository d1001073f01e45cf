"""The rows of a table's files as typed frames, read in each pass or held in memory,
with limits.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import polars as pl

from koffline.data import remote
from koffline.data.kinds import HELD, NPZ
from koffline.data.raw import SHARED
from koffline.data.table.arrow_frames import check_times
from koffline.data.table.column_names import ID_NAME
from koffline.data.table.column_types import Kind, Types
from koffline.data.table.held import HeldTable, TableSource
from koffline.data.table.missing import is_missing_word
from koffline.data.table.readers import Reader, table_reader, unpacked_bytes, width_of
from koffline.data.table.text_ways import DECIMAL_COMMAS, NUMBERS, as_read
from koffline.errors import DataError, listed
from koffline.untrusted.limits import (
    EXPANSION,
    Refused,
    announce_large,
    memory_allowance,
    shown_bytes,
)

# Bytes of memory per byte of the columns: reading makes stored, ordered, shifted and
# checked copies.
COPIES = 6
# Limit of columns: each costs some tenths of a millisecond, and more are probably
# transposed rows.
_MOST_COLUMNS = 2**17
# Rows looked at in one go, fewer where they are wide; means are sums over such frames,
# however read.
BATCH_ROWS = 65_536
_BATCH_BYTES = 2**26
_PROBED_ROWS = 256
_MOST_SHOWN = 60
_NOTHING = "nothing"  # the kind of a column without values
_SHORTER = "write shorter rows in smaller row groups"
_IN_PIECES = "convert it in pieces (`koffline data convert … --shard-rows N`)"


def header_of(name: TableSource, kind: str) -> Reader:
    """The columns of a file or of a table in memory, without rows.

    Raises DataError for too many columns or repeated names.
    """
    with table_reader(name, kind) as reader:
        fields = reader.fields
        if len(fields) > _MOST_COLUMNS:
            raise DataError(
                f"{name} has {len(fields)} columns, more than {_MOST_COLUMNS}; store"
                " observations as one column of lists, or export fewer columns"
            )
        if not fields:
            raise DataError(
                f"{name} has no columns; export the table again with a header"
            )
        counts = Counter(column for column, _ in fields)
        repeated = [column for column, count in counts.items() if count > 1]
        if repeated:
            raise DataError(
                f"{name} has more than one column named {listed(repeated)}; rename them"
            )
        return reader


def check_room(total: int, remedy: str = _SHORTER, at_once: int = 0) -> None:
    """Raise Refused if ``total`` bytes of columns, or ``at_once`` bytes decoded
    together, do not fit. remedy: what to do then.
    """
    needed = max(total * COPIES, at_once)
    allowed = memory_allowance()
    if needed > allowed:
        raise Refused(
            f"its rows need {shown_bytes(needed)} of memory to be read, allowed are"
            f" {shown_bytes(allowed)}; {remedy}, or allow more bytes"
            " (KOFFLINE_MAX_BYTES)"
        )


def frame_bytes(frame: pl.DataFrame, itemsize: int = 1) -> int:
    """Bytes of a frame: numbers count at least ``itemsize``, and repeated texts count
    every time.
    """
    total = 0
    for column in frame:
        kind = column.dtype
        items = len(column)
        if kind == pl.List:
            items = int(column.list.len().sum())
        elif kind.is_nested():
            items = items * getattr(kind, "size", 1)
        total += items * max(itemsize, width_of(kind))
        if kind == pl.String:
            total += int(column.str.len_bytes().sum())
        elif kind == pl.Binary:
            total += int(column.bin.size().sum())
    return total


@dataclass(frozen=True)
class TableRows:
    """Columns ``types`` of files of one kind, or columns ``computed`` from them, in
    frames of ``batch_rows``.

    ``itemsize``: bytes of an observation's number; ``held``: all columns, if they are
    in memory;
    ``number_ways``: how texts of numbers are read, by column, where that was decided
    from all of them.
    """

    kind: str
    files: tuple[TableSource, ...]
    types: Types
    itemsize: int
    number_ways: Mapping[str, str] = field(default_factory=dict)
    computed: Sequence[pl.Expr] = ()
    batch_rows: int = _PROBED_ROWS
    held: pl.DataFrame | None = None

    @property
    def schema(self) -> Types:
        """Types of the columns of each frame."""
        if self.held is None:
            rows = pl.DataFrame(schema=dict(self.types))
        else:
            rows = self.held
        if self.computed:
            return rows.clear().select(self.computed).schema
        return rows.schema

    def only(self, columns: Sequence[str]) -> TableRows:
        """The same rows with these columns only, as stored."""
        held = self.held
        if held is not None:
            held = held.select(columns)
        types = {name: self.types[name] for name in columns}
        return replace(self, types=types, computed=(), held=held)

    def computing(self, columns: Sequence[pl.Expr]) -> TableRows:
        """The same rows with these computed columns.

        Raises Refused if they do not fit into memory.
        """
        rows = replace(self, computed=columns)
        if self.held is None:
            return rows
        widths = [max(self.itemsize, width_of(kind)) for kind in rows.schema.values()]
        check_room(self.held.height * sum(widths))
        return replace(rows, computed=(), held=self.held.select(columns))

    def frames(
        self, again: bool = False, look: Callable[[pl.DataFrame], None] | None = None
    ) -> Iterator[pl.DataFrame]:
        """All rows. Raises DataError.

        again: a first pass has checked their sizes. look: is shown rows that are read
        from files, as they are stored, before columns are computed from them.
        """
        if self.held is not None:
            yield from self.held.iter_slices(self.batch_rows)
            return
        size = self._size
        total = 0
        for frame in self.stored(sized=again):
            check_room(frame_bytes(frame, self.itemsize))
            total += frame_bytes(frame)
            if total > max(memory_allowance(), size * EXPANSION):
                raise Refused(
                    f"its rows take more than {shown_bytes(total)}, the file"
                    f" {shown_bytes(size)}; it is damaged or made to fill disks: export"
                    " it again"
                )
            if look is not None:
                look(frame)
            if self.computed:
                frame = frame.select(self.computed)
                check_room(frame_bytes(frame, self.itemsize))
            yield frame

    def stored(
        self, sized: bool = False, whole: bool = False
    ) -> Iterator[pl.DataFrame]:
        """The columns as stored in the files, texts unparsed, in the first file's
        types.

        sized: their memory was checked before; otherwise it is checked now, with
        ``whole`` for all files together. Raises DataError.
        """
        wanted = dict(self.types)
        together = 0
        # types of the first file that has rows
        reference: Types | None = None
        for file in self.files:
            above = 0
            with table_reader(
                file, self.kind, as_texts=bool(self.number_ways)
            ) as opened:
                present = dict(opened.fields)
                missing = [name for name in wanted if name not in present]
                if missing:
                    raise DataError(
                        f"{file} lacks column {missing[0]}, which the first file has;"
                        " mend it"
                    )
                if not sized:
                    total, at_once = opened.declared(wanted, self.itemsize)
                    if not whole:
                        check_room(0, _SHORTER, at_once)
                    else:
                        if file == self.files[0]:
                            self._announce(str(file), total)
                        together += total
                        check_room(together, _IN_PIECES, at_once)
                for frame in opened.frames(wanted, self.batch_rows):
                    check_times(frame, str(file))
                    if not frame.height:
                        continue
                    if reference is None:
                        reference = present
                    elif not above:
                        _check_same_kinds(wanted, present, reference, str(file))
                    if dict(frame.schema) == wanted:
                        yield frame
                    else:
                        yield self._fitted(frame, str(file), above)
                    above += frame.height

    @property
    def _size(self) -> int:
        """Bytes of all files, or of the table in memory."""
        total = 0
        for file in self.files:
            if isinstance(file, HeldTable):
                total += file.size
            else:
                total += remote.size(file)
        return total

    def _announce(self, first: str, declared: int) -> None:
        """Say how much memory a large table will take, by what its first file declares
        or unpacks to.

        Further files count in proportion to their sizes.
        """
        # arrays were announced when their archive was opened; a frame is there already
        if self.kind in (NPZ, HELD):
            return
        size = self._size
        of_first = declared or unpacked_bytes(first)
        needed = of_first * size // max(1, remote.size(first))
        shown = first
        if len(self.files) > 1:
            shown = f"{first} …"
        if needed * COPIES <= memory_allowance():  # else the refusal says it
            announce_large(shown, size, needed, COPIES)

    def _fitted(self, frame: pl.DataFrame, file: str, above: int) -> pl.DataFrame:
        """The frame in the first file's types; ``above``: rows before it in the file.

        Raises DataError.
        """
        columns = []
        for name, kind in self.types.items():
            column = frame[name]
            if column.dtype == pl.String and kind == pl.Float64:
                column = self._numbers(column, file, above)
            # Where no type holds all values of both, the column keeps its own.
            with contextlib.suppress(pl.exceptions.PolarsError):
                both = [pl.DataFrame(schema={name: kind}), column.to_frame()]
                column = pl.concat(both, how="vertical_relaxed")[name]
            if column.dtype != kind:
                raise DataError(
                    f"{file}: column {name} is {frame[name].dtype}, in the first file"
                    f" {kind}; write all files with one type"
                )
            columns.append(column)
        return pl.DataFrame(columns)

    def _numbers(self, column: pl.Series, file: str, above: int) -> pl.Series:
        """A column of texts as floats, NaN where a word says that a value is missing;
        ``above``: rows before it in the file.

        Raises DataError.
        """
        name = column.name
        way = self.number_ways.get(name, NUMBERS)
        frame = column.to_frame()
        is_word = frame.select(
            is_missing_word(pl.col(name).str.strip_chars())
        ).to_series()
        numbers = frame.select(as_read(name, way)).to_series()
        wrong = numbers.is_null() & column.is_not_null() & ~is_word
        if wrong.any():
            place = int(wrong.arg_max() or 0)
            text = column[place][:_MOST_SHOWN]
            raise DataError(
                f"{file}: column {name} is not all numbers: row {above + place + 1}"
                f" holds {text!r}; {self._remedy(name, text)}"
            )
        return pl.select(
            pl.when(is_word).then(np.nan).otherwise(numbers).alias(name)
        ).to_series()

    def _remedy(self, name: str, text: str) -> str:
        """What to do about a text that is no number."""
        if self.number_ways.get(name) == DECIMAL_COMMAS and {",", "."} & set(text):
            return (
                "with decimal commas write 3,5 and 1234 or 1.234 for a thousand, in the"
                " whole column"
            )
        if "," in text:
            return "write no comma if that marks thousands, or say --decimal-comma"
        return (
            f"mend it, or --encode {name}=one-hot (a state), \"{name} == '…'\" (a"
            " reward)"
        )


def _check_same_kinds(
    names: Iterable[str],
    types: Types,
    reference: Types,
    file: str,
) -> None:
    """Raise DataError if a column of a file holds another kind of values than in the
    first file. types, reference: by column, of this file and of the first one.

    polars would cast dates to numbers and numbers to dates without loss, and change
    their meaning.
    """
    for name in names:
        kind = _kind_of_values(types[name])
        first = _kind_of_values(reference[name])
        if kind != first and _NOTHING not in (kind, first):
            raise DataError(
                f"{file}: column {name} is {types[name]}, in the first file"
                f" {reference[name]}; write all files with one type"
            )


def _kind_of_values(kind: Kind) -> str:
    """What values of a type are; types of numbers differ in size alone."""
    if kind.is_numeric():
        return "number"
    if isinstance(kind, (pl.List, pl.Array)):
        return f"list of {_kind_of_values(kind.inner)}"
    if kind == pl.Null:
        return _NOTHING
    return str(kind.base_type()).lower()


def open_rows(rows: TableRows, hold: bool, first: int | None = None) -> TableRows:
    """The rows in frames of about 64 MB, or less if memory is limited, judged by the
    first rows.

    hold: all rows in memory, or the ``first``. Raises Refused if they do not fit.
    """
    probe = next(rows.stored(), None)
    if probe is None:
        row_bytes = 1
    else:
        row_bytes = max(1, frame_bytes(probe) // probe.height)
    # a piece of whole episodes is more than one frame
    most = min(_BATCH_BYTES, memory_allowance() // (4 * COPIES))
    rows = replace(rows, batch_rows=max(1, min(BATCH_ROWS, most // row_bytes)))
    if not hold:
        return rows
    remedy = _IN_PIECES
    if first is not None:
        remedy = "look at fewer rows"
    frames = [pl.DataFrame(schema=dict(rows.types))]
    count = 0
    taken = 0
    for frame in rows.stored(sized=first is not None, whole=True):
        taken += frame_bytes(frame, rows.itemsize)
        check_room(taken, remedy)
        frames.append(frame)
        count += frame.height
        if first is not None and count >= first:
            break
    return replace(rows, held=pl.concat(frames, rechunk=False).head(first or count))


def split_ids(rows: TableRows, episode: str) -> tuple[int, str] | None:
    """Number of ids whose rows lie in several files with other episodes between them,
    and one such id.

    None if there are none, or if the rows of episodes are mixed within a file. Ids that
    begin anew in every file look like this: the parts of one id are then different
    episodes. episode: the column of ids.
    """
    types = {episode: rows.types[episode]}
    seen = set[object]()
    last: object = None
    apart = dict[object, None]()
    for file in rows.files:
        part = replace(rows, files=(file,), types=types, computed=(), held=None)
        frames = [frame[episode] for frame in part.frames()]
        if not frames:
            continue
        runs = pl.concat(frames).rle().struct.field("value").to_list()
        if len(set(runs)) < len(runs):
            return None
        for i, run in enumerate(runs):
            goes_on = i == 0 and run == last  # the file before ends with this episode
            if run in seen and not goes_on:
                apart[run] = None
        seen.update(runs)
        last = runs[-1]
    if apart:
        return len(apart), str(next(iter(apart)))
    return None


def shared_ids(
    rows: TableRows, count: int, used: set[str], episode: str | None
) -> Iterator[str]:
    """Yield notes on columns outside ``used`` that look like ids of what several
    episodes (or rows) share.

    count: the most rows to look at. episode: the column of episodes; each must have one
    id.
    """
    stored = dict(header_of(rows.files[0], rows.kind).fields)
    for name, kind in stored.items():
        if name in used or not ID_NAME.search(name):
            continue
        if not kind.is_numeric() and kind != pl.String:
            continue
        types = {name: kind}
        if episode:
            types[episode] = stored[episode]
        pairs = _distinct_rows(
            replace(rows, types=types, computed=(), held=None), count
        )
        n_values = pairs[name].n_unique()
        n_units = count
        units = f"{n_units} rows"
        if episode:
            n_units = pairs[episode].n_unique()
            units = f"{n_units} episodes"
            if n_units != len(pairs):
                continue
        if 1 < n_values <= n_units / 2:
            yield (
                f"{SHARED}{units} share {n_values} values of {name}, taken as"
                f" independent; if one {name}'s are not, name it (--cluster {name})"
            )


def _distinct_rows(rows: TableRows, count: int) -> pl.DataFrame:
    """Hashes of the values in the first ``count`` rows, each row once."""
    frames = []
    left = count
    for frame in rows.frames():
        frames.append(frame.head(left).select(pl.all().hash()).unique())
        left = left - frame.height
        if left <= 0:
            break
    return pl.concat(frames).unique()
