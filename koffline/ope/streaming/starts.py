"""Start states that were given: their mean features, and what drawing the policy's actions leaves open."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from koffline.ope.problem import EvaluationProblem
from koffline.ope.streaming.frame import FeatureStack
from koffline.solvers.linear import combine_features

_AT_ONCE = 1 << 15  # drawn start states


def mean_start_features(
    features: FeatureStack, problem: EvaluationProblem
) -> Float[np.ndarray, "replica parameter"]:
    """(R, p) mean over the problem's start states."""
    total = sum(part.sum(dim=1) for part in _parts(features, problem, by_draw=False))
    assert isinstance(total, Tensor)
    return np.asarray((total / len(problem.start_inputs)).numpy())


def drawing_variance(
    features: FeatureStack, problem: EvaluationProblem, theta: Float[Tensor, "replica parameter"]
) -> float:
    """Variance of the mean value (in units of the problem) that actions drawn at given start states leave."""
    draws = problem.start_inputs.shape[1]
    if draws == 1:
        return 0.0
    total = 0.0
    for part in _parts(features, problem, by_draw=True):
        values = (part * theta[:, None]).sum(dim=2).mean(dim=0).unflatten(0, (-1, draws))  # (S, draws)
        total += float(values.var(dim=1).sum())
    return total / draws / len(problem.start_inputs) ** 2


def _parts(features: FeatureStack, problem: EvaluationProblem, by_draw: bool) -> Iterator[Tensor]:
    """φ of some start states after others, averaged over draws or draw by draw; float64."""
    inputs, probabilities = problem.start_inputs, problem.start_probabilities
    draws = inputs.shape[1]
    size = max(1, _AT_ONCE // draws)
    for start in range(0, len(inputs), size):
        rows = slice(start, start + size)
        flat = torch.from_numpy(inputs[rows]).flatten(0, 1)
        readout = None if probabilities is None else torch.from_numpy(probabilities[rows])
        yield combine_features(features(flat, torch.float64), 1 if by_draw else draws, readout, constant=True)
