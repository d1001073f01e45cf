"""The doubly robust sum against scope-rl's marginal estimators, in logs for which their formula is right.

scope-rl knows episodes of one length only. Its marginal doubly robust estimator shifts the next values with
the closing zero one place too early, which does not matter when the last value is zero itself: episodes here
end with a row in an absorbing state.
"""

import importlib

import numpy as np
import pytest

import koffline
from koffline.data.d3rlpy_import import import_d3rlpy
from koffline.ope.closed_form.estimates import doubly_robust_value
from koffline.ope.features import make_feature_system
from koffline.ope.problem import prepare_problem
from koffline.ope.row_values import RowValues
from koffline.policies import DiscretePolicy
from tests.ope.closed_form.systems import combined

EPISODES, LENGTH, ACTIONS, GAMMA = 12, 6, 3, 0.9


@pytest.fixture(scope="module")
def scope():
    pytest.importorskip("scope_rl")
    import_d3rlpy()  # without gym's notice
    return importlib.import_module("scope_rl.ope.discrete")


@pytest.fixture(scope="module")
def columns():
    generator = np.random.default_rng(0)
    n = EPISODES * LENGTH
    step = np.tile(np.arange(LENGTH), EPISODES)
    behavior, target = (generator.dirichlet(np.ones(ACTIONS), size=n) for _ in range(2))
    q = generator.normal(size=(n, ACTIONS)) * (step < LENGTH - 1)[:, None]
    return {
        "step": step,
        "states": generator.normal(size=(n, 2)),
        "actions": generator.integers(ACTIONS, size=n),
        "rewards": generator.normal(size=n) * (step < LENGTH - 1),
        "behavior": behavior,
        "target": target,
        "q": q,
        "omega": generator.gamma(1.0, size=n),
    }


def ours(columns, q):
    """J by rows: the weight of step t carries γ^t and the rows of an episode are summed, not averaged."""
    n, step, actions = len(columns["step"]), columns["step"], columns["actions"]
    last = step == LENGTH - 1
    log = koffline.Transitions(
        observations=columns["states"],
        actions=actions,
        rewards=columns["rewards"],
        next_observations=np.roll(columns["states"], -1, axis=0),
        terminated=last,
        truncated=np.zeros(n, bool),
        action_space=koffline.Discrete(ACTIONS),
        episode_ids=np.arange(n) // LENGTH,
        steps=step,
    )
    policy = DiscretePolicy(ACTIONS, lambda rows: np.full((len(rows), ACTIONS), 1.0 / ACTIONS))
    problem = prepare_problem(log, policy, GAMMA, 1, np.random.default_rng(0))
    system = make_feature_system(problem, gamma=GAMMA, instruments=2)
    v = (columns["target"] * q).sum(axis=1)
    values = RowValues(q[np.arange(n), actions], np.roll(v, -1), v[step == 0], 1.0)
    return doubly_robust_value(combined(system, values, LENGTH * GAMMA**step * columns["omega"]))


def theirs(estimator, columns, q):
    given = {
        "n_step_pdis": 0,
        "step_per_trajectory": LENGTH,
        "action": columns["actions"],
        "reward": columns["rewards"],
        "pscore": columns["behavior"][np.arange(len(columns["step"])), columns["actions"]],
        "evaluation_policy_action_dist": columns["target"],
        "state_action_marginal_importance_weight": columns["omega"],
        "state_action_value_prediction": q,
        "initial_state_value_prediction": (columns["target"] * q).sum(axis=1)[columns["step"] == 0],
        "gamma": GAMMA,
    }
    return estimator().estimate_policy_value(**given)


def test_doubly_robust_with_marginal_weights(scope, columns):
    found = ours(columns, columns["q"])
    assert found == pytest.approx(theirs(scope.StateActionMarginalDR, columns, columns["q"]), abs=1e-8)


def test_marginal_importance_sampling(scope, columns):
    zero = np.zeros_like(columns["q"])
    assert ours(columns, zero) == pytest.approx(theirs(scope.StateActionMarginalIS, columns, zero), abs=1e-8)
