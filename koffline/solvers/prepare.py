"""What the exact solvers are given: a table as it is, or a log made into one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from koffline.batches import Table
from koffline.bellman import discount
from koffline.data.transitions import Transitions
from koffline.errors import ConfigError, DataError
from koffline.solvers.features import UnitBox
from koffline.solvers.linear import as_double


@dataclass(frozen=True, eq=False)
class Prepared:
    """A table and what a log knows beside it."""

    table: Table
    scale: UnitBox | None = None
    row_weights: Tensor | None = None
    groups: Tensor | None = None

    @property
    def kernel_inputs(self) -> Tensor:
        """What the kernel compares, (N, k) float64."""
        return (self.table.inputs if self.table.kernel_inputs is None else self.table.kernel_inputs).double()


def make_state_value_table(log: Transitions, gamma: float, box: UnitBox) -> Table:
    """V-form rows of a log in float64: observations flattened and in units of the box."""
    states, following = (
        box(as_double(part).flatten(1)) for part in (log.observations, log.next_observations)
    )
    rewards = as_double(log.rewards)
    return Table(states, following, rewards, discount(gamma, as_double(log.terminated)), None, None, states)


def prepare(data: Table | Transitions, gamma: float | None, box: UnitBox | None) -> Prepared:
    """Raises ConfigError for arguments that do not belong to this kind of data, DataError for other kinds."""
    if isinstance(data, Table):
        if gamma is not None or box is not None:
            raise ConfigError("a Table holds discounts and scaled inputs; leave gamma and box out")
        return Prepared(data)
    if not isinstance(data, Transitions):
        raise DataError(f"data is a {type(data).__name__}; give a Table or Transitions")
    if gamma is None:
        raise ConfigError("gamma is missing; give the discount factor, as in gamma=0.99")
    box = box or _range_of(data)
    return Prepared(
        table=make_state_value_table(data, gamma, box),
        scale=box,
        row_weights=None if data.weights is None else as_double(data.weights),
        groups=torch.from_numpy(np.array(data.episode_ids)) if data.has_episodes else None,
    )


def _range_of(log: Transitions) -> UnitBox:
    """Smallest and largest observation; a constant column keeps the unit 1."""
    rows = torch.cat([as_double(part).flatten(1) for part in (log.observations, log.next_observations)])
    low, high = rows.amin(dim=0), rows.amax(dim=0)
    high = torch.where(high > low, high, low + 1.0)
    return UnitBox(tuple(low.tolist()), tuple(high.tolist()))
