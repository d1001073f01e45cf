"""Evaluation problems whose value is known exactly: a log, a policy, γ, and the answer.

Chain and grid seen through continuous observations (linear solve), linear systems with
a linear Gaussian policy (Lyapunov equation). Each entry of ``EXACT_PROBLEMS`` is called
as ``make(seed, n_rows)``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from koffline.data.transitions import Transitions
from koffline.policies import ContinuousPolicy, DiscretePolicy, Policy
from scripts.bench.embedded import EmbeddedMDP
from scripts.bench.finite_worlds import chain, grid
from scripts.bench.linear_quadratic import LinearGaussian, LinearQuadratic
from scripts.bench.rollouts import EpisodeLog, as_transitions, log_episodes

NO_LIMIT = 10_000  # steps; every terminating world here ends long before


@dataclass(frozen=True, eq=False)
class ExactProblem:
    """``value`` is J over the world's start distribution; ``value_at_starts`` over the
    log's own starts.

    Starts are the first rows of episodes, or all rows where the log has no episodes.
    """

    name: str
    transitions: Transitions
    policy: Policy
    gamma: float
    value: float
    value_at_starts: float


@dataclass(frozen=True, eq=False)
class FiniteCase:
    """An embedded finite process, the table that wrote the log, the table to
    evaluate.
    """

    name: str
    world: EmbeddedMDP
    behavior: np.ndarray
    target: np.ndarray
    gamma: float
    time_limit: int | None = NO_LIMIT  # None: independent tuples

    def __call__(self, seed: int = 0, n_rows: int = 2000) -> ExactProblem:
        generator = np.random.default_rng(seed)
        mdp = self.world.mdp
        values = self.world.mdp.state_values(self.target, self.gamma)
        start = mdp.initial
        if self.time_limit is None:
            start = ~mdp.terminal / np.sum(~mdp.terminal)
            log = self.world.log_tuples(self.behavior, n_rows, generator)
        else:
            log = log_episodes(
                self.world,
                self.world.policy(self.behavior),
                n_rows,
                self.time_limit,
                generator,
            )
        policy = DiscretePolicy(
            mdp.n_actions, self.world.policy(self.target), name=self.name
        )
        at_starts = values[log.start_states[:, 0].astype(np.int64)]
        return _problem(self, log, policy, start @ values, at_starts)


@dataclass(frozen=True)
class LinearCase:
    """A linear system, the policy that wrote the log, the policy to evaluate; both
    linear and Gaussian.
    """

    name: str
    world: LinearQuadratic
    behavior: LinearGaussian
    target: LinearGaussian
    gamma: float
    # None: independent tuples, states as the world's starts
    time_limit: int | None = 20

    def __call__(self, seed: int = 0, n_rows: int = 2000) -> ExactProblem:
        log = log_episodes(
            self.world,
            self.behavior,
            n_rows,
            self.time_limit or 1,
            np.random.default_rng(seed),
        )
        sample = None if self.target.deterministic else self.target.sample
        policy = ContinuousPolicy(
            len(self.target.gain), self.target.mean, sample, name=self.name
        )
        at_starts = self.world.state_values(log.start_states, self.target, self.gamma)
        return _problem(
            self,
            log,
            policy,
            self.world.policy_value(self.target, self.gamma),
            at_starts,
        )


def _problem(
    case: Any, log: EpisodeLog, policy: Policy, value: float, at_starts: np.ndarray
) -> ExactProblem:
    rows = as_transitions(log, case.world, with_episodes=case.time_limit is not None)
    return ExactProblem(
        case.name, rows, policy, case.gamma, float(value), float(at_starts.mean())
    )


def _line() -> EmbeddedMDP:
    return EmbeddedMDP(
        chain(7, slip=0.2, end_rewards=(-0.5, 1)),
        np.linspace(-1, 1, 7)[:, None],
        jitter=0.1,
    )


def _rooms(terminal_goal: bool) -> EmbeddedMDP:
    mdp = grid(4, 4, goal=3.0, terminal_goal=terminal_goal)
    points = np.stack([np.arange(16) % 4, np.arange(16) // 4], axis=1) / 3.0
    return EmbeddedMDP(mdp, points, jitter=0.1)


def _repeat(chances: tuple[float, ...], n_states: int) -> np.ndarray:
    return np.tile(np.asarray(chances), (n_states, 1))


_FAIR = _repeat((0.5, 0.5), 7)
_RIGHT = _repeat((0.2, 0.8), 7)
_ANYWHERE = _repeat((0.25,) * 4, 16)
_FORWARD = _repeat((0.4, 0.4, 0.1, 0.1), 16)
_CART = LinearQuadratic(
    drift=((1.0, 0.2), (0.0, 0.9)), control=((0.0,), (0.3,)), noise=0.1
)
_PLANE = LinearQuadratic(
    drift=((0.9, 0.2), (0.0, 0.9)),
    control=((0.3, 0.0), (0.0, 0.3)),
    noise=0.1,
    action_cost=0.3,
)
_STEADY = LinearGaussian(((-0.5, -0.7),))
_SHAKY = LinearGaussian(((-0.3, -0.4),), deviation=0.6)
_LOOSE = LinearGaussian(((-0.3, 0.0), (0.0, -0.3)), deviation=0.5)
_TIGHT = LinearGaussian(((-0.6, -0.2), (0.0, -0.6)), deviation=0.2)

CASES: list[FiniteCase | LinearCase] = [
    FiniteCase("chain_on", _line(), _RIGHT, _RIGHT, 0.95),
    FiniteCase("chain_off", _line(), _FAIR, _RIGHT, 0.95),
    FiniteCase("chain_off_limited", _line(), _FAIR, _RIGHT, 0.95, time_limit=5),
    FiniteCase("chain_tuples", _line(), _FAIR, _RIGHT, 0.95, time_limit=None),
    FiniteCase("grid_on", _rooms(True), _FORWARD, _FORWARD, 0.95),
    FiniteCase(
        "grid_off_limited", _rooms(True), _ANYWHERE, _FORWARD, 0.95, time_limit=20
    ),
    FiniteCase(
        "grid_loop_off_limited", _rooms(False), _ANYWHERE, _FORWARD, 0.95, time_limit=20
    ),
    FiniteCase("grid_tuples", _rooms(True), _ANYWHERE, _FORWARD, 0.95, time_limit=None),
    LinearCase("linear_on", _CART, _SHAKY, _SHAKY, 0.9),
    LinearCase("linear_off_deterministic", _CART, _SHAKY, _STEADY, 0.9),
    LinearCase("linear_off_plane", _PLANE, _LOOSE, _TIGHT, 0.9),
    LinearCase("linear_tuples", _CART, _SHAKY, _STEADY, 0.9, time_limit=None),
]
EXACT_PROBLEMS: dict[str, Callable[..., ExactProblem]] = {
    case.name: case for case in CASES
}
