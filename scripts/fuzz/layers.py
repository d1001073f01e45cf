"""Changing what lies inside: members of archives and parts of models, with checksums
and lengths set right.

Flipped bytes of a zip mostly end at its checksum; what is behind it is reached by
packing it anew.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Callable

import numpy as np


def mutate_inside(
    content: bytes, change: Callable[[bytes], bytes], generator: np.random.Generator
) -> bytes | None:
    """The content with one of its parts changed; None where it has none."""
    if content.startswith(b"PK\x03\x04"):
        return _in_archive(content, change, generator)
    if content.startswith(b"\x80"):
        return _in_model(content, change, generator)
    return None


def _in_archive(
    content: bytes, change: Callable[[bytes], bytes], generator: np.random.Generator
) -> bytes | None:
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            members = {
                entry.filename: archive.read(entry) for entry in archive.infolist()
            }
    except Exception:  # broken already
        return None
    if not members:
        return None
    chosen = list(members)[int(generator.integers(len(members)))]
    if generator.random() < 0.05:
        members[change(chosen.encode()).decode("latin1")] = members.pop(chosen)
    else:
        members[chosen] = change(members[chosen])
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w") as archive:
        for name, member in members.items():
            archive.writestr(zipfile.ZipInfo(name or "x"), member)
    return written.getvalue()


class _Plain(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        raise pickle.UnpicklingError(f"{module}.{name}")


def _in_model(
    content: bytes, change: Callable[[bytes], bytes], generator: np.random.Generator
) -> bytes | None:
    """A d3rlpy model: its JSON, or the archive of its weights."""
    try:
        model = _Plain(io.BytesIO(content)).load()
        config = model["config"]
        weights = model["torch"]
    except Exception:
        return None
    if generator.random() < 0.4:
        model["config"] = change(config.encode()).decode("utf-8", "replace")
    else:
        model["torch"] = _in_archive(weights, change, generator) or change(weights)
    return pickle.dumps(model, 4)
