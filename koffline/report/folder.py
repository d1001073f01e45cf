"""A folder of results, written as a whole or not at all."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from koffline.errors import ConfigError
from koffline.store.files import flush_to_disk, put_in_place, remove_abandoned, temporary_beside
from koffline.store.run_record import FILE


def check_output_directory(out: Path, force: bool, marker: str) -> None:
    """ConfigError before any work when ``out`` is a file, holds something, or cannot be made.

    marker: the file without which a folder is not ours to replace, even with ``force``.
    """
    remove_abandoned(out)
    occupied = out.is_dir() and any(out.iterdir())
    parent = next(folder for folder in [out.absolute(), *out.absolute().parents] if folder.exists())
    refusal = None
    if out.exists() and not out.is_dir():
        refusal = " is a file; name a directory"
    elif occupied and not force:
        refusal = " is not empty; name another directory or add --force to replace it"
    elif occupied and not (out / marker).is_file():
        refusal = f" holds no {marker}, so --force will not replace it; name another directory"
    elif not parent.is_dir():
        refusal = f": {parent} is a file; name a directory"
    else:
        try:  # permissions alone do not tell (as in /proc)
            probe = temporary_beside(parent / out.name)
            probe.mkdir()
            probe.rmdir()
        except OSError as error:
            reason = error.strerror or str(error)
            refusal = f": {parent} is not writable ({reason}); name a directory that is"
    if refusal is not None:
        raise ConfigError(f"--out {out}{refusal}")


def write_folder(
    out: Path,
    fill: Callable[[Path], None],
    marker: str,
    force: bool = False,
    run: Mapping[str, Any] | None = None,
) -> None:
    """Let ``fill`` write into a temporary directory beside ``out`` and give that its name once complete.

    What was there is replaced only with ``force`` and only then. run: the content of run.json, where all that
    differs from one day to the next belongs: what ``fill`` writes should be the same bytes every time.
    """
    check_output_directory(out, force, marker)
    out.parent.mkdir(parents=True, exist_ok=True)
    part = temporary_beside(out)
    try:
        part.mkdir()
        fill(part)
        if run is not None:
            (part / FILE).write_text(json.dumps(run, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        for path in sorted(part.rglob("*")):
            flush_to_disk(path)
        put_in_place(part, out)
        flush_to_disk(out.parent)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
