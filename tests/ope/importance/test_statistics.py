"""Influence values are derivatives, bootstrap draws are estimates of repeated episodes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from koffline.ope.importance.estimators import (
    per_decision_is,
    per_decision_wis,
    trajectory_is,
    trajectory_wis,
    weighted_doubly_robust,
)
from koffline.ope.importance.magic import cut_steps, magic, partial_estimates
from koffline.ope.importance.statistics import EpisodeStatistic, standard_error
from koffline.ope.importance.weights import EpisodeWeights
from tests.ope.importance.cases import Case, random_case

NAMES = ["is", "pdis", "wis", "wpdis", "wdr", "partial", "magic"]


def statistic(name: str, case: Case, weights: EpisodeWeights) -> EpisodeStatistic:
    plain = {"is": trajectory_is, "pdis": per_decision_is, "wis": trajectory_wis, "wpdis": per_decision_wis}
    if name in plain:
        return plain[name](weights, case.rewards, case.gamma)
    whole = weighted_doubly_robust(weights, case.rewards, case.discounts, case.gamma, case.model)
    if name == "wdr":
        return whole
    if name == "partial":
        return replace(whole, last_step=1)
    counts = np.random.default_rng(0).multinomial(9, np.full(9, 1 / 9), size=50).astype(float)
    blend = magic(
        weighted_doubly_robust(case.weights, case.rewards, case.discounts, case.gamma, case.model),
        iter([counts]),
    )
    return replace(blend, whole=whole)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("zeros", [False, True])
def test_influence_is_the_derivative_by_shares(name: str, zeros: bool) -> None:
    """d/dε of the estimate with shares (1 − ε) s + ε e_i is the influence of episode i."""
    case = random_case(1, zeros=zeros)
    weights = case.weights
    found = statistic(name, case, weights).influence
    step = 1e-6
    for i in range(weights.n_episodes):
        towards = np.eye(weights.n_episodes)[i] - weights.shares
        up, down = (
            statistic(name, case, replace(weights, shares=weights.shares + sign * step * towards)).value
            for sign in (1.0, -1.0)
        )
        assert found[i] == pytest.approx((up - down) / (2.0 * step), rel=1e-5, abs=1e-7)
    assert weights.shares @ found == pytest.approx(0.0, abs=1e-10)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "magic"])
def test_draws_are_estimates_of_repeated_episodes(name: str) -> None:
    case = random_case(2)
    generator = np.random.default_rng(3)
    counts = generator.multinomial(9, np.full(9, 1 / 9), size=4).astype(float)
    draws = statistic(name, case, case.weights).resampled(counts)
    for draw, count in zip(draws, counts, strict=True):
        kept = count > 0
        shares = np.where(kept, count, 0.0) * case.shares
        lengths = case.weights.lengths[kept]
        rows = np.repeat(kept, case.weights.lengths)
        again = Case(
            case.transitions.select_episodes(kept),
            case.log_ratios[rows],
            replace(
                case.model,
                now=case.model.now[rows],
                later=case.model.later[rows],
                starts=case.model.starts[kept],
            ),
            case.gamma,
        )
        weights = EpisodeWeights(
            log_weights=case.weights.log_weights[rows],
            steps=case.weights.steps[rows],
            starts=np.cumsum(lengths) - lengths,
            lengths=lengths,
            shares=shares[kept] / shares.sum(),
        )
        assert draw == pytest.approx(statistic(name, again, weights).value, rel=1e-9)


def test_standard_error_of_a_mean_is_the_textbook_one() -> None:
    case = random_case(4)
    log = case.transitions.replace(weights=None)
    unweighted = Case(log, case.log_ratios, case.model, case.gamma)
    mean = trajectory_is(unweighted.weights, case.rewards, case.gamma)
    n = log.n_episodes
    assert standard_error(mean) == pytest.approx(np.std(mean.values, ddof=1) / np.sqrt(n))


def test_no_standard_error_from_one_episode() -> None:
    case = random_case(5, n_episodes=1)
    assert standard_error(trajectory_is(case.weights, case.rewards, case.gamma)) is None


def test_partial_estimates_go_from_the_model_to_the_whole() -> None:
    case = random_case(6)
    whole = weighted_doubly_robust(case.weights, case.rewards, case.discounts, case.gamma, case.model)
    parts = partial_estimates(whole, cut_steps(case.weights.horizon))
    assert parts[0].value == pytest.approx(case.shares @ case.model.starts)
    assert parts[-1].value == pytest.approx(whole.value)
