"""YAML from strangers: plain values only, of bounded size even where aliases repeat them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from koffline.errors import KofflineError
from koffline.untrusted.limits import Refused, read_bytes

LARGEST_TEXT = 2**20
_DEEPEST = 50
_MOST_NODES = 100_000
_MOST_BITS = 64  # of a whole number; seeds have no more
_INT, _FLOAT, _TEXT = (f"tag:yaml.org,2002:{kind}" for kind in ("int", "float", "str"))


class DuplicateKeyError(ValueError):
    """A key that occurs twice in one mapping."""


def read_yaml_file(path: Path, name: str, kind: type[KofflineError]) -> dict[Any, Any]:
    """The mapping at the top of a file, which errors (of this kind) call ``name``."""
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
    """The value of a text.

    Raises Refused for one that is too large, deep, or cyclic, or tagged as what it is not, DuplicateKeyError,
    and yaml.YAMLError for what is no YAML.
    """
    if len(text) > LARGEST_TEXT:
        raise Refused(f"it is longer than {LARGEST_TEXT} characters; settings are short")
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _DEEPEST:
            raise Refused(f"it is nested more than {_DEEPEST} deep; settings are flat")
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        if _size(node, {}) > _MOST_NODES:
            raise Refused("its aliases repeat each other without end; write the values out")
        return loader.construct_document(node)
    except (Refused, DuplicateKeyError, yaml.YAMLError):
        raise
    except Exception as error:  # a value that contradicts its tag, as in !!timestamp x, fails in any way
        reason = " ".join(str(error).split())[:120] or type(error).__name__
        raise Refused(f"a value in it cannot be read ({reason}); write plain numbers and words") from None
    finally:
        loader.dispose()


def _size(node: yaml.Node, known: dict[int, int]) -> int:
    """Nodes of a value when every alias is written out. Raises Refused for one that contains itself."""
    if isinstance(node, yaml.ScalarNode):
        return 1
    if id(node) not in known:
        known[id(node)] = 0  # until it is known
        pairs = isinstance(node, yaml.MappingNode)
        parts = [part for pair in node.value for part in pair] if pairs else node.value
        known[id(node)] = 1 + sum(_size(part, known) for part in parts)
    elif not known[id(node)]:
        raise Refused("a value in it contains itself; write the values out")
    return known[id(node)]


class _Loader(yaml.SafeLoader):
    """The safe loader, but the last of two equal keys does not win in silence, and 1:30 is a text.

    YAML 1.1 reads numbers with colons to the base 60, in a time that grows with the square of their length.
    """

    def resolve(self, kind: Any, value: Any, implicit: Any) -> str:
        """The tag of a node that states none."""
        tag: str = super().resolve(kind, value, implicit)
        return _TEXT if tag in (_INT, _FLOAT) and ":" in value else tag

    def construct_number(self, node: yaml.ScalarNode) -> int | float:
        """The number of a scalar. Raises Refused where it has colons, or more bits than any setting needs."""
        if ":" in node.value:
            raise Refused("a number in it has colons; write it in digits")
        if node.tag == _FLOAT:
            return self.construct_yaml_float(node)
        number: int = self.construct_yaml_int(node)
        if number.bit_length() > _MOST_BITS:
            raise Refused(f"a whole number in it has more than {_MOST_BITS} bits; settings are smaller")
        return number

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """The mapping; raises DuplicateKeyError."""
        seen = set()
        for key in (key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key in seen:
                raise DuplicateKeyError(key)
            seen.add(key)
        return super().construct_mapping(node, deep)


for _tag in (_INT, _FLOAT):
    _Loader.add_constructor(_tag, _Loader.construct_number)
