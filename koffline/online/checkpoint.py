"""Checkpoints of a stack: everything to go on to the bit, the last few kept, a bad one never the end."""

from __future__ import annotations

import errno
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from koffline.checkpoints import read_checkpoint, write_checkpoint
from koffline.errors import ConfigError

_NAME = re.compile(r"step_(\d{9,})\.pt")
_ARRAY, _TUPLE = "a numpy array", "a tuple"  # how these are marked in a file that holds no code
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Saved:
    """A stack at one moment.

    steps: environment steps per run; seconds: of training so far; files: bytes of each log by its path in the
    run's folder; diverged: the step at which a seed's networks stopped being finite; state: the stack's own.
    """

    steps: int
    seconds: float
    files: Mapping[str, int]
    diverged: Mapping[int, int]
    state: Mapping[str, Any]


def save(folder: Path, fingerprint: str, saved: Saved, keep: int) -> Path:
    """Write a checkpoint and let go of all but the last ``keep``.

    Raises ConfigError where the disk refuses; the ones before are as they were.
    """
    path = folder / f"step_{saved.steps:09d}.pt"
    state = {
        "fingerprint": fingerprint,
        "steps": saved.steps,
        "seconds": saved.seconds,
        "files": dict(saved.files),
        "diverged": dict(saved.diverged),
        "state": _packed(saved.state),
    }
    try:
        write_checkpoint(path, state)
        for old in checkpoints(folder)[:-keep]:
            old.unlink()
    except (OSError, RuntimeError) as error:  # torch turns a full disk into a RuntimeError
        raise _refused_by_disk(path, error) from error
    return path


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a stack, the oldest first."""
    found = [path for path in folder.glob("step_*.pt") if _NAME.fullmatch(path.name)]
    return sorted(found, key=_step_of)


def newest(folder: Path, fingerprint: str) -> Saved | None:
    """The last checkpoint that can be read; None where there is none at all.

    A damaged one is named in a warning together with the older one that is used instead. Raises ConfigError,
    with everything left as it is, for one of another run, and where none can be read.
    """
    for path in folder.glob("*.part"):  # of a process that was killed while writing
        path.unlink()
    damaged: list[Path] = []
    for path in reversed(checkpoints(folder)):
        state = _read(path, fingerprint)
        if state is None:
            damaged.append(path)
            continue
        try:
            saved = Saved(
                state["steps"], state["seconds"], state["files"], state["diverged"], _unpacked(state["state"])
            )
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError):
            damaged.append(path)
            continue
        for bad in damaged:
            _LOG.warning("checkpoint %s is damaged; going on from the older %s", bad, path.name)
        return saved
    if damaged:
        raise ConfigError(
            f"checkpoint {damaged[0]} is damaged and no older one can be read; the run cannot go on, "
            "its files stay as they are: train again into another --out"
        )
    return None


def _read(path: Path, fingerprint: str) -> dict[str, Any] | None:
    """None for a damaged file."""
    try:
        state = read_checkpoint(path, fingerprint)
    except ConfigError as error:
        if "cannot be read" in str(error):
            return None
        raise ConfigError(
            f"checkpoint {path} is of a run with other settings; resume it with its own config or choose "
            "another --out"
        ) from None
    return state


def _step_of(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1])


def _refused_by_disk(path: Path, error: Exception) -> ConfigError:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else " ".join(str(error).split())
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        reason = os.strerror(errno.ENOSPC)
    before = [other for other in checkpoints(path.parent) if other != path]
    left = f"{before[-1].name} before it is intact" if before else "there is none before it"
    return ConfigError(
        f"checkpoint {path} cannot be written ({reason}); {left}: free the disk, then --resume"
    )


def _packed(value: Any) -> Any:
    """Arrays and tuples in a form that is read without running any code."""
    if isinstance(value, np.ndarray):
        array = np.ascontiguousarray(value)
        kind = array.dtype.str
        raw = torch.from_numpy(array.reshape(-1).view(np.uint8).copy())
        return {_ARRAY: kind, "shape": list(value.shape), "bytes": raw}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {key: _packed(part) for key, part in value.items()}
    if isinstance(value, tuple):
        return {_TUPLE: [_packed(part) for part in value]}
    return [_packed(part) for part in value] if isinstance(value, list) else value


def _unpacked(value: Any) -> Any:
    if isinstance(value, dict):
        if _ARRAY in value:
            flat = value["bytes"].numpy().view(np.dtype(value[_ARRAY])).copy()
            return flat.reshape(value["shape"])
        if _TUPLE in value:
            return tuple(_unpacked(part) for part in value[_TUPLE])
        return {key: _unpacked(part) for key, part in value.items()}
    return [_unpacked(part) for part in value] if isinstance(value, list) else value
