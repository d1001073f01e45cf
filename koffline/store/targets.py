"""Output paths: never an input of the command, never the output of another command; folders of runs.

All commands check this before any work (`koffline.cli.targets.claim`). The lock also holds for calls from
Python.
"""

from __future__ import annotations

import contextlib
import glob
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import yaml

from koffline.errors import ConfigError, DataError
from koffline.store.files import minari_folder, temporary_beside, write_text
from koffline.store.run_record import FILE, path_of
from koffline.untrusted.limits import read_json

LOCK = ".lock"
RECORD, CONFIG = FILE, "config.yaml"
_NAMES = {None: "a training run", "online": "an online run"}  # kinds of runs by the ``kind`` in their records
Record = Mapping[str, Any]
_LOG = logging.getLogger(__name__)
_MOST_TRIES = 100  # attempts to make a folder that others may remove; in /proc all fail
_claims: ContextVar[frozenset[Path]] = ContextVar("claims", default=frozenset())


def check_name(out: str | Path, option: str = "--out", is_whole: bool = True) -> Path:
    """Check the name of an output path. Raises ConfigError if no such file or folder is possible.

    is_whole: the path will be replaced as a whole, which is impossible for the current folder.
    """
    if not str(out).strip():
        raise ConfigError(f"{option} is empty; name a file or a folder")
    path, here = Path(out), Path.cwd()
    try:
        if not is_whole and path.is_file():
            raise ConfigError(f"{option} {out} is a file; name a folder")
        if path.resolve() in (here, *here.parents):
            if is_whole:
                raise ConfigError(f"{option} {out} is the current folder or holds it; name another one")
            return path
        temporary_beside(path, ".old.tmp").lstat()  # the longest temporary name
    except (FileNotFoundError, NotADirectoryError):
        pass  # a new file; an error for its folder is raised when that is made
    except (OSError, ValueError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise ConfigError(f"{option} {out} is no name for results ({reason}); choose another") from None
    return path


def check_apart(reads: Iterable[str | Path | None], target: str | Path, option: str = "the target") -> None:
    """Raise ConfigError if writing ``target`` would replace an input or a part of it; links are followed.

    A folder of results within an input folder is allowed. Names without a file are ignored.
    """
    place = local_name(str(target))
    for name in dict.fromkeys(str(name) for name in reads if name is not None):
        same_url = "://" in place and name == place
        if same_url or any(_overlap(path, Path(place)) for path in _places(name)):
            said = f"{option} {target} would replace {name} or a part of it, which this command reads"
            raise ConfigError(f"{said}, also with --force; choose another name")


@contextlib.contextmanager
def locked(target: Path, wait: bool = False) -> Iterator[None]:
    """Lock a file or folder for one writing process. Raises ConfigError for a second one unless ``wait``.

    The lock is on a file beside the target, which goes away with it; the system lets go of it when the
    process ends, however it ends, and the file of one that was killed goes away with the next lock on the
    same target. Folders made for it go away again where nothing was written.
    """
    real = _real(target)
    if real in _claims.get():  # already locked by the command
        yield
        return
    path, made, handle = real.with_name(f".{real.name}{LOCK}"), list[Path](), None
    try:
        handle = _acquired(path, target, made, wait)
        yield
    finally:
        if handle is not None:
            with contextlib.suppress(OSError):
                path.unlink()
            os.close(handle)
        for folder in reversed(made):
            with contextlib.suppress(OSError):
                folder.rmdir()


@contextlib.contextmanager
def claimed(target: Path) -> Iterator[None]:
    """Lock the output of a command, its calls included. Raises ConfigError."""
    with locked(target):
        token = _claims.set(_claims.get() | {_real(target)})
        try:
            yield
        finally:
            _claims.reset(token)


def _real(target: Path) -> Path:
    return target.parent.resolve() / target.name if target.name else target.resolve()


def _acquired(path: Path, target: Path, made: list[Path], wait: bool) -> int | None:
    """Open and lock the file; ``made`` collects the folders that had to be made, the outermost first."""
    try:
        import fcntl
    except ImportError:  # no locks on Windows
        return None
    tries = 0
    while True:
        tries += 1
        try:
            for folder in [part for part in (path.parent, *path.parents) if not part.exists()][::-1]:
                folder.mkdir(exist_ok=True)
                made.append(folder)
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        except OSError as error:
            if isinstance(error, (FileNotFoundError, FileExistsError)) and tries < _MOST_TRIES:
                continue  # another command has just removed the folder that it had made
            reason = error.strerror or str(error)
            raise ConfigError(f"{path.parent} is not writable ({reason}); name another place") from None
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            os.close(handle)
            said = f"another process is writing to {target}"
            raise ConfigError(f"{said}; wait for it or choose another --out") from None
        except OSError:  # a file system without locks
            return handle
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), path.lstat()):
                return handle
        os.close(handle)  # the previous owner has removed the file meanwhile


