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
from importlib.util import find_spec
from os import fsync
from pathlib import Path
from typing import Any

import numpy as np

from koffline.checkpoints import Saved, cut_back, file_sizes, newest, save
from koffline.errors import ConfigError, DataError
from koffline.fitting import threads
from koffline.online.artifacts import is_finite, replay_transitions, save_model, save_replay
from koffline.online.config import OnlineConfig, OnlineRun
from koffline.online.lockstep import LockStep
from koffline.store.run_folders import write_text
from koffline.untrusted.limits import read_json

PARTS = ("environment", "acting", "learning", "evaluation")
EVALUATION, METRICS = "evaluation.csv", "metrics.csv"
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
        return self.out / "checkpoints" / f"seeds_{self.seeds[0]}-{self.seeds[-1]}"

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


def seed_folder(out: Path, seed: int) -> Path:
    """Where a seed's files lie."""
    return out / f"seed_{seed}"


def train_group(path: Path, task: GroupTask, on_step: Callable[[int], None] | None = None) -> None:
    """Train the seeds of a task in one stack, going on from its newest checkpoint; the result at ``path``.

    on_step: hears the environment steps per seed. An interrupt ends the iteration that runs, is followed by
    a checkpoint, and goes on as KeyboardInterrupt.
    """
    runs = [OnlineRun(task.config, seed) for seed in task.seeds]
    # Numbers that overflow show as divergence, not as warnings.
    quiet = np.errstate(over="ignore", invalid="ignore", divide="ignore")
    with quiet, threads(1), contextlib.closing(LockStep(runs)) as stack:
        with contextlib.closing(_Logs(task)) as logs:
            result = _Training(task, stack, logs).run(on_step or (lambda step: None))
        for place, seed in enumerate(task.seeds):
            if seed not in result.diverged:
                _save_replay(stack, place, task)
    write_text(path, json.dumps(vars(result), indent=2) + "\n")


def _save_replay(stack: LockStep, place: int, task: GroupTask) -> None:
    gamma, folder = task.config.gamma, seed_folder(task.out, task.seeds[place])
    hint = gamma if 0.0 < gamma < 1.0 else None
    try:
        log = replay_transitions(stack.replay, place, stack.shape.action_space, hint)
    except DataError as error:
        _LOG.warning("no log of the replay in %s: %s", folder, error)
    else:
        save_replay(log, folder, task.minari)


def read_result(path: Path) -> GroupResult:
    """What a finished stack left. Raises ConfigError for a damaged file."""
    try:
        content = read_json(path)
        parts = {name: float(content["parts"][name]) for name in PARTS}
        diverged = {int(seed): int(step) for seed, step in content["diverged"].items()}
        return GroupResult(int(content["steps"]), float(content["seconds"]), parts, diverged)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is damaged ({type(error).__name__}); delete it, then --resume") from None


def is_result(path: Path) -> bool:
    """Whether a stack ended well there."""
    with contextlib.suppress(ConfigError):
        return bool(read_result(path))
    return False


class _Training:
    """The loop over one stack."""

    def __init__(self, task: GroupTask, stack: LockStep, logs: _Logs) -> None:
        self._task, self._stack, self._logs = task, stack, logs
        saved = newest(task.checkpoints, task.fingerprint)
        if saved is None and file_sizes(task.out, logs.files):
            _LOG.warning("there is no checkpoint in %s; the run begins again at step 0", task.checkpoints)
        saved = saved or Saved(0, 0.0, {}, {}, {})
        logs.open(saved.files, saved.steps)
        if saved.state and not stack.load_state_dict(dict(saved.state)):
            _LOG.warning(
                "the running episodes of %s could not be played again and begin anew; from here on the "
                "run is as good as, but not equal to, one that was never stopped",
                task.config.environment,
            )
        self._diverged = dict(saved.diverged)
        self._started = time.perf_counter() - saved.seconds  # with those of the processes before this one
        self._saved_at = saved.steps if saved.state else -1

    def run(self, on_step: Callable[[int], None]) -> GroupResult:
        config, stack = self._task.config, self._stack
        on_step(stack.steps)
        with _deferred_interrupt() as is_interrupted:
            while stack.steps < config.steps and len(self._diverged) < len(self._task.seeds):
                before = stack.steps
                stack.iterate()
                on_step(stack.steps)
                is_evaluated, is_saved = (
                    stack.steps >= config.steps or stack.steps // interval > before // interval
                    for interval in (config.evaluation_interval, config.checkpoint_interval)
                )
                if is_evaluated:
                    self._evaluate()
                if is_saved or is_interrupted():
                    self._save()
                if is_interrupted():
                    raise KeyboardInterrupt
        self._save()
        parts = {name: float(stack.seconds[name]) for name in PARTS}
        return GroupResult(stack.steps, self._seconds, parts, self._diverged)

    @property
    def _seconds(self) -> float:
        return time.perf_counter() - self._started

    def _evaluate(self) -> None:
        """A row per seed; one whose networks are not finite gets no more rows."""
        stack, logs, step = self._stack, self._logs, self._stack.steps
        evaluations, metrics = stack.evaluate(), stack.take_metrics()
        speed = len(self._task.seeds) * step / max(self._seconds, 1e-9)
        for place, seed in enumerate(self._task.seeds):
            broken = bool(stack.diverged[place]) or not is_finite(stack.agent(place))
            if seed not in self._diverged and broken:
                self._diverged[seed] = step
                _LOG.warning("seed %d diverged by step %d: its gradient is not finite", seed, step)
            if seed not in self._diverged:
                found = evaluations[place]
                numbers = found.mean_return, found.length, found.sampled_return
                logs.write(place, EVALUATION, step, dict(zip(COLUMNS, numbers, strict=True)))
                logs.write(place, METRICS, step, metrics[place])
                logs.show(place, step, {"training/steps_per_second": speed})
        parts = {name: f"{stack.seconds[name]:.3f}" for name in PARTS}
        clock = {"seconds": f"{self._seconds:.3f}", "steps_per_second": f"{speed:.1f}", **parts}
        _append(logs.timing, step, clock)

    def _save(self) -> None:
        stack, task = self._stack, self._task
        if stack.steps == self._saved_at:
            return
        # First: a run that ended between the two goes on, and saves them again.
        for place, seed in enumerate(task.seeds):
            save_model(stack.agent(place), task.config, seed_folder(task.out, seed))
        sizes = file_sizes(task.out, self._logs.files)
        saved = Saved(stack.steps, self._seconds, sizes, self._diverged, stack.state_dict())
        save(task.checkpoints, task.fingerprint, saved, task.config.keep_checkpoints)
        self._saved_at = stack.steps


