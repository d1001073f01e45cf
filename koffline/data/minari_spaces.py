"""Gymnasium spaces of a Minari dataset: reading them, flattening observations, and declaring our own.

Pictures are decoded here: JPEG and nothing else, in the size that the space declares. Minari's own decoder
asks the imaging library to guess the format, and some of the formats that it knows are programs. Minari is
therefore told that nothing is encoded, and hands over the bytes.
"""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces

from koffline.data.columns import as_array
from koffline.data.spaces import ActionSpace, Continuous, Discrete
from koffline.data.transitions import Transitions
from koffline.errors import DataError
from koffline.untrusted.hdf5 import check_dataset, open_hdf5
from koffline.untrusted.limits import Refused, Tally, parse_json

# Numbers in one observation or action: a thousand times a picture of Atari.
_LARGEST_BOX = 2**24
_JPEG = b"\xff\xd8\xff"


@dataclass(frozen=True, eq=False)
class StoredSpaces:
    """Gymnasium spaces of observations and actions, and what was assumed about them.

    ``action_is_declared`` is False where the dataset stores no action space.
    """

    observation: Any
    action: Any
    action_is_declared: bool
    notes: tuple[str, ...]


def stored_spaces(described_by: dict[str, Any], data: Path, source: str) -> StoredSpaces:
    """The spaces in Minari's metadata; where it stores none, boxes in the shape of the first episode.

    Raises DataError where neither can be had: no environment is asked for its spaces.
    """
    found = {name: _stored_space(described_by, f"{name}_space", source) for name in ("observation", "action")}
    declared = found["action"] is not None
    missing = [name for name, space in found.items() if space is None]
    if missing and not (data / "main_data.hdf5").is_file():
        raise DataError(f"{source} stores no spaces; create it again with Minari 0.5 or newer")
    if missing:
        with open_hdf5(data / "main_data.hdf5") as file:
            found |= {name: _box_like(file.raw[f"episode_0/{name}s"], f"{name}s") for name in missing}
    observation, action = found["observation"], found["action"]
    return StoredSpaces(observation, action, declared, _notes(observation, action))


def _stored_space(described_by: dict[str, Any], name: str, source: str) -> Any:
    from minari.serialization import deserialize_space

    stored = described_by.get(name)
    if not isinstance(stored, str):
        return None
    try:
        described = parse_json(stored)
        _check_box_sizes(described)
        return deserialize_space(described)
    except Exception as error:  # Gymnasium's constructors refuse in many ways
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"{source} has an unreadable {name} ({reason}); create it again") from None


def _check_box_sizes(described: Any) -> None:
    """Raise Refused for boxes that would fill the memory: Gymnasium makes arrays of their bounds at once."""
    if isinstance(described, dict):
        shape = described.get("shape", [])
        if isinstance(shape, list) and math.prod(side for side in shape if side != 0) > _LARGEST_BOX:
            raise Refused(f"a box of shape {str(shape)[:60]}")
        if "dtype" in described and np.dtype(str(described["dtype"])).kind not in "biuf":
            raise Refused(f"dtype {str(described['dtype'])[:40]}")
        described = list(described.values())
    if isinstance(described, list):
        for part in described:
            _check_box_sizes(part)


def _box_like(item: Any, name: str) -> Any:
    import h5py

    if isinstance(item, h5py.Group):
        parts = {key: _box_like(item[key], f"{name}/{key}") for key in item}
        if all(key.startswith("_index_") for key in parts):
            return spaces.Tuple([parts[f"_index_{i}"] for i in range(len(parts))])
        return spaces.Dict(parts)
    check_dataset(item, name)
    if item.dtype.kind not in "iuf":
        raise DataError(f"{name} have dtype {item.dtype}; record numbers")
    low, high = -np.inf, np.inf
    if item.dtype.kind != "f":
        low, high = np.iinfo(item.dtype).min, np.iinfo(item.dtype).max
    return spaces.Box(low, high, item.shape[1:], item.dtype.type)


def _notes(observation: Any, action: Any) -> tuple[str, ...]:
    notes = []
    if isinstance(observation, (spaces.Dict, spaces.Tuple)):
        parts = ", ".join(f"{'/'.join(map(str, keys))} {box.shape}" for keys, box in _leaves(observation))
        notes.append(f"observations were flattened and joined in this order: {parts}")
    if isinstance(observation, spaces.Discrete):
        notes.append(
            f"observations are the {observation.n} states of a discrete space, kept as one number; "
            "one-hot columns usually serve value functions better"
        )
    if isinstance(action, spaces.Discrete) and int(action.start):
        notes.append(f"actions {action.start}, {action.start + 1}, … were counted from 0 instead")
    if isinstance(action, spaces.Box) and len(action.shape) > 1:
        notes.append(f"actions of shape {action.shape} were flattened")
    return tuple(notes)


def _parts(space: Any) -> list[tuple[Any, Any]] | None:
    """The spaces that one is made of by their keys, in Gymnasium's order; None for an innermost one."""
    if isinstance(space, spaces.Dict):
        return list(space.spaces.items())
    return list(enumerate(space.spaces)) if isinstance(space, spaces.Tuple) else None


