"""Arrow columns as numpy arrays: numbers, flags, times, and what a column's type allows it to be."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from koffline.data.wording import counted
from koffline.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

_TRUE = ("true", "t", "yes", "y", "1", "1.0")
_WIDEST = 16  # bytes of a number, or of an id
_FALSE = ("false", "f", "no", "n", "0", "0.0")


def storage_type(kind: pa.DataType) -> pa.DataType:
    """The type below dictionaries and extensions."""
    import pyarrow as pa

    while True:
        if isinstance(kind, pa.BaseExtensionType):
            kind = kind.storage_type
        elif pa.types.is_dictionary(kind):
            kind = kind.value_type
        else:
            return kind


def plain(array: Any) -> Any:
    """One array without dictionary, extension or chunks."""
    import pyarrow as pa

    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
        if isinstance(array, pa.ChunkedArray):  # several chunks where offsets would not fit into one
            array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], array.type)
    while isinstance(array, pa.ExtensionArray):
        array = array.storage
    return array.dictionary_decode() if pa.types.is_dictionary(array.type) else array


def plain_bytes(array: Any, itemsize: int = 1) -> int:
    """Bytes of an array without its dictionary, where each number takes ``itemsize`` at least.

    Values of a dictionary count in every row, however often they repeat.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    while isinstance(array, pa.ExtensionArray):
        array = array.storage
    if not pa.types.is_dictionary(array.type):
        items = len(array.flatten()) if is_list(array.type) else len(array)
        return max(int(array.nbytes), items * itemsize)
    kind = storage_type(array.dictionary.type)
    if is_text(kind) or pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        lengths, width = pc.binary_length(array.dictionary), 1
    elif is_list(kind):
        lengths, width = pc.list_value_length(array.dictionary), _WIDEST
    else:
        return len(array) * _WIDEST
    return int(pc.sum(lengths.take(array.indices)).as_py() or 0) * width


def is_list(kind: pa.DataType) -> bool:
    """Whether a value is a list of others."""
    import pyarrow as pa

    t = pa.types
    return bool(t.is_list(kind) or t.is_large_list(kind) or t.is_fixed_size_list(kind))


def is_number(kind: pa.DataType) -> bool:
    """Whether a column counts as numbers: integers, floats, decimals and yes/no."""
    import pyarrow as pa

    t = pa.types
    return bool(t.is_integer(kind) or t.is_floating(kind) or t.is_boolean(kind) or t.is_decimal(kind))


def is_text(kind: pa.DataType) -> bool:
    """Whether a column holds texts."""
    import pyarrow as pa

    t = pa.types
    return bool(t.is_string(kind) or t.is_large_string(kind) or t.is_string_view(kind))


def is_naive(kind: pa.DataType) -> bool:
    """Whether times of this type are those of a clock whose zone is not told."""
    import pyarrow as pa

    return bool(pa.types.is_time(kind) or (pa.types.is_timestamp(kind) and kind.tz is None))


def number_dtype(kinds: list[pa.DataType]) -> np.dtype:
    """The dtype in which columns of these types stand side by side; by type alone, never by value.

    uint8 stays where all are; float16, float32 and integers of at most 16 bits are float32; else float64.
    """
    import pyarrow as pa

    bases = [storage_type(kind.value_type) if is_list(kind) else kind for kind in kinds]
    if all(pa.types.is_uint8(base) for base in bases):
        return np.dtype(np.uint8)
    small = (pa.types.is_boolean, pa.types.is_float16, pa.types.is_float32)
    narrow = (pa.types.is_int8, pa.types.is_uint8, pa.types.is_int16, pa.types.is_uint16)
    fits = all(any(test(base) for test in (*small, *narrow)) for base in bases)
    return np.dtype(np.float32 if fits else np.float64)


