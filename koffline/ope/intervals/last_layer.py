"""The episode bootstrap of fitted networks: many resampled logs for their last layers, hidden layers held."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from koffline.errors import KofflineError
from koffline.ope.blocks import row_blocks
from koffline.ope.fitted import LSTD_RIDGE, FittedValues
from koffline.ope.interval import Interval
from koffline.ope.intervals.resampling import (
    ONE_UNIT,
    LinearEquation,
    Units,
    pivotal_interval,
    resample_values,
    usable,
)
from koffline.ope.intervals.settings import enough_draws
from koffline.ope.last_layer import accumulate_systems
from koffline.ope.names import BOOTSTRAP_PIVOT
from koffline.replicas import StackedMLP
from koffline.solvers.linear import last_layer, last_layer_features

_ASSUMPTIONS = (
    "Asymptotic: {units} resampled, last layers solved again for each ({equation}; {matrix}), errors turned "
    "around, plus the spread of the networks trained on the whole log; {starts}. Hidden layers are held: it "
    "does not know what other features, or the class, would have said."
)


@torch.no_grad()
def last_layer_bootstrap(
    fitted: FittedValues,
    draws: int | None = None,
    level: float = 0.95,
    seed: int = 0,
    head: str | None = None,
) -> Interval:
    """[2Ĵ − q_high, 2Ĵ − q_low] over resampled episodes, from the networks trained on the whole log.

    head: the chosen one by default. For ``kloss`` each draw solves the kernel loss again (its instruments
    ΨᵀWZ held), for ``lstd`` and ``fqe`` the temporal-difference equation, which a converged fitted Q
    evaluation has solved. Differences between the networks (initial weights, mini-batches) are drawn on top.
    Raises KofflineError when all of these networks diverged, or the log is one episode.
    (Hao et al. 2021)
    """
    draws = enough_draws(level) if draws is None else draws
    head = head or fitted.head
    problem, full = fitted.problem, fitted.ensemble.full
    alive = np.flatnonzero(fitted.alive[:full])
    if not len(alive):
        raise KofflineError(f"{fitted.describe_diverged()}; lower learning_rate")
    units = Units(problem.episode_starts, torch.as_tensor(problem.row_weights), problem.fixed_starts)
    if len(units.present) < 2:
        raise KofflineError(ONE_UNIT)
    counts = units.draw_counts(draws, seed)
    deviations, exact = np.zeros(draws), True
    for replica in alive:
        equation = network_equation(fitted, int(replica), head)
        values, resampled = resample_values(equation, units, counts)
        whole = float(equation.start_weights @ (equation.starts @ equation.theta))
        deviations += (values - whole / float(equation.start_weights.sum())) / len(alive)
        exact = exact and resampled
    if not usable(deviations):
        raise KofflineError("too many resampled logs have no answer; give more episodes")
    replicas = fitted.replica_values[head][alive]
    value = float(replicas.mean())
    errors = deviations * problem.reward_scale + _training_noise(replicas, draws, seed)
    low, high = pivotal_interval(value, value + errors, level)
    return Interval(low, high, level, BOOTSTRAP_PIVOT, _describe(fitted, head, units, exact))


def network_equation(fitted: FittedValues, replica: int, head: str) -> LinearEquation:
    """The equation that a head's last layer solves on the whole log; in scaled rewards."""
    problem, table = fitted.problem, fitted.table
    network = fitted.record.network.select([replica])
    weights = torch.as_tensor(problem.row_weights)
    now = _features(network, table.inputs, table.readout)
    later = _features(network, table.next_inputs, table.next_readout)
    rewards, discounts = table.rewards.double().cpu(), table.discounts.double().cpu()
    difference = now - discounts[:, None] * later
    systems = accumulate_systems(network, table, fitted.instruments, weights[None].to(table.inputs.device))
    systems = systems.mean(len(table))
    if head == "kloss":
        matrix = systems.kernel_matrix[0].cpu()
        curvature = matrix.mT @ matrix
        ridge = fitted.settings.ridge
        kernel_inputs = table.inputs if table.kernel_inputs is None else table.kernel_inputs
        psi = [
            fitted.instruments(kernel_inputs[rows].double()).cpu() @ matrix
            for rows in row_blocks(network, len(table), table.draws)
        ]
        instruments = torch.cat(psi)
        theta = last_layer(fitted.heads["kloss"].select([replica]))[0].cpu()
    else:
        curvature, ridge, instruments = systems.temporal_matrix[0].cpu(), LSTD_RIDGE, now
        theta = last_layer(fitted.heads["lstd"].select([replica]))[0].cpu()
    return LinearEquation(
        instruments=instruments * weights[:, None],
        difference=difference,
        residuals=rewards - difference @ theta,
        starts=_features(network, _as(table.inputs, problem.start_inputs), _start_readout(fitted)),
        start_weights=torch.as_tensor(problem.start_weights),
        ridge=torch.full_like(theta, ridge * float(curvature.diagonal().abs().mean())),
        theta=theta,
    )


def _features(network: StackedMLP, inputs: Tensor, readout: Tensor | None) -> Float[Tensor, "row parameter"]:
    """φ of the one network, in blocks."""
    draws = inputs.shape[1] if inputs.ndim == 3 else 1
    parts = [
        last_layer_features(network, inputs[rows], None if readout is None else readout[rows])[0].cpu()
        for rows in row_blocks(network, len(inputs), draws)
    ]
    return torch.cat(parts)


def _start_readout(fitted: FittedValues) -> Tensor | None:
    probabilities = fitted.problem.start_probabilities
    return None if probabilities is None else _as(fitted.table.inputs, probabilities)


def _as(like: Tensor, values: np.ndarray) -> Tensor:
    return torch.as_tensor(values, dtype=like.dtype, device=like.device)


def _training_noise(
    replicas: Float[np.ndarray, " replica"], draws: int, seed: int
) -> Float[np.ndarray, " draw"]:
    """Errors of the mean of a few networks, drawn from a normal with their spread; zeros for one network."""
    if len(replicas) < 2:
        return np.zeros(draws)
    spread = float(replicas.std(ddof=1)) / len(replicas) ** 0.5
    return np.random.default_rng([seed, 6062]).normal(0.0, spread, size=draws)


def _describe(fitted: FittedValues, head: str, units: Units, exact: bool) -> str:
    equation = "kernel loss" if head == "kloss" else "temporal-difference equation"
    return _ASSUMPTIONS.format(
        units="episodes" if len(units) < fitted.problem.n_rows else "rows",
        equation=equation,
        matrix="its matrix too" if exact else "its matrix held: the first order",
        starts="given start states as they are" if fitted.problem.fixed_starts else "start states with them",
    )