def _leaves(space: Any, above: tuple[Any, ...] = ()) -> list[tuple[tuple[Any, ...], Any]]:
    """The innermost spaces with the keys that lead to them, in the order in which Gymnasium flattens them."""
    if (parts := _parts(space)) is None:
        return [(above, space)]
    return [leaf for key, part in parts for leaf in _leaves(part, (*above, key))]


def flat_observations(values: Any, space: Any, source: str) -> np.ndarray:
    """(T + 1, ...) of a Box as they are; Dict and Tuple of boxes flattened and joined as Gymnasium does.

    Raises DataError for anything else inside.
    """
    if _parts(space) is None:
        if not isinstance(space, (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)):
            raise DataError(f"{source} has observations of {space}; store them as numbers in one array")
        array = as_array("observations", values)
        return array.reshape(-1, 1) if array.ndim == 1 else array
    joined = []
    for keys, leaf in _leaves(space):
        name = "/".join(map(str, keys))
        if not isinstance(leaf, (spaces.Box, spaces.MultiBinary)):
            raise DataError(
                f"{source}: observation part {name} is {leaf}, which cannot be joined with numbers; "
                "flatten the observations before recording (gymnasium.wrappers.FlattenObservation)"
            )
        part = values
        for key in keys:
            part = part[key]
        array = as_array(name, part)
        joined.append(array.reshape(len(array), -1))
    return np.concatenate(joined, axis=1)


def declared_space(stored: StoredSpaces) -> ActionSpace | None:
    """Our declaration of the actions, if there is one. Raises DataError for kinds we have no policy for."""
    space = stored.action
    if not stored.action_is_declared:
        return None
    if isinstance(space, spaces.Discrete):
        return Discrete(int(space.n))
    if isinstance(space, spaces.Box):
        return Continuous(space.low.size, space.low.ravel(), space.high.ravel())
    raise DataError(f"actions of {space} are not supported; record Discrete or Box actions")


def plain_actions(actions: np.ndarray, space: Any) -> np.ndarray:
    """Discrete actions (T,) counted from 0, box actions (T, k), and (T,) integers as they are."""
    if isinstance(space, spaces.Discrete):
        return actions.reshape(-1) - int(space.start)
    return actions.reshape(len(actions), math.prod(actions.shape[1:])) if actions.ndim > 2 else actions


def minari_observation_space(log: Transitions) -> Any:
    """An unbounded box for numbers, 0 … 255 for bytes."""
    low, high = (0, 255) if log.observations.dtype == np.uint8 else (-np.inf, np.inf)
    return spaces.Box(low, high, log.observation_shape, log.observations.dtype.type)


def minari_action_space(log: Transitions) -> Any:
    """The declared space in Gymnasium's words."""
    space = log.action_space
    if isinstance(space, Discrete):
        return spaces.Discrete(space.n)
    dtype = log.actions.dtype.type
    return spaces.Box(np.asarray(space.low, dtype), np.asarray(space.high, dtype), (space.k,), dtype)


def without_images(space: Any) -> Any:
    """The space with text in the place of pictures: what Minari's Arrow reader hands over as it is."""
    from minari.dataset.minari_storage import is_image_space

    if isinstance(space, spaces.Dict):
        return spaces.Dict({name: without_images(part) for name, part in space.spaces.items()})
    if isinstance(space, spaces.Tuple):
        return spaces.Tuple([without_images(part) for part in space.spaces])
    return spaces.Text(1) if is_image_space(space) else space


def decoded(values: Any, space: Any, tally: Tally) -> Any:
    """Observations or actions of an episode, their pictures decoded and counted before.

    Raises Refused for what is no JPEG.
    """
    from minari.dataset.minari_storage import is_image_space

    if isinstance(space, spaces.Dict):
        return {name: decoded(values[name], part, tally) for name, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(decoded(value, part, tally) for value, part in zip(values, space.spaces, strict=True))
    return _pictures(values, space.shape, tally) if is_image_space(space) else values


def _pictures(rows: Sequence[Any], shape: tuple[int, ...], tally: Tally) -> np.ndarray:
    """(T, ...) bytes of pictures of one shape."""
    from PIL import Image

    tally.add(2 * len(rows) * math.prod(shape))  # there will be as many next observations
    pictures = np.empty((len(rows), *shape), dtype=np.uint8)
    for i, row in enumerate(rows):
        content = row if isinstance(row, bytes) else np.asarray(row, dtype=np.uint8).tobytes()
        if not content.startswith(_JPEG):
            raise Refused(f"picture {i} of an episode is no JPEG; record it again")
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            picture = Image.open(io.BytesIO(content), formats=("JPEG",))
        channels = len(picture.getbands())
        if (picture.height, picture.width, *([channels] if len(shape) == 3 else [])) != shape:
            raise Refused(
                f"picture {i} of an episode has {picture.width} × {picture.height} points of {channels} "
                f"colours, its space declares {shape}; record it again"
            )
        pictures[i] = np.asarray(picture)
    return pictures
