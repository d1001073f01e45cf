"""Atomic files, which appear complete or not at all, and errors of readers that say
what to do.

Unfinished files lie beside their target, with the writing process in their name
(``.TARGET.OWNER.….tmp``). Those of a killed process are removed when the same target is
written again.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import hashlib
import json
import os
import platform
import re
import secrets
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from koffline.errors import ConfigError, DataError, listed
from koffline.untrusted.limits import one_line, one_line_errors

_BLOCK = 1 << 20  # bytes
Location = str | os.PathLike[str]
MINARI = "minari:"  # prefix of Minari's dataset names
# Files that mark a folder of shards or of Minari, which travels as a whole: its readers
# refuse links in it.
_WHOLE = ("manifest.json", "metadata.json", "data/metadata.json")


@contextlib.contextmanager
def reading(source: str | Path, kind: str) -> Iterator[None]:
    """Turn the errors of a reader into one DataError; our own errors pass unchanged."""
    with one_line_errors(
        source, f"a truncated or corrupt {kind} file", "copy or export it again"
    ):
        try:
            yield
        except (FileNotFoundError, PermissionError) as error:
            raise DataError(
                f"{one_line(error)}; check the path and its access rights"
            ) from None
        except MemoryError:
            raise DataError(
                "it does not fit into the memory of this process; convert it with"
                " `koffline data convert … --shard-rows` on a larger machine and open"
                " it lazily"
            ) from None


def check_target(
    target: Path, force: bool, own_files: Sequence[str] | None = None
) -> None:
    """Raise DataError if the target exists (without ``force``) or its folder does not.

    own_files: for a folder, patterns of files that may be deleted with it; other files
    are never deleted. None: the target is a file.
    """
    if os.path.lexists(target):
        if not force:
            raise DataError(
                f"{target} exists already; choose another name or overwrite it with"
                " force (--force)"
            )
        if own_files is None and target.is_dir():
            raise DataError(f"{target} is a folder; give a file name")
        if own_files is not None:
            if not target.is_dir():
                raise DataError(f"{target} is a file; name a folder")
            foreign = _foreign_files(target, own_files)
            if foreign:
                raise DataError(
                    f"{target} holds {listed(foreign, 3)}, which --force would delete;"
                    " move what is not koffline's away, or choose another name"
                )
    if not target.parent.is_dir():
        raise DataError(
            f"{target} cannot be written, the folder {target.parent} does not exist;"
            " create it"
        )


def _foreign_files(folder: Path, own_files: Sequence[str]) -> list[str]:
    """Names of the files below a folder that match none of the patterns."""
    foreign = []
    for path in folder.rglob("*"):
        if path.is_dir() and not path.is_symlink():
            continue
        name = Path("/", path.relative_to(folder))
        if not any(name.match(f"/{pattern}") for pattern in own_files):
            foreign.append(str(name)[1:])
    return sorted(foreign)


def check_place(target: Location, option: str = "out") -> None:
    """Raise ConfigError, before any work, for a path that cannot be written.

    option: the path's name, for messages.
    """
    try:
        probe_place(Path(target).resolve())
    except (OSError, TypeError, ValueError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise ConfigError(
            f"{option} {target} cannot be written ({reason}); choose another place"
        ) from None


def probe_place(place: Path, is_whole: bool = True) -> None:
    """Raise OSError or ValueError for a path beside which no temporary files can be.

    is_whole: the path will be replaced; else files are added to it.
    """
    if is_whole and place.parent.is_dir():  # it will be written beside
        probe = temporary_beside(place)
        probe.touch()
        probe.unlink()
    with contextlib.suppress(FileNotFoundError):
        temporary_beside(place, _RETIRED).lstat()  # the longest temporary name


@contextlib.contextmanager
def atomic_file(
    target: Path, force: bool, own_files: Sequence[str] | None = None
) -> Iterator[Path]:
    """Yield a temporary path beside ``target``, which gets the final name only if the
    block ends well.

    A part of an unfinished file is written in place. Raises DataError as `check_target`
    does, or if the target cannot be written.
    """
    if _NAME.fullmatch(target.name):
        yield target
        return
    remove_abandoned(target)
    check_target(target, force, own_files)
    temporary = temporary_beside(target)
    try:
        yield temporary
        for path in [*sorted(temporary.rglob("*")), temporary]:
            flush_to_disk(path)
        if not force and os.path.lexists(target):  # it appeared meanwhile
            raise FileExistsError
        put_in_place(temporary, target)
        flush_to_disk(target.parent)
    except FileExistsError:
        raise DataError(
            f"{target} exists already; choose another name or overwrite it (--force)"
        ) from None
    except OSError as error:
        raise DataError(
            f"{target} cannot be written ({error.strerror or error}); check the folder"
            " and the disk"
        ) from None
    finally:
        _discard(temporary)


@contextlib.contextmanager
def atomic_folder(
    target: Path, force: bool, own_files: Sequence[str]
) -> Iterator[Path]:
    """`atomic_file` for a folder; with ``force`` it replaces a folder that holds only
    ``own_files``. A link to a folder stays, and the folder is replaced.
    """
    if target.is_symlink() and target.is_dir():
        target = target.resolve()
    with atomic_file(target, force, own_files) as temporary:
        temporary.mkdir()
        yield temporary


@contextlib.contextmanager
def parents_made(target: Path) -> Iterator[None]:
    """Context in which the folder of ``target`` exists; the folders made for it go if
    the block fails.
    """
    # the innermost first
    missing = [folder for folder in target.parents if not folder.exists()]
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        for folder in missing:
            # it was not made, or holds something meanwhile
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise


def finite_json(content: object, indent: int = 2) -> str:
    """Text of a JSON file, with null for non-finite numbers."""
    finite = json.loads(
        json.dumps(content), parse_constant=lambda infinite_or_nan: None
    )
    return json.dumps(finite, indent=indent) + "\n"


def write_text(path: Path, text: str) -> None:
    """Replace a text file atomically."""
    with atomic_file(path, force=True) as temporary:
        temporary.write_text(text, encoding="utf-8")


def digest_of(path: Path) -> str:
    """SHA-256 of a file's bytes; of a folder, of the names and digests of all files in
    it.

    Links in a folder are followed, as readers of tables do, but not in one that travels
    as a whole.
    """
    if path.is_dir():
        parts = [part for part in path.rglob("*") if "__pycache__" not in part.parts]
        if any(os.path.lexists(path / name) for name in _WHOLE):
            parts = [part for part in parts if not part.is_symlink()]
        files = sorted(part for part in parts if part.is_file())
        lines = [
            f"{part.relative_to(path).as_posix()} {digest_of(part)}\n" for part in files
        ]
        return hashlib.sha256(
            "".join(lines).encode(errors="surrogateescape")
        ).hexdigest()
    digest = hashlib.sha256()
    with path.open("rb") as file:
        # files of the system, as in /proc, may be endless
        left = os.fstat(file.fileno()).st_size
        while left > 0 and (block := file.read(min(left, _BLOCK))):
            left -= len(block)
            digest.update(block)
    return digest.hexdigest()


def minari_folder(name: str) -> Path:
    """Folder of ``minari:<id>`` on this machine, which may not exist.

    Raises DataError.
    """
    identifier = name.removeprefix(MINARI)
    if not re.fullmatch(r"[-\w]+(/[-\w]+)*", identifier):
        raise DataError(
            f"{name} is no Minari id; give {MINARI}name-v0 or {MINARI}group/name-v0"
        )
    root = os.environ.get("MINARI_DATASETS_PATH")
    if root:
        return Path(root) / identifier
    return Path.home() / ".minari" / "datasets" / identifier


_NAME = re.compile(
    r"\.(?P<target>.+)\.(?P<place>[0-9a-f]{8})-(?P<process>\d+)-[0-9a-f]{8}(\.old)?\.tmp"
)
_RETIRED = ".old.tmp"


def temporary_beside(target: Path, ending: str = ".tmp") -> Path:
    """An unused name in the target's folder that identifies this process."""
    return target.with_name(
        f".{target.name}.{_this_place()}-{os.getpid()}-{secrets.token_hex(4)}{ending}"
    )


