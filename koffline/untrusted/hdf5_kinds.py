"""What an HDF5 dataset holds and how it is compressed, in the words of HDF5: what cannot be read is named."""

from __future__ import annotations

from typing import Any

import numpy as np

from koffline.errors import printable
from koffline.untrusted.limits import Refused

# Filters that come as plugins, by the numbers under which they are registered with the HDF Group.
_PLUGINS = {
    305: "LZO", 307: "bzip2", 32000: "LZF", 32001: "Blosc", 32004: "LZ4", 32008: "Bitshuffle", 32013: "ZFP",
    32015: "Zstandard", 32017: "SZ", 32024: "SZ3", 32026: "Blosc2",
}  # fmt: skip
_CHECKSUM_BYTES = 4  # Fletcher's, behind the numbers of a chunk
_KINDS = {
    "INTEGER": "whole numbers",
    "FLOAT": "floating-point numbers",
    "TIME": "times (H5T_TIME)",
    "STRING": "texts",
    "BITFIELD": "bit fields",
    "OPAQUE": "opaque bytes",
    "COMPOUND": "compound records",
    "REFERENCE": "references",
    "ENUM": "named values (an enumeration)",
    "VLEN": "sequences of any length",
    "ARRAY": "arrays within rows",
    "COMPLEX": "complex numbers",
}


def held_kind(found: Any) -> str:
    """What an h5py.Dataset holds, by the class of its type in the file."""
    from h5py import h5t

    if found.shape is None:
        return "nothing (a null dataspace)"
    kind = found.id.get_type().get_class()
    return next(
        (words for name, words in _KINDS.items() if getattr(h5t, name, None) == kind), "values unknown"
    )


def dtype_of(found: Any, name: str) -> np.dtype:
    """The dtype in which h5py hands the values out. Raises Refused where NumPy has none for them."""
    try:
        dtype: np.dtype = found.dtype
    except (TypeError, ValueError, NotImplementedError):
        size = found.id.get_type().get_size()
        raise Refused(
            f"{name} holds {held_kind(found)} of {size} bytes each, for which NumPy has no type; give "
            "numbers, one row per transition"
        ) from None
    return dtype


def check_filters(plan: Any, name: str) -> None:
    """Raise Refused where a filter of a dataset, given its creation plan, is missing on this machine."""
    from h5py import h5z

    for i in range(plan.get_nfilters()):
        code, _, _, said = plan.get_filter(i)
        if not h5z.filter_avail(code):
            known = _PLUGINS.get(code) or printable(said.decode("utf-8", "replace"))[:40] or "of no name"
            raise Refused(
                f"{name} uses HDF5 filter {code} ({known}), which this HDF5 library lacks; rewrite it with "
                "gzip (h5repack -f GZIP=4)"
            )


def check_checksums(found: Any, plan: Any, name: str) -> None:
    """Raise Refused for a stored chunk that is shorter than its checksum: HDF5 itself would crash on it."""
    from h5py import h5z

    if h5z.FILTER_FLETCHER32 not in [plan.get_filter(i)[0] for i in range(plan.get_nfilters())]:
        return
    short: list[int] = []
    found.id.chunk_iter(lambda chunk: short.append(chunk.size) if chunk.size < _CHECKSUM_BYTES else None)
    if short:
        raise Refused(
            f"{name} has a chunk of {short[0]} bytes with a checksum of {_CHECKSUM_BYTES}; it is damaged"
        )
