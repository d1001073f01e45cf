"""How a memory limit is shared out: rows of the sample, rows of a block, groups of the sums.

The sample is gone before the pass begins, so each of the two may have all that the libraries leave. What a
row or a group costs is counted from shapes alone: the same settings give the same numbers on any machine.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass

from koffline.config import EvaluationSettings
from koffline.data.disk.log import LazyTransitions
from koffline.data.spaces import Discrete
from koffline.errors import ConfigError
from koffline.ope.problem import START_DRAWS
from koffline.ope.streaming.columns import STRETCH
from koffline.ope.streaming.settings import StreamSettings

# What the process holds before any row is read, with what its allocator keeps between phases; and with the
# libraries of the report.
_LIBRARIES = 450_000_000
_MEDIAN = 50_000_000  # distances whose median is the kernel's bandwidth
_SUMS_SHARE = 0.5  # of what is left during the pass
_MARGIN = 1.1  # of everything that is counted
_MOST_SAMPLE_ROWS = 200_000
_LEAST_SAMPLE_ROWS = 2_000
_MOST_STARTS = 10_000
_LEAST_STARTS = 200
_KEPT_ROWS = 20_000
_MOST_BLOCK_ROWS = 32 * STRETCH
_LEAST_GROUPS = 10
_SOLVING = 8  # groups' worth of arrays while sums are solved
_MOST_NUMBERS = 1 << 20  # in one array, where the networks are asked about the sample
_STEP = 10_000_000  # limits that are asked for are multiples of it


@dataclass(frozen=True)
class Shapes:
    """Sizes that decide what a row and a group cost: d inputs, draws of the next action, p, m, k and R.

    ``discrete``: actions are read out by one-hot rows beside the inputs. ``starts``: how many start states
    there are; ``given_starts``: they are held in memory, whatever they take. ``all_start``: every row of the
    log is one. ``learned``: networks are trained.
    """

    inputs: int
    outputs: int
    draws: int
    hidden: tuple[int, ...]
    replicas: int
    instruments: int
    critics: int = 0
    discrete: bool = True
    starts: int = _MOST_STARTS
    given_starts: bool = False
    all_start: bool = False
    learned: bool = True

    @property
    def parameters(self) -> int:
        """p."""
        return (self.hidden[-1] + 1) * self.outputs

    @property
    def problem_row_bytes(self) -> int:
        """Of a row of an evaluation problem: standardised inputs, draws and readouts in double."""
        readouts = 3 * self.outputs + self.inputs if self.discrete else 0
        return 8 * (self.inputs * (1 + self.draws) + readouts + 6)

    @property
    def sample_row_bytes(self) -> int:
        """Of a row while networks are trained: as drawn, standardised, in single for training; counts."""
        return 2 * self.problem_row_bytes + 16 * self.inputs + 24 * self.replicas + 64

    @property
    def start_row_bytes(self) -> int:
        """Of a start state with its draws."""
        return 8 * self.inputs * (1 + 2 * self.draws) + 8 * self.outputs

    @property
    def group_bytes(self) -> int:
        """Of the sums of one group."""
        p = self.parameters
        return 8 * (self.replicas * (self.instruments + 2 * p + 2) * (p + 1) + self.critics**2)

    def block_row_bytes(self, number: int) -> int:
        """Of a row of a block with its temporary arrays; ``number``: bytes of one number."""
        networks = self.replicas * (1 + self.draws) * 2 * (max(self.hidden) + self.hidden[-1])
        features = self.replicas * 5 * (self.parameters + 1)
        starts = (8 + number) * self.replicas * self.parameters if self.all_start else 0
        columns = 8 * 6 * self.inputs * (1 + self.draws)
        return number * (2 * self.instruments + networks + features) + columns + starts

    @property
    def evidence_bytes(self) -> int:
        """While the networks are asked about rows of the sample, after the pass."""
        if not self.learned:
            return 0
        rows = 4096 * self.replicas * self.draws * max(self.hidden)
        return 20 * min(rows, _MOST_NUMBERS) + _KEPT_ROWS * self.problem_row_bytes // 2


@dataclass(frozen=True)
class MemoryPlan:
    """What fits: rows of the sample and of a block, start states, groups."""

    sample_rows: int
    block_rows: int
    groups: int
    starts: int = _MOST_STARTS


def plan_memory(
    stream: StreamSettings, shapes: Shapes, log: LazyTransitions, most_rows: int | None = None
) -> MemoryPlan:
    """Shares of the limit. Raises ConfigError with the smallest sufficient one. most_rows: of a block."""
    costs = _Costs(stream, shapes, log, most_rows or _MOST_BLOCK_ROWS)
    if stream.memory_bytes < costs.least_limit:
        raise ConfigError(
            f"memory is {stream.memory}, this evaluation needs at least {costs.least_limit // 10**6}MB "
            f"({_LIBRARIES // 10**6}MB for libraries); give that, or fewer full_replicas, hidden_units, "
            "instruments or sample_rows"
        )
    free = (stream.memory_bytes - _LIBRARIES) / _MARGIN
    starts = costs.starts_within(0.25 * (free - costs.training(costs.least_sample, costs.least_starts)))
    sample = min(costs.wanted_sample, int((free - costs.training(0, starts)) / costs.sample_row))
    left = free - costs.kept(sample, starts)
    groups = stream.groups
    while groups > costs.least_groups and costs.sums(groups) > max(
        _SUMS_SHARE * left, costs.sums(costs.least_groups)
    ):
        groups -= 1
    stretches = min(int((left - costs.sums(groups)) / costs.block_row), costs.most_block) // STRETCH
    return MemoryPlan(sample, max(1, stretches) * STRETCH, groups, starts)


@dataclass(frozen=True)
class _Costs:
    """Bytes of each phase beyond the libraries."""

    stream: StreamSettings
    shapes: Shapes
    log: LazyTransitions
    most_block: int

    @property
    def wanted_sample(self) -> int:
        """Rows, if memory were no matter."""
        return min(len(self.log), self.stream.sample_rows or _MOST_SAMPLE_ROWS)

    @property
    def least_sample(self) -> int:
        """Rows, at least: what was asked for, some thousand, or all of a small log."""
        return min(len(self.log), self.stream.sample_rows or _LEAST_SAMPLE_ROWS)

    @property
    def least_starts(self) -> int:
        """Start states, at least."""
        return self.shapes.starts if self.shapes.given_starts else min(self.shapes.starts, _LEAST_STARTS)

    @property
    def least_groups(self) -> int:
        """Groups, at least."""
        return min(self.stream.groups, _LEAST_GROUPS)

    @property
    def sample_row(self) -> float:
        """Of a row of the sample."""
        return self.shapes.sample_row_bytes + 1.5 * self.log.row_bytes

    @property
    def block_row(self) -> int:
        """Of a row of a block."""
        number = 4 if self.stream.precision == "single" else 8
        return self.shapes.block_row_bytes(number) + 3 * self.log.row_bytes

    def starts_within(self, size: float) -> int:
        """Start states that fit beside the least sample: as many as there are, where they are given."""
        more = max(0, int(size / self.shapes.start_row_bytes))
        most = self.shapes.starts if self.shapes.given_starts else min(self.shapes.starts, _MOST_STARTS)
        return min(most, self.least_starts + more)

    def training(self, rows: int, starts: int) -> float:
        """While networks are trained on so many rows."""
        return _MEDIAN + rows * self.sample_row + self._starts(starts)

    def kept(self, rows: int, starts: int) -> float:
        """Of the sample, during the pass."""
        return min(rows, _KEPT_ROWS) * self.shapes.problem_row_bytes + self._starts(starts)

    def sums(self, groups: int) -> int:
        """The total and what is added to it; or the total, and what solves it."""
        return max(2 * groups, groups + _SOLVING) * self.shapes.group_bytes

    @property
    def least_limit(self) -> int:
        """The smallest limit that is enough."""
        rows, starts, groups = self.least_sample, self.least_starts, self.least_groups
        block = self.block_row * min(STRETCH, max(shard.rows for shard in self.log.shards))
        answer = groups * self.shapes.group_bytes + self.shapes.evidence_bytes
        passing = self.kept(rows, starts) + max(self.sums(groups) + block, answer)
        needed = _LIBRARIES + _MARGIN * max(self.training(rows, starts), passing)
        return math.ceil(needed / _STEP) * _STEP

    def _starts(self, starts: int) -> float:
        """Few start states of a policy that draws have many draws each."""
        drawn = START_DRAWS if self.shapes.draws > 1 else 0
        return float(max(starts * self.shapes.start_row_bytes, 16 * self.shapes.inputs * drawn))


def shapes_of(
    log: LazyTransitions, settings: EvaluationSettings, draws: int, learned: bool, given_starts: int | None
) -> Shapes:
    """Of an evaluation. learned: by networks, else random features. given_starts: how many, from outside."""
    discrete = isinstance(log.action_space, Discrete)
    inputs = math.prod(log.observation_shape)
    return Shapes(
        inputs=inputs if isinstance(log.action_space, Discrete) else inputs + log.action_space.k,
        outputs=log.action_space.n if isinstance(log.action_space, Discrete) else 1,
        draws=1 if discrete else draws,
        hidden=settings.hidden_units if learned else (settings.features,),
        replicas=settings.full_replicas if learned else 1,
        instruments=settings.instruments,
        critics=min(300, settings.instruments) if settings.estimator == "dualdice" else 0,
        discrete=discrete,
        starts=(log.n_episodes or len(log)) if given_starts is None else given_starts,
        given_starts=given_starts is not None,
        all_start=given_starts is None and not log.has_episodes,
        learned=learned,
    )


def release_memory() -> None:
    """Give what the allocator keeps of freed arrays back to the system, where its library can (glibc)."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return
    trim(0)
