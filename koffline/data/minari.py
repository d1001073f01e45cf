"""Minari datasets, read and written without an environment; rows are aligned and no last step is lost.

An episode of T steps has T + 1 observations, so the step cut by a time limit keeps its next observation.
A dataset is a folder with ``data/metadata.json`` and the episodes beside it (``data/main_data.hdf5``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from koffline.data.columns import as_array
from koffline.data.episodes import EpisodeArrays, join_episodes
from koffline.data.minari_spaces import (
    StoredSpaces,
    declared_space,
    decoded,
    flat_observations,
    minari_action_space,
    minari_observation_space,
    plain_actions,
    stored_spaces,
    without_images,
)
from koffline.data.raw import RawLog, cut_episodes, describe_log, read_description, settle_actions
from koffline.data.spaces import SpaceRequest
from koffline.data.transitions import Metadata, Transitions
from koffline.errors import DataError
from koffline.store.files import atomic_folder, reading
from koffline.untrusted.hdf5 import open_hdf5
from koffline.untrusted.limits import Tally, check_column_files, check_inside, read_json

_METADATA = "metadata.json"
# Our key in metadata.json, and in the infos of episodes.
_DESCRIPTION = "koffline"
_INFO_COLUMNS = ("behavior_log_probabilities", "weights")


def data_folder(folder: Path) -> Path | None:
    """The folder that holds the metadata of a dataset: ``folder`` or ``folder/data``; else None."""
    for candidate in (folder / "data", folder):
        if (candidate / _METADATA).is_file():
            return candidate
    return None


def read_minari(folder: Path, source: str, action_space: SpaceRequest | None = None) -> RawLog:
    """Read a dataset from its folder. Raises DataError."""
    data = data_folder(folder)
    if data is None:
        raise DataError(f"{source} holds no Minari dataset (no {_METADATA}); give the folder of a dataset")
    with reading(source, "Minari"):
        described_by = read_json(data / _METADATA)
        if not isinstance(described_by, dict) or "data_format" not in described_by:
            raise DataError(f"{source} holds no Minari dataset ({_METADATA} names no data_format)")
        spaces = stored_spaces(described_by, data, source)
        storage = _storage(described_by, data, spaces, source)
        pictures = Tally() if bool(described_by.get("jpeg_encoding", True)) else None
        episodes = [
            _episode(episode, spaces, source, pictures)
            for episode in storage.get_episodes(range(_count(described_by)))
        ]
        return _log(episodes, described_by, spaces, source, action_space)


def _log(
    episodes: list[EpisodeArrays],
    described_by: dict[str, Any],
    spaces: StoredSpaces,
    source: str,
    action_space: SpaceRequest | None,
) -> RawLog:
    columns, notes = join_episodes(episodes, source)
    ours = described_by.get(_DESCRIPTION)
    described = read_description(ours if isinstance(ours, str) else None)
    declared = described.action_space if described else declared_space(spaces)
    settled = settle_actions(columns["actions"], action_space, declared, source)
    columns["actions"] = settled.actions
    if described is not None and not described.episodes:
        del columns["episode_ids"]
    metadata = described.metadata if described else _metadata_of(described_by)
    notes = [*metadata.notes, *spaces.notes, *notes, *settled.notes]
    return RawLog(columns, settled.space, dataclasses.replace(metadata, source=source, notes=tuple(notes)))


def write_minari(log: Transitions, folder: Path, identifier: str, force: bool = False) -> None:
    """Write a dataset folder, whole or not at all. Raises DataError.

    Log-probabilities and weights travel in the infos; images are kept as they are, without JPEG.
    """
    from minari import __version__ as minari_version
    from minari.data_collector import EpisodeBuffer
    from minari.dataset.minari_storage import MinariStorage

    with atomic_folder(folder, force, replaceable=lambda path: data_folder(path) is not None) as temporary:
        storage = MinariStorage.new(
            temporary.resolve() / "data",  # Minari joins a relative path with itself
            observation_space=minari_observation_space(log),
            action_space=minari_action_space(log),
            jpeg_encoding=False,
        )
        storage.update_metadata(
            {
                "dataset_id": _proper_id(identifier),
                "minari_version": minari_version,
                _DESCRIPTION: describe_log(log),
            }
        )
        storage.update_episodes(
            EpisodeBuffer(
                observations=np.concatenate(
                    [log.observations[rows], log.next_observations[rows.stop - 1 : rows.stop]]
                ),
                actions=log.actions[rows],
                rewards=log.rewards[rows],
                terminations=log.terminated[rows],
                truncations=log.truncated[rows],
                infos={n: getattr(log, n)[rows] for n in _INFO_COLUMNS if getattr(log, n) is not None},
            )
            for rows in cut_episodes(log, "Minari")
        )


def _proper_id(name: str) -> str:
    """An id Minari accepts: word characters and dashes, and a version at the end."""
    name = re.sub(r"[^-\w/]+", "-", name).strip("-/") or "log"
    return name if re.search(r"-v\d+$", name) else f"{name}-v0"


def _storage(described_by: dict[str, Any], data: Path, spaces: Any, source: str) -> Any:
    """Minari's own reader of the episodes, given the spaces so that it asks no environment for them."""
    from minari.dataset._storages import get_minari_storage

    try:
        storage = get_minari_storage(described_by["data_format"])
    except KeyError:
        raise DataError(
            f"{source} has Minari format {described_by['data_format']!r}, unknown here; update minari"
        ) from None
    except ImportError as error:
        raise DataError(f"{source}: {' '.join(str(error).split())}") from None
    if described_by["data_format"] == "hdf5":
        check_inside(data, data / "main_data.hdf5")
        with open_hdf5(data / "main_data.hdf5") as file:
            file.check_everything()
        return storage(data, spaces.observation, spaces.action, jpeg_encoding=False)
    check_column_files(data)
    has_jpeg = bool(described_by.get("jpeg_encoding", True))
    observation = without_images(spaces.observation) if has_jpeg else spaces.observation
    return storage(data, observation, spaces.action, jpeg_encoding=False)


def _count(described_by: dict[str, Any]) -> int:
    return int(described_by.get("total_episodes", 0))


def _episode(episode: dict[str, Any], spaces: Any, source: str, pictures: Tally | None) -> EpisodeArrays:
    rewards = as_array("rewards", episode["rewards"]).reshape(-1)
    infos = episode.get("infos") or {}
    observations = episode["observations"]
    if pictures is not None:
        observations = decoded(observations, spaces.observation, pictures)
    extras = {
        name: as_array(name, infos[name])
        for name in _INFO_COLUMNS
        if name in infos and np.shape(infos[name]) == rewards.shape
    }
    return EpisodeArrays(
        flat_observations(observations, spaces.observation, source),
        plain_actions(as_array("actions", episode["actions"]), spaces.action),
        rewards,
        as_array("terminations", episode["terminations"]).reshape(-1),
        as_array("truncations", episode["truncations"]).reshape(-1),
        extras,
    )


def _metadata_of(described_by: dict[str, Any]) -> Metadata:
    """What Minari says about a dataset, as far as it is short text."""
    kept = ("dataset_id", "algorithm_name", "code_permalink", "description", "minari_version")
    extra = {key: described_by[key] for key in kept if isinstance(described_by.get(key), str)}
    if isinstance(described_by.get("env_spec"), str):
        with contextlib.suppress(ValueError, KeyError, TypeError):
            extra["environment"] = str(json.loads(described_by["env_spec"])["id"])
    return Metadata(extra=extra)
