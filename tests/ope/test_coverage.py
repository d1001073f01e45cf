"""Coverage: high where the policy's actions are in the log, zero where they are not."""

import numpy as np
import pytest

import koffline
from koffline.ope.coverage import measure_coverage
from koffline.ope.problem import prepare_problem
from koffline.policies import DiscretePolicy
from koffline.report.words import action_shares
from tests.ope.problems import QUICK, discrete_log


def coverage_of(log: koffline.Transitions, probabilities: list[float]) -> float:
    policy = DiscretePolicy(3, lambda s: np.tile(probabilities, (len(s), 1)))
    problem = prepare_problem(log, policy, 0.9, 1, np.random.default_rng(0))
    return measure_coverage(problem, np.random.default_rng(1)).fraction


def walk(actions: np.ndarray) -> koffline.Transitions:
    """Rows spread evenly over the square, next states drawn from the same law."""
    generator = np.random.default_rng(7)
    n = len(actions)
    states, following = generator.uniform(size=(2, n, 2))
    return discrete_log(n, observations=states, next_observations=following, actions=actions)


def test_logged_actions_are_covered_as_well_as_the_log_itself() -> None:
    log = walk(np.random.default_rng(8).integers(3, size=3000))
    # 95 % by construction; the quantile is taken over some 1000 rows per action, s.e. below 0.01
    assert coverage_of(log, [0.2, 0.3, 0.5]) == pytest.approx(0.95, abs=0.03)


def test_an_action_that_was_never_taken_is_not_covered() -> None:
    log = walk(np.random.default_rng(8).integers(2, size=3000))
    assert coverage_of(log, [0.0, 0.0, 1.0]) == 0.0
    assert coverage_of(log, [0.5, 0.0, 0.5]) == pytest.approx(0.475, abs=0.03)


def test_shares_of_actions_by_hand() -> None:
    log = walk(np.random.default_rng(8).integers(2, size=100))
    estimate = koffline.evaluate(log, lambda s: np.tile([0.9, 0.1, 0.0], (len(s), 1)), 0.9, **QUICK)
    mean = np.where(log.actions == 0, 0.9, 0.1).mean()
    assert estimate.diagnostics["mean_probability_of_logged_actions"] == pytest.approx(mean)
    taken = np.bincount(log.actions, minlength=3) / 100.0
    shares = estimate.diagnostics["actions"]
    assert [shares[name]["policy"] for name in "012"] == pytest.approx([0.9, 0.1, 0.0])
    assert [shares[name]["log"] for name in "012"] == pytest.approx(taken)
    assert f"0 90% (log {taken[0]:.0%})" in action_shares(shares)


def test_a_rare_action_does_not_cover_what_lies_between_its_few_rows() -> None:
    actions = np.where(np.arange(3000) < 10, 2, np.arange(3000) % 2)
    assert coverage_of(walk(actions), [0.0, 0.0, 1.0]) < 0.2
