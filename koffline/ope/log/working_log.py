"""The log as an evaluation uses it: rows held in memory, and sums over all rows.

A log of at most ``sample_rows`` rows is held whole, wherever it is stored. Of a larger
log, a sample of whole units (episodes, or rows without episodes) is held, chosen by
hashes of their numbers. Sums then run over all rows, part by part, in memory or from
disk, in this process or in workers.
"""

from __future__ import annotations

import functools
import hashlib
import operator
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from jaxtyping import Int

from koffline.data.copies import DistinctLog, without_copies
from koffline.data.disk.log import AnyLog, LazyTransitions, in_whole_units
from koffline.data.late_ends import stop_shares, without_late_ends
from koffline.data.transitions import Transitions
from koffline.data.units import UnitSample, sample_units
from koffline.errors import ConfigError
from koffline.fitting import Progress, threads
from koffline.ope.log.problem import EvaluationProblem, Measures, prepare_part
from koffline.ope.stream_settings import (
    SAVED,
    StreamSettings,
    pickled,
    read_sums,
    write_sums,
)
from koffline.policies import Policy

_LIBRARIES = 600_000_000  # bytes of a process without rows
# share of the remaining memory for the rows of a part; derived arrays get the rest
_SHARE = 0.25
SECONDS_BETWEEN_SAVES = 20.0  # in a pass over shards
_DRAWS = 31  # random stream of the actions
_TOGETHER = 1024  # states in which actions are drawn at once
_LEAST_ROWS = 1024
_MOST_ROWS = 1 << 16
# Limits on the records of sums that workers return: each may have 200 MB.
_ROWS_TOGETHER = 1 << 18
_MOST_ITEMS = 256


@dataclass(frozen=True, eq=False)
class LogPart:
    """Whole units of a log, and their numbers (U,) in the log."""

    transitions: Transitions
    units: Int[np.ndarray, " unit"]


RecordOfSums = TypeVar("RecordOfSums", bound="Sums")


class Sums:
    """Base of dataclasses of additive sums over rows: ``+`` adds field by field; None
    stays None.
    """

    def __add__(self: RecordOfSums, other: RecordOfSums) -> RecordOfSums:
        sums = {}
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if value is not None:
                value = value + getattr(other, field.name)
            sums[field.name] = value
        return type(self)(**sums)


@runtime_checkable
class Additive(Protocol):
    """What can be summed over the parts of a log: records, arrays, numbers."""

    def __add__(self, other: Any, /) -> Any:
        """The sum of both."""


S = TypeVar("S", bound=Additive)
Summary = TypeVar("Summary")


@dataclass(frozen=True, eq=False)
class Columns(Sums):
    """Arrays by name, one entry per row or unit, in the order of the log; ``+``
    concatenates.
    """

    parts: tuple[dict[str, np.ndarray], ...]

    def joined(self) -> dict[str, np.ndarray]:
        """Each name's array over all parts."""
        return {
            name: np.concatenate([part[name] for part in self.parts])
            for name in self.parts[0]
        }


