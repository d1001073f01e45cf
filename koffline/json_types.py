"""What the JSON files of koffline hold, as Python sees it."""

from __future__ import annotations

from typing import Any, TypeAlias

# An object of a JSON file: texts to None, bool, int, float, str, lists, or further
# objects. Its values are `Any`, because whoever reads one knows what stands there.
JsonObject: TypeAlias = dict[str, Any]
