"""Changing well-formed bytes: the blind engine, for machines without a coverage-guided
one.
"""

from __future__ import annotations

import numpy as np

from scripts.fuzz.layers import mutate_inside

_INTERESTING = [
    0,
    1,
    2,
    0x7F,
    0x80,
    0xFF,
    0x7FFF,
    0xFFFF,
    2**31 - 1,
    2**32 - 1,
    2**63 - 1,
    2**64 - 1,
]


def mutate(content: bytes, other: bytes, generator: np.random.Generator) -> bytes:
    """A content with changes to its bytes, or to the bytes of what it contains."""
    if generator.random() < 0.5:
        inside = mutate_inside(
            content, lambda part: mutate_bytes(part, other, generator), generator
        )
        if inside is not None:
            return inside
    return mutate_bytes(content, other, generator)


def mutate_bytes(content: bytes, other: bytes, generator: np.random.Generator) -> bytes:
    """A content with one to eight changes: bits, bytes, numbers, pieces taken out,
    doubled or put in.
    """
    changed = bytearray(content)
    for _ in range(int(generator.integers(1, 9))):
        if not changed:
            break
        place = int(generator.integers(len(changed)))
        kind = int(generator.integers(7))
        if kind == 0:
            changed[place] ^= 1 << int(generator.integers(8))
        elif kind == 1:
            changed[place] = int(generator.integers(256))
        elif kind == 2:
            width = int(generator.choice([1, 2, 4, 8]))
            number = _INTERESTING[int(generator.integers(len(_INTERESTING)))] % 2 ** (
                8 * width
            )
            changed[place : place + width] = number.to_bytes(width, "little")
        elif kind == 3:
            del changed[place : place + int(generator.integers(1, 64))]
        elif kind == 4:
            changed[place:place] = changed[
                place : place + int(generator.integers(1, 64))
            ]
        elif kind == 5 and other:
            start = int(generator.integers(len(other)))
            piece = other[start : start + int(generator.integers(1, 64))]
            changed[place : place + len(piece)] = piece
        else:
            del changed[place:]
            # mostly keep the end: truncation is soon exhausted
            if generator.random() < 0.8:
                changed += content[place:]
    return bytes(changed)
