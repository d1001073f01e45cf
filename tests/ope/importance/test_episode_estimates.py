"""From a log and a policy to estimates: oracles, reasons, warnings, and nothing that is
NaN in silence.
"""

from dataclasses import replace

import numpy as np
import pytest

from koffline.ope.names import HOEFFDING, OVER_EPISODES, WITHOUT_MODEL
from koffline.ope.value_functions import as_value_function
from koffline.policies import DiscretePolicy
from tests.exact_problems import EXACT_PROBLEMS
from tests.ope.importance.cases import (
    episode_estimates,
    log_of_steps,
    three_states,
    values_of,
)

FEW = 30  # bootstrap draws


def chain(n_rows: int):
    """An exact problem with the probabilities of its behavior, and its true action
    values as a function.
    """
    problem = EXACT_PROBLEMS["chain_off"](0, n_rows)
    log = problem.transitions
    world = problem.policy.function.world
    log = log.replace(behavior_log_probabilities=np.full(n_rows, np.log(0.5)))
    values = world.mdp.action_values(problem.policy.function.table, problem.gamma)
    q = as_value_function(
        lambda observations, actions: values[world.states_of(observations), actions],
        log.action_space,
        log.observation_shape,
    )
    return replace(problem, transitions=log), q


def test_estimated_behavior_is_said_and_not_certified() -> None:
    problem, _ = chain(n_rows=600)
    options = {"names": ["is"], "interval": HOEFFDING, "draws": FEW}
    world = three_states()
    arguments = problem.transitions, problem.policy, problem.gamma
    estimate = episode_estimates(*arguments, behavior="estimate", **options)["is"]
    assert estimate.interval is None
    assert any("were estimated from the log" in text for text in estimate.warnings)
    assert any(
        "it needs exact behavior probabilities" in text for text in estimate.warnings
    )
    uneven = episode_estimates(world.all_paths(), world.policy, 0.9, **options)["is"]
    assert any("episodes of equal weight" in text for text in uneven.warnings)


def test_episodes_of_weight_zero_are_not_there() -> None:
    problem, q = chain(n_rows=300)
    log = problem.transitions
    kept = np.arange(log.n_episodes) % 3 > 0
    weighted = log.replace(weights=np.repeat(kept, log.episode_lengths).astype(float))
    model = values_of(q, log, problem.policy)
    arguments = problem.policy, problem.gamma
    left = episode_estimates(log.select_episodes(kept), *arguments, q=q, draws=FEW)
    estimates = episode_estimates(weighted, *arguments, q=model, draws=FEW)
    for name in OVER_EPISODES:
        assert estimates[name].value == pytest.approx(left[name].value)
        assert estimates[name].effective_sample_size == pytest.approx(
            left[name].effective_sample_size
        )


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("chain_tuples", {}, "this log's rows stand alone; add episode_ids"),
        ("chain_off", {"behavior": "log"}, "no behavior_log_probabilities"),
        (
            "linear_off_deterministic",
            {},
            "it is deterministic: its actions have no density",
        ),
    ],
)
def test_what_does_not_apply_has_a_reason(
    name: str, options: dict, reason: str
) -> None:
    problem = EXACT_PROBLEMS[name](0, 100)
    estimates = episode_estimates(
        problem.transitions, problem.policy, problem.gamma, **options
    )
    assert all(reason in text for text in estimates.values())


def test_a_policy_that_takes_no_logged_action_has_no_estimate() -> None:
    problem, q = chain(n_rows=200)
    log = problem.transitions.replace(actions=np.zeros(200, dtype=int))
    policy = DiscretePolicy(2, lambda o: np.tile([0.0, 1.0], (len(o), 1)), "never")
    estimates = episode_estimates(log, policy, 0.9, q=q, draws=FEW)
    assert all(
        "takes none of the logged actions: every episode's" in text
        for text in estimates.values()
    )


def test_weights_beyond_numbers_are_refused_or_normalised() -> None:
    """Ratios of e^40 in episodes of 30 steps: e^1200."""
    log = log_of_steps(
        np.ones(120), 30, n_actions=3, behavior_log_probabilities=np.full(120, -40.0)
    )
    policy = DiscretePolicy(
        3, lambda o: np.tile([1.0, 0.0, 0.0], (len(o), 1)), "always"
    )
    estimates = episode_estimates(log, policy, 0.9, names=WITHOUT_MODEL, draws=FEW)
    for name in ("is", "pdis"):
        assert "e^1200" in estimates[name]
    for name in ("wis", "wpdis"):
        assert estimates[name].value == pytest.approx((1.0 - 0.9**30) / 0.1)
    capped = episode_estimates(log, policy, 0.9, names=["is"], clip=100.0, draws=FEW)[
        "is"
    ]
    assert any("capped at 100" in text for text in capped.warnings)
