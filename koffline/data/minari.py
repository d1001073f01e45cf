"""Minari datasets, read and written without an environment; no last step is lost.

An episode of T steps has T + 1 observations, so a step cut by a time limit keeps its
next observation. A dataset is a folder with ``data/metadata.json`` and the episodes
beside it (``data/main_data.hdf5``). Gymnasium and Minari are only imported when needed,
because most logs do not use them.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from koffline.data import raw
from koffline.data.kinds import METADATA, OWN_FILES, data_folder
from koffline.data.labels import MOST_LABELS, Part, make_layout
from koffline.data.spaces import (
    ActionSpace,
    Continuous,
    Discrete,
    Features,
    SpaceRequest,
)
from koffline.data.transitions import Metadata, Transitions
from koffline.errors import DataError
from koffline.store.files import atomic_folder, reading
from koffline.untrusted.hdf5 import CheckedFile, h5py_that_keeps_errors, open_hdf5
from koffline.untrusted.limits import (
    Refused,
    check_inside,
    one_line_errors,
    parse_json,
    read_json,
)

# Our key in metadata.json, and in the infos of episodes.
_DESCRIPTION = "koffline"
# Paths of the columns in the group of an episode.
_KEYS = {
    "actions": "actions",
    "rewards": "rewards",
    "terminated": "terminations",
    "truncated": "truncations",
}
_INFO_COLUMNS = ("behavior_log_probabilities", "weights", "clusters")
# Largest number of elements in one observation or action: a thousand Atari frames.
LARGEST_BOX = 2**24


def read_minari(
    folder: Path, source: str, action_space: SpaceRequest | None = None
) -> raw.RawLog:
    """Read a dataset from its folder. Raises DataError."""
    from gymnasium import spaces

    data = data_folder(folder)
    if data is None:
        said = (
            f"{source} holds no Minari dataset (no {METADATA}) and no shards (no"
            " manifest.json)"
        )
        raise DataError(f"{said}; give the folder of a dataset")
    with reading(source, "Minari"):
        check_inside(data, data / METADATA)
        described_by = read_json(data / METADATA)
        if not isinstance(described_by, dict) or "data_format" not in described_by:
            raise DataError(
                f"{source} holds no Minari dataset ({METADATA} names no data_format)"
            )
        if described_by["data_format"] != "hdf5":
            said = (
                f"{source} has Minari format {described_by['data_format']!r}, known is"
                " hdf5"
            )
            raise DataError(f"{said}; create it again with data_format='hdf5'")
        seen = _stored_space(described_by, "observation_space", source)
        acted = _stored_space(described_by, "action_space", source)
        ours = described_by.get(_DESCRIPTION)
        described = raw.read_description(ours if isinstance(ours, str) else None)
        described = described or raw.FileDescription(
            _declared(acted), metadata=_metadata_of(described_by)
        )
        parts = _parts(seen, bool(described_by.get("jpeg_encoding", True)), source)
        check_inside(data, data / "main_data.hdf5")
        with open_hdf5(data / "main_data.hdf5") as file:
            episodes = file.episodes(int(described_by.get("total_episodes", 0)))
            beside = [
                name
                for name in _INFO_COLUMNS
                if ours and f"episode_0/infos/{name}" in file
            ]
            columns = raw.join_episodes(
                _episodes(file, episodes, parts, beside), source
            )
        actions = columns["actions"]
        notes = list[str]()
        if actions.ndim > 2:
            columns["actions"] = actions.reshape(len(actions), -1)
        shape = columns["observations"].shape[1:]
        if ours:
            layout = None
        else:
            layout = make_layout(_columns_of(parts), shape, source)
        if layout is not None:
            boxes = [
                space.dtype
                for _, space in parts.values()
                if isinstance(space, spaces.Box)
            ]
            kind = np.result_type(np.float32, *boxes)
            for name in ("observations", "next_observations"):
                columns[name] = layout.encode(columns[name], kind)
            features = Features.of_layout(layout).to_extra()
            metadata = replace(
                described.metadata, extra={**described.metadata.extra, **features}
            )
            described = replace(described, metadata=metadata)
            notes.append(layout.note)
        if "observations" not in parts:
            said = ", ".join(f"{name} {space.shape}" for name, space in parts.values())
            notes.append(
                f"observations were flattened and joined in this order: {said}"
            )
        if isinstance(acted, spaces.Discrete) and int(acted.start):
            notes.append(
                f"actions {acted.start}, {acted.start + 1}, … were counted from 0"
                " instead"
            )
            columns["actions"] = actions - int(acted.start)
        if not described.episodes:
            del columns["episode_ids"]
        return raw.raw_log(columns, described, action_space, source, notes)


def _parts(space: Any, is_jpeg: bool, source: str) -> dict[str, tuple[str, Any]]:
    """Names and spaces of the arrays that make up an observation, by their paths in an
    episode's group.

    They are in the order in which Gymnasium flattens them. Raises DataError for parts
    that are not numeric, and for JPEG images: their decoder guesses the format, and
    some formats that it knows can run programs.
    """
    from gymnasium import spaces
    from minari.dataset.minari_storage import is_image_space

    found = {}
    for keys, leaf in _leaves(space):
        kinds = (spaces.Box, spaces.MultiBinary, spaces.Discrete, spaces.MultiDiscrete)
        if not isinstance(leaf, kinds):
            if keys:
                name = f"observation part {'/'.join(map(str, keys))}"
            else:
                name = "the observation"
            remedy = (
                "flatten the observations before recording"
                " (gymnasium.wrappers.FlattenObservation)"
            )
            raise DataError(
                f"{source}: {name} is {leaf}, no numbers in one array; {remedy}"
            )
        if is_jpeg and is_image_space(leaf):
            raise DataError(
                f"{source} holds pictures in JPEG; record it again with"
                " jpeg_encoding=False"
            )
        inside = (f"_index_{key}" if isinstance(key, int) else key for key in keys)
        found["/".join(["observations", *inside])] = "/".join(map(str, keys)), leaf
    return found


def _columns_of(parts: dict[str, tuple[str, Any]]) -> Iterator[Part]:
    """The columns of an observation; those of Discrete and MultiDiscrete spaces hold
    labels.

    Raises DataError for more labels than memory allows.
    """
    from gymnasium import spaces

    for key, space in parts.values():
        name = key or "observation"
        if isinstance(space, spaces.Discrete):
            yield Part(name, labels=_labels(name, int(space.start), int(space.n)))
        elif isinstance(space, spaces.MultiDiscrete):
            counts = np.ravel(space.nvec)
            starts = np.ravel(getattr(space, "start", 0 * space.nvec))
            for i, (start, count) in enumerate(
                zip(starts.tolist(), counts.tolist(), strict=True)
            ):
                yield Part(f"{name}[{i}]", labels=_labels(name, start, count))
        else:
            yield Part(name, size=math.prod(space.shape))


def _labels(name: str, start: int, count: int) -> range:
    if count > MOST_LABELS:
        said = (
            f"observation {name} is a label with {count} values, more than"
            f" {MOST_LABELS}"
        )
        raise DataError(
            f"{said}; number only those that occur, or record quantities as a Box"
        )
    return range(start, start + count)


def _leaves(
    space: Any, above: tuple[Any, ...] = ()
) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The innermost spaces, with the keys that lead to them."""
    from gymnasium import spaces

    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        parts = (
            space.spaces.items()
            if isinstance(space, spaces.Dict)
            else enumerate(space.spaces)
        )
        for key, part in parts:
            yield from _leaves(part, (*above, key))
    else:
        yield above, space


