"""Tests of the Markov property and of drift on a ring with exact values; histories as
the remedy.
"""

from functools import partial

import numpy as np
import pytest

import koffline
from koffline.config import EvaluationSettings
from koffline.data.transitions import Discrete, Transitions
from koffline.errors import ConfigError, DataError
from koffline.ope.assumptions.markov import (
    Shift,
    drift_shift,
    group_shift,
    memory_shift,
)
from koffline.ope.evaluation import may_look_back
from koffline.ope.log.problem import (
    EvaluationProblem,
    Measures,
    ProblemInputs,
    prepare_problem,
    with_previous_rows,
)
from koffline.ope.log.row_values import RowValues
from koffline.ope.log.working_log import LogPart, in_problem
from koffline.ope.networks.fitted_q import fit_value_function
from koffline.policies import DiscretePolicy

GAMMA = 0.9
END = 0.05
STATES = 4
TARGET = np.array([0.1, 0.9])
POLICY = DiscretePolicy(
    2, lambda observations: np.tile(TARGET, (len(observations), 1)), name="right"
)
QUICK = {
    "steps": 200,
    "full_replicas": 1,
    "resampled_replicas": 4,
    "hidden_units": (16, 16),
}


def ring(
    bonus: float, seed: int, episodes: int = 300, drift: float = 0.0
) -> Transitions:
    """Left or right on a ring; a step to the right pays 0.1 · state, action 0 pays
    ``bonus`` a step later.

    All rewards rise by ``drift`` along the log.
    """
    generator = np.random.default_rng(seed)
    rows = []
    for rise in np.linspace(-0.5, 0.5, episodes) * drift:
        state = int(generator.integers(STATES))
        before = None
        for step in range(15):
            action = int(generator.integers(2))
            following = (state + (1 if action else -1)) % STATES
            reward = (
                0.1 * state * action
                + bonus * (before == 0)
                + rise
                + 0.1 * generator.standard_normal()
            )
            ended = bool(generator.random() < END)
            rows.append((state, action, reward, following, ended, step))
            state = following
            before = action
            if ended:
                break
    states, actions, rewards, after, ends, steps = map(
        np.array, zip(*rows, strict=True)
    )
    return Transitions(
        observations=np.eye(STATES)[states],
        actions=actions,
        rewards=rewards,
        next_observations=np.eye(STATES)[after],
        terminated=ends,
        truncated=np.append(steps[1:] == 0, True) & ~ends,
        action_space=Discrete(2),
        steps=steps,
    )


def true_value(bonus: float) -> float:
    """J from a uniform state: a linear solve over (state, action before), none before
    the first step.
    """
    count = STATES * 3
    system = np.eye(count)
    reward = np.zeros(count)
    for state in range(STATES):
        for before in range(3):
            row = 3 * state + before
            reward[row] = TARGET[1] * 0.1 * state + bonus * (before == 0)
            for action in range(2):
                following = (state + (1 if action else -1)) % STATES
                system[row, 3 * following + action] -= (
                    GAMMA * (1.0 - END) * TARGET[action]
                )
    return float(np.linalg.solve(system, reward)[2::3].mean())


def counted_values(
    log: Transitions, shift_by_state: float = 0.0
) -> tuple[RowValues, float]:
    """Q of the (state, action) table by counting, and J from the log's own starts:
    wrong with a bonus.
    """
    state = np.asarray(log.observations).argmax(axis=1)
    pair = 2 * state + log.actions
    following = np.asarray(log.next_observations).argmax(axis=1)
    system = np.zeros((2 * STATES, 2 * STATES))
    reward = np.zeros(2 * STATES)
    np.add.at(system, (pair, pair), 1.0)
    np.add.at(reward, pair, log.rewards)
    for action in range(2):
        np.add.at(
            system,
            (pair, 2 * following + action),
            GAMMA * (log.terminated - 1.0) * TARGET[action],
        )
    table = (
        np.linalg.solve(system, reward).reshape(STATES, 2)
        + shift_by_state * np.arange(STATES)[:, None]
    )
    values = table @ TARGET
    starts = values[state[log.episode_starts]]
    return RowValues(table.ravel()[pair], values[following], starts), float(
        starts.mean()
    )


def problem_of(log: Transitions, history: int = 0) -> EvaluationProblem:
    return prepare_problem(
        log, POLICY, GAMMA, 1, np.random.default_rng(0), history=history
    )


def shift_of(log: Transitions, values: RowValues) -> Shift:
    shift = memory_shift(problem_of(log), values, seed=0)
    assert shift is not None
    return shift


@pytest.mark.parametrize("seed", range(3))
def test_the_shift_is_what_the_action_before_does_to_the_value(seed: int) -> None:
    log = ring(0.5, seed)
    values, wrong = counted_values(log)
    shift = shift_of(log, values)
    truth = true_value(0.5)
    assert shift.p_value < 1e-6
    # the log's own action 0 is taken five times too often
    assert abs(wrong - truth) > 0.5
    assert abs(wrong + shift.value - truth) < 0.25 * abs(wrong - truth)


