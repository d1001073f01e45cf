"""Files of a build: its parts until all are finished, then an entry in manifest.json beside the dataset.

Each finished batch of a long build is a file. An entry records how a dataset was made, and its digests.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from koffline.builders.rollouts import Columns, RolloutPlayer
from koffline.data.disk.log import LazyTransitions
from koffline.data.disk.writer import ShardWriter
from koffline.data.transitions import Transitions
from koffline.errors import DataError
from koffline.store import locked
from koffline.store.files import atomic_file, write_text
from koffline.store.run_record import digest_of, digests_of, versions, within_epsilon
from koffline.untrusted.arrays import read_arrays

NAME = "manifest.json"
Progress = Callable[[int], None]  # called with the number of finished episodes


class PartsFolder:
    """Finished batches of one build, identified by settings and policies; files of other builds are ignored.

    Raises DataError where something else has the folder's name.
    """

    def __init__(self, folder: Path, settings: Any, policies: Sequence[str]) -> None:
        if os.path.lexists(folder) and not folder.is_dir():
            raise DataError(f"{folder} is no unfinished build; move it or name another --out")
        read = digests_of(map(within_epsilon, policies))
        decides = (versions().get("koffline"), settings, list(policies), read)
        self.folder, self._build = folder, hashlib.sha256(repr(decides).encode()).hexdigest()[:12]

    @property
    def kept(self) -> int:
        """Number of batches of this build on the disk."""
        return len(list(self.folder.glob(f"part-{self._build}-*.npz")))

    def build(self, player: RolloutPlayer, progress: Progress = lambda episodes: None) -> Transitions:
        """Play or read all batches and join them into one log."""
        return player.join(list(self.batches(player, progress)))

    def build_shards(
        self, player: RolloutPlayer, writer: ShardWriter, progress: Progress = lambda episodes: None
    ) -> None:
        """Play or read all batches and write them as shards, one batch in memory at a time."""
        clipped = 0
        with writer:
            for part in self.batches(player, progress):
                clipped += int(part["clipped"].sum())
                writer.append(player.record(part))
            writer.metadata = player.metadata(clipped)

    def batches(self, player: RolloutPlayer, progress: Progress = lambda episodes: None) -> Iterator[Columns]:
        """Yield every batch in order, read from the disk or played and stored; one is in memory at a time."""
        played = player.play(n for n in range(player.batches) if self._read(n) is None)
        for number in range(player.batches):
            columns = self._read(number)
            if columns is None:
                columns = next(played)
                self.folder.mkdir(parents=True, exist_ok=True)
                path = self._path(number)
                with atomic_file(path, force=True) as temporary, temporary.open("wb") as file:
                    np.savez(file, **columns)  # type: ignore[arg-type]
            yield columns
            progress(player.episodes_until(number))

    def remove(self) -> None:
        """Remove the parts, and the folder if nothing else is in it."""
        for path in self.folder.glob("*part-*"):
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.folder.rmdir()

    def _path(self, number: int) -> Path:
        return self.folder / f"part-{self._build}-{number:06d}.npz"

    def _read(self, number: int) -> Columns | None:
        """Read a batch from the disk; None if it is missing or incomplete."""
        try:
            return read_arrays(self._path(number))
        except Exception:  # numpy and zipfile raise many types
            return None


def read_manifest(path: Path) -> dict[str, Any]:
    """Entries of a manifest; empty if there is no file. Raises DataError for a file of another kind."""
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
    if dataset.is_file():
        entry["files"] = {dataset.name: {"sha256": digest_of(dataset)}}
    name = Path(os.path.relpath(dataset, path.parent)).as_posix()
    with locked(path, wait=True):  # builds that end at the same time write one after the other
        entries = read_manifest(path) | {name: entry}
        write_text(path, json.dumps(entries, indent=2) + "\n")