@dataclass(frozen=True, eq=False)
class WorkingLog:
    """A log with some rows in memory: all of them (``is_whole``), or a sample of units.

    ``policy_identity``: the policy's name and its answers in some states, by which the
    saved sums of a killed run's pass are found again; empty if none are saved.
    ``stops``: from `stop_shares`; late ends are already removed from the sample.
    """

    log: AnyLog
    sample: UnitSample
    stream: StreamSettings
    progress: Progress | None = None
    policy_identity: bytes = b""
    stops: np.ndarray | None = None

    @property
    def is_whole(self) -> bool:
        """Whether all rows are in memory."""
        return self.sample.is_all

    @cached_property
    def merged(self) -> DistinctLog:
        """The rows in memory, with copies of units merged into weights.

        In a sample of a larger log nothing is merged: other copies of its units may lie
        outside the sample.
        """
        distinct = without_copies(self.sample.transitions)
        if self.is_whole:
            return distinct
        return replace(distinct, transitions=self.sample.transitions)

    @property
    def copies(self) -> tuple[str, ...]:
        """A sentence if copies of units were merged into weights; else empty."""
        if self.is_whole:
            return tuple(self.merged.notes)
        return ()

    @cached_property
    def held(self) -> LogPart:
        """The rows in memory as one part."""
        rows = self.merged.transitions
        if self.is_whole:
            return LogPart(rows, np.arange(len(rows.unit_starts)))
        return LogPart(rows, self.sample.units)

    def fold(self, summarise: Callable[[LogPart], S], row_bytes: int = 0) -> S:
        """Sum ``summarise`` over all parts of the log.

        summarise: must be picklable for workers. row_bytes: memory it needs per row.
        Raises DataError for rows that cannot be read.
        """
        if self.is_whole:
            return summarise(self.held)
        plan = _Pass(
            log=self.log,
            summarise=summarise,
            rows=self.part_rows(row_bytes),
            threads=torch.get_num_threads(),
            stops=self.stops,
        )
        if isinstance(self.log, Transitions):
            return _sum_of_shards(plan, (0,))
        total = self._fold_shards(self.log, plan)
        assert total is not None, "a log has at least one shard"
        return total

    def _fold_shards(self, log: LazyTransitions, plan: _Pass[S]) -> S | None:
        """Sum over shards; resume from saved sums of the same pass, and save the sums
        from time to time.
        """
        names = [shard.name for shard in log.shards]

        def name_of(item: tuple[int, ...]) -> str:
            """The first and the last shard's name; one name of a single shard."""
            return " … ".join(dict.fromkeys((names[item[0]], names[item[-1]])))

        items = _items(log)
        saved = self._file_of_saved_sums(log, plan, items)
        already_summed = 0
        total: S | None = None
        if saved is not None:
            already_summed, total = read_sums(saved)
        sums_of_items = self.stream.map(
            _sum_of_shards,
            items[already_summed:],
            plan,
            name=name_of,
            progress=self._report,
        )
        last_save = time.monotonic()
        for done, sums in enumerate(sums_of_items, start=already_summed + 1):
            if total is None:
                total = sums
            else:
                total = total + sums
            is_due = time.monotonic() - last_save >= SECONDS_BETWEEN_SAVES
            if saved is not None and is_due:
                write_sums(saved, (done, total))
                last_save = time.monotonic()
        return total

    def _file_of_saved_sums(
        self, log: LazyTransitions, plan: _Pass[S], items: list[tuple[int, ...]]
    ) -> Path | None:
        """File of this pass's saved sums, None if they are not saved; its name is a
        digest of everything that determines them.

        items: numbers of the shards that are summed together. Where late ends are left
        out follows from the log.
        """
        if self.stream.partial is None:
            return None
        names = [shard.name for shard in log.shards]
        try:
            states = [os.stat(name) for name in names]
            files = [
                (name, state.st_size, state.st_mtime_ns)
                for name, state in zip(names, states, strict=True)
            ]
        except OSError:  # storage elsewhere
            if log.metadata.sha256 is None:
                return None
            files = []
        rows = (log.metadata.sha256, names, files, items, plan.rows)
        everything = (rows, self.policy_identity, plan.summarise)
        digest = hashlib.sha256(pickled(everything)).hexdigest()
        return Path(self.stream.partial) / f"{digest[:32]}{SAVED}"

    def part_rows(self, row_bytes: int) -> int:
        """Rows per part that fit a share of the memory.

        Raises ConfigError if the memory is too small.
        """
        log_bytes = self.sample.transitions.row_bytes
        free = _SHARE * (self.stream.memory_bytes - _LIBRARIES)
        rows = int(free / (3 * log_bytes + row_bytes))
        if rows < _LEAST_ROWS:
            needed = _LIBRARIES + _LEAST_ROWS * (3 * log_bytes + row_bytes) / _SHARE
            raise ConfigError(
                f"memory is {self.stream.memory}, this evaluation needs at least"
                f" {needed / 1e6:.0f}MB; give that, or fewer replicas, hidden_units or"
                " action_draws"
            )
        return min(rows, _MOST_ROWS)

    def _report(self, done: int, total: int, _: object) -> None:
        if self.progress is not None:
            self.progress(done, total, "reading shards")


