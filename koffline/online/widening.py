"""A policy that grows wider while its returns fall: noticed from the rows of a run's
logs.

A critic that is wrong about the effect of the policy's noise can let the deviation grow
until what was learned is lost (seen with the kernel loss on InvertedDoublePendulum: from
0.34 to 1.09). Growth alone is exploration, and falling returns alone are noise: the two
together, compared with the best time of the run, are worth a warning.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

_AVERAGED = 3  # evaluations in a mean, because single ones are noisy
_GROWTH = 1.5  # of the deviation since the best returns
_LOST = 0.5  # share of what was learned up to the best returns


class Widening(NamedTuple):
    """The policy's mean standard deviation and sampled return, at the best returns and
    now.
    """

    deviation_then: float
    deviation_now: float
    return_then: float
    return_now: float


def find_widening(
    returns: Sequence[float], deviations: Sequence[float]
) -> Widening | None:
    """Compare the last evaluations of a run with its best; None if there is nothing to
    warn of.

    returns: of the sampled policy, one per evaluation; NaN before the first episode.
    deviations: of the policy over the steps before each evaluation; NaN for discrete
    actions. Both are averaged over three evaluations; a warning needs a deviation 1.5
    times that at the best returns, and half of the returns' rise lost.
    """
    pairs = np.array([returns, deviations], dtype=np.float64)
    pairs = pairs[:, np.isfinite(pairs).all(axis=0)]
    if pairs.shape[1] < 2 * _AVERAGED:
        return None
    windows = np.lib.stride_tricks.sliding_window_view(pairs, _AVERAGED, axis=1)
    means = windows.mean(axis=2)  # (2, evaluations − 2)
    best = int(means[0].argmax())
    rise = means[0, best] - means[0, : best + 1].min()
    if best == 0:  # the returns never rose: measure the fall by their size
        rise = abs(means[0, 0])
    then = means[:, best]
    now = means[:, -1]
    has_fallen = now[0] < then[0] - _LOST * rise
    has_grown = now[1] >= _GROWTH * then[1]
    if rise > 0.0 and has_fallen and has_grown:
        return Widening(
            deviation_then=float(then[1]),
            deviation_now=float(now[1]),
            return_then=float(then[0]),
            return_now=float(now[0]),
        )
    return None
