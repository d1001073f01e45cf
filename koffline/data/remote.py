"""Files and folders by path or URL: any scheme that fsspec knows (``s3://``, ``gs://``,
``memory://``, …).
"""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from koffline.errors import DataError, install_command
from koffline.store.files import remove_abandoned, temporary_beside
from koffline.untrusted.limits import check_regular, one_line_errors

_COPIED_AT_ONCE = 2**23
# Extras that hold what fsspec needs for these schemes.
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}
Answer = TypeVar("Answer")


def is_url(name: str) -> bool:
    """Whether a name is a URL (``scheme://…``) and not a path."""
    scheme, mark, _ = name.partition("://")
    return bool(mark) and scheme.replace("+", "").replace(":", "").isalnum()


def joined(folder: str, name: str) -> str:
    """The path or URL of a file in a folder."""
    if is_url(folder):
        return f"{folder.rstrip('/')}/{name}"
    return str(Path(folder) / name)


def local_path(name: str) -> Path | None:
    """The local path of a file, also of a file:// URL; None for a file elsewhere."""
    if name.startswith(("file://", "local://")):
        return Path(name.partition("://")[2])
    if is_url(name):
        return None
    return Path(name)


def exists(name: str) -> bool:
    """Whether the file or folder exists.

    Raises DataError if the storage cannot be reached.
    """
    return bool(_told(name, os.path.exists, "exists"))


def is_folder(name: str) -> bool:
    """Whether a name is a folder."""
    return bool(_told(name, os.path.isdir, "isdir"))


def listed(pattern: str) -> list[str]:
    """Files that match a pattern with ``*``, sorted by name."""
    if not is_url(pattern):
        return sorted(name for name in glob.glob(pattern) if os.path.isfile(name))
    with storage(pattern) as (system, path):
        return sorted(system.unstrip_protocol(match) for match in system.glob(path))


def size(name: str) -> int:
    """Bytes of a file. Raises DataError."""
    return int(_told(name, os.path.getsize, "size") or 0)


def _told(name: str, here: Callable[[str], Answer], there: str) -> Answer:
    """Ask ``here`` about a path, or the storage's method ``there`` about a URL."""
    if is_url(name):
        with storage(name) as (system, path):
            answer: Answer = getattr(system, there)(path)
            return answer
    with storage_faults(name):
        return here(name)


def read_bytes(name: str, limit: int) -> bytes:
    """At most ``limit`` bytes from the beginning of a file. Raises DataError."""
    limit = min(limit, size(name))  # a reader allocates all the bytes it is asked for
    with storage_faults(name):
        here = local_path(name)
        # also of file:// URLs, whose storage would wait for a pipe
        if here is not None:
            check_regular(here)
    if is_url(name):
        with storage(name) as (system, path), system.open(path, "rb") as file:
            return bytes(file.read(limit))
    with storage_faults(name), open(name, "rb") as file:
        return file.read(limit)


@contextlib.contextmanager
def local_file(name: str) -> Iterator[Path]:
    """A local path to the file: its own, or that of a temporary copy, which is removed
    afterwards.
    """
    path = local_path(name)
    if path is not None:
        yield path
        return
    with temporary_folder() as folder:
        copy = folder / Path(name).name
        with (
            storage(name) as (system, place),
            system.open(place, "rb") as source,
            copy.open("wb") as target,
        ):
            shutil.copyfileobj(source, target, _COPIED_AT_ONCE)
        yield copy


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """A temporary folder, removed afterwards; leftovers of killed processes are removed
    first.
    """
    beside = Path(tempfile.gettempdir()) / "koffline-copy"
    remove_abandoned(beside)
    folder = temporary_beside(beside)
    folder.mkdir(mode=0o700)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def storage(name: str) -> Iterator[tuple[Any, str]]:
    """File system of a URL and the path in it; errors of the storage become
    DataErrors.
    """
    with storage_faults(name):
        import fsspec

        yield fsspec.core.url_to_fs(name)


@contextlib.contextmanager
def storage_faults(name: str) -> Iterator[None]:
    """Turn any error of a storage into a DataError."""
    remedy = "check the address and the network"
    with one_line_errors(name, "cannot be read", remedy):
        try:
            yield
        except ImportError as error:  # fsspec has no package for the scheme
            scheme = name.partition("://")[0]
            remedy = "install that package"
            if scheme in _EXTRAS:
                remedy = install_command(_EXTRAS[scheme])
            raise DataError(
                f"{name} cannot be read: a package for {scheme}:// is missing ({error});"
                f" {remedy}"
            ) from None
        except FileNotFoundError:
            raise DataError(f"{name} does not exist; check the path") from None
