"""Folders from strangers: every file in them is a file of theirs, of a size that it can explain."""

from __future__ import annotations

from pathlib import Path

from koffline.untrusted.limits import Refused, Tally, check_regular


def check_column_files(folder: Path) -> None:
    """Look at every Arrow and Parquet file below a folder before any of it is read. Raises Refused."""
    files = [path for path in sorted(folder.rglob("*")) if not path.is_dir()]
    tally = Tally()
    for path in files:
        check_inside(folder, path)
        with path.open("rb") as file:
            is_parquet = file.read(4) == b"PAR1"
        if is_parquet:
            _count_parquet(path, tally)


def check_inside(folder: Path, path: Path) -> None:
    """Raise Refused where ``path`` is no regular file, or leads out of ``folder`` by a link or by ``..``."""
    if not path.resolve().is_relative_to(folder.resolve()):
        raise Refused(f"{path.name} leads out of the folder; copy the file into it")
    check_regular(path)


def _count_parquet(path: Path, tally: Tally) -> None:
    import pyarrow.parquet as parquet

    with parquet.ParquetFile(path) as file:
        found = file.metadata
        declared = sum(found.row_group(i).total_byte_size for i in range(found.num_row_groups))
        # run lengths make a value of any number of rows: what they become in memory counts
        declared = max(declared, 8 * found.num_rows * found.num_columns)
        tally.add(declared)
