"""The exact solvers once more in numpy, row by row; a finite process as a table without sampling error."""

from __future__ import annotations

import numpy as np
import torch

from koffline.batches import Table
from tests.reference import gaussian, gram
from tests.strategies import draw_finite_case


def cosines(x):
    """A smooth feature map of five columns."""
    directions = torch.linspace(-1.5, 1.5, 5 * x.shape[1], dtype=x.dtype).view(x.shape[1], 5)
    return torch.cos(x @ directions + torch.arange(5, dtype=x.dtype))


def plain_rows(table, features, constant=True):
    """φ and Z = φ − discount · E φ' as numpy arrays, one row at a time."""
    now, difference = [], []
    for index in range(len(table)):
        here = _plain_row(features, table.inputs[index : index + 1], table.readout, index, constant)
        following = table.next_inputs[index]
        following = following[None] if following.ndim == 1 else following
        later = np.mean(
            [
                _plain_row(features, draw[None], table.next_readout, index, constant)
                for draw in following.unbind()
            ],
            axis=0,
        )
        now.append(here)
        difference.append(here - float(table.discounts[index]) * later)
    return np.array(now), np.array(difference)


def _plain_row(features, row, readout, index, constant):
    units = features(row)[0].tolist() + [1.0] * constant
    if readout is None:
        return np.array(units)
    return np.array([unit * read for unit in units for read in readout[index].tolist()])


def plain_kernel_solution(table, features, bandwidth, weight, ridge, toward=None, constant=True):
    """θ from dense normal equations of (1 − w) U + w mean δ² + λ‖θ − toward‖²."""
    _, z = plain_rows(table, features, constant)
    rewards, n = table.rewards.numpy(), len(table)
    kernel = gram(lambda x, y: gaussian(x, y, bandwidth), *[table.kernel_inputs.tolist()] * 2)
    form = (1.0 - weight) / (n * (n - 1)) * (kernel - np.eye(n)) + weight / n * np.eye(n)
    curvature = z.T @ form @ z
    outputs = 1 if table.readout is None else table.readout.shape[1]
    bound = np.ones(z.shape[1])
    if constant:
        bound[-outputs:] = 0.0
    penalty = ridge * np.mean(np.diag(curvature)[bound == 1.0]) * np.diag(bound)
    start = np.zeros(z.shape[1]) if toward is None else toward
    return np.linalg.solve(curvature + penalty, z.T @ form @ rewards + penalty @ start)


def exact_table(seed=0):
    """Every (s, s') of a finite process as a row whose weight is its probability; one-hot inputs.

    Returns the table, the row weights, and V^π (S,): averages over the rows are expectations.
    """
    case = draw_finite_case(seed)
    states = len(case.weights)
    now, later = (part.ravel() for part in np.meshgrid(range(states), range(states), indexing="ij"))
    eye = torch.eye(states, dtype=torch.float64)
    table = Table(
        inputs=eye[now],
        next_inputs=eye[later],
        rewards=torch.as_tensor(case.gains[now, later]),
        discounts=torch.full((states**2,), case.gamma, dtype=torch.float64),
        kernel_inputs=torch.as_tensor(case.points)[now],
    )
    weights = case.weights[now] * case.moves[now, later]
    return table, torch.as_tensor(weights), torch.as_tensor(case.values)
