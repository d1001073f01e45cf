"""How results become JSON: every field of a record that its ``repr`` shows, as plain types."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

SECONDS = "seconds"


class Record:
    """A dataclass that a command prints or writes; fields with ``repr=False`` stay behind.

    A field's ``key`` in its metadata is its name in JSON.
    """

    def as_dict(self) -> dict[str, Any]:
        """The record as plain JSON types, in the order of its fields."""
        assert dataclasses.is_dataclass(self)
        shown = [field for field in dataclasses.fields(self) if field.repr]
        return {field.metadata.get("key", field.name): plain(getattr(self, field.name)) for field in shown}

    def to_json(self, timing: bool = True) -> str:
        """One JSON object, keys in reading order. timing: with seconds, which no two runs share."""
        return as_json(self.as_dict(), timing)


def plain(value: Any) -> Any:
    """Records, numpy scalars, arrays and nested containers as JSON types."""
    if isinstance(value, (Record, Mapping)):
        items = value.as_dict() if isinstance(value, Record) else value
        return {str(key): plain(item) for key, item in items.items()}
    if isinstance(value, (list, tuple, np.ndarray)):
        return [plain(item) for item in value]
    value = value.item() if isinstance(value, np.generic) else value
    return finite_or_none(value) if isinstance(value, float) else value


def finite_or_none(number: float) -> float | None:
    """JSON has no NaN: what is not finite becomes None."""
    return float(number) if math.isfinite(number) else None


def as_json(content: Mapping[str, Any], timing: bool = True) -> str:
    """One JSON object, keys in reading order. timing: with seconds, which no two runs share."""
    kept = content if timing else without_seconds(content)
    return json.dumps(kept, indent=2, allow_nan=False, ensure_ascii=False)


def without_seconds(content: Any) -> Any:
    """The same without the entries called ``seconds``, at any depth."""
    if isinstance(content, Mapping):
        return {key: without_seconds(part) for key, part in content.items() if key != SECONDS}
    return [without_seconds(part) for part in content] if isinstance(content, (list, tuple)) else content
