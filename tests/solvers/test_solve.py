"""`solve` against dense normal equations in numpy; what must not change it; choices, blocks and refusals."""

import numpy as np
import pytest
import torch

from koffline.data.transitions import Discrete, Transitions
from koffline.errors import ConfigError, DataError
from koffline.kernels import Gaussian, random_fourier_features
from koffline.solvers import RandomFourierFeatures, UnitBox, linear, solve
from tests.reference import gaussian, gram
from tests.refusals import refused
from tests.strategies import draw_finite_case

BOX = UnitBox((-5.0, 0.0), (5.0, 100.0))
GIVEN = {"gamma": 0.9, "box": BOX, "bandwidth": 0.3, "ridge": 1e-3, "feature_width": 0.4, "feature_count": 20}


def make_log(rows=80, **columns):
    """States in [−5, 5] × [0, 100]; the reward is the first coordinate, rows in episodes of eight."""
    rng = np.random.default_rng(0)
    states = rng.uniform((-5.0, 0.0), (5.0, 100.0), size=(rows, 2)).astype(np.float32)
    following = np.clip(states + rng.normal(size=(rows, 2)), (-5.0, 0.0), (5.0, 100.0)).astype(np.float32)
    given = {
        "observations": states,
        "actions": np.zeros(rows, dtype=np.int64),
        "rewards": states[:, 0],
        "next_observations": following,
        "terminated": np.arange(rows) % 8 == 7,
        "truncated": np.zeros(rows, dtype=bool),
        "action_space": Discrete(2),
        "episode_ids": np.arange(rows) // 8,
    }
    return Transitions(**{**given, **columns})


def exact_log():
    """Every (s, s') of a finite process weighted by its probability, so that means are expectations; V^π."""
    case = draw_finite_case(0)
    states = len(case.weights)
    now, later = (part.ravel() for part in np.meshgrid(range(states), range(states), indexing="ij"))
    nothing = np.zeros(len(now), dtype=bool)
    log = Transitions(
        observations=np.eye(states)[now],
        actions=np.zeros(len(now), dtype=np.int64),
        rewards=case.gains[now, later],
        next_observations=np.eye(states)[later],
        terminated=nothing,
        truncated=nothing,
        action_space=Discrete(2),
        weights=case.weights[now] * case.moves[now, later],
    )
    return log, case.gamma, case.values


@pytest.mark.parametrize("kernel_features", [None, 30])
@pytest.mark.parametrize("weighted", [False, True])
def test_weights_solve_the_dense_normal_equations(weighted, kernel_features, monkeypatch):
    """The constant, which the ridge leaves alone, is among them; the loss is δᵀKδ/n²; blocks of any size."""
    monkeypatch.setattr(linear, "BLOCK", 7)
    monkeypatch.setattr(linear, "_KERNEL_BLOCK", 79)
    weights = np.random.default_rng(1).uniform(0.5, 2.0, 80) if weighted else np.ones(80)
    log = make_log(weights=weights)
    value = solve(log, **GIVEN, kernel_features=kernel_features)
    scaled, following = (
        (np.asarray(part, np.float64) - BOX.low) / np.subtract(BOX.high, BOX.low)
        for part in (log.observations, log.next_observations)
    )
    mapping = RandomFourierFeatures(0.4, 20)
    now, later = (
        np.column_stack([mapping(torch.as_tensor(part)), np.ones(80)]) for part in (scaled, following)
    )
    difference = now - (0.9 * ~log.terminated)[:, None] * later
    if kernel_features is None:
        kernel = np.array(gram(lambda x, y: gaussian(x, y, 0.3), scaled.tolist(), scaled.tolist()))
    else:
        psi = random_fourier_features(Gaussian(0.3), 2, 30, torch.Generator().manual_seed(0))
        kernel = (psi(torch.as_tensor(scaled)) @ psi(torch.as_tensor(scaled)).mT).numpy()
    share = weights / weights.sum()
    form = share[:, None] * kernel * share
    curvature = difference.T @ form @ difference
    penalty = np.diag([1e-3 * np.diag(curvature)[:-1].mean()] * 20 + [0.0])
    expected = np.linalg.solve(curvature + penalty, difference.T @ form @ log.rewards)
    np.testing.assert_allclose(value.weights, expected, rtol=1e-7, atol=1e-9)
    residual = log.rewards - difference @ expected
    assert value.loss == pytest.approx(residual @ form @ residual, rel=1e-8)
    np.testing.assert_allclose(value.values(log.observations), now @ expected, rtol=1e-7, atol=1e-8)


def test_one_hot_features_give_the_exact_values_of_a_finite_process():
    """Rows weighted by their probabilities leave no sampling error: any kernel finds V^π."""
    log, gamma, values = exact_log()
    value = solve(log, gamma=gamma, features=lambda x: x, bandwidth=0.7, ridge=0.0)
    np.testing.assert_allclose(value.values(np.eye(len(values))), values, rtol=1e-6, atol=1e-8)


def test_what_is_not_given_is_chosen_in_units_of_the_range_of_the_data():
    log = make_log()
    value = solve(log, gamma=0.9, feature_count=20, folds=3)
    both = np.concatenate([log.observations, log.next_observations]).astype(np.float64)
    box = UnitBox(tuple(both.min(axis=0).tolist()), tuple(both.max(axis=0).tolist()))
    chosen = {
        "bandwidth": value.kernel.bandwidth,
        "ridge": value.ridge,
        "feature_width": value.features.width,
    }
    again = solve(log, gamma=0.9, feature_count=20, box=box, **chosen)
    torch.testing.assert_close(again.weights, value.weights)
    assert solve(log, gamma=0.9, feature_count=20, folds=3, bandwidth=0.3).kernel == Gaussian(0.3)
    # Values follow the reward, the first coordinate; a constant would not.
    assert np.corrcoef(value.values(log.observations).numpy(), log.rewards)[0, 1] > 0.8


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"bandwith": 0.1}, ConfigError, "bandwith is unknown; did you mean 'bandwidth'?"),
        ({"bandwidth": 0.0}, ConfigError, "bandwidth is 0.0: input should be greater than 0"),
        ({"feature_width": float("nan")}, ConfigError, "feature_width is nan: input should be a finite"),
        ({"ridge": -1.0}, ConfigError, "ridge is -1.0: input should be greater than or equal to 0"),
        ({"feature_count": 7}, ConfigError, "feature_count is 7: input should be a multiple of 2"),
        ({"ridge": None, "folds": 11}, ConfigError, "folds is 11 for 10 episodes; give no more"),
        ({"gamma": 1.5}, ConfigError, r"gamma is 1\.5"),
        ({"box": UnitBox((0.0,), (1.0,))}, DataError, "the box has 1 axes, received rows of 2 columns"),
        ({"features": lambda x: x[:, 0]}, DataError, r"gave \(80,\) for 80 rows; give a tensor \(N, F\)"),
        ({"features": lambda x: x / 0.0}, DataError, "NaN or infinite"),
        ({"log": np.zeros(3)}, DataError, "the log is a ndarray; give what koffline.open_transitions reads"),
    ],
)
def test_bad_arguments_are_one_line(changes, error, message):
    with refused(error, message):
        solve(**{"log": make_log(), **GIVEN, **changes})
    for low, high in (((0.0,), (0.0,)), ((0.0,), (1.0, 1.0))):
        with refused(ConfigError, "give equal lengths and finite low < high"):
            UnitBox(low, high)
