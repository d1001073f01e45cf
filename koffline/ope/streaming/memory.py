"""How a memory limit is shared out: rows of the sample, rows of a block, groups of the sums."""

from __future__ import annotations

import math
from dataclasses import dataclass

from koffline.config import EvaluationSettings
from koffline.data.disk.log import LazyTransitions
from koffline.data.spaces import Discrete
from koffline.errors import ConfigError
from koffline.ope.streaming.columns import STRETCH
from koffline.ope.streaming.settings import StreamSettings

_LIBRARIES = 400_000_000  # what the process holds before any row is read
_SAMPLE_SHARE, _SUMS_SHARE, _BLOCK_SHARE = 0.6, 0.5, 0.4
_MOST_SAMPLE_ROWS = 200_000
_LEAST_SAMPLE_ROWS = 2_000
_MOST_BLOCK_ROWS = 32 * STRETCH
_LEAST_GROUPS = 10


@dataclass(frozen=True)
class Shapes:
    """Sizes that decide what a row and a group cost: d inputs, draws of the next action, p, m, k and R."""

    inputs: int
    outputs: int
    draws: int
    hidden: tuple[int, ...]
    replicas: int
    instruments: int
    critics: int = 0

    @property
    def parameters(self) -> int:
        """p."""
        return (self.hidden[-1] + 1) * self.outputs

    @property
    def sample_row_bytes(self) -> int:
        """Of a row while networks are trained: columns in double for the problem, in single for training."""
        numbers = self.inputs * (2 + self.draws) + 3 * self.outputs + 8
        return 12 * numbers + 2 * 8 * self.inputs + 24 * self.replicas

    @property
    def group_bytes(self) -> int:
        """Of the sums of one group."""
        p = self.parameters
        return 8 * (self.replicas * (self.instruments + 2 * p + 2) * (p + 1) + self.critics**2)

    def block_row_bytes(self, number: int) -> int:
        """Of a row of a block with its temporary arrays; ``number``: bytes of one number."""
        networks = self.replicas * (1 + self.draws) * 2 * (max(self.hidden) + self.hidden[-1])
        features = self.replicas * 5 * (self.parameters + 1)
        return number * (2 * self.instruments + networks + features) + 8 * 6 * self.inputs * (1 + self.draws)


@dataclass(frozen=True)
class MemoryPlan:
    """What fits."""

    sample_rows: int
    block_rows: int
    groups: int


def plan_memory(
    stream: StreamSettings, shapes: Shapes, log: LazyTransitions, most_rows: int | None = None
) -> MemoryPlan:
    """Shares of the limit. Raises ConfigError where it is too small. most_rows: of a block."""
    free = stream.memory_bytes - _LIBRARIES
    sample = int(_SAMPLE_SHARE * free / (shapes.sample_row_bytes + log.row_bytes))
    wanted = min(len(log), stream.sample_rows or _MOST_SAMPLE_ROWS)
    if sample < min(wanted, stream.sample_rows or _LEAST_SAMPLE_ROWS):
        _refuse(stream, f"a sample of {min(wanted, stream.sample_rows or _LEAST_SAMPLE_ROWS)} rows")
    copies = 2  # the total, and what is added to it; values of workers do not wait in memory
    groups = min(stream.groups, int(_SUMS_SHARE * free / (copies * shapes.group_bytes)))
    if groups < min(stream.groups, _LEAST_GROUPS):
        _refuse(
            stream,
            f"sums of {_LEAST_GROUPS} groups ({copies * _LEAST_GROUPS * shapes.group_bytes / 1e9:.2g} GB)",
        )
    number = 4 if stream.precision == "single" else 8
    rest = min(_BLOCK_SHARE * free, free - copies * groups * shapes.group_bytes)
    rows = int(rest / (shapes.block_row_bytes(number) + log.row_bytes))
    stretches = min(rows, most_rows or _MOST_BLOCK_ROWS) // STRETCH
    if stretches == 0:
        _refuse(stream, f"a block of {STRETCH} rows")
    return MemoryPlan(min(wanted, sample), stretches * STRETCH, groups)


def shapes_of(log: LazyTransitions, settings: EvaluationSettings, draws: int, features: int) -> Shapes:
    """Of an evaluation. features: random ones in place of the networks' last layer, 0 for networks."""
    discrete = isinstance(log.action_space, Discrete)
    inputs = math.prod(log.observation_shape)
    return Shapes(
        inputs=inputs if isinstance(log.action_space, Discrete) else inputs + log.action_space.k,
        outputs=log.action_space.n if isinstance(log.action_space, Discrete) else 1,
        draws=1 if discrete else draws,
        hidden=(features,) if features else settings.hidden_units,
        replicas=1 if features else settings.full_replicas,
        instruments=settings.instruments,
        critics=min(300, settings.instruments) if settings.estimator == "dualdice" else 0,
    )


def _refuse(stream: StreamSettings, what: str) -> None:
    raise ConfigError(
        f"memory is {stream.memory}, too little for {what}; give more, or fewer full_replicas, hidden_units "
        "or instruments"
    )
