"""The folder of a run: whose it is, that nothing foreign is overwritten, its record and its config."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from koffline.errors import ConfigError
from koffline.store.files import atomic_file
from koffline.store.run_record import FILE, is_free, shown
from koffline.store.targets import locked
from koffline.untrusted.limits import read_json

RECORD, CONFIG = FILE, "config.yaml"
_NAMES = {None: "a training run", "online": "an online run"}  # by the ``kind`` in their records
Record = Mapping[str, Any]
_LOG = logging.getLogger(__name__)


@contextlib.contextmanager
def open_run(
    out: Path,
    record: Record,
    identity_of: Callable[[Record], dict[str, Any]],
    resume: bool,
) -> Iterator[None]:
    """Create or continue a run's folder; no second process gets in.

    record: of the run as it begins, with its ``config``; identity_of: what of a record makes two runs the
    same. Raises ConfigError, before anything is written, for a folder that exists (without resume), that is
    no run of this kind, or that belongs to another one.
    """
    _check(out, record, identity_of, resume)
    out.mkdir(parents=True, exist_ok=True)
    with locked(out / RECORD):
        _check(out, record, identity_of, resume)
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
    """Say where a run was begun with other versions than today's."""
    if (read_record(out, kind) or {}).get("versions") != now["versions"]:
        _LOG.warning("%s was begun with other versions; the numbers may differ in the last digits", out)


def write_record(out: Path, record: Record) -> None:
    """Replace run.json, whole or not at all."""
    write_text(out / RECORD, json.dumps(record, indent=2) + "\n")


def write_config(path: Path, config: Mapping[str, Any]) -> None:
    """A config with every default filled in, whole or not at all."""
    write_text(path, yaml.safe_dump(config, sort_keys=False, allow_unicode=True))


def finite_json(content: Any) -> str:
    """The text of a JSON file; what is not finite is null."""
    finite = json.loads(json.dumps(content), parse_constant=lambda infinite_or_nan: None)
    return json.dumps(finite, indent=2) + "\n"


def write_text(path: Path, text: str) -> None:
    """Replace a file, whole or not at all."""
    with atomic_file(path, force=True) as temporary:
        temporary.write_text(text, encoding="utf-8")


def _check(
    out: Path,
    record: Record,
    identity_of: Callable[[Record], dict[str, Any]],
    resume: bool,
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
            raise ConfigError(
                f"{out} is a run of another config: {name} is {shown(found.get(name))} there and "
                f"{shown(asked.get(name))} here; resume it with its own config or choose another --out"
            )
