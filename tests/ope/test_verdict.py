"""Coverage, and the verdict: what is missing decides it, by hand-made facts."""

import dataclasses
import json
import re

import numpy as np
import pytest

import koffline
from koffline.data.sources import write_transitions
from koffline.data.statistics import ColumnStatistics
from koffline.fitting import threads
from koffline.ope.assumptions.markov import Shift
from koffline.ope.log import coverage as coverages
from koffline.ope.log.coverage import Coverage, measure_coverage, visited_holes
from koffline.ope.log.facts import Limits
from koffline.ope.log.problem import prepare_problem
from koffline.ope.results import Interval, PointEstimate, Reason
from koffline.ope.verdict import NOT_ANSWERABLE, SUPPORTED, WITH_CARE, judge
from koffline.policies import ContinuousPolicy, DiscretePolicy
from koffline.report.words import action_shares, described
from scripts.bench.structure_worlds import as_log, play, with_fault, worlds
from tests.ope.problems import (
    AS_OPTIONS,
    COLUMNS,
    QUICK,
    SOFT,
    continuous_log,
    discrete_log,
    facts_of,
)
from tests.refusals import run_cli, succeed

pytestmark = pytest.mark.usefixtures("few_features_of_memory")

NINE = ColumnStatistics.of(np.full(100, 9.0))
FACTS = dataclasses.replace(facts_of(discrete_log(2000, 20), 0.9), sizes=NINE)
LIMITS = Limits(FACTS, (-99.0, 99.0))
ALIKE = {
    "going_on": ColumnStatistics.of(np.ones(9)),
    "final": ColumnStatistics.of(np.zeros(9)),
}
WEIGHTS = {"effective_units": 60.0, "mass": 1.02, "negative_share": 0.1}
FOUND = PointEstimate("kloss", 10.0, interval=Interval(9.0, 11.0, 0.95, "bootstrap"))
ROBUST = PointEstimate("drl", 10.2, diagnostics=WEIGHTS)


def limits(**changed: object) -> Limits:
    return Limits(dataclasses.replace(FACTS, **changed), LIMITS.bounds)  # type: ignore[arg-type]


def robust(**changed: float) -> PointEstimate:
    value = changed.pop("value", 10.2)
    return dataclasses.replace(ROBUST, value=value, diagnostics={**WEIGHTS, **changed})


@pytest.mark.parametrize(
    ("answer", "missing", "changed"),
    [
        (SUPPORTED, "", {}),
        (WITH_CARE, "support", {"coverage": 0.7}),
        (NOT_ANSWERABLE, "support", {"coverage": 0.4}),
        (
            WITH_CARE,
            "size",
            {"limits": limits(weights=ColumnStatistics.of(np.ones(12)))},
        ),
        (WITH_CARE, "size", {"limits": limits(**ALIKE, terminated=2)}),
        (SUPPORTED, "", {"limits": limits(**ALIKE, terminated=10)}),
        (WITH_CARE, "size", {"scale": 3.0}),
        (NOT_ANSWERABLE, "size", {"scale": 0.9}),
        (
            WITH_CARE,
            "size",
            {"limits": limits(sizes=ColumnStatistics.of(np.full(100, 1.9)))},
        ),
        (WITH_CARE, "support", {"unlogged": 0.05}),
        (NOT_ANSWERABLE, "support", {"unlogged": 0.2}),
        (WITH_CARE, "support", {"holes": 0.05}),
        (NOT_ANSWERABLE, "support", {"holes": 0.2}),
        (WITH_CARE, "support", {"of_starts": 0.4}),
        (
            NOT_ANSWERABLE,
            "support training",
            {"of_starts": 0.1, "gaps": [Reason("training", "was here")]},
        ),
        (
            WITH_CARE,
            "gaps",
            {"gaps": [Reason("gaps", "3 steps are longer than others")]},
        ),
        (WITH_CARE, "horizon", {"limits": limits(longest=10)}),
        # all end after 10 steps
        (
            SUPPORTED,
            "",
            {"limits": limits(longest=10, terminated=200)},
        ),
        (WITH_CARE, "contradiction", {"robust": robust(value=12.0)}),
        (WITH_CARE, "support", {"robust": robust(effective_units=4.0)}),
        (WITH_CARE, "support", {"robust": robust(mass=0.5)}),
        (WITH_CARE, "support", {"robust": robust(negative_share=0.4)}),
        (
            NOT_ANSWERABLE,
            "interval",
            {"estimate": dataclasses.replace(FOUND, interval=None)},
        ),
    ],
)
def test_what_is_missing_decides(answer, missing, changed) -> None:
    facts = {
        "estimate": FOUND,
        "limits": LIMITS,
        "coverage": 0.95,
        "scale": 10.0,
        "robust": ROBUST,
        **changed,
    }
    share = facts.pop("unlogged", 0.0)
    shares = np.array([share, 1.0 - share])
    starts = facts.pop("of_starts", 1.0)
    near = np.array([np.inf, 0.5])
    holes = facts.pop("holes", 0.0)
    facts["coverage"] = Coverage(facts["coverage"], near, shares, starts, holes=holes)
    verdict = judge(**facts)
    assert verdict.answer == answer
    assert [reason.kind for reason in verdict.reasons] == missing.split()


