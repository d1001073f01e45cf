"""A long build in parts: each finished batch is a file beside the output until all are there."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from koffline.builders.rollouts import Columns, RolloutPlayer
from koffline.data.disk.writer import ShardWriter
from koffline.data.transitions import Transitions
from koffline.errors import DataError
from koffline.store.files import atomic_file
from koffline.store.run_record import versions, within_epsilon
from koffline.untrusted.arrays import read_arrays

_RUN = "run.json"


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
            with atomic_file(record, force=True) as temporary:
                temporary.write_text(json.dumps({"fingerprint": self._fingerprint}) + "\n", encoding="utf-8")
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

    def build(self, player: RolloutPlayer, progress: Callable[[int], None] | None = None) -> Transitions:
        """All batches as one log, as `batches` gives them."""
        return player.join(list(self.batches(player, progress)))

    def build_shards(
        self, player: RolloutPlayer, writer: ShardWriter, progress: Callable[[int], None] | None = None
    ) -> None:
        """All batches as shards, one in memory at a time."""
        clipped = 0
        with writer:
            for part in self.batches(player, progress):
                clipped += int(part["clipped"].sum())
                writer.append(player.record(part))
            writer.metadata = player.metadata(clipped)

    def batches(
        self, player: RolloutPlayer, progress: Callable[[int], None] | None = None
    ) -> Iterator[Columns]:
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
                if progress is not None:
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
