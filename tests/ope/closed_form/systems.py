"""Small feature systems for the tests, also as numpy arrays."""

from __future__ import annotations

import dataclasses

import numpy as np

from koffline.ope.closed_form import doubly_robust_sums
from koffline.ope.closed_form.sums import RowSums
from koffline.ope.features import FeatureSystem, make_feature_system
from koffline.ope.importance.problem import RowValues
from koffline.ope.problem import prepare_problem
from koffline.solvers.features import RandomFourierFeatures
from tests.ope.problems import NOISY, SOFT, continuous_log, discrete_log

GAMMA = 0.9


def small_system(kind: str, *, weighted: bool = False, starts: np.ndarray | None = None) -> FeatureSystem:
    """Sixty rows in random features: discrete with episodes, or continuous independent rows."""
    generator = np.random.default_rng(5)
    log, policy = (discrete_log(), SOFT) if kind == "discrete" else (continuous_log(), NOISY)
    if weighted:
        log = log.replace(weights=generator.uniform(0.2, 2.0, size=len(log)))
    problem = prepare_problem(log, policy, GAMMA, 3, np.random.default_rng(0), starts)
    features = RandomFourierFeatures(1.5, 6, seed=1)
    return make_feature_system(problem, features, gamma=GAMMA, instruments=40, seed=2)


def plain(system: FeatureSystem) -> dict:
    """The system as numpy arrays, for the reference."""
    return {
        "now": system.now.numpy(),
        "later": system.later.numpy(),
        "starts": system.starts.numpy(),
        "rewards": system.rewards.numpy(),
        "discounts": system.discounts.numpy(),
        "weights": system.row_weights.numpy(),
        "start_weights": system.start_weights.numpy(),
        "constants": system.constants,
    }


def combined(system: FeatureSystem, values: RowValues, omega: np.ndarray) -> RowSums:
    """The doubly robust sums of given values and weights."""
    return doubly_robust_sums(lambda part: dataclasses.replace(values, weights=omega), system)


def described(system: FeatureSystem, omega: np.ndarray) -> dict[str, float]:
    """What weights are worth."""
    nothing = np.zeros(len(system))
    sums = RowSums.of(system, omega, nothing, np.zeros(len(system.start_weights)))
    return sums.diagnostics(system.start_mean.numpy())
