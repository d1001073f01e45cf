"""What the policy that wrote a log is worth, and the uplift over it: against answers
known exactly.
"""

import dataclasses

import numpy as np
import pytest

import koffline
from koffline.config import EvaluationSettings
from koffline.ope.log.coverage import Coverage, describe_coverage
from koffline.ope.results import Interval, PointEstimate, Uplift
from koffline.ope.verdict import judge
from koffline.ope.workspace import open_workspace
from tests.exact_problems import EXACT_PROBLEMS, FiniteCase
from tests.ope.problems import QUICK, continuous_log, discrete_log, mortal_log
from tests.ope.test_verdict import FOUND, LIMITS, ROBUST

pytestmark = pytest.mark.usefixtures("few_features_of_memory")

SMALL = {"steps": 1000, "hidden_units": (32, 32), "instruments": 300}


def test_complete_episodes_say_it_by_their_returns() -> None:
    log = discrete_log()
    ended = np.arange(len(log)) % 10 == 9
    weights = np.repeat([1.0, 2.0, 1.0, 1.0, 3.0, 1.0], 10)
    log = log.replace(
        terminated=ended, truncated=np.zeros(len(log), bool), weights=weights
    )
    log = log.with_metadata(log.metadata.with_notes("it assumed something"))
    estimate = koffline.evaluate(log, "uniform", 0.9, **QUICK)
    assert estimate.notes == ("it assumed something",)
    assert not any("assumed" in text for text in estimate.warnings)
    expected = np.average(log.returns(0.9), weights=weights[::10])
    assert estimate.behavior_value == pytest.approx(expected, rel=1e-9)
    assert estimate.uplift.value == pytest.approx(estimate.value - expected)
    assert estimate.diagnostics["beyond_cuts"] == 0.0


def test_a_return_goes_on_after_the_cut() -> None:
    """Reward about one for ever: worth ten, whatever is done; ten logged steps show 6.5
    of it.
    """
    log = discrete_log(600).replace(
        rewards=1.0 + 0.01 * (-1.0) ** np.arange(600),
        terminated=np.zeros(600, bool),
        truncated=np.arange(600) % 10 == 9,
    )
    estimate = koffline.evaluate(log, "uniform", 0.9, **{**QUICK, "steps": 500})
    assert estimate.diagnostics["logged_return"] == pytest.approx(6.516, abs=1e-3)
    assert estimate.diagnostics["beyond_cuts"] == pytest.approx(0.9**10)
    assert estimate.behavior_value == pytest.approx(10.0, abs=0.05)
    assert estimate.uplift.value == pytest.approx(0.0, abs=0.02)


def test_replicas_are_not_clipped_one_by_one() -> None:
    """The values whose difference is the uplift both go beyond what is possible, or
    neither.
    """
    settings = EvaluationSettings(gamma=0.9, **QUICK)
    with open_workspace(discrete_log(), "uniform", settings) as workspace:
        fitted = workspace.fitted
    narrow = dataclasses.replace(fitted.problem, value_bounds=(-1e-6, 1e-6))
    clipped = dataclasses.replace(fitted, problem=narrow)
    np.testing.assert_array_equal(clipped.behavior, fitted.behavior)
    np.testing.assert_array_equal(clipped.values_of("kloss"), fitted.values_of("kloss"))
    assert np.abs(fitted.behavior).max() > 1e-3


@pytest.mark.parametrize("name", ["chain_off_limited", "grid_loop_off_limited"])
def test_the_uplift_is_that_of_the_exact_values(name: str) -> None:
    case = EXACT_PROBLEMS[name]
    assert isinstance(case, FiniteCase)
    problem = case(1, 4000)
    behavior = case.world.mdp.policy_value(case.behavior, case.gamma)
    estimate = koffline.evaluate(
        problem.transitions, problem.policy, problem.gamma, **SMALL
    )
    assert estimate.uplift.interval.holds(problem.value - behavior)
    assert estimate.uplift.behavior_interval.holds(behavior)
    assert abs(estimate.behavior_value - behavior) < abs(
        estimate.diagnostics["logged_return"] - behavior
    )


