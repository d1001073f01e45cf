"""The episode bootstrap of fitted networks: many resampled logs for their last layers, hidden layers held."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from koffline.errors import KofflineError
from koffline.ope.fitted import LSTD_RIDGE, FittedValues
from koffline.ope.intervals.resampling import (
    MATRIX,
    ONE_UNIT,
    LinearEquation,
    Units,
    pivotal_interval,
    resample_values,
    usable,
)
from koffline.ope.intervals.settings import describe_starts, enough_draws
from koffline.ope.last_layer import accumulate_systems
from koffline.ope.learning import row_blocks
from koffline.ope.names import BOOTSTRAP_PIVOT
from koffline.ope.results import Interval
from koffline.replicas import StackedMLP
from koffline.solvers.linear import kernel_inputs, last_layer, last_layer_features

_NOISE = 6062  # a stream of random numbers
_EQUATIONS = {"kloss": "kernel loss"}  # else: temporal-difference equation
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
    evaluation has solved. Differences between the networks (initial weights, mini-batches) are drawn on top,
    from a normal with the spread of their mean.
    Raises KofflineError when all of these networks diverged, or the log is one episode.
    (Hao et al. 2021)
    """
    draws, head, problem = (
        enough_draws(level) if draws is None else draws,
        head or fitted.head,
        fitted.problem,
    )
    alive = np.flatnonzero(fitted.alive[: fitted.ensemble.full])
    if not len(alive):
        raise KofflineError(f"{fitted.describe_diverged()}; lower learning_rate")
    units = Units(problem.episode_starts, torch.as_tensor(problem.row_weights), problem.fixed_starts)
    if len(units.present) < 2:
        raise KofflineError(ONE_UNIT)
    counts = units.draw_counts(draws, seed)
    deviations, exact = np.zeros(draws), True
    for replica in alive.tolist():
        equation = network_equation(fitted, replica, head)
        values, exact = resample_values(equation, units, counts)
        whole = float(equation.start_weights @ (equation.starts @ equation.theta))
        deviations += (values - whole / float(equation.start_weights.sum())) / len(alive)
    if not usable(deviations):
        raise KofflineError("too many resampled logs have no answer; give more episodes")
    replicas = fitted.replica_values[head][alive]
    value, errors = float(replicas.mean()), deviations * problem.reward_scale
    if len(replicas) > 1:
        spread = float(replicas.std(ddof=1)) / len(replicas) ** 0.5
        errors = errors + np.random.default_rng([seed, _NOISE]).normal(0.0, spread, size=draws)
    low, high = pivotal_interval(value, value + errors, level)
    text = _ASSUMPTIONS.format(
        units=units.name,
        equation=_EQUATIONS.get(head, "temporal-difference equation"),
        matrix=MATRIX[exact],
        starts=describe_starts(problem.fixed_starts, "start states with them"),
    )
    return Interval(low, high, level, BOOTSTRAP_PIVOT, text)


def network_equation(fitted: FittedValues, replica: int, head: str) -> LinearEquation:
    """The equation that a head's last layer solves on the whole log; in scaled rewards."""
    problem, table, instruments = fitted.problem, fitted.table, fitted.instruments
    network = fitted.record.network.select([replica])
    weights = torch.as_tensor(problem.row_weights)
    now = _features(network, table.inputs, table.readout)
    later = _features(network, table.next_inputs, table.next_readout)
    difference = now - table.discounts.double().cpu()[:, None] * later
    systems = accumulate_systems(network, table, instruments, weights[None].to(table.inputs.device))
    systems = systems.mean(len(table))
    if head == "kloss":
        matrix, ridge, solved = systems.kernel_matrix[0].cpu(), fitted.settings.ridge, "kloss"
        blocks, compared = row_blocks(network, len(table), table.draws), kernel_inputs(table)
        omega = torch.cat([instruments(compared[rows].double()).cpu() @ matrix for rows in blocks])
        curvature = matrix.mT @ matrix
    else:
        curvature, ridge, omega, solved = systems.temporal_matrix[0].cpu(), LSTD_RIDGE, now, "lstd"
    theta = last_layer(fitted.heads[solved].select([replica]))[0].cpu()
    like, probabilities = table.inputs, problem.start_probabilities
    readout = None if probabilities is None else torch.as_tensor(probabilities).to(like)
    return LinearEquation(
        instruments=omega * weights[:, None],
        difference=difference,
        residuals=table.rewards.double().cpu() - difference @ theta,
        starts=_features(network, torch.as_tensor(problem.start_inputs).to(like), readout),
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