@pytest.mark.parametrize("value", [49.30, 49.36, 50.22, 51.01, 51.05])
@pytest.mark.parametrize(
    "bounds", [(0.0, 50.0), (50.0, 99.0), (49.9, 50.1), (0.0, 99.0), (60.0, 70.0)]
)
def test_the_doubly_robust_estimate_is_compared_with_the_interval_before_it_was_cut(
    value, bounds
) -> None:
    whole = Interval(49.35, 51.02, 0.95, "bootstrap")
    estimate = dataclasses.replace(FOUND, value=50.0, interval=whole.within(bounds))
    coverage = Coverage(0.95, np.array([np.inf, 0.5]), np.array([0.0, 1.0]), 1.0)
    verdict = judge(estimate, LIMITS, coverage, 100.0, robust(value=value))
    assert ("contradiction" in [reason.kind for reason in verdict.reasons]) == (
        not whole.holds(value)
    )


def test_what_moves_the_value_is_measured_against_the_interval_before_it_was_cut() -> (
    None
):
    whole = Interval(49.0, 51.0, 0.95, "bootstrap")
    for size in (0.3, 0.6):
        shift = Shift(value=size, standard_error=0.01, rows=1, units=100, tests=1)
        assert shift.matters(whole.within((0.0, 49.2))) == shift.matters(whole)


def test_an_interval_remembers_its_ends_through_several_cuts_and_does_not_show_them() -> (
    None
):
    whole = Interval(-3.0, 5.0, 0.95, "bootstrap")
    cut = whole.within((-2.0, 4.0)).within((-1.0, 9.0))
    assert (cut.low, cut.high) == (-1.0, 4.0)
    assert cut.as_measured == whole
    assert whole.within((-9.0, 9.0)) is whole
    assert "uncut" not in cut.as_dict()


def test_actions_that_were_never_logged_are_not_answerable_and_have_no_interval() -> (
    None
):
    log = discrete_log()
    log = log.replace(actions=np.zeros(len(log), dtype=np.int64))
    estimate = koffline.evaluate(
        log, lambda s: np.tile([0.0, 0.1, 0.9], (len(s), 1)), 0.9, **QUICK
    )
    assert estimate.verdict.answer == NOT_ANSWERABLE
    assert (estimate.interval, estimate.uplift, estimate.behavior_value) == (
        None,
        None,
        None,
    )
    expected = "100% of the policy's actions are ones the log never or hardly takes"
    assert estimate.verdict.sentence.startswith(
        f"This log does not say what the policy is worth: {expected}"
    )
    assert estimate.as_dict()["verdict"]["reasons"] == [
        {"kind": "support", "text": expected}
    ]
    assert next(iter(estimate.as_dict())) == "verdict"


@pytest.mark.parametrize("command", ["--interval=kernel-certified", "--estimator=all"])
def test_no_number_on_the_screen_looks_like_knowledge_where_there_is_none(
    command, tmp_path
) -> None:
    log = discrete_log()
    path = tmp_path / "log.hdf5"
    write_transitions(log.replace(actions=np.zeros(len(log), dtype=np.int64)), path)
    arguments = (
        "evaluate",
        path,
        "--policy",
        "uniform",
        "--gamma",
        0.9,
        "--quiet",
        command,
        *AS_OPTIONS,
    )
    shown = run_cli(*arguments, "--out", tmp_path / "out").output
    assert NOT_ANSWERABLE in shown
    assert not re.search(r"\d …|certified, |uplift +│", shown)
    page = (tmp_path / "out" / "report.html").read_text().split("<h2>How to get")[0]
    assert not re.search(r"\d … [-\d]|uplift <b>|class=\"value\"", page)


