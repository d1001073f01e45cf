"""The modified example of Tsitsiklis and Van Roy: five states, a linear value, and TD diverges.

The arrows of the paper's figure are lost; this reconstruction satisfies everything its text says: four
non-terminal states and a terminal one, γ = 1, values (w1, w2, w3, 2·w3, 0), exact at w* = (0.8, 1, 0).
(Feng et al. 2019, fig:toy_diverge)
"""

from __future__ import annotations

import numpy as np

from koffline.envs.finite import FiniteMDP

FEATURES = ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0), (0.0, 0.0, 2.0), (0.0, 0.0, 0.0))
EXACT_WEIGHTS = (0.8, 1.0, 0.0)
GAMMA = 1.0


def tsitsiklis_van_roy() -> FiniteMDP:
    """States s1 … s4 and the terminal one, in this order; episodes start in any of the first four."""
    transition = np.zeros((5, 1, 5))
    transition[0, 0, [1, 2]] = (0.8, 0.2)
    transition[1, 0, 4] = 1.0
    transition[2, 0, 3] = 1.0
    transition[3, 0, [3, 4]] = (0.95, 0.05)
    transition[4, 0, 4] = 1.0
    reward = np.zeros((5, 1))
    reward[1] = 1.0
    return FiniteMDP(transition, reward, np.arange(5) == 4, np.array([0.25, 0.25, 0.25, 0.25, 0.0]))
