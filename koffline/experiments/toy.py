"""`figure-toy`: gradient descent on the modified chain of Tsitsiklis and Van Roy, linear values.

2000 tuples, plain gradient descent from w = (1, 1, 1) with the gradient of all tuples, in float64; seeds are
draws of the tuples. TD(0) and FVI diverge, RG settles where the noise of transitions biases it, the K-loss
with the linear kernel reaches the LSTD solution, as do GTD2 and SBEED with linear second functions.
(Feng et al. 2019, fig:toy_diverge)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from koffline.bellman import discount, state_value_residual
from koffline.dual_objectives import DualObjective, GradientTD2, SaddlePoint
from koffline.envs.finite import (
    TSITSIKLIS_FEATURES,
    TSITSIKLIS_GAMMA,
    TSITSIKLIS_WEIGHTS,
    tsitsiklis_van_roy,
)
from koffline.errors import ConfigError
from koffline.experiments.cells import Scale
from koffline.experiments.results import Curves, Row
from koffline.experiments.statistics import mean_over_seeds
from koffline.experiments.style import METHODS
from koffline.kernel_loss import feature_v_statistic
from koffline.objectives import (
    CopyTarget,
    FittedIteration,
    NextFrom,
    Objective,
    ResidualGradient,
    TemporalDifference,
    ValueGradients,
)

WORLD = "chain"
DIVERGED = 1e7  # descent stops where ‖w‖ passes it; the largest true value is 1
_RECORDS = 240  # per curve, evenly spaced in the logarithm of the iteration

Weights = Float[Tensor, "seed 3"]
Columns = Float[Tensor, "seed row"]


@dataclass(frozen=True)
class ToySettings:
    """Draws of the tuples (from seeds first_seed, first_seed + 1, …), their number, iterations, step size.

    copy_every: iterations between copies of FVI's target.
    """

    seeds: int = 10
    first_seed: int = 0
    tuples: int = 2000
    iterations: int = 2000
    learning_rate: float = 0.5
    copy_every: int = 10

    def __post_init__(self) -> None:
        if min(self.seeds, self.tuples, self.iterations, self.copy_every) < 1 or not self.learning_rate > 0.0:
            raise ConfigError(f"{self} cannot be run; give positive numbers")


@dataclass(frozen=True, eq=False)
class ToyLog:
    """The tuples of every seed; a value is features · w, and a terminal state's features are zero."""

    features: Float[Tensor, "seed row 3"]
    next_features: Float[Tensor, "seed row 3"]
    reward: Columns
    discount: Columns

    def residual(self, weights: Weights, next_weights: Weights) -> Columns:
        """δ of every tuple; the next value may come from weights of its own."""
        value = values(self.features, weights)
        following = values(self.next_features, next_weights)
        return state_value_residual(self.reward, self.discount, value, following)

    def weight_gradient(self, gradients: ValueGradients) -> Weights:
        """From gradients in the two values to the gradient in the weights."""
        through = gradients.value.unsqueeze(-2) @ self.features  # (S, 1, N) @ (S, N, 3)
        if gradients.next_value is not None:
            through = through + gradients.next_value.unsqueeze(-2) @ self.next_features
        return through.squeeze(-2)

    def least_squares(self) -> Weights:
        """The LSTD solution (XᵀZ)⁻¹Xᵀr with Z = X − discount·X', which the linear-kernel loss is zero at.

        (Feng et al. 2019, cor:same_as_td)
        """
        change = self.features - self.discount.unsqueeze(-1) * self.next_features
        return torch.linalg.solve(
            self.features.mT @ change, (self.reward.unsqueeze(-2) @ self.features).squeeze(-2)
        )


@dataclass(frozen=True, eq=False)
class LinearKernelLoss:
    """`KernelLoss(Linear())` over fixed features in linear time: K = φφᵀ, hence K δ = φ (φᵀδ).

    (Feng et al. 2019, cor:same_as_td)
    """

    features: Float[Tensor, "seed row 3"]
    next_from: NextFrom = field(default="network", init=False)

    def compute_gradients(self, residual: Columns, discount: Columns) -> ValueGradients:
        """The V-statistic per seed and its gradients ∓2 K δ / n² in the two values."""
        projected = (residual.unsqueeze(-2) @ self.features).squeeze(-2)  # (S, 1, N) @ (S, N, 3)
        weighted = values(self.features, projected) / residual.shape[-1] ** 2
        loss = feature_v_statistic(self.features, residual)
        return ValueGradients(loss, -2.0 * weighted, 2.0 * weighted * discount)


