"""Models from strangers: pickles, files of torch.save and ONNX, looked through before anything is loaded.

Refusing every import keeps code out, but a pickle of a few bytes can still ask for a table of a billion
entries, or nest tuples so that hashing one takes years. So its instructions are counted and followed on an
abstract stack that knows only kinds and sizes.

torch.load(weights_only=True) imports nothing but what rebuilds tensors. Before it sees an archive, the
archive is written anew in memory, so that both read the same entries: stored without compression, each once,
with a checksum that is right, and a description of bounded size.

An ONNX tensor may say that its numbers lie in another file, by a path of the model's choice. The fields of
such a file (protocol buffers) are walked along the few messages that can hold tensors.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import warnings
import zipfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from koffline.untrusted.limits import Refused, check_memory, check_regular

# A tuple with more parts than this, parts of parts included, is no shape, key or storage record.
_LARGEST_TUPLE = 10_000
_PLAIN = frozenset(
    """PROTO FRAME STOP MARK POP POP_MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 INT LONG BINFLOAT
    UNICODE BINUNICODE SHORT_BINUNICODE BINUNICODE8 BINBYTES SHORT_BINBYTES BINBYTES8
    EMPTY_DICT DICT SETITEM SETITEMS EMPTY_LIST LIST APPEND APPENDS EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3
    PUT BINPUT LONG_BINPUT MEMOIZE GET BINGET LONG_BINGET""".split()  # noqa: SIM905
)
# What rebuilding tensors takes on top; which names may be imported is decided by torch's own list.
_TORCH = _PLAIN | {
    "GLOBAL",
    "STACK_GLOBAL",
    "REDUCE",
    "BUILD",
    "BINPERSID",
    "EMPTY_SET",
    "ADDITEMS",
    "NEWOBJ",
}


class WantsImport(Exception):
    """A pickle that asks for something to be imported, and what."""


@dataclass(frozen=True)
class _Item:
    """A value on the abstract stack: how many parts it has, and its text if it is one."""

    parts: int = 1
    text: str | None = None
    is_mark: bool = False


def load_plain(content: bytes, most_opcodes: int = 10_000) -> Any:
    """The numbers, texts and containers in a pickle.

    Raises WantsImport for one that would import anything, Refused for one that is oversized, and whatever
    the unpickler raises for a broken one.
    """
    scan(content, most_opcodes)
    return _PlainUnpickler(io.BytesIO(content)).load()


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> NoReturn:
        raise WantsImport(f"{module}.{name}")


def scan(content: bytes, most_opcodes: int, allowed: Collection[str] = _PLAIN) -> None:
    """Follow a pickle without carrying it out. Raises WantsImport and Refused; ValueError where broken."""
    stack: list[_Item] = []
    memo: dict[int, _Item] = {}
    for count, (opcode, value, _) in enumerate(pickletools.genops(io.BytesIO(content))):
        if count >= most_opcodes:
            raise Refused(f"it has more than {most_opcodes} instructions; save it again")
        if opcode.name not in allowed:
            _explain(opcode.name, value, stack)
        if opcode.name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
            place = len(memo) if opcode.name == "MEMOIZE" else int(str(value))
            if place > count or not stack:
                raise Refused("it asks for a table far larger than itself; save it again")
            memo[place] = stack[-1]
        elif opcode.name in ("GET", "BINGET", "LONG_BINGET"):
            if int(str(value)) not in memo:
                raise ValueError(f"there is no value {value} to take up again")
            stack.append(memo[int(str(value))])
        else:
            _follow(opcode, value, stack)


def _explain(name: str, value: Any, stack: list[_Item]) -> NoReturn:
    if name in ("GLOBAL", "INST"):
        raise WantsImport(".".join(str(value).split(" ", 1)))
    if name == "STACK_GLOBAL":
        raise WantsImport(".".join(item.text or "?" for item in stack[-2:]))
    raise Refused(f"it holds an instruction that models never need ({name}); save it again")


def _follow(opcode: Any, value: Any, stack: list[_Item]) -> None:
    """The effect on the stack that Python's own table of opcodes states."""
    if opcode.name == "MARK":
        stack.append(_Item(is_mark=True))
        return
    taken = _take(opcode, stack)
    for kind in opcode.stack_after:
        if kind is pickletools.pytuple:
            parts = 1 + sum(item.parts for item in taken)
            if parts > _LARGEST_TUPLE:
                raise Refused("it nests tuples without end; save it again")
            stack.append(_Item(parts))
        else:
            # a list or dict cannot be a key, and what holds it fails at once when it is hashed
            stack.append(_Item(1, value if isinstance(value, str) else None))


