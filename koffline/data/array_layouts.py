"""Arrays of other tools as columns of rows: a group of arrays for each episode, several
environments side by side, a ring of rows.

- **A group for each episode** (robomimic's ``data/demo_0``, ManiSkill's ``traj_0``):
  the groups are joined, and ``episode_ids`` counts them. An array with one row more
  than the others holds the final state, too: it becomes an array and the one of the
  next row (``next_…``). Arrays in a group of their own (``obs/joints``) give one column
  a number (``obs/joints_0``).
- **Several environments** (Stable-Baselines3: steps × environments × …): the rows of
  one environment follow those of another, and ``episode_ids`` tells them apart.
- **A ring of rows** (Tianshou's ``ReplayBuffer.save_hdf5``): rows that were never
  filled are left out, and the oldest row comes first.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from koffline.data.columns import natural_key
from koffline.errors import DataError, listed
from koffline.untrusted.arrays import ArrayHeader, OpenArrays
from koffline.untrusted.hdf5 import CheckedFile

GROUPS = "groups"
ENVIRONMENTS = "stable-baselines3"
RING = "tianshou"
IDS = "episode_ids"
_EPISODE_GROUP = re.compile(
    r"^((?:[^/]+/)*(?:demo|episode|ep|traj|trajectory|rollout)[_-]?\d+)/", re.I
)
_RING_GROUP = "_meta/"
_ENDS = ("dones", "done", "terminals", "terminated", "terminations")
_FEWEST_COLUMNS = 3


def episode_groups(names: Collection[str]) -> list[str]:
    """The groups of a file that hold one episode each, in their order; none if there
    are fewer than two. names: paths of arrays.
    """
    matches = map(_EPISODE_GROUP.match, names)
    groups: set[str] = {match.group(1) for match in matches if match is not None}
    if len(groups) < 2:
        return []
    return sorted(groups, key=natural_key)


def has_ring(names: Collection[str]) -> bool:
    """Whether arrays lie in the group of Tianshou's buffers. names: paths of arrays."""
    return any(name.startswith(_RING_GROUP) for name in names)


def environments_of(shapes: Mapping[str, tuple[int, ...]]) -> int | None:
    """The number of environments whose rows lie side by side; None if rows lie one
    below the other. shapes: of the arrays with one row per step, by name.
    """
    sides = {shape[1] for shape in shapes.values() if len(shape) > 1}
    has_side = all(len(shape) > 1 for shape in shapes.values())
    is_deep = any(len(shape) == 3 for shape in shapes.values())
    # rewards, flags of ends
    n_flat = sum(len(shape) == 2 for shape in shapes.values())
    if len(sides) != 1 or not has_side or not is_deep or not n_flat:
        return None
    if len(shapes) < _FEWEST_COLUMNS:
        return None
    (side,) = sides
    return side


def joined_groups(
    file: OpenArrays,
    headers: Mapping[str, ArrayHeader],
    groups: Sequence[str],
    name: str,
) -> dict[str, np.ndarray]:
    """Columns of a file with a group of arrays for each episode, and their
    ``episode_ids``.

    file: as opened by `open_hdf5`. headers: shapes and types of its arrays by path.
    groups: as from `episode_groups`. name: of the file. Arrays that not all groups
    have, and those that have neither one row per step nor one more, are left out.
    Raises DataError if no array is left.
    """
    shapes = _shapes_by_group(headers, groups)
    lengths = {group: _steps(shapes[group]) for group in groups}
    used = [key for key in shapes[groups[0]] if _fits(key, shapes, lengths)]
    if not used:
        raise DataError(
            f"{name} holds groups of arrays ({listed(groups, 3)}) without an array that"
            " all have, one row per step; write actions and rewards into every group"
        )
    paths = [f"{group}/{key}" for group in groups for key in used]
    arrays = file.arrays(paths, twice=paths)
    columns: dict[str, np.ndarray] = {}
    for key in used:
        pieces = [arrays[f"{group}/{key}"] for group in groups]
        pairs = list(zip(pieces, lengths.values(), strict=True))
        column = np.concatenate([piece[:steps] for piece, steps in pairs])
        columns |= _as_columns(key, column)
        if all(len(piece) == steps + 1 for piece, steps in pairs):
            following = np.concatenate([piece[1:] for piece in pieces])
            columns |= _as_columns(_next_name(key), following)
    columns[IDS] = np.repeat(np.arange(len(groups)), list(lengths.values()))
    return columns


