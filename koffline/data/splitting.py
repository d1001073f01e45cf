"""Split a log into two parts of whole units: clusters, episodes or rows."""

from __future__ import annotations

import dataclasses
from numbers import Real

import numpy as np
from jaxtyping import Int

from koffline.data.disk.log import LazyTransitions
from koffline.data.hashing import unit_hash
from koffline.data.independence import independent_units
from koffline.data.late_ends import without_late_ends
from koffline.data.sources import LogMapping, LogSource, open_transitions
from koffline.data.spaces import SpaceRequest
from koffline.data.transitions import Transitions
from koffline.data.units import UNITS_STREAM, Part, smallest_units, units_of_shards
from koffline.errors import ConfigError

_HELD_OUT = 0x68656C64
_WHOLE = " (in the whole log)"


def split_transitions(
    log: LogSource,
    held_out: float = 0.3,
    seed: int = 0,
    *,
    mapping: LogMapping = None,
    action_space: SpaceRequest | None = None,
) -> tuple[Transitions, Transitions]:
    """Split a log in two; the second part has the share ``held_out`` of its clusters,
    episodes or rows.

    log, mapping, action_space: as in `koffline.open_transitions`.
    Clusters and episodes stay whole, and what shares copies stays together; those with
    the smallest hashes for the seed are held out. Notes with numbers then say that they
    are about the whole log. Raises ConfigError.
    """
    if not isinstance(log, LazyTransitions):
        log = open_transitions(log, action_space, mapping=mapping)
    is_share = isinstance(held_out, Real) and 0.0 < held_out < 1.0
    if not isinstance(log, Transitions) or not is_share:
        raise ConfigError(
            f"to split is a {type(log).__name__} and a share of {held_out!r}; give a"
            " log in memory and a share between 0 and 1"
        )
    units = independent_units(log)
    notes = tuple(map(_of_whole_log, (*log.metadata.notes, *units.notes)))
    log = log.with_metadata(dataclasses.replace(log.metadata, notes=notes))
    return _divide(log, units.of_row, held_out, seed)


def _of_whole_log(note: str) -> str:
    """A note that says, if it holds numbers, that they are those of the whole log."""
    note = note.removesuffix(_WHOLE)
    if any(map(str.isdigit, note)):
        return note + _WHOLE
    return note


def _divide(
    log: Transitions, unit_of: np.ndarray, share: float, seed: int
) -> tuple[Transitions, Transitions]:
    """The rows that stay, and those of the units that are held out. unit_of: (N,) the
    number of each row's unit.
    """
    is_out = np.isin(unit_of, _held_out_units(int(unit_of.max()) + 1, share, seed))
    return log.select(~is_out), log.select(is_out)


def split_log(
    log: Transitions, held_out: float, seed: int
) -> tuple[Transitions, Transitions | None]:
    """Training and held-out part, without late ends, one episode (row) or more each.

    Raises ConfigError.
    """
    log = without_late_ends(log)
    if held_out == 0.0:
        return (log, None)
    return _divide(log, log.units, held_out, seed)


def split_shards(
    log: LazyTransitions, held_out: float, seed: int
) -> tuple[Part | None, Part | None]:
    """The same split for a log on disk, without removing late ends.

    Raises ConfigError.
    """
    if held_out == 0.0:
        return None, None
    sizes = units_of_shards(log)
    chosen = _held_out_units(sum(sizes), held_out, seed)
    part_seed = seed ^ _HELD_OUT
    held_out_part = Part(
        seed=part_seed,
        largest=int(unit_hash(part_seed ^ UNITS_STREAM, 0, chosen).max()),
        firsts=tuple(np.cumsum([0, *sizes[:-1]]).tolist()),
        held_out=True,
    )
    return dataclasses.replace(held_out_part, held_out=False), held_out_part


def _held_out_units(count: int, share: float, seed: int) -> Int[np.ndarray, " unit"]:
    """Numbers of the units with the smallest hashes, of ``count`` in the log; at least
    one is held out, and one stays.

    Raises ConfigError for a log of one unit.
    """
    if count < 2:
        raise ConfigError(
            f"held_out is {share:g}, the log has one episode or cluster; give more to"
            " split it"
        )
    size = min(max(1, round(share * count)), count - 1)
    return smallest_units([count], size, seed ^ _HELD_OUT)
