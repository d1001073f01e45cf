"""Which rows a value function has seen, and cross-fitting."""

import numpy as np
import pytest

import koffline
from koffline.errors import ConfigError, DataError
from koffline.ope.bellman_test.front import bellman_test
from koffline.ope.cross_fit import assign_folds, cross_fit, measure_freshness, next_row_values, row_values
from koffline.ope.value_functions import as_value_function, counted_rows, row_fingerprints
from tests.ope.bellman_test.problems import known_problem
from tests.ope.problems import SOFT, discrete_log

LOG = discrete_log()


def fitted_to(log: koffline.Transitions | None):
    seen = None if log is None else counted_rows(log)
    return as_value_function(
        lambda s, a: s[:, 0], LOG.action_space, LOG.observation_shape, name="q", trained_on=seen
    )


def test_training_rows_are_refused_after_any_selection() -> None:
    single = {name: getattr(LOG, name).astype(np.float32) for name in ("observations", "next_observations")}
    parts = LOG, LOG.select(np.arange(0, 60, 3)), LOG.select(np.arange(60)[::-1]), LOG.replace(**single)
    for part in parts:
        with pytest.raises(ConfigError, match=r"was fitted to 100% of these rows.*allow_training_rows=True"):
            measure_freshness(fitted_to(LOG), part)
    assert "non-rejection on them says nothing" in measure_freshness(fitted_to(LOG), LOG, allow=True)[1][0]
    half = LOG.select(np.arange(30))
    with pytest.raises(ConfigError, match="50%"):
        measure_freshness(fitted_to(half), LOG)
    assert measure_freshness(fitted_to(half), LOG.select(np.arange(30, 60))) == (True, ())


def test_worlds_that_repeat_themselves_do_not_raise_false_alarms() -> None:
    log = known_problem(0, 800, "episodes", states=5).transitions
    trained, fresh = log.select(np.arange(400)), log.select(np.arange(400, 800))
    for log in (fresh, trained):
        found = measure_freshness(fitted_to(trained), log)
        assert found[0] is None
        assert "Rows repeat themselves" in found[1][0]


def test_folds_are_whole_episodes_of_equal_number() -> None:
    folds = assign_folds(LOG, 3, 0)
    per_episode = folds.reshape(6, 10)
    assert (per_episode == per_episode[:, :1]).all()
    np.testing.assert_array_equal(np.bincount(per_episode[:, 0]), [2, 2, 2])
    np.testing.assert_array_equal(folds, assign_folds(LOG, 3, 0))
    for folds in (1, 7):
        with pytest.raises(ConfigError, match=f"folds is {folds} for a log of 6 episodes"):
            assign_folds(LOG, folds, 0)


def test_every_row_is_spoken_for_by_a_model_that_has_not_seen_it() -> None:
    seen = []

    def fit(part):
        seen.append(part)
        mean = float(part.rewards.mean())
        return lambda s, a: np.full(len(s), mean)

    made = cross_fit(LOG, fit, folds=3, seed=1)
    values = row_values(made, LOG)
    for number, part in enumerate(seen):
        own = made.folds == number
        assert not np.intersect1d(row_fingerprints(part), row_fingerprints(LOG)[own]).size
        np.testing.assert_allclose(values[own], part.rewards.mean())
        assert measure_freshness(made.parts[number], LOG.select(np.flatnonzero(own))) == (True, ())
    np.testing.assert_allclose(next_row_values(made, LOG, SOFT), values)
    with pytest.raises(DataError, match="give the same log"):
        row_values(made, LOG.select(np.arange(59)))


def test_models_of_different_folds_are_never_multiplied() -> None:
    made = cross_fit(LOG, lambda part: lambda s, a: np.full(len(s), part.rewards.mean()), folds=2, seed=0)
    found = bellman_test(made, LOG, SOFT, 0.9, draws=99, features=0)
    assert found.held_out
    gram = found.rows.space.kernel.gram(found.rows.inputs).numpy()
    together = made.folds[:, None] == made.folds
    residuals = found.rows.residuals
    total = residuals @ (gram * together) @ residuals
    assert found.statistic == pytest.approx(total / 60, rel=1e-9)
    loss = (total - (residuals**2).sum()) / (together.sum() - 60)
    assert found.kernel_loss == pytest.approx(loss, rel=1e-9)
