"""No interval where the log has no evidence for one, and none beyond what rewards and γ
allow.
"""

import dataclasses
import re

import numpy as np
import pytest

import koffline
from koffline.data.copies import without_copies
from koffline.data.transitions import Transitions
from koffline.ope.evaluation import estimate_all
from koffline.ope.log.bounds import value_bounds
from koffline.ope.log.facts import Limits
from koffline.ope.log.problem import prepare_problem
from koffline.ope.results import Interval, PointEstimate, Uplift
from koffline.ope.verdict import NOT_ANSWERABLE
from tests.exact_problems import _ANYWHERE, _FORWARD, FiniteCase, _rooms
from tests.ope.problems import SOFT, discrete_log, facts_of

pytestmark = pytest.mark.usefixtures("few_features_of_memory")

QUICK = {"steps": 20, "full_replicas": 2, "hidden_units": (8, 8), "instruments": 40}
QUICK |= {"feature_source": "random"}
NONE = (np.inf, -np.inf)  # the range of no rewards
NAMES = ("kloss", "lstd", "mql", "lstdq", "mwl", "wpdis", "wdr", "drl")


def cut_after_twenty(episodes: int, gamma: float = 0.95):
    """A grid that never ends, every episode cut after 20 steps."""
    return FiniteCase("grid", _rooms(False), _ANYWHERE, _FORWARD, gamma, 20)(
        3, 20 * episodes
    )


def copied(log: Transitions, times: int) -> Transitions:
    return log.select_episodes(np.tile(np.arange(log.n_episodes), times))


def test_one_extreme_value_hides_no_feature():
    log = discrete_log(400)
    states = np.array(log.observations)
    states[7, 1] = 1e9
    states[9, 1] = -1e5
    with_extremes, usual = (
        prepare_problem(log_read, SOFT, 0.9, 1, np.random.default_rng(0))
        for log_read in (log.replace(observations=states), log)
    )
    np.testing.assert_allclose(with_extremes.input_scale, usual.input_scale, rtol=0.02)
    assert with_extremes.inputs[[7, 9], 1].tolist() == [10.0, -10.0]


class TestCopies:
    def test_ten_episodes_copied_fifteen_times_are_ten_episodes(self):
        problem = cut_after_twenty(10)
        alone = estimate_all(
            problem.transitions,
            problem.policy,
            0.95,
            names=NAMES,
            bounds=False,
            **QUICK,
        )
        many = copied(problem.transitions, 15)
        table = estimate_all(
            many, problem.policy, 0.95, names=NAMES, bounds=False, **QUICK
        )
        assert table.n_episodes == 150
        assert any(
            "150 episodes, only 10 of them different" in warning
            for warning in table.warnings
        )
        for row, expected in zip(table.rows, alone.rows, strict=True):
            assert row.estimate.value == pytest.approx(
                expected.estimate.value, rel=1e-9
            )
            assert (row.estimate.interval is None) == (
                expected.estimate.interval is None
            )
            if row.estimate.interval is not None:
                width = expected.estimate.interval.width
                assert row.estimate.interval.width == pytest.approx(width, rel=1e-9)

    def test_their_weights_add_up_row_by_row(self):
        log = copied(cut_after_twenty(2).transitions, 3)
        weights = np.arange(1.0, 1.0 + len(log))
        distinct = without_copies(log.replace(weights=weights))
        assert (distinct.units, len(distinct.kept), len(distinct.transitions)) == (
            6,
            2,
            40,
        )
        assert np.array_equal(
            distinct.transitions.weights, weights.reshape(3, 40).sum(axis=0)
        )

    def test_equal_episodes_are_chance_where_states_recur(self):
        generator = np.random.default_rng(0)
        now, later = np.eye(3)[generator.integers(3, size=(2, 600))]
        columns = {
            "observations": now,
            "next_observations": later,
            "rewards": now[:, 0],
        }
        distinct = without_copies(
            discrete_log(600, 2, **columns, actions=generator.integers(2, size=600))
        )
        assert len(distinct.kept) == distinct.units
        assert distinct.notes == []

    @pytest.mark.parametrize(
        "column", ["rewards", "truncated", "behavior_log_probabilities"]
    )
    def test_what_differs_in_any_column_is_no_copy(self, column):
        log = copied(cut_after_twenty(50).transitions, 2)
        values = np.zeros(2000)
        values[-1] = -1.0
        if column == "truncated":
            values = np.asarray(log.truncated) & (np.arange(2000) < 1999)
        assert len(without_copies(log.replace(**{column: values})).kept) == 51

    def test_copies_in_a_sample_of_a_larger_log_leave_no_interval(self):
        """There they cannot be merged: copies of what was drawn may lie outside it."""
        problem = cut_after_twenty(10)
        log = copied(problem.transitions, 15)
        for name in ("lstdq", "kloss"):
            estimate = koffline.evaluate(
                log, problem.policy, 0.95, estimator=name, sample_rows=2000, **QUICK
            )
            assert estimate.interval is None
            assert re.search(
                r"No interval: \d+% of the rows are copies", " ".join(estimate.warnings)
            )


