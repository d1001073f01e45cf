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
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from koffline.data import raw
from koffline.data.kinds import METADATA, OWN_FILES, data_folder
from koffline.data.labels import MOST_LABELS, Layout, ObservationPart, make_layout
from koffline.data.spaces import (
    ActionSpace,
    Continuous,
    Discrete,
    Features,
    SpaceRequest,
)
from koffline.data.transitions import Metadata, Transitions
from koffline.errors import DataError
from koffline.json_types import JsonObject
from koffline.store.files import atomic_folder, reading
from koffline.untrusted.hdf5 import CheckedFile, h5py_that_keeps_errors, open_hdf5
from koffline.untrusted.limits import (
    Refused,
    check_inside,
    one_line_errors,
    parse_json,
    read_json,
)

if TYPE_CHECKING:
    from gymnasium import spaces

    Space: TypeAlias = spaces.Space[Any]
else:  # Gymnasium is imported only when it is needed
    Space: TypeAlias = object
NamedSpace: TypeAlias = tuple[str, Space]

# Our key in metadata.json, and in the infos of episodes.
_DESCRIPTION = "koffline"
# Paths of the columns in the group of an episode.
_KEYS = {
    "actions": "actions",
    "rewards": "rewards",
    "terminated": "terminations",
    "truncated": "truncations",
}
_INFO_COLUMNS = (
    "behavior_log_probabilities",
    "weights",
    "clusters",
    "action_mask",
    "next_action_mask",
)
# Largest number of elements in one observation or action: a thousand Atari frames.
LARGEST_BOX = 2**24


def read_minari(
    folder: Path,
    source: str,
    action_space: SpaceRequest | None = None,
    chosen: Sequence[int] | None = None,
) -> raw.RawLog:
    """Read a dataset from its folder. chosen: numbers of the episodes to read, all by
    default. Raises DataError.
    """
    from gymnasium import spaces

    data = data_folder(folder)
    if data is None:
        raise DataError(
            f"{source} holds no Minari dataset (no {METADATA}) and no shards (no"
            " manifest.json); give the folder of a dataset"
        )
    with reading(source, "Minari"):
        fields = _read_fields(data, source)
        observation_space = _stored_space(fields, "observation_space", source)
        stored_actions = _stored_space(fields, "action_space", source)
        text = fields.get(_DESCRIPTION)
        description = raw.read_description(text if isinstance(text, str) else None)
        if description is None:
            description = raw.FileDescription(
                _declared(stored_actions), metadata=_metadata_of(fields)
            )
        is_jpeg = bool(fields.get("jpeg_encoding", True))
        parts = _parts(observation_space, is_jpeg, source)
        check_inside(data, data / "main_data.hdf5")
        with open_hdf5(data / "main_data.hdf5") as file:
            episodes: Sequence[int] = file.episodes(
                int(fields.get("total_episodes", 0))
            )
            if chosen is not None:
                episodes = [episodes[number] for number in chosen]
            info_columns = [
                name
                for name in _INFO_COLUMNS
                if text and f"episode_0/infos/{name}" in file
            ]
            columns = raw.join_episodes(
                _episodes(file, episodes, parts, info_columns), source
            )
        actions = columns["actions"]
        notes = list[str]()
        if actions.ndim > 2:
            columns["actions"] = actions.reshape(len(actions), -1)
        layout = None
        if not text:  # our own files hold encoded labels
            shape = columns["observations"].shape[1:]
            layout = make_layout(_columns_of(parts), shape, source)
        if layout is not None:
            _encode_labels(columns, layout, parts)
            features = Features.of_layout(layout).to_extra()
            extra = {**description.metadata.extra, **features}
            metadata = replace(description.metadata, extra=extra)
            description = replace(description, metadata=metadata)
            notes.append(layout.note)
        if "observations" not in parts:
            order = ", ".join(f"{name} {space.shape}" for name, space in parts.values())
            notes.append(
                f"observations were flattened and joined in this order: {order}"
            )
        if isinstance(stored_actions, spaces.Discrete) and int(stored_actions.start):
            first = int(stored_actions.start)
            notes.append(f"actions {first}, {first + 1}, … were counted from 0 instead")
            columns["actions"] = actions - first
        if not description.episodes:
            del columns["episode_ids"]
        return raw.raw_log(columns, description, action_space, source, notes)


def _read_fields(data: Path, source: str) -> JsonObject:
    """The fields of Minari's metadata file. Raises DataError for other files and
    formats.
    """
    check_inside(data, data / METADATA)
    fields = read_json(data / METADATA)
    if not isinstance(fields, dict) or "data_format" not in fields:
        raise DataError(
            f"{source} holds no Minari dataset ({METADATA} names no data_format)"
        )
    if fields["data_format"] != "hdf5":
        raise DataError(
            f"{source} has Minari format {fields['data_format']!r}, known is hdf5;"
            " create it again with data_format='hdf5'"
        )
    return fields


