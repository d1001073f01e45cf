"""One stack of seeds from its last checkpoint to its end: iterate, evaluate, log, save."""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from koffline.errors import ConfigError
from koffline.fitting import threads
from koffline.online.artifacts import is_finite, save_model, save_replay
from koffline.online.checkpoint import Saved, newest, save
from koffline.online.config import OnlineConfig, OnlineRun
from koffline.online.folder import group_name, seed_folder
from koffline.online.lockstep import LockStep
from koffline.online.logs import RunLogs
from koffline.store.files import atomic_file
from koffline.untrusted.limits import read_json

PARTS = ("environment", "acting", "learning", "evaluation")
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class GroupTask:
    """What a process needs to train one stack. minari: also save the replays as Minari datasets."""

    config: OnlineConfig
    seeds: tuple[int, ...]
    out: Path
    fingerprint: str
    tensorboard: bool = False
    minari: bool = False

    @property
    def checkpoints(self) -> Path:
        """The folder of this stack's checkpoints."""
        return self.out / "checkpoints" / group_name(self.seeds)

    @property
    def result(self) -> Path:
        """The file that says that the stack is finished."""
        return self.checkpoints / "finished.json"


@dataclass(frozen=True)
class GroupResult:
    """A finished stack. seconds: of training; parts: seconds of each part; diverged: seed to step."""

    steps: int
    seconds: float
    parts: Mapping[str, float]
    diverged: Mapping[int, int]


def train_group(path: Path, task: GroupTask, on_step: Callable[[int], None] | None = None) -> None:
    """Train the seeds of a task in one stack, going on from its newest checkpoint; the result at ``path``.

    on_step: hears the environment steps per seed. An interrupt ends the iteration that runs, is followed by
    a checkpoint, and goes on as KeyboardInterrupt.
    """
    runs = [OnlineRun(task.config, seed) for seed in task.seeds]
    # Numbers that overflow show as divergence, not as warnings.
    quiet = np.errstate(over="ignore", invalid="ignore", divide="ignore")
    with quiet, threads(1), contextlib.closing(LockStep(runs)) as stack:
        logs = RunLogs(task.out, task.seeds, task.tensorboard)
        with contextlib.closing(logs):
            result = _Training(task, stack, logs).run(on_step or (lambda step: None))
        for place, seed in enumerate(task.seeds):
            if seed not in result.diverged:
                save_replay(stack, place, task.config, seed_folder(task.out, seed), task.minari)
    content = {
        "steps": result.steps,
        "seconds": result.seconds,
        "parts": dict(result.parts),
        "diverged": {str(seed): step for seed, step in result.diverged.items()},
    }
    with atomic_file(path, force=True) as temporary:
        temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def read_result(path: Path) -> GroupResult:
    """What a finished stack left. Raises ConfigError for a damaged file."""
    try:
        content = read_json(path)
        return GroupResult(
            int(content["steps"]),
            float(content["seconds"]),
            {name: float(content["parts"][name]) for name in PARTS},
            {int(seed): int(step) for seed, step in content["diverged"].items()},
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is damaged ({type(error).__name__}); delete it, then --resume") from None


def is_result(path: Path) -> bool:
    """Whether a stack ended well there."""
    try:
        read_result(path)
    except ConfigError:
        return False
    return True


class _Training:
    """The loop over one stack."""

    def __init__(self, task: GroupTask, stack: LockStep, logs: RunLogs) -> None:
        self._task, self._stack, self._logs = task, stack, logs
        self._diverged: dict[int, int] = {}
        self._before = 0.0  # seconds of the processes before this one
        saved = newest(task.checkpoints, task.fingerprint)
        if saved is None and logs.sizes():
            _LOG.warning("there is no checkpoint in %s; the run begins again at step 0", task.checkpoints)
        logs.cut_back({} if saved is None else saved.files, 0 if saved is None else saved.steps)
        if saved is not None:
            if not stack.load_state_dict(dict(saved.state)):
                _LOG.warning(
                    "the running episodes of %s could not be played again and begin anew; from here on the "
                    "run is as good as, but not equal to, one that was never stopped",
                    task.config.environment,
                )
            self._diverged, self._before = dict(saved.diverged), saved.seconds
        self._started = time.perf_counter()
        self._saved_at = -1 if saved is None else saved.steps

    def run(self, on_step: Callable[[int], None]) -> GroupResult:
        config, stack = self._task.config, self._stack
        on_step(stack.steps)
        with _deferred_interrupt() as is_interrupted:
            while stack.steps < config.steps and not self._all_diverged:
                before = stack.steps
                stack.iterate()
                on_step(stack.steps)
                is_over = stack.steps >= config.steps
                if (
                    is_over
                    or stack.steps // config.evaluation_interval > before // config.evaluation_interval
                ):
                    self._evaluate()
                if (
                    is_over
                    or stack.steps // config.checkpoint_interval > before // config.checkpoint_interval
                ):
                    self._save()
                if is_interrupted():
                    self._save()
                    raise KeyboardInterrupt
        self._save()
        parts = {name: float(stack.seconds.get(name, 0.0)) for name in PARTS}
        return GroupResult(stack.steps, self._seconds, parts, self._diverged)

    @property
    def _seconds(self) -> float:
        return self._before + time.perf_counter() - self._started

    @property
    def _all_diverged(self) -> bool:
        return len(self._diverged) == len(self._task.seeds)

    def _evaluate(self) -> None:
        """A row per seed; one whose networks are not finite gets no more rows."""
        stack, seeds = self._stack, self._task.seeds
        self._note_divergence()
        evaluations, metrics = stack.evaluate(), stack.take_metrics()
        for place, seed in enumerate(seeds):
            if seed not in self._diverged:
                self._logs.write_evaluation(place, evaluations[place])
                self._logs.write_metrics(place, stack.steps, metrics[place])
        speed = len(seeds) * stack.steps / max(self._seconds, 1e-9)
        self._logs.write_timing(stack.steps, self._seconds, stack.seconds, speed)

    def _note_divergence(self) -> None:
        for place, seed in enumerate(self._task.seeds):
            stands_still = bool(self._stack.diverged[place])
            if seed not in self._diverged and (stands_still or not is_finite(self._stack.agent(place))):
                self._diverged[seed] = self._stack.steps
                _LOG.warning(
                    "seed %d diverged by step %d: its gradient is not finite", seed, self._stack.steps
                )

    def _save(self) -> None:
        stack, task = self._stack, self._task
        if stack.steps == self._saved_at:
            return
        # First: a run that ended between the two goes on, and saves them again.
        for place, seed in enumerate(task.seeds):
            save_model(stack, place, task.config, seed_folder(task.out, seed))
        saved = Saved(stack.steps, self._seconds, self._logs.sizes(), self._diverged, stack.state_dict())
        save(task.checkpoints, task.fingerprint, saved, task.config.keep_checkpoints)
        self._saved_at = stack.steps


@contextlib.contextmanager
def _deferred_interrupt() -> Iterator[Callable[[], bool]]:
    """Ctrl-C is heard at the end of an iteration; a second one at once. Outside the main thread: nothing."""
    heard: list[int] = []
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) in (
        signal.SIG_IGN,
        None,
    ):
        yield lambda: False
        return

    def hear(number: int, frame: Any) -> None:
        if heard:
            raise KeyboardInterrupt
        heard.append(number)

    before = signal.signal(signal.SIGINT, hear)
    try:
        yield lambda: bool(heard)
    except Exception:
        if heard:  # a worker process that took the same Ctrl-C is no fault
            raise KeyboardInterrupt from None
        raise
    finally:
        signal.signal(signal.SIGINT, before)
