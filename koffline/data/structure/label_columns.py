"""Symptoms of whole numbers that look like labels."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from koffline.data.independence import independent_units
from koffline.data.structure.labels import find_labels
from koffline.data.structure.symptom import Symptom
from koffline.data.transitions import Transitions


def label_symptoms(log: Transitions) -> Iterator[Symptom]:
    """Yield a symptom for each number of the observations that looks like a label.

    Columns whose encoding the user named are not looked at, and pictures (uint8)
    neither.
    """
    observations = np.asarray(log.observations)
    if observations.ndim != 2 or observations.dtype == np.uint8:
        return
    columns = find_labels(
        observations=observations,
        next_observations=np.asarray(log.next_observations),
        goes_on=~np.asarray(log.terminated),
        rewards=np.asarray(log.rewards, dtype=np.float64),
        actions=np.asarray(log.actions),
        units=independent_units(log).of_row,
        names=log.feature_names,
    )
    features = log.metadata.features
    if features is None:
        encoded = set()
    else:
        encoded = set(features.encodings)
    for column in columns:
        if column.label in encoded:
            continue
        yield Symptom(
            test="labels read as quantities",
            kind="labels",
            rows=len(log),
            of=len(log),
            p_value=column.structure_p_value,
            statement=column.statement,
            remedy=column.remedy,
        )