@pytest.mark.parametrize("seed", range(3))
def test_in_a_markov_world_nothing_is_found(seed: int) -> None:
    log = ring(0.0, seed)
    values, mean = counted_values(log)
    shift = shift_of(log, values)
    assert abs(mean - true_value(0.0)) < 0.1
    assert shift.p_value > 1e-3
    assert abs(shift.value) < 0.05


@pytest.mark.parametrize("seed", range(3))
def test_a_drifting_world_is_worth_what_it_is_at_the_end(seed: int) -> None:
    log = ring(0.0, seed, drift=0.2)
    values, mean = counted_values(log)
    shift = drift_shift(problem_of(log), values, 0)
    assert shift is not None
    assert shift.p_value < 1e-6
    truth = true_value(0.0) + 0.5 * 0.2 / (1.0 - GAMMA * (1.0 - END))
    assert abs(mean - true_value(0.0)) < 0.1
    assert abs(mean + shift.value - truth) < 0.25 * abs(mean - truth)
    still = ring(0.0, seed)
    calm = drift_shift(problem_of(still), counted_values(still)[0], 0)
    assert calm is not None
    assert calm.p_value > 1e-3


def test_errors_of_the_values_that_depend_on_the_state_alone_cancel() -> None:
    log = ring(0.0, 0)
    right, wrong = (shift_of(log, counted_values(log, by)[0]) for by in (0.0, 1.0))
    # where J is off by 1.5
    assert abs(wrong.value - right.value) < wrong.standard_error < 0.3
    assert wrong.p_value > 1e-3


def test_too_few_episodes_and_rows_that_stand_alone_are_not_tested() -> None:
    log = ring(0.0, 0, episodes=19)
    assert memory_shift(problem_of(log), counted_values(log)[0], 0) is None
    alone = ring(0.0, 0).replace(
        steps=None, episode_ids=None, truncated=np.zeros(len(ring(0.0, 0)), bool)
    )
    with pytest.raises(DataError, match="history is 1, but rows stand alone"):
        problem_of(alone, history=1)


def test_memories_by_hand() -> None:
    remembered = with_previous_rows(
        ProblemInputs(
            inputs=np.array([[1.0], [2.0], [3.0], [4.0]]),
            next_inputs=np.zeros((4, 1, 1)),
            start_inputs=np.zeros((2, 1, 1)),
        ),
        rewards=np.array([0.1, 0.2, 0.3, 0.4]),
        unit_starts=np.array([0, 2]),
        count=2,
    )
    before = remembered.inputs[:, 1:]
    after = remembered.next_inputs[:, 0, 1:]
    none = [0, 0, 0]
    first = [1, 1, 0.1]
    second = [1, 2, 0.2]
    third = [1, 3, 0.3]
    np.testing.assert_array_equal(
        before, [none + none, first + none, none + none, third + none]
    )
    np.testing.assert_array_equal(
        after, [first + none, second + first, third + none, [1, 4, 0.4, *third]]
    )


def test_a_part_of_a_log_remembers_as_the_whole_does() -> None:
    log = ring(0.5, 0, episodes=30)
    whole = problem_of(log, history=2)
    rows = slice(*log.episode_starts[[10, 20]].tolist())
    part = LogPart(log.select_episodes(np.arange(10, 20)), np.arange(10, 20))

    problems = []

    def keep(problem: EvaluationProblem) -> int:
        problems.append(problem)
        return len(problems)

    in_problem(
        keep,
        Measures(**whole.measures),
        POLICY,
        GAMMA,
        1,
        0,
        9,
        part,
    )
    for name in ("inputs", "next_inputs", "kernel_inputs", "rewards"):
        np.testing.assert_array_equal(
            getattr(problems[0], name), getattr(whole, name)[rows]
        )
    assert whole.inputs.shape[1] == STATES + 2 * (1 + STATES + 2 + 1)
    assert not whole.start_inputs[..., STATES:].any()


@pytest.mark.usefixtures("few_features_of_memory")
def test_the_verdict_names_the_remedy_and_the_remedy_helps() -> None:
    log = ring(0.5, 3)
    truth = true_value(0.5)
    ask = partial(koffline.evaluate, log, POLICY, GAMMA, seed=0, **QUICK)
    short = ask(history=0)
    long = ask(history=1)
    default = ask(by={"half": np.arange(log.n_episodes) % 2})
    assert short.interval is not None
    assert not short.interval.holds(truth)
    assert short.verdict.answer == "with care"
    assert "try --set history=1" in short.verdict.because("state")[0]
    assert long.interval is not None
    assert long.interval.holds(truth)
    assert not long.verdict.because("state")
    assert long.value_function is None
    assert default.value == long.value
    assert default.verdict == long.verdict
    assert f"without it the value would be {short.value:.4g}" in default.warnings[0]


