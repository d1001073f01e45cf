"""Values of a value function at the rows of a log."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float


@dataclass(frozen=True, eq=False)
class RowValues:
    """A value function at the rows of a log, in units of the return.

    ``now (N,)``: Q(s, a). ``later (N,)``: E_{a'~π} Q(s', a'), undiscounted and
    regardless of ``terminated``. ``starts (E,)``: E_{a~π} Q(s0, a). ``unseen``: share
    of rows whose values come from models that were not trained on their episode.
    ``weights (N,)``: ω of rows, if the models have any.
    """

    now: Float[np.ndarray, " row"]
    later: Float[np.ndarray, " row"]
    starts: Float[np.ndarray, " start"]
    unseen: float = 1.0
    weights: np.ndarray | None = None