@contextlib.contextmanager
def _deferred_interrupt() -> Iterator[Callable[[], bool]]:
    """Ctrl-C is heard at the end of an iteration; a second one at once. Outside the main thread: nothing."""
    heard: list[int] = []
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) in (signal.SIG_IGN, None):
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


COLUMNS = ("return", "length", "sampled_return")  # of evaluation.csv, after the step


class _Logs:
    """The logs of one stack, opened for every row: what is written is on the disk.

    Files: seed_<k>/evaluation.csv, seed_<k>/metrics.csv and, for what differs from one day to the next,
    timing_seeds_<a>-<b>.csv (seconds, environment steps per second over all seeds, seconds of each part).
    """

    def __init__(self, task: GroupTask) -> None:
        self._task = task
        self._folders = [seed_folder(task.out, seed) for seed in task.seeds]
        self.timing = task.out / f"timing_{task.checkpoints.name}.csv"
        self.files = [folder / name for folder in self._folders for name in (EVALUATION, METRICS)]
        self.files.append(self.timing)
        self._boards: list[Any] = []
        for folder in self._folders:
            folder.mkdir(exist_ok=True)

    def open(self, sizes: Mapping[str, int], step: int) -> None:
        """Go on behind a checkpoint at ``step``. Raises ConfigError for a file that lost rows."""
        cut_back(self._task.out, self.files, sizes)
        if self._task.tensorboard:
            from tensorboardX import SummaryWriter

            # Events after the checkpoint are marked as void.
            purge = step + 1 if step else None
            places = [str(self._task.out / "tensorboard" / folder.name) for folder in self._folders]
            self._boards = [SummaryWriter(place, purge_step=purge) for place in places]

    def write(self, place: int, name: str, step: int, numbers: Mapping[str, float]) -> None:
        """A row of seed number ``place``, unless it is empty."""
        if numbers:
            _append(self._folders[place] / name, step, {k: repr(float(v)) for k, v in numbers.items()})
        kind = "evaluation" if name == EVALUATION else "training"
        self.show(place, step, {f"{kind}/{key}": number for key, number in numbers.items()})

    def show(self, place: int, step: int, numbers: Mapping[str, float]) -> None:
        """Tell TensorBoard."""
        for name, number in numbers.items() if self._boards else ():
            self._boards[place].add_scalar(name, number, step)

    def close(self) -> None:
        """Close what TensorBoard holds open."""
        for board in self._boards:
            board.close()


def check_tensorboard() -> None:
    """Raise ConfigError where the extra is missing."""
    if find_spec("tensorboardX") is None:
        raise ConfigError(
            "--tensorboard needs the package tensorboardX; install it with "
            "pip install 'koffline[tensorboard]'"
        )


def _append(path: Path, step: int, cells: Mapping[str, str]) -> None:
    """A row; the first one decides the columns, nan is not measured.

    Raises ConfigError where the disk refuses; half a row is cut off when the run goes on.
    """
    try:
        with path.open("a+", encoding="utf-8", newline="") as file:
            file.seek(0)
            header = file.readline().rstrip("\n") or ",".join(["step", *cells])
            if not file.tell():
                file.write(header + "\n")
            file.write(
                ",".join([str(step), *(cells.get(name, "nan") for name in header.split(",")[1:])]) + "\n"
            )
            file.flush()
            fsync(file.fileno())
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written ({error.strerror}); free the disk, then --resume"
        ) from error
