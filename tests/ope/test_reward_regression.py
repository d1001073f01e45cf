"""One-step logs: Q is a regression on rewards, and a row's prediction is by networks
that have not seen its unit.
"""

import dataclasses

import numpy as np
import pytest
import torch

import koffline
from koffline import objectives
from koffline.config import make_settings
from koffline.errors import KofflineError
from koffline.fitting import FitSettings, fit
from koffline.kernels import Gaussian, random_fourier_features
from koffline.ope.estimators.running import run_estimator
from koffline.ope.log.problem import EvaluationProblem, prepare_problem
from koffline.ope.networks import reward_regression
from koffline.ope.networks.equations import accumulate_systems
from koffline.ope.networks.resampling import Resampling, make_table
from koffline.ope.networks.reward_regression import RewardModel, fit_reward_model
from koffline.ope.workspace import open_workspace
from koffline.replicas import StackedMLP
from tests import engine_problems as engine
from tests.ope.problems import NOISY, SOFT, discrete_log

SMALL = {"hidden_units": (8, 8), "resampled_replicas": 5}


def one_step(rows: int = 120, noise: float = 1.0, **changes) -> koffline.Transitions:
    """Rows whose mean reward is twice the first column, if action 1 was taken."""
    generator = np.random.default_rng(1)
    log = discrete_log(rows, length=1)
    signal = np.where(log.actions == 1, 2.0 * log.observations[:, 0], 0.0)
    columns = {
        "rewards": signal + noise * generator.normal(size=rows),
        "terminated": np.ones(rows, bool),
        "truncated": np.zeros(rows, bool),
        "behavior_log_probabilities": np.full(rows, -np.log(3.0)),
        **changes,
    }
    return log.replace(**columns)


def continuous_one_step() -> koffline.Transitions:
    actions = np.random.default_rng(4).uniform(-1.0, 1.0, (120, 1))
    space = koffline.Continuous(1, -1.0, 1.0)
    return one_step(
        actions=actions, action_space=space, behavior_log_probabilities=None
    )


def prepared(log: koffline.Transitions, policy=SOFT) -> EvaluationProblem:
    return prepare_problem(log, policy, 0.9, 2, np.random.default_rng(0))


def fitted(problem: EvaluationProblem, **options) -> RewardModel:
    settings = make_settings({"gamma": 0.9, **SMALL, **options})
    resampling = Resampling.draw(problem, 0, settings.resampled_replicas, seed=0)
    with torch.no_grad():
        return fit_reward_model(problem, resampling, settings)


@pytest.mark.parametrize("form", engine.FORMS)
@pytest.mark.parametrize("plan", ["own", "shared", "crossed"])
def test_it_equals_fitted_q_evaluation_where_nothing_follows(form, plan) -> None:
    table = engine.make_table(form)
    table = dataclasses.replace(table, discounts=torch.zeros_like(table.discounts))
    network = StackedMLP.initialise(engine.SIZES[form], range(4), dtype=torch.float64)
    both = [
        fit(
            table,
            network,
            objective,
            engine.PLANS[plan],
            FitSettings(steps=30, batch_size=8),
        )
        for objective in (objectives.RewardRegression(), objectives.fitted_q(0.2))
    ]
    assert torch.equal(both[0].network.flat, both[1].network.flat)
    assert torch.equal(both[0].losses, both[1].losses)


