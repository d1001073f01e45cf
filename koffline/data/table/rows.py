"""The rows of a table as typed Arrow batches: read from its files each time, or held in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from koffline.data.table.files import TableFiles
from koffline.data.table.room import COPIES, IN_PIECES, Room
from koffline.data.table.texts import read_texts
from koffline.data.table.values import plain, plain_bytes, storage_type
from koffline.untrusted.limits import EXPANSION, Refused, memory_allowance, shown_bytes

if TYPE_CHECKING:
    import pyarrow as pa

# Rows looked at in one go, fewer where they are wide; means are sums over such batches, however read.
BATCH_ROWS = 65_536
_BATCH_BYTES = 2**26
_PROBED_ROWS = 256


@dataclass(frozen=True)
class TableRows:
    """Columns ``types`` of some files; ``narrowed`` says as what the columns of text are meant.

    ``itemsize`` is that of an observation's number, ``held`` has them all in memory. Each batch has at most
    ``batch_rows`` rows.
    """

    files: TableFiles
    types: Mapping[str, Any]
    narrowed: Mapping[str, Any]
    itemsize: int
    batch_rows: int
    held: Any = None

    def batches(self, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        """The given columns (or all) in their order."""
        chosen = list(self.types if columns is None else columns)
        if self.held is not None:
            found = iter(self.held.select(chosen).to_batches(max_chunksize=self.batch_rows))
        else:
            room = Room(self.itemsize, None)
            found = bounded(self.files.batches(chosen, self.types, self.batch_rows, room), self.files, room)
        return (self._typed(batch) for batch in found if batch.num_rows)

    def table(self, batches: Sequence[pa.RecordBatch]) -> pa.Table:
        """Batches of all columns as one table."""
        import pyarrow as pa

        schema = pa.schema([(n, storage_type(self.narrowed.get(n, kind))) for n, kind in self.types.items()])
        return pa.Table.from_batches(list(batches), schema)

    def _typed(self, batch: Any) -> Any:
        """Texts cast to what they mean, dictionaries and extensions as what they hold."""
        import pyarrow as pa

        names = batch.schema.names
        arrays = [plain(column) for column in batch.columns]
        arrays = [
            read_texts(array, self.narrowed[name]) if name in self.narrowed else array
            for name, array in zip(names, arrays, strict=True)
        ]
        return pa.record_batch(arrays, names=names)


def bounded(batches: Iterator[Any], files: TableFiles, room: Room) -> Iterator[Any]:
    """The batches, until one does not fit or all are more than files of this size hold. Raises Refused."""
    total = 0
    for batch in batches:
        room.take(batch)
        total += sum(map(plain_bytes, batch.columns))
        if total > max(memory_allowance(), files.bytes * EXPANSION):
            raise Refused(
                f"its rows take more than {shown_bytes(total)}, the file {shown_bytes(files.bytes)}; it is "
                "damaged or made to fill disks: export it again"
            )
        yield batch


def open_rows(files: TableFiles, types: Mapping[str, Any], itemsize: int) -> TableRows:
    """The rows of some files, in batches of about 64 MB, or as is allowed, going by the first rows."""
    probe = next(files.batches(list(types), types, _PROBED_ROWS, Room(itemsize, None)), None)
    held = 0 if probe is None else sum(map(plain_bytes, probe.columns))
    row_bytes = max(1, held // max(1, 0 if probe is None else probe.num_rows))
    # a piece of whole episodes is more than one batch
    most = min(_BATCH_BYTES, memory_allowance() // (4 * COPIES))
    return TableRows(files, types, {}, itemsize, max(1, min(BATCH_ROWS, most // row_bytes)))


def hold(rows: TableRows) -> TableRows:
    """The same with all rows in memory. Raises Refused where they do not fit."""
    import pyarrow as pa

    schema = pa.schema(list(rows.types.items()))
    room, batches = Room(rows.itemsize, IN_PIECES), []
    for batch in rows.files.batches(list(rows.types), rows.types, rows.batch_rows, room):
        room.take(batch)
        batches.append(batch)
    return replace(rows, held=pa.Table.from_batches(batches, schema))
