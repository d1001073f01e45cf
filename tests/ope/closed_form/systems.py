"""Feature systems for the tests: exact finite problems in one-hot features, small random ones."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from koffline.data.transitions import Discrete, Transitions
from koffline.envs.finite import FiniteMDP
from koffline.ope.closed_form import doubly_robust_sums
from koffline.ope.closed_form.sums import RowSums
from koffline.ope.features import FeatureSystem, make_feature_system
from koffline.ope.importance.problem import RowValues
from koffline.ope.problem import prepare_problem
from koffline.policies import DiscretePolicy
from koffline.solvers.features import FeatureMap, RandomFourierFeatures
from scripts.bench.finite_worlds import random_mdp
from tests.ope.problems import NOISY, SOFT, continuous_log, discrete_log

GAMMA = 0.9
_STATES = 5


def small_system(kind: str, *, weighted: bool = False, starts: np.ndarray | None = None) -> FeatureSystem:
    """Sixty rows in random features: discrete with episodes, or continuous independent rows."""
    generator = np.random.default_rng(5)
    log, policy = (discrete_log(), SOFT) if kind == "discrete" else (continuous_log(), NOISY)
    if weighted:
        columns = {name: getattr(log, name) for name in log.__dataclass_fields__}
        columns["weights"] = generator.uniform(0.2, 2.0, size=len(log))
        log = Transitions(**columns)
    problem = prepare_problem(log, policy, GAMMA, 3, np.random.default_rng(0), starts)
    features = RandomFourierFeatures(1.5, 6, seed=1)
    return make_feature_system(problem, features, gamma=GAMMA, instruments=40, seed=2)


def plain(system: FeatureSystem) -> dict:
    """The system as numpy arrays, for the reference."""
    return {
        "now": system.now.numpy(),
        "later": system.later.numpy(),
        "starts": system.starts.numpy(),
        "rewards": system.rewards.numpy(),
        "discounts": system.discounts.numpy(),
        "weights": system.row_weights.numpy(),
        "start_weights": system.start_weights.numpy(),
        "constants": system.constants,
    }


def combined(system: FeatureSystem, values: RowValues, omega: np.ndarray) -> RowSums:
    """The doubly robust sums of given values and weights."""
    return doubly_robust_sums(lambda part: values, lambda part: omega, system)


def described(system: FeatureSystem, omega: np.ndarray) -> dict[str, float]:
    """What weights are worth."""
    nothing = np.zeros(len(system))
    sums = RowSums.of(system, omega, nothing, np.zeros(len(system.start_weights)))
    return sums.diagnostics(system.start_mean.numpy())


@dataclass(frozen=True, eq=False)
class OneHotProblem:
    """A finite process whose pairs are the features, so that Q^π and d^π/μ are in the class."""

    system: FeatureSystem
    mdp: FiniteMDP
    target: np.ndarray
    states: np.ndarray
    actions: np.ndarray
    next_states: np.ndarray
    start_states: np.ndarray
    terminated: np.ndarray
    rewards: np.ndarray

    @property
    def q(self) -> np.ndarray:
        """Q^π (S, A)."""
        return self.mdp.action_values(self.target, GAMMA)

    def certainty_equivalence(self) -> float:
        """Value of the empirical process by value iteration from counts, without any feature."""
        s, a = self.q.shape
        count, move, gain = np.zeros((s, a)), np.zeros((s, a, s)), np.zeros((s, a))
        for i in range(len(self.states)):
            x = self.states[i], self.actions[i]
            count[x] += 1.0
            gain[x] += self.rewards[i]
            if not self.terminated[i]:
                move[(*x, self.next_states[i])] += 1.0
        seen = np.maximum(count, 1.0)
        q = np.zeros((s, a))
        for _ in range(1000):
            q = gain / seen + GAMMA * (move @ (self.target * q).sum(axis=1)) / seen
        return float((self.target * q).sum(axis=1)[self.start_states].mean())


def one_hot_problem(rows: int = 400, ending: float = 0.1, seed: int = 0) -> OneHotProblem:
    """Independent tuples of a random process, every pair logged, given start states."""
    generator = np.random.default_rng(seed)
    mdp = random_mdp(_STATES, 2, generator, branching=3, ending=ending)
    behavior = generator.dirichlet(np.ones(2) * 3.0, size=_STATES)
    target = generator.dirichlet(np.ones(2), size=_STATES)
    sample = mdp.sample_transitions(rows, behavior, generator)
    starts = generator.choice(_STATES, size=50, p=mdp.initial)
    states = np.eye(_STATES)
    log = Transitions(
        observations=states[sample.states],
        actions=sample.actions,
        rewards=sample.rewards,
        next_observations=states[sample.next_states],
        terminated=sample.terminated,
        truncated=np.zeros_like(sample.terminated),
        action_space=Discrete(2),
    )
    policy = DiscretePolicy(2, lambda rows_: target[rows_.argmax(axis=1)], name="target")
    problem = prepare_problem(log, policy, GAMMA, 1, generator, states[starts])

    system = make_feature_system(
        problem,
        _one_hot_of(problem.inputs, sample.states),
        gamma=GAMMA,
        constant=False,
        instruments=400,
        seed=3,
    )
    return OneHotProblem(
        system, mdp, target, sample.states, sample.actions, sample.next_states, starts, sample.terminated,
        sample.rewards,
    )  # fmt: skip


def _one_hot_of(inputs: np.ndarray, states: np.ndarray) -> FeatureMap:
    """One-hot features of standardised rows: the nearest logged state.

    The terminal state is never logged and becomes some other one; rows that end have discount 0.
    """
    numbers, first = np.unique(states, return_index=True)
    points = inputs[first]

    def features(x: torch.Tensor) -> torch.Tensor:
        distances = np.linalg.norm(x.numpy()[:, None] - points[None], axis=2)
        return torch.as_tensor(np.eye(_STATES)[numbers[distances.argmin(axis=1)]])

    return features
