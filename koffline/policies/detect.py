"""What kind of policy file this is, from its content; the name plays no part."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import BinaryIO

from koffline.errors import PolicyError
from koffline.policies.outputs import one_line
from koffline.untrusted.limits import Refused, check_regular

ACCEPTED = (
    "a d3rlpy .d3, a TorchScript, ONNX or koffline .npz file, 'package.module:name', 'uniform', "
    "or 'epsilon:0.1:<policy>'"
)
_ZIP, _HDF5 = b"PK\x03\x04", b"\x89HDF\r\n\x1a\n"


def detect(path: Path) -> str:
    """One of "d3", "torchscript", "npz", "onnx". Raises PolicyError for anything else, saying what it is."""
    try:
        check_regular(path)
        with path.open("rb") as file:
            head = file.read(8)
            if not head:
                raise PolicyError(f"{path}: the file is empty; a policy is {ACCEPTED}")
            if head.startswith(_ZIP):
                return _kind_of_zip(path)
            if head[0] == 0x80 and len(head) > 1 and 2 <= head[1] <= 5:
                return "d3"
            if _is_onnx(file):
                return "onnx"
    except Refused as error:
        raise PolicyError(f"{path}: {error}") from None
    except OSError as error:
        raise PolicyError(
            f"{path}: cannot be read ({one_line(error)}); check the path and its permissions"
        ) from error
    if head == _HDF5:
        raise PolicyError(f"{path}: this is an HDF5 file, a log and not a policy; a policy is {ACCEPTED}")
    if path.suffix == ".py":
        raise PolicyError(f"{path}: Python code is given as '{path.stem}:name', the name of a function in it")
    raise PolicyError(
        f"{path}: the content is not a policy (it begins with {head!r}); a policy is {ACCEPTED}"
    )


def _kind_of_zip(path: Path) -> str:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except Exception as error:  # a damaged table of contents fails in any way
        raise PolicyError(
            f"{path}: the archive is truncated or corrupt ({one_line(error)}); copy it again"
        ) from error
    if any(name.endswith("/constants.pkl") for name in names):
        return "torchscript"
    if any(name.endswith("/data.pkl") for name in names):
        raise PolicyError(
            f"{path}: this is a torch.save checkpoint, weights without the network or a pickle "
            "that could run code; for d3rlpy use algo.save(path), else torch.jit.script(module).save(path)"
        )
    if names and all(name.endswith(".npy") for name in names):
        return "npz"
    raise PolicyError(
        f"{path}: the archive is not a policy (it holds {', '.join(names[:3])}); a policy is {ACCEPTED}"
    )


# Top-level fields of ONNX's ModelProto (onnx.proto): number -> protobuf wire type, 0 = integer, 2 = bytes.
_ONNX_FIELDS = {1: 0, 2: 2, 3: 2, 4: 2, 5: 0, 6: 2, 7: 2, 8: 2, 14: 2, 20: 2, 25: 2, 26: 2}
_ONNX_GRAPH = 7


def _is_onnx(file: BinaryIO) -> bool:
    """Whether the fields of the file, followed up to the graph, are those of an ONNX model."""
    file.seek(0)
    for _ in range(1000):  # the fields before the graph are few
        tag = _varint(file)
        if tag is None or _ONNX_FIELDS.get(tag >> 3) != tag & 7:
            return False
        if tag >> 3 == _ONNX_GRAPH:
            return True
        value = _varint(file)
        if value is None:
            return False
        if tag & 7 == 2:
            file.seek(value, 1)
    return False


def _varint(file: BinaryIO) -> int | None:
    value = 0
    for shift in range(0, 63, 7):
        byte = file.read(1)
        if not byte:
            return None
        value |= (byte[0] & 0x7F) << shift
        if byte[0] < 0x80:
            return value
    return None