def _episodes(
    file: CheckedFile, episodes: range, parts: Collection[str], beside: Collection[str]
) -> Iterator[dict[str, np.ndarray]]:
    """Columns of each episode; an episode of T steps has T + 1 observations.

    parts: paths of the arrays that make up an observation. beside: names of columns
    stored among the infos.
    """
    paths = _KEYS | {name: f"infos/{name}" for name in beside}
    names = [
        f"episode_{i}/{path}" for i in episodes for path in (*parts, *paths.values())
    ]
    read = file.arrays(names, twice=[name for name in names if "/observations" in name])
    for i in episodes:
        seen = [read[f"episode_{i}/{part}"] for part in parts]
        if seen[0].ndim == 1 or "observations" not in parts:
            seen = [part.reshape(len(part), -1) for part in seen]
        if len(seen) > 1:
            observations = np.concatenate(seen, axis=1)
        else:
            observations = seen[0]
        steps = {name: read[f"episode_{i}/{path}"] for name, path in paths.items()}
        yield {
            "observations": observations[:-1],
            "next_observations": observations[1:],
            **steps,
        }


def write_minari(
    log: Transitions, folder: Path, identifier: str, force: bool = False
) -> None:
    """Write a dataset folder atomically. Raises DataError.

    Log-probabilities, weights and clusters are stored in the infos; images are stored
    without JPEG.
    """
    from gymnasium import spaces
    from minari import __version__ as minari_version
    from minari.data_collector import EpisodeBuffer
    from minari.dataset._storages import hdf5_storage
    from minari.dataset.minari_storage import MinariStorage, is_image_space

    # an id that Minari accepts: word characters and dashes, and a version at the end
    proper = re.sub(r"[^-\w/]+", "-", identifier).strip("-/") or "log"
    if re.search(r"-v\d+$", proper):
        proper = proper
    else:
        proper = f"{proper}-v0"
    ours = {
        "dataset_id": proper,
        "minari_version": minari_version,
        _DESCRIPTION: raw.describe_log(log),
    }
    beside = {name: log.columns[name] for name in _INFO_COLUMNS if name in log.columns}
    space = log.action_space
    seen = log.observations.dtype.type
    acted = log.actions.dtype.type
    low, high = (0, 255) if seen == np.uint8 else (-np.inf, np.inf)
    actions: Any = spaces.Discrete(space.n) if isinstance(space, Discrete) else None
    if isinstance(space, Continuous):
        actions = spaces.Box(
            np.asarray(space.low, acted),
            np.asarray(space.high, acted),
            (space.k,),
            acted,
        )
    states = spaces.Box(low, high, log.observation_shape, seen)
    if minari_version == "0.5.3":
        exact = {}
    else:
        exact = {"jpeg_encoding": False}
    loses = (
        "Minari 0.5.3 stores pictures as JPEG, which changes them; install 0.5.4, or"
        " write HDF5"
    )
    if not exact and is_image_space(states):
        raise DataError(loses)
    with (
        atomic_folder(folder, force, OWN_FILES["minari"]) as temporary,
        h5py_that_keeps_errors(hdf5_storage),
    ):
        storage = MinariStorage.new(
            temporary.resolve()
            / "data",  # absolute, because Minari joins a relative path with itself
            observation_space=states,
            action_space=actions,
            **exact,
        )
        storage.update_metadata(ours)
        storage.update_episodes(
            EpisodeBuffer(
                observations=np.concatenate(
                    [
                        log.observations[rows],
                        log.next_observations[rows.stop - 1 : rows.stop],
                    ]
                ),
                actions=log.actions[rows],
                rewards=log.rewards[rows],
                terminations=log.terminated[rows],
                truncations=log.truncated[rows],
                infos={name: column[rows] for name, column in beside.items()},
            )
            for rows in raw.cut_episodes(log, "Minari")
        )


