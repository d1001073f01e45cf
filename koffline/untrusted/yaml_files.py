"""YAML from strangers: plain values only, of bounded size even where aliases repeat them."""

from __future__ import annotations

from typing import Any

import yaml

from koffline.untrusted.limits import Refused

LARGEST_TEXT = 2**20
_DEEPEST = 50
_MOST_NODES = 100_000
_MOST_BITS = 64  # of a whole number; seeds have no more
_INT, _FLOAT, _TEXT = (f"tag:yaml.org,2002:{kind}" for kind in ("int", "float", "str"))


class DuplicateKeyError(ValueError):
    """A key that occurs twice in one mapping."""


def parse_yaml(text: str) -> Any:
    """The value of a text.

    Raises Refused for one that is too large, deep, or cyclic, or tagged as what it is not, DuplicateKeyError,
    and yaml.YAMLError for what is no YAML.
    """
    if len(text) > LARGEST_TEXT:
        raise Refused(f"it is longer than {LARGEST_TEXT} characters; settings are short")
    _check_depth(text)
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


def _check_depth(text: str) -> None:
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > _DEEPEST:
            raise Refused(f"it is nested more than {_DEEPEST} deep; settings are flat")


def _size(node: yaml.Node, known: dict[int, int | None]) -> int:
    """Nodes of a value when every alias is written out. Raises Refused for one that contains itself."""
    if isinstance(node, yaml.ScalarNode):
        return 1
    if id(node) in known:
        size = known[id(node)]
        if size is None:
            raise Refused("a value in it contains itself; write the values out")
        return size
    known[id(node)] = None
    parts: list[yaml.Node] = []
    for part in node.value:
        parts += part if isinstance(part, tuple) else [part]
    size = 1 + sum(_size(part, known) for part in parts)
    known[id(node)] = size
    return size


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
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        seen = set()
        for key in keys:
            if key in seen:
                raise DuplicateKeyError(key)
            seen.add(key)
        return super().construct_mapping(node, deep)


for _tag in (_INT, _FLOAT):
    _Loader.add_constructor(_tag, _Loader.construct_number)
