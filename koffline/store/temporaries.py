"""Unfinished files and folders beside their targets: named by who writes them, removed when that one is gone.

A process that is killed cannot clean up. What it left is known by its name, ``.TARGET.OWNER.….tmp``, and goes
away when the same target is written again.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import hashlib
import os
import platform
import re
import secrets
import shutil
from pathlib import Path

_EXCHANGE = 2  # RENAME_EXCHANGE of renameat2(2)
_HERE = -100  # AT_FDCWD
_NAME = re.compile(r"\.(?P<target>.+)\.(?P<place>[0-9a-f]{8})-(?P<process>\d+)-[0-9a-f]{8}(\.old)?\.tmp")
_RETIRED = ".old.tmp"


def temporary_beside(target: Path, ending: str = ".tmp") -> Path:
    """A free name in the target's folder that says which process it belongs to."""
    return target.with_name(f".{target.name}.{_this_place()}-{os.getpid()}-{secrets.token_hex(4)}{ending}")


def remove_abandoned(target: Path) -> None:
    """Remove what processes of this machine that have ended left beside the target, and nothing else.

    An old folder that one of them had set aside and not yet replaced gets its name back.
    """
    with contextlib.suppress(OSError):
        for path in target.parent.glob(f".{_escaped(target.name)}.*.tmp"):
            if not _is_abandoned(path, target):
                continue
            if path.name.endswith(_RETIRED) and not os.path.lexists(target):
                os.rename(path, target)
            else:
                _discard(path)


def put_in_place(finished: Path, target: Path) -> None:
    """Give a finished folder its name; what was there goes away after that, in one step where Linux can.

    Raises OSError; then everything is as it was.
    """
    if not os.path.lexists(target):
        os.rename(finished, target)
        return
    if _exchange(finished, target):
        _discard(finished)  # the old one
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
    """Wait until a file, or a folder's list of names, is on the disk."""
    if os.name == "nt" and path.is_dir():
        return  # Windows opens no folders
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _is_abandoned(path: Path, target: Path) -> bool:
    found = _NAME.fullmatch(path.name)
    if found is None or found["target"] != target.name or found["place"] != _this_place():
        return False
    if os.name == "nt":  # where asking about a process would interrupt it
        return False
    try:
        os.kill(int(found["process"]), 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False


def _discard(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _exchange(first: Path, second: Path) -> bool:
    """Swap two names at once; False where the system or the file system cannot."""
    if platform.system() != "Linux":
        return False
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return False
    if renameat2(_HERE, os.fsencode(first), _HERE, os.fsencode(second), _EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
        return False
    raise OSError(number, os.strerror(number), str(second))


@functools.cache
def _this_place() -> str:
    """Eight digits that processes share which can see each other: the machine, its start, its container."""
    known = [platform.node()]
    with contextlib.suppress(OSError):
        known.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8"))
        known.append(str(os.stat("/proc/self/ns/pid").st_ino))
    return hashlib.sha256("\n".join(known).encode()).hexdigest()[:8]


def _escaped(name: str) -> str:
    return re.sub(r"([*?\[])", r"[\1]", name)
