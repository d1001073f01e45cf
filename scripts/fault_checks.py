"""Whether every file under a final name can be read to its end, and what temporary
files are left.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Callable
from pathlib import Path

_TEMPORARY = re.compile(r"\.(tmp|part|old|probe)$")
_PNG_END = b"IEND\xaeB`\x82"


def unreadable_in(folder: Path) -> list[str]:
    """Names of the files that are not whole; those with a temporary name, or in such a
    folder, may be.
    """
    bad = []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if not path.is_file() or any(
            part.startswith(".") or _TEMPORARY.search(part) for part in name.parts
        ):
            continue
        check = _CHECKS.get(path.suffix, _is_something)
        try:
            whole = check(path)
        except Exception as error:
            bad.append(f"{name} ({type(error).__name__})")
            continue
        if not whole:
            bad.append(str(name))
    return bad


def litter_in(folder: Path) -> list[str]:
    """Names of temporary files and folders."""
    paths = (path for path in sorted(folder.rglob("*")) if _TEMPORARY.search(path.name))
    return [path.relative_to(folder).as_posix() for path in paths]


def _json(path: Path) -> bool:
    json.loads(path.read_text(encoding="utf-8"))
    return True


def _yaml(path: Path) -> bool:
    import yaml

    return isinstance(yaml.safe_load(path.read_text(encoding="utf-8")), dict)


def _hdf5(path: Path) -> bool:
    import h5py

    def read(name: str, item: object) -> None:
        if isinstance(item, h5py.Dataset):
            item[()]

    with h5py.File(path) as file:
        file.visititems(read)
    return True


def _archive(path: Path) -> bool:
    with zipfile.ZipFile(path) as archive:
        return archive.testzip() is None


def _is_something(path: Path) -> bool:
    # logs grow while a run goes on
    return path.name.endswith((".csv", ".log")) or path.stat().st_size > 0


_CHECKS: dict[str, Callable[[Path], bool]] = {
    ".json": _json,
    ".yaml": _yaml,
    ".hdf5": _hdf5,
    ".h5": _hdf5,
    ".npz": _archive,
    ".d3": _archive,
    ".pt": _archive,
    ".zip": _archive,
    ".png": lambda path: path.read_bytes().endswith(_PNG_END),
    ".svg": lambda path: path.read_text(encoding="utf-8").rstrip().endswith("</svg>"),
    ".html": lambda path: path.read_text(encoding="utf-8").rstrip().endswith("</html>"),
}