def _encode_labels(
    columns: dict[str, np.ndarray], layout: Layout, parts: dict[str, NamedSpace]
) -> None:
    """Encode the observations in place, as float32, or as the widest type of the parts
    that are boxes.
    """
    from gymnasium import spaces

    boxes = [
        space.dtype for _, space in parts.values() if isinstance(space, spaces.Box)
    ]
    kind = np.result_type(np.float32, *boxes)
    for name in ("observations", "next_observations"):
        columns[name] = layout.encode(columns[name], kind)


def _parts(space: Space, is_jpeg: bool, source: str) -> dict[str, NamedSpace]:
    """Names and spaces of the arrays that make up an observation, by their paths in an
    episode's group.

    They are in the order in which Gymnasium flattens them. Raises DataError for parts
    that are not numeric, and for JPEG images: their decoder guesses the format, and
    some formats that it knows can run programs.
    """
    from gymnasium import spaces
    from minari.dataset.minari_storage import is_image_space

    numeric = (spaces.Box, spaces.MultiBinary, spaces.Discrete, spaces.MultiDiscrete)
    parts: dict[str, NamedSpace] = {}
    for keys, leaf in _leaves(space):
        if not isinstance(leaf, numeric):
            if keys:
                name = f"observation part {'/'.join(map(str, keys))}"
            else:
                name = "the observation"
            raise DataError(
                f"{source}: {name} is {leaf}, no numbers in one array; flatten the"
                " observations before recording (gymnasium.wrappers.FlattenObservation)"
            )
        if is_jpeg and is_image_space(leaf):
            raise DataError(
                f"{source} holds pictures in JPEG; record it again with"
                " jpeg_encoding=False"
            )
        inside = (f"_index_{key}" if isinstance(key, int) else key for key in keys)
        path = "/".join(["observations", *inside])
        parts[path] = ("/".join(map(str, keys)), leaf)
    return parts


def _columns_of(parts: dict[str, NamedSpace]) -> Iterator[ObservationPart]:
    """The columns of an observation; those of Discrete and MultiDiscrete spaces hold
    labels.

    Raises DataError for more labels than memory allows.
    """
    from gymnasium import spaces

    for key, space in parts.values():
        name = key or "observation"
        if isinstance(space, spaces.Discrete):
            yield ObservationPart(
                name, labels=_labels(name, int(space.start), int(space.n))
            )
        elif isinstance(space, spaces.MultiDiscrete):
            counts = np.ravel(space.nvec)
            starts = np.ravel(getattr(space, "start", 0 * space.nvec))
            for i, (start, count) in enumerate(
                zip(starts.tolist(), counts.tolist(), strict=True)
            ):
                yield ObservationPart(
                    f"{name}[{i}]", labels=_labels(name, start, count)
                )
        else:
            assert space.shape is not None, "a Box or MultiBinary has one"
            yield ObservationPart(name, size=math.prod(space.shape))


def _labels(name: str, start: int, count: int) -> range:
    """The labels of a part of an observation. Raises DataError for too many."""
    if count > MOST_LABELS:
        raise DataError(
            f"observation {name} is a label with {count} values, more than"
            f" {MOST_LABELS}; number only those that occur, or record quantities as a"
            " Box"
        )
    return range(start, start + count)


def _leaves(
    space: Space, above: tuple[str | int, ...] = ()
) -> Iterator[tuple[tuple[str | int, ...], Space]]:
    """The innermost spaces, with the keys that lead to them."""
    from gymnasium import spaces

    parts: list[tuple[str | int, Space]]
    if isinstance(space, spaces.Dict):
        parts = list(space.spaces.items())
    elif isinstance(space, spaces.Tuple):
        parts = list(enumerate(space.spaces))
    else:
        yield above, space
        return
    for key, part in parts:
        yield from _leaves(part, (*above, key))


def _episodes(
    file: CheckedFile,
    episodes: Sequence[int],
    parts: Collection[str],
    info_columns: Collection[str],
) -> Iterator[dict[str, np.ndarray]]:
    """Columns of each episode; an episode of T steps has T + 1 observations.

    parts: paths of the arrays that make up an observation. info_columns: names of
    columns stored among the infos.
    """
    paths = _KEYS | {name: f"infos/{name}" for name in info_columns}
    names = [
        f"episode_{i}/{path}" for i in episodes for path in (*parts, *paths.values())
    ]
    arrays = file.arrays(
        names, twice=[name for name in names if "/observations" in name]
    )
    for i in episodes:
        states = [arrays[f"episode_{i}/{part}"] for part in parts]
        if states[0].ndim == 1 or "observations" not in parts:
            states = [part.reshape(len(part), -1) for part in states]
        if len(states) > 1:
            observations = np.concatenate(states, axis=1)
        else:
            observations = states[0]
        steps = {name: arrays[f"episode_{i}/{path}"] for name, path in paths.items()}
        yield {
            "observations": observations[:-1],
            "next_observations": observations[1:],
            **steps,
        }


