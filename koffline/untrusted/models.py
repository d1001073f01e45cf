"""Models from strangers: pickles, files of torch.save and ONNX, looked through before anything is loaded.

Refusing every import keeps code out, but a pickle of a few bytes can still ask for a table of a billion
entries, or nest tuples so that hashing one takes years. So its instructions are counted and followed on a
stack that knows only how many parts each value has.

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
from pathlib import Path
from typing import Any, NoReturn

from koffline.untrusted.limits import Refused, check_memory, check_regular

# A tuple with more parts than this, parts of parts included, is no shape, key or storage record.
_LARGEST_TUPLE = 10_000
_PUT, _GET = ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"), ("GET", "BINGET", "LONG_BINGET")
_PLAIN = frozenset(
    """PROTO FRAME STOP MARK POP POP_MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 INT LONG BINFLOAT
    UNICODE BINUNICODE SHORT_BINUNICODE BINUNICODE8 BINBYTES SHORT_BINBYTES BINBYTES8
    EMPTY_DICT DICT SETITEM SETITEMS EMPTY_LIST LIST APPEND APPENDS EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3
    PUT BINPUT LONG_BINPUT MEMOIZE GET BINGET LONG_BINGET""".split()  # noqa: SIM905
)
# What rebuilding tensors takes on top; which names may be imported is decided by torch's own list.
_TORCH = _PLAIN | set("GLOBAL STACK_GLOBAL REDUCE BUILD BINPERSID EMPTY_SET ADDITEMS NEWOBJ".split())  # noqa: SIM905
_MOST_OPCODES = 5_000_000
_ENCRYPTED = 0x1


class WantsImport(Exception):
    """A pickle that asks for something to be imported, and what."""


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
    """Follow a pickle without carrying it out. Raises WantsImport and Refused; anything where broken."""
    stack: list[int | None] = []  # parts of each value, None for a mark
    memo: dict[Any, int | None] = {}
    texts: list[str] = []
    for count, (opcode, value, _) in enumerate(pickletools.genops(content)):
        if count >= most_opcodes:
            raise Refused(f"it has more than {most_opcodes} instructions; save it again")
        if opcode.name not in allowed and opcode.name in ("GLOBAL", "INST", "STACK_GLOBAL"):
            raise WantsImport(".".join(texts[-2:] if value is None else str(value).split(" ", 1)))
        if opcode.name not in allowed:
            raise Refused(f"it holds an instruction that models never need ({opcode.name}); save it again")
        texts += [value] if isinstance(value, str) else []
        if opcode.name in _PUT:
            place = len(memo) if value is None else int(str(value))
            if place > count:
                raise Refused("it asks for a table far larger than itself; save it again")
            memo[place] = stack[-1]
        elif opcode.name in _GET:
            stack.append(memo[int(str(value))])
        elif opcode.name == "MARK":
            stack.append(None)
        else:
            _follow(opcode, stack)


def _follow(opcode: Any, stack: list[int | None]) -> None:
    """The effect on the stack that Python's own table of opcodes states."""
    taken: list[Any] = []
    fixed = len(opcode.stack_before)
    if pickletools.markobject in opcode.stack_before:  # everything down to the last mark, and what is below
        fixed = opcode.stack_before.index(pickletools.markobject)
        while (item := stack.pop()) is not None:
            taken.append(item)
    taken += [stack.pop() for _ in range(fixed)]
    if None in taken:
        raise ValueError(f"{opcode.name} finds too little on the stack")
    # a list or dict cannot be a key, and what holds it fails at once when it is hashed
    parts = 1 + sum(taken) if pickletools.pytuple in opcode.stack_after else 1
    if parts > _LARGEST_TUPLE:
        raise Refused("it nests tuples without end; save it again")
    stack += [parts] * len(opcode.stack_after)


def load_tensors(source: Path | bytes) -> Any:
    """The content of a file of torch.save, on the CPU.

    Raises Refused, OSError, zipfile.BadZipFile, and what torch raises for a broken or a forbidden pickle.
    """
    import torch

    if isinstance(source, Path):
        check_regular(source)
    size = len(source) if isinstance(source, bytes) else source.stat().st_size
    written = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(source) if isinstance(source, bytes) else source) as archive,
        zipfile.ZipFile(written, "w", zipfile.ZIP_STORED) as target,
    ):
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
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's remarks on its own formats are not the user's
        return torch.load(written, map_location="cpu", weights_only=True)


_DEEPEST = 64
_MOST_FIELDS = 5_000_000
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
_SIZES = {1: 8, 5: 4}  # of the wire types that state none
_NO_MODEL = "it is no ONNX model, truncated or damaged; export it again"


def check_onnx(content: bytes) -> None:
    """Raise Refused where a model keeps numbers in other files, or is no model at all."""
    waiting = [("model", memoryview(content), 0)]
    count = 0
    while waiting:
        message, part, depth = waiting.pop()
        for number, value in _fields(part):
            count += 1
            if count > _MOST_FIELDS or depth > _DEEPEST:
                raise Refused("it is nested or cut up beyond any model; export it again")
            external = number == _EXTERNAL_DATA or (number == _DATA_LOCATION and value not in (0, b""))
            if message == "tensor" and external:
                remedy = "export one file (onnx.save with save_as_external_data=False)"
                raise Refused(f"it keeps numbers in another file, which koffline never follows; {remedy}")
            if isinstance(value, memoryview) and number in _HOLDERS[message]:
                waiting.append((_HOLDERS[message][number], value, depth + 1))


def _fields(part: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Number and value of each field of a message. Raises Refused where it is no message."""
    place = 0
    while place < len(part):
        tag, place = _varint(part, place)
        kind = tag & 7
        if kind not in (0, 1, 2, 5):
            raise Refused(_NO_MODEL)
        size, place = (_SIZES[kind], place) if kind in _SIZES else _varint(part, place)
        if kind and size > len(part) - place:
            raise Refused(_NO_MODEL)
        yield tag >> 3, part[place : place + size] if kind else size
        place += size if kind else 0


def _varint(part: memoryview, place: int) -> tuple[int, int]:
    value = 0
    for i, byte in enumerate(part[place : place + 10]):
        value |= (byte & 0x7F) << 7 * i
        if byte < 0x80:
            return value, place + i + 1
    raise Refused(_NO_MODEL)
