"""Value functions from whatever holds one, the rows that they have seen, and
cross-fitting.
"""

import inspect

import numpy as np
import pytest
import torch

import koffline
from koffline.config import make_bellman_settings
from koffline.errors import ConfigError, DataError
from koffline.ope.bellman_test import bellman_test
from koffline.ope.bellman_test.case import make_case
from koffline.ope.cross_fit import assign_folds, cross_fit, measure_freshness
from koffline.ope.value_functions import (
    as_value_function,
    counted_rows,
    row_fingerprints,
)
from tests.ope.bellman_test.problems import known_problem
from tests.ope.problems import NOISY, QUICK, SOFT, discrete_log
from tests.refusals import one_line

THREE = koffline.Discrete(3)
STATES = np.random.default_rng(0).normal(size=(7, 2))
ACTIONS = np.array([0, 1, 2, 0, 1, 2, 0])
LOG = discrete_log()


def table(states):
    """Q(s, ·) of three actions."""
    return np.stack([states[:, 0], states[:, 1], states[:, 0] + 2.0], axis=1)


def q(states, actions):
    return table(states)[np.arange(len(states)), actions]


@pytest.mark.parametrize("source", [q, table])
def test_a_function_of_actions_or_a_table_of_them(source) -> None:
    value_function = as_value_function(source, THREE, (2,))
    assert value_function.name == source.__name__
    np.testing.assert_array_equal(
        value_function.values(STATES, ACTIONS), q(STATES, ACTIONS)
    )
    expected = (SOFT.probabilities(STATES) * table(STATES)).sum(axis=1)
    np.testing.assert_allclose(
        value_function.expected(STATES, SOFT), expected, rtol=1e-12
    )


def test_expectation_over_a_continuous_policy_averages_its_draws() -> None:
    value_function = as_value_function(
        lambda states, actions: actions[:, 0], koffline.Continuous(1, -1.0, 1.0), (2,)
    )
    generator = np.random.default_rng(1)
    draws = np.mean([NOISY.sample(STATES, generator)[:, 0] for _ in range(5)], axis=0)
    np.testing.assert_allclose(
        value_function.expected(STATES, NOISY, 5, np.random.default_rng(1)),
        draws,
        rtol=1e-12,
    )


