"""Where a folder of shards is written: a folder of the machine, or a storage at a URL."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from koffline.data import remote
from koffline.data.disk.shards import MANIFEST, is_shard_folder
from koffline.errors import DataError
from koffline.store.files import atomic_folder


@dataclass(eq=False)
class LocalPlace:
    """A folder without its name yet; it gets it when all is there."""

    folder: Path
    keeps_shards = True

    def done(self, name: str) -> None:
        """A file of the folder is finished."""


@dataclass(eq=False)
class RemotePlace:
    """A folder for one shard at a time: what is finished goes to the storage and from the disk."""

    folder: Path
    target: str
    sent: list[str] = field(default_factory=list)
    keeps_shards = False

    def done(self, name: str) -> None:
        """A file of the folder is finished. Raises DataError where the storage does not take it."""
        self.sent.append(remote.joined(self.target, name))
        remote.upload(self.folder / name, self.sent[-1])
        (self.folder / name).unlink()


@contextlib.contextmanager
def shard_place(target: str, force: bool) -> Iterator[LocalPlace | RemotePlace]:
    """A place for shards, whole or not at all: a storage is a folder of shards once its manifest is there.

    Raises DataError where the target exists without ``force``, holds something else, or takes no files.
    """
    if not remote.is_url(target):
        with atomic_folder(Path(target), force, lambda path: is_shard_folder(str(path))) as folder:
            yield LocalPlace(folder)
        return
    _check_storage(target, force)
    with remote.temporary_folder() as folder:
        place = RemotePlace(folder, target)
        try:
            yield place
        except BaseException:
            for name in place.sent:
                with contextlib.suppress(DataError):
                    remote.remove(name)
            raise


def _check_storage(target: str, force: bool) -> None:
    if not remote.exists(target):
        return
    ours = is_shard_folder(target)
    if ours and not force:
        raise DataError(f"{target} exists already; choose another name or overwrite it with force (--force)")
    held = remote.listed(remote.joined(target, "*"))
    if held and not ours:
        raise DataError(f"{target} holds something else and will not be replaced; choose another name")
    # Without its manifest the old folder is none: no reader takes new shards for old ones.
    for name in sorted(held, key=lambda name: not name.endswith(MANIFEST)):
        remote.remove(name)
