"""Models from strangers: pickles, files of torch.save and ONNX, from which nothing is imported or followed.

A pickle may build numbers, texts and containers: its unpickler refuses every import.
torch.load(weights_only=True) imports nothing but what rebuilds tensors; what an archive declares to hold is
added up before. An ONNX tensor may say that its numbers lie in another file, by a path of the model's choice.
"""

from __future__ import annotations

import io
import pickle
import warnings
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from koffline.untrusted.limits import Refused, check_memory, check_regular


class WantsImport(Exception):
    """A pickle that asks for something to be imported, and what."""


class PlainUnpickler(pickle.Unpickler):
    """Numbers, texts and containers; raises WantsImport for anything else."""

    def find_class(self, module: str, name: str) -> NoReturn:
        """Refuse an import."""
        raise WantsImport(f"{module}.{name}")


def load_tensors(source: Path | bytes) -> Any:
    """The content of a file of torch.save, on the CPU.

    Raises Refused, OSError, zipfile.BadZipFile, and what torch raises for a broken or a forbidden pickle.
    """
    import torch

    if isinstance(source, Path):
        check_regular(source)
    content = source if isinstance(source, bytes) else source.read_bytes()
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        check_memory(sum(entry.file_size for entry in archive.infolist()))
        if damaged := archive.testzip():  # torch does not look at checksums
            raise Refused(f"{damaged[:40]} is damaged; copy or save it again")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's remarks on its own formats are not the user's
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


def check_onnx(content: bytes) -> None:
    """Raise Refused where a model keeps numbers in other files, or is no model at all."""
    import onnx
    from google.protobuf.message import DecodeError

    try:
        waiting: list[Any] = [onnx.ModelProto.FromString(content)]
    except DecodeError:
        raise Refused("it is no ONNX model, truncated or damaged; export it again") from None
    while waiting:
        message = waiting.pop()
        if isinstance(message, onnx.TensorProto) and (message.external_data or message.data_location):
            remedy = "export one file (onnx.save with save_as_external_data=False)"
            raise Refused(f"it keeps numbers in another file, which koffline never follows; {remedy}")
        for field, value in message.ListFields():
            parts = value if isinstance(value, Sequence) else [value]
            if field.type == field.TYPE_MESSAGE:
                waiting += parts
