"""Models from strangers: pickles, files of torch.save and ONNX, looked through before anything is loaded.

Refusing every import keeps code out, but a pickle of a few bytes can still ask for a table of a billion
entries, or nest tuples so that hashing one takes years. So its instructions are counted and followed on a
stack that knows only how many parts each value has.

torch.load(weights_only=True) imports nothing but what rebuilds tensors. Before it sees an archive, the
archive is written anew in memory, so that both read the same entries: stored without compression, each once,
with a checksum that is right, and a description of bounded size.

An ONNX tensor may say that its numbers lie in another file, by a path of the model's choice.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import warnings
import zipfile
from collections.abc import Collection, Sequence
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
_MOST_PARTS = 5_000_000  # of an ONNX model
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
            is_packed = entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & _ENCRYPTED
            if is_packed or entry.file_size > size:
                said = f"{entry.filename[:40]} is compressed, encrypted or longer than the file"
                raise Refused(f"{said}, as torch never writes it; copy or save it again")
            content = archive.read(entry)  # wrong checksums are errors here; torch does not look at them
            if entry.filename.endswith("data.pkl"):
                scan(content, _MOST_OPCODES, _TORCH)
            target.writestr(zipfile.ZipInfo(entry.filename), content)
    written.seek(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's remarks on its own formats are not the user's
        return torch.load(written, map_location="cpu", weights_only=True)


def check_onnx(content: bytes) -> None:
    """Raise Refused where a model keeps numbers in other files, or is no model at all."""
    import onnx
    from google.protobuf.message import DecodeError

    try:
        waiting: list[Any] = [onnx.ModelProto.FromString(content)]
    except DecodeError:
        raise Refused("it is no ONNX model, truncated or damaged; export it again") from None
    count = 0
    while waiting:
        message = waiting.pop()
        if isinstance(message, onnx.TensorProto) and (message.external_data or message.data_location):
            remedy = "export one file (onnx.save with save_as_external_data=False)"
            raise Refused(f"it keeps numbers in another file, which koffline never follows; {remedy}")
        for field, value in message.ListFields():
            parts = value if isinstance(value, Sequence) else [value]
            if field.type == field.TYPE_MESSAGE:
                count += len(parts)
                if count > _MOST_PARTS:
                    raise Refused("it is cut up beyond any model; export it again")
                waiting += parts