def _shapes_by_group(
    headers: Mapping[str, ArrayHeader], groups: Sequence[str]
) -> dict[str, dict[str, tuple[int, ...]]]:
    """Shapes of the arrays of numbers with at least one row, by group and by the name
    in it. headers: of all arrays, by path.
    """
    shapes: dict[str, dict[str, tuple[int, ...]]] = {group: {} for group in groups}
    for path, header in headers.items():
        match = _EPISODE_GROUP.match(path)
        sides = len(header.shape or ())
        is_array = header.dtype.kind in "biuf" and 1 <= sides <= 2
        if match is not None and is_array and 0 not in header.shape:
            group = match.group(1)
            shapes[group][path.removeprefix(f"{group}/")] = tuple(header.shape)
    return shapes


def _steps(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Number of steps of an episode: the rows of its actions, else the rows that most
    arrays have. shapes: of its arrays, by name.
    """
    for key in ("actions", "action", "rewards", "reward"):
        if key in shapes:
            return shapes[key][0]
    if not shapes:
        return 0
    return Counter(shape[0] for shape in shapes.values()).most_common(1)[0][0]


def _fits(
    key: str,
    shapes: Mapping[str, Mapping[str, tuple[int, ...]]],
    lengths: Mapping[str, int],
) -> bool:
    """Whether all groups have an array, with one row per step in all of them or one
    more in all, and rows of one size. shapes: by group and name.
    """
    if any(key not in arrays for arrays in shapes.values()):
        return False
    surplus = {shapes[group][key][0] - steps for group, steps in lengths.items()}
    sizes = {arrays[key][1:] for arrays in shapes.values()}
    return len(sizes) == 1 and surplus in ({0}, {1})


def _next_name(key: str) -> str:
    group, slash, name = key.partition("/")
    if slash:
        return f"next_{group}/{name}"
    return f"next_{key}"


def _as_columns(key: str, array: np.ndarray) -> dict[str, np.ndarray]:
    """A column of an array; one for each of its numbers where it is one part among
    several, in a group of its own.
    """
    if array.ndim == 1 or "/" not in key:
        return {key: array}
    return {f"{key}_{i}": array[:, i] for i in range(array.shape[1])}


def unrolled_ring(file: CheckedFile, name: str) -> dict[str, np.ndarray]:
    """Columns of a Tianshou buffer, the oldest row first, without rows that were never
    filled.

    file: as opened by `open_hdf5`. name: of the file. Raises DataError for several
    buffers in one file, or if it is empty.
    """
    size = _whole_attribute(file, "_size")
    place = _whole_attribute(file, "_index")
    if size is None or place is None:
        raise DataError(
            f"{name} holds the rows of a Tianshou buffer, but not how many are filled"
            " (_size, _index); save each buffer by itself with save_hdf5"
        )
    paths = []
    for path in file.datasets:
        array = file.raw[path]
        is_array = array.dtype.kind in "biuf" and 1 <= len(array.shape or ()) <= 2
        is_data = array.attrs.get("__data_type__", "ndarray") in ("ndarray", "Tensor")
        if path.startswith(_RING_GROUP) and is_array and is_data:
            paths.append(path)
    arrays = file.arrays(paths, twice=paths)
    columns: dict[str, np.ndarray] = {}
    for path, array in arrays.items():
        if len(array) < size:
            continue
        order = np.arange(size)
        if size == len(array):
            order = (order + place) % size
        columns[path.removeprefix(_RING_GROUP)] = array[order]
    if not size or not columns:
        raise DataError(f"{name} holds an empty Tianshou buffer; save one with rows")
    return columns


def _whole_attribute(file: CheckedFile, name: str) -> int | None:
    """A whole number among the attributes of a file; None if there is none."""
    if name not in file.raw.attrs:
        return None
    value = np.asarray(file.raw.attrs[name])
    if value.shape != () or value.dtype.kind not in "iu" or value < 0:
        return None
    return int(value)


def below_each_other(
    arrays: Mapping[str, np.ndarray], environments: int
) -> dict[str, np.ndarray]:
    """Columns of arrays (steps, environments, …): the rows of one environment below
    those of another.

    With several environments, ``episode_ids`` begin anew in each of them and after each
    end.
    """
    columns = {}
    for key, array in arrays.items():
        by_environment = np.swapaxes(array, 0, 1)
        columns[key] = by_environment.reshape(-1, *array.shape[2:])
    if environments > 1 and IDS not in columns:
        n_rows = len(next(iter(columns.values())))
        ends = np.zeros(n_rows, dtype=np.bool_)
        for key in _ENDS:
            if key in columns:
                ends |= columns[key].reshape(n_rows, -1)[:, 0] == 1
        ends[n_rows // environments - 1 :: n_rows // environments] = True
        columns[IDS] = np.cumsum(np.append(False, ends[:-1]))
    return columns
