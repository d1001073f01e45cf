"""One cell of figure-mujoco: runs of equal shape (critics, settings, seeds) learned in one stack.

A cell's result is one .npz, written whole or not at all. While it runs there lie beside it a checkpoint, from
which a killed run goes on, and ``NAME.log`` with a line per evaluation.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float, Int

from koffline.checkpoints import Saved, newest, save
from koffline.experiments.cells import reading_result
from koffline.fitting import threads
from koffline.jobs import Job
from koffline.online.config import OnlineConfig, OnlineRun
from koffline.store.files import atomic_file
from koffline.untrusted.arrays import read_arrays

if TYPE_CHECKING:
    from koffline.online.lockstep import LockStep

FORMAT = 1  # of the files; part of the digest
_CHECKPOINT_SECONDS = 240.0
_RETURNS = {"returns": "mean_return", "lengths": "length", "sampled": "sampled_return"}
# They change how a run is written down, not what it learns.
_NOT_LEARNING = ("checkpoint_interval", "keep_checkpoints")


@dataclass(frozen=True)
class MujocoCell:
    """Runs that share environment, budget and shape; ``part`` is theirs in the experiment."""

    part: str
    environment: str
    noise: float
    runs: tuple[OnlineRun, ...]

    @property
    def name(self) -> str:
        """Short and unique: part, environment and a digest of all settings that are not the default."""
        stated = [(_stated(run.config), run.seed) for run in self.runs]
        digest = hashlib.sha256(repr((FORMAT, self.part, self.noise, stated)).encode()).hexdigest()[:12]
        return f"mujoco-{self.part}-{self.environment}-{digest}"

    @property
    def label(self) -> str:
        """For people."""
        config = self.runs[0].config
        noise = f", noise {self.noise:g}" if self.noise else ""
        return f"{self.part} {self.environment}{noise}, d = {config.window_length}, {len(self.runs)} runs"


@dataclass(frozen=True, eq=False)
class MujocoResult:
    """Curves (R, T) of R runs at ``steps`` (T,).

    returns, lengths: of the mean action. sampled: returns of the training episodes since the evaluation
    before, NaN until one has ended. metrics: what the learner measured of itself in that time, (R, T).
    diverged_at: the evaluation (in steps) that found the run standing still, −1 for none. shares: seconds of
    environment, acting, learning and evaluation, all runs together.
    """

    steps: Int[np.ndarray, " time"]
    returns: Float[np.ndarray, "run time"]
    lengths: Float[np.ndarray, "run time"]
    sampled: Float[np.ndarray, "run time"]
    metrics: Mapping[str, Float[np.ndarray, "run time"]]
    critics: tuple[str, ...]
    seeds: tuple[int, ...]
    diverged_at: tuple[int, ...]
    configs: tuple[Mapping[str, Any], ...]
    seconds: float
    shares: Mapping[str, float]


def mujoco_path(cell: MujocoCell, folder: Path) -> Path:
    """Where the result of a cell is kept."""
    return folder / f"{cell.name}.npz"


def mujoco_jobs(cells: Sequence[MujocoCell], folder: Path) -> list[Job]:
    """A job per cell."""
    return [
        Job(cell.label, write_mujoco, (cell,), mujoco_path(cell, folder), partial(_is_of, cell))
        for cell in {cell.name: cell for cell in cells}.values()
    ]


def is_mujoco(cell: MujocoCell, folder: Path) -> bool:
    """Whether the cell is finished, with settings that all mean what they mean today."""
    return _is_of(cell, mujoco_path(cell, folder))


def write_mujoco(path: Path, cell: MujocoCell) -> None:
    """Learn all runs of a cell and write the result."""
    from koffline.online.lockstep import LockStep  # environments are needed only here

    if path.exists():  # of other defaults than today's: hours of work are not thrown away
        path.replace(path.with_suffix(".replaced.npz"))
    with threads(1), contextlib.closing(LockStep(cell.runs)) as stack:
        result = _Learning(cell, stack, path).run()
    save_mujoco(path, cell.name, result)
    shutil.rmtree(path.with_suffix(".partial"), ignore_errors=True)


def save_mujoco(path: Path, name: str, result: MujocoResult) -> None:
    """Write a result under the name of its cell."""
    arrays: dict[str, Any] = {
        f"metric.{key}": values.astype(np.float32) for key, values in result.metrics.items()
    }
    arrays |= {key: getattr(result, key) for key in ("steps", *_RETURNS)}
    texts = {"critics": result.critics, "configs": result.configs, "shares": dict(result.shares)}
    arrays |= {key: np.asarray(json.dumps(part, sort_keys=True)) for key, part in texts.items()}
    arrays |= {
        "seeds": np.asarray(result.seeds),
        "diverged_at": np.asarray(result.diverged_at),
        "seconds": np.asarray(result.seconds),
    }
    with atomic_file(path, force=True) as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, name=np.asarray(name), **arrays)


def read_mujoco(path: Path) -> MujocoResult:
    """The result of a cell. Raises ConfigError for a file that is damaged."""
    with reading_result(path):
        arrays = read_arrays(path)
        texts = {key: json.loads(str(arrays[key])) for key in ("critics", "configs", "shares")}
        return MujocoResult(
            **{key: arrays[key] for key in ("steps", *_RETURNS)},
            metrics={key[7:]: part for key, part in arrays.items() if key.startswith("metric.")},
            critics=tuple(texts["critics"]),
            configs=tuple(texts["configs"]),
            shares=texts["shares"],
            seeds=tuple(arrays["seeds"].tolist()),
            diverged_at=tuple(arrays["diverged_at"].tolist()),
            seconds=float(arrays["seconds"]),
        )


class _Learning:
    """The loop over one stack: iterate, evaluate, keep."""

    def __init__(self, cell: MujocoCell, stack: LockStep, path: Path) -> None:
        self._cell, self._stack = cell, stack
        self._checkpoints, self._log = path.with_suffix(".partial"), path.with_suffix(".log")
        self._steps: list[int] = []
        self._rows: list[dict[str, list[float]]] = []  # per evaluation: curve -> a number per run
        self._diverged: dict[int, int] = {}  # run -> step at which it was seen
        self._seconds = 0.0
        saved = newest(self._checkpoints, cell.name)
        if saved is not None:
            stack.load_state_dict(dict(saved.state["stack"]))
            self._steps, self._rows = saved.state["steps"], saved.state["rows"]
            self._diverged, self._seconds = dict(saved.diverged), saved.seconds

    def run(self) -> MujocoResult:
        stack, config = self._stack, self._cell.runs[0].config
        before, started = self._seconds, time.perf_counter()
        saved = started
        while True:
            is_over = stack.steps >= config.steps
            due = len(self._steps) * config.evaluation_interval  # the first is of the initial policy
            if stack.steps >= due or (is_over and self._steps[-1] < stack.steps):
                self._seconds = before + time.perf_counter() - started
                self._evaluate()
            if is_over:
                break
            if time.perf_counter() - saved > _CHECKPOINT_SECONDS:
                self._seconds = before + time.perf_counter() - started
                self._save()
                saved = time.perf_counter()
            stack.iterate()
        self._seconds = before + time.perf_counter() - started
        return self._result()

    def _evaluate(self) -> None:
        stack = self._stack
        found, metrics = stack.evaluate(), stack.take_metrics()
        row = {key: [float(getattr(part, name)) for part in found] for key, name in _RETURNS.items()}
        for name in metrics[0]:
            row[f"metric.{name}"] = [float(part.get(name, np.nan)) for part in metrics]
        for run in np.flatnonzero(stack.diverged):
            self._diverged.setdefault(int(run), stack.steps)
        self._steps.append(stack.steps)
        self._rows.append(row)
        critics = [run.config.critic for run in self._cell.runs]
        greedy = " ".join(
            f"{critic} {_median(row, 'returns', critics, critic)}/{_median(row, 'sampled', critics, critic)}"
            for critic in dict.fromkeys(critics)
        )
        speed = len(critics) * stack.steps / max(self._seconds, 1e-9)
        with self._log.open("a", encoding="utf-8") as file:
            file.write(
                f"{self._cell.label}: step {stack.steps} of {self._cell.runs[0].config.steps}, "
                f"{self._seconds:.0f} s, {speed:.0f} steps/s; median return greedy/sampled: {greedy}\n"
            )

    def _save(self) -> None:
        stack = self._stack
        state = {"stack": stack.state_dict(), "steps": self._steps, "rows": self._rows}
        save(
            self._checkpoints,
            self._cell.name,
            Saved(stack.steps, self._seconds, {}, self._diverged, state),
            1,
        )

    def _result(self) -> MujocoResult:
        runs = self._cell.runs
        names = {key for row in self._rows for key in row}
        missing = [np.nan] * len(runs)
        curves = {
            key: np.asarray([row.get(key, missing) for row in self._rows], dtype=np.float64).T
            for key in sorted(names)
        }
        return MujocoResult(
            steps=np.asarray(self._steps),
            **{key: curves[key] for key in _RETURNS},
            metrics={key[7:]: part for key, part in curves.items() if key.startswith("metric.")},
            critics=tuple(run.config.critic for run in runs),
            seeds=tuple(run.seed for run in runs),
            diverged_at=tuple(self._diverged.get(place, -1) for place in range(len(runs))),
            configs=tuple(_plain(run.config) for run in runs),
            seconds=self._seconds,
            shares={name: float(part) for name, part in self._stack.seconds.items()},
        )


def _median(row: Mapping[str, list[float]], curve: str, critics: Sequence[str], critic: str) -> str:
    values = [value for value, name in zip(row[curve], critics, strict=True) if name == critic]
    return f"{np.median(values):.4g}"  # NaN while none of a run's training episodes has ended


def _plain(config: OnlineConfig) -> dict[str, Any]:
    """The resolved settings as JSON gives them back."""
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in vars(config).items()
        if name not in _NOT_LEARNING
    }


@cache
def _default() -> dict[str, Any]:
    return _plain(OnlineConfig(environment="default"))  # the environment itself is always stated


def _stated(config: OnlineConfig) -> list[tuple[str, Any]]:
    """What is not the default: a new setting of the learner does not change the names of finished cells."""
    default = _default()
    return sorted((name, value) for name, value in _plain(config).items() if value != default[name])


def _is_of(cell: MujocoCell, path: Path) -> bool:
    """Whether a whole result of the cell lies there; one of other defaults, or another's, is computed again.

    Settings that the learner did not have yet when the file was written count as their defaults.
    """
    try:
        arrays = read_arrays(path, ("name", "configs"))
        name, configs = str(arrays["name"]), json.loads(str(arrays["configs"]))
    except Exception:  # numpy and zipfile raise many kinds; all mean that the file is not ours
        return False
    today = [_plain(run.config) for run in cell.runs]
    return name == cell.name and all(
        all(now.get(key) == value for key, value in then.items() if key in now)
        for then, now in zip(configs, today, strict=True)
    )
