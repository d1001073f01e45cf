"""Labels among the observations of arrays: columns that the user declares (`--encode
COLUMN=one-hot`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from koffline.data.columns import as_array, as_float
from koffline.data.labels import MOST_LABELS, Part, make_layout
from koffline.data.raw import RawLog
from koffline.data.spaces import ONE_HOT, Features
from koffline.errors import DataError, nearest_name

# options of a mapping that arrays understand, too
OF_ARRAYS = frozenset({"one_step", "encode"})
_ALL = ("", "observations")


def with_labels(log: RawLog, encode: Mapping[str, Any], source: str) -> RawLog:
    """The log with columns of its observations encoded as labels.

    encode: by column one-hot, or ``one-hot:1,2,3`` with all labels. A column is a
    feature's name, ``observations[3]``, or ``observations`` for all. Raises DataError.
    """
    from koffline.data.table.mapping import as_encoding  # which loads polars

    known = log.metadata.features
    if known is not None and (known.layout is not None or known.encodings):
        raise DataError(f"{source}: its labels are encoded already; leave --encode out")
    observations = as_array("observations", log.columns["observations"])
    following = as_array("next_observations", log.columns["next_observations"])
    flat, flat_following = (
        each.reshape(len(each), -1) for each in (observations, following)
    )
    if flat.shape[1:] != flat_following.shape[1:]:
        return log  # refused with its shapes when the log is checked
    count = flat.shape[1]
    if count > 1:
        names = [f"observations[{i}]" for i in range(count)]
    else:
        names = ["observations"]
    if known is not None and len(known.names) == count:
        names = list(known.names)
    labels: dict[str, tuple[int, ...]] = {}
    for column, given in encode.items():
        try:
            encoding = as_encoding(given)
        except ValueError as error:
            raise DataError(f"--encode {column or 'observations'}: {error}") from None
        if encoding.kind != ONE_HOT:
            said = (
                f"--encode {column}={encoding.kind}: numbers of arrays are taken as"
                " quantities already"
            )
            raise DataError(f"{said}; leave it out, or say one-hot if they are labels")
        chosen = names if column in _ALL else [column]
        for name in chosen:
            if name not in names:
                remedy = nearest_name(name, ["observations", *names])
                raise DataError(
                    f"{source} has no observation '{name}' (encode); {remedy}"
                )
            place = names.index(name)
            both = np.concatenate([flat[:, place], flat_following[:, place]])
            labels[name] = _labels(name, both, encoding.categories, source)
    parts = [Part(name, labels=labels.get(name)) for name in names]
    layout = make_layout(parts, observations.shape[1:], source)
    if layout is None:
        return log
    kind = as_float(observations[:1]).dtype
    columns = {
        **log.columns,
        "observations": layout.encode(observations, kind),
        "next_observations": layout.encode(following, kind),
    }
    features = Features.of_layout(layout).to_extra()
    metadata = replace(
        log.metadata, extra={**log.metadata.extra, **features}, sha256=None
    )
    return replace(log, columns=columns, metadata=metadata.with_notes(layout.note))


def _labels(
    name: str, values: np.ndarray, declared: tuple[str, ...], source: str
) -> tuple[int, ...]:
    """The labels of a column in ascending order, declared or found.

    Raises DataError.
    """
    if values.dtype.kind == "f":
        wrong = ~np.isfinite(values) | (values != np.trunc(values))
        if wrong.any():
            shown = values[int(wrong.argmax())]
            said = (
                f"{source}: observation {name} holds {shown:g}, which is no whole"
                " number"
            )
            raise DataError(
                f"{said}; labels are whole numbers: mend such rows, or leave {name} out"
                " of --encode"
            )
    found = np.unique(values)
    if len(found) > MOST_LABELS:
        said = (
            f"{source}: observation {name} holds {len(found)} different numbers, more"
            f" than {MOST_LABELS}"
        )
        raise DataError(f"{said}; group them, or leave {name} out of --encode")
    labels = [int(label) for label in found.tolist()]
    if not declared:
        return tuple(labels)
    try:
        known = sorted({int(label) for label in declared})
    except ValueError:
        said = (
            f"--encode {name}=one-hot:{','.join(declared)}: labels of arrays are whole"
            " numbers"
        )
        raise DataError(f"{said}; list these, or none") from None
    unknown = sorted(set(labels) - set(known))
    if unknown:
        said = (
            f"{source}: observation {name} holds {unknown[0]}, no label of those"
            " declared"
        )
        raise DataError(f"{said}; list all of them, or none")
    return tuple(known)