class TestTooLittle:
    @pytest.mark.parametrize(
        ("gamma", "other_estimators", "reason"),
        [
            (0.95, 1e-9, "the log has one episode that counts"),
            (0.999, 1.0, "ask for a smaller gamma"),
        ],
        ids=["one episode with all the weight", "a future that no episode shows"],
    )
    def test_no_estimator_has_an_interval(self, gamma, other_estimators, reason):
        problem = cut_after_twenty(20, gamma)
        log = problem.transitions.replace(
            weights=np.where(np.arange(400) < 20, 1.0, other_estimators)
        )
        names = ("kloss", "fqe", "lstdq", "mwl", "wpdis", "drl")
        table = estimate_all(log, problem.policy, gamma, names=names, **QUICK)
        for row in table.rows:
            assert row.estimate.interval is None
            assert any(reason in warning for warning in row.estimate.warnings)
        assert table.verdict.answer == NOT_ANSWERABLE
        assert not re.search(r'"(low|high)": [-\d]', table.to_json())

    def test_a_certificate_holds_all_the_same(self):
        """One that was told its bounds; one that read them off a log that does not
        answer is none.
        """
        problem = cut_after_twenty(20, 0.999)
        bounds = {"reward_bounds": (-0.1, 2.9), "norm_bound": 1e4}
        for bounds_given in (bounds, {}):
            settings = {**QUICK, "interval": "kernel-certified", **bounds_given}
            estimate = koffline.evaluate(
                problem.transitions, problem.policy, 0.999, **settings
            )
            assert estimate.verdict.answer == NOT_ANSWERABLE
            assert estimate.uplift is None
            assert bounds_given == {} or estimate.interval.holds(problem.value)
            assert bounds_given == bounds or estimate.interval is None