@dataclass(frozen=True, eq=False)
class Descent:
    """What one method did: curves (T, S) at ``iterations`` (T,), NaN after a divergence (−1: none)."""

    method: str
    iterations: Int[np.ndarray, " time"]
    mse: Float[np.ndarray, "time seed"]
    weight_error: Float[np.ndarray, "time seed"]
    diverged_at: Int[np.ndarray, " seed"]
    weights: Float[np.ndarray, "seed 3"]


@dataclass(frozen=True, eq=False)
class ToyRun:
    """The descents of all methods and the weights that LSTD finds on the same tuples, (S, 3)."""

    settings: ToySettings
    descents: tuple[Descent, ...]
    least_squares: Float[np.ndarray, "seed 3"]

    def rows(self) -> tuple[Row, ...]:
        """One row per method, at the last iteration; the truth is exact."""
        return tuple(self._row(descent) for descent in self.descents)

    def curves(self) -> Curves:
        """Datasets of the curves file by group."""
        names = ("iterations", "mse", "weight_error", "diverged_at", "weights")
        groups = {f"{WORLD}/{d.method}": {name: getattr(d, name) for name in names} for d in self.descents}
        lstd = {"weights": self.least_squares, "weight_error": weight_errors(self.least_squares)}
        return {**groups, f"{WORLD}/lstd": {**lstd, "mse": value_errors(self.least_squares)}}

    def extra(self) -> dict[str, Any]:
        """The LSTD solution: its distance from w* (sampling error) and the methods' distance from it."""
        error = mean_over_seeds(weight_errors(self.least_squares))
        gaps = {d.method: np.linalg.norm(d.weights - self.least_squares, axis=1).max() for d in self.descents}
        return {
            "exact_weights": list(TSITSIKLIS_WEIGHTS),
            **error.named("lstd_weight_error"),
            "lstd_mse": float(value_errors(self.least_squares).mean()),
            "largest_distance_from_lstd": {name: float(gap) for name, gap in gaps.items()},
        }

    def _row(self, descent: Descent) -> Row:
        mse = mean_over_seeds(descent.mse[-1])
        weight_error = mean_over_seeds(descent.weight_error[-1])
        steps = tuple(int(step) if step >= 0 else None for step in descent.diverged_at)
        return Row(
            world=WORLD,
            method=descent.method,
            learning_rate=self.settings.learning_rate,
            seeds=self.settings.seeds,
            truth="exact",
            **mse.named("mse"),
            bellman_error=None,
            diverged=sum(step is not None for step in steps),
            diverged_at=steps,
            best_by_truth=True,  # there is one learning rate
            epochs=self.settings.iterations,
            **weight_error.named("weight_error"),
        )


def run_toy(scale: Scale) -> tuple[dict[str, Any], Curves]:
    """The fields ``rows`` and ``extra`` of the results, and the curves; some seconds."""
    run = run_methods(ToySettings(seeds=3 if scale.quick else 10, first_seed=scale.seed))
    return {"rows": run.rows(), "extra": run.extra()}, run.curves()


def run_methods(settings: ToySettings) -> ToyRun:
    """All methods on the same tuples."""
    log = draw_log(settings)
    descents = tuple(descend(method, log, settings) for method in METHODS)
    return ToyRun(settings, descents, log.least_squares().numpy())


def draw_log(settings: ToySettings) -> ToyLog:
    """Tuples of the chain, states uniform over the non-terminal ones; one generator per seed."""
    chain = tsitsiklis_van_roy()
    policy = np.ones((chain.n_states, 1))
    draws = [
        chain.sample_transitions(settings.tuples, policy, np.random.default_rng(seed))
        for seed in range(settings.first_seed, settings.first_seed + settings.seeds)
    ]
    features = torch.tensor(TSITSIKLIS_FEATURES, dtype=torch.float64)
    return ToyLog(
        # Columns lie one after the other in memory: products with (S, 1, N) are several times faster.
        features=torch.stack([features[draw.states].T for draw in draws]).mT,
        next_features=torch.stack([features[draw.next_states].T for draw in draws]).mT,
        reward=torch.stack([torch.from_numpy(draw.rewards) for draw in draws]),
        discount=torch.stack(
            [discount(TSITSIKLIS_GAMMA, torch.from_numpy(draw.terminated)) for draw in draws]
        ),
    )


