"""Checkpoints of a run: written to a temporary name and renamed, read without running any code."""

from __future__ import annotations

import hashlib
import io
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from koffline.batches import ReplicaPlan, Table
from koffline.errors import ConfigError
from koffline.store.files import remove_abandoned, temporary_beside
from koffline.untrusted.limits import Refused
from koffline.untrusted.models import load_tensors


def write_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write `state` so that `path` holds either the old or the new state, whatever happens meanwhile."""
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_abandoned(path)
    temporary = temporary_beside(path)
    try:
        with temporary.open("wb") as file:
            content = io.BytesIO()  # written at once, so that a full disk is an OSError and not torch's own
            torch.save(state, content)
            file.write(content.getbuffer())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


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
            f"checkpoint {path} belongs to a run with other data or settings; delete it or name another"
        )
    return state


def fingerprint_of(table: Table, flat: Tensor, plan: ReplicaPlan, *settings: object) -> str:
    """Digest of everything a run's result depends on."""
    digest = hashlib.sha256(repr((plan.learning_rates, plan.batch_seeds, plan.row_set_of, settings)).encode())
    for tensor in (flat, *(column for _, column in table.columns()), *plan.row_sets):
        digest.update(repr((tuple(tensor.shape), tensor.dtype)).encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
