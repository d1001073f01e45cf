"""The folder in which a search keeps what is done, until its result is written."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from koffline.errors import ConfigError
from koffline.store import locked
from koffline.store.files import write_text
from koffline.untrusted.limits import read_json

_IDENTITY = "search.json"
_KEPT = "kept_for_resume"
CERTIFY_SHARDS = "certify_shards"


def work_place(out: str | Path) -> Path:
    """The hidden folder beside ``out`` that keeps what is done."""
    place = Path(out).absolute()
    return place.with_name(f".{place.name}.partial")


@contextlib.contextmanager
def work_folder(out: str | Path | None, resume: bool) -> Iterator[Path]:
    """The folder that keeps what is done: beside ``out``, and removed when the block
    ends without an error, unless it is to be gone on with (`keep_for_resume`); a
    temporary one without ``out``.

    What an earlier search left there stays until another begins (`begin_search`), so
    that a command which is refused takes nothing away. resume: whether the search will
    go on there. Raises ConfigError without a folder to go on in, and while another
    process writes there.
    """
    if out is None and resume:
        raise ConfigError("resume goes on beside out; name the folder by out")
    if out is None:
        with TemporaryDirectory(
            prefix="koffline-", ignore_cleanup_errors=True
        ) as folder:
            yield Path(folder)
        return
    place = work_place(out)
    with locked(place):
        place.mkdir(parents=True, exist_ok=True)
        try:
            yield place
        except BaseException:
            with contextlib.suppress(OSError):
                place.rmdir()  # only if nothing is in it
            raise
        kept = place / _KEPT
        if kept.is_file():
            kept.unlink()
            return
        shutil.rmtree(place, ignore_errors=True)


def is_kept(out: str | Path) -> bool:
    """Whether an earlier search lies beside ``out`` that could be gone on with."""
    return (work_place(out) / _IDENTITY).is_file()


def keep_for_resume(folder: Path) -> None:
    """Have what is done kept though the search has a result: a longer budget may go on
    from there.
    """
    write_text(folder / _KEPT, "")


def begin_search(folder: Path, identity: Mapping[str, Any]) -> None:
    """Remove what another search has left in the folder, and note what determines this
    one. The shards of a log's parts stay: they are written anew before.
    """
    path = folder / _IDENTITY
    for left in folder.iterdir():
        if left.name == CERTIFY_SHARDS:
            continue
        if left.is_dir():
            shutil.rmtree(left)
        else:
            left.unlink()
    write_text(path, json.dumps(identity, indent=1) + "\n")


def goes_on(folder: Path, identity: Mapping[str, Any]) -> bool:
    """Whether the folder holds a search to go on with; ``identity`` determines it.

    Raises ConfigError for another search.
    """
    path = folder / _IDENTITY
    wanted = json.loads(json.dumps(identity))
    if not path.is_file():
        return False
    try:
        stored = read_json(path)
    except (OSError, ValueError):
        stored = {}
    for name, value in wanted.items():
        there = stored.get(name, "not set")
        here = value
        if isinstance(there, dict) and isinstance(here, dict):
            there = _without_equal(there, here)
            here = _without_equal(value, stored[name])
        if there != here:
            raise ConfigError(
                f"{folder} holds another search: {name} is {str(there)[:60]} there and"
                f" {str(here)[:60]} here; leave --resume out, or choose another --out"
            )
    return True


def _without_equal(entries: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """The entries that ``second`` has not, or not with this value."""
    return {
        name: value
        for name, value in entries.items()
        if name not in second or second[name] != value
    }
