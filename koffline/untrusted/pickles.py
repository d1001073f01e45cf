"""Pickles from strangers, looked at opcode by opcode before any is carried out.

Refusing every import keeps code out, but a pickle of a few bytes can still ask for a table of a billion
entries, or nest tuples so that hashing one takes years. Here its instructions are counted and followed on an
abstract stack that knows only kinds and sizes.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NoReturn

from koffline.untrusted.limits import Refused

# A tuple with more parts than this, parts of parts included, is no shape, key or storage record.
_LARGEST_TUPLE = 10_000
_PLAIN = frozenset(
    """PROTO FRAME STOP MARK POP POP_MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 INT LONG BINFLOAT
    UNICODE BINUNICODE SHORT_BINUNICODE BINUNICODE8 BINBYTES SHORT_BINBYTES BINBYTES8
    EMPTY_DICT DICT SETITEM SETITEMS EMPTY_LIST LIST APPEND APPENDS EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3
    PUT BINPUT LONG_BINPUT MEMOIZE GET BINGET LONG_BINGET""".split()  # noqa: SIM905
)
# What rebuilding tensors takes on top; which names may be imported is decided by torch's own list.
TORCH = _PLAIN | {"GLOBAL", "STACK_GLOBAL", "REDUCE", "BUILD", "BINPERSID", "EMPTY_SET", "ADDITEMS", "NEWOBJ"}


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