@pytest.mark.parametrize("kind", ["discrete", "continuous"])
@pytest.mark.parametrize("has_critics", [True, False])
def test_sums_without_next_rows_equal_those_with_them(kind, has_critics) -> None:
    if kind == "discrete":
        problem = prepared(one_step())
    else:
        problem = prepared(continuous_one_step(), NOISY)
    assert problem.is_one_step
    table = make_table(problem, "cpu")
    sizes = (problem.inputs.shape[1], 6, problem.n_actions or 1)
    network = StackedMLP.initialise(sizes, range(2))
    weights = torch.rand(2, 120, generator=torch.Generator().manual_seed(0))
    weights[:, ::5] = 0.0
    critics = None
    if has_critics:
        width = problem.kernel_inputs.shape[1]
        generator = torch.Generator().manual_seed(1)
        critics = random_fourier_features(Gaussian(1.5), width, 40, generator)
    with torch.no_grad():
        plain = accumulate_systems(network, table, critics, weights)
        quick = accumulate_systems(network, table, critics, weights, is_one_step=True)
    torch.testing.assert_close(quick, plain, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    "clusters", [None, np.arange(120) // 4], ids=["rows", "clusters"]
)
def test_a_prediction_does_not_know_the_rewards_of_its_own_unit(clusters) -> None:
    problem = prepared(one_step(clusters=clusters))
    model = fitted(problem, steps=40)
    before = model.predict(problem).values
    counts = model.resampling.row_counts(problem)
    held_out = np.flatnonzero((counts == 0).any(axis=0) & (counts > 0).any(axis=0))
    row = int(held_out[0])
    unit = problem.clusters == problem.clusters[row]  # one row is one unit here
    rewards = np.where(unit, problem.rewards + 5.0, problem.rewards)
    changed = dataclasses.replace(problem, rewards=rewards)
    after = fitted(changed, steps=40).predict(changed).values
    np.testing.assert_array_equal(after.now[unit], before.now[unit])
    np.testing.assert_array_equal(after.starts[unit], before.starts[unit])
    assert not np.array_equal(after.now, before.now)  # others have seen it


def test_predictions_are_means_over_the_networks_that_did_not_see_the_row() -> None:
    """Row by row, by hand."""
    problem = prepared(one_step())
    model = fitted(problem, steps=20)
    counts = model.resampling.row_counts(problem)
    with torch.no_grad():
        outputs = model.network.forward(torch.as_tensor(problem.inputs)).numpy()
    values = model.predict(problem).values
    for row in range(0, 120, 7):
        networks = np.flatnonzero(counts[:, row] == 0)
        if not len(networks):
            networks = np.arange(len(counts))
        of_row = outputs[networks, row].mean(axis=0) * problem.reward_scale
        assert values.now[row] == pytest.approx(of_row[problem.actions[row]])
        expected = of_row @ problem.start_probabilities[row]
        assert values.starts[row] == pytest.approx(expected)
    assert not values.later.any()


def test_training_stops_when_errors_of_unseen_rows_rise(monkeypatch) -> None:
    monkeypatch.setattr(reward_regression, "ROUNDS", (50, 50, 100, 200))
    steps = [fitted(prepared(one_step(600, noise))).steps for noise in (0.0, 5.0)]
    assert steps[0] == 400
    assert steps[1] < 400


def test_the_networks_of_least_error_are_kept(monkeypatch) -> None:
    monkeypatch.setattr(reward_regression, "ROUNDS", (10, 10, 20, 40))
    errors = iter([3.0, 2.0, 2.5, 1.0])
    monkeypatch.setattr(
        reward_regression._JudgedRows, "error", lambda *arguments: next(errors)
    )
    problem = prepared(one_step())
    model = fitted(problem)
    assert model.steps == 20
    assert next(errors) == 1.0  # the fourth round was not made


def test_networks_do_not_depend_on_the_policy() -> None:
    uniform = koffline.policies.DiscretePolicy(3, lambda s: np.full((len(s), 3), 1 / 3))
    models = [fitted(prepared(one_step(), policy)) for policy in (SOFT, uniform)]
    assert torch.equal(models[0].network.flat, models[1].network.flat)


def test_diverged_networks_are_refused_in_one_line() -> None:
    with pytest.raises(KofflineError, match="networks diverged; lower learning_rate"):
        fitted(prepared(one_step()), learning_rate=1e30, steps=30)


@pytest.mark.parametrize("name", ["dr", "wdr", "magic"])
def test_estimators_over_episodes_train_no_fitted_q(name) -> None:
    settings = make_settings({"gamma": 0.9, "steps": 20, **SMALL})
    with open_workspace(one_step(), SOFT, settings) as workspace:
        assert np.isfinite(run_estimator(workspace, name).value)
        assert "fitted" not in vars(workspace)
        assert "reward_model" in vars(workspace)


def test_a_log_with_one_row_that_goes_on_has_fitted_q() -> None:
    terminated = np.ones(120, bool)
    terminated[7] = False
    log = one_step(terminated=terminated, truncated=~terminated)
    settings = make_settings({"gamma": 0.9, "steps": 20, **SMALL})
    with open_workspace(log, SOFT, settings) as workspace:
        assert not workspace.problem.is_one_step
        assert np.isfinite(workspace.row_values_of_episodes.now).all()
        assert "fitted" in vars(workspace)
        assert "reward_model" not in vars(workspace)
