"""The folder of an online run: whose it is, that nothing foreign is overwritten, where things lie in it."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from koffline.errors import ConfigError
from koffline.online.config import OnlineConfig, resolved
from koffline.store.files import atomic_file
from koffline.store.run_record import describe_call, digest_of, is_free, now, shown
from koffline.store.targets import locked
from koffline.untrusted.limits import read_json

RECORD, CONFIG, SUMMARY, CURVES = "run.json", "config.yaml", "summary.json", "learning_curve.png"
_FORMAT, _KIND = 1, "online"


@dataclass(frozen=True)
class Plan:
    """What decides a run's numbers. groups: the seeds that are trained in one stack, group by group."""

    config: OnlineConfig
    groups: tuple[tuple[int, ...], ...]

    @property
    def seeds(self) -> tuple[int, ...]:
        """All seeds in order."""
        return tuple(seed for group in self.groups for seed in group)

    @property
    def fingerprint(self) -> str:
        """Digest of the settings and of the log that the replay starts from, wherever it lies."""
        identity = {**resolved(self.config), "initial_log": _digest(self.config.initial_log)}
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def make_plan(config: OnlineConfig, seed: int, seed_count: int, workers: int) -> Plan:
    """Seeds ``seed``, ``seed`` + 1, …, in as many stacks of about equal size as there are workers."""
    for name, number, least in (("seed", seed, 0), ("seed_count", seed_count, 1), ("workers", workers, 1)):
        if isinstance(number, bool) or not isinstance(number, int) or number < least:
            raise ConfigError(f"{name} is {number!r}; give a whole number of at least {least}")
    count = min(workers, seed_count)
    ends = [round(place * seed_count / count) for place in range(count + 1)]
    groups = (range(seed + low, seed + high) for low, high in pairwise(ends))
    return Plan(config, tuple(tuple(group) for group in groups))


@contextlib.contextmanager
def open_folder(out: Path, plan: Plan, versions: Mapping[str, str], resume: bool) -> Iterator[None]:
    """Create or continue a run's folder; no second process gets in.

    Raises ConfigError, before anything is written, for a folder that exists (without resume), that is no
    online run, or that belongs to other settings or seeds.
    """
    _check(out, plan, resume)
    out.mkdir(parents=True, exist_ok=True)
    with locked(out / RECORD):
        _check(out, plan, resume)
        if not (out / RECORD).exists():
            write_record(
                out,
                {
                    "format": _FORMAT,
                    "kind": _KIND,
                    "config": resolved(plan.config),
                    "groups": [list(group) for group in plan.groups],
                    "initial_log": _digest(plan.config.initial_log),
                    "versions": dict(versions),
                    "call": describe_call("online", [plan.config.initial_log]),
                    "started": now(),
                    "finished": None,
                },
            )
        if not (out / CONFIG).exists():
            text = yaml.safe_dump(resolved(plan.config), sort_keys=False, allow_unicode=True)
            with atomic_file(out / CONFIG, force=True) as temporary:
                temporary.write_text(text, encoding="utf-8")
        yield


def read_record(out: Path) -> dict[str, Any] | None:
    """run.json of a folder, None where there is none. Raises ConfigError for a damaged or foreign one."""
    try:
        content = read_json(out / RECORD)
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        raise ConfigError(f"{out / RECORD} cannot be read; the folder is damaged: choose another") from None
    if not isinstance(content, dict) or content.get("kind") != _KIND:
        raise ConfigError(f"{out / RECORD} is not of an online run; choose another folder")
    return content


def write_record(out: Path, record: Mapping[str, Any]) -> None:
    """Replace run.json, whole or not at all."""
    with atomic_file(out / RECORD, force=True) as temporary:
        temporary.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def stored_groups(out: Path) -> tuple[tuple[int, ...], ...] | None:
    """The seeds of the run in a folder, by stack; None where there is no run. Raises ConfigError."""
    record = read_record(out) if out.is_dir() else None
    if record is None:
        return None
    try:
        return tuple(tuple(int(seed) for seed in group) for group in record["groups"])
    except (KeyError, TypeError, ValueError):
        raise ConfigError(f"{out / RECORD} names no seeds; the folder is damaged: choose another") from None


def seed_folder(out: Path, seed: int) -> Path:
    """Where a seed's files lie."""
    return out / f"seed_{seed}"


def group_name(seeds: Sequence[int]) -> str:
    """Name of a stack's folder of checkpoints."""
    return f"seeds_{seeds[0]}-{seeds[-1]}"


def _check(out: Path, plan: Plan, resume: bool) -> None:
    if is_free(out, RECORD):
        return
    record = read_record(out)
    if record is None:
        raise ConfigError(f"{out} holds something that is not an online run; choose another folder")
    if not resume:
        raise ConfigError(
            f"{out} holds a run already; go on with it by --resume {out}, or choose another --out"
        )
    found = {**record["config"], "the digest of the initial log": record.get("initial_log")}
    asked = {**resolved(plan.config), "the digest of the initial log": _digest(plan.config.initial_log)}
    found["seeds"], asked["seeds"] = stored_groups(out), plan.groups
    differing = [
        f"{key} is {shown(found.get(key))} there and {shown(asked.get(key))} here"
        for key in {**asked, **found}
        if key != "initial_log" and found.get(key) != asked.get(key)
    ]
    if differing:
        raise ConfigError(
            f"{out} is a run of another config: {', '.join(differing)}; "
            "resume it with its own config or choose another --out"
        )


def _digest(log: str | None) -> str | None:
    """SHA-256 of a log that is a file; the name of any other."""
    if log is None or not Path(log).is_file():
        return log
    return digest_of(Path(log))
