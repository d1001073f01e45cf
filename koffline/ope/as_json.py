"""How results become JSON text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

SECONDS = "seconds"


def as_json(content: Mapping[str, Any], timing: bool = True) -> str:
    """One JSON object, keys in reading order. timing: with seconds, which no two runs share."""
    kept = content if timing else without_seconds(content)
    return json.dumps(kept, indent=2, allow_nan=False, ensure_ascii=False)


def without_seconds(content: Any) -> Any:
    """The same without the entries called ``seconds``, at any depth."""
    if isinstance(content, Mapping):
        return {key: without_seconds(part) for key, part in content.items() if key != SECONDS}
    return [without_seconds(part) for part in content] if isinstance(content, (list, tuple)) else content