@pytest.mark.usefixtures("few_features_of_memory")
def test_a_ranking_takes_the_row_before_for_every_policy() -> None:
    """Read as states the rows turn the order round; truths 1.23 and 1.99."""
    ranking = koffline.select_policies(
        ring(0.5, 3), {"right": POLICY, "uniform": "uniform"}, GAMMA, **QUICK
    )
    assert [policy.name for policy in ranking.policies] == ["uniform", "right"]
    assert "part of it for every policy here" in ranking.warnings[0]
    assert ranking.settings["history"] == 1


@pytest.mark.usefixtures("few_features_of_memory")
def test_rewards_that_come_three_rows_later_make_three_rows_part_of_the_state() -> None:
    random = np.random.default_rng(0)
    shape = (130, 30)
    states = random.normal(size=(130, 31, 1))
    acted = (random.random(shape) < 0.3).astype(int)
    late = np.pad(acted, ((0, 0), (3, 0)))[:, :30]
    ends = np.tile(np.arange(30) == 29, 130)
    log = koffline.Transitions(
        observations=states[:, :-1].reshape(-1, 1),
        next_observations=states[:, 1:].reshape(-1, 1),
        actions=acted.ravel(),
        rewards=(late + 0.1 * random.normal(size=shape)).ravel(),
        terminated=np.zeros_like(ends),
        truncated=ends,
        steps=np.tile(np.arange(30), 130),
        action_space=koffline.Discrete(2),
    )
    ask = partial(
        koffline.evaluate, log, lambda s: np.tile([0.2, 0.8], (len(s), 1)), 0.9, **QUICK
    )
    estimate = ask()
    truth = 0.8 * 0.9**3 / 0.1
    assert estimate.settings["history"] == 3
    assert abs(estimate.value - truth) < 0.3 * abs(ask(history=0).value - truth)


@pytest.mark.usefixtures("few_features_of_memory")
def test_episodes_that_end_by_a_clock_nobody_logged_ask_for_the_step() -> None:
    random = np.random.default_rng(0)
    lengths = random.integers(6, 11, 150)
    rows = int(lengths.sum())
    ends = np.cumsum(lengths) - 1
    states = random.normal(size=(rows + 1, 1))
    steps = np.concatenate([np.arange(n) for n in lengths])
    log = Transitions(
        observations=states[:-1],
        next_observations=states[1:],
        actions=random.integers(2, size=rows),
        rewards=1.0 + 0.1 * random.normal(size=rows),
        terminated=np.isin(np.arange(rows), ends),
        truncated=np.zeros(rows, dtype=bool),
        steps=steps,
        action_space=Discrete(2),
    )
    estimate = koffline.evaluate(log, POLICY, GAMMA, **QUICK)
    truth = np.mean((1 - GAMMA**lengths) / (1 - GAMMA))
    assert estimate.settings["history"] is None
    (reason,) = estimate.verdict.because("state")
    about = float(reason.split("the value would be about ")[1].split(":")[0])
    assert "with the step as part of it" in reason
    assert abs(about - truth) < 0.5 * abs(estimate.value - truth)
    ranked = koffline.select_policies(
        log, {"one": POLICY, "other": POLICY}, GAMMA, **QUICK
    )
    assert ranked.settings["history"] is None  # no number of rows tells the step


def test_a_group_beyond_the_state_is_found_and_one_that_does_not_matter_is_not() -> (
    None
):
    log = ring(0.0, 0)
    members = np.arange(log.n_episodes) % 2 == 1
    paid = log.replace(
        rewards=log.rewards + 0.5 * np.repeat(members, log.episode_lengths)
    )
    plain, with_history = (
        group_shift(problem_of(e), counted_values(e)[0], 0, members, 2)
        for e in (log, paid)
    )
    assert plain.p_value > 1e-3
    assert with_history.p_value < 1e-6
    # half of the episodes pay 0.25 more than the mean of both kinds in every row, for
    # ever but for ends
    assert with_history.value == pytest.approx(
        0.25 / (1 - GAMMA * (1 - END)), abs=4 * with_history.standard_error
    )


def test_who_decides_on_the_row_before() -> None:
    requests = [
        ("auto", "default", None),
        ("auto", "default", 0),
        ("kloss", "default", None),
    ]
    certified = ("auto", "kernel-certified", None)
    assert [may_look_back(*settings) for settings in (*requests, certified)] == [
        True,
        False,
        False,
        False,
    ]


@pytest.mark.usefixtures("few_features_of_memory")
def test_rows_of_long_logs_are_thinned_not_episodes() -> None:
    log = ring(0.5, 0, episodes=1200)
    assert len(log) > 10_000
    shift = shift_of(log, counted_values(log)[0])
    assert shift.units > 1100  # some have one row, which is not drawn
    assert abs(shift.value - (true_value(0.5) - counted_values(log)[1])) < 0.25
    slight = ring(0.02, 0, episodes=1200)
    # 0.005 by every second row
    assert shift_of(slight, counted_values(slight)[0]).p_value < 1e-4


def test_a_value_function_of_states_knows_no_history() -> None:
    settings = EvaluationSettings(gamma=GAMMA, history=1)
    with pytest.raises(ConfigError, match="leave history out"):
        fit_value_function(ring(0.0, 0, episodes=30), POLICY, settings)
