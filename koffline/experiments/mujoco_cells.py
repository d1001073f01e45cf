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
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from koffline.checkpoints import Saved, newest, save
from koffline.experiments.cells import reading_result
from koffline.fitting import threads
from koffline.jobs import Job
from koffline.online.config import OnlineConfig, OnlineRun
from koffline.store.files import atomic_file
from koffline.untrusted.arrays import read_arrays

FORMAT = 1  # of the files; part of the digest
_CHECKPOINT_SECONDS = 240.0
_RETURNS = {"returns": "mean_return", "lengths": "length", "sampled": "sampled_return"}
_TEXTS = ("critics", "configs", "shares")
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
        """Short and unique: part, environment and a digest of all settings that are not the default.

        So a new setting of the learner does not change the names of finished cells.
        """
        usual = _default()
        stated = [
            (sorted((k, v) for k, v in _learned_by(run.config).items() if v != usual[k]), run.seed)
            for run in self.runs
        ]
        digest = hashlib.sha256(repr((FORMAT, self.part, self.noise, stated)).encode()).hexdigest()[:12]
        return f"mujoco-{self.part}-{self.environment}-{digest}"

    @property
    def label(self) -> str:
        """For people."""
        noise = f", noise {self.noise:g}" if self.noise else ""
        window = self.runs[0].config.window_length
        return f"{self.part} {self.environment}{noise}, d = {window}, {len(self.runs)} runs"


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
    critics: Sequence[str]
    seeds: Int[np.ndarray, " run"]
    diverged_at: Int[np.ndarray, " run"]
    configs: Sequence[Mapping[str, Any]]
    seconds: float
    shares: Mapping[str, float]


def _learned_by(config: OnlineConfig) -> dict[str, Any]:
    return {name: value for name, value in config.resolved().items() if name not in _NOT_LEARNING}


@cache
def _default() -> dict[str, Any]:
    return _learned_by(OnlineConfig(environment="default"))  # the environment itself is always stated


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


def _is_of(cell: MujocoCell, path: Path) -> bool:
    """Whether a whole result of the cell lies there; one of other defaults, or another's, is computed again.

    Settings that the learner did not have yet when the file was written count as their defaults.
    """
    try:
        arrays = read_arrays(path, ("name", "configs"))
        name, configs = str(arrays["name"]), json.loads(str(arrays["configs"]))
    except Exception:  # numpy and zipfile raise many kinds; all mean that the file is not ours
        return False
    today = [_learned_by(run.config) for run in cell.runs]
    return name == cell.name and all(
        all(now.get(key) == value for key, value in then.items() if key in now)
        for then, now in zip(configs, today, strict=True)
    )


def save_mujoco(path: Path, name: str, result: MujocoResult) -> None:
    """Write a result under the name of its cell."""
    arrays = {f"metric.{key}": values.astype(np.float32) for key, values in result.metrics.items()}
    for key, part in vars(result).items():
        if key != "metrics":
            arrays[key] = np.asarray(json.dumps(part, sort_keys=True) if key in _TEXTS else part)
    with atomic_file(path, force=True) as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, name=np.asarray(name), **arrays)  # type: ignore[arg-type]


def read_mujoco(path: Path) -> MujocoResult:
    """The result of a cell. Raises ConfigError for a file that is damaged."""
    with reading_result(path):
        arrays: dict[str, Any] = dict(read_arrays(path))
        del arrays["name"]
        metrics = {key[7:]: arrays.pop(key) for key in list(arrays) if key.startswith("metric.")}
        arrays |= {key: json.loads(str(arrays[key])) for key in _TEXTS}
        return MujocoResult(**{**arrays, "metrics": metrics, "seconds": float(arrays["seconds"])})


def write_mujoco(path: Path, cell: MujocoCell) -> None:
    """Learn all runs of a cell and write the result."""
    from koffline.online.lockstep import LockStep  # environments are needed only here

    if path.exists():  # of other defaults than today's: hours of work are not thrown away
        path.replace(path.with_suffix(".replaced.npz"))
    with threads(1), contextlib.closing(LockStep(cell.runs)) as stack:
        result = _learn(cell, stack, path)
    save_mujoco(path, cell.name, result)
    shutil.rmtree(path.with_suffix(".partial"), ignore_errors=True)


def _learn(cell: MujocoCell, stack: Any, path: Path) -> MujocoResult:
    """The loop over one stack: iterate, evaluate, keep. The first evaluation is of the initial policy."""
    folder, config = path.with_suffix(".partial"), cell.runs[0].config
    before, steps, rows, diverged = 0.0, [], [], {}
    if found := newest(folder, cell.name):
        stack.load_state_dict(dict(found.state["stack"]))
        steps, rows, diverged, before = (
            found.state["steps"],
            found.state["rows"],
            dict(found.diverged),
            found.seconds,
        )
    started = saved = time.perf_counter()
    while True:
        is_over = stack.steps >= config.steps
        seconds = before + time.perf_counter() - started
        if stack.steps >= len(steps) * config.evaluation_interval or (is_over and steps[-1] < stack.steps):
            evaluations, metrics = stack.evaluate(), stack.take_metrics()
            row = {
                key: [float(getattr(part, name)) for part in evaluations] for key, name in _RETURNS.items()
            }
            row |= {
                f"metric.{name}": [float(part.get(name, np.nan)) for part in metrics] for name in metrics[0]
            }
            for run in np.flatnonzero(stack.diverged):
                diverged.setdefault(int(run), stack.steps)
            steps.append(stack.steps)
            rows.append(row)
            with path.with_suffix(".log").open("a", encoding="utf-8") as log:
                log.write(_progress(cell, stack.steps, seconds, row))
        if is_over:
            break
        if time.perf_counter() - saved > _CHECKPOINT_SECONDS:
            state = {"stack": stack.state_dict(), "steps": steps, "rows": rows}
            save(folder, cell.name, Saved(stack.steps, seconds, {}, diverged, state), 1)
            saved = time.perf_counter()
        stack.iterate()
    missing = [np.nan] * len(cell.runs)
    curves = {
        key: np.asarray([row.get(key, missing) for row in rows], dtype=np.float64).T
        for key in sorted({key for row in rows for key in row})
    }
    return MujocoResult(
        steps=np.asarray(steps),
        **{key: curves[key] for key in _RETURNS},
        metrics={key[7:]: part for key, part in curves.items() if key.startswith("metric.")},
        critics=[run.config.critic for run in cell.runs],
        seeds=np.asarray([run.seed for run in cell.runs]),
        diverged_at=np.asarray([diverged.get(place, -1) for place in range(len(cell.runs))]),
        configs=[_learned_by(run.config) for run in cell.runs],
        seconds=before + time.perf_counter() - started,
        shares={name: float(part) for name, part in stack.seconds.items()},
    )


def _progress(cell: MujocoCell, steps: int, seconds: float, row: Mapping[str, Sequence[float]]) -> str:
    """A line of the log; NaN while none of a run's training episodes has ended."""
    critics = np.array([run.config.critic for run in cell.runs])
    medians = " ".join(
        f"{critic} "
        + "/".join(
            f"{np.median(np.array(row[key])[critics == critic]):.4g}" for key in ("returns", "sampled")
        )
        for critic in dict.fromkeys(critics.tolist())
    )
    speed = len(critics) * steps / max(seconds, 1e-9)
    return (
        f"{cell.label}: step {steps} of {cell.runs[0].config.steps}, {seconds:.0f} s, {speed:.0f} steps/s; "
        f"median return greedy/sampled: {medians}\n"
    )