def test_noise_that_both_share_cancels() -> None:
    problem = EXACT_PROBLEMS["linear_on"](2)
    estimate = koffline.evaluate(
        problem.transitions, problem.policy, problem.gamma, **SMALL
    )
    assert estimate.uplift.interval.holds(0.0)
    assert estimate.uplift.interval.width < 0.6 * estimate.interval.width


@pytest.mark.slow
@pytest.mark.parametrize("name", ["chain_off", "chain_off_limited", "grid_off_limited"])
def test_uplift_intervals_hold_the_uplift_in_most_logs(name: str) -> None:
    """At 95 % fewer than 33 of 40 logs would come up less than once in a thousand
    times.
    """
    case = EXACT_PROBLEMS[name]
    held = 0
    for seed in range(40):
        problem = case(seed, 2000)
        behavior = case.world.mdp.policy_value(case.behavior, case.gamma)
        estimate = koffline.evaluate(
            problem.transitions, problem.policy, problem.gamma, seed=seed, **SMALL
        )
        held += estimate.uplift.interval.holds(problem.value - behavior)
    assert held >= 33


def test_nothing_is_said_of_actions_that_are_not_known() -> None:
    log = discrete_log()
    starts = np.zeros((4, 2))
    assert (
        koffline.evaluate(
            log, "uniform", 0.9, initial_observations=starts, **QUICK
        ).uplift
        is None
    )
    assert (
        koffline.evaluate(
            continuous_log(), lambda s: 0.0 * s[:, :1], 0.9, **QUICK
        ).uplift
        is None
    )


def _interval(low: float, high: float) -> Interval:
    return Interval(low, high, 0.95, "bootstrap")


@pytest.mark.parametrize(
    ("uplift", "coverage", "words"),
    [
        (
            None,
            0.97,
            "The policy is worth 10.0 ± 1.0 (95% interval); coverage is good (97%).",
        ),
        (
            Uplift(3.0, _interval(2.5, 3.5), 7.0, None),
            0.97,
            (
                "10.0 ± 1.0, 3.00 ± 0.50 more than the policy that wrote the log (95%"
                " intervals); coverage is"
            ),
        ),
        (
            Uplift(-3.0, _interval(-5.0, -2.0), 13.0, None),
            0.97,
            "3.0 (2.0 to 5.0) less than the policy",
        ),
        (
            Uplift(0.2, _interval(-0.2, 0.6), 9.8, None),
            0.97,
            "not clearly more or less (0.20 ± 0.40) than",
        ),
        (None, 0.7, f"take it with care: {describe_coverage(0.7)}."),
    ],
)
def test_the_verdict_has_a_sentence(
    uplift: Uplift | None, coverage: float, words: str
) -> None:
    estimate: PointEstimate = dataclasses.replace(FOUND, uplift=uplift)
    near = Coverage(coverage, np.zeros(0), np.zeros(0))
    assert words in judge(estimate, LIMITS, near, 10.0, ROBUST).sentence


@pytest.mark.parametrize(("rows_after", "most"), [(True, 3), (False, 4)])
def test_ends_of_the_world_are_not_too_frequent_where_recording_stops(
    rows_after: bool, most: int
) -> None:
    """At a stop only rows where the world ended are left, or have no need of a next
    action.
    """
    log = mortal_log(rows_after, most=most)
    estimate = koffline.evaluate(
        log, lambda states: np.full((len(states), 2), 0.5), 0.9, **QUICK
    )
    assert estimate.value == pytest.approx(1 / 0.28, rel=0.05)
    assert estimate.behavior_value == pytest.approx(1 / 0.28, rel=0.05)
    assert abs(estimate.uplift.value) < 0.1