def test_rows_that_are_missing_inside_episodes_reach_the_verdict_and_the_page(
    tmp_path,
) -> None:
    rows = [
        f"{user},{day},{day % 3},{(user + day) % 2},{(user * day) % 5},{int(day == 29)}"
        for user in range(40)
        for day in range(30)
        if day % 29 == 0 or (user + day) % 3
    ]
    table, report, shards = (
        tmp_path / name for name in ("gaps.csv", "report", "shards")
    )
    table.write_text("\n".join(["user,day,x,act,gain,end", *rows]))
    options = ("--policy", "uniform", "--gamma", 0.8, *AS_OPTIONS)
    screen = succeed("evaluate", table, *COLUMNS, *options, "--out", report)
    share_missing = "32.2% of the steps may be missing"
    assert share_missing in " ".join(screen.split("take it with care")[1].split())
    verdict = json.loads((report / "estimate.json").read_text())["verdict"]
    assert verdict["answer"] == WITH_CARE
    assert share_missing in verdict["reasons"][0]["text"]
    assert share_missing in (report / "report.html").read_text().split("Diagnostics")[0]
    succeed("data", "convert", table, shards, "--shard-rows", 500, *COLUMNS)
    lazy = json.loads(succeed("evaluate", shards, "--lazy", *options, "--json"))[
        "verdict"
    ]
    assert lazy["reasons"][0] == verdict["reasons"][0]


def test_signs_of_a_misread_log_are_reasons_for_care() -> None:
    generator = np.random.default_rng(0)
    world = next(
        world for world in worlds(generator) if world.name == "corridor with costs"
    )
    episodes = play(world, rows=800, generator=generator)
    right = koffline.evaluate(as_log(world, episodes), "uniform", gamma=0.8, **QUICK)
    assert "ends" not in [reason.kind for reason in right.verdict.reasons]
    log = with_fault(world, episodes, "terminals that end nothing", 0.1, generator)
    assert log is not None
    estimate = koffline.evaluate(log, "uniform", gamma=0.8, **QUICK)
    assert estimate.verdict.answer != SUPPORTED
    assert "in the observation that ended the last one" in " ".join(
        map(str, estimate.verdict.reasons)
    )


def test_actions_of_which_the_log_tells_too_little_are_replaced_by_the_others() -> None:
    log = discrete_log(600)
    policy = DiscretePolicy(3, lambda s: np.tile([0.1, 0.4, 0.5], (len(s), 1)))
    assert coverages.known_actions(policy, log) is None
    rare = log.replace(actions=np.where(np.arange(600) < 20, 2, np.arange(600) % 2))
    known = coverages.known_actions(policy, rare)
    assert known.tolist() == [True, True, False]
    replaced = coverages.among(policy, known).probabilities(log.observations)
    np.testing.assert_allclose(replaced, np.tile([0.2, 0.8, 0.0], (600, 1)), atol=1e-9)
    seldom = DiscretePolicy(3, lambda s: np.tile([0.5, 0.45, 0.05], (len(s), 1)))
    # no more often than three times as the log
    assert coverages.known_actions(seldom, rare) is None
    problem = prepare_problem(rare, policy, 0.9, 1, np.random.default_rng(0))
    assert measure_coverage(
        problem, np.random.default_rng(0), known
    ).unlogged == pytest.approx(0.5)


@pytest.mark.parametrize(("shift", "covered"), [(0.0, True), (10.0, False)])
def test_start_states_that_the_log_does_not_show_are_not_covered(
    shift: float, covered: bool
) -> None:
    log = discrete_log(600)
    problem = prepare_problem(
        log, SOFT, 0.9, 1, np.random.default_rng(0), log.observations[::20] + shift
    )
    coverage = measure_coverage(problem, np.random.default_rng(1))
    assert coverage.fraction > 0.8
    assert (coverage.of_starts > 0.8) == covered
    assert coverage.of_starts in (0.0, pytest.approx(1.0, abs=0.2))


def test_a_rare_flag_does_not_overflow_the_stack_where_denormal_numbers_count_as_zero() -> (
    None
):
    rare = np.zeros(1000)
    halves = np.repeat([0.0, 0.1], 500)
    rare[:3] = 1.0
    states = np.stack([rare, halves], axis=1)
    log = discrete_log(1000, observations=states, next_observations=states)
    with threads(1):
        assert coverage_of(log, [0.5, 0.5, 0.0]) == pytest.approx(1.0)


@pytest.mark.parametrize(("dose", "holes"), [(0.25, 0.0), (0.2501, 1.0)])
def test_another_dose_than_the_only_one_is_not_covered(
    dose: float, holes: float
) -> None:
    log = continuous_log()
    policy = ContinuousPolicy(1, lambda s: np.full((len(s), 1), dose))
    log = log.replace(actions=np.full((50, 1), 0.25))
    problem = prepare_problem(log, policy, 0.9, 1, np.random.default_rng(0))
    assert visited_holes(problem, None, 1) == holes


