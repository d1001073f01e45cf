"""What a value function says about the rows of a log."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from koffline.errors import DataError


@dataclass(frozen=True, eq=False)
class RowValues:
    """A value function at the rows of a log, in units of the return.

    ``now (N,)``: Q(s, a). ``later (N,)``: E_{a'~π} Q(s', a'), not discounted, whatever ``terminated`` says.
    ``starts (E,)``: E_{a~π} Q(s0, a). ``unseen``: share of rows whose values come from models that were not
    trained on their episode. ``notes`` say what else a reader must know of the model. Raises DataError for
    numbers that are not finite.
    """

    now: np.ndarray
    later: np.ndarray
    starts: np.ndarray
    unseen: float = 1.0
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("now", "later", "starts"):
            array = np.asarray(getattr(self, name), dtype=np.float64)
            if array.ndim != 1 or not np.isfinite(array).all():
                raise DataError(
                    f"the model's values ({name}) have shape {array.shape} or are not finite; "
                    "give one number per row or episode"
                )
            object.__setattr__(self, name, array)

    def check_sizes(self, n_rows: int, n_starts: int) -> None:
        """DataError unless there is one value per row and per start state of the log."""
        found = len(self.now), len(self.later), len(self.starts)
        if found != (n_rows, n_rows, n_starts):
            raise DataError(
                f"the model's values have lengths {found}, the log {n_rows} rows and {n_starts} starts; "
                "ask the model at the log's own rows and first states"
            )
