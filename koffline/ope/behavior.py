"""Value of the logging policy by the same networks, and the uplift of the evaluated policy over it.

Complete episodes give it by their returns. The return after a cut is a value: the last layers are solved once
more with the logged next actions in place of the policy's. Features and resampled episodes are the same for
both values, so that the sampling error that they share cancels in their difference.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from koffline.kernels import FourierFeatures
from koffline.ope.fitted import FittedValues
from koffline.ope.last_layer import PartSystems, last_layer, minimise_kernel_loss, systems_of_part
from koffline.ope.learning import Resampling
from koffline.ope.problem import EvaluationProblem
from koffline.ope.results import Uplift
from koffline.ope.working_log import Sums
from koffline.replicas import StackedMLP


@dataclass(frozen=True, eq=False)
class _Returns(Sums):
    """Sums of a part of a log: Σ w of episodes, and Σ w · discounted rewards before the cut, (R, 2) each.

    ``systems``: of last layers whose start states are the rows at cuts; None where no episode is cut.
    """

    weights: Tensor
    returns: Tensor
    systems: PartSystems | None


def _returns_of_part(
    network: StackedMLP,
    instruments: FourierFeatures,
    resampling: Resampling,
    gamma: float,
    stops: np.ndarray | None,
    problem: EvaluationProblem,
    units: np.ndarray,
) -> _Returns:
    """Sums of a part. Rows after which recording stopped have no weight in the systems and start the rest."""
    discounted, systems = problem.rewards * gamma ** _steps_of(problem), None
    if stops is not None:
        stopped = _stops_at(problem, stops)
        discounted *= 1.0 - stopped
        rest = _rest_after_stops(problem, stopped, gamma)
        systems = systems_of_part(network, instruments, resampling, rest, units)
    weights = resampling.start_weights(problem, units)
    returns = weights @ torch.as_tensor(np.add.reduceat(discounted, problem.episode_starts))
    return _Returns(weights.sum(dim=2), returns, systems)


def _rest_after_stops(problem: EvaluationProblem, stopped: np.ndarray, gamma: float) -> EvaluationProblem:
    """The problem of what follows cuts, with the logged next actions in place of the policy's."""
    ends, taken = np.append(problem.episode_starts[1:], problem.n_rows) - 1, problem.readout
    following = np.minimum(np.arange(problem.n_rows) + 1, problem.n_rows - 1)
    return dataclasses.replace(
        problem,
        next_inputs=problem.inputs[following][:, None],
        next_probabilities=None if taken is None else taken[following],
        start_inputs=problem.inputs[ends][:, None],
        start_probabilities=None if taken is None else taken[ends],
        start_weights=problem.start_weights * stopped[ends] * gamma ** _steps_of(problem)[ends],
        row_weights=problem.row_weights * (1.0 - stopped),
    )


def _steps_of(problem: EvaluationProblem) -> Int[np.ndarray, " row"]:
    """Steps since the start of the row's episode."""
    lengths = np.diff(np.append(problem.episode_starts, problem.n_rows))
    return np.arange(problem.n_rows) - np.repeat(problem.episode_starts, lengths)


def _is_cut(problem: EvaluationProblem) -> Bool[np.ndarray, " row"]:
    """Whether the episode was cut after the row."""
    ends = np.append(problem.episode_starts[1:], problem.n_rows)
    return np.isin(np.arange(problem.n_rows) + 1, ends) & (problem.discounts > 0.0)


def _stop_shares(problem: EvaluationProblem) -> Float[np.ndarray, " step"]:
    """Share (T,) of rows after which recording stopped, of those at a step after which the world goes on."""
    steps, goes_on = _steps_of(problem), problem.row_weights * (problem.discounts > 0.0)
    total, cut = np.bincount(steps, goes_on), np.bincount(steps, goes_on * _is_cut(problem))
    return np.asarray(cut / np.where(total > 0.0, total, 1.0))


def _stops_at(problem: EvaluationProblem, stops: np.ndarray) -> Float[np.ndarray, " row"]:
    """Probability that recording stopped after the row, had the world gone on.

    1 at cuts, 0 at rows that another follows. Where the world ended it is not known, and is ``stops`` (T,) of
    the row's step: to take it for 0 would make ends of the world too frequent among the rows before a stop.
    """
    steps = np.minimum(_steps_of(problem), len(stops))
    return np.where(problem.discounts > 0.0, _is_cut(problem), np.append(stops, 0.0)[steps])


def behavior_values(fitted: FittedValues, is_cut: bool) -> Float[np.ndarray, "replica 2"] | None:
    """J of the logging policy per replica: logged returns plus the values after their cuts.

    Episodes as its sample weighs them, and as the log does. is_cut: whether any episode is. NaN where that is
    not known (no row has a next one). None at start states from outside, where the logging policy's actions
    are not known.
    """
    if fitted.problem.fixed_starts:
        return None
    network, settings = fitted.heads["fqe"], fitted.settings
    stops = _stop_shares(fitted.problem) if is_cut else None
    asked = network, fitted.instruments, fitted.ensemble.resampling, settings.gamma, stops
    logged: _Returns = fitted.fold(partial(_returns_of_part, *asked))
    returns, found = logged.returns, logged.systems
    if found is not None:
        systems = found.systems.mean(found.row_weight.clamp_min(1.0))
        theta = last_layer(minimise_kernel_loss(network, systems, settings.ridge))
        returns = returns + (found.starts @ theta.unsqueeze(-1)).squeeze(-1).cpu()
    values = (returns / logged.weights).clamp(*fitted.problem.value_bounds)
    return np.asarray(values.numpy() * fitted.problem.reward_scale)


def uplift_of(fitted: FittedValues, behavior: np.ndarray | None, values: np.ndarray) -> Uplift | None:
    """Uplift of the policy over the logging policy, from J of every network; None if unknown."""
    if behavior is None or not np.isfinite(behavior[fitted.alive]).all():
        return None
    worth, more = fitted.summarise(behavior).value, fitted.summarise(values - behavior).value
    return Uplift(more, fitted.interval(values - behavior), worth, fitted.interval(behavior))