@pytest.mark.parametrize("discrete", [True, False])
def test_a_region_where_the_log_never_acts_as_the_policy_does_is_a_hole(
    discrete: bool,
) -> None:
    """Next states lie anywhere in the square; beyond x = 0.8 the log takes only actions
    below a half.
    """
    generator = np.random.default_rng(0)
    states, following = generator.uniform(size=(2, 4000, 2))
    drawn = generator.uniform(size=4000) * np.where(states[:, 0] > 0.8, 0.5, 1.0)
    kind = (
        {"actions": (drawn > 0.5).astype(int)}
        if discrete
        else {"actions": drawn[:, None]}
    )
    space = koffline.Discrete(2) if discrete else koffline.Continuous(1)
    log = discrete_log(
        4000,
        observations=states,
        next_observations=following,
        action_space=space,
        **kind,
    )
    high = DiscretePolicy(2, lambda s: np.tile([0.0, 1.0], (len(s), 1)))
    policy = (
        high if discrete else ContinuousPolicy(1, lambda s: np.full((len(s), 1), 0.9))
    )
    problem = prepare_problem(log, policy, 0.9, 1, np.random.default_rng(0))
    beyond = following[:, 0] > 0.8
    for visits, least, most in (
        (np.ones(4000), 0.1, 0.2),
        (1.0 * beyond, 0.7, 1.0),
        (1.0 - beyond, 0.0, 0.02),
    ):
        holes = visited_holes(problem, 100.0 * visits, 1)  # starts hardly count
        assert least <= holes <= most
    assert 0.1 < visited_holes(problem, None, 1) < 0.2  # of starts


def coverage_of(log: koffline.Transitions, probabilities: list[float]) -> float:
    policy = DiscretePolicy(3, lambda s: np.tile(probabilities, (len(s), 1)))
    problem = prepare_problem(log, policy, 0.9, 1, np.random.default_rng(0))
    return measure_coverage(problem, np.random.default_rng(1)).fraction


def walk(actions: np.ndarray) -> koffline.Transitions:
    """Rows spread evenly over the square, next states drawn from the same law."""
    generator = np.random.default_rng(7)
    n = len(actions)
    states, following = generator.uniform(size=(2, n, 2))
    return discrete_log(
        n, observations=states, next_observations=following, actions=actions
    )


@pytest.mark.parametrize(
    ("logged", "probabilities", "share", "within"),
    [
        # 95 % by construction; the quantile is taken over some 1000 rows per action,
        # s.e. below 0.01
        (3, [0.2, 0.3, 0.5], 0.95, 0.03),
        (2, [0.0, 0.0, 1.0], 0.0, 0.0),  # was never taken
        (2, [0.5, 0.0, 0.5], 0.475, 0.03),
    ],
)
def test_logged_actions_are_covered_as_well_as_the_log_itself(
    logged, probabilities, share, within
) -> None:
    log = walk(np.random.default_rng(8).integers(logged, size=3000))
    assert coverage_of(log, probabilities) == pytest.approx(share, abs=within)


def test_shares_of_actions_by_hand() -> None:
    log = walk(np.random.default_rng(8).integers(2, size=100))
    estimate = koffline.evaluate(
        log, lambda s: np.tile([0.9, 0.1, 0.0], (len(s), 1)), 0.9, **QUICK
    )
    mean = np.where(log.actions == 0, 0.9, 0.1).mean()
    assert estimate.diagnostics["mean_probability_of_logged_actions"] == pytest.approx(
        mean
    )
    taken = np.bincount(log.actions, minlength=3) / 100.0
    shares = estimate.diagnostics["actions"]
    assert [shares[name]["policy"] for name in "012"] == pytest.approx([0.9, 0.1, 0.0])
    assert [shares[name]["log"] for name in "012"] == pytest.approx(taken)
    assert f"0 90% (log {taken[0]:.0%})" in action_shares(shares)


def test_a_change_that_may_be_chance_has_its_p_value_only() -> None:
    shifts = {
        "drift_shift": 1.0,
        "drift_p_value": 0.12,
        "memory_shift": 2.0,
        "memory_p_value": 0.01,
    }
    assert [lines for _, lines in described(shifts)] == [["0.12"], ["2"], ["0.01"]]


def test_a_rare_action_does_not_cover_what_lies_between_its_few_rows() -> None:
    assert (
        coverage_of(
            walk(np.where(np.arange(3000) < 10, 2, np.arange(3000) % 2)),
            [0.0, 0.0, 1.0],
        )
        < 0.2
    )


def test_rows_alone_with_their_action_do_not_make_far_states_near() -> None:
    """Ten of sixty rows have no neighbour with their action, at distance infinity."""
    generator = np.random.default_rng(7)
    states = generator.uniform(size=(60, 2))
    actions = np.maximum(np.arange(60) - 49, 0)
    log = discrete_log(
        observations=states,
        next_observations=states + 10.0,
        actions=actions,
        action_space=koffline.Discrete(11),
    )
    policy = DiscretePolicy(11, lambda s: np.tile(np.eye(11)[0], (len(s), 1)))
    problem = prepare_problem(log, policy, 0.9, 1, np.random.default_rng(0))
    assert measure_coverage(problem, np.random.default_rng(1)).fraction == 0.0
