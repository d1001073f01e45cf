"""Minari datasets, read and written without an environment; rows are aligned and no last step is lost.

An episode of T steps has T + 1 observations, so the step cut by a time limit keeps its next observation.
A dataset is a folder with ``data/metadata.json`` and the episodes beside it (``data/main_data.hdf5``).
"""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from koffline.data.columns import as_array
from koffline.data.episodes import EpisodeArrays, join_episodes
from koffline.data.raw import FileDescription, RawLog, cut_episodes, describe_log, raw_log, read_description
from koffline.data.spaces import SpaceRequest
from koffline.data.transitions import Metadata, Transitions
from koffline.errors import DataError
from koffline.store.files import atomic_folder, reading
from koffline.untrusted.hdf5 import open_hdf5
from koffline.untrusted.limits import Tally, check_column_files, check_inside, read_json

if TYPE_CHECKING:
    from koffline.data.minari_spaces import StoredSpaces

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
    from koffline.data.minari_spaces import declared_space, stored_spaces

    data = data_folder(folder)
    if data is None:
        raise DataError(f"{source} holds no Minari dataset (no {_METADATA}); give the folder of a dataset")
    with reading(source, "Minari"):
        described_by = read_json(data / _METADATA)
        if not isinstance(described_by, dict) or "data_format" not in described_by:
            raise DataError(f"{source} holds no Minari dataset ({_METADATA} names no data_format)")
        spaces = stored_spaces(described_by, data, source)
        storage = _storage(described_by, data, spaces, source)
        pictures = Tally() if _has_jpeg(described_by) else None
        stored = storage.get_episodes(range(int(described_by.get("total_episodes", 0))))
        columns, notes = join_episodes([_episode(e, spaces, source, pictures) for e in stored], source)
        ours = described_by.get(_DESCRIPTION)
        described = read_description(ours if isinstance(ours, str) else None)
        if described is None:
            described = FileDescription(declared_space(spaces), metadata=_metadata_of(described_by))
        if not described.episodes:
            del columns["episode_ids"]
        return raw_log(columns, described, action_space, source, [*spaces.notes, *notes])


def write_minari(log: Transitions, folder: Path, identifier: str, force: bool = False) -> None:
    """Write a dataset folder, whole or not at all. Raises DataError.

    Log-probabilities and weights travel in the infos; images are kept as they are, without JPEG.
    """
    from minari import __version__ as minari_version
    from minari.data_collector import EpisodeBuffer
    from minari.dataset.minari_storage import MinariStorage

    from koffline.data.minari_spaces import minari_action_space, minari_observation_space

    # an id that Minari accepts: word characters and dashes, and a version at the end
    proper = re.sub(r"[^-\w/]+", "-", identifier).strip("-/") or "log"
    proper = proper if re.search(r"-v\d+$", proper) else f"{proper}-v0"
    ours = {"dataset_id": proper, "minari_version": minari_version, _DESCRIPTION: describe_log(log)}
    beside = {name: log.columns[name] for name in _INFO_COLUMNS if name in log.columns}
    with atomic_folder(folder, force, replaceable=lambda path: data_folder(path) is not None) as temporary:
        storage = MinariStorage.new(
            temporary.resolve() / "data",  # Minari joins a relative path with itself
            observation_space=minari_observation_space(log),
            action_space=minari_action_space(log),
            jpeg_encoding=False,
        )
        storage.update_metadata(ours)
        storage.update_episodes(
            EpisodeBuffer(
                observations=np.concatenate(
                    [log.observations[rows], log.next_observations[rows.stop - 1 : rows.stop]]
                ),
                actions=log.actions[rows],
                rewards=log.rewards[rows],
                terminations=log.terminated[rows],
                truncations=log.truncated[rows],
                infos={name: column[rows] for name, column in beside.items()},
            )
            for rows in cut_episodes(log, "Minari")
        )


def _has_jpeg(described_by: dict[str, Any]) -> bool:
    return bool(described_by.get("jpeg_encoding", True))


def _storage(described_by: dict[str, Any], data: Path, spaces: StoredSpaces, source: str) -> Any:
    """Minari's own reader of the episodes, given the spaces so that it asks no environment for them."""
    from minari.dataset._storages import get_minari_storage

    from koffline.data.minari_spaces import without_images

    try:
        storage = get_minari_storage(described_by["data_format"])
    except KeyError:
        raise DataError(
            f"{source} has Minari format {described_by['data_format']!r}, unknown here; update minari"
        ) from None
    except ImportError as error:
        raise DataError(f"{source}: {' '.join(str(error).split())}") from None
    observation = spaces.observation
    if described_by["data_format"] == "hdf5":
        check_inside(data, data / "main_data.hdf5")
        with open_hdf5(data / "main_data.hdf5") as file:
            file.check_everything()
    else:
        check_column_files(data)
        observation = without_images(observation) if _has_jpeg(described_by) else observation
    return storage(data, observation, spaces.action, jpeg_encoding=False)


def _episode(
    episode: dict[str, Any], spaces: StoredSpaces, source: str, pictures: Tally | None
) -> EpisodeArrays:
    from koffline.data.minari_spaces import decoded, flat_observations, plain_actions

    rewards, terminated, truncated = (
        as_array(name, episode[name]).reshape(-1) for name in ("rewards", "terminations", "truncations")
    )
    observations, infos = episode["observations"], episode.get("infos") or {}
    if pictures is not None:
        observations = decoded(observations, spaces.observation, pictures)
    shown = [name for name in _INFO_COLUMNS if name in infos and np.shape(infos[name]) == rewards.shape]
    return EpisodeArrays(
        flat_observations(observations, spaces.observation, source),
        plain_actions(as_array("actions", episode["actions"]), spaces.action),
        rewards,
        terminated,
        truncated,
        {name: as_array(name, infos[name]) for name in shown},
    )


def _metadata_of(described_by: dict[str, Any]) -> Metadata:
    """What Minari says about a dataset, as far as it is short text."""
    kept = ("dataset_id", "algorithm_name", "code_permalink", "description", "minari_version")
    extra = {key: described_by[key] for key in kept if isinstance(described_by.get(key), str)}
    if isinstance(described_by.get("env_spec"), str):
        with contextlib.suppress(ValueError, KeyError, TypeError):
            extra["environment"] = str(json.loads(described_by["env_spec"])["id"])
    return Metadata(extra=extra)
