"""A log as a table: one column per number, and what koffline knows beside the rows in the file's metadata."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from koffline.data.flat import flat_arrays
from koffline.data.raw import describe_log
from koffline.data.table.prepared import SHAPE_KEY
from koffline.data.transitions import Transitions
from koffline.errors import DataError
from koffline.store.files import atomic_file

if TYPE_CHECKING:
    import pyarrow as pa

# Longer vectors, and pictures, are stored as lists: a table of 28,224 columns serves nobody.
_MOST_COLUMNS = 1000
_GROUP_ROWS = 65_536


def write_table(log: Transitions, path: Path, format: str, force: bool = False) -> None:
    """Write ``parquet``, ``arrow`` or ``csv``, whole or not at all. Raises DataError.

    Columns are observations_0 …, actions (or actions_0 …), rewards, next_observations_0 …, terminals,
    timeouts, episode_ids, steps and what else the log has. CSV holds the rows alone: numbers are written so
    that they read back exactly, but action space and metadata are lost.
    """
    import pyarrow as pa
    import pyarrow.csv
    import pyarrow.parquet

    if format == "csv" and _as_lists(log):
        raise DataError(
            f"observations of shape {log.observation_shape} do not fit into CSV; write parquet instead"
        )
    table = _table(log, widen=format == "csv")
    with atomic_file(path, force) as temporary:
        if format == "parquet":
            pyarrow.parquet.write_table(table, temporary, row_group_size=_GROUP_ROWS, compression="zstd")
        elif format == "arrow":
            with pa.ipc.new_file(str(temporary), table.schema) as file:
                file.write_table(table, max_chunksize=_GROUP_ROWS)
        else:
            pyarrow.csv.write_csv(table, temporary)


def _table(log: Transitions, widen: bool) -> pa.Table:
    import pyarrow as pa

    columns: dict[str, Any] = {}
    for key, array in flat_arrays(log).items():
        # a float32 is written to CSV as the shortest text of its own, which is another number as float64
        array = array.astype(np.float64) if widen and array.dtype.kind == "f" else array
        if array.ndim == 1:
            columns[key] = pa.array(array)
        elif key != "actions" and _as_lists(log):
            flat = np.ascontiguousarray(array).reshape(-1)
            columns[key] = pa.FixedSizeListArray.from_arrays(pa.array(flat), array[0].size)
        else:
            columns.update({f"{key}_{i}": pa.array(array[:, i]) for i in range(array.shape[1])})
    metadata = {"koffline": describe_log(log)}
    if _as_lists(log):
        metadata[SHAPE_KEY] = ",".join(map(str, log.observation_shape))
    return pa.table(columns).replace_schema_metadata(metadata)


def _as_lists(log: Transitions) -> bool:
    return len(log.observation_shape) != 1 or log.observation_shape[0] > _MOST_COLUMNS
