"""Rows that a value function was fitted to, on which a test of it is not valid.

Rows are recognised by fingerprints of (s, a, r, s'), rounded to float32 as models and files keep them: an
overlap shows after any selection, reordering or change of file format. Where a world repeats itself (few
states) equal rows are no proof: the share of tested rows seen in training is compared with the share of
training rows that have a twin among themselves, which is what fresh rows of the same world would show.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import UInt64

from koffline.data.transitions import Transitions
from koffline.data.units import hash_rows
from koffline.errors import ConfigError

_DEVIATIONS = 4.0
_REPEATS = 0.5  # share of rows with an equal row above which equality is no evidence


@dataclass(frozen=True, eq=False)
class Provenance:
    """The M rows that a value function was fitted to: ``rows (M,)`` are their fingerprints."""

    rows: UInt64[np.ndarray, " row"] = field(repr=False)

    def __len__(self) -> int:
        return len(self.rows)

    @classmethod
    def of(cls, transitions: Transitions) -> Provenance:
        """Provenance of a function fitted to this log, without rows of weight zero."""
        rows = row_fingerprints(transitions)
        return cls(rows if transitions.weights is None else rows[transitions.weights > 0.0])


def row_fingerprints(transitions: Transitions) -> UInt64[np.ndarray, " row"]:
    """Fingerprint (N,) of each row's (s, a, r, s'), rounded to float32; equal rows have equal ones."""
    with np.errstate(over="ignore", invalid="ignore"):
        return hash_rows(transitions, precision=np.float32)


def measure_freshness(
    value_function: Any,
    transitions: Transitions,
    trained_on: Provenance | Transitions | None = None,
    allow: bool = False,
) -> tuple[bool | None, tuple[str, ...]]:
    """Whether the rows were held out from training (None: unknown), and sentences about it.

    trained_on: the training rows where the value function (its ``trained_on``) does not know them; wins.
    Raises ConfigError when tested rows are among them, unless ``allow``.
    """
    known = trained_on if trained_on is not None else value_function.trained_on
    name = value_function.name
    if known is None:
        unknown = f"It is not known which rows {name} was fitted to"
        return None, (f"{unknown}; if these are among them, the test says nothing.",)
    trained = (Provenance.of(known) if isinstance(known, Transitions) else known).rows
    tested = Provenance.of(transitions).rows
    if not (len(trained) and len(tested)):
        return True, ()
    values, counts = np.unique(trained, return_counts=True)
    seen = float(np.isin(tested, values).mean())
    twins = float(counts[counts > 1].sum() / len(trained))  # share expected of fresh rows
    fewer = 1.0 / min(len(trained), len(tested))  # allows for a few equal rows even if none was found
    chance = min(max(twins, fewer), 1.0 - fewer) if fewer < 0.5 else 0.5
    margin = _DEVIATIONS * math.sqrt(chance * (1.0 - chance) * (1.0 / len(tested) + 2.0 / len(trained)))
    if seen > twins + margin:
        share = f"{seen:.0%}" if seen >= 0.01 else f"{seen:.1g} (share)"
        if not allow:
            raise ConfigError(
                f"{name} was fitted to {share} of these rows, on which a test says nothing; test other "
                "rows, fit by koffline.cross_fit (or test the models kloss and fqe of koffline diagnose), or "
                "allow it with allow_training_rows=True (--allow-training-rows)"
            )
        return False, (f"{share} of the rows were used to fit {name}: non-rejection on them says nothing.",)
    if twins > _REPEATS:
        return None, (
            f"Rows repeat themselves ({twins:.0%} have a twin): whether {name} was fitted to the "
            "tested ones cannot be seen; make sure that they are fresh.",
        )
    if seen > 0.0 and twins == 0.0:
        count = round(seen * len(transitions))
        return True, (f"{count} of the rows equal rows that {name} was fitted to.",)
    return True, ()
