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


def work_place(out: str | Path) -> Path:
    """The hidden folder beside ``out`` that keeps what is done."""
    place = Path(out).absolute()
    return place.with_name(f".{place.name}.partial")


@contextlib.contextmanager
def work_folder(out: str | Path | None, resume: bool) -> Iterator[Path]:
    """The folder that keeps what is done: beside ``out``, and removed when the block
    ends without an error; a temporary one without ``out``.

    resume: go on with what an earlier search left there; else it is removed. Raises
    ConfigError while another process writes there.
    """
    if out is None:
        with TemporaryDirectory(
            prefix="koffline-", ignore_cleanup_errors=True
        ) as folder:
            yield Path(folder)
        return
    place = work_place(out)
    with locked(place):
        if not resume and place.exists():
            shutil.rmtree(place)
        place.mkdir(parents=True, exist_ok=True)
        yield place
        shutil.rmtree(place, ignore_errors=True)


def check_same_search(folder: Path, identity: Mapping[str, Any]) -> None:
    """Note what determines a search in its folder, or check that it is the same.

    Raises ConfigError for another search.
    """
    path = folder / _IDENTITY
    wanted = json.loads(json.dumps(identity))
    if not path.is_file():
        write_text(path, json.dumps(wanted, indent=1) + "\n")
        return
    try:
        stored = read_json(path)
    except (OSError, ValueError):
        stored = {}
    for name, value in wanted.items():
        if stored.get(name) != value:
            there = str(stored.get(name, "not set"))[:40]
            raise ConfigError(
                f"{folder} holds another search: {name} is {there} there and"
                f" {str(value)[:40]} here; leave --resume out, or choose another --out"
            )
