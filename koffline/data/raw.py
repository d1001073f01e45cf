"""Shared parts of readers and writers: unchecked columns, the action space, and a
file's description.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from koffline.data import columns as checks
from koffline.data.spaces import ActionSpace, Bounds, Continuous, Discrete, SpaceRequest
from koffline.data.transitions import Metadata, Transitions
from koffline.errors import DataError, counted
from koffline.json_types import JsonObject
from koffline.untrusted.limits import parse_json

UNFOLLOWED = (
    "the last step of an episode that did not terminate has no next observation"
)
GAPS = "gaps: "  # beginning of a note on missing rows
ORDER = "order: "  # beginning of a note on rows whose order is not known
STARTS = "starts: "  # beginning of a note on episodes whose beginning is missing
SHARED = "units: "  # beginning of a note on rows that are not independent
# kinds of notes that ask for care
CAUTIONS = frozenset(kind.removesuffix(": ") for kind in (GAPS, ORDER, STARTS, SHARED))
# Reads metadata from plain values by the names of its fields; other keys are ignored.
# Raises ValueError.
METADATA = TypeAdapter(Metadata)
# Undeclared whole-number actions count as discrete up to this number of choices.
_MOST_ASSUMED = 10_000


@dataclass(frozen=True, eq=False)
class RawLog:
    """Columns named as in ``Transitions``, with aligned rows of equal number and
    unchecked values.

    ``labels``: values of a table's column ``by`` at the first row of each episode (each
    row, without episodes).
    """

    columns: Mapping[str, np.ndarray]
    action_space: ActionSpace
    metadata: Metadata = field(default_factory=Metadata)
    labels: np.ndarray | None = None

    def transitions(self) -> Transitions:
        """Check the columns and build the record.

        Raises DataError for the first error.
        """
        return Transitions(
            **self.columns, action_space=self.action_space, metadata=self.metadata
        )


def shaped_actions(actions: np.ndarray, space: ActionSpace) -> np.ndarray:
    """Actions in the shape of their space: (N,) if discrete, else (N, k)."""
    if isinstance(space, Discrete) and actions.shape[1:] == (1,):
        return actions.reshape(-1)
    needs_side = isinstance(space, Continuous) and space.k == 1 and actions.ndim == 1
    if needs_side:
        return actions.reshape(-1, 1)
    return actions


def settle_space(
    actions: np.ndarray,
    requested: SpaceRequest | None,
    declared: ActionSpace | None,
    source: str,
) -> tuple[ActionSpace, tuple[str, ...]]:
    """The requested action space, else the file's, else an assumed one, with notes.

    actions: (N, ...). Without a space, integers are taken as Discrete(largest + 1),
    other numbers as unbounded Continuous(k). Raises DataError if integers cannot be
    discrete actions.
    """
    space = bounded(requested, actions.shape[1:])
    if space is not None:
        if declared in (None, space):
            return space, ()
        return space, (f"action space {space} as asked, the file declares {declared}",)
    if declared is not None:
        return declared, ()
    space = _assumed_space(actions, source)
    return space, (
        f"the file declares no action space; assumed {space} from the actions"
        " (--discrete N, or --continuous LOW HIGH for quantities, declares it)",
    )


def bounded(
    requested: SpaceRequest | None, shape: tuple[int, ...]
) -> ActionSpace | None:
    """The requested space; Bounds become Continuous for actions of shape (N,
    *shape).
    """
    k = max(1, math.prod(shape))
    if isinstance(requested, Bounds):
        return Continuous(k, requested.low, requested.high)
    return requested


def _assumed_space(actions: np.ndarray, source: str) -> ActionSpace:
    """The space of actions (N, …) by their numbers. Raises DataError for whole numbers
    that cannot be choices.
    """
    if actions.dtype.kind == "f":
        return Continuous(max(1, math.prod(actions.shape[1:])))
    least = int(actions.min())
    greatest = int(actions.max())
    if actions.shape[1:] not in ((), (1,)) or least < 0 or greatest >= _MOST_ASSUMED:
        raise DataError(
            f"{source}: actions (N, …) = {actions.shape} are whole numbers from {least}"
            f" up to {greatest}, and the file declares no action space; declare"
            " quantities (--continuous LOW HIGH), or choices 0, 1, 2, …"
            " (--discrete N)"
        )
    return Discrete(greatest + 1)


def space_to_json(space: ActionSpace) -> JsonObject:
    """{"type": "discrete", "n"} or {"type": "continuous", "k", "low", "high"}; null: an
    infinite bound.
    """
    if isinstance(space, Discrete):
        return {"type": "discrete", "n": space.n}
    return {
        "type": "continuous",
        "k": space.k,
        "low": [_finite_or_none(bound) for bound in space.low],
        "high": [_finite_or_none(bound) for bound in space.high],
    }


def _finite_or_none(bound: float) -> float | None:
    if math.isfinite(bound):
        return bound
    return None


def space_from_json(value: Any) -> ActionSpace:
    """Inverse of `space_to_json`. Raises DataError for any other value."""
    try:
        if value["type"] == "discrete":
            return Discrete(value["n"])
        if value["type"] == "continuous":
            low = [-math.inf if bound is None else bound for bound in value["low"]]
            high = [math.inf if bound is None else bound for bound in value["high"]]
            return Continuous(value["k"], low, high)
    except (KeyError, TypeError, IndexError):
        pass
    raise DataError(
        f"the file's action space is {value!r}, which koffline cannot read; declare the"
        " space"
    )


def describe_log(log: Transitions) -> str:
    """Description of a log for its file, as JSON: format, space, episodes, digest,
    metadata.
    """
    metadata = dataclasses.replace(log.metadata, sha256=log.sha256)
    return describe_columns(log.action_space, log.has_episodes, metadata)


def describe_columns(space: ActionSpace, has_episodes: bool, metadata: Metadata) -> str:
    """Description of a log whose rows are not in memory; the digest is taken from the
    metadata, if any.
    """
    described = {
        "format": 1,
        "action_space": space_to_json(space),
        "episodes": has_episodes,
    }
    return json.dumps(
        described | metadata_to_json(metadata), sort_keys=True, default=str
    )


def metadata_to_json(metadata: Metadata) -> JsonObject:
    """The metadata as plain values by field name."""
    return vars(metadata) | {
        "extra": dict(metadata.extra),
        "notes": list(metadata.notes),
    }


@dataclass(frozen=True)
class FileDescription:
    """Description of a file, as written by ``describe_log``; without one, the
    defaults.
    """

    action_space: ActionSpace | None = None
    episodes: bool = True
    metadata: Metadata = field(default_factory=Metadata)


def read_description(text: str | bytes | None) -> FileDescription | None:
    """Parse the text of ``describe_log``; None if there is none.

    Raises DataError if broken or newer.
    """
    if text is None:
        return None
    try:
        described = parse_json(text)
        version = described["format"]
        if version != 1:
            raise DataError(
                f"the file has koffline format {version}, known is 1; update koffline"
            )
        space = space_from_json(described["action_space"])
        return FileDescription(
            space, bool(described["episodes"]), METADATA.validate_python(described)
        )
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        raise DataError(
            "the file's koffline description is damaged; write the file again"
        ) from None


def raw_log(
    columns: dict[str, np.ndarray],
    described: FileDescription,
    action_space: SpaceRequest | None,
    source: str,
    notes: Sequence[str] = (),
    lost: bool = False,
) -> RawLog:
    """Build a reader's RawLog: settle the action space, and append notes to those of
    the file.

    lost: whether last rows were left out.
    """
    actions = checks.as_array("actions", columns["actions"])
    declared = described.action_space
    mask = columns.get("action_mask")
    has_mask = mask is not None and mask.ndim == 2
    if declared is None and has_mask and actions.dtype.kind in "iu":
        declared = Discrete(columns["action_mask"].shape[1])
    space, settled = settle_space(actions, action_space, declared, source)
    columns["actions"] = shaped_actions(actions, space)
    notes = (*described.metadata.notes, *notes, *settled)
    lost = lost or described.metadata.lost_last_rows
    about = dataclasses.replace(
        described.metadata, source=source, notes=notes, lost_last_rows=lost
    )
    return RawLog(columns, space, about)


def episodic_log(
    episodes: Iterable[Mapping[str, np.ndarray]],
    described: FileDescription | None,
    action_space: SpaceRequest | None,
    source: str,
) -> RawLog:
    """Build a RawLog from episodes (columns (T, ...)) with one observation per step and
    no next observations.

    In files with our description, an unfinished episode ends with an extra step that is
    no row.
    """
    columns = join_episodes(episodes, source)
    notes, lost = follow(columns, source)
    if described is None:
        return raw_log(columns, FileDescription(), action_space, source, notes, lost)
    if not described.episodes:
        del columns["episode_ids"]
    return raw_log(columns, described, action_space, source)


def followed(
    columns: Mapping[str, np.ndarray], is_last: np.ndarray
) -> tuple[dict[str, np.ndarray], int]:
    """Columns with next observations taken from the next rows of episodes, and the
    number of rows left out.

    The last row (``is_last`` (N,)) of an episode has no next row. If terminal, its own
    observation is used; otherwise it is left out, and if it was truncated, the row
    before it becomes the truncated one.
    """
    truncated = columns["truncated"] == 1
    lost = is_last & (columns["terminated"] != 1)
    moved = np.append(lost[1:] & truncated[1:] & ~is_last[:-1], False)
    kept = np.flatnonzero(~lost)
    rows = {name: column[kept] for name, column in columns.items()}
    rows["truncated"] = (truncated | moved)[kept]
    # the row itself where it is the last one of its episode
    following = np.where(is_last[kept], kept, kept + 1)
    rows["next_observations"] = columns["observations"][following]
    if lacks_next_masks(columns):
        rows["next_action_mask"] = columns["action_mask"][following]
    return rows, int(lost.sum())


def lacks_next_masks(columns: Mapping[str, np.ndarray]) -> bool:
    """Whether columns hold the masks of states and not those of next states."""
    return "action_mask" in columns and "next_action_mask" not in columns


def leave_out_unmasked(columns: dict[str, np.ndarray]) -> int:
    """Leave out the last rows of episodes that did not terminate, since no row below
    says which actions were available next, in place; return their number.

    The row before such a row becomes the truncated one. Rows that stand alone stay:
    `Transitions` refuses them.
    """
    is_last = checks.last_rows(columns)
    lost = is_last & (columns["terminated"] != 1)
    if lost.all() or not {"episode_ids", "steps"} & columns.keys():
        return 0
    columns["next_action_mask"] = checks.following_masks(columns)
    above = np.append(lost[1:] & ~is_last[:-1], False)
    columns["truncated"] = (columns["truncated"] == 1) | above
    for name, column in columns.items():
        columns[name] = column[~lost]
    return int(lost.sum())


def notes_on_unmasked(n_rows: int) -> list[str]:
    """A note on the rows that `leave_out_unmasked` left out, if any."""
    if not n_rows:
        return []
    rows = counted(n_rows, "row", "was", "were")
    return [
        f"{rows} left out: the last step of an episode that did not terminate says not"
        " which actions were available next (next_action_mask)"
    ]


def follow(columns: dict[str, np.ndarray], source: str) -> tuple[list[str], bool]:
    """Add next observations in place, as `followed` does; return notes, and whether
    rows were left out.

    Raises DataError if no row is left.
    """
    rows, n_lost = followed(columns, checks.last_rows(columns))
    columns.update(rows)
    if not len(columns["rewards"]):
        raise DataError(
            f"{source}: no row has a next observation; export the log with"
            " next_observations"
        )
    notes = []
    if n_lost:
        lost = counted(n_lost, "row", "was", "were")
        notes.append(f"{lost} left out: {UNFOLLOWED} in this file")
    if (checks.last_rows(columns) & (columns["terminated"] == 1)).any():
        notes.append(
            "terminal rows hold their own observation as next observation (it has no"
            " influence)"
        )
    return notes, n_lost > 0


def join_episodes(
    episodes: Iterable[Mapping[str, np.ndarray]], source: str
) -> dict[str, np.ndarray]:
    """Concatenate episodes, each given as columns (T, ...), and add ``episode_ids``;
    empty ones are skipped.

    Raises DataError if no episode has rows, or if the columns of an episode differ in
    length.
    """
    kept = []
    for i, episode in enumerate(episodes):
        steps = len(episode["rewards"])
        for name, column in episode.items():
            if len(column) != steps:
                raise DataError(
                    f"{source}: episode {i} has {name} for {len(column)} of {steps}"
                    " rewards; record it again"
                )
        if steps:
            kept.append(episode)
    if not kept:
        raise DataError(
            f"{source} has no steps; give a log with at least one transition"
        )
    joined = {
        name: np.concatenate([episode[name] for episode in kept]) for name in kept[0]
    }
    lengths = [len(episode["rewards"]) for episode in kept]
    return {**joined, "episode_ids": np.repeat(np.arange(len(kept)), lengths)}


def cut_episodes(log: Transitions, target: str) -> Iterator[slice]:
    """Row ranges of the episodes; single rows if there are no episodes.

    Raises DataError if a next observation inside an episode differs from the
    observation of the next row, which an episodic file cannot store.
    """
    is_last = checks.last_rows(log.columns)
    for block in checks.blocks(len(log) - 1):
        below = log.observations[block.start + 1 : block.stop + 1]
        differs = log.next_observations[block] != below
        differs = differs.reshape(len(below), -1).any(axis=1)
        broken = differs & ~is_last[block]
        if broken.any():
            row = block.start + int(np.argmax(broken))
            raise DataError(
                f"{target} keeps one observation per step, but the next observation of"
                f" row {row} is not the observation of the row below; write hdf5 or npz"
            )
    for start, stop in pairwise([0, *(np.flatnonzero(is_last) + 1).tolist()]):
        yield slice(start, stop)
