"""Doubly robust estimates are unbiased for any Q: exact means over all logs of a finite
world; rare rewards.

The world and its expectations are plain loops, without the library: two first states,
one later state, and an end after one or two steps. The Q is wrong everywhere, and
negative where rewards are not.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

import koffline
from koffline.config import EvaluationSettings
from koffline.kernels import Gaussian, random_fourier_features
from koffline.ope.estimators.registry import find_estimator
from koffline.ope.importance.episodes import (
    prepare_episodes,
    with_unknown_actions,
)
from koffline.ope.log.coverage import among
from koffline.ope.log.problem import EvaluationProblem, Measures, prepare_part
from koffline.ope.log.row_values import RowValues
from koffline.ope.networks.out_of_bag import PassOverRows, RowSums, pass_over_rows
from koffline.ope.networks.resampling import Resampling
from koffline.ope.results import PointEstimate
from koffline.ope.workspace import open_workspace
from koffline.policies import DiscretePolicy
from koffline.replicas import StackedMLP
from scripts.bench.doubly_robust import RareClicks

# SCALE: of returns, by which the library divides rewards
GAMMA = 0.8
SCALE = 2.0
EXACT = {"rel": 0.0, "abs": 1e-12}
# chances of states 0 and 1; the state of second steps; the end
START = (0.3, 0.7)
LATER = 2
END = 3
# by state, of three actions
BEHAVIOR = (
    (0.5, 0.3, 0.2),
    (0.1, 0.6, 0.3),
    (0.25, 0.35, 0.4),
)
TARGET = ((0.15, 0.7, 0.15), (0.6, 0.1, 0.3), (0.3, 0.5, 0.2))
# By state and action: (chance, reward, next state). Rewards are not negative.
OUTCOMES = {
    (0, 0): ((0.4, 0.0, LATER), (0.6, 1.0, END)),
    (0, 1): ((1.0, 0.5, LATER),),
    (0, 2): ((1.0, 0.0, END),),
    (1, 0): ((0.5, 2.0, END), (0.5, 0.25, LATER)),
    (1, 1): ((1.0, 0.0, LATER),),
    (1, 2): ((1.0, 0.25, END),),
    (2, 0): ((0.2, 3.0, END), (0.8, 0.0, END)),
    (2, 1): ((1.0, 0.75, END),),
    (2, 2): ((1.0, 0.0, END),),
}
# All episodes have two rows, so that the number of rows is no random number.
ALWAYS_TWO = {
    (state, action): ways if state == LATER else ((1.0, ways[0][1], LATER),)
    for (state, action), ways in OUTCOMES.items()
}
World = dict[tuple[int, int], tuple[tuple[float, float, int], ...]]
Path = list[tuple[int, int, float, int]]  # of (state, action, reward, next state)


def paths(
    world: World, start: tuple[float, ...] = START
) -> Iterator[tuple[float, Path]]:
    """Every episode of the behavior policy, with its probability."""

    def follow(state: int, chance: float, path: Path) -> Iterator[tuple[float, Path]]:
        if state == END:
            yield chance, path
            return
        for action, taken in enumerate(BEHAVIOR[state]):
            for likely, reward, after in world[state, action]:
                yield from follow(
                    after,
                    chance * taken * likely,
                    [*path, (state, action, reward, after)],
                )

    for state, chance in enumerate(start):
        yield from follow(state, chance, [])


def worth(world: World, policy: tuple[tuple[float, ...], ...], state: int) -> float:
    """Expected discounted return from a state."""
    if state == END:
        return 0.0
    return sum(
        taken * likely * (reward + GAMMA * worth(world, policy, after))
        for action, taken in enumerate(policy[state])
        for likely, reward, after in world[state, action]
    )


def value(
    world: World,
    policy: tuple[tuple[float, ...], ...],
    start: tuple[float, ...] = START,
) -> float:
    """J."""
    return sum(
        chance * worth(world, policy, state) for state, chance in enumerate(start)
    )


def logs(world: World, episodes: int) -> Iterator[tuple[float, list[Path]]]:
    """Every log of so many episodes, with its probability."""
    for drawn in itertools.product(list(paths(world)), repeat=episodes):
        yield (
            float(np.prod([chance for chance, _ in drawn])),
            [path for _, path in drawn],
        )


def as_log(
    episodes: list[Path], weights: list[float] | None = None
) -> koffline.Transitions:
    """A log with one-hot states."""
    eye = np.eye(4)
    lengths = [len(path) for path in episodes]
    states, actions, rewards, after = map(
        np.array, zip(*itertools.chain(*episodes), strict=True)
    )
    return koffline.Transitions(
        observations=eye[states],
        actions=actions,
        rewards=rewards,
        next_observations=eye[after],
        terminated=after == END,
        truncated=np.zeros(len(states), dtype=bool),
        action_space=koffline.Discrete(3),
        episode_ids=np.repeat(np.arange(len(episodes)), lengths),
        behavior_log_probabilities=np.log(np.array(BEHAVIOR)[states, actions]),
        weights=None if weights is None else np.repeat(weights, lengths),
    )


POLICY = DiscretePolicy(
    3, lambda seen: np.array((*TARGET, TARGET[0]))[seen.argmax(axis=1)], "target"
)


def wrong_networks(seed: int = 0, replicas: int = 4) -> StackedMLP:
    """Linear networks on one-hot states: tables of wrong values, most of them
    impossible ones.
    """
    generator = torch.Generator().manual_seed(seed)
    tables = (
        2.0 * torch.randn(replicas, 5, 3, generator=generator, dtype=torch.float64)
        - 1.0
    )
    network = StackedMLP((4, 3), tables.flatten(1))
    impossible = (tables[:, :3] * SCALE < 0.0).double().mean()
    assert 0.3 < float(impossible) < 0.9
    return network


@dataclass(frozen=True)
class Reading:
    """The library's reading of a log by networks whose out-of-bag sets follow from
    ``seed``.
    """

    networks: StackedMLP
    seed: int = 5
    ratios: Any = None  # ω by state and action (3, 3); ones by default
    policy: DiscretePolicy = POLICY
    starts: np.ndarray | None = None

    def problem(self, log: koffline.Transitions) -> EvaluationProblem:
        """Inputs as they are, returns divided by `SCALE`, bounds as rewards from 0 to 3
        give them.
        """
        measures = Measures(
            input_location=np.zeros(4),
            input_scale=np.ones(4),
            weight_scale=1.0,
            reward_scale=SCALE,
            value_bounds=(0.0, 3.0 / (1.0 - GAMMA) / SCALE),
            fixed_starts=self.starts is not None,
            n_actions=3,
        )
        return prepare_part(
            log, self.policy, GAMMA, measures, initial_observations=self.starts
        )

    def passed(self, problem: EvaluationProblem) -> PassOverRows:
        """The pass over the rows: the first network is a full one, the others are
        resampled.
        """
        resampled = self.networks.replicas - 1
        pairs = np.concatenate(
            [np.repeat(np.eye(4)[:3], 3, axis=0), np.tile(np.eye(3), (3, 1))], axis=1
        )
        instruments = random_fourier_features(
            Gaussian(1.0), 7, 60, torch.Generator().manual_seed(1)
        )
        known = instruments(torch.as_tensor(pairs)).numpy()  # (9, 60)
        wanted = np.ones(9) if self.ratios is None else np.ravel(self.ratios)
        solved = torch.as_tensor(np.linalg.lstsq(known, wanted, rcond=None)[0])
        streams = tuple(range(resampled))
        weights = (
            Resampling(self.seed, 0, streams),
            instruments,
            solved.repeat(resampled, 1),
        )
        return pass_over_rows(self.networks, 1, *weights, problem)

    def values(self, log: koffline.Transitions) -> RowValues:
        return self.passed(self.problem(log)).values


def over_episodes(
    name: str, log: koffline.Transitions, values: RowValues
) -> PointEstimate:
    episodes = prepare_episodes(log, POLICY, GAMMA)
    return find_estimator(name).from_episodes(episodes, values, draws=20)


@pytest.mark.parametrize(("episodes", "seed"), [(1, 0), (1, 1), (2, 0)])
def test_the_mean_of_dr_over_all_logs_is_the_value(episodes: int, seed: int) -> None:
    reading = Reading(wrong_networks(seed), seed)
    mean = uplift = total = 0.0
    negative = 0
    for chance, drawn in logs(OUTCOMES, episodes):
        log = as_log(drawn)
        values = reading.values(log)
        estimate = over_episodes("dr", log, values)
        mean += chance * estimate.value
        uplift += chance * estimate.uplift.value
        total += chance
        negative += int((values.now < 0.0).any())
    assert total == pytest.approx(1.0, **EXACT)
    assert negative > 0
    truth = value(OUTCOMES, TARGET)
    assert mean == pytest.approx(truth, **EXACT)
    assert uplift == pytest.approx(truth - value(OUTCOMES, BEHAVIOR), **EXACT)


def visits(start: tuple[float, ...]) -> np.ndarray:
    """True ratio ω (3, 3) of the target's discounted visits to a logged row, in
    `ALWAYS_TWO`.

    All logs start as `START` says, the policy as ``start`` says.
    """
    wanted = np.zeros((3, 3))
    logged = np.zeros((3, 3))
    for state in (0, 1):
        for action in range(3):
            wanted[state, action] = start[state] * TARGET[state][action]
            logged[state, action] = 0.5 * START[state] * BEHAVIOR[state][action]
    wanted[LATER] = GAMMA * np.array(TARGET[LATER])
    logged[LATER] = 0.5 * np.array(BEHAVIOR[LATER])
    return wanted / logged


@pytest.mark.parametrize(
    ("episodes", "start_counts"), [(1, None), (2, None), (2, (2, 1))]
)
def test_the_mean_of_drl_over_all_logs_is_the_value_with_the_true_ratio(
    episodes: int, start_counts: tuple[int, int] | None
) -> None:
    """With start states of the log's own, or given ones: so many of state 0 and of
    state 1.
    """
    start = START
    states = None
    if start_counts is not None:
        start = tuple(np.array(start_counts) / sum(start_counts))
        states = np.repeat(np.eye(4)[:2], start_counts, axis=0)
    reading = Reading(wrong_networks(), ratios=visits(start), starts=states)
    mean = 0.0
    for chance, drawn in logs(ALWAYS_TWO, episodes):
        log = as_log(drawn)
        problem = reading.problem(log)
        mean += chance * RowSums.of(problem, reading.passed(problem).values).value
    assert mean == pytest.approx(value(ALWAYS_TWO, TARGET, start), **EXACT)


@pytest.mark.parametrize("name", ["dr", "wdr"])
def test_one_log_of_all_episodes_has_the_value(name: str) -> None:
    """Weighted by their probabilities, so that self-normalised weights are exact
    too.
    """
    chances, episodes = zip(*paths(OUTCOMES), strict=True)
    log = as_log(list(episodes), list(chances))
    # one resampled network: the same for all rows
    values = Reading(wrong_networks(replicas=2)).values(log)
    estimate = over_episodes(name, log, values)
    assert estimate.value == pytest.approx(value(OUTCOMES, TARGET), **EXACT)


def test_unknown_actions_have_one_value_in_all_places() -> None:
    """Networks are asked about the known actions alone, weights are those of the whole
    policy.
    """
    known = np.array([True, True, False])
    reading = Reading(wrong_networks(), policy=among(POLICY, known))
    mean = 0.0
    for chance, drawn in logs(OUTCOMES, 1):
        log = as_log(drawn)
        values = with_unknown_actions(reading.values(log), log, known)
        mean += chance * over_episodes("dr", log, values).value
    # The restricted policy adds 1e-12 to every probability, to be defined where it
    # takes no known action.
    assert mean == pytest.approx(value(OUTCOMES, TARGET), abs=1e-10)


def test_an_evaluation_values_unknown_actions_so() -> None:
    """The log holds the third action in five rows, the policy takes it nearly
    always.
    """
    generator = np.random.default_rng(0)
    drawn = list(paths(OUTCOMES))
    chances = np.array([chance for chance, _ in drawn])
    episodes: list[Path] = []
    left = 5
    for number in generator.choice(len(drawn), size=100, p=chances):
        path = drawn[number][1]
        rare = sum(action == 2 for _, action, _, _ in path)
        if rare <= left:
            left -= rare
            episodes.append(path)
    log = as_log(episodes)
    policy = DiscretePolicy(
        3, lambda seen: np.tile((0.1, 0.1, 0.8), (len(seen), 1)), "third"
    )
    settings = EvaluationSettings(
        gamma=GAMMA, steps=20, full_replicas=1, resampled_replicas=3
    )
    with open_workspace(log, policy, settings) as workspace, torch.no_grad():
        known = workspace.known_actions
        of_episodes = workspace.row_values_of_episodes
        plain = workspace.row_values
    assert known is not None
    assert known.tolist() == [True, True, False]
    firsts = {int(row): number for number, row in enumerate(log.episode_starts)}
    for row in range(len(log)):
        expected = plain.now[row]
        if log.actions[row] == 2:
            # an action that the log cannot value: the value of the state
            if row in firsts:
                expected = plain.starts[firsts[row]]
            else:
                expected = plain.later[row - 1]
        assert of_episodes.now[row] == expected


def errors_of_rare_clicks(
    world: RareClicks, draws: int, rows: int, **options: Any
) -> np.ndarray:
    """Relative errors of ``dr``, one for each log."""
    truth = world.truth()
    errors = []
    for seed in range(draws):
        settings = {"estimator": "dr", "seed": seed, **options}
        errors.append(
            koffline.evaluate(world.log(seed, rows), world.policy, **settings).value
            / truth
            - 1.0
        )
    return np.array(errors)


def assert_unbiased(errors: np.ndarray) -> None:
    """The mean error is within twice its standard error, which is small enough to show
    a bias.
    """
    standard_error = errors.std(ddof=1) / len(errors) ** 0.5
    assert standard_error < 0.15
    assert abs(errors.mean()) < 2.0 * standard_error


def test_dr_has_no_bias_where_clicks_are_rare() -> None:
    """Clipped parts were 97 % low here."""
    small = {"steps": 150, "hidden_units": (16,), "instruments": 100}
    assert_unbiased(errors_of_rare_clicks(RareClicks(10), 8, 4000, **small))


@pytest.mark.slow
def test_dr_has_no_bias_where_clicks_are_rarer() -> None:
    """Forty logs of 10,000 rows and 30 actions; clipped parts were 93 % low."""
    assert_unbiased(errors_of_rare_clicks(RareClicks(), 40, 10_000, steps=400))


def test_reward_bounds_reach_the_bounds_of_values() -> None:
    log = RareClicks(3, 0.05).log(0, 300)
    settings = EvaluationSettings(gamma=0.9, reward_bounds=(-1.0, 4.0))
    with open_workspace(log, "uniform", settings) as workspace:
        low, high = np.multiply(
            workspace.problem.value_bounds, workspace.problem.reward_scale
        )
        assert (low, high) == pytest.approx(workspace.limits.bounds)
        assert low < -0.9
        assert high > 3.9
