"""Checkpoints of a run: written whole or not at all, read without running any code.

A long run keeps its last few, so that an older one replaces a damaged one. On resuming, logs beside them are
cut back to their length at the checkpoint.
"""

from __future__ import annotations

import io
import logging
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from koffline.errors import ConfigError, DataError
from koffline.store.files import atomic_file
from koffline.untrusted.arrays import load_tensors
from koffline.untrusted.limits import Refused

_NAME = re.compile(r"step_(\d{9,})\.pt")
_ARRAY, _TUPLE = "a numpy array", "a tuple"  # keys that mark arrays and tuples in the file
_LOG = logging.getLogger(__name__)


def write_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write `state`, whole or not at all, over an older one. Raises DataError where the disk refuses."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path, force=True) as temporary:
        content = io.BytesIO()  # written in one call: a full disk raises OSError, not torch's error
        torch.save(state, content)
        temporary.write_bytes(content.getbuffer())


def read_checkpoint(path: Path, fingerprint: str) -> dict[str, Any] | None:
    """The state at `path`, None if there is none.

    Raises ConfigError when the file is damaged or belongs to a run on other data or with other settings.
    """
    if not path.exists():
        return None
    try:
        state = load_tensors(path)
    except Refused as error:
        raise ConfigError(f"checkpoint {path} cannot be read: {error}") from None
    except Exception as error:  # torch raises many kinds; all mean that the file is not ours
        raise ConfigError(f"checkpoint {path} cannot be read ({type(error).__name__}); delete it") from None
    if not isinstance(state, dict) or state.get("fingerprint") != fingerprint:
        raise ConfigError(
            f"checkpoint {path} belongs to a run with other data or settings; resume it with its own or "
            "choose another --out"
        )
    return state


@dataclass(frozen=True)
class Saved:
    """State of a stack of runs at one step.

    steps: environment steps per run; seconds: of training so far; files: bytes of each log by its path in the
    run's folder; diverged: the step at which a seed's networks stopped being finite; state: the stack's own.
    """

    steps: int
    seconds: float
    files: Mapping[str, int]
    diverged: Mapping[int, int]
    state: Mapping[str, Any]


def save(folder: Path, fingerprint: str, saved: Saved, keep: int) -> None:
    """Write a checkpoint and remove all but the last ``keep``.

    Raises ConfigError if writing fails; earlier checkpoints then stay.
    """
    path = folder / f"step_{saved.steps:09d}.pt"
    try:
        write_checkpoint(path, {"fingerprint": fingerprint, **_packed(vars(saved))})
        for old in checkpoints(folder)[:-keep]:
            old.unlink()
    except (DataError, OSError) as error:
        before = [other.name for other in checkpoints(folder) if other != path]
        intact = f"{before[-1]} before it is intact" if before else "there is none before it"
        said = str(error).partition(";")[0]
        raise ConfigError(f"checkpoint {said}; {intact}: free the disk, then --resume") from error


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a stack, the oldest first."""
    found = [(int(match[1]), path) for path in folder.glob("*") if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def newest(folder: Path, fingerprint: str) -> Saved | None:
    """Read the newest intact checkpoint; None if the folder has none.

    A damaged one is named in a warning and an older one is used. Raises ConfigError, and changes no file, if
    a checkpoint belongs to another run or none can be read.
    """
    found = checkpoints(folder)[::-1]
    for path in found:
        try:
            state = read_checkpoint(path, fingerprint) or {}
            return Saved(**{name: _unpacked(state[name]) for name in Saved.__dataclass_fields__})
        except (ConfigError, KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            if isinstance(error, ConfigError) and "belongs to" in str(error):
                raise
        _LOG.warning("checkpoint %s is damaged; going on from the one before, if there is one", path)
    if found:
        raise ConfigError(
            f"checkpoint {found[0]} is damaged and no older one can be read; the run cannot go on, "
            "its files stay as they are: train again into another --out"
        )
    return None


def file_sizes(folder: Path, files: Iterable[Path]) -> dict[str, int]:
    """Bytes of each existing log file, by its path in the run's folder."""
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in files if path.exists()}


def cut_back(folder: Path, files: Iterable[Path], sizes: Mapping[str, int]) -> None:
    """Cut log files back to their ``sizes`` at a checkpoint. Raises ConfigError for a shorter file."""
    for path in files:
        size = sizes.get(path.relative_to(folder).as_posix(), 0)
        found = path.stat().st_size if path.exists() else 0
        if found < size:
            raise ConfigError(f"{path} is shorter than its checkpoint says: it was edited; train elsewhere")
        if found > size:
            os.truncate(path, size)
        if found and not size:
            path.unlink()


def _packed(value: Any) -> Any:
    """Convert arrays and tuples to a form that can be read without running code."""
    if isinstance(value, np.ndarray):
        raw = torch.from_numpy(np.ascontiguousarray(value).reshape(-1).view(np.uint8).copy())
        return {_ARRAY: value.dtype.str, "shape": list(value.shape), "bytes": raw}
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
            return value["bytes"].numpy().view(np.dtype(value[_ARRAY])).copy().reshape(value["shape"])
        if _TUPLE in value:
            return tuple(_unpacked(part) for part in value[_TUPLE])
        return {key: _unpacked(part) for key, part in value.items()}
    return [_unpacked(part) for part in value] if isinstance(value, list) else value