def _take(opcode: Any, stack: list[_Item]) -> list[_Item]:
    """Take from the stack what an opcode takes: a fixed number, or everything down to the last mark."""
    before = opcode.stack_before
    if pickletools.stackslice in before or pickletools.markobject in before:
        taken: list[_Item] = []
        while stack and not stack[-1].is_mark:
            taken.append(stack.pop())
        if not stack:
            raise ValueError(f"{opcode.name} has no mark to go back to")
        stack.pop()
        below = before.index(pickletools.markobject)
        taken += _pop(below, opcode, stack)
        return taken
    return _pop(len(before), opcode, stack)


def _pop(count: int, opcode: Any, stack: list[_Item]) -> list[_Item]:
    if len(stack) < count or any(item.is_mark for item in stack[len(stack) - count :]):
        raise ValueError(f"{opcode.name} finds too little on the stack")
    taken = stack[len(stack) - count :]
    del stack[len(stack) - count :]
    return taken


_ENCRYPTED = 0x1
_MOST_OPCODES = 5_000_000


def load_tensors(source: Path | bytes) -> Any:
    """The content of a file of torch.save, on the CPU.

    Raises Refused, OSError, zipfile.BadZipFile, and what torch raises for a broken or a forbidden pickle.
    """
    import torch

    if isinstance(source, Path):
        check_regular(source)
        with source.open("rb") as file:
            content = _rewritten(file, source.stat().st_size)
    else:
        content = _rewritten(io.BytesIO(source), len(source))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's remarks on its own formats are not the user's
        return torch.load(content, map_location="cpu", weights_only=True)


def _rewritten(file: BinaryIO, size: int) -> io.BytesIO:
    written = io.BytesIO()
    with zipfile.ZipFile(file) as archive, zipfile.ZipFile(written, "w", zipfile.ZIP_STORED) as target:
        entries = archive.infolist()
        if len({entry.filename for entry in entries}) != len(entries):
            raise Refused("two entries of the archive have the same name; save it again")
        check_memory(sum(entry.file_size for entry in entries))
        for entry in entries:
            if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & _ENCRYPTED:
                raise Refused(f"{entry.filename[:40]} is compressed or encrypted, as torch never writes it")
            if entry.file_size > size:
                raise Refused(f"{entry.filename[:40]} declares more bytes than the file has; copy it again")
            content = archive.read(entry)  # wrong checksums are errors here; torch does not look at them
            if entry.filename.endswith("data.pkl"):
                scan(content, _MOST_OPCODES, _TORCH)
            target.writestr(zipfile.ZipInfo(entry.filename), content)
    written.seek(0)
    return written


_DEEPEST = 64
_MOST_FIELDS = 5_000_000
_BYTES = 2
# Where messages that can hold a tensor are (onnx.proto): message -> field number -> message in it.
_HOLDERS: Mapping[str, Mapping[int, str]] = {
    "model": {7: "graph", 20: "training", 25: "function"},
    "training": {1: "graph", 2: "graph"},
    "function": {7: "node", 11: "attribute"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
    "tensor": {},
}
_EXTERNAL_DATA, _DATA_LOCATION = 13, 14  # of a tensor


def check_onnx(content: bytes) -> None:
    """Raise Refused where a model keeps numbers in other files, or is no model at all."""
    waiting = [("model", memoryview(content), 0)]
    count = 0
    while waiting:
        message, part, depth = waiting.pop()
        for number, kind, value in _fields(part):
            count += 1
            if count > _MOST_FIELDS or depth > _DEEPEST:
                raise Refused("it is nested or cut up beyond any model; export it again")
            external = number == _EXTERNAL_DATA or (number == _DATA_LOCATION and value not in (0, b""))
            if message == "tensor" and external:
                raise Refused(
                    "it keeps numbers in another file, which koffline never follows; export one file "
                    "(onnx.save with save_as_external_data=False)"
                )
            if kind == _BYTES and number in _HOLDERS[message]:
                assert isinstance(value, memoryview)
                waiting.append((_HOLDERS[message][number], value, depth + 1))


def _fields(part: memoryview) -> Iterator[tuple[int, int, int | memoryview]]:
    """Number, wire type and value of each field of a message. Raises Refused where it is no message."""
    place = 0
    while place < len(part):
        tag, place = _varint(part, place)
        number, kind = tag >> 3, tag & 7
        if kind == 0:
            value, place = _varint(part, place)
            yield number, kind, value
            continue
        if kind == _BYTES:
            size, place = _varint(part, place)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise Refused("it is no ONNX model, or damaged; export it again")
        if size > len(part) - place:
            raise Refused("it is truncated; export it again")
        yield number, kind, part[place : place + size]
        place += size


def _varint(part: memoryview, place: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if place >= len(part):
            raise Refused("it is truncated; export it again")
        byte = part[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place
    raise Refused("it is no ONNX model, or damaged; export it again")
