"""What a user holds in Python as a log: a frame, a dict of arrays, a buffer of d3rlpy,
a Minari dataset, a list of episodes.

`read_object` is the one place that knows these kinds; `koffline.open_transitions` calls
it for everything that is no path. Libraries that make such objects are never imported
here: an object of theirs shows that they are there.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from koffline.data.array_labels import OF_ARRAYS, with_labels
from koffline.data.episode_lists import is_episode_list, read_episode_list
from koffline.data.flat import REQUIRED, read_arrays, used_keys
from koffline.data.minari import read_minari
from koffline.data.raw import RawLog, settle_space, shaped_actions
from koffline.data.spaces import SpaceRequest
from koffline.data.transitions import no_log
from koffline.errors import DataError

ARRAYS = "the dict of arrays"


def read_object(
    source: Any, action_space: SpaceRequest | None = None, mapping: Any = None
) -> RawLog:
    """A log from an object in memory, with unchecked values.

    mapping: what the columns of a frame, or of a dict of arrays, are; of the others
    only ``encode`` applies. Raises DataError.
    """
    # imported here, because they load polars, d3rlpy and torch
    from koffline.data.table.held import held_columns, held_frame
    from koffline.data.table.reading import read_table

    table = held_frame(source)
    if table is not None:
        return read_table(table, mapping, action_space)
    if isinstance(source, Mapping):
        if is_of_arrays(mapping) and _has_own_keys(source, mapping):
            log = read_arrays(source, ARRAYS, action_space, _is_one_step(mapping))
            return _encoded(log, mapping, ARRAYS)
        return read_table(held_columns(source, ARRAYS), mapping, action_space)
    if is_instance_of_loaded("d3rlpy.dataset", "ReplayBufferBase", source):
        from koffline.data.replay import from_d3rlpy

        name = "the replay buffer"
        transitions = from_d3rlpy(source)
        log = RawLog(
            transitions.columns, transitions.action_space, transitions.metadata
        )
        log = _declared_anew(log, action_space, name)
    elif is_instance_of_loaded("minari", "MinariDataset", source):
        name = "the Minari dataset"
        folder = Path(source.storage.data_path)
        numbers = [int(number) for number in source.episode_indices]
        log = read_minari(folder, f"minari:{source.id}", action_space, numbers)
    elif is_episode_list(source):
        name = "the list of episodes"
        log = read_episode_list(source, action_space)
    else:
        raise no_log(source)
    if not is_of_arrays(mapping) or _is_one_step(mapping):
        raise DataError(
            f"{name} says itself what its arrays are; a mapping is for frames and dicts"
            " of arrays, leave it out"
        )
    return _encoded(log, mapping, name)


def is_of_arrays(mapping: Any) -> bool:
    """Whether a mapping has only what arrays understand, which says no roles of
    columns.
    """
    if mapping is None:
        return True
    if not isinstance(mapping, Mapping) or not mapping:
        return False
    return OF_ARRAYS.issuperset(mapping) and mapping.get("one_step", True) is True


def is_instance_of_loaded(module: str, name: str, value: object) -> bool:
    """isinstance with the class ``module.name`` of a heavy library, without importing
    it; False if it is not imported yet.
    """
    loaded = sys.modules.get(module)
    return loaded is not None and isinstance(value, getattr(loaded, name))


def _is_one_step(mapping: Any) -> bool:
    return mapping is not None and "one_step" in mapping


def _has_own_keys(arrays: Mapping[str, Any], mapping: Any) -> bool:
    """Whether the keys of a dict say what its arrays are, or some do and no mapping
    says more.
    """
    keys = used_keys(map(str, arrays))
    needed = set(REQUIRED)
    if _is_one_step(mapping):
        needed -= {"terminated"}
    if needed <= keys.keys():
        return True
    # the refusal then says which keys are missing
    return "observations" in keys and np.ndim(arrays[keys["observations"]]) > 1


def _encoded(log: RawLog, mapping: Any, name: str) -> RawLog:
    """The log with the labels that a mapping declares as ``encode``."""
    if mapping is None or "encode" not in mapping:
        return log
    return with_labels(log, mapping["encode"], name)


def _declared_anew(log: RawLog, action_space: SpaceRequest | None, name: str) -> RawLog:
    """The log with the requested action space, if any."""
    if action_space is None:
        return log
    actions = np.asarray(log.columns["actions"])
    space, notes = settle_space(actions, action_space, log.action_space, name)
    columns = {**log.columns, "actions": shaped_actions(actions, space)}
    metadata = replace(log.metadata, notes=(*log.metadata.notes, *notes))
    return RawLog(columns, space, metadata)
