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
from dataclasses import dataclass, fields
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from koffline.checkpoints import Saved, newest, save
from koffline.experiments.results import reading_result, write_arrays
from koffline.experiments.statistics import Scores, scores_of
from koffline.fitting import threads
from koffline.jobs import Job
from koffline.online.config import OnlineConfig, OnlineRun
from koffline.untrusted.arrays import read_arrays

FORMAT = 1  # of the files; part of the digest
_CHECKPOINT_SECONDS = 240.0
_RETURNS = {"returns": "mean_return", "lengths": "length", "sampled": "sampled_return"}
_TEXTS = ("critics", "configs")
# They change how a run is written down, not what it learns.
_NOT_LEARNING = ("checkpoint_interval", "keep_checkpoints")
_SHORT = {"window_length": "d", "learning_rate": "lr", "max_divergence": "ε"}
_NOT_SETTINGS = ("environment", "environment_options", "critic", "steps", "reward_scale")


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

    def path(self, folder: Path) -> Path:
        """Where its result is kept."""
        return folder / f"{self.name}.npz"

    def job(self, folder: Path) -> Job:
        """What learns it."""
        return Job(self.label, write_mujoco, (self,), self.path(folder), partial(is_result, self))


@dataclass(frozen=True, eq=False)
class MujocoResult:
    """Curves (R, T) of R runs at ``steps`` (T,).

    returns, lengths: of the mean action. sampled: returns of the training episodes since the evaluation
    before, NaN until one has ended. diverged_at: the evaluation (in steps) that found the run standing still,
    −1 for none.
    """

    steps: Int[np.ndarray, " time"]
    returns: Float[np.ndarray, "run time"]
    lengths: Float[np.ndarray, "run time"]
    sampled: Float[np.ndarray, "run time"]
    critics: Sequence[str]
    seeds: Int[np.ndarray, " run"]
    diverged_at: Int[np.ndarray, " run"]
    configs: Sequence[Mapping[str, Any]]


def _learned_by(config: OnlineConfig) -> dict[str, Any]:
    return {name: value for name, value in config.resolved().items() if name not in _NOT_LEARNING}


@cache
def _default() -> dict[str, Any]:
    return _learned_by(OnlineConfig(environment="default"))  # the environment itself is always stated


def is_result(cell: MujocoCell, path: Path) -> bool:
    """Whether a whole result of the cell lies there; one of other defaults, or another's, is computed again.

    Settings that the learner did not have yet when the file was written, or has no more, do not count.
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
    texts = {key: json.dumps(getattr(result, key), sort_keys=True) for key in _TEXTS}
    write_arrays(path, {"name": name, **vars(result), **texts})


def read_mujoco(path: Path) -> MujocoResult:
    """The result of a cell. Raises ConfigError for a file that is damaged."""
    with reading_result(path):
        arrays: Any = read_arrays(path)
        arrays |= {key: json.loads(str(arrays[key])) for key in _TEXTS}
        return MujocoResult(**{part.name: arrays[part.name] for part in fields(MujocoResult)})


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
        steps, rows = found.state["steps"], found.state["rows"]
        before, diverged = found.seconds, dict(found.diverged)
    started = saved = time.perf_counter()
    while True:
        is_over = stack.steps >= config.steps
        seconds = before + time.perf_counter() - started
        if stack.steps >= len(steps) * config.evaluation_interval or (is_over and steps[-1] < stack.steps):
            evaluations = stack.evaluate()
            row = {key: [float(getattr(e, name)) for e in evaluations] for key, name in _RETURNS.items()}
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
    return MujocoResult(
        steps=np.asarray(steps),
        **{key: np.asarray([row[key] for row in rows], dtype=np.float64).T for key in _RETURNS},
        critics=[run.config.critic for run in cell.runs],
        seeds=np.asarray([run.seed for run in cell.runs]),
        diverged_at=np.asarray([diverged.get(place, -1) for place in range(len(cell.runs))]),
        configs=[_learned_by(run.config) for run in cell.runs],
    )


def _progress(cell: MujocoCell, steps: int, seconds: float, row: Mapping[str, Sequence[float]]) -> str:
    """A line of the log: how far, how fast, and each critic's median return."""
    critics, returns = np.array([run.config.critic for run in cell.runs]), np.array(row["returns"])
    medians = [f"{c} {np.median(returns[critics == c]):.4g}" for c in dict.fromkeys(critics.tolist())]
    speed = len(critics) * steps / max(seconds, 1e-9)
    told = f"step {steps} of {cell.runs[0].config.steps}, {seconds:.0f} s, {speed:.0f} steps/s"
    return f"{cell.label}: {told}; median return: {' '.join(medians)}\n"


@dataclass(frozen=True, eq=False)
class Learned:
    """All seeds of a critic at one setting: curves (R, T) at ``steps`` (T,); diverged: how many runs."""

    setting: str
    steps: Int[np.ndarray, " time"]
    returns: Float[np.ndarray, "run time"]
    sampled: Float[np.ndarray, "run time"]
    lengths: Float[np.ndarray, "run time"]
    diverged: int

    def scores(self, curve: str, threshold: float | None = None) -> Scores:
        """Of a curve."""
        return scores_of(self.steps, getattr(self, curve), threshold)


def joined(runs: Sequence[tuple[MujocoResult, int]]) -> Learned:
    """Runs, as rows of results, together."""
    first, place = runs[0]
    returns, sampled, lengths = (
        np.stack([getattr(result, name)[row] for result, row in runs])
        for name in ("returns", "sampled", "lengths")
    )
    for curve in sampled:  # NaN where no training episode had ended yet becomes the run's first number
        good = np.flatnonzero(np.isfinite(curve))
        curve[~np.isfinite(curve)] = curve[good[0]] if len(good) else 0.0
    diverged = sum(int(result.diverged_at[row] >= 0) for result, row in runs)
    return Learned(setting_words(first.configs[place]), first.steps, returns, sampled, lengths, diverged)


def setting_words(config: Mapping[str, Any]) -> str:
    """d 10, lr 0.003, ε 0.001, and whatever else is not the default."""
    usual, words = _default(), [f"{short} {config[name]:g}" for name, short in _SHORT.items()]
    for name, value in config.items():
        is_said = name in _SHORT or name in _NOT_SETTINGS or name.startswith("evaluation")
        if not is_said and value != usual.get(name, value):
            words.append(f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}")
    return ", ".join(words)
