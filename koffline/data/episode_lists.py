"""Lists of episodes as loops around a Gymnasium environment record them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from koffline.data.columns import as_array
from koffline.data.flat import KEYS
from koffline.data.raw import (
    FileDescription,
    RawLog,
    follow,
    join_episodes,
    lacks_next_masks,
    leave_out_unmasked,
    notes_on_unmasked,
    raw_log,
)
from koffline.data.spaces import SpaceRequest
from koffline.errors import DataError, listed

SOURCE = "the list of episodes"
_FLAGS = ("terminated", "truncated")
_OF_LOG = ("episode_ids", "steps", "clusters")  # not those of one episode
_EXAMPLE = (
    "each episode needs observations (T + 1, …), actions (T, …), rewards (T,) and"
    " terminations (T,)"
)


def read_episode_list(
    episodes: Sequence[object], action_space: SpaceRequest | None = None
) -> RawLog:
    """A log from a list of episodes: dicts, or records with the same attributes
    (Minari's EpisodeData).

    An episode of T steps has

    - observations: (T + 1, …), the last one being the state that was reached, as
      Gymnasium and Minari have them; or (T, …) beside ``next_observations`` (T, …); or
      (T, …) alone: then the last row of an episode that did not terminate has no next
      state and is left out, with a note;
    - actions: (T,) or (T, k); rewards: (T,);
    - terminations (``terminated``, ``terminals``): (T,) flags, or one flag of the whole
      episode; whether the world ended;
    - truncations (``truncated``, ``timeouts``), optional: likewise; whether the
      recording stopped;
    - ``behavior_log_probabilities``, ``weights`` (T,), optional;
    - ``action_mask``: (T, n) available actions, or (T + 1, n) with those of the state
      that was reached, optional.

    Other entries, such as ``infos``, are ignored. Raises DataError, also if episodes
    differ in their entries.
    """
    columns = join_episodes(_columns_of_episodes(episodes), SOURCE)
    notes: list[str] = []
    has_lost = False
    columns.setdefault("truncated", np.zeros(len(columns["rewards"]), np.bool_))
    if "next_observations" not in columns:
        notes, has_lost = follow(columns, SOURCE)
    elif lacks_next_masks(columns):
        n_left_out = leave_out_unmasked(columns)
        notes = notes_on_unmasked(n_left_out)
        has_lost = n_left_out > 0
    return raw_log(columns, FileDescription(), action_space, SOURCE, notes, has_lost)


def is_episode_list(source: object) -> bool:
    """Whether an object is a list or tuple whose first item may be an episode."""
    if not isinstance(source, (list, tuple)) or not source:
        return False
    first = source[0]
    return isinstance(first, Mapping) or hasattr(first, "observations")


def _columns_of_episodes(episodes: Sequence[object]) -> Iterator[dict[str, np.ndarray]]:
    """Columns (T, …) of each episode, with the same names in all of them."""
    expected: tuple[str, ...] | None = None
    for number, episode in enumerate(episodes):
        columns = _columns_of(episode, number)
        if not len(columns["rewards"]):
            continue  # no step, so that nothing can be told from its shapes
        names = tuple(columns)
        if expected is None:
            expected = names
        elif names != expected:
            raise DataError(
                f"{SOURCE}: episode {number} has {listed(names)}, the first one"
                f" {listed(expected)}; give all episodes the same entries"
            )
        yield columns


def _columns_of(episode: object, number: int) -> dict[str, np.ndarray]:
    """Columns (T, …) of one episode, in the order of `KEYS`. Raises DataError."""
    where = f"{SOURCE}: episode {number}"
    columns: dict[str, np.ndarray] = {}
    for name, keys in KEYS.items():
        values = None
        if name not in _OF_LOG:
            values = _entry(episode, keys)
        if values is None:
            continue
        if isinstance(values, (Mapping, tuple)):
            raise DataError(
                f"{where}: {keys[0]} is a {type(values).__name__}; flatten it into one"
                " array (gymnasium.spaces.flatten)"
            )
        columns[name] = as_array(f"{where}: {keys[0]}", values)
    needed = ("observations", "actions", "rewards", "terminated")
    missing = [KEYS[name][0] for name in needed if name not in columns]
    if missing:
        raise DataError(
            f"{where} lacks {', '.join(missing)}; {_EXAMPLE}, or one flag for the whole"
            " episode (a table of rows is a frame: polars.DataFrame(rows))"
        )
    for name in ("rewards", "behavior_log_probabilities", "weights"):
        if name in columns:
            columns[name] = columns[name].reshape(-1)
    steps = len(columns["rewards"])
    for name in _FLAGS:
        if name in columns:
            columns[name] = _flags(columns[name], steps)
    _settle_observations(columns, steps, where)
    return columns


def _entry(episode: object, keys: Sequence[str]) -> object:
    """The first of the keys that a dict or record has; None if it has none of them."""
    for key in keys:
        if isinstance(episode, Mapping):
            value = episode.get(key)
        else:
            value = getattr(episode, key, None)
        if value is not None:
            return value
    return None


def _flags(flags: np.ndarray, steps: int) -> np.ndarray:
    """Flags (T,); one flag of the whole episode is that of its last step."""
    if flags.shape == ():
        is_last = np.arange(steps) == steps - 1
        return is_last & bool(flags == 1)
    if flags.shape == (steps, 1):
        return flags.reshape(steps)
    return flags


def _settle_observations(
    columns: dict[str, np.ndarray], steps: int, where: str
) -> None:
    """Make observations (T, …), and next observations where a last one is there, in
    place. Raises DataError for other lengths.
    """
    for name in ("observations", "next_observations"):
        if name in columns and columns[name].ndim == 1:
            columns[name] = columns[name].reshape(-1, 1)
    mask = columns.get("action_mask")
    if mask is not None and len(mask) == steps + 1:
        columns["action_mask"] = mask[:-1]
        columns.setdefault("next_action_mask", mask[1:])
    observations = columns["observations"]
    if len(observations) == steps:
        return
    if len(observations) != steps + 1:
        raise DataError(
            f"{where} has {len(observations)} observations for {steps} rewards; give T"
            " + 1, with the state that was reached at the end, or T"
        )
    columns["observations"] = observations[:-1]
    columns.setdefault("next_observations", observations[1:])
