"""Misspelt names of an algorithm and its options, seen before the libraries that know them are loaded."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from koffline.errors import ConfigError, nearest_name

_SOURCES = {
    "d3rlpy": ("base", "algos/*/*", "ope/*", "models/**/*", "optimizers/*", "preprocessing/*"),
    "koffline": ("algos/*",),
}
_OPTIONS = re.compile(r"^class \w+(?:Config|Factory|Scaler)\b.*?(?=^\S|\Z)", re.M | re.S)
_FIELD = re.compile(r"^    ([a-zA-Z]\w*): ", re.M)
_TYPE = re.compile(r'(?:def get_type\(\) -> str:\n +return |@registered\()"(\w+)"')


@functools.cache
def _declared() -> tuple[frozenset[tuple[str, str]], frozenset[str]]:
    """Types and options that the sources of d3rlpy and koffline declare, those of factories among them.

    Each type comes after its family: algo, or the name of the module of a kind of factory.
    """
    found = {name: Path(str(find_spec(name).origin)).parent for name in _SOURCES}  # type: ignore[union-attr]
    files = [file for name in found for each in _SOURCES[name] for file in found[name].glob(f"{each}.py")]
    texts = {file: file.read_text(encoding="utf-8") for file in files}
    families = {file: "algo" if {"algos", "ope"} & {*file.parts[-3:]} else file.stem for file in files}
    parts = (part for text in texts.values() for part in _OPTIONS.findall(text))
    types = ((families[file], name) for file, text in texts.items() for name in _TYPE.findall(text))
    return frozenset(types), frozenset(name for part in parts for name in _FIELD.findall(part))


def refuse_misspelt(kind: Any, params: Any, where: str = "algo") -> None:
    """Raise ConfigError for a type or option that no algorithm or factory has, if it resembles one.

    This takes a tenth of a second, importing the algorithms takes two. What passes may still be wrong:
    ``algos.options.resolve_params`` checks types, names and values against the algorithm itself.
    """
    types, options = _declared()
    words = where.rpartition(".")[2].removesuffix("_factory").split("_")  # actor_optim: of the optimizers
    names = tuple("_".join(words[start:]) for start in range(len(words)))
    family = frozenset(name for module, name in types if module.startswith(names))
    asked = [(f"{where}.type is {kind!r}", kind, family)] if isinstance(kind, str) and kind != "none" else []
    for name, value in params.items() if isinstance(params, Mapping) else ():
        asked.append((f"{where}.params.{name} is unknown", str(name), options))
        if isinstance(value, Mapping):
            refuse_misspelt(value.get("type"), value.get("params"), f"{where}.params.{name}")
    for what, name, known in asked:
        if name not in known and (remedy := nearest_name(name, sorted(known))).startswith("did"):
            raise ConfigError(f"{what}; {remedy}")