def remove_abandoned(target: Path) -> None:
    """Remove temporary files that ended processes of this machine left beside the
    target.

    If such a process had set an old folder aside and not yet replaced it, the old
    folder gets its name back.
    """
    with contextlib.suppress(OSError):
        for path in target.parent.glob(f".{glob.escape(target.name)}.*.tmp"):
            parts = _NAME.fullmatch(path.name)
            if parts is None or parts["target"] != target.name:
                continue
            if parts["place"] != _this_place():
                continue
            import psutil  # imported only if a temporary file was left, which is rare

            if psutil.pid_exists(int(parts["process"])):
                continue
            if path.name.endswith(_RETIRED) and not os.path.lexists(target):
                os.rename(path, target)
            else:
                _discard(path)


def put_in_place(finished: Path, target: Path) -> None:
    """Give a finished file or folder its name; an existing folder is first set aside,
    then removed.

    Raises OSError; then everything is as before.
    """
    if not (finished.is_dir() and os.path.lexists(target)):
        os.replace(finished, target)
        return
    retired = temporary_beside(target, _RETIRED)
    os.rename(target, retired)
    try:
        os.rename(finished, target)
    except BaseException:
        os.rename(retired, target)
        raise
    _discard(retired)


def flush_to_disk(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is stored on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _discard(path: Path) -> None:
    with contextlib.suppress(OSError):  # a name that is too long, say
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


@functools.cache
def _this_place() -> str:
    """Eight digits for machine, boot and container; the same for all processes that can
    see each other.
    """
    known = [platform.node()]
    with contextlib.suppress(OSError):
        known.append(
            Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8")
        )
        known.append(str(os.stat("/proc/self/ns/pid").st_ino))
    return hashlib.sha256("\n".join(known).encode()).hexdigest()[:8]
