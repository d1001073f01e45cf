"""Cumulative weights: sums by step against loops, logarithms that neither overflow nor vanish, bad input."""

from __future__ import annotations

import numpy as np
import pytest

from koffline.errors import ConfigError, DataError
from koffline.ope.importance.estimators import per_decision_wis, trajectory_wis
from koffline.ope.importance.weights import effective_size, make_weights
from tests import reference_importance as reference
from tests.ope.importance.cases import random_case


@pytest.mark.parametrize("zeros", [False, True])
def test_sums_and_effective_sizes_equal_loops(zeros: bool) -> None:
    case = random_case(1, zeros=zeros)
    totals = [sum(row) for row in reference.step_weights(case.episodes, case.shares)]
    np.testing.assert_allclose(np.exp(case.weights.log_totals), totals, rtol=1e-12)
    expected = reference.effective_sizes(case.episodes, case.shares)
    np.testing.assert_allclose(case.weights.effective_sizes, expected, rtol=1e-12)


def test_equal_weights_count_every_episode() -> None:
    case = random_case(2)
    log = case.transitions.replace(weights=None)
    weights = make_weights(log, np.zeros(len(log)))
    np.testing.assert_allclose(weights.effective_sizes, log.n_episodes)
    assert effective_size(np.zeros(5)) == pytest.approx(5.0)
    assert effective_size(np.log([3.0, 1.0])) == pytest.approx(16.0 / 10.0)
    assert effective_size(np.full(4, -np.inf)) == 0.0


@pytest.mark.parametrize("shift", [-800.0, 800.0])
def test_common_factors_of_any_size_cancel(shift: float) -> None:
    """e^±800 is beyond float64, yet self-normalised estimates see only ratios of weights."""
    case = random_case(3)
    log, first = case.transitions, np.asarray(case.transitions.steps) == 0
    moved = make_weights(log, case.log_ratios + shift * first)
    for estimator in (trajectory_wis, per_decision_wis):
        here = estimator(case.weights, case.rewards, case.gamma)
        there = estimator(moved, case.rewards, case.gamma)
        assert there.value == pytest.approx(here.value, rel=1e-9)
        np.testing.assert_allclose(there.deviations, here.deviations, rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(moved.effective_sizes, case.weights.effective_sizes, rtol=1e-9)


def test_clip_caps_cumulative_weights() -> None:
    case = random_case(4)
    capped = make_weights(case.transitions, case.log_ratios, clip=1.5)
    expected = np.minimum(np.exp(case.weights.log_weights), 1.5)
    np.testing.assert_allclose(np.exp(capped.log_weights), expected)
    with pytest.raises(ConfigError, match="clip is 0"):
        make_weights(case.transitions, case.log_ratios, clip=0.0)


def test_rows_without_episodes_are_refused() -> None:
    case = random_case(5)
    alone = case.transitions.replace(episode_ids=None, steps=None)
    with pytest.raises(DataError, match="whole episodes"):
        make_weights(alone, case.log_ratios)


def test_row_weights_that_change_inside_an_episode_are_refused() -> None:
    case = random_case(6)
    weights = np.asarray(case.transitions.weights).copy()
    row = int(np.flatnonzero(np.asarray(case.transitions.steps) == 1)[0])
    weights[row] *= 2.0
    with pytest.raises(DataError, match=f"row {row}"):
        make_weights(case.transitions.replace(weights=weights), case.log_ratios)
