"""manifest.json beside the datasets: what made each of them, and digests to check it by."""

from __future__ import annotations

import hashlib
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

from koffline.data.files import atomic_file
from koffline.data.transitions import Transitions
from koffline.errors import DataError

NAME = "manifest.json"


def read_manifest(path: Path) -> dict[str, Any]:
    """The entries, none where there is no file. Raises DataError for one that is not ours."""
    if not path.exists():
        return {}
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        entries = None
    if not isinstance(entries, dict) or not all(isinstance(entry, dict) for entry in entries.values()):
        raise DataError(
            f"{path} is not a manifest (JSON: name → entry); repair it or name another (--manifest)"
        )
    return entries


def add_to_manifest(
    path: Path, name: str, log: Transitions, command: str, seed: int, written: Path | None
) -> None:
    """Add or replace the entry of a dataset; the others stay. written: its file, None for a folder."""
    entry: dict[str, Any] = {
        "command": command,
        "seed": seed,
        "rows": len(log),
        "episodes": log.n_episodes,
        "content_sha256": log.sha256,
        "made_with": {package: version(package) for package in ("koffline", "numpy", "h5py", "gymnasium")},
    }
    if written is not None and written.is_file():
        digest = hashlib.sha256(written.read_bytes()).hexdigest()
        entry["files"] = {written.name: {"sha256": digest}}
    entries = read_manifest(path) | {name: entry}
    with atomic_file(path, force=True) as temporary:
        temporary.write_text(json.dumps(entries, indent=2) + "\n", encoding="utf-8")
