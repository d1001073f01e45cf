"""`solve`: logs and tables, chosen and given settings, and every refusal in one line."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import koffline.solvers as solvers
from koffline.data.transitions import Discrete, Transitions
from koffline.errors import ConfigError, DataError
from koffline.kernels import Gaussian
from koffline.solvers import ProjectedNetworks, UnitBox, solve, solve_kernel_loss
from tests.engine_problems import make_table
from tests.refusals import refused

GIVEN = {"bandwidth": 0.3, "ridge": 1e-4, "feature_width": 0.4, "feature_count": 20}
QUICK = {"steps": 5, "hidden_units": (6,), "kernel_features": 20}


def make_log(rows=80, **columns):
    """States in [−5, 5] × [0, 100]; the reward is the first coordinate, rows in episodes of eight."""
    rng = np.random.default_rng(0)
    states = rng.uniform((-5.0, 0.0), (5.0, 100.0), size=(rows, 2)).astype(np.float32)
    following = np.clip(states + rng.normal(size=(rows, 2)), (-5.0, 0.0), (5.0, 100.0)).astype(np.float32)
    terminated = np.arange(rows) % 8 == 7
    return Transitions(
        **{
            "observations": states,
            "actions": np.zeros(rows, dtype=np.int64),
            "rewards": states[:, 0],
            "next_observations": following,
            "terminated": terminated,
            "truncated": np.zeros(rows, dtype=bool),
            "action_space": Discrete(2),
            "episode_ids": np.arange(rows) // 8,
            "steps": np.arange(rows) % 8,
            **columns,
        }
    )


@pytest.mark.parametrize("box", [None, UnitBox((-5.0, 0.0), (5.0, 100.0))])
def test_a_log_is_solved_in_units_of_its_box(box):
    log = make_log()
    value = solve(log, gamma=0.9, box=box, **GIVEN)
    both = np.concatenate([log.observations, log.next_observations]).astype(np.float64)
    low, high = ((-5.0, 0.0), (5.0, 100.0)) if box else (both.min(axis=0), both.max(axis=0))
    table = make_table("state")
    table = replace(
        table,
        inputs=torch.as_tensor((log.observations - low) / np.subtract(high, low)),
        next_inputs=torch.as_tensor((log.next_observations - low) / np.subtract(high, low)),
        rewards=torch.tensor(log.rewards.tolist(), dtype=torch.float64),
        discounts=torch.as_tensor(0.9 * ~log.terminated),
        kernel_inputs=torch.as_tensor((log.observations - low) / np.subtract(high, low)),
    )
    expected = solve_kernel_loss(table, solvers.RandomFourierFeatures(0.4, 20), Gaussian(0.3), ridge=1e-4)
    torch.testing.assert_close(value.values(log.observations), expected.values(table.inputs))


def test_what_is_not_given_is_chosen():
    log = make_log()
    value = solve(log, gamma=0.9, feature_count=20, folds=3)
    assert isinstance(value.kernel, Gaussian)
    fixed = solve(log, gamma=0.9, feature_count=20, folds=3, bandwidth=0.3)
    assert fixed.kernel == Gaussian(0.3)
    again = solve(
        log,
        gamma=0.9,
        feature_count=20,
        bandwidth=value.kernel.bandwidth,
        ridge=value.ridge,
        feature_width=value.features.width,
    )
    torch.testing.assert_close(again.weights, value.weights)
    # Values follow the reward, the first coordinate; a constant would not.
    values, rewards = value.values(log.observations).numpy(), log.rewards
    assert np.corrcoef(values, rewards)[0, 1] > 0.8


def test_networks_take_unscaled_states():
    log = make_log()
    box = UnitBox((-5.0, 0.0), (5.0, 100.0))
    fitted = solve(log, "variable-projection", gamma=0.9, box=box, replicas=3, seed=5, **QUICK)
    assert isinstance(fitted, ProjectedNetworks)
    values = fitted.values(log.observations)
    scaled = torch.tensor(log.observations.tolist(), dtype=torch.float64)
    torch.testing.assert_close(values, fitted.network.forward(box(scaled)).squeeze(-1))
    assert values.shape == (3, 80)
    alone = solve(log, "variable-projection", gamma=0.9, box=box, replicas=1, seed=5, **QUICK)
    torch.testing.assert_close(values[:1], alone.values(log.observations), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bandwith": 0.1}, "there is no setting 'bandwith'; did you mean 'bandwidth'?"),
        ({"bandwidth": 0.0}, "bandwidth is 0.0: input should be greater than 0"),
        ({"feature_width": float("nan")}, "feature_width is nan: input should be a finite number"),
        ({"ridge": -1.0}, "ridge is -1.0: input should be greater than or equal to 0"),
        ({"kernel_features": 3}, "kernel_features is 3: input should be a multiple of 2"),
        ({"hidden_units": (4, 0)}, "hidden_units is .*: input should be greater than or equal to 1"),
        ({"rule": "oracle"}, "rule is 'oracle': input should be 'lstd-tournament' or 'held-out-loss'"),
    ],
)
def test_bad_settings_are_one_line(settings, message):
    with refused(ConfigError, message):
        solve(make_table("state"), **settings)


def test_solvers_and_data_that_do_not_fit():
    table, log = make_table("state"), make_log()
    with pytest.raises(ConfigError, match="no solver 'closed-from'; did you mean 'closed-form'"):
        solve(table, "closed-from")
    with pytest.raises(ConfigError, match="a Table holds discounts and scaled inputs"):
        solve(table, gamma=0.9)
    with pytest.raises(ConfigError, match="gamma is missing"):
        solve(log)
    with pytest.raises(ConfigError, match=r"gamma is 1\.5"):
        solve(log, gamma=1.5)
    with pytest.raises(DataError, match="the box has 1 axes, received rows of 2 columns"):
        solve(log, gamma=0.9, box=UnitBox((0.0,), (1.0,)))
    with pytest.raises(ConfigError, match="learns its features; leave features out"):
        solve(table, "variable-projection", features=lambda x: x)
    with refused(DataError, "data is a ndarray; give a Table or Transitions"):
        solve(np.zeros(3))
