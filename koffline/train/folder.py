"""The folder of a run: who it belongs to, that nothing foreign is overwritten, what is written about it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from koffline.errors import ConfigError
from koffline.store.files import atomic_file
from koffline.store.run_record import is_free, shown
from koffline.store.targets import locked
from koffline.train.config import TrainConfig
from koffline.untrusted.limits import read_json

RECORD, CONFIG = "run.json", "config.yaml"
_FORMAT = 1


@contextlib.contextmanager
def open_folder(out: Path, config: TrainConfig, record: Mapping[str, Any], resume: bool) -> Iterator[str]:
    """Create or continue a run's folder and give the fingerprint of the run; no second process gets in.

    record: what run.json says besides the config; `digests` are of the files that decide the run. Raises
    ConfigError, before anything is written, for a folder that exists (without resume), that is no run, or
    that belongs to another config or log.
    """
    identity = identity_of(config.resolved(), record["digests"])
    _check(out, identity, resume)
    out.mkdir(parents=True, exist_ok=True)
    with locked(out / RECORD):
        _check(out, identity, resume)
        if not (out / RECORD).exists():
            write_record(out, {"format": _FORMAT, "config": config.resolved(), **record, "finished": None})
        if not (out / CONFIG).exists():
            write_config(out / CONFIG, config)
        yield json.dumps(identity, sort_keys=True)


def read_record(out: Path) -> dict[str, Any] | None:
    """run.json of a folder, None where there is none. Raises ConfigError for a damaged one."""
    try:
        content = read_json(out / RECORD)
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        raise ConfigError(f"{out / RECORD} cannot be read; the folder is damaged: choose another") from None
    if not isinstance(content, dict) or not isinstance(content.get("config"), dict):
        raise ConfigError(f"{out / RECORD} is not of a training run; choose another folder")
    return content


def write_config(path: Path, config: TrainConfig) -> None:
    """Write a config with every default filled in, whole or not at all."""
    text = yaml.safe_dump(config.resolved(), sort_keys=False, allow_unicode=True)
    with atomic_file(path, force=True) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_record(out: Path, record: Mapping[str, Any]) -> None:
    """Replace run.json, whole or not at all."""
    with atomic_file(out / RECORD, force=True) as temporary:
        temporary.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def _check(out: Path, identity: Mapping[str, Any], resume: bool) -> None:
    if is_free(out, RECORD):
        return
    record = read_record(out)
    if record is None:
        raise ConfigError(f"{out} holds something that is not a training run; choose another folder")
    if not resume:
        raise ConfigError(f"{out} holds a run already; go on with it by --resume, or choose another --out")
    found = identity_of(record["config"], record.get("digests", {}))
    for key in sorted({*found, *identity}, key=lambda key: (key != "algo.type", key)):
        if found.get(key) != identity.get(key):
            raise ConfigError(
                f"{out} is a run of another config: {key} is {shown(found.get(key))} there and "
                f"{shown(identity.get(key))} here; resume it with its own config or choose another --out"
            )


def identity_of(config: Mapping[str, Any], digests: Mapping[str, str]) -> dict[str, Any]:
    """What makes a run the same one, flat: all settings but where files lie and who is told, and digests."""
    kept = {name: section for name, section in config.items() if name != "logger"}
    kept["data"] = {name: value for name, value in config["data"].items() if name != "source"}
    kept["algo"] = {name: value for name, value in config["algo"].items() if name != "policy"}
    return {**_flat(kept, ""), **{f"the digest of the {name}": digest for name, digest in digests.items()}}


def _flat(value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not value:
        return {path: value}
    flat = {}
    for name, part in value.items():
        flat.update(_flat(part, f"{path}.{name}".lstrip(".")))
    return flat
