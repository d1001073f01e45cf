"""Checkpoints of a run: written atomically, read without running any code.

A long run keeps its last few checkpoints, so that an older one can replace a damaged
one. On resuming, log files are cut back to their length at the checkpoint.
"""

from __future__ import annotations

import copy
import io
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from koffline.errors import ConfigError, DataError
from koffline.store.files import atomic_file
from koffline.untrusted.arrays import load_tensors
from koffline.untrusted.limits import one_line_errors

_NAME = re.compile(r"step_(\d{9,})\.pt")
# begins the fingerprints of stacks; another number for what older versions cannot read
_FORMAT = "2 "
_LOG = logging.getLogger(__name__)


# by name: tensors, numbers, texts, and lists and dicts of these
State: TypeAlias = dict[str, Any]


class ForeignCheckpoint(ConfigError):
    """A checkpoint of another run: of other data or settings, or by another version."""


def write_checkpoint(path: Path, state: State) -> None:
    """Write `state` atomically, replacing an older checkpoint.

    Raises DataError if the disk refuses.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path, force=True) as temporary:
        # written in one call: a full disk raises OSError, not torch's error
        content = io.BytesIO()
        torch.save(state, content)
        # getbuffer() with an error crashes Python 3.12
        temporary.write_bytes(content.getvalue())


def read_checkpoint(path: Path, fingerprint: str) -> State | None:
    """The state at `path`; None if there is none.

    fingerprint: of the run's data and settings. Raises ConfigError if the file is
    damaged, ForeignCheckpoint if it belongs to another run.
    """
    if not path.exists():
        return None
    with one_line_errors(
        f"checkpoint {path}", "it cannot be read", "delete it", ConfigError
    ):
        state = load_tensors(path)
    if not isinstance(state, dict) or state.get("fingerprint") != fingerprint:
        raise ForeignCheckpoint(
            f"checkpoint {path} belongs to a run with other data or settings, or of"
            " another version; resume it with its own or choose another --out"
        )
    return state


def save(
    folder: Path, fingerprint: str, steps: int, state: Mapping[str, Any], keep: int
) -> None:
    """Write the checkpoint of a stack of runs after ``steps``, and remove all but the
    last ``keep``.

    fingerprint: of the data and settings, which `newest` compares. state: tensors and
    plain values.

    Raises ConfigError if writing fails; earlier checkpoints are then kept.
    """
    path = folder / f"step_{steps:09d}.pt"
    try:
        write_checkpoint(path, {**state, "fingerprint": _FORMAT + fingerprint})
        for old in checkpoints(folder)[:-keep]:
            old.unlink()
    except (DataError, OSError) as error:
        before = [other.name for other in checkpoints(folder) if other != path]
        if before:
            intact = f"{before[-1]} before it is intact"
        else:
            intact = "there is none before it"
        reason = str(error).partition(";")[0]
        raise ConfigError(
            f"checkpoint {reason}; {intact}: free the disk, then --resume"
        ) from error


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a stack, the oldest first."""
    steps_of = {}
    for path in folder.glob("*"):
        match = _NAME.fullmatch(path.name)
        if match:
            steps_of[path] = int(match[1])
    return sorted(steps_of, key=lambda path: (steps_of[path], path))


def newest(folder: Path, fingerprint: str) -> State | None:
    """Read the newest intact checkpoint; None if the folder has none.

    A damaged checkpoint is named in a warning, and an older one is used. Raises
    ConfigError, and changes no file, if a checkpoint belongs to another run or none can
    be read.
    """
    newest_first = checkpoints(folder)[::-1]
    for path in newest_first:
        try:
            return read_checkpoint(path, _FORMAT + fingerprint)
        except ForeignCheckpoint:
            raise
        except ConfigError:
            _LOG.warning(
                "checkpoint %s is damaged; going on from the one before, if there"
                " is one",
                path,
            )
    if newest_first:
        raise ConfigError(
            f"checkpoint {newest_first[0]} is damaged and no older one can be read; the run"
            " cannot go on, its files stay as they are: train again into another --out"
        )
    return None


def state_of(part: Any) -> Any:
    """Copy of the state that a part of a run needs to continue, as tensors and plain
    values.

    It can be read without running code. Objects name the attributes of their state in
    ``kept``; elements of a tuple are separate parts.
    """
    if isinstance(part, np.random.Generator):
        return part.bit_generator.state
    if isinstance(part, np.ndarray | Tensor):
        return torch.as_tensor(part).clone()
    if isinstance(part, tuple):
        return [state_of(element) for element in part]
    if isinstance(part, dict):
        return {name: state_of(element) for name, element in part.items()}
    if hasattr(part, "kept"):
        return {name: state_of(getattr(part, name)) for name in part.kept}
    return copy.deepcopy(part)


def restored(part: Any, state: Any) -> Any:
    """The part with a state from ``state_of``; tensors, generators and objects are
    updated in place.
    """
    if isinstance(part, np.random.Generator):
        part.bit_generator.state = state
    elif isinstance(part, Tensor):  # others hold views of it
        part.copy_(state)
    elif isinstance(part, np.ndarray):
        return state.clone().numpy()
    elif isinstance(part, tuple):
        return tuple(map(restored, part, state))
    elif isinstance(part, dict):
        return {name: restored(part.get(name), kept) for name, kept in state.items()}
    elif hasattr(part, "kept"):
        for name in part.kept:
            setattr(part, name, restored(getattr(part, name), state[name]))
    else:
        return state
    return part
