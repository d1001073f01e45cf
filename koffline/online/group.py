"""One stack of seeds from its last checkpoint to its end: iterate, evaluate, log, save models and replays."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pydantic import BaseModel, ConfigDict

from koffline.checkpoints import newest, save
from koffline.data.sources import write_transitions
from koffline.errors import DataError
from koffline.fitting import threads
from koffline.online.config import OnlineConfig, OnlineRun
from koffline.online.lockstep import LockStep
from koffline.online.networks import trust_pcl_model
from koffline.online.paths import replay_transitions
from koffline.store.files import write_text

EVALUATION, METRICS, MODEL, REPLAY = "evaluation.csv", "metrics.csv", "model.d3", "replay.hdf5"
COLUMNS = ("return", "length", "sampled_return")  # columns of evaluation.csv after the step
_LOG = logging.getLogger(__name__)
Row = dict[str, int | float]


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
    """What a stack has found so far: its result in the end, and what its checkpoints go on from.

    seconds: of training. diverged: seed to step. logs: rows by the file's name in the run's folder.
    """

    model_config = ConfigDict(ser_json_inf_nan="constants")
    steps: int = 0
    seconds: float = 0.0
    diverged: dict[int, int] = {}
    logs: dict[str, list[Row]] = {}


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
        training.finish(path)


class _Training:
    """Output of the loop over a stack: logs, checkpoints, models, replays."""

    def __init__(self, task: GroupTask, stack: LockStep) -> None:
        self._task, self._stack, self._has_warned = task, stack, False
        saved = newest(task.checkpoints, task.fingerprint)
        if saved is None and any((folder / EVALUATION).exists() for folder in task.folders):
            _LOG.warning("there is no checkpoint in %s; the run begins again at step 0", task.checkpoints)
        if saved and not stack.load_state_dict(saved["stack"]):
            _LOG.warning(
                "the running episodes of %s could not be played again and begin anew; from here on the "
                "run is as good as, but not equal to, one that was never stopped",
                task.config.env,
            )
        self._found = GroupResult.model_validate(saved or {})
        self._started = time.perf_counter() - self._found.seconds  # earlier processes of the run included

    @property
    def is_over(self) -> bool:
        """Whether all steps are done, or all seeds diverged."""
        done = self._stack.steps >= self._task.config.steps
        return done or len(self._found.diverged) == len(self._task.seeds)

    def evaluate(self) -> None:
        """Evaluate, and log a row per seed; a seed whose networks are not finite gets no more rows."""
        stack, step = self._stack, self._stack.steps
        evaluations, metrics, is_finite = stack.evaluate(), stack.take_metrics(), stack.is_finite
        if stack.trust_region.is_inert.all() and not self._has_warned:
            self._has_warned = True
            _LOG.warning(
                "max_divergence is %g a step: over episodes of this length that is more than weights can "
                "diverge by, so that kl_coef is at its least (%g); a smaller one binds",
                self._task.config.max_divergence,
                self._task.config.kl_coef,
            )
        diverged = self._found.diverged
        for place, (seed, folder) in enumerate(zip(self._task.seeds, self._task.folders, strict=True)):
            if seed not in diverged and (stack.learner.diverged[place] or not is_finite[place]):
                diverged[seed] = step
                _LOG.warning("seed %d diverged by step %d: its gradient is not finite", seed, step)
            found = evaluations[place]
            numbers = found.mean_return, found.length, found.sampled_return
            evaluated = dict(zip(COLUMNS, numbers, strict=True))
            for name, row in ((EVALUATION, evaluated), (METRICS, metrics[place])):
                rows = self._found.logs.setdefault(f"{folder.name}/{name}", [])
                if row and seed not in diverged:
                    rows.append({"step": step, **row})
                _write_rows(folder / name, rows)

    def save(self) -> None:
        """Write the finite models, then a checkpoint; a run that ended between the two writes both again."""
        stack, task = self._stack, self._task
        for place, folder in enumerate(task.folders):
            if stack.is_finite[place]:
                trust_pcl_model(stack.agent(place), task.config).save(str(folder / MODEL))
        state = {**self._so_far().model_dump(), "stack": stack.state_dict()}
        save(task.checkpoints, task.fingerprint, stack.steps, state, task.config.keep_checkpoints)

    def finish(self, path: Path) -> None:
        """Write the replays of the seeds that did not diverge, then the result."""
        stack, task = self._stack, self._task
        gamma = task.config.gamma if 0.0 < task.config.gamma < 1.0 else None
        for place, folder in enumerate(task.folders):
            if task.seeds[place] in self._found.diverged or task.config.streaming:
                continue
            try:
                log = replay_transitions(stack.replay, place, stack.shape.action_space, gamma)
            except DataError as error:
                _LOG.warning("no log of the replay at %s: %s", folder / REPLAY, error)
            else:
                write_transitions(log, folder / REPLAY, force=True)
        write_text(path, self._so_far().model_dump_json(indent=2) + "\n")

    def _so_far(self) -> GroupResult:
        self._found.steps, self._found.seconds = self._stack.steps, time.perf_counter() - self._started
        return self._found


def _write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Write the rows of a log as CSV, whole or not at all; without any there is no file."""
    path.parent.mkdir(exist_ok=True)
    if rows:
        lines = [",".join(rows[0]), *(",".join(map(repr, row.values())) for row in rows)]
        write_text(path, "\n".join(lines) + "\n")
    else:
        path.unlink(missing_ok=True)