class Both(torch.nn.Module):
    def forward(self, states: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        return states.sum(1) + actions


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torch_modules_files_and_python_names(tmp_path, monkeypatch) -> None:
    module = torch.nn.Linear(2, 3)
    of_module = as_value_function(module, THREE, (2,)).values(STATES, ACTIONS)
    whole = module(torch.as_tensor(STATES, dtype=torch.float32)).detach().numpy()
    np.testing.assert_allclose(of_module, whole[np.arange(7), ACTIONS], rtol=1e-5)
    torch.jit.script(Both()).save(str(tmp_path / "q.pt"))
    (tmp_path / "my_values.py").write_text(
        "def q(states, actions):\n    return states.sum(1) + actions\n"
    )
    monkeypatch.chdir(tmp_path)
    for source in (tmp_path / "q.pt", "my_values:q"):
        values = as_value_function(source, THREE, (2,)).values(STATES, ACTIONS)
        np.testing.assert_allclose(values, STATES.sum(axis=1) + ACTIONS, rtol=1e-5)


def test_models_of_d3rlpy_keep_their_scalers_and_undo_that_of_rewards(tmp_path) -> None:
    from tests import d3_models

    for actions, shape, message in (
        (3, (4,), "4 discrete actions, the log 3"),
        (4, (2,), r"shape \(4,\)"),
    ):
        with pytest.raises(DataError, match=message):
            as_value_function(
                d3_models.build("DQN", 4), koffline.Discrete(actions), shape
            )
    raw = d3_models.raw_observations(16)
    actions = np.arange(16) % 3
    scaled = d3_models.build("DQN", 3, observation_scaler=d3_models.standard_scaler())
    path = d3_models.saved(scaled, tmp_path)
    value_function = as_value_function(path, THREE, (4,))
    assert value_function.name == path
    assert value_function.trained_on is None
    np.testing.assert_allclose(
        value_function.values(raw, actions),
        scaled.predict_value(raw, actions),
        rtol=1e-6,
    )
    preprocessing = d3_models.d3rlpy.preprocessing
    scaled.config.reward_scaler = preprocessing.MultiplyRewardScaler(4.0)
    of_scaled = as_value_function(scaled, THREE, (4,)).values(raw, actions)
    np.testing.assert_allclose(
        of_scaled, scaled.predict_value(raw, actions) / 4.0, rtol=1e-6
    )
    scaled.config.reward_scaler = preprocessing.StandardRewardScaler(
        mean=2.0, std=3.0, eps=0.0
    )
    shifted = as_value_function(scaled, THREE, (4,))
    expected = 3.0 * scaled.predict_value(raw, actions) + 2.0 / (
        1.0 - scaled.config.gamma
    )
    np.testing.assert_allclose(shifted.values(raw, actions), expected, rtol=1e-5)
    assert "subtracted 2" in shifted.notes[0]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (lambda s, a: s, r"shape \(7, 2\) for 7 rows"),
        (lambda s, a: np.full(len(s), np.nan), "a value is nan"),
        (lambda s, a: 1 / 0, "ZeroDivisionError"),
        (3.0, "float is no value function"),
        (lambda s: np.zeros((len(s), 4)), r"shape \(7, 4\)"),
    ],
)
def test_what_is_no_value_function_is_one_line(source, message) -> None:
    with one_line(DataError, match=message):
        as_value_function(source, THREE, (2,)).values(STATES, ACTIONS)


def test_an_evaluation_gives_its_value_function() -> None:
    estimate = koffline.evaluate(LOG, SOFT, 0.9, **QUICK)
    of_estimate = as_value_function(estimate, THREE, (2,))
    assert of_estimate is estimate.value_function
    assert of_estimate.expected(
        LOG.initial_observations(), SOFT
    ).mean() == pytest.approx(estimate.value, rel=1e-5)
    assert "value_function" not in estimate.as_dict()
    without = koffline.evaluate(LOG, SOFT, 0.9, estimator="lstdq", **QUICK)
    assert without.value_function is None
    with pytest.raises(DataError, match="Estimate is no value function"):
        as_value_function(without, THREE, (2,))


def fitted_to(log: koffline.Transitions):
    return as_value_function(
        lambda s, a: s[:, 0], THREE, (2,), name="q", trained_on=counted_rows(log)
    )


def test_training_rows_are_refused_after_any_selection() -> None:
    single = {
        name: getattr(LOG, name).astype(np.float32)
        for name in ("observations", "next_observations")
    }
    parts = (
        LOG,
        LOG.select(np.arange(0, 60, 3)),
        LOG.select(np.arange(60)[::-1]),
        LOG.replace(**single),
    )
    for part in parts:
        with pytest.raises(
            ConfigError,
            match=r"was fitted to 100% of these rows.*allow_training_rows=True",
        ):
            measure_freshness(fitted_to(LOG), part)
    assert (
        "non-rejection on them says nothing"
        in measure_freshness(fitted_to(LOG), LOG, allow=True)[1][0]
    )
    half = LOG.select(np.arange(30))
    with pytest.raises(ConfigError, match="50%"):
        measure_freshness(fitted_to(half), LOG)
    assert measure_freshness(fitted_to(half), LOG.select(np.arange(30, 60))) == (
        True,
        (),
    )


def test_worlds_that_repeat_themselves_do_not_raise_false_alarms() -> None:
    log = known_problem(0, 800, "episodes", states=5).transitions
    trained = log.select(np.arange(400))
    fresh = log.select(np.arange(400, 800))
    for log in (fresh, trained):
        freshness = measure_freshness(fitted_to(trained), log)
        assert freshness[0] is None
        assert "Rows repeat themselves" in freshness[1][0]


