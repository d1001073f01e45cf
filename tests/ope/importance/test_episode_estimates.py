"""From a log and a policy to estimates: oracles, reasons, warnings, and nothing that is NaN in silence."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from koffline.data.transitions import Transitions
from koffline.ope.names import (
    HOEFFDING,
    OVER_EPISODES,
    WITH_MODEL,
    WITHOUT_MODEL,
)
from koffline.ope.results import PointEstimate, Unavailable
from koffline.ope.value_sources import as_value_function
from koffline.policies import DiscretePolicy
from tests.exact_problems import EXACT_PROBLEMS
from tests.ope.importance.cases import enumerated, episode_estimates, random_case, values_of

FEW = 30  # bootstrap draws


def chain(name: str = "chain_off", seed: int = 0, n_rows: int = 2000):
    """An exact problem with the probabilities of its behavior, and its true action values as a function."""
    problem = EXACT_PROBLEMS[name](seed, n_rows)
    log = problem.transitions
    world = problem.policy.function.world
    table = problem.policy.function.table
    chance = {"chain_on": table, "chain_off": np.full((7, 2), 0.5), "chain_off_limited": np.full((7, 2), 0.5)}
    taken = chance[name][world.states_of(log.observations), np.asarray(log.actions)]
    log = log.replace(behavior_log_probabilities=np.log(taken))
    values = world.mdp.action_values(table, problem.gamma)
    q = as_value_function(
        lambda observations, actions: values[world.states_of(observations), actions],
        log.action_space,
        log.observation_shape,
    )
    return replace(problem, transitions=log), q


def test_estimated_behavior_is_said_and_not_certified() -> None:
    problem, _ = chain(n_rows=600)
    found = episode_estimates(
        problem.transitions,
        problem.policy,
        problem.gamma,
        names=["is"],
        behavior="estimate",
        interval=HOEFFDING,
        draws=FEW,
    )["is"]
    assert isinstance(found, PointEstimate)
    assert found.interval is None
    assert any("were estimated from the log" in text for text in found.warnings)
    assert any("these are estimated" in text for text in found.warnings)
    assert found.diagnostics["behavior"] == "estimate"
    world = enumerated()
    options = {"names": ["is"], "interval": HOEFFDING, "draws": FEW}
    uneven = episode_estimates(world.transitions, world.policy, 0.9, **options)["is"]
    assert any("episodes of equal weight" in text for text in uneven.warnings)


def test_episodes_of_weight_zero_are_not_there() -> None:
    problem, q = chain(n_rows=300)
    log = problem.transitions
    kept = np.arange(log.n_episodes) % 3 > 0
    rows = np.repeat(kept, log.episode_lengths)
    weighted = log.replace(weights=rows.astype(float))
    model = values_of(q, log, problem.policy)
    arguments = problem.policy, problem.gamma
    left = episode_estimates(log.select_episodes(kept), *arguments, q=q, draws=FEW)
    found = episode_estimates(weighted, *arguments, q=model, draws=FEW)
    for name in OVER_EPISODES:
        assert found[name].value == pytest.approx(left[name].value)
        assert found[name].effective_sample_size == pytest.approx(left[name].effective_sample_size)


def all_unavailable(found: dict, text: str) -> bool:
    return all(isinstance(part, Unavailable) and text in part.reason for part in found.values())


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("chain_tuples", {}, "this log's rows stand alone; add episode_ids"),
        ("chain_off", {"behavior": "log"}, "no behavior_log_probabilities"),
        ("linear_off_deterministic", {}, "it is deterministic: its actions have no density"),
        ("chain_off", {"names": WITH_MODEL}, "it needs a value function"),
    ],
)
def test_what_does_not_apply_has_a_reason(name: str, options: dict, reason: str) -> None:
    problem = EXACT_PROBLEMS[name](0, 100)
    assert all_unavailable(
        episode_estimates(problem.transitions, problem.policy, problem.gamma, **options), reason
    )


def never(problem, step: int):
    """A policy that takes none of the actions logged from a step on; observations carry the step."""
    log = problem.transitions
    seen = np.column_stack([np.asarray(log.steps), np.asarray(log.actions)]).astype(float)
    marked = log.replace(observations=seen, next_observations=seen)

    def probabilities(observations: np.ndarray) -> np.ndarray:
        logged = observations[:, 1].astype(int)
        other = np.eye(2)[1 - logged]
        return np.where(observations[:, :1] >= step, other, 0.5)

    return marked, DiscretePolicy(2, probabilities, "never")


def test_a_policy_that_takes_no_logged_action_has_no_estimate() -> None:
    problem, _ = chain(n_rows=200)
    log, policy = never(problem, 0)
    model = as_value_function(lambda o, a: np.zeros(len(o)), log.action_space, log.observation_shape)
    found = episode_estimates(log, policy, 0.9, q=model, draws=FEW)
    assert all_unavailable(found, "takes none of the logged actions: every episode's weight is zero after")


def overflowing() -> tuple[Transitions, DiscretePolicy]:
    """Ratios of e^40 in episodes of 30 steps: e^1200."""
    case = random_case(1, n_episodes=4)
    n = 120
    log = Transitions(
        observations=np.zeros((n, 1)),
        actions=np.zeros(n, dtype=int),
        rewards=np.ones(n),
        next_observations=np.zeros((n, 1)),
        terminated=np.arange(n) % 30 == 29,
        truncated=np.zeros(n, dtype=bool),
        action_space=case.transitions.action_space,
        episode_ids=np.arange(n) // 30,
        behavior_log_probabilities=np.full(n, -40.0),
    )
    return log, DiscretePolicy(3, lambda o: np.tile([1.0, 0.0, 0.0], (len(o), 1)), "always")


def test_weights_beyond_numbers_are_refused_or_normalised() -> None:
    log, policy = overflowing()
    found = episode_estimates(log, policy, 0.9, names=WITHOUT_MODEL, draws=FEW)
    for name in ("is", "pdis"):
        assert isinstance(found[name], Unavailable)
        assert "e^1200" in found[name].reason
    for name in ("wis", "wpdis"):
        assert found[name].value == pytest.approx((1.0 - 0.9**30) / 0.1)
    capped = episode_estimates(log, policy, 0.9, names=["is"], clip=100.0, draws=FEW)["is"]
    assert isinstance(capped, PointEstimate)
    assert any("capped at 100" in text for text in capped.warnings)
