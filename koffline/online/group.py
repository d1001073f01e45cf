"""One stack of seeds from its last checkpoint to its end: iterate, evaluate, log, save."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from os import fsync
from pathlib import Path

import numpy as np
from pydantic import BaseModel, ConfigDict

from koffline.checkpoints import Saved, cut_back, file_sizes, newest, save
from koffline.data.sources import write_transitions
from koffline.errors import DataError
from koffline.fitting import threads
from koffline.online.artifacts import replay_transitions, write_model
from koffline.online.config import OnlineConfig, OnlineRun
from koffline.online.lockstep import LockStep
from koffline.store.files import write_text

EVALUATION, METRICS, MODEL, REPLAY = "evaluation.csv", "metrics.csv", "model.d3", "replay.hdf5"
COLUMNS = ("return", "length", "sampled_return")  # columns of evaluation.csv after the step
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class GroupTask:
    """Input of a process that trains one stack."""

    config: OnlineConfig
    seeds: tuple[int, ...]
    out: Path
    fingerprint: str

    @property
    def checkpoints(self) -> Path:
        """The folder of this stack's checkpoints."""
        return self.out / "checkpoints" / f"seeds_{self.seeds[0]}-{self.seeds[-1]}"

    @property
    def result(self) -> Path:
        """File that marks the stack as finished."""
        return self.checkpoints / "finished.json"

    @property
    def folders(self) -> list[Path]:
        """Folder of each seed's files."""
        return [self.out / f"seed_{seed}" for seed in self.seeds]


class GroupResult(BaseModel):
    """Result of a finished stack. seconds: of training; diverged: step by seed."""

    model_config = ConfigDict(frozen=True)
    steps: int
    seconds: float
    diverged: dict[int, int]


def read_result(path: Path) -> GroupResult:
    """Read the result of a finished stack."""
    return GroupResult.model_validate_json(path.read_bytes())


def is_result(path: Path) -> bool:
    """Whether ``path`` holds the result of a finished stack; a damaged one is made again."""
    with contextlib.suppress(OSError, ValueError):  # pydantic's errors are ValueErrors
        return bool(read_result(path))
    return False


def train_group(path: Path, task: GroupTask, on_step: Callable[[int], None] = lambda step: None) -> None:
    """Train the seeds of a task in one stack from its newest checkpoint; write the result to ``path``.

    on_step: called with the environment steps per seed.
    """
    config, runs = task.config, [OnlineRun(task.config, seed) for seed in task.seeds]
    # Numbers that overflow show as divergence, not as warnings.
    quiet = np.errstate(over="ignore", invalid="ignore", divide="ignore")
    with quiet, threads(1), contextlib.closing(LockStep(runs)) as stack:
        training = _Training(task, stack)
        on_step(stack.steps)
        while not training.is_over:
            before = stack.steps
            stack.iterate()
            on_step(stack.steps)
            is_evaluated, is_saved = (
                stack.steps >= config.steps or stack.steps // interval > before // interval
                for interval in (config.evaluation_interval, config.checkpoint_interval)
            )
            if is_evaluated:
                training.evaluate()
            if is_saved or training.is_over:
                training.save()
        for place, seed in enumerate(task.seeds):
            if seed not in training.diverged and not config.streaming:
                _save_replay(stack, place, task)
        result = GroupResult(steps=stack.steps, seconds=training.seconds, diverged=training.diverged)
    write_text(path, result.model_dump_json(indent=2) + "\n")


class _Training:
    """Output of the loop over a stack: rows of logs, checkpoints, models."""

    def __init__(self, task: GroupTask, stack: LockStep) -> None:
        self._task, self._stack = task, stack
        self._logs = [folder / name for folder in task.folders for name in (EVALUATION, METRICS)]
        saved = newest(task.checkpoints, task.fingerprint)
        if saved is None and file_sizes(task.out, self._logs):
            _LOG.warning("there is no checkpoint in %s; the run begins again at step 0", task.checkpoints)
        saved = saved or Saved(0, 0.0, {}, {}, {})
        for folder in task.folders:
            folder.mkdir(exist_ok=True)
        cut_back(task.out, self._logs, saved.files)
        if saved.state and not stack.load_state_dict(dict(saved.state)):
            _LOG.warning(
                "the running episodes of %s could not be played again and begin anew; from here on the "
                "run is as good as, but not equal to, one that was never stopped",
                task.config.env,
            )
        self.diverged, self._has_warned = dict(saved.diverged), False
        self._started = time.perf_counter() - saved.seconds  # earlier processes of the run included

    @property
    def is_over(self) -> bool:
        """Whether all steps are done, or all seeds diverged."""
        return self._stack.steps >= self._task.config.steps or len(self.diverged) == len(self._task.seeds)

    @property
    def seconds(self) -> float:
        """Seconds of training so far."""
        return time.perf_counter() - self._started

    def evaluate(self) -> None:
        """Evaluate and append a row per seed; a seed whose networks are not finite gets no more rows."""
        step, is_finite = self._stack.steps, self._stack.is_finite
        evaluations, metrics = self._stack.evaluate(), self._stack.take_metrics()
        if self._stack.trust_region.is_inert.all() and not self._has_warned:
            self._has_warned = True
            _LOG.warning(
                "max_divergence is %g a step: over episodes of this length that is more than weights can "
                "diverge by, so that kl_coef is at its least (%g); a smaller one binds",
                self._task.config.max_divergence,
                self._task.config.kl_coef,
            )
        for place, (seed, folder) in enumerate(zip(self._task.seeds, self._task.folders, strict=True)):
            if seed not in self.diverged and (self._stack.diverged[place] or not is_finite[place]):
                self.diverged[seed] = step
                _LOG.warning("seed %d diverged by step %d: its gradient is not finite", seed, step)
            if seed not in self.diverged:
                found = evaluations[place]
                numbers = found.mean_return, found.length, found.sampled_return
                _append(folder / EVALUATION, step, dict(zip(COLUMNS, numbers, strict=True)))
                if metrics[place]:
                    _append(folder / METRICS, step, metrics[place])

    def save(self) -> None:
        """Write the finite models, then a checkpoint; a run that ended between the two writes both again."""
        stack, task = self._stack, self._task
        for place, folder in enumerate(task.folders):
            if stack.is_finite[place]:
                write_model(stack.agent(place), task.config, folder / MODEL)
        sizes = file_sizes(task.out, self._logs)
        saved = Saved(stack.steps, self.seconds, sizes, self.diverged, stack.state_dict())
        save(task.checkpoints, task.fingerprint, saved, task.config.keep_checkpoints)


def _save_replay(stack: LockStep, place: int, task: GroupTask) -> None:
    gamma, path = task.config.gamma, task.folders[place] / REPLAY
    hint = gamma if 0.0 < gamma < 1.0 else None
    try:
        log = replay_transitions(stack.replay, place, stack.shape.action_space, hint)
    except DataError as error:
        _LOG.warning("no log of the replay at %s: %s", path, error)
    else:
        write_transitions(log, path, force=True)


def _append(path: Path, step: int, numbers: Mapping[str, float]) -> None:
    """Append a row and flush it to the disk; the first row decides the columns.

    Half a row, after a full disk, is cut off when the run is resumed.
    """
    with path.open("a+", encoding="utf-8", newline="") as file:
        file.seek(0)
        header = file.readline().rstrip("\n") or ",".join(["step", *numbers])
        if not file.tell():
            file.write(header + "\n")
        cells = (repr(float(numbers.get(name, "nan"))) for name in header.split(",")[1:])
        file.write(",".join([str(step), *cells]) + "\n")
        file.flush()
        fsync(file.fileno())
