"""Feature systems for tests: exact finite problems with one-hot features, and small
random ones.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from koffline.kernels import FourierFeatures
from koffline.ope.intervals.feature_system import FeatureSystem, make_feature_system
from koffline.ope.log.problem import EvaluationProblem, prepare_problem
from scripts.bench.embedded import EmbeddedMDP
from tests.exact_problems import CASES, ExactProblem, FiniteCase

_FINITE = {case.name: case for case in CASES if isinstance(case, FiniteCase)}


@dataclass(frozen=True, eq=False)
class OneHotStates:
    """Standardised observations to indicators of the state they show: Q^π lies in the
    class.
    """

    world: EmbeddedMDP
    mean: np.ndarray
    spread: np.ndarray

    def __call__(self, x: Tensor) -> Tensor:
        states = self.world.states_of(x.numpy() * self.spread + self.mean)
        return torch.eye(self.world.mdp.n_states, dtype=torch.float64)[
            torch.as_tensor(states)
        ]


def prepared(exact: ExactProblem, seed: int = 0) -> EvaluationProblem:
    return prepare_problem(
        exact.transitions, exact.policy, exact.gamma, 4, np.random.default_rng(seed)
    )


def finite_system(
    name: str, seed: int = 0, rows: int = 300
) -> tuple[ExactProblem, FeatureSystem]:
    """An exact problem through one-hot features."""
    case = _FINITE[name]
    exact = case(seed, rows)
    seen = np.asarray(exact.transitions.observations, dtype=np.float64)
    features = OneHotStates(case.world, seen.mean(axis=0), seen.std(axis=0))
    system = make_feature_system(
        prepared(exact), features, gamma=exact.gamma, constant=False, instruments=100
    )
    return exact, system


def true_parameters(name: str) -> Tensor:
    """θ of Q^π in one-hot features, (S · A,)."""
    case = _FINITE[name]
    return torch.as_tensor(
        case.world.mdp.action_values(case.target, case.gamma)
    ).flatten()


def small_system(
    seed: int = 0, rows: int = 12, constants: int = 0, fixed: bool = False
) -> FeatureSystem:
    """Random numbers in every column of three parameters."""
    generator = np.random.default_rng(seed)

    def normal(*shape: int) -> Tensor:
        return torch.as_tensor(generator.standard_normal(shape))

    def columns(count: int) -> Tensor:
        free = torch.ones(count, constants, dtype=torch.float64)
        return torch.cat([normal(count, 3 - constants), free], dim=1)

    weights = generator.uniform(0.5, 1.5, rows)
    discounts = np.where(generator.random(rows) < 0.2, 0.0, 0.9)
    return FeatureSystem(
        now=columns(rows),
        later=columns(rows),
        starts=columns(5),
        rewards=normal(rows),
        discounts=torch.as_tensor(discounts),
        row_weights=torch.as_tensor(weights / weights.mean()),
        start_weights=torch.as_tensor(generator.uniform(0.5, 1.5, 5)),
        kernel_inputs=normal(rows, 2),
        instruments=FourierFeatures(normal(2, 6)),
        unit_starts=np.array([0, 2, 5, 6, 9]),
        fixed_starts=fixed,
        value_bounds=(-30.0, 30.0),
        reward_scale=1.0,
        gamma=0.9,
        constants=constants,
    )
