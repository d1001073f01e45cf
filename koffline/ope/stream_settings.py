"""Settings of passes over a log that is not held in memory, and saved sums of an
unfinished pass.

A pass saves its sums in one file, from which the same evaluation can continue: a pickle
of sum records. The unpickler accepts only those records, arrays and tensors, so that it
cannot run code.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import pickle
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from koffline.errors import ConfigError
from koffline.jobs import PassSettings
from koffline.store.files import atomic_file
from koffline.untrusted.limits import check_regular

if TYPE_CHECKING:
    import numpy
    import torch

DEFAULT_MEMORY = "2GB"
SAVED = ".sums"  # suffix of files of saved passes
_KNOWN = {
    __name__: ("torch_tensor",),
    "numpy._core.multiarray": ("_reconstruct", "scalar"),
    "numpy._core.numeric": ("_frombuffer",),
    "numpy": ("ndarray", "dtype"),
    "koffline.data.statistics": ("ColumnStatistics",),
    "koffline.data.structure.suite": ("Structure",),
    "koffline.data.structure.symptom": ("Symptom",),
}


@dataclass(frozen=True, kw_only=True)
class StreamSettings(PassSettings):
    """Settings of passes over a log; they affect time and memory, not the estimate.

    memory: limit per process, in bytes or as in "2GB": blocks of rows are sized to fit;
    sums need memory on top. partial: a folder where passes over shards save their sums
    from time to time, so that the same evaluation can continue after it was killed.
    workers, ray: as in `PassSettings`.
    """

    memory: int | str = DEFAULT_MEMORY
    partial: str | Path | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        # only its form; whether it is enough depends on the log
        parse_memory(self.memory)

    @property
    def memory_bytes(self) -> int:
        """Memory limit in bytes."""
        return parse_memory(self.memory)


def parse_memory(size: int | str) -> int:
    """Bytes of a size such as "2GB", "1.5G", "500MiB" or a number.

    Raises ConfigError.
    """
    from pydantic import ByteSize, TypeAdapter, ValidationError

    if isinstance(size, str):
        size = size.strip()
    try:
        return int(TypeAdapter(ByteSize).validate_python(size))
    except ValidationError:
        raise ConfigError(
            f"memory is '{size}'; give a size such as 2GB or 500MB"
        ) from None


def pickled(value: object) -> bytes:
    """Pickle to bytes that are equal in every process: tensors as arrays, whose pickles
    hold no addresses.
    """
    import cloudpickle
    import torch

    class Pickler(cloudpickle.Pickler):
        def reducer_override(self, obj: object) -> Any:
            if isinstance(obj, torch.Tensor):
                return torch_tensor, (obj.detach().cpu().numpy(),)
            return super().reducer_override(obj)

    content = io.BytesIO()
    Pickler(content).dump(value)
    return content.getvalue()


def torch_tensor(array: numpy.ndarray) -> torch.Tensor:
    """Rebuild a tensor that was pickled as an array."""
    import torch

    return torch.tensor(array)


class _SumsUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Allow arrays, tensors and this package's records of sums; refuse everything
        else.
        """
        if name in _KNOWN.get(module, ()):
            return super().find_class(module, name)
        if module.startswith("koffline.ope."):
            record = getattr(import_module(module), name, None)
            is_record = isinstance(record, type) and dataclasses.is_dataclass(record)
            if is_record and hasattr(record, "__add__"):
                return record
        raise pickle.UnpicklingError(f"{module}.{name} is no record of sums")


def read_sums(path: Path) -> tuple[int, Any]:
    """Number of items summed, and their sum; (0, None) for an unreadable file."""
    try:
        check_regular(path)
        with path.open("rb") as file:
            done, total = _SumsUnpickler(file).load()
    except Exception:  # foreign bytes raise errors of any type
        return 0, None
    return done, total


def write_sums(path: Path, sums: tuple[int, object]) -> None:
    """Save the sums; if writing fails, the next run just starts from the beginning."""
    content = pickled(sums)
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with atomic_file(path, force=True) as temporary:
            temporary.write_bytes(content)


def remove_saved(folder: Path) -> None:
    """Remove the sums that passes have saved in a folder, and the folder if it is then
    empty.
    """
    with contextlib.suppress(OSError):
        for path in folder.glob(f"*{SAVED}"):
            path.unlink()
        folder.rmdir()
