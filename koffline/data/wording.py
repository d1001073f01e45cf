"""Counts in sentences."""

from __future__ import annotations


def counted(count: int, noun: str, one: str = "", more: str = "") -> str:
    """``1 row``, ``3 rows``; with a verb ``1 row was``, ``3 rows were``."""
    verb = one if count == 1 else more
    return f"{count} {noun}{'' if count == 1 else 's'}{f' {verb}' if verb else ''}"