class TestPossibleValues:
    @pytest.mark.parametrize(
        ("going_on", "final", "gamma", "expected"),
        [
            ((-1.0, 2.0), NONE, 0.9, (-10.0, 20.0)),
            ((0.0, 0.0), (-1.0, 1.0), 0.9, (-1.0, 1.0)),
            ((1.0, 1.0), (0.0, 0.0), 0.5, (0.0, 2.0)),  # it may end at once
            ((-1.0, -1.0), (5.0, 7.0), 0.5, (-2.0, 7.0)),
            (NONE, (0.2, 0.9), 0.99, (0.2, 0.9)),  # a bandit
        ],
    )
    def test_bounds_by_hand(self, going_on, final, gamma, expected):
        assert value_bounds(going_on, final, gamma) == pytest.approx(expected)

    @pytest.mark.parametrize("seed", range(5))
    def test_bounds_hold_of_every_process_with_such_rewards(self, seed):
        generator = np.random.default_rng(seed)
        going_on, final = np.sort(generator.normal(size=(2, 2)), axis=1)
        low, high = value_bounds(tuple(going_on), tuple(final), 0.8)
        for _ in range(500):
            length = int(generator.integers(0, 30))
            rewards = [
                *generator.uniform(*going_on, size=length),
                generator.uniform(*final),
            ]
            assert low <= float(np.polynomial.polynomial.polyval(0.8, rewards)) <= high

    def test_an_interval_is_cut_and_says_so(self):
        limits = Limits(facts_of(discrete_log(), 0.9), (-1.0, 1.0))
        whole = Interval(-0.3, 1.27, 0.95, "x")
        part, note = limits.cut(whole)
        assert (part.low, part.high) == (-0.3, 1.0)
        assert "was cut to [-1, 1]" in note
        nothing, reason = limits.cut(dataclasses.replace(whole, low=1.1))
        assert nothing is None
        assert "lies wholly outside [-1, 1]" in reason

    def test_an_impossible_estimate_has_no_interval(self):
        limits = Limits(facts_of(discrete_log(), 0.9), (-2.0, 58.0))
        settled = limits.settle(
            PointEstimate("lstdq", -3.0, 1.0, Interval(-5.0, -1.0, 0.95, "bootstrap")),
            [],
        )
        assert settled.value == pytest.approx(-2.0)
        assert settled.interval is None
        assert any("lies outside [-2, 58]" in warning for warning in settled.warnings)

    @pytest.mark.parametrize(
        ("logged", "expected"), [(-3.0, -2.0), (7.0, 7.0), (60.0, 58.0)]
    )
    def test_the_logging_policys_value_is_a_possible_one(self, logged, expected):
        uplift = Uplift(
            1.0, None, logged, Interval(logged - 1.0, logged + 1.0, 0.95, "bootstrap")
        )
        estimate = PointEstimate(
            "lstdq", 3.0, 1.0, Interval(1.0, 5.0, 0.95, "bootstrap"), uplift
        )
        settled = (
            Limits(facts_of(discrete_log(), 0.9), (-2.0, 58.0))
            .settle(estimate, [])
            .uplift
        )
        assert settled.behavior_value == expected
        assert settled.value == 1.0
        assert (
            -2.0
            <= settled.behavior_interval.low
            <= settled.behavior_interval.high
            <= 58.0
        )

    @pytest.mark.parametrize("rows", [4000, 1500])
    def test_constant_rewards_have_one_value(self, rows):
        problem = FiniteCase("grid", _rooms(False), _ANYWHERE, _FORWARD, 0.98, 200)(
            3, 4000
        )
        log = problem.transitions.replace(rewards=np.ones(4000))
        options = {**QUICK, "steps": 400, "sample_rows": rows}
        names = ("kloss", "lstdq", "mwl")
        table = estimate_all(
            log, problem.policy, 0.98, names=names, bounds=False, **options
        )
        for of_estimator in (table[name].estimate for name in names):
            assert of_estimator.value == pytest.approx(50.0, rel=1e-3)
            assert of_estimator.interval is None  # the log shows nothing else
            assert not any(
                "lies outside" in warning for warning in of_estimator.warnings
            )


def test_a_log_whose_rows_are_all_alike_answers_nothing_about_any_policy():
    """Reward one at every step and no end: every estimator says 1/(1 − γ), and none may
    be sure of it.
    """
    log = discrete_log()
    alike = {"rewards": np.ones(len(log)), "terminated": np.zeros(len(log), bool)}
    log = dataclasses.replace(log, **alike, truncated=log.truncated | log.terminated)
    table = estimate_all(log, "uniform", 0.9, **QUICK)
    assert all(
        row.estimate is None or row.estimate.interval is None for row in table.rows
    )
    assert all(bound.interval is None for bound in table.bounds)
    assert table.verdict.answer == "not answerable from this log"
    assert "nothing in the log tells policies apart" in table.verdict.reasons[0].text