def numbers(array: Any, dtype: np.dtype, width: int | None = None) -> np.ndarray:
    """(N,), or (N, width) of a list column, in ``dtype``; missing values are NaN (of uint8: 0)."""
    import pyarrow as pa

    array = plain(array)
    if width is not None:
        rows = len(array)
        return numbers(array.flatten(), dtype).reshape(rows, width)
    if pa.types.is_decimal(array.type) or pa.types.is_boolean(array.type):
        array = array.cast(pa.float64())
    if array.null_count and not pa.types.is_floating(array.type):
        array = array.cast(pa.float64(), safe=False)
    found = np.asarray(array.to_numpy(zero_copy_only=False))
    return found if found.dtype == dtype else np.asarray(found, dtype=dtype)


def count_missing(array: Any) -> int:
    """Nulls and NaNs; in a list column those of its elements too."""
    import pyarrow as pa
    import pyarrow.compute as pc

    array = plain(array)
    missing = int(array.null_count)
    if is_list(array.type):
        return missing + count_missing(array.drop_null().flatten())
    if pa.types.is_floating(array.type):
        missing += int(pc.sum(pc.is_nan(array)).as_py() or 0)
    return missing


def count_infinite(array: Any) -> int:
    """Infinities; in a list column those of its elements."""
    import pyarrow as pa
    import pyarrow.compute as pc

    array = plain(array)
    if is_list(array.type):
        return count_infinite(array.drop_null().flatten())
    if not pa.types.is_floating(array.type):
        return 0
    return int(pc.sum(pc.is_inf(array)).as_py() or 0)


def flags(array: Any, name: str, source: str) -> np.ndarray:
    """(N,) bool from yes/no, 0/1, or texts such as true and false. Raises DataError for anything else."""
    import pyarrow as pa
    import pyarrow.compute as pc

    array = plain(array)
    if is_text(array.type):
        lower = pc.utf8_lower(pc.utf8_trim_whitespace(array.cast(pa.string())))
        yes = pc.is_in(lower, value_set=pa.array(_TRUE))
        no = pc.is_in(lower, value_set=pa.array(_FALSE))
    else:
        found = array.cast(pa.float64()) if not pa.types.is_boolean(array.type) else array.cast(pa.int8())
        yes, no = pc.equal(found, 1), pc.equal(found, 0)
    known = pc.or_(yes, no)
    if not pc.all(known).as_py() and len(array):
        wrong = array[pc.index(known, False).as_py()].as_py()
        count = len(array) - int(pc.sum(known).as_py())
        raise DataError(
            f"{source}: column {name} holds {wrong!r} ({counted(count, 'row', 'is', 'are')} neither yes "
            "nor no); "
            "give true and false, or 1 and 0"
        )
    return np.asarray(yes.to_numpy(zero_copy_only=False), dtype=np.bool_)


def sortable(array: Any) -> np.ndarray:
    """(N,) numbers in the order of the column's values: times as integers, decimals by their rank."""
    import pyarrow as pa

    array = plain(array)
    kind = array.type
    t = pa.types
    if t.is_date32(kind) or t.is_time32(kind):
        array = array.cast(pa.int32())
    elif t.is_timestamp(kind) or t.is_date64(kind) or t.is_time64(kind) or t.is_duration(kind):
        array = array.cast(pa.int64())
    elif t.is_decimal(kind):
        # as their own order: two decimals may be one float64
        return _ranks(array)
    return np.asarray(array.to_numpy(zero_copy_only=False))


def first_seen_codes(array: Any) -> tuple[np.ndarray, Any]:
    """(N,) number of each value in order of first appearance, and the values themselves."""
    encoded = plain(array).dictionary_encode()
    return np.asarray(encoded.indices.to_numpy(zero_copy_only=False), dtype=np.int64), encoded.dictionary


def _ranks(array: Any) -> np.ndarray:
    codes, values = first_seen_codes(array)
    listed = values.to_pylist()
    rank = np.empty(len(listed), dtype=np.int64)
    rank[sorted(range(len(listed)), key=listed.__getitem__)] = np.arange(len(listed))
    return rank[codes]
