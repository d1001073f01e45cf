"""What a killed pass has summed so far: one file per pass, from which the same evaluation goes on.

The file is a pickle of records of sums. It is read by an unpickler that knows those records, arrays and
tensors, and nothing else: it can run no code.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import pickle
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import torch

from koffline.ope.stream_settings import SAVED
from koffline.store.files import atomic_file
from koffline.untrusted.limits import check_regular


def torch_tensor(array: np.ndarray) -> torch.Tensor:
    """The tensor that was pickled as an array."""
    return torch.tensor(array)


_ARRAYS = {
    (__name__, "torch_tensor"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "scalar"),
    ("numpy._core.numeric", "_frombuffer"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
}


@dataclass(frozen=True)
class SavedPass:
    """The file of one pass: how many items are in the sum, the sum, and why items were left out of it."""

    path: Path

    @classmethod
    def of(cls, folder: Path, *identity: Any) -> SavedPass:
        """The file for a pass; identity: everything that decides its sums."""
        content = io.BytesIO()
        _Pickler(content).dump(identity)
        return cls(folder / f"{hashlib.sha256(content.getbuffer()).hexdigest()[:32]}{SAVED}")

    def read(self) -> tuple[int, Any, tuple[str, ...]]:
        """(0, None, ()) where there is no such file, or none that can be read."""
        try:
            check_regular(self.path)
            with self.path.open("rb") as file:
                done, total, skipped = _SumsUnpickler(file).load()
        except Exception:  # bytes that are no pickle of ours fail in any way
            return 0, None, ()
        return done, total, skipped

    def write(self, done: int, total: Any, skipped: Iterable[str]) -> None:
        """Save; a disk that takes nothing more costs the next run its head start alone."""
        content = io.BytesIO()
        _Pickler(content).dump((done, total, tuple(skipped)))
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(mode=0o700, exist_ok=True)
            with atomic_file(self.path, force=True) as temporary:
                temporary.write_bytes(content.getbuffer())


class _Pickler(cloudpickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        """Tensors as arrays: torch's own pickles hold addresses in memory, and take more to be read."""
        if isinstance(obj, torch.Tensor):
            return torch_tensor, (obj.detach().cpu().numpy(),)
        return super().reducer_override(obj)


class _SumsUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Arrays and tensors, and the records of sums of this package."""
        if (module, name) in _ARRAYS:
            return super().find_class(module, name)
        if module.startswith("koffline.ope."):
            found = getattr(import_module(module), name, None)
            if isinstance(found, type) and dataclasses.is_dataclass(found) and hasattr(found, "__add__"):
                return found
        raise pickle.UnpicklingError(f"{module}.{name} is no record of sums")
