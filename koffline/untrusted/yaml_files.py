"""Untrusted YAML: plain values only, without aliases and tags."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from koffline.errors import KofflineError
from koffline.untrusted.limits import Refused, read_bytes

LARGEST_TEXT = 2**20
_DEEPEST = 50
_INT, _FLOAT, _TEXT = (f"tag:yaml.org,2002:{kind}" for kind in ("int", "float", "str"))


class DuplicateKeyError(ValueError):
    """A key that occurs twice in one mapping."""


def read_yaml_file(path: Path, name: str, kind: type[KofflineError]) -> dict[Any, Any]:
    """Top-level mapping of a file. name, kind: its name in errors, and their type."""
    remedy = "write lines of 'key: value'"
    try:
        found = parse_yaml(read_bytes(path, LARGEST_TEXT).decode("utf-8").removeprefix("\ufeff"))
    except OSError as error:
        raise kind(f"{name} cannot be read: {error.strerror}; check the path") from None
    except UnicodeDecodeError:
        raise kind(f"{name} is not text in UTF-8; {remedy}") from None
    except DuplicateKeyError as error:
        raise kind(f"{name} names '{error}' twice; keep one of them") from None
    except Refused as error:
        raise kind(f"{name} is not read: {error}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" (line {mark.line + 1})" if mark else ""
        raise kind(f"{name} is not valid YAML{line}; {remedy}") from None
    if found is None or isinstance(found, dict):
        return found or {}
    raise kind(f"{name} holds a {type(found).__name__}; {remedy}")


def parse_yaml(text: str) -> Any:
    """Value of a YAML text.

    Raises Refused for one that is too large or deep, that repeats values by aliases or names types by tags,
    DuplicateKeyError, and yaml.YAMLError for what is no YAML.
    """
    if len(text) > LARGEST_TEXT:
        raise Refused(f"it is longer than {LARGEST_TEXT} characters; settings are short")
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _DEEPEST:
            raise Refused(f"it is nested more than {_DEEPEST} deep; settings are flat")
        if isinstance(event, yaml.AliasEvent) or getattr(event, "tag", None) not in (None, "!"):
            raise Refused("it has aliases (*name) or tags (!name); write the values out")
    try:
        return yaml.load(text, _Loader)  # a child of SafeLoader
    except ValueError as error:  # for example a number of ten thousand digits, or the 40th of a month
        if isinstance(error, DuplicateKeyError):
            raise
        raise Refused(f"a value in it cannot be read ({str(error)[:120]}); write plain numbers") from None


class _Loader(yaml.SafeLoader):
    """The safe loader, which refuses duplicate keys and reads 1:30 as a text.

    YAML 1.1 reads numbers with colons to the base 60, in a time that grows with the square of their length.
    """

    def resolve(self, kind: Any, value: Any, implicit: Any) -> str:
        """The tag of a node that states none."""
        tag: str = super().resolve(kind, value, implicit)
        return _TEXT if tag in (_INT, _FLOAT) and ":" in value else tag

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """The mapping; raises DuplicateKeyError."""
        seen = set()
        for key in (key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key in seen:
                raise DuplicateKeyError(key)
            seen.add(key)
        return super().construct_mapping(node, deep)
