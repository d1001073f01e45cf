"""manifest.json beside the datasets: what made each of them, and digests to check it by."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from importlib.metadata import version
from pathlib import Path
from typing import Any

from koffline.data.disk.log import LazyTransitions
from koffline.data.transitions import Transitions
from koffline.errors import DataError
from koffline.store.files import atomic_file
from koffline.store.run_record import describe_call
from koffline.store.targets import locked

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
        raise DataError(f"{path} is not a manifest (JSON: name → entry); repair it or choose another folder")
    return entries


def add_to_manifest(
    path: Path, dataset: Path, log: Transitions | LazyTransitions, command: str, seed: int
) -> None:
    """Add or replace the entry of a dataset, a file or a folder; the others stay.

    Entries are named by the dataset's path as seen from the manifest's folder. Raises DataError.
    """
    entry: dict[str, Any] = {
        "command": command,
        "seed": seed,
        "rows": len(log),
        "episodes": log.n_episodes,
        "content_sha256": log.sha256,
        "made_with": {package: version(package) for package in ("koffline", "numpy", "h5py", "gymnasium")},
    }
    if (call := _call_beside(path)) is not None:
        entry["call"] = call
    if dataset.is_file():
        entry["files"] = {dataset.name: {"sha256": hashlib.sha256(dataset.read_bytes()).hexdigest()}}
    name = Path(os.path.relpath(dataset, path.parent)).as_posix()
    with locked(path, wait=True):  # builds that end together write one after the other
        entries = read_manifest(path) | {name: entry}
        with atomic_file(path, force=True) as temporary:
            temporary.write_text(json.dumps(entries, indent=2) + "\n", encoding="utf-8")


def _call_beside(path: Path) -> dict[str, Any] | None:
    """How to build it again, without the machine: manifests travel with their datasets."""
    call = describe_call("build")
    if call is None:
        return None
    kept = {name: call[name] for name in ("arguments", "inputs", "threads")}
    with contextlib.suppress(ValueError):  # on Windows, another drive
        kept["directory"] = Path(os.path.relpath(Path.cwd(), path.parent)).as_posix()
    return kept
