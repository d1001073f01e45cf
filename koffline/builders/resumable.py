"""What a build leaves: parts until all are there, then an entry in manifest.json beside the datasets.

Each finished batch of a long build is a file; entries say what made a dataset, with digests to check it by.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
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
from koffline.store.files import atomic_file, write_text
from koffline.store.run_record import describe_call, versions, within_epsilon
from koffline.store.targets import locked
from koffline.untrusted.arrays import read_arrays

NAME, _RUN = "manifest.json", "run.json"
Progress = Callable[[int], None]  # hears how many episodes are done


class PartsFolder:
    """The folder of parts of one build; a build with other settings is refused."""

    def __init__(self, folder: Path, settings: Any, policies: Sequence[str]) -> None:
        self.folder = folder
        decides = (versions().get("koffline"), settings, list(policies))
        self._fingerprint = hashlib.sha256(repr(decides).encode()).hexdigest()

    @property
    def kept(self) -> int:
        """How many batches are on the disk."""
        return len(list(self.folder.glob("part-*.npz")))

    def open(self, resume: bool, force: bool) -> None:
        """Make the folder, or take the one that is there. Raises DataError."""
        folder, record = self.folder, self.folder / _RUN
        if os.path.lexists(folder) and not self._is_ours():
            raise DataError(f"{folder} is no unfinished build; move it or name another --out")
        is_bare = not self.kept and not record.exists()  # killed when it had just begun
        if folder.exists() and (is_bare or (force and not resume)):
            shutil.rmtree(folder)
        if not folder.exists():
            folder.mkdir(parents=True)
            write_text(record, json.dumps({"fingerprint": self._fingerprint}) + "\n")
            return
        if not resume:
            raise DataError(
                f"{folder} holds an unfinished build; continue it with --resume or start anew with --force"
            )
        try:
            found = json.loads(record.read_text(encoding="utf-8"))["fingerprint"]
        except (OSError, ValueError, KeyError, TypeError):
            found = None
        if found != self._fingerprint:
            raise DataError(
                f"{folder} belongs to a build with other settings or policies; repeat its command with "
                "--resume, or start anew with --force"
            )

    def build(self, player: RolloutPlayer, progress: Progress = lambda episodes: None) -> Transitions:
        """All batches as one log, as `batches` gives them."""
        return player.join(list(self.batches(player, progress)))

    def build_shards(
        self,
        player: RolloutPlayer,
        writer: ShardWriter,
        progress: Progress = lambda episodes: None,
    ) -> None:
        """All batches as shards, one in memory at a time."""
        clipped = 0
        with writer:
            for part in self.batches(player, progress):
                clipped += int(part["clipped"].sum())
                writer.append(player.record(part))
            writer.metadata = player.metadata(clipped)

    def batches(self, player: RolloutPlayer, progress: Progress = lambda episodes: None) -> Iterator[Columns]:
        """Every batch in order, from the disk, or played and kept; at no time is more than one held here.

        What fails before any batch is done leaves nothing.
        """
        try:
            played = player.play(n for n in range(player.batches) if self._read(n) is None)
            for number in range(player.batches):
                columns = self._read(number)
                if columns is None:
                    columns = next(played)
                    path = self._path(number)
                    with atomic_file(path, force=True) as temporary, temporary.open("wb") as file:
                        np.savez(file, **columns)  # type: ignore[arg-type]
                yield columns
                progress(player.episodes_until(number))
        except BaseException:
            if not self.kept:
                self.remove()
            raise

    def remove(self) -> None:
        """The output is there: the parts go, the record last, so that a build killed here can be resumed."""
        for path in self.folder.glob("*part-*"):
            path.unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _path(self, number: int) -> Path:
        return self.folder / f"part-{number:06d}.npz"

    def _read(self, number: int) -> Columns | None:
        """A batch that is on the disk; None where it is missing, or not whole."""
        try:
            return read_arrays(self._path(number))
        except Exception:  # numpy and zipfile raise many kinds
            return None

    def _is_ours(self) -> bool:
        """Whether the folder holds what a build leaves and nothing else."""
        if not self.folder.is_dir():
            return False
        names = {path.name for path in self.folder.iterdir()} - {_RUN}
        return all(name.startswith(("part-", f".{_RUN}", ".part-")) for name in names)


def policy_digests(specs: Sequence[str]) -> list[str]:
    """What tells policies apart: the spec, with the digest of the file that it names, if it does."""
    found = []
    for spec in specs:
        base = within_epsilon(spec)
        path = Path(os.path.expanduser(base))
        known = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else base
        found.append(spec.removesuffix(base) + known)
    return found


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
        write_text(path, json.dumps(entries, indent=2) + "\n")


def _call_beside(path: Path) -> dict[str, Any] | None:
    """How to build it again, without the machine: manifests travel with their datasets."""
    call = describe_call("build")
    if call is None:
        return None
    kept = {name: call[name] for name in ("arguments", "inputs", "threads")}
    with contextlib.suppress(ValueError):  # on Windows, another drive
        kept["directory"] = Path(os.path.relpath(Path.cwd(), path.parent)).as_posix()
    return kept
