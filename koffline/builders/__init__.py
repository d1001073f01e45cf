"""Build datasets and target policies: uniform states, rollouts, mixtures, logs for
learning control.

An entry in manifest.json beside a dataset records how it was made, and its digests.
"""

from __future__ import annotations

import json
import os
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import TypeAdapter

from koffline.errors import DataError
from koffline.json_types import JsonObject
from koffline.store import locked
from koffline.store.files import digest_of, write_text
from koffline.untrusted.limits import TEXT_BYTES, read_bytes

if TYPE_CHECKING:
    from koffline.data.disk.log import AnyLog

NAME = "manifest.json"
# Kinds of logs for learning control (as in D4RL, Fu et al. 2020) and the levels of the
# policies in them.
POLICY_LEVELS: dict[str, tuple[str, ...]] = {
    "random": (),
    "replay": (),
    "medium": ("medium",),
    "medium-expert": ("medium", "expert"),
    "expert": ("expert",),
}
KINDS = tuple(POLICY_LEVELS)


def read_manifest(path: Path) -> dict[str, JsonObject]:
    """Entries of a manifest; empty if there is no file.

    Raises DataError for a file of another kind.
    """
    if not path.exists():
        return {}
    try:
        content = read_bytes(path, TEXT_BYTES)
        return TypeAdapter(dict[str, JsonObject]).validate_json(content)
    except (OSError, ValueError):  # pydantic's errors and Refused are ValueErrors
        raise DataError(
            f"{path} is not a manifest (JSON: name → entry); repair it or choose another"
            " folder"
        ) from None


def add_to_manifest(
    path: Path, dataset: Path, log: AnyLog, command: str, seed: int
) -> None:
    """Add or replace the entry of a dataset (file or folder); other entries stay.

    Entries are named by the dataset's path relative to the manifest's folder. Raises
    DataError.
    """
    entry: JsonObject = {
        "command": command,
        "seed": seed,
        "rows": len(log),
        "episodes": log.n_episodes,
        "content_sha256": log.sha256,
        "made_with": {
            package: version(package)
            for package in ("koffline", "numpy", "h5py", "gymnasium")
        },
    }
    if dataset.is_file():
        entry["files"] = {dataset.name: {"sha256": digest_of(dataset)}}
    name = Path(os.path.relpath(dataset, path.parent)).as_posix()
    # builds that end at the same time write one after the other
    with locked(path, wait=True):
        write_text(
            path, json.dumps(read_manifest(path) | {name: entry}, indent=2) + "\n"
        )
