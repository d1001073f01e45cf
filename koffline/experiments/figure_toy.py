"""figure-toy: gradient descent on the modified chain of Tsitsiklis and Van Roy with
linear values.

2000 tuples, full-batch gradient descent from w = (1, 1, 1) in float64; each seed draws
its own tuples. TD(0) and FVI diverge. RG converges to a solution biased by the
transition noise. The K-loss with the linear kernel reaches the LSTD solution, as do
GTD2 and SBEED with linear second functions. (Feng et al. 2019, fig:toy_diverge)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Shaped
from matplotlib.figure import Figure
from torch import Tensor

from koffline import objectives
from koffline.envs import finite as worlds
from koffline.experiments import style
from koffline.experiments.cells import Run
from koffline.experiments.result_files import (
    Collected,
    Curves,
    ErrorRow,
    Results,
    steps_or_none,
)
from koffline.experiments.seed_statistics import SeedInterval, mean_over_seeds
from koffline.kernel_loss import discount, feature_v_statistic, state_value_residual

DIVERGED = 1e7  # descent stops at this ‖w‖; the largest true value is 1
_RECORDS = 240  # points per curve, evenly spaced in the logarithm of the iteration
_WIDEST = 1e3  # end of the axes, beyond which diverging curves are cut
_LSTD: dict[str, Any] = {"color": style.INK, "ls": (0, (4, 3)), "lw": 0.9}
Weights = Float[Tensor, "seed 3"]
Columns = Float[Tensor, "seed row"]


@dataclass(frozen=True)
class ToySettings:
    """Number of seeds (from first_seed), of tuples and of iterations; step size."""

    seeds: int = 10
    first_seed: int = 0
    tuples: int = 2000
    iterations: int = 2000
    learning_rate: float = 0.5
    copy_every: int = 10  # iterations between copies of FVI's target


@dataclass(frozen=True, eq=False)
class ToyLog:
    """The tuples of every seed.

    A value is features · w; a terminal state's features are zero.
    """

    features: Float[Tensor, "seed row 3"]
    next_features: Float[Tensor, "seed row 3"]
    reward: Columns
    discount: Columns

    def residual(self, weights: Weights, next_weights: Weights) -> Columns:
        """Temporal-difference error δ of every tuple; next values use
        ``next_weights``.
        """
        following = values(self.next_features, next_weights)
        return state_value_residual(
            self.reward, self.discount, values(self.features, weights), following
        )

    def weight_gradient(self, gradients: objectives.ValueGradients) -> Weights:
        """Gradient with respect to the weights, from the gradients with respect to the
        two values.
        """
        through = _projected(gradients.value, self.features)
        if gradients.next_value is not None:
            through = through + _projected(gradients.next_value, self.next_features)
        return through

    def least_squares(self) -> Weights:
        """The LSTD solution (XᵀZ)⁻¹Xᵀr, Z = X − discount·X'. (Feng et al. 2019,
        cor:same_as_td)
        """
        change = self.features - self.discount.unsqueeze(-1) * self.next_features
        return torch.linalg.solve(
            self.features.mT @ change, _projected(self.reward, self.features)
        )


def values(features: Float[Tensor, "seed row 3"], weights: Weights) -> Columns:
    """V of every row, (S, N)."""
    return (weights.unsqueeze(-2) @ features.mT).squeeze(-2)  # (S, 1, 3) @ (S, 3, N)


def _projected(columns: Columns, features: Float[Tensor, "seed row 3"]) -> Weights:
    return (columns.unsqueeze(-2) @ features).squeeze(-2)  # (S, 1, N) @ (S, N, 3)


@dataclass(frozen=True, eq=False)
class LinearKernelLoss:
    """`KernelLoss(Linear())` on fixed features in linear time: K = φφᵀ, hence K δ = φ
    (φᵀδ).
    """

    features: Float[Tensor, "seed row 3"]
    next_from: objectives.NextFrom = field(default="network", init=False)

    def compute_gradients(
        self, residual: Columns, discount: Columns
    ) -> objectives.ValueGradients:
        """The V-statistic per seed, and its gradients ∓2 K δ / n² with respect to the
        two values.
        """
        weighted = (
            values(self.features, _projected(residual, self.features))
            / residual.shape[-1] ** 2
        )
        loss = feature_v_statistic(self.features, residual)
        return objectives.ValueGradients(
            loss, -2.0 * weighted, 2.0 * weighted * discount
        )


def collect_toy(run: Run) -> Collected:
    """The fields ``rows`` and ``extra`` of the results, and the curves.

    Takes some seconds.
    """
    seeds = 10
    if run.scale.quick:
        seeds = 3
    settings = ToySettings(seeds=seeds, first_seed=run.scale.seed)
    log = draw_log(settings)
    descents = {method: descend(method, log, settings) for method in style.METHODS}
    lstd = log.least_squares().numpy()
    errors = weight_errors(lstd)
    squares = value_errors(lstd)
    gaps = {
        m: float(np.linalg.norm(descent["weights"] - lstd, axis=1).max())
        for m, descent in descents.items()
    }
    extra = {
        "exact_weights": list(worlds.TSITSIKLIS_WEIGHTS),
        "lstd_weight_error": float(errors.mean()),
        "lstd_interval": mean_over_seeds(errors),
        "lstd_mse": float(squares.mean()),
        # w* itself differs from LSTD by sampling error
        "largest_distance_from_lstd": gaps,
    }
    curves = {f"chain/{method}": descent for method, descent in descents.items()}
    curves["chain/lstd"] = {"weights": lstd, "weight_error": errors, "mse": squares}
    rows = tuple(
        _row(method, descent, settings) for method, descent in descents.items()
    )
    return {"rows": rows, "extra": extra}, curves


def _row(
    method: str, descent: Mapping[str, np.ndarray], settings: ToySettings
) -> ErrorRow:
    """Results row at the last iteration; the truth is exact.

    descent: what `descend` returned for the method.
    """
    steps = steps_or_none(descent["diverged_at"])
    return ErrorRow(
        world="chain",
        method=method,
        learning_rate=settings.learning_rate,
        seeds=settings.seeds,
        truth="exact",
        mse=mean_over_seeds(descent["mse"][-1]),
        diverged=sum(step is not None for step in steps),
        diverged_at=steps,
        best_by_truth=True,  # only one learning rate
        epochs=settings.iterations,
        weight_error=mean_over_seeds(descent["weight_error"][-1]),
    )


def draw_log(settings: ToySettings) -> ToyLog:
    """Tuples of the chain, states uniform over the non-terminal ones; one generator per
    seed.
    """
    chain = worlds.tsitsiklis_van_roy()
    policy = np.ones((chain.n_states, 1))
    draws = [
        chain.sample_transitions(
            settings.tuples, policy, np.random.default_rng(settings.first_seed + seed)
        )
        for seed in range(settings.seeds)
    ]
    features = torch.tensor(worlds.TSITSIKLIS_FEATURES, dtype=torch.float64)
    ended = [torch.from_numpy(draw.terminated) for draw in draws]
    return ToyLog(
        # Columns lie one after the other in memory: products with
        # (S, 1, N) are several times faster.
        features=torch.stack([features[draw.states].T for draw in draws]).mT,
        next_features=torch.stack([features[draw.next_states].T for draw in draws]).mT,
        reward=torch.stack([torch.from_numpy(draw.rewards) for draw in draws]),
        discount=torch.stack(
            [discount(worlds.TSITSIKLIS_GAMMA, part) for part in ended]
        ),
    )


def descend(method: str, log: ToyLog, settings: ToySettings) -> dict[str, np.ndarray]:
    """Run a method from w = (1, 1, 1): curves (T, S), NaN after divergence; diverged_at
    is −1 without.
    """
    objective: Any = {
        "td0": objectives.TemporalDifference(),
        "fvi": objectives.FittedIteration(objectives.CopyTarget(settings.copy_every)),
        "rg": objectives.ResidualGradient(),
        "gtd2": objectives.GradientTD2(),
        "sbeed": objectives.SaddlePoint(hidden=()),
        "kloss": LinearKernelLoss(log.features),
    }[method]
    weights = target = torch.ones(len(log.reward), 3, dtype=torch.float64)
    second = torch.zeros_like(weights)  # the linear second function of GTD2 and SBEED
    diverged_at = np.full(len(weights), -1)
    spaced = (
        np.geomspace(1, settings.iterations, min(_RECORDS, settings.iterations))
        .round()
        .astype(np.int64)
    )
    iterations = np.unique(np.concatenate([[0], spaced]))
    recorded = [weights.numpy()]
    for iteration in range(1, settings.iterations + 1):
        if isinstance(objective, objectives.GradientTD2 | objectives.SaddlePoint):
            residual = log.residual(weights, weights)
            # The steps of the second function that precede one of
            # V; linear V has no Hessian term.
            ascent_steps = 1
            if isinstance(objective, objectives.SaddlePoint):
                ascent_steps = objective.ascent_steps
            for _ in range(ascent_steps):
                slope = objective.compute_auxiliary_gradient(
                    residual, values(log.features, second)
                )
                step = (
                    settings.learning_rate
                    * objective.auxiliary_rate
                    * _projected(slope, log.features)
                )
                second = second - step
            gradients = objective.compute_gradients(
                residual, log.discount, values(log.features, second)
            )
        else:
            next_weights = weights
            if objective.next_from == "target":
                next_weights = target
            residual = log.residual(weights, next_weights)
            gradients = objective.compute_gradients(residual, log.discount)
        weights = weights - settings.learning_rate * log.weight_gradient(gradients)
        gone = weights.norm(dim=1) > DIVERGED
        diverged_at[gone.numpy()] = iteration
        weights[gone] = torch.nan
        if iteration % settings.copy_every == 0:
            target = weights
        if iteration in iterations:
            recorded.append(weights.numpy())
    path = np.stack(recorded)
    curves = {"mse": value_errors(path), "weight_error": weight_errors(path)}
    return {
        "iterations": iterations,
        **curves,
        "diverged_at": diverged_at,
        "weights": path[-1],
    }


def weight_errors(
    weights: Shaped[np.ndarray, "*time seed 3"],
) -> Float[np.ndarray, "*time seed"]:
    """Errors ‖w − w*‖ of the weights."""
    return np.linalg.norm(weights - np.asarray(worlds.TSITSIKLIS_WEIGHTS), axis=-1)


def value_errors(
    weights: Shaped[np.ndarray, "*time seed 3"],
) -> Float[np.ndarray, "*time seed"]:
    """Mean of (V − V*)² over the four non-terminal states, which are equally frequent
    in the tuples.
    """
    gaps = (weights - np.asarray(worlds.TSITSIKLIS_WEIGHTS)) @ np.asarray(
        worlds.TSITSIKLIS_FEATURES[:4]
    ).T
    return np.mean(gaps**2, axis=-1)


def draw_toy(results: Results, curves: Curves) -> Figure:
    """The paper's panels b and c: errors of the six methods by iteration."""
    figure = Figure(figsize=(8.5, 3.6), layout="constrained")
    groups = {m: curves[f"chain/{m}"] for m in style.METHODS if f"chain/{m}" in curves}
    panels = (
        ("mse", "(b) MSE", "mean of $(V - V^*)^2$ over states"),
        ("weight_error", "(c) Weight error", "$\\|w - w^*\\|$"),
    )
    for axes, (name, title, label) in zip(figure.subplots(1, 2), panels, strict=True):
        shown = {
            m: (group["iterations"][1:], group[name][1:]) for m, group in groups.items()
        }
        style.draw_errors(axes, shown, _WIDEST)
        axes.set(title=title, xlabel="iteration", ylabel=label, xscale="log")
        axes.axhline(results.extra[f"lstd_{name}"], **_LSTD, zorder=1)
    passed = {"color": style.SOFT, "marker": "X", "ls": "", "ms": 7}
    lines = {"LSTD (sampling error)": _LSTD, "$\\|w\\|$ passed $10^7$": passed}
    style.method_legend(figure, list(groups), lines)
    return figure


def toy_tables(results: Results) -> Iterator[str]:
    """Table of the methods at their last iteration."""
    rows: Sequence[ErrorRow] = results.select(world="chain")
    extra = results.extra
    first = rows[0]
    cells = []
    note = (
        f"Plain gradient descent, {first.epochs} iterations at learning rate"
        f" {first.learning_rate:g}, {first.seeds} draws of the tuples. The LSTD"
        " solution of the same tuples is"
        f" {style.interval_text(SeedInterval(*extra['lstd_interval']))} away from w*: that"
        " much is sampling error."
    )
    for row in rows:
        steps = [step for step in row.diverged_at if step is not None]
        if steps:
            when = f" (iterations {min(steps)}–{max(steps)})"
        else:
            when = ""
        errors = map(style.interval_text, (row.weight_error, row.mse))
        gap = style.number_text(extra["largest_distance_from_lstd"].get(row.method))
        cells.append(
            [
                style.LABELS[row.method],
                *errors,
                gap,
                f"{row.diverged}/{row.seeds}{when}",
            ]
        )
    header = "method | ‖w − w*‖ | MSE | largest distance from LSTD | diverged"
    yield style.section(f"## {style.LONG_NAMES['chain']}", note, header, cells)