def descend(method: str, log: ToyLog, settings: ToySettings) -> Descent:
    """Follow a method from (1, 1, 1) with plain gradient steps."""
    objective = _objective(method, log, settings)
    weights = torch.ones(len(log.reward), 3, dtype=torch.float64)
    second = torch.zeros_like(weights)  # the linear second function of GTD2 and SBEED
    target = weights
    diverged_at = np.full(len(weights), -1)
    wanted = set(_record_iterations(settings.iterations).tolist())
    recorded = [weights.numpy()]
    for iteration in range(1, settings.iterations + 1):
        if isinstance(objective, GradientTD2 | SaddlePoint):
            second = _fit_second(objective, log, weights, second, settings.learning_rate)
            correction = values(log.features, second)
            residual = log.residual(weights, weights)
            gradients = objective.compute_gradients(residual, log.discount, correction)
        else:
            residual = log.residual(weights, target if objective.next_from == "target" else weights)
            gradients = objective.compute_gradients(residual, log.discount)
        weights = weights - settings.learning_rate * log.weight_gradient(gradients)
        gone = (weights.norm(dim=1) > DIVERGED).numpy()
        diverged_at[gone] = iteration
        weights[torch.from_numpy(gone)] = torch.nan
        if iteration % settings.copy_every == 0:
            target = weights
        if iteration in wanted:
            recorded.append(weights.numpy())
    path = np.stack(recorded)
    iterations = _record_iterations(settings.iterations)
    return Descent(method, iterations, value_errors(path), weight_errors(path), diverged_at, path[-1])


def values(features: Float[Tensor, "seed row 3"], weights: Weights) -> Columns:
    """V of every row, (S, N)."""
    return (weights.unsqueeze(-2) @ features.mT).squeeze(-2)  # (S, 1, 3) @ (S, 3, N)


def weight_errors(weights: Shaped[np.ndarray, "*time seed 3"]) -> Float[np.ndarray, "*time seed"]:
    """‖w − w*‖."""
    return np.linalg.norm(weights - np.asarray(TSITSIKLIS_WEIGHTS), axis=-1)


def value_errors(weights: Shaped[np.ndarray, "*time seed 3"]) -> Float[np.ndarray, "*time seed"]:
    """Mean of (V − V*)² over the four non-terminal states, which the tuples visit equally often."""
    gaps = (weights - np.asarray(TSITSIKLIS_WEIGHTS)) @ np.asarray(TSITSIKLIS_FEATURES[:4]).T
    return np.mean(gaps**2, axis=-1)


def _objective(
    method: str, log: ToyLog, settings: ToySettings
) -> LinearKernelLoss | Objective | DualObjective:
    objectives: dict[str, LinearKernelLoss | Objective | DualObjective] = {
        "td0": TemporalDifference(),
        "fvi": FittedIteration(CopyTarget(settings.copy_every)),
        "rg": ResidualGradient(),
        "gtd2": GradientTD2(),
        "sbeed": SaddlePoint(hidden=()),
        "kloss": LinearKernelLoss(log.features),
    }
    return objectives[method]


def _fit_second(
    objective: DualObjective, log: ToyLog, weights: Weights, second: Weights, learning_rate: float
) -> Weights:
    """The steps of the second function that precede one of V; linear V has no Hessian term."""
    residual = log.residual(weights, weights)
    for _ in range(objective.ascent_steps if isinstance(objective, SaddlePoint) else 1):
        slope = objective.compute_auxiliary_gradient(residual, values(log.features, second))
        gradient = (slope.unsqueeze(-2) @ log.features).squeeze(-2)
        second = second - learning_rate * objective.auxiliary_rate * gradient
    return second


def _record_iterations(iterations: int) -> Int[np.ndarray, " time"]:
    """The start, the end, and iterations between them."""
    spaced = np.geomspace(1, iterations, min(_RECORDS, iterations)).round().astype(np.int64)
    return np.unique(np.concatenate([[0], spaced]))
