"""What is in a log, as one record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from koffline.data.raw import space_to_json
from koffline.data.spaces import ActionSpace
from koffline.data.streaming_summary import LogTally, Spread, tally_log, tally_shard
from koffline.data.transitions import Transitions
from koffline.errors import DataError

if TYPE_CHECKING:
    from koffline.data.disk.log import LazyTransitions
    from koffline.jobs.mapping import PassSettings

__all__ = ["LogSummary", "ShardsSummary", "Spread", "summarise", "summarise_shards"]


@dataclass(frozen=True)
class LogSummary:
    """Rows, episodes, spaces, returns, ends, coverage of the actions, and where it all comes from.

    ``time_limit`` is the length that all cut episodes share and none exceeds. ``action_counts`` (n) is for
    discrete actions, ``action_ranges`` (k) for continuous ones. Returns are undiscounted, of whole episodes
    as logged. ``sha256`` is None where shards were left out.
    """

    source: str | None
    sha256: str | None
    rows: int
    episodes: int
    observation_shape: tuple[int, ...]
    observation_dtype: str
    action_space: ActionSpace
    rewards: Spread
    returns: Spread | None
    lengths: Spread | None
    terminated: int
    truncated: int
    unfinished: int
    time_limit: int | None
    action_counts: tuple[int, ...] | None
    action_ranges: tuple[Spread, ...] | None
    has_log_probabilities: bool
    has_weights: bool
    gamma: float | None
    extra: Mapping[str, Any]
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain values for JSON."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        values["action_space"] = space_to_json(self.action_space)
        for name in ("rewards", "returns", "lengths"):
            values[name] = None if values[name] is None else asdict(values[name])
        if self.action_ranges is not None:
            values["action_ranges"] = [asdict(spread) for spread in self.action_ranges]
        values["extra"] = dict(self.extra)
        return values


@dataclass(frozen=True)
class ShardsSummary:
    """The summary of a log on disk, and which of its shards were left out, each with the reason."""

    summary: LogSummary
    shards: int
    left_out: tuple[str, ...] = ()


def summarise(log: Transitions) -> LogSummary:
    """Look through a log once."""
    return _summary(log, tally_log(log), log.sha256)


def summarise_shards(
    log: LazyTransitions, settings: PassSettings | None = None, progress: bool = False
) -> ShardsSummary:
    """The same of a log on disk, in one pass over its shards; memory does not grow with it.

    settings: where the pass runs, and whether shards that cannot be read are left out; then there is no
    digest of the rows. Raises DataError, also where no shard can be read.
    """
    from koffline.jobs.mapping import PassSettings

    passes = settings or PassSettings()
    names = [shard.name for shard in log.shards]
    found = passes.map(tally_shard, range(len(names)), log, lambda shard: names[shard], progress)
    tally, left_out = LogTally(log.action_space, log.has_episodes), []
    for mapped in found:
        if mapped.failure is None:
            tally.merge(mapped.value)
        else:
            left_out.append(mapped.failure.reason)
    if not tally.rows:
        raise DataError(f"no shard can be read; the first: {left_out[0]}")
    return ShardsSummary(
        _summary(log, tally, None if left_out else log.sha256), len(names) - len(left_out), tuple(left_out)
    )


def _summary(log: Transitions | LazyTransitions, tally: LogTally, sha256: str | None) -> LogSummary:
    lazy_dtype = getattr(log, "observation_dtype", None)
    episodes, counts = tally.episodes, tally.action_counts
    return LogSummary(
        source=log.metadata.source,
        sha256=sha256,
        rows=tally.rows,
        episodes=0 if episodes is None else episodes.lengths.count,
        observation_shape=log.observation_shape,
        observation_dtype=str(lazy_dtype or log.observations.dtype),  # type: ignore[union-attr]
        action_space=log.action_space,
        rewards=tally.rewards.spreads()[0],
        returns=None if episodes is None else episodes.returns.spreads()[0],
        lengths=None if episodes is None else episodes.lengths.spreads()[0],
        terminated=tally.terminated,
        truncated=tally.truncated,
        unfinished=0 if episodes is None else episodes.unfinished,
        time_limit=None if episodes is None else episodes.time_limit,
        action_counts=None if counts is None else tuple(int(count) for count in counts),
        action_ranges=None if tally.actions is None else tally.actions.spreads(),
        has_log_probabilities=_has(log, "log_probabilities", "behavior_log_probabilities"),
        has_weights=_has(log, "weights", "weights"),
        gamma=log.metadata.gamma,
        extra=log.metadata.extra,
        notes=log.metadata.notes,
    )


def _has(log: Transitions | LazyTransitions, what: str, column: str) -> bool:
    if isinstance(log, Transitions):
        return getattr(log, column) is not None
    return bool(getattr(log, f"has_{what}"))