def in_problem(
    summarise: Callable[[EvaluationProblem], Summary],
    measures: Measures,
    policy: Policy,
    gamma: float,
    action_draws: int,
    seed: int,
    longest: int,
    part: LogPart,
) -> Summary:
    """Apply ``summarise`` to a part of the log, prepared as a problem with the
    ``measures`` of the whole log.

    action_draws: draws of a stochastic continuous policy's actions in each state.
    seed: of these draws. longest: rows of the log's longest unit.
    """
    draws = None
    if not getattr(policy, "deterministic", True):
        draws = _DrawsOfPart(policy, action_draws, seed, longest, part)
    problem = prepare_part(
        part.transitions, policy, gamma, measures, draws, numbers=part.units
    )
    return summarise(problem)


@dataclass(frozen=True, eq=False)
class _DrawsOfPart:
    """Draws of a policy's actions in a part of a log that do not depend on how the log
    is split (`koffline.ope.log.problem.ActionDraws`).

    ``count``: draws in each state. ``longest``: rows of the log's longest unit.
    """

    policy: Policy
    count: int
    seed: int
    longest: int
    part: LogPart

    def in_next_states(self, states: np.ndarray) -> np.ndarray:
        """Actions (N, count, k) in the next states (N, ...) of the part's rows."""
        log = self.part.transitions
        if not log.has_episodes:
            return self._draw(states, np.ones_like(self.part.units), 1, stream=0)
        return self._draw(states, log.episode_lengths, self.longest, stream=1)

    def in_start_states(self, states: np.ndarray) -> np.ndarray:
        """Actions (U, count, k) in the start states (U, ...) of the part's units."""
        return self._draw(states, np.ones_like(self.part.units), 1, stream=0)

    def _draw(
        self, states: np.ndarray, lengths: np.ndarray, longest: int, stream: int
    ) -> np.ndarray:
        """Actions (N, count, k) in states (N, ...), drawn for a group of units at once.

        A policy draws an action from the noise of its place in the batch, and products
        of matrices round by the batch's size. So that an action depends on the state's
        place in the log alone, not on the part that is being read, the units whose
        numbers in the log lie in one range form a group with a generator of its own,
        and the policy is asked about a batch of the group's full size: ``longest``
        places for each unit. Places that hold no state of this part are padded with a
        state of the group, and what is drawn there is dropped.

        lengths (U,): states of each unit. longest: places of a unit. stream: number of
        the random stream.
        """
        units_of_group = max(1, _TOGETHER // longest)
        firsts = np.cumsum(lengths) - lengths
        steps = np.arange(len(states)) - np.repeat(firsts, lengths)
        unit_of_state = np.repeat(self.part.units, lengths)
        groups, place_in_group = np.divmod(unit_of_state, units_of_group)
        group_starts = np.flatnonzero(np.diff(groups)) + 1
        actions_of_groups = []
        for rows in np.split(np.arange(len(states)), group_starts):
            if units_of_group > 1:
                size = units_of_group * longest
            else:
                size = len(rows)  # a unit of many rows; it is never divided
            places = place_in_group[rows] * longest + steps[rows]
            padding = states[rows[:1]]
            batch = np.repeat(padding, size, axis=0)
            batch[places] = states[rows]
            generator = np.random.default_rng(
                [self.seed, _DRAWS, stream, groups[rows[0]]]
            )
            repeated = np.concatenate([batch] * self.count)
            actions = self.policy.sample(repeated, generator)
            by_draw = actions.reshape(self.count, size, -1)[:, places]
            actions_of_groups.append(by_draw.swapaxes(0, 1))
        return np.concatenate(actions_of_groups)


def hold(
    log: AnyLog,
    sample_rows: int,
    seed: int,
    stream: StreamSettings | None = None,
    progress: Progress | None = None,
) -> WorkingLog:
    """Read the log, or a sample of whole units with about ``sample_rows`` rows.

    Raises DataError.
    """
    stream = stream or StreamSettings()
    sample = sample_units(log, sample_rows, seed, settings=stream)
    stops = stop_shares(sample.transitions)
    if stops is not None:
        rows = without_late_ends(sample.transitions, sample.units, stops)
        if len(rows) < len(sample.transitions):
            noted = log.metadata.with_notes(rows.metadata.notes[-1])
            if isinstance(log, Transitions):
                log = log.with_metadata(noted)
            else:
                log = replace(log, metadata=noted)
        sample = replace(sample, transitions=rows)
    return WorkingLog(log, sample, stream, progress, stops=stops)


@dataclass(frozen=True, eq=False)
class _Pass(Generic[S]):
    """Input of every worker: the log (or its paths) and the summary of its parts.

    ``rows``: of a part. ``threads``: of torch in the worker. ``stops``: as in
    `WorkingLog`.
    """

    log: AnyLog
    summarise: Callable[[LogPart], S]
    rows: int
    threads: int
    stops: np.ndarray | None

    def parts(self, shards: tuple[int, ...]) -> Iterator[LogPart]:
        """Parts of about ``rows`` rows at most, without late ends; a log in memory
        counts as one shard.
        """
        for part in self._parts(shards):
            rows = part.transitions
            if self.stops is not None:
                rows = without_late_ends(rows, part.units, self.stops)
            yield LogPart(rows, part.units)

    def _parts(self, shards: tuple[int, ...]) -> Iterator[LogPart]:
        if isinstance(self.log, Transitions):
            yield from _parts_in_memory(self.log, self.rows)
            return
        if self.log.has_episodes:
            units_of_shards = [shard.episodes for shard in self.log.shards]
        else:
            units_of_shards = [shard.rows for shard in self.log.shards]
        for number in shards:
            units_before = sum(units_of_shards[:number])
            for block in in_whole_units(self.log.shard_blocks(number, self.rows)):
                part = Transitions.of_checked(block.columns, self.log.action_space)
                yield LogPart(part, units_before + np.unique(block.units))


@torch.no_grad()
def _sum_of_shards(plan: _Pass[S], shards: tuple[int, ...]) -> S:
    with threads(plan.threads):
        return functools.reduce(operator.add, map(plan.summarise, plan.parts(shards)))


def _items(log: LazyTransitions) -> list[tuple[int, ...]]:
    """Groups of shards that are summed together: sums can take more memory than the
    rows of a small shard.
    """
    most = max(_ROWS_TOGETHER, -(-len(log) // _MOST_ITEMS))
    items: list[list[int]] = []
    rows = most
    for number, shard in enumerate(log.shards):
        if rows + shard.rows > most:
            items.append([])
            rows = 0
        items[-1].append(number)
        rows += shard.rows
    return [tuple(item) for item in items]


def _parts_in_memory(log: Transitions, rows: int) -> Iterator[LogPart]:
    ends = np.append(log.unit_starts[1:], len(log))
    stretch = (ends - 1) // rows  # in which a unit ends
    for units in np.split(np.arange(len(ends)), np.flatnonzero(np.diff(stretch)) + 1):
        rows_of_part = slice(int(log.unit_starts[units[0]]), int(ends[units[-1]]))
        columns = {name: column[rows_of_part] for name, column in log.columns.items()}
        yield LogPart(Transitions.of_checked(columns, log.action_space), units)