def _stored_space(described_by: dict[str, Any], name: str, source: str) -> Any:
    """A space from Minari's metadata, without making an environment.

    Raises DataError.
    """
    from minari.serialization import deserialize_space

    stored = described_by.get(name)
    if not isinstance(stored, str):
        raise DataError(
            f"{source} stores no {name}; create it again with Minari 0.5 or newer"
        )
    with one_line_errors(f"{source}: {name}", "it cannot be read", "create it again"):
        described = parse_json(stored)
        _check_box_sizes(described)
        # Gymnasium's constructors refuse in many ways
        return deserialize_space(described)


def _check_box_sizes(described: Any) -> None:
    """Raise Refused for boxes too large for the memory: Gymnasium allocates arrays of
    their bounds.
    """
    if isinstance(described, dict):
        shape = described.get("shape", [])
        if (
            isinstance(shape, list)
            and math.prod(side for side in shape if side != 0) > LARGEST_BOX
        ):
            raise Refused(f"a box of shape {str(shape)[:60]}")
        if (
            "dtype" in described
            and np.dtype(str(described["dtype"])).kind not in "biuf"
        ):
            raise Refused(f"dtype {str(described['dtype'])[:40]}")
        described = list(described.values())
    if isinstance(described, list):
        for part in described:
            _check_box_sizes(part)


def _declared(space: Any) -> ActionSpace:
    """Action space as koffline declares it. Raises DataError for unsupported kinds."""
    from gymnasium import spaces

    if isinstance(space, spaces.Discrete):
        return Discrete(int(space.n))
    if isinstance(space, spaces.Box):
        return Continuous(space.low.size, space.low.ravel(), space.high.ravel())
    raise DataError(
        f"actions of {space} are not supported; record Discrete or Box actions"
    )


def _metadata_of(described_by: dict[str, Any]) -> Metadata:
    """Metadata from Minari's fields that are short texts."""
    kept = (
        "dataset_id",
        "algorithm_name",
        "code_permalink",
        "description",
        "minari_version",
    )
    extra = {
        key: described_by[key] for key in kept if isinstance(described_by.get(key), str)
    }
    if isinstance(described_by.get("env_spec"), str):
        with contextlib.suppress(ValueError, KeyError, TypeError):
            extra["environment"] = str(json.loads(described_by["env_spec"])["id"])
    return Metadata(extra=extra)
