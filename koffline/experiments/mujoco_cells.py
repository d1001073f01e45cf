"""One cell of figure-mujoco: runs of equal shape (critics, settings, seeds) learned in one stack.

A cell's result is one .npz, written whole or not at all. While it runs there lie beside it a checkpoint, from
which a killed run goes on, and ``NAME.log`` with a line per evaluation.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from koffline.checkpoints import Saved, newest, save
from koffline.experiments.results import ReturnRow, is_archive, reading_result, write_arrays
from koffline.experiments.statistics import Scores, scores_of
from koffline.fitting import threads
from koffline.jobs import Job
from koffline.online.config import OnlineConfig, OnlineRun
from koffline.spread import spread_of
from koffline.untrusted.arrays import read_arrays

FORMAT = 1  # version of the files; part of the digest
_CHECKPOINT_SECONDS = 240.0
_RETURNS = {"returns": "mean_return", "lengths": "length", "sampled": "sampled_return"}
# Settings that change the files of a run but not what it learns.
_NOT_LEARNING = ("checkpoint_interval", "keep_checkpoints")
_SHORT = {"window_length": "d", "learning_rate": "lr", "kl_coef": "τ"}
_NOT_SETTINGS = ("env", "env_options", "critic", "steps", "reward_scale")


@dataclass(frozen=True)
class MujocoCell:
    """Runs that share environment, budget and shape. ``part``: their part of the experiment."""

    part: str
    environment: str
    noise: float
    runs: tuple[OnlineRun, ...]

    @property
    def name(self) -> str:
        """Short unique name: part, environment and a digest of all settings."""
        stated = [(_learned_by(run.config), run.seed) for run in self.runs]
        digest = hashlib.sha256(repr((FORMAT, self.part, self.noise, stated)).encode()).hexdigest()[:12]
        return f"mujoco-{self.part}-{self.environment}-{digest}"

    @property
    def label(self) -> str:
        """Name of the cell for people."""
        noise = f", noise {self.noise:g}" if self.noise else ""
        window = self.runs[0].config.window_length
        return f"{self.part} {self.environment}{noise}, d = {window}, {len(self.runs)} runs"

    def path(self, folder: Path) -> Path:
        """Path of the cell's result."""
        return folder / f"{self.name}.npz"

    def job(self, folder: Path) -> Job:
        """Job that trains the cell."""
        return Job(self.label, write_mujoco, (self,), self.path(folder), is_archive)


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
    diverged_at: Int[np.ndarray, " run"]


def _learned_by(config: OnlineConfig) -> dict[str, Any]:
    unused = () if config.exploration else ("exploration",)  # a setting younger than stored cells
    return {k: value for k, value in config.resolved().items() if k not in (*_NOT_LEARNING, *unused)}


@cache
def _default() -> dict[str, Any]:
    return _learned_by(OnlineConfig(env="default"))  # the environment itself is always stated


def save_mujoco(path: Path, name: str, result: MujocoResult) -> None:
    """Write a result under the name of its cell."""
    write_arrays(path, {"name": name, **vars(result)})


def read_mujoco(path: Path) -> MujocoResult:
    """The result of a cell. Raises ConfigError for a file that is damaged."""
    with reading_result(path):
        return MujocoResult(**read_arrays(path, [part.name for part in fields(MujocoResult)]))


def write_mujoco(path: Path, cell: MujocoCell) -> None:
    """Learn all runs of a cell and write the result."""
    from koffline.online.lockstep import LockStep  # environments are needed only here

    with threads(1), contextlib.closing(LockStep(cell.runs)) as stack:
        result = _learn(cell, stack, path)
    save_mujoco(path, cell.name, result)
    shutil.rmtree(path.with_suffix(".partial"), ignore_errors=True)


def _learn(cell: MujocoCell, stack: Any, path: Path) -> MujocoResult:
    """Train one stack with evaluations and checkpoints. The first evaluation is of the initial policy."""
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
        diverged_at=np.asarray([diverged.get(place, -1) for place in range(len(cell.runs))]),
    )


def _progress(cell: MujocoCell, steps: int, seconds: float, row: Mapping[str, Sequence[float]]) -> str:
    """Line of the log: progress, speed, and each critic's median return."""
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
        """Scores of the runs on one curve."""
        return scores_of(self.steps, getattr(self, curve), threshold)


Place = tuple[OnlineRun, MujocoResult, int]  # a run, and its row in a result


def joined(runs: Sequence[Place]) -> Learned:
    """Join the curves of several runs."""
    run, first, _ = runs[0]
    returns, sampled, lengths = (
        np.stack([getattr(result, name)[row] for _, result, row in runs])
        for name in ("returns", "sampled", "lengths")
    )
    for curve in sampled:  # NaN before the first finished training episode becomes the run's first number
        good = np.flatnonzero(np.isfinite(curve))
        curve[~np.isfinite(curve)] = curve[good[0]] if len(good) else 0.0
    diverged = sum(int(result.diverged_at[row] >= 0) for _, result, row in runs)
    return Learned(setting_words(_learned_by(run.config)), first.steps, returns, sampled, lengths, diverged)


def setting_words(config: Mapping[str, Any]) -> str:
    """Text of a setting: "d 10, lr 0.003, τ 0.01" and all other values that differ from the defaults."""
    usual, words = _default(), [f"{short} {config[name]:g}" for name, short in _SHORT.items()]
    for name, value in config.items():
        is_said = name in _SHORT or name in _NOT_SETTINGS or name.startswith("evaluation")
        if not is_said and value != usual.get(name, value):
            words.append(f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}")
    return ", ".join(words)


class Group(NamedTuple):
    """Key of one curve of the figure."""

    part: str
    environment: str
    noise: float
    critic: str

    @property
    def panel(self) -> str:
        """Panel of the curve: "Swimmer final", "Swimmer paper", "Swimmer noise 0.02"."""
        return f"{self.environment} {self.part}" + (f" {self.noise:g}" if self.part == "noise" else "")


def row_of(group: Group, part: Learned, threshold: float | None) -> ReturnRow:
    """Row of results of a curve. threshold: the return that solves the environment."""
    greedy = part.scores("returns", threshold)
    sampled = part.scores("sampled")
    reached = float(np.sort(greedy.reached)[len(greedy.reached) // 2])  # ∞: half never did
    return ReturnRow(
        **group._asdict(),
        setting=part.setting,
        seeds=len(part.returns),
        steps=int(part.steps[-1]),
        **_spread("final", greedy.final),
        final_best=_without_the_worst(greedy.final),
        **_spread("sampled", sampled.final),
        **_spread("area", greedy.area),
        reached=reached if math.isfinite(reached) else None,
        reached_seeds=int(np.isfinite(greedy.reached).sum()),
        diverged=part.diverged,
    )


def _spread(name: str, values: np.ndarray) -> dict[str, Any]:
    """The interquartile mean over runs and its interval; None for an end that a single run does not have."""
    found = spread_of(values)
    ends = {name: found.iqm, f"{name}_low": found.low, f"{name}_high": found.high}
    return {key: six_digits(end) if math.isfinite(end) else None for key, end in ends.items()}


def _without_the_worst(values: np.ndarray) -> float:
    """Mean of all runs but the worst: the paper's best 5 of 6. (Feng et al. 2019, Training Details)"""
    return six_digits(np.sort(values)[min(1, len(values) - 1) :].mean())


def six_digits(value: float) -> float:
    """Round to six digits, so that files are small and equal on all machines."""
    return float(f"{value:.6g}")
