"""Logs for the tests of importance sampling: random ones, and one that holds every path
of a process.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from koffline.data.transitions import Discrete, Transitions
from koffline.envs.finite import FiniteMDP
from koffline.errors import DataError, PolicyError
from koffline.ope.estimators.registry import find_estimator
from koffline.ope.importance.episode_means import EpisodeStatistic
from koffline.ope.importance.episodes import (
    EpisodeProblem,
    prepare_episodes,
    weigh_episodes,
)
from koffline.ope.importance.ratios import Ratios
from koffline.ope.log.row_values import RowValues
from koffline.ope.names import OVER_EPISODES, WITH_MODEL
from koffline.ope.results import PointEstimate
from koffline.policies import DiscretePolicy
from tests.ope.problems import uneven_log


def make_statistic(
    name: str, episodes: EpisodeProblem, model: RowValues | None = None
) -> EpisodeStatistic:
    """The equation of an estimator over episodes, by its name."""
    return find_estimator(name).statistic(episodes, model)


def estimate_one(
    name: str, episodes: EpisodeProblem, model: RowValues | None, **options: Any
) -> PointEstimate:
    """An estimator over prepared episodes, by its name."""
    return find_estimator(name).from_episodes(episodes, model, **options)


@dataclass(frozen=True, eq=False)
class Case:
    """A random log with random ratios and a random model, in columns and as the lists
    of the reference.
    """

    transitions: Transitions
    problem: EpisodeProblem
    model: RowValues

    def statistic(self, name: str) -> EpisodeStatistic:
        """An estimator by name."""
        return make_statistic(
            name, self.problem, self.model if name in WITH_MODEL else None
        )

    @property
    def episodes(self) -> list[list[tuple[float, ...]]]:
        problem = self.problem
        model = self.model
        columns = (
            np.exp(problem.ratios.logs),
            problem.rewards,
            model.now,
            model.later,
            problem.discounts,
        )
        return [
            list(map(tuple, part))
            for part in np.split(np.stack(columns, axis=1), problem.starts[1:])
        ]


def weighed(
    log: Transitions, log_ratios: np.ndarray, gamma: float = 0.9, **options: Any
) -> EpisodeProblem:
    """Episodes of a log with given ratios."""
    return weigh_episodes(log, Ratios(log_ratios, is_estimated=False), gamma, **options)


def values_of(q: Any, log: Transitions, policy: Any) -> RowValues:
    """A value function at the rows of a log."""
    return RowValues(
        q.values(log.observations, np.asarray(log.actions)),
        q.expected(log.next_observations, policy),
        q.expected(log.initial_observations(), policy),
    )


def episode_estimates(
    log,
    policy,
    gamma,
    *,
    q=None,
    names=OVER_EPISODES,
    behavior="auto",
    clip=None,
    **options,
) -> dict[str, PointEstimate | str]:
    """Estimates by name, or why there are none. q: a value function or its values."""
    estimates: dict[str, PointEstimate | str] = {}
    for name in names:
        try:
            problem = prepare_episodes(log, policy, gamma, behavior=behavior, clip=clip)
            model = (
                q
                if q is None or isinstance(q, RowValues)
                else values_of(q, log, policy)
            )
            estimates[name] = estimate_one(name, problem, model, **options)
        except (DataError, PolicyError) as error:
            estimates[name] = str(error)
    return estimates


def log_of_steps(
    rewards, length: int, actions=None, n_actions: int = 2, **columns: Any
) -> Transitions:
    """Episodes of one length that the world ends, in states that say nothing."""
    n = len(rewards)
    arguments = {
        "observations": np.zeros((n, 1)),
        "actions": np.zeros(n, dtype=int) if actions is None else actions,
        "rewards": rewards,
        "next_observations": np.zeros((n, 1)),
        "terminated": np.arange(n) % length == length - 1,
        "truncated": np.zeros(n, dtype=bool),
        "action_space": Discrete(n_actions),
        "episode_ids": np.arange(n) // length,
    }
    return Transitions(**{**arguments, **columns})


def random_case(seed: int = 0, zeros: bool = False) -> Case:
    """Nine episodes of many lengths and weights, some ended by the world; random
    ratios, some zero.
    """
    transitions = uneven_log("discrete", 9, seed)
    generator = np.random.default_rng(seed + 100)
    rows = len(transitions)
    log_ratios = generator.normal(0.0, 0.7, size=rows)
    if zeros:
        log_ratios[generator.random(rows) < 0.2] = -np.inf
    # v(s_{t+1}) of a row is v(s) of the next: the reference has one number for both.
    model = RowValues(*(generator.standard_normal(count) for count in (rows, rows, 9)))
    return Case(transitions, weighed(transitions, log_ratios), model)


@dataclass(frozen=True, eq=False)
class World:
    """A finite process, the table that writes logs, the table to evaluate."""

    mdp: FiniteMDP
    behavior: np.ndarray
    target: np.ndarray

    @property
    def policy(self) -> DiscretePolicy:
        return DiscretePolicy(
            2, lambda observations: self.target[observations.argmax(axis=1)], "target"
        )

    def log(self, states, actions, rewards, after, ids, **columns: Any) -> Transitions:
        """Episodes in one-hot states; those that the world does not end are cut."""
        terminated = self.mdp.terminal[after]
        eye = np.eye(self.mdp.n_states)
        return Transitions(
            observations=eye[states],
            actions=actions,
            rewards=rewards,
            next_observations=eye[after],
            terminated=terminated,
            truncated=np.append(ids[1:] != ids[:-1], True) & ~terminated,
            action_space=Discrete(2),
            episode_ids=ids,
            behavior_log_probabilities=np.log(self.behavior[states, actions]),
            **columns,
        )

    def all_paths(self) -> Transitions:
        """Every path of three steps, weighted by its probability: estimates of it are
        expectations.
        """
        paths: list[tuple[float, list[tuple[int, int, float, int]]]] = []

        def follow(
            state: int, chance: float, path: list[tuple[int, int, float, int]]
        ) -> None:
            if len(path) == 3 or self.mdp.terminal[state]:
                paths.append((chance, path))
                return
            for action, after in np.argwhere(self.mdp.transition[state]).tolist():
                step = (
                    state,
                    action,
                    float(self.mdp.reward[state, action, after]),
                    after,
                )
                likely = (
                    self.behavior[state, action]
                    * self.mdp.transition[state, action, after]
                )
                follow(after, chance * likely, [*path, step])

        for start in np.flatnonzero(self.mdp.initial).tolist():
            follow(start, self.mdp.initial[start], [])
        lengths = [len(path) for _, path in paths]
        columns = map(
            np.array, zip(*(step for _, path in paths for step in path), strict=True)
        )
        ids, weights = (
            np.repeat(part, lengths)
            for part in (range(len(paths)), [actions for actions, _ in paths])
        )
        return self.log(*columns, ids, weights=weights)

    def finite_value(self, gamma: float, last_values: np.ndarray) -> float:
        """J of three steps and then ``last_values`` (S,), by backward induction."""
        values = np.where(self.mdp.terminal, 0.0, last_values)
        for _ in range(3):
            q = np.einsum(
                "sat,sat->sa", self.mdp.transition, self.mdp.reward + gamma * values
            )
            values = np.where(self.mdp.terminal, 0.0, np.sum(self.target * q, axis=1))
        return float(self.mdp.initial @ values)


def three_states() -> World:
    """The last one is terminal; the behavior takes both actions."""
    transition = np.array(
        [
            [[0.5, 0.3, 0.2], [0.1, 0.9, 0.0]],
            [[0.6, 0.0, 0.4], [0.2, 0.5, 0.3]],
            [[0.0, 0.0, 1.0], [0.0, 0.0, 1.0]],
        ]
    )
    reward = np.array([[1.0, -0.5], [0.3, 2.0], [0.0, 0.0]])
    mdp = FiniteMDP(
        transition, reward, np.array([False, False, True]), np.array([0.7, 0.3, 0.0])
    )
    behavior = np.array([[0.5, 0.5], [0.3, 0.7], [0.5, 0.5]])
    return World(mdp, behavior, np.array([[0.9, 0.1], [0.2, 0.8], [0.5, 0.5]]))
