"""Deviations are what leaving an episode out does, bootstrap draws are estimates of repeated episodes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from koffline.ope.importance import statistics
from koffline.ope.importance.estimators import (
    per_decision_is,
    per_decision_wis,
    trajectory_is,
    trajectory_wis,
    weighted_doubly_robust,
)
from koffline.ope.importance.magic import cut_steps
from koffline.ope.importance.statistics import EpisodeStatistic, plain_mean, standard_error
from koffline.ope.importance.weights import EpisodeWeights
from tests.ope.importance.cases import Case, random_case

NAMES = ["is", "pdis", "wis", "wpdis", "wdr"]


def statistic(name: str, case: Case, weights: EpisodeWeights) -> EpisodeStatistic:
    plain = {"is": trajectory_is, "pdis": per_decision_is, "wis": trajectory_wis, "wpdis": per_decision_wis}
    if name in plain:
        return plain[name](weights, case.rewards, case.gamma)
    return weighted_doubly_robust(weights, case.rewards, case.discounts, case.gamma, case.model)


def counted(case: Case, counts: np.ndarray) -> tuple[Case, EpisodeWeights]:
    """The case with episodes counted that often, those of zero left out."""
    kept = counts > 0
    rows = np.repeat(kept, case.weights.lengths)
    lengths = case.weights.lengths[kept]
    shares = (counts * case.shares)[kept]
    model = replace(
        case.model, now=case.model.now[rows], later=case.model.later[rows], starts=case.model.starts[kept]
    )
    weights = EpisodeWeights(
        log_weights=case.weights.log_weights[rows],
        steps=case.weights.steps[rows],
        starts=np.cumsum(lengths) - lengths,
        lengths=lengths,
        shares=shares / shares.sum(),
    )
    picked = Case(case.transitions.select_episodes(kept), case.log_ratios[rows], model, case.gamma)
    return picked, weights


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(4))
def test_deviations_are_those_of_leaving_episodes_out(name: str, seed: int) -> None:
    case = random_case(seed, zeros=seed >= 2)
    here = statistic(name, case, case.weights)
    for i in range(case.weights.n_episodes):
        counts = np.ones(case.weights.n_episodes)
        counts[i] = 0.0
        without = statistic(name, *counted(case, counts)).value
        assert here.deviations[i] == pytest.approx(here.value - without, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", [2, 3])
def test_draws_are_estimates_of_repeated_episodes(name: str, seed: int) -> None:
    case = random_case(seed, zeros=seed == 3)
    counts = np.random.default_rng(3).multinomial(9, np.full(9, 1 / 9), size=4).astype(float)
    draws = statistic(name, case, case.weights).resampled(counts)
    for draw, count in zip(draws, counts, strict=True):
        assert draw == pytest.approx(statistic(name, *counted(case, count)).value, rel=1e-9)


def test_blocks_of_ended_episodes_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    case = random_case(4, n_episodes=20, longest=3)
    counts = np.random.default_rng(3).multinomial(20, np.full(20, 1 / 20), size=4).astype(float)
    whole = statistic("wdr", case, case.weights)
    blocked = statistic("wdr", case, case.weights)
    monkeypatch.setattr(statistics, "_MOST_NUMBERS", 1)
    np.testing.assert_allclose(blocked.deviations, whole.deviations)
    np.testing.assert_allclose(blocked.resampled(counts), whole.resampled(counts))


def test_partial_sums_are_those_of_a_log_that_stops_there() -> None:
    case = random_case(5)
    whole = weighted_doubly_robust(case.weights, case.rewards, case.discounts, case.gamma, case.model)
    cuts = cut_steps(case.weights.horizon)
    counts = np.random.default_rng(3).multinomial(9, np.full(9, 1 / 9), size=4).astype(float)
    for column, cut in enumerate(cuts):
        stop = case.weights.horizon if cut is None else cut + 1
        stopped = replace(whole, rows=np.where(case.weights.steps < stop, whole.rows, 0.0))
        assert whole.partial_values(cuts)[column] == pytest.approx(stopped.value)
        np.testing.assert_allclose(whole.partial_deviations(cuts)[:, column], stopped.deviations)
        np.testing.assert_allclose(
            whole.partial_resampled(counts, cuts)[:, column], stopped.resampled(counts)
        )
    assert whole.partial_values([-1])[0] == pytest.approx(case.shares @ case.model.starts)


def test_standard_error_of_a_mean_is_the_textbook_one() -> None:
    values = np.random.default_rng(0).standard_normal(11)
    mean = plain_mean(values, np.full(11, 1 / 11))
    assert standard_error(mean) == pytest.approx(np.std(values, ddof=1) / np.sqrt(11))


def test_no_standard_error_from_one_episode_or_one_with_all_the_weight() -> None:
    case = random_case(6, n_episodes=1)
    assert standard_error(trajectory_is(case.weights, case.rewards, case.gamma)) is None
    one = replace(
        random_case(7).weights, log_weights=np.where(random_case(7).weights.episodes == 0, 0.0, -np.inf)
    )
    assert standard_error(trajectory_wis(one, random_case(7).rewards, 0.9)) is None