def test_what_needs_rows_in_memory_says_so() -> None:
    for ask in (koffline.bellman_test, koffline.diagnose, koffline.cross_fit):
        unchecked = getattr(ask, "__wrapped__", ask)  # types are checked in tests alone
        with one_line(
            DataError, match=r"the log is a type; give .*koffline\.open_transitions"
        ):
            unchecked(
                *(
                    (sum, type, "uniform")
                    if "q" in inspect.signature(ask).parameters
                    else (type, sum)
                )
            )
    with one_line(
        DataError, match="the first argument is a log; give the value function, the log"
    ):
        getattr(koffline.diagnose, "__wrapped__", koffline.diagnose)(
            LOG, sum, "uniform"
        )
    with one_line(DataError, match=r"to fit one: koffline\.cross_fit"):
        koffline.diagnose("kloss", LOG, "uniform")


def test_a_function_that_writes_into_its_input_leaves_the_log_as_it_is() -> None:
    before = LOG.observations.copy()
    as_value_function(lambda s, a: np.add(s, 1.0, out=s)[:, 0], THREE, (2,)).values(
        LOG.observations, LOG.actions
    )
    np.testing.assert_array_equal(LOG.observations, before)


def test_folds_are_whole_episodes_of_equal_number() -> None:
    folds = assign_folds(LOG, 3, 0)
    per_episode = folds.reshape(6, 10)
    assert (per_episode == per_episode[:, :1]).all()
    np.testing.assert_array_equal(np.bincount(per_episode[:, 0]), [2, 2, 2])
    np.testing.assert_array_equal(folds, assign_folds(LOG, 3, 0))
    for folds in (1, 7):
        with pytest.raises(
            ConfigError, match=f"folds is {folds} for a log of 6 episodes"
        ):
            assign_folds(LOG, folds, 0)


def test_every_row_is_spoken_for_by_a_model_that_has_not_seen_it() -> None:
    seen = []

    def fit(part):
        seen.append(part)
        mean = float(part.rewards.mean())
        return lambda s, a: np.full(len(s), mean)

    fitted = cross_fit(LOG, fit, folds=3, seed=1)
    for (rows, model), part in zip(fitted.over(LOG), seen, strict=True):
        assert not np.intersect1d(
            row_fingerprints(part), row_fingerprints(LOG)[rows]
        ).size
        assert measure_freshness(model, LOG.select(rows)) == (True, ())
    case = make_case(fitted, LOG, SOFT, make_bellman_settings(gamma=0.9))
    for rows, part in zip(case.folds, seen, strict=True):
        np.testing.assert_allclose(case.values[rows], part.rewards.mean())
        following = 0.9 * ~LOG.terminated[rows] * part.rewards.mean()
        np.testing.assert_allclose(
            case.residuals[rows], LOG.rewards[rows] + following - case.values[rows]
        )
    with pytest.raises(DataError, match="give the same log"):
        next(fitted.over(LOG.select(np.arange(59))))


def test_models_of_different_folds_are_never_multiplied() -> None:
    fitted = cross_fit(
        LOG,
        lambda part: lambda s, a: np.full(len(s), part.rewards.mean()),
        folds=2,
        seed=0,
    )
    test = bellman_test(fitted, LOG, SOFT, 0.9, draws=99, features=0)
    assert test.held_out
    gram = test.rows.kernel.gram(test.rows.inputs).numpy()
    together = fitted.folds[:, None] == fitted.folds
    residuals = test.rows.residuals
    total = residuals @ (gram * together) @ residuals
    assert test.statistic == pytest.approx(total / 60, rel=1e-9)
    loss = (total - (residuals**2).sum()) / (together.sum() - 60)
    assert test.kernel_loss == pytest.approx(loss, rel=1e-9)