def _places(name: str) -> list[Path]:
    """Existing paths of a name or a pattern."""
    try:
        local = local_name(name)
    except DataError:  # reported when it is opened
        return []
    named = Path(local) if local in (".", "..") else path_of(local)
    found = sorted(glob.glob(local)) if glob.has_magic(local) else []
    return [path for path in (named, *map(Path, found)) if path is not None]


def local_name(name: str) -> str:
    """The path behind file://… and minari:<id>; other names as they are. Raises DataError for a wrong id."""
    if name.startswith("minari:"):
        return str(minari_folder(name.removeprefix("minari:")))
    return name.removeprefix("file://")


def _overlap(read: Path, target: Path) -> bool:
    """Whether an existing target is the input, contains it, or is a part of it and no folder of results."""
    try:
        if any(part.samefile(target) for part in _lineage(read)):
            return True
        return not (target / FILE).is_file() and any(part.samefile(read) for part in _lineage(target))
    except OSError:  # one of them does not exist
        return False


def _lineage(path: Path) -> list[Path]:
    """A path and its parent folders, both by name and with links resolved."""
    real, named = path.resolve(strict=True), path.parent.resolve(strict=True) / path.name
    return list(dict.fromkeys([real, *real.parents, named, *named.parents]))


@contextlib.contextmanager
def open_run(
    out: Path, record: Record, identity_of: Callable[[Record], dict[str, Any]], resume: bool
) -> Iterator[None]:
    """Create or continue a run's folder; no second process gets in.

    record: of the run as it begins, with its ``config``; identity_of: what of a record makes two runs the
    same. Raises ConfigError, before anything is written, for a folder that exists (without resume), that is
    no run of this kind, or that belongs to another one.
    """
    _check_run(out, record, identity_of, resume)
    out.mkdir(parents=True, exist_ok=True)
    with locked(out / RECORD):
        _check_run(out, record, identity_of, resume)
        if not (out / RECORD).exists():
            write_record(out, record)
        if not (out / CONFIG).exists():
            write_config(out / CONFIG, record["config"])
        yield


def read_record(out: Path, kind: str | None = None) -> dict[str, Any] | None:
    """run.json of a folder, None where there is none. Raises ConfigError for a damaged or foreign one."""
    try:
        content = read_json(out / RECORD)
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        raise ConfigError(f"{out / RECORD} cannot be read; the folder is damaged: choose another") from None
    is_ours = isinstance(content, dict) and content.get("kind") == kind
    if not is_ours or not isinstance(content.get("config"), dict):
        raise ConfigError(f"{out / RECORD} is not of {_NAMES[kind]}; choose another folder")
    return content


def warn_of_versions(out: Path, now: Record, kind: str | None = None) -> None:
    """Log a warning if a run was begun with other versions than the present ones."""
    if (read_record(out, kind) or {}).get("versions") != now["versions"]:
        _LOG.warning("%s was begun with other versions; the numbers may differ in the last digits", out)


def write_record(out: Path, record: Record) -> None:
    """Replace run.json, whole or not at all."""
    write_text(out / RECORD, json.dumps(record, indent=2) + "\n")


def write_config(path: Path, config: Mapping[str, Any]) -> None:
    """Write a config with every default filled in, whole or not at all."""
    write_text(path, yaml.safe_dump(config, sort_keys=False, allow_unicode=True))


def is_free(out: Path, record: str) -> bool:
    """Whether a run may begin in a folder: it is missing, or holds only files of an aborted start.

    record: the file that makes a folder a run's. Raises ConfigError for a file.
    """
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out} is a file; name a folder for the run")
    return not out.exists() or all(path.name.startswith("." + record) for path in out.iterdir())


def _check_run(
    out: Path, record: Record, identity_of: Callable[[Record], dict[str, Any]], resume: bool
) -> None:
    if is_free(out, RECORD):
        return
    stored = read_record(out, record.get("kind"))
    if stored is None:
        raise ConfigError(
            f"{out} holds something that is not {_NAMES[record.get('kind')]}; choose another folder"
        )
    if not resume:
        option = f"--resume {out}" if record.get("kind") == "online" else "--resume"
        raise ConfigError(f"{out} holds a run already; go on with it by {option}, or choose another --out")
    found, asked = identity_of(stored), identity_of(record)
    for name in {**asked, **found}:
        if found.get(name) != asked.get(name):
            there, here = (str(said.get(name, "not set"))[:20] for said in (found, asked))
            said = f"{out} is a run of another config: {name} is {there} there and {here} here"
            raise ConfigError(f"{said}; resume it with its own config or choose another --out")
