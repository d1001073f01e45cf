"""Mapping files: YAML that holds plain values and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from koffline.errors import DataError

_MOST_BYTES = 1_000_000


def read_mapping_file(path: Path) -> dict[Any, Any]:
    """The top-level mapping of a YAML file; no tags, no anchors. Raises DataError in one line."""
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise DataError(
                f"mapping file {path} has more than {_MOST_BYTES} bytes; name columns by patterns"
            )
        found = yaml.load(content.decode("utf-8-sig"), Loader=_PlainLoader)
    except OSError as error:
        raise DataError(f"mapping file {path} cannot be read: {error.strerror}; check the path") from None
    except (UnicodeDecodeError, RecursionError):
        raise DataError(f"mapping file {path} is no YAML text; write lines of 'key: value'") from None
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f" (line {mark.line + 1})" if mark else ""
        reason = " ".join(str(getattr(error, "problem", None) or "wrong value").split())
        raise DataError(
            f"mapping file {path} is not valid{line}: {reason}; write lines of 'key: value'"
        ) from None
    if not isinstance(found, dict):
        raise DataError(f"mapping file {path} holds no keys; write lines such as 'reward: r'")
    return found


class _PlainLoader(yaml.SafeLoader):
    """The safe loader without anchors (which can make a small file huge) and without repeated keys."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        """As the safe loader's, but an alias is an error."""
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark
            raise yaml.composer.ComposerError(None, None, "anchors and aliases are not read", mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """As the safe loader's, but the last of two equal keys does not win in silence."""
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for key in keys:
            if keys.count(key) > 1:
                problem = f"'{key}' occurs twice"
                raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return super().construct_mapping(node, deep)
