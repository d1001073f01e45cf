"""A log of one-step episodes, a bandit's: every estimator against the exact answer,
without a gamma.
"""

import dataclasses
import json

import numpy as np
import pytest

import koffline
from koffline.data.sources import write_transitions
from koffline.ope.evaluation import estimate_all
from koffline.ope.names import ESTIMATORS
from tests.ope.problems import discrete_log
from tests.refusals import assert_refused, run_cli, succeed

pytestmark = pytest.mark.usefixtures("few_features_of_memory")

# of rewards, by kind of user and action
_MEANS = np.array([[1.0, 0.0, 0.5], [0.0, 2.0, 0.5]])
_LOGGED = np.array([[0.6, 0.2, 0.2], [0.3, 0.3, 0.4]])
_ASKED = np.array([[0.8, 0.1, 0.1], [0.1, 0.8, 0.1]])
TRUTH, LOGGING = (float((0.5 * table * _MEANS).sum()) for table in (_ASKED, _LOGGED))
SMALL = {"steps": 300, "hidden_units": (16,), "instruments": 200}


def users(n: int = 3000, seed: int = 0) -> koffline.Transitions:
    """Two kinds of users, told apart by the sign of their feature."""
    generator = np.random.default_rng(seed)
    kinds = generator.integers(2, size=n)
    actions = (_LOGGED[kinds].cumsum(axis=1) < generator.random((n, 1))).sum(axis=1)
    states = (2.0 * kinds - 1.0)[:, None] * generator.uniform(0.8, 1.2, size=(n, 1))
    return koffline.Transitions(
        observations=states,
        actions=actions,
        rewards=_MEANS[kinds, actions] + generator.normal(size=n),
        next_observations=states,
        terminated=np.ones(n, bool),
        truncated=np.zeros(n, bool),
        action_space=koffline.Discrete(3),
        episode_ids=np.arange(n),
        steps=np.zeros(n, np.int64),
        behavior_log_probabilities=np.log(_LOGGED[kinds, actions]),
    )


def policy(states: np.ndarray) -> np.ndarray:
    return _ASKED[(states[:, 0] > 0.0).astype(int)]


def test_every_estimator_agrees_with_the_exact_answer() -> None:
    table = estimate_all(users(), policy, **SMALL)
    for name in ESTIMATORS:
        estimate = table[name].estimate
        assert estimate is not None, table[name].reason
        assert estimate.value == pytest.approx(TRUTH, abs=0.12), name
        assert estimate.interval.holds(TRUTH), name
        if estimate.uplift is not None:
            assert estimate.uplift.interval.holds(TRUTH - LOGGING), name
    # not magic, drl
    assert sum(row.estimate.uplift is not None for row in table.rows) == 14
    assert table.verdict.answer == "supported"


def test_gamma_changes_nothing() -> None:
    with_gamma = [
        estimate_all(users(600), policy, gamma, bounds=False, **SMALL)
        for gamma in (None, 0.99)
    ]
    for name in ESTIMATORS:
        values = [table[name].estimate.value for table in with_gamma]
        assert values[0] == pytest.approx(values[1], rel=1e-6), name


SHOWN = {
    "estimate": lambda log: koffline.evaluate(log, policy, **SMALL),
    "table": lambda log: estimate_all(log, policy, names=["is", "wis"], **SMALL),
    "improvement": lambda log: koffline.improve(
        log,
        settings={
            "candidates": ["clone_mode"],
            "shares": [1.0],
            "training_steps": 50,
            "choosing_steps": 60,
            "certifying_steps": 60,
            "full_replicas": 1,
            "resampled_replicas": 3,
        },
    ),
}


@pytest.mark.parametrize("kind", SHOWN)
def test_no_result_shows_a_gamma_that_nobody_gave(kind: str) -> None:
    result = SHOWN[kind](users(600))
    assert "every episode is one step" in str(result)
    assert "γ" not in str(result)


def test_a_ranking_shows_no_gamma_that_nobody_gave(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_transitions(users(600), "users.hdf5", None, False)
    command = "select users.hdf5 --policies uniform epsilon:0.5:uniform"
    shown = succeed(*command.split(), "--set", "steps=300")
    assert "What the policies are worth (every episode is one step)" in shown
    assert "γ" not in shown


def test_the_command_needs_no_gamma_and_knows_a_bandits_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_transitions(users(600), "users.hdf5", None, False)
    shared = ("evaluate", "users.hdf5", "--policy", "uniform")
    shown = run_cli(*shared, "--estimator", "is,wis").output
    for words in ("is (IPS)", "wis (SNIPS)", "every episode is one step"):
        assert words in shown
    assert "γ" not in shown
    result = json.loads(succeed(*shared, "--estimator", "wis", "--json"))
    assert result["behavior_value"] == pytest.approx(users(600).rewards.mean())
    assert result["uplift"]["value"] == pytest.approx(
        result["value"] - users(600).rewards.mean()
    )
    assert_refused(run_cli(*shared, "--estimator", "SNIPS"), "did you mean 'wis'")
    cut = koffline.evaluate(
        discrete_log(), "uniform", 0.9, estimator="pdis", behavior="estimate"
    )
    assert cut.uplift is None  # of whole episodes alone


def test_auto_is_dr_where_steps_are_single_and_probabilities_known_and_of_networks_elsewhere() -> (
    None
):
    log = users(600)
    of_rows = koffline.evaluate(log, policy, **SMALL)
    assert (of_rows.estimator, of_rows.interval.kind) == ("dr", "episodes-t")
    assert (
        of_rows.value
        == estimate_all(log, policy, names=["dr"], **SMALL)["dr"].estimate.value
    )
    for other, options in (
        (log.replace(behavior_log_probabilities=None), {}),
        (log, {"behavior": "estimate"}),
        (log, {"interval": "bootstrap"}),
        (log.select(np.arange(25)), {}),  # too few episodes carry the weight
        (discrete_log(), {"gamma": 0.9}),
    ):
        assert (
            koffline.evaluate(
                other, policy, **{**SMALL, "steps": 20}, **options
            ).estimator
            == "kloss"
        )
    few = {
        "hidden_units": (4,),
        "instruments": 50,
        "resampled_replicas": 2,
        "full_replicas": 1,
    }
    of_rows = koffline.evaluate(
        log.replace(behavior_log_probabilities=None), policy, 0.9, **few
    )
    heads = of_rows.diagnostics["estimates_by_head"]
    assert of_rows.estimator == "kloss+fqe"
    assert of_rows.value == pytest.approx((heads["kloss"] + heads["fqe"]) / 2)
    assert abs(heads["kloss"] - heads["fqe"]) > 1e-9


def test_probabilities_that_are_not_those_of_the_actions_are_never_supported() -> None:
    log = users()
    log = dataclasses.replace(
        log, behavior_log_probabilities=log.behavior_log_probabilities - 0.3
    )
    verdict = koffline.evaluate(log, policy, estimator="wis").verdict
    assert verdict.answer == "with care"
    assert "average 1.3" in str(verdict)
