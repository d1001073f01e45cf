"""Policies that are ranked on one log share what does not depend on the policy, and
every number is as if each were evaluated alone.
"""

from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

import koffline
from koffline.data.structure import Structure
from koffline.fitting import FitRecord
from koffline.ope.networks import fitted_q, reward_regression
from koffline.policies import DiscretePolicy
from tests.ope.problems import SOFT, discrete_log

pytestmark = pytest.mark.usefixtures("few_features_of_memory")

SMALL = {
    "hidden_units": (8, 8),
    "full_replicas": 2,
    "resampled_replicas": 4,
    "instruments": 60,
}
UNIFORM = DiscretePolicy(3, lambda states: np.full((len(states), 3), 1 / 3), "uniform")
FIRST = DiscretePolicy(
    3, lambda states: np.tile([0.8, 0.1, 0.1], (len(states), 1)), "first"
)
POLICIES = {"soft": SOFT, "uniform": UNIFORM, "first": FIRST}


def one_step(rows: int = 300) -> koffline.Transitions:
    return discrete_log(rows, length=1).replace(
        terminated=np.ones(rows, bool),
        truncated=np.zeros(rows, bool),
        behavior_log_probabilities=np.full(rows, -np.log(3.0)),
    )


def several_steps() -> koffline.Transitions:
    return discrete_log(300)


def counted(monkeypatch: Any, module: Any, name: str) -> Mock:
    """What stands in a function's place, calls it, and counts the calls."""
    function = Mock(wraps=getattr(module, name))
    monkeypatch.setattr(module, name, function)
    return function


@pytest.mark.parametrize("make_log", [one_step, several_steps])
@pytest.mark.parametrize("options", [{"steps": 30}, {"history": 0}])
def test_numbers_are_those_of_each_policy_alone(monkeypatch, make_log, options) -> None:
    monkeypatch.setattr(fitted_q, "SHORTEST", 10)
    monkeypatch.setattr(fitted_q, "MOST_STEPS", 80)
    log = make_log()
    ranking = koffline.select_policies(log, POLICIES, 0.9, **SMALL, **options)
    for ranked in ranking.policies:
        alone = koffline.evaluate(
            log,
            POLICIES[ranked.name],
            0.9,
            estimator=ranking.estimator,
            **SMALL,
            **options,
        )
        assert ranked.value == alone.value
        assert ranked.interval == alone.interval
        assert ranked.verdict == alone.verdict


def test_dr_is_that_of_each_policy_alone() -> None:
    log = one_step()
    options = {"estimator": "dr", "steps": 30, **SMALL}
    ranking = koffline.select_policies(log, POLICIES, **options)
    for ranked in ranking.policies:
        alone = koffline.evaluate(log, POLICIES[ranked.name], **options)
        assert (ranked.value, ranked.interval) == (alone.value, alone.interval)


@pytest.mark.parametrize(
    ("make_log", "estimator", "module", "trainings"),
    [
        (one_step, "kloss", fitted_q, 1),
        (one_step, "dr", reward_regression, 1),
        (several_steps, "kloss", fitted_q, 3),
    ],
)
def test_networks_of_one_step_logs_are_trained_once(
    monkeypatch, make_log, estimator, module, trainings
) -> None:
    function = counted(monkeypatch, module, "fit_on_cores")
    koffline.select_policies(
        make_log(), POLICIES, 0.9, estimator=estimator, steps=20, **SMALL
    )
    assert function.call_count == trainings


@pytest.mark.parametrize("make_log", [one_step, several_steps])
def test_the_structure_of_the_log_is_tested_once(monkeypatch, make_log) -> None:
    function = counted(monkeypatch, Structure, "of")
    koffline.select_policies(
        make_log(), POLICIES, 0.9, estimator="kloss", steps=20, **SMALL
    )
    assert function.call_count == 1


def test_a_round_is_taken_over_only_from_the_same_parameters() -> None:
    rounds = fitted_q.SharedRounds()
    networks = [
        fitted_q.StackedMLP.initialise((2, 4, 3), seeds) for seeds in ([0, 1], [0, 2])
    ]
    record = FitRecord(
        network=networks[0],
        losses=torch.zeros(1, 2),
        loss_steps=(10,),
        probes=(),
        probe_steps=(),
        diverged_at=(None, None),
        steps=10,
    )
    rounds.keep(networks[0], 10, 0, record)
    assert rounds.find(networks[0], 10, 0) is record
    assert rounds.find(networks[1], 10, 0) is None
    assert rounds.find(networks[0], 10, 10) is None
