"""Labels among the observations of arrays: columns that the user declares (`--encode
COLUMN=one-hot`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from koffline.data.columns import as_array, as_float
from koffline.data.labels import MOST_LABELS, ObservationPart, make_layout
from koffline.data.raw import RawLog
from koffline.data.spaces import ONE_HOT, Features
from koffline.errors import DataError, nearest_name

# options of a mapping that arrays understand, too
OF_ARRAYS = frozenset({"one_step", "encode"})
_ALL = ("", "observations")


def with_labels(log: RawLog, encode: Mapping[str, object], source: str) -> RawLog:
    """The log with columns of its observations encoded as labels.

    encode: by column one-hot, or ``one-hot:1,2,3`` with all labels. A column is a
    feature's name, ``observations[3]``, or ``observations`` for all. Raises DataError.
    """
    known = log.metadata.features
    if known is not None and (known.layout is not None or known.encodings):
        raise DataError(f"{source}: its labels are encoded already; leave --encode out")
    observations = as_array("observations", log.columns["observations"])
    following = as_array("next_observations", log.columns["next_observations"])
    flat = observations.reshape(len(observations), -1)
    flat_following = following.reshape(len(following), -1)
    if flat.shape[1:] != flat_following.shape[1:]:
        return log  # refused with its shapes when the log is checked
    count = flat.shape[1]
    names = ["observations"]
    if count > 1:
        names = [f"observations[{i}]" for i in range(count)]
    if known is not None and len(known.names) == count:
        names = list(known.names)
    labels: dict[str, tuple[int, ...]] = {}
    for column, value in encode.items():
        declared = _declared_labels(column, value)
        chosen = [column]
        if column in _ALL:
            chosen = names
        for name in chosen:
            if name not in names:
                remedy = nearest_name(name, ["observations", *names])
                raise DataError(
                    f"{source} has no observation '{name}' (encode); {remedy}"
                )
            place = names.index(name)
            both = np.concatenate([flat[:, place], flat_following[:, place]])
            labels[name] = _labels(name, both, declared, source)
    parts = [ObservationPart(name, labels=labels.get(name)) for name in names]
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


def _declared_labels(column: str, value: object) -> tuple[str, ...]:
    """All labels of a column as texts, none if they are to be found; value: as in
    `with_labels`.

    Raises DataError unless the encoding is one-hot.
    """
    from koffline.data.table.mapping import as_encoding  # which loads polars

    try:
        encoding = as_encoding(value)
    except ValueError as error:
        raise DataError(f"--encode {column or 'observations'}: {error}") from None
    if encoding.kind != ONE_HOT:
        raise DataError(
            f"--encode {column}={encoding.kind}: numbers of arrays are taken as"
            " quantities already; leave it out, or say one-hot if they are labels"
        )
    return encoding.categories


def _labels(
    name: str, values: np.ndarray, declared: tuple[str, ...], source: str
) -> tuple[int, ...]:
    """The labels of a column, values (N,), in ascending order, declared or found.

    Raises DataError.
    """
    if values.dtype.kind == "f":
        wrong = ~np.isfinite(values) | (values != np.trunc(values))
        if wrong.any():
            raise DataError(
                f"{source}: observation {name} holds {values[int(wrong.argmax())]:g},"
                " which is no whole number; labels are whole numbers: mend such rows,"
                f" or leave {name} out of --encode"
            )
    distinct = np.unique(values)
    if len(distinct) > MOST_LABELS:
        raise DataError(
            f"{source}: observation {name} holds {len(distinct)} different numbers,"
            f" more than {MOST_LABELS}; group them, or leave {name} out of --encode"
        )
    labels = [int(label) for label in distinct.tolist()]
    if not declared:
        return tuple(labels)
    try:
        known = sorted({int(label) for label in declared})
    except ValueError:
        raise DataError(
            f"--encode {name}=one-hot:{','.join(declared)}: labels of arrays are whole"
            " numbers; list these, or none"
        ) from None
    unknown = sorted(set(labels) - set(known))
    if unknown:
        raise DataError(
            f"{source}: observation {name} holds {unknown[0]}, no label of those"
            " declared; list all of them, or none"
        )
    return tuple(known)
