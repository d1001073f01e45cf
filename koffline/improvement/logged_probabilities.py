"""Whether logged probabilities of actions fit how often the actions were taken.

The sum of 1 / β(a | x) over the rows that take action a, divided by the number of all
rows, is 1 on average if β drew the actions, and less where a cannot be taken in some
states. More than 1 is a contradiction. No policy and no reward is part of it, so that
all rows of a log may be asked, and small deviations are seen that a part of the rows
does not show.
"""

from __future__ import annotations

import numpy as np
from scipy import special

from koffline.data.spaces import Discrete
from koffline.data.transitions import Transitions
from koffline.improvement.parts import IndependentRows

_P_VALUE = 1e-4  # of one log, divided by its number of actions
_NOTABLE = 1.05  # rounded probabilities deviate, too


def contradictions(log: Transitions) -> tuple[str, ...]:
    """A sentence for each action whose logged probabilities are too small for how often
    it was taken; empty without discrete actions or probabilities.

    Sums of units are compared with their own root of squares (de la Peña, Lai & Shao
    2009, Self-normalized processes), which is careful where few rows have tiny
    probabilities.
    """
    if not isinstance(log.action_space, Discrete):
        return ()
    if log.behavior_log_probabilities is None:
        return ()
    independent = IndependentRows.of(log)
    rows = independent.rows
    assert rows.behavior_log_probabilities is not None
    inverse = np.exp(-np.asarray(rows.behavior_log_probabilities, dtype=np.float64))
    weights = rows.row_weights
    actions = np.asarray(rows.actions)
    count = log.action_space.n
    sums = np.bincount(actions, weights=weights * inverse, minlength=count)
    means = sums / weights.sum()
    sentences = []
    for action in np.flatnonzero(means > _NOTABLE).tolist():
        ratios = np.where(actions == action, inverse, 0.0)
        excess = np.bincount(independent.unit_of, weights=weights * (ratios - 1.0))
        root = float(np.sqrt(np.square(excess).sum()))
        if root == 0.0:
            continue
        p_value = special.ndtr(-excess.sum() / root)
        if p_value < _P_VALUE / count:
            sentences.append(
                f"Action {action} was taken {means[action]:.3g} times as often as its"
                f" logged probabilities say (± {root / weights.sum():.2g}): they are not"
                " those by which the actions were drawn"
            )
    return tuple(sentences)
