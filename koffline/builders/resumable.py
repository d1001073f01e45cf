"""A long build in parts: each finished batch is a file beside the output until all are there."""

from __future__ import annotations

import hashlib
import json
import shutil
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from koffline.builders.rollouts import Columns, RolloutPlayer, RolloutSettings, batch_names
from koffline.data.files import atomic_file
from koffline.data.transitions import Transitions
from koffline.errors import DataError

_RUN = "run.json"


class PartsFolder:
    """The folder of parts of one build; a build with other settings is refused."""

    def __init__(self, folder: Path, settings: RolloutSettings, policies: Sequence[str]) -> None:
        self.folder, self._settings = folder, settings
        self._fingerprint = _fingerprint(settings, policies)

    def open(self, resume: bool, force: bool) -> None:
        """Make the folder, or take the one that is there. Raises DataError."""
        if self.folder.exists() and force and not resume:
            shutil.rmtree(self.folder)
        if self.folder.exists():
            if not resume:
                raise DataError(
                    f"{self.folder} holds an unfinished build; continue it with --resume or start anew "
                    "with --force"
                )
            self._check()
        else:
            self.folder.mkdir()
            with atomic_file(self.folder / _RUN, force=True) as temporary:
                temporary.write_text(json.dumps({"fingerprint": self._fingerprint}) + "\n", encoding="utf-8")

    def build(self, player: RolloutPlayer, progress: Callable[[int], None] | None = None) -> Transitions:
        """Play the batches that are missing, then join all."""
        parts = []
        for number, name in enumerate(batch_names(self._settings)):
            path = self.folder / name
            if not (path.is_file() and zipfile.is_zipfile(path)):
                _write_part(path, player.play_batch(number))
            parts.append(_read_part(path))
            if progress is not None:
                progress(min((number + 1) * self._settings.num_envs, self._settings.episodes))
        return player.join(parts)

    def remove(self) -> None:
        """The output is there: the parts are not needed any more."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _check(self) -> None:
        try:
            found = json.loads((self.folder / _RUN).read_text(encoding="utf-8"))["fingerprint"]
        except (OSError, ValueError, KeyError, TypeError):
            found = None
        if found != self._fingerprint:
            raise DataError(
                f"{self.folder} belongs to a build with other settings or policies; repeat its command with "
                "--resume, or start anew with --force"
            )


def policy_digests(specs: Sequence[str]) -> list[str]:
    """What tells policies apart: the digest of a file, else the spec itself."""
    return [
        hashlib.sha256(Path(spec).read_bytes()).hexdigest() if Path(spec).is_file() else spec
        for spec in specs
    ]


def _fingerprint(settings: RolloutSettings, policies: Sequence[str]) -> str:
    return hashlib.sha256(repr((settings, list(policies))).encode()).hexdigest()


def _write_part(path: Path, columns: Columns) -> None:
    with atomic_file(path, force=True) as temporary, temporary.open("wb") as file:
        arrays: dict[str, Any] = dict(columns)
        np.savez(file, **arrays)


def _read_part(path: Path) -> Columns:
    with np.load(path, allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}
