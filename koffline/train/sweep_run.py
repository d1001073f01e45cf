"""One run of a sweep where it is trained, in this process, another, or on another machine, and its result."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from koffline.data.files import atomic_file
from koffline.errors import ConfigError
from koffline.jobs import LocalFile
from koffline.targets import LOCK
from koffline.train.config import TrainConfig
from koffline.train.folder import CONFIG, read_record, write_record
from koffline.train.run import train
from koffline.untrusted.limits import read_json

_FORMAT = 1
_DIVERGED = "training diverged"  # how the error of `train` begins


@dataclass(frozen=True)
class RunResult:
    """What a run left. metrics: of the last epoch, NaN for what is not finite; none where it diverged."""

    name: str
    seed: int
    steps: int
    seconds: float
    metrics: dict[str, float]
    model: str | None
    diverged: str | None
    warnings: tuple[str, ...]


def train_run(path: Path, name: str, config: TrainConfig, device: str) -> None:
    """Train in the folder ``name`` beside ``path``, going on where it was, and write the result at ``path``.

    A run whose networks stop being finite is a result too: the same run would diverge again.
    """
    with contextlib.redirect_stdout(sys.stderr), _heard_warnings() as heard:
        try:
            result = train(config, path.parent / name, device=device, resume=True)
        except ConfigError as error:
            if not str(error).startswith(_DIVERGED):
                raise
            outcome: dict[str, Any] = {"steps": 0, "metrics": {}, "diverged": str(error)}
        else:
            outcome = {
                "steps": result.steps,
                "metrics": {
                    k: v if math.isfinite(v) else None for k, v in result.metrics.items() if not _is_clock(k)
                },
                "model": str(Path(name) / result.model.name),
            }
    content = {"format": _FORMAT, "name": name, "seed": config.train.seed, **outcome, "warnings": heard}
    with atomic_file(path, force=True) as temporary:
        temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def read_result(path: Path) -> RunResult:
    """The result of a run. Raises ConfigError for a damaged file."""
    try:
        content = read_json(path)
        clock = _read_clock(path.parent / path.stem)
        metrics = {**content["metrics"], **clock.get("metrics", {})}
        return RunResult(
            name=str(content["name"]),
            seed=int(content["seed"]),
            steps=int(content["steps"]),
            seconds=float(content.get("seconds", clock.get("seconds", math.nan))),
            metrics={k: math.nan if v is None else float(v) for k, v in metrics.items()},
            model=content.get("model"),
            diverged=content.get("diverged"),
            warnings=tuple(content["warnings"]),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} is damaged or of another version ({type(error).__name__}); delete it and run again"
        ) from None


def _is_clock(metric: str) -> bool:
    """Seconds are in run.json of the run: the result is the same every time."""
    return metric.startswith("time_")


def _read_clock(folder: Path) -> dict[str, Any]:
    """Seconds and metrics of the clock that a run left; nothing where it diverged."""
    try:
        record = read_record(folder) or {}
    except ConfigError:
        return {}
    if not record.get("finished"):
        return {}
    metrics = {name: value for name, value in record.get("metrics", {}).items() if _is_clock(name)}
    return {"seconds": record.get("seconds", math.nan), "metrics": metrics}


def is_result(path: Path) -> bool:
    """Whether the result of the run of that name lies there, with its model."""
    try:
        result = read_result(path)
    except ConfigError:
        return False
    return result.name == path.stem and (result.model is None or (path.parent / result.model).exists())


def files_of(config: TrainConfig) -> tuple[LocalFile, ...]:
    """The files of this machine that a run reads. Raises ConfigError for a log that is a folder."""
    names = [config.data.source, config.algo.policy]
    names += [getattr(settings, "base", None) for settings in config.evaluators.values()]
    paths = [Path(name) for name in names if name and not name.startswith("minari:")]
    for path in paths:
        if path.is_dir():
            raise ConfigError(f"{path} is a folder, which does not travel to Ray; make one file of the log")
        if not path.exists():
            raise ConfigError(f"{path} does not exist; check the path")
    return tuple(LocalFile(path) for path in dict.fromkeys(paths))


def train_packed(
    path: Path, name: str, config: TrainConfig, device: str, originals: tuple[str, ...], *files: LocalFile
) -> None:
    """`train_run` on a machine that shares no disk: from copies of the files, to one archive at ``path``.

    originals: the paths of ``files`` on the machine that asked; run.json and config.yaml name those.
    """
    here = dict(zip(originals, (str(file.path) for file in files), strict=True))
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        folder = Path(scratch)
        train_run(folder / f"{name}.json", name, _moved(config, here), device)
        if (folder / name).exists():
            _name_originals(folder / name, config)
        with atomic_file(path, force=True) as temporary, zipfile.ZipFile(temporary, "w") as archive:
            for file in sorted(folder.rglob("*")):
                if file.is_file() and not file.name.endswith(LOCK):
                    archive.write(file, file.relative_to(folder).as_posix())


def unpack_runs(packed: Path, runs: Path) -> None:
    """Put the archives of `train_packed` where `train_run` would have left the runs, the result last."""
    for path in sorted(packed.glob("*.zip")) if packed.is_dir() else ():
        if not is_archive(path):
            path.unlink()
            continue
        name = path.stem
        runs.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=runs, prefix=".unpacking-") as scratch:
            with zipfile.ZipFile(path) as archive:
                archive.extractall(scratch)
            shutil.rmtree(runs / name, ignore_errors=True)
            if (Path(scratch) / name).exists():
                os.replace(Path(scratch) / name, runs / name)
            os.replace(Path(scratch) / f"{name}.json", runs / f"{name}.json")
        path.unlink()


def is_archive(path: Path) -> bool:
    """Whether a whole archive of the run of that name lies there."""
    try:
        with zipfile.ZipFile(path) as archive:
            return f"{path.stem}.json" in archive.namelist() and archive.testzip() is None
    except (OSError, zipfile.BadZipFile):
        return False


def _moved(config: TrainConfig, here: dict[str, str]) -> TrainConfig:
    """The config with the paths of this machine."""

    def path(name: str | None) -> str | None:
        return None if name is None else here.get(name, name)

    evaluators = {
        key: settings.model_copy(update={"base": path(base)})
        if (base := getattr(settings, "base", None))
        else settings
        for key, settings in config.evaluators.items()
    }
    changed = {
        "data": config.data.model_copy(update={"source": path(config.data.source)}),
        "algo": config.algo.model_copy(update={"policy": path(config.algo.policy)}),
        "evaluators": evaluators,
    }
    return config.model_copy(update=changed)


def _name_originals(folder: Path, config: TrainConfig) -> None:
    record = read_record(folder)
    if record is not None:
        record["config"] = config.resolved()
        record["data"] = {**record["data"], "source": config.data.source}
        write_record(folder, record)
    text = yaml.safe_dump(config.resolved(), sort_keys=False, allow_unicode=True)
    (folder / CONFIG).write_text(text, encoding="utf-8")


@contextlib.contextmanager
def _heard_warnings() -> Iterator[list[str]]:
    """Warnings of the library are kept with the result: fifty runs would repeat them fifty times."""
    logger, heard = logging.getLogger("koffline"), list[str]()

    class _Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if (text := " ".join(record.getMessage().split())) not in heard:
                heard.append(text)

    handler, before = _Keep(logging.WARNING), logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield heard
    finally:
        logger.removeHandler(handler)
        logger.propagate = before
