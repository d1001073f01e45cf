"""Files on disk: checks that outputs never replace a command's inputs; folders of runs
with one writer.
"""

from __future__ import annotations

import contextlib
import glob
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from koffline.errors import ConfigError
from koffline.json_types import JsonObject
from koffline.store.files import write_text
from koffline.store.run_record import FILE, path_of
from koffline.untrusted.limits import read_json

LOCK = ".lock"
RECORD = FILE
CONFIG = "config.yaml"
# runs by the ``kind`` in their records
_NAMES = {
    "train": "a training run",
    "online": "an online run",
}
Record = Mapping[str, Any]  # content of run.json or config.yaml
_LOG = logging.getLogger(__name__)


def check_apart(
    reads: Iterable[str | Path | None], target: str | Path, option: str = "the target"
) -> None:
    """Raise ConfigError if writing ``target`` would replace an input or a part of one;
    links are followed.

    A folder of results inside an input folder may be replaced. Names without a file are
    ignored.
    """
    place = path_of(str(target))
    for name in dict.fromkeys(str(name) for name in reads if name is not None):
        inputs = [path_of(name)]
        if glob.has_magic(name):
            inputs += map(Path, sorted(glob.glob(name)))
        is_replaced = "://" in name and name == str(target)
        if place and not is_replaced:
            is_replaced = any(path and _overlap(path, place) for path in inputs)
        if is_replaced:
            raise ConfigError(
                f"{option} {target} would replace {name} or a part of it, which this"
                " command reads, also with --force; choose another name"
            )


def _overlap(read: Path, target: Path) -> bool:
    """Whether the target is the input, contains it, or is a part of it that is no
    folder of results.
    """
    if any(part.samefile(target) for part in _lineage(read)):
        return True
    return not (target / FILE).is_file() and any(
        part.samefile(read) for part in _lineage(target)
    )


def _lineage(path: Path) -> list[Path]:
    """A path and its parent folders, both by name and with links resolved."""
    real = path.resolve()
    named = path.parent.resolve() / path.name
    return list(dict.fromkeys([real, *real.parents, named, *named.parents]))


@contextlib.contextmanager
def locked(target: Path, wait: bool = False) -> Iterator[None]:
    """Lock a file or folder for one writing process. Raises ConfigError for a second
    one unless ``wait``.

    The lock file lies beside the target and is removed with the lock. The system
    releases the lock when the process ends, however it ends; the next lock on the same
    target removes the lock file of a killed process.
    """
    path = target.with_name(f".{target.name}{LOCK}")
    if path.parent.is_file():
        raise ConfigError(f"{path.parent} is a file; name a folder")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = _open_locked(path, wait)
    except BlockingIOError:
        raise ConfigError(
            f"another process is writing to {target}; wait for it or choose another"
            " --out"
        ) from None
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(
            f"{path.parent} is not writable ({reason}); name another place"
        ) from None
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
        os.close(handle)


def _open_locked(path: Path, wait: bool) -> int:
    """Open and lock a file; try again if its previous owner removed it in the
    meantime.
    """
    while True:
        handle = os.open(
            path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666
        )
        try:
            import fcntl

            mode = fcntl.LOCK_EX
            if not wait:
                mode |= fcntl.LOCK_NB
            fcntl.flock(handle, mode)
        except BlockingIOError:
            os.close(handle)
            raise
        except (ImportError, OSError):  # Windows, or a file system without locks
            return handle
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), path.lstat()):
                return handle
        os.close(handle)


@contextlib.contextmanager
def open_run(
    out: Path,
    record: Record,
    identity_of: Callable[[Record], JsonObject],
    resume: bool,
) -> Iterator[Record]:
    """Create or continue a run's folder and yield its record; other processes are
    locked out.

    record: record of the new run, with its ``config``. identity_of: the parts of a
    record that must agree to continue a run. Raises ConfigError, before anything is
    written, if the folder exists (without resume), is no run of this kind, or belongs
    to another run. Warns if package versions have changed.
    """
    with locked(out / RECORD):
        stored = stored_run(out, record["kind"], resume)
        if stored is None:
            write_record(out, record)
        else:
            _check_same(out, identity_of(stored), identity_of(record))
            if stored.get("versions") != record["versions"]:
                _LOG.warning(
                    "%s was begun with other versions; the numbers may differ in the"
                    " last digits",
                    out,
                )
        if not (out / CONFIG).exists():
            write_config(out / CONFIG, record["config"])
        yield stored or record


def read_record(out: Path, kind: str = "train") -> JsonObject | None:
    """run.json of a folder; None if there is none.

    Raises ConfigError if it is damaged or of another kind.
    """
    try:
        content = read_json(out / RECORD)
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        raise ConfigError(
            f"{out / RECORD} cannot be read; the folder is damaged: choose another"
        ) from None
    # absent in old records
    is_ours = isinstance(content, dict) and content.get("kind", "train") == kind
    if not is_ours or not isinstance(content.get("config"), dict):
        raise ConfigError(
            f"{out / RECORD} is not of {_NAMES[kind]}; choose another folder"
        )
    return content


def write_record(out: Path, record: Record) -> None:
    """Replace run.json atomically."""
    write_text(out / RECORD, json.dumps(record, indent=2) + "\n")


def write_config(path: Path, config: Record) -> None:
    """Write a config with all defaults filled in, atomically."""
    import yaml  # slow import, not needed by all commands

    write_text(path, yaml.safe_dump(config, sort_keys=False, allow_unicode=True))


def is_free(out: Path) -> bool:
    """Whether a run may begin in a folder: it is missing, or holds only files of an
    aborted start.
    """
    return not out.exists() or all(
        path.name.startswith("." + RECORD) for path in out.iterdir()
    )


def stored_run(out: Path, kind: str, resume: bool) -> Record | None:
    """The record of the run to continue in a folder, or None if a new run may start.

    kind: "train" or "online". resume: whether the user asked to continue. Raises
    ConfigError if the folder holds something else, or a run that is not to be
    continued.
    """
    if is_free(out):
        return None
    stored = read_record(out, kind)
    if stored is None:
        raise ConfigError(
            f"{out} holds something that is not {_NAMES[kind]}; choose another folder"
        )
    if not resume:
        option = "--resume"
        if kind == "online":
            option = f"--resume {out}"
        raise ConfigError(
            f"{out} holds a run already; go on with it by {option}, or choose another"
            " --out"
        )
    return stored


def _check_same(out: Path, stored: Record, requested: Record) -> None:
    """Raise ConfigError if a stored run has other settings than the requested ones."""
    for name in {**requested, **stored}:
        if stored.get(name) != requested.get(name):
            there = str(stored.get(name, "not set"))[:20]
            here = str(requested.get(name, "not set"))[:20]
            raise ConfigError(
                f"{out} is a run of another config: {name} is {there} there and {here}"
                " here; resume it with its own config or choose another --out"
            )
