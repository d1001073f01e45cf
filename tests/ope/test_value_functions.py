"""Value functions from whatever holds one, checked at the border."""

import numpy as np
import pytest
import torch

import koffline
from koffline.errors import DataError
from koffline.ope.value_functions import as_value_function
from tests.ope.problems import NOISY, SOFT, discrete_log

THREE = koffline.Discrete(3)
ONE = koffline.Continuous(1, -1.0, 1.0)
STATES = np.random.default_rng(0).normal(size=(7, 2))
ACTIONS = np.array([0, 1, 2, 0, 1, 2, 0])


def table(states):
    """Q(s, ·) of three actions."""
    return np.stack([states[:, 0], states[:, 1], states[:, 0] + 2.0], axis=1)


def q(states, actions):
    return table(states)[np.arange(len(states)), actions]


@pytest.mark.parametrize("given", [q, table])
def test_a_function_of_actions_or_a_table_of_them(given) -> None:
    made = as_value_function(given, THREE, (2,))
    assert made.name == given.__name__
    np.testing.assert_array_equal(made.values(STATES, ACTIONS), q(STATES, ACTIONS))
    expected = (SOFT.probabilities(STATES) * table(STATES)).sum(axis=1)
    np.testing.assert_allclose(made.expected(STATES, SOFT), expected, rtol=1e-12)


def test_expectation_over_a_continuous_policy_averages_its_draws() -> None:
    made = as_value_function(lambda states, actions: actions[:, 0], ONE, (2,))
    generator = np.random.default_rng(1)
    draws = np.mean([NOISY.sample(STATES, generator)[:, 0] for _ in range(5)], axis=0)
    found = made.expected(STATES, NOISY, 5, np.random.default_rng(1))
    np.testing.assert_allclose(found, draws, rtol=1e-12)


def test_torch_modules_files_and_python_names(tmp_path, monkeypatch) -> None:
    module = torch.nn.Linear(2, 3)
    found = as_value_function(module, THREE, (2,)).values(STATES, ACTIONS)
    whole = module(torch.as_tensor(STATES, dtype=torch.float32)).detach().numpy()
    np.testing.assert_allclose(found, whole[np.arange(7), ACTIONS], rtol=1e-5)
    (tmp_path / "my_values.py").write_text(
        "def q(states, actions):\n    return states.sum(axis=1) + actions\n"
    )
    monkeypatch.chdir(tmp_path)
    named = as_value_function("my_values:q", THREE, (2,))
    np.testing.assert_allclose(named.values(STATES, ACTIONS), STATES.sum(axis=1) + ACTIONS)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchscript(tmp_path) -> None:
    class Both(torch.nn.Module):
        def forward(self, states: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
            return states.sum(1) + actions

    torch.jit.script(Both()).save(str(tmp_path / "q.pt"))
    made = as_value_function(tmp_path / "q.pt", THREE, (2,))
    np.testing.assert_allclose(made.values(STATES, ACTIONS), STATES.sum(axis=1) + ACTIONS, rtol=1e-5)


def test_models_of_d3rlpy_keep_their_scalers_and_undo_that_of_rewards(tmp_path) -> None:
    from tests import d3_models

    for actions, shape, message in (
        (3, (4,), "4 discrete actions, the log has 3"),
        (4, (2,), r"shape \(4,\)"),
    ):
        with pytest.raises(DataError, match=message):
            as_value_function(d3_models.build("DQN", 4), koffline.Discrete(actions), shape)
    raw = d3_models.raw_observations(16)
    actions = np.arange(16) % 3
    scaled = d3_models.build("DQN", 3, observation_scaler=d3_models.standard_scaler())
    path = d3_models.saved(scaled, tmp_path)
    made = as_value_function(path, THREE, (4,))
    assert made.name == path
    assert made.trained_on is None
    np.testing.assert_allclose(made.values(raw, actions), scaled.predict_value(raw, actions), rtol=1e-6)
    preprocessing = d3_models.d3rlpy.preprocessing
    scaled.config.reward_scaler = preprocessing.MultiplyRewardScaler(4.0)
    np.testing.assert_allclose(
        as_value_function(scaled, THREE, (4,)).values(raw, actions),
        scaled.predict_value(raw, actions) / 4.0,
        rtol=1e-6,
    )
    scaled.config.reward_scaler = preprocessing.StandardRewardScaler(mean=2.0, std=3.0, eps=0.0)
    shifted = as_value_function(scaled, THREE, (4,))
    expected = 3.0 * scaled.predict_value(raw, actions) + 2.0 / (1.0 - scaled.config.gamma)
    np.testing.assert_allclose(shifted.values(raw, actions), expected, rtol=1e-5)
    assert "subtracted 2" in shifted.notes[0]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda s, a: s, r"shape \(7, 2\) for 7 rows"),
        (lambda s, a: np.full(len(s), np.nan), "value of row 0 is nan"),
        (lambda s, a: 1 / 0, "ZeroDivisionError"),
        (3.0, "float is no value function"),
        (lambda s: np.zeros((len(s), 4)), r"shape \(7, 4\)"),
    ],
)
def test_what_is_no_value_function_is_one_line(given, message) -> None:
    with pytest.raises(DataError, match=message) as caught:
        as_value_function(given, THREE, (2,)).values(STATES, ACTIONS)
    assert "\n" not in str(caught.value)


def test_an_evaluation_gives_its_value_function() -> None:
    log = discrete_log()
    options = {"steps": 40, "full_replicas": 1, "resampled_replicas": 2}
    estimate = koffline.evaluate(log, SOFT, 0.9, **options)
    made = as_value_function(estimate, THREE, (2,))
    assert made is estimate.value_function
    starts = made.expected(log.initial_observations(), SOFT)
    assert starts.mean() == pytest.approx(estimate.value, rel=1e-5)
    assert "value_function" not in estimate.as_dict()
    without = koffline.evaluate(log, SOFT, 0.9, estimator="lstdq", **options)
    assert without.value_function is None
    with pytest.raises(DataError, match="Estimate is no value function"):
        as_value_function(without, THREE, (2,))
