"""The one pass over a log: sums per stretch of shards, added up in their order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from koffline.data.row_block import RowBlock
from koffline.errors import DataError
from koffline.fitting import threads
from koffline.jobs.mapping import PassSettings
from koffline.jobs.status import JobStatus
from koffline.ope.importance.ratios import action_log_probabilities
from koffline.ope.streaming.columns import make_columns, row_weights
from koffline.ope.streaming.episodes import NO_EPISODES, EpisodeReader, EpisodeRows
from koffline.ope.streaming.facts import LogFacts, Spread
from koffline.ope.streaming.frame import Frame
from koffline.ope.streaming.moments import StreamingMoments
from koffline.ope.streaming.weighing import EpisodeSums
from koffline.stacked_products import Workspace

if TYPE_CHECKING:
    from koffline.data.disk.log import LazyTransitions

# Small shards are summed together: a record of sums may be larger than the rows of one.
_ROWS_TOGETHER = 1 << 18
# Records of sums that travel in a pass with workers: each may have 200 MB.
_MOST_STRETCHES = 256


@dataclass(frozen=True, eq=False)
class PassPlan:
    """What every worker receives: the log (paths alone), how rows are seen, and in which blocks."""

    log: LazyTransitions
    frame: Frame
    block_rows: int
    threads: int = 1


@dataclass(frozen=True, eq=False)
class PassSums:
    """What is left of the rows: moments, or sums over episodes. ``skipped``: why shards were left out."""

    moments: StreamingMoments | None
    facts: LogFacts
    episodes: EpisodeSums | None
    skipped: tuple[str, ...] = ()


def sum_over_log(
    plan: PassPlan, settings: PassSettings, progress: Callable[[JobStatus], None] | None = None
) -> PassSums:
    """Sums over all shards; the same numbers wherever they are computed.

    Raises DataError for rows that cannot be read, unless the settings leave such shards out.
    """
    items = shard_stretches(plan.log, settings.skip_bad_shards)
    names = [shard.name for shard in plan.log.shards]

    def name(item: tuple[int, ...]) -> str:
        return names[item[0]] if len(item) == 1 else f"{names[item[0]]} … {names[item[-1]]}"

    found, skipped = None, []
    for mapped in settings.map(sum_over_shards, items, plan, name=name, progress=progress):
        if mapped.failure is not None:
            skipped.append(mapped.failure.reason)
        elif found is None:
            found = mapped.value
        else:
            found = _added(found, mapped.value)
        del mapped  # else two records beside the total while the next one is made
    if found is None:
        raise DataError(f"no shard can be read: {skipped[0]}")
    return PassSums(found.moments, found.facts, found.episodes, tuple(skipped))


def shard_stretches(log: LazyTransitions, one_by_one: bool = False) -> list[tuple[int, ...]]:
    """Numbers of shards to be summed together: as many as have some hundred thousand rows."""
    items: list[list[int]] = []
    most = max(_ROWS_TOGETHER, -(-len(log) // _MOST_STRETCHES))
    rows = most
    for number, shard in enumerate(log.shards):
        if one_by_one or rows + shard.rows > most:
            items.append([])
            rows = 0
        items[-1].append(number)
        rows += shard.rows
    return [tuple(item) for item in items]


@torch.no_grad()
def sum_over_shards(plan: PassPlan, shards: tuple[int, ...]) -> PassSums:
    """Sums over the rows of some shards, block by block."""
    frame = plan.frame
    facts = LogFacts()
    moments = None if frame.ratios else StreamingMoments.zeros(frame)
    episodes = EpisodeSums.zeros(frame.groups) if frame.ratios else None
    workspace = Workspace()
    with threads(plan.threads):
        for shard in shards:
            reader, last = EpisodeReader(frame.gamma), None
            for block in plan.log.shard_blocks(shard, plan.block_rows):
                rows = _read(frame, reader, block)
                facts += LogFacts.of(block, rows.ended)
                if episodes is not None:
                    episodes.add(frame, block, rows)
                if moments is not None:
                    moments.add(make_columns(frame, block, workspace))
                last = block
            if last is not None and last.steps is not None:
                ended = reader.flush()
                longest = int(ended.lengths.max(initial=0))
                facts += LogFacts(
                    longest_episode=longest,
                    returns=Spread.of(ended.returns),
                    weights=Spread.of(ended.shares),
                )
                if episodes is not None:
                    episodes.add_ended(frame, shard, ended)
    return PassSums(moments, facts, episodes)


def _read(frame: Frame, reader: EpisodeReader, block: RowBlock) -> EpisodeRows:
    """The block as parts of episodes; a log without episodes has none that end."""
    if block.steps is None:
        nothing = np.zeros(len(block))
        return EpisodeRows(nothing, nothing, nothing, NO_EPISODES)
    ratios = None
    if frame.ratios:
        taken = action_log_probabilities(block, frame.policy)
        ratios = taken - np.asarray(block.behavior_log_probabilities, dtype=np.float64)
    return reader.read(block, ratios, row_weights(frame, block))


def _added(first: PassSums, second: PassSums) -> PassSums:
    """The first record with the second's numbers added to it, in place where it is large."""
    if first.moments is not None and second.moments is not None:
        first.moments.add_sums(second.moments)
    if first.episodes is not None and second.episodes is not None:
        first.episodes.add_sums(second.episodes)
    return PassSums(first.moments, first.facts + second.facts, first.episodes)
