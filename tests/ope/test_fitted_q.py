"""Preparation, resampling, and training in rounds: it stops once the estimate has
settled, not before.
"""

import math

import numpy as np
import pytest
from scipy import stats

import koffline
from koffline.data.hashing import poisson_counts
from koffline.errors import DataError
from koffline.ope.log.problem import prepare_problem
from koffline.ope.networks import fitted_q as training
from koffline.ope.networks.resampling import Resampling
from tests.ope.problems import SOFT, discrete_log, prepared


def test_time_limits_do_not_cut_the_future() -> None:
    log = discrete_log()
    problem = prepared("discrete", gamma=0.9)
    assert log.truncated.any()
    np.testing.assert_allclose(problem.discounts, np.where(log.terminated, 0.0, 0.9))


def test_resampling_counts_whole_episodes_and_their_starts() -> None:
    problem = prepared("discrete")
    drawn = Resampling.draw(problem, 1, 3, seed=1)
    assert drawn.roles == ("full", "resampled", "resampled", "resampled")
    counts = drawn.row_counts(problem)
    np.testing.assert_array_equal(
        counts, drawn.start_weights(problem)[:, 0].repeat_interleave(10, dim=1)
    )
    np.testing.assert_array_equal(counts[0], np.ones(60))
    assert not np.array_equal(counts[1], counts[2])
    alone = prepared("continuous")
    drawn = Resampling.draw(alone, 0, 2, seed=1)
    np.testing.assert_array_equal(
        drawn.row_counts(alone), drawn.start_weights(alone)[:, 0]
    )
    of_starts = prepare_problem(
        discrete_log(), SOFT, 0.9, 1, np.random.default_rng(0), np.zeros((4, 2))
    )
    assert Resampling.draw(of_starts, 0, 2, seed=1).start_weights(of_starts).shape == (
        2,
        2,
        4,
    )


def test_poisson_counts_have_the_law_of_their_name() -> None:
    counts = poisson_counts(3, range(5), np.arange(20_000)).ravel()
    expected = stats.poisson.pmf(np.arange(5), 1.0)
    observed = np.bincount(np.minimum(counts, 5), minlength=6)[:5] / len(counts)
    np.testing.assert_allclose(
        observed, expected, atol=5.0 * 0.5 / math.sqrt(len(counts))
    )
    first, second = poisson_counts(3, range(2), np.arange(20_000))
    assert abs(np.corrcoef(first, second)[0, 1]) < 5.0 / math.sqrt(20_000)
    np.testing.assert_array_equal(
        poisson_counts(3, [0], np.arange(7, 90))[0], first[7:90]
    )


@pytest.mark.parametrize("name", ["observations", "rewards", "next_observations"])
def test_numbers_that_would_overflow_are_refused(name: str) -> None:
    log = discrete_log()
    column = np.array(getattr(log, name))
    column[7] = -1e200
    with pytest.raises(DataError, match=f"{name} reaches 1e.200 in row 7"):
        prepare_problem(
            log.replace(**{name: column}), SOFT, 0.9, 1, np.random.default_rng(0)
        )


QUICK = {
    "full_replicas": 2,
    "resampled_replicas": 3,
    "hidden_units": (8, 8),
    "instruments": 60,
}


@pytest.fixture
def _short_rounds(monkeypatch):
    monkeypatch.setattr(training, "SHORTEST", 10)
    monkeypatch.setattr(training, "MOST_STEPS", 80)


def evaluated(**options) -> koffline.Estimate:
    return koffline.evaluate(discrete_log(), SOFT, 0.9, **QUICK, **options)


@pytest.mark.usefixtures("_short_rounds")
@pytest.mark.parametrize(
    ("options", "steps"),
    [({"agreement": 1e9}, 20), ({"agreement": 1e-9}, 80), ({"steps": 25}, 25)],
)
def test_it_trains_as_long_as_the_estimate_moves(monkeypatch, options, steps) -> None:
    monkeypatch.setattr(training, "_LEAST", 0.0)
    monkeypatch.setattr(training, "_BETTER", 0.0)
    assert evaluated(**options).diagnostics["training_steps"] == steps


@pytest.mark.usefixtures("_short_rounds")
def test_rounds_are_so_many_steps() -> None:
    first, same = (
        evaluated(estimator="kloss", **changes)
        for changes in ({"agreement": 1e9}, {"steps": 20})
    )
    assert (first.value, first.interval.low) == (same.value, same.interval.low)


@pytest.mark.usefixtures("_short_rounds")
@pytest.mark.parametrize(
    ("losses", "steps"), [((8.0, 4.0, 2.0), 80), ((8.0, 7.9), 20), ((8.0, 9.9), 20)]
)
def test_features_are_learnt_while_the_held_out_loss_falls(
    monkeypatch, losses, steps
) -> None:
    losses_told = iter(losses)
    monkeypatch.setattr(training, "_SHARP", 0.0)
    monkeypatch.setattr(
        training.Training, "_held_out_loss", lambda self, network: next(losses_told)
    )
    assert evaluated(agreement=1e9).diagnostics["training_steps"] == steps
