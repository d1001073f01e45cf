"""Sums along episodes that are read in blocks: what is open at the end of a block goes on in the next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from koffline.data.row_block import RowBlock


@dataclass(frozen=True, eq=False)
class EndedEpisodes:
    """Episodes (E,) that are whole: their numbers in the shard, lengths, and sums over their rows.

    ``returns``: discounted. ``log_weights``: of the whole episode, 0 where nothing is weighed.
    ``cut``: the world had not ended. ``shares``: the log's weight of the episode's last row.
    """

    units: Int[np.ndarray, " episode"]
    lengths: Int[np.ndarray, " episode"]
    returns: Float[np.ndarray, " episode"]
    log_weights: Float[np.ndarray, " episode"]
    cut: np.ndarray
    shares: Float[np.ndarray, " episode"]


@dataclass(frozen=True, eq=False)
class EpisodeRows:
    """A block's rows with what came before them: ``log_weights`` (B,) are cumulative, ``log_ratios`` not.

    ``ended``: episodes that ended before the last row of the block, or with the block before it.
    """

    log_ratios: Float[np.ndarray, " row"]
    log_weights: Float[np.ndarray, " row"]
    shares: Float[np.ndarray, " row"]
    ended: EndedEpisodes


_SUMS = ("returns", "log_weights", "never")


class EpisodeReader:
    """Reads the blocks of one shard in order; ``flush`` gives the episode that the shard ends with.

    Each row adds γ^step r to its episode's return and its log ratio to its log weight, where −∞ is kept
    apart: what the policy never does makes all that follows impossible.
    """

    def __init__(self, gamma: float) -> None:
        self._gamma = gamma
        self._open: dict[str, float] | None = None

    def read(
        self, block: RowBlock, log_ratios: np.ndarray | None = None, shares: np.ndarray | None = None
    ) -> EpisodeRows:
        """The next block; log_ratios (B,): log π/β of its actions. shares (B,): weights of its rows."""
        steps = block.steps if block.steps is not None else np.zeros(len(block), dtype=np.int64)
        logs = np.zeros(len(block)) if log_ratios is None else log_ratios
        shares = np.ones(len(block)) if shares is None else shares
        never = logs == -np.inf
        rewards = np.asarray(block.rewards, dtype=np.float64)
        rows = {
            "returns": rewards * self._gamma**steps,
            "log_weights": np.where(never, 0.0, logs),
            "never": never.astype(np.float64),
        }
        starts = np.flatnonzero(np.diff(block.units, prepend=-1))
        goes_on = self._open is not None and self._open["unit"] == block.units[0]
        before = NO_EPISODES if goes_on else self.flush()
        carried = self._open if goes_on and self._open is not None else dict.fromkeys(_SUMS, 0.0)
        sums = {name: _running(values, starts, carried[name]) for name, values in rows.items()}
        last = np.append(starts[1:], len(block)) - 1  # last rows of the episodes in this block
        at = {
            **{name: values[last] for name, values in sums.items()},
            "unit": block.units[last],
            "length": steps[last] + 1,
            "cut": ~block.terminated[last],
            "share": shares[last],
        }
        self._open = {name: float(values[-1]) for name, values in at.items()}
        whole = _ended({name: values[:-1] for name, values in at.items()})
        log_weights = np.where(sums["never"] > 0.0, -np.inf, sums["log_weights"])
        return EpisodeRows(logs, log_weights, shares, _joined(before, whole))

    def flush(self) -> EndedEpisodes:
        """The episode that is open, which is whole then; none at the beginning."""
        if self._open is None:
            return NO_EPISODES
        found, self._open = self._open, None
        return _ended({name: np.array([value]) for name, value in found.items()})


def _running(values: np.ndarray, starts: np.ndarray, carried: float) -> np.ndarray:
    """Cumulative sums that begin again at each start; the first goes on from what was carried."""
    total = np.cumsum(values)
    before = np.where(starts > 0, total[starts - 1], -carried)
    return np.asarray(total - np.repeat(before, np.diff(np.append(starts, len(values)))))


def _ended(at: Mapping[str, np.ndarray]) -> EndedEpisodes:
    return EndedEpisodes(
        units=at["unit"].astype(np.int64),
        lengths=at["length"].astype(np.int64),
        returns=at["returns"],
        log_weights=np.where(at["never"] > 0.0, -np.inf, at["log_weights"]),
        cut=at["cut"].astype(np.bool_),
        shares=at["share"],
    )


def _joined(first: EndedEpisodes, second: EndedEpisodes) -> EndedEpisodes:
    if not len(first.units):
        return second
    return EndedEpisodes(
        *(
            np.concatenate([getattr(first, name), getattr(second, name)])
            for name in ("units", "lengths", "returns", "log_weights", "cut", "shares")
        )
    )


NO_EPISODES = _ended(dict.fromkeys((*_SUMS, "unit", "length", "cut", "share"), np.zeros(0)))