def write_minari(
    log: Transitions, folder: Path, identifier: str, force: bool = False
) -> None:
    """Write a dataset folder atomically. Raises DataError.

    Log-probabilities, weights, clusters and masks are stored in the infos; images are
    stored without JPEG.
    """
    from minari import __version__ as minari_version
    from minari.data_collector import EpisodeBuffer
    from minari.dataset._storages import hdf5_storage
    from minari.dataset.minari_storage import MinariStorage, is_image_space

    states, actions = _spaces_of(log)
    options = {}
    if minari_version != "0.5.3":
        options["jpeg_encoding"] = False
    elif is_image_space(states):
        raise DataError(
            "Minari 0.5.3 stores pictures as JPEG, which changes them; install 0.5.4,"
            " or write HDF5"
        )
    fields = {
        "dataset_id": _proper_identifier(identifier),
        "minari_version": minari_version,
        _DESCRIPTION: raw.describe_log(log),
    }
    infos = {name: log.columns[name] for name in _INFO_COLUMNS if name in log.columns}
    with (
        atomic_folder(folder, force, OWN_FILES["minari"]) as temporary,
        h5py_that_keeps_errors(hdf5_storage),
    ):
        storage = MinariStorage.new(
            # absolute, because Minari joins a relative path with itself
            temporary.resolve() / "data",
            observation_space=states,
            action_space=actions,
            **options,
        )
        storage.update_metadata(fields)
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
                infos={name: column[rows] for name, column in infos.items()},
            )
            for rows in raw.cut_episodes(log, "Minari")
        )


def _proper_identifier(identifier: str) -> str:
    """An id that Minari accepts: word characters and dashes, and a version at the
    end.
    """
    proper = re.sub(r"[^-\w/]+", "-", identifier).strip("-/") or "log"
    if re.search(r"-v\d+$", proper):
        return proper
    return f"{proper}-v0"


def _spaces_of(log: Transitions) -> tuple[Space, Space]:
    """Gymnasium's spaces of a log's observations and actions."""
    from gymnasium import spaces

    observation_type = log.observations.dtype.type
    low = -np.inf
    high = np.inf
    if observation_type == np.uint8:
        low = 0
        high = 255
    states = spaces.Box(low, high, log.observation_shape, observation_type)
    space = log.action_space
    if isinstance(space, Discrete):
        return states, spaces.Discrete(space.n)
    action_type = log.actions.dtype.type
    lows = np.asarray(space.low, action_type)
    highs = np.asarray(space.high, action_type)
    return states, spaces.Box(lows, highs, (space.k,), action_type)


def _stored_space(fields: JsonObject, name: str, source: str) -> Space:
    """A space from Minari's metadata, without making an environment.

    Raises DataError.
    """
    from minari.serialization import deserialize_space

    stored = fields.get(name)
    if not isinstance(stored, str):
        raise DataError(
            f"{source} stores no {name}; create it again with Minari 0.5 or newer"
        )
    with one_line_errors(f"{source}: {name}", "it cannot be read", "create it again"):
        described = parse_json(stored)
        _check_box_sizes(described)
        # Gymnasium's constructors refuse in many ways
        return deserialize_space(described)


def _check_box_sizes(described: object) -> None:
    """Raise Refused for boxes too large for the memory: Gymnasium allocates arrays of
    their bounds.

    described: a space as Minari's metadata have it, parsed.
    """
    if isinstance(described, dict):
        shape = described.get("shape", [])
        if isinstance(shape, list):
            size = math.prod(side for side in shape if side != 0)
            if size > LARGEST_BOX:
                raise Refused(f"a box of shape {str(shape)[:60]}")
        if "dtype" in described:
            dtype = str(described["dtype"])
            if np.dtype(dtype).kind not in "biuf":
                raise Refused(f"dtype {dtype[:40]}")
        described = list(described.values())
    if isinstance(described, list):
        for part in described:
            _check_box_sizes(part)


def _declared(space: Space) -> ActionSpace:
    """Action space as koffline declares it. Raises DataError for unsupported kinds."""
    from gymnasium import spaces

    if isinstance(space, spaces.Discrete):
        return Discrete(int(space.n))
    if isinstance(space, spaces.Box):
        return Continuous(space.low.size, space.low.ravel(), space.high.ravel())
    raise DataError(
        f"actions of {space} are not supported; record Discrete or Box actions"
    )


def _metadata_of(fields: JsonObject) -> Metadata:
    """Metadata from Minari's fields that are short texts."""
    kept = (
        "dataset_id",
        "algorithm_name",
        "code_permalink",
        "description",
        "minari_version",
    )
    extra = {key: fields[key] for key in kept if isinstance(fields.get(key), str)}
    if isinstance(fields.get("env_spec"), str):
        with contextlib.suppress(ValueError, KeyError, TypeError):
            extra["environment"] = str(json.loads(fields["env_spec"])["id"])
    return Metadata(extra=extra)
