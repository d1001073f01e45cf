"""Opening the bytes of a table, and what goes wrong while it is read, in one line each."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

from koffline.data.remote import is_url, storage_faults
from koffline.errors import DataError
from koffline.store.files import reading
from koffline.untrusted.limits import Refused

_CSV_COLUMN = re.compile(r"In CSV column #(\d+):(?: Row #(\d+):)?\s*(.*)", re.S)


@contextlib.contextmanager
def table_faults(name: str, kind: str, names: Sequence[str] = ()) -> Iterator[None]:
    """Turn the errors of pyarrow and of the storage into one DataError; our own pass as they are."""
    import pyarrow as pa

    try:
        with storage_faults(name) if is_url(name) else reading(name, kind):
            try:
                yield
            except Refused as error:
                raise DataError(f"{name} is not read: {error}") from None
            except UnicodeDecodeError:
                raise _not_utf8(name) from None
            except pa.ArrowException as error:
                raise _explained(name, kind, names, str(error)) from None
            except (TypeError, IndexError, OverflowError) as error:
                raise ValueError(str(error)) from None
    except MemoryError as error:
        reason = " ".join(str(error).split())[:200] or "too large"
        raise DataError(
            f"{name} does not fit into memory ({reason}); check the file, or read a part"
        ) from None


@contextlib.contextmanager
def open_bytes(name: str) -> Iterator[Any]:
    """A file-like object to read from, local or remote."""
    if is_url(name):
        import fsspec

        with fsspec.open(name, "rb") as file:
            yield file
        return
    with open(name, "rb") as file:
        yield file


def _explained(name: str, kind: str, names: Sequence[str], message: str) -> DataError:
    text = " ".join(message.split())[:300]
    found = _CSV_COLUMN.search(message)
    if "invalid UTF8" in message or "invalid UTF-8" in message:
        return _not_utf8(name)
    if found is not None:
        place = int(found.group(1))
        column = names[place] if place < len(names) else f"number {place + 1}"
        row = f" in row {found.group(2)}" if found.group(2) else ""
        reason = " ".join(found.group(3).split())[:200]
        return DataError(
            f"{name}: column {column}{row} is not all numbers ({reason}); mend it or leave it out"
        )
    if "straddling" in message or "block_size" in message:
        return DataError(f"{name} has a line of more than a block's length; check its line ends and quotes")
    return DataError(f"{name} is a truncated or corrupt {kind} file ({text}); copy or export it again")


def _not_utf8(name: str) -> DataError:
    return DataError(f"{name} is not UTF-8 text; save the table as UTF-8 (or as Parquet)")
