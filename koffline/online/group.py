"""Train one stack of seeds from its last checkpoint to its end: iterate, evaluate, log,
save.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import time
from collections.abc import Callable, Sequence
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
from koffline.online.widening import find_widening
from koffline.store.files import write_text
from koffline.untrusted.limits import check_regular

EVALUATION = "evaluation.csv"
METRICS = "metrics.csv"
MODEL = "model.d3"
REPLAY = "replay.hdf5"
# columns of evaluation.csv after the step
COLUMNS = (
    "return",
    "length",
    "sampled_return",
)
_LOG = logging.getLogger(__name__)
_OLD_REPLAY = 0.003  # recency up to which a younger replay is worth trying
Row = dict[str, int | float]


class GroupResult(BaseModel):
    """Results of a stack so far, which its checkpoints store; at the end, its final
    result.

    seconds: training time. diverged: step by seed. widened: by seed, the step at which
    the policy had grown wider while its returns fell. logs: rows by the file's name in
    the run's folder.
    """

    model_config = ConfigDict(ser_json_inf_nan="constants")
    steps: int = 0
    seconds: float = 0.0
    diverged: dict[int, int] = {}
    widened: dict[int, int] = {}
    logs: dict[str, list[Row]] = {}


def read_result(path: Path) -> GroupResult | None:
    """The result of a finished stack; None if it is missing, or damaged and has to be
    computed again.
    """
    # pydantic's errors and Refused are ValueErrors
    with contextlib.suppress(OSError, ValueError):
        check_regular(path)
        return GroupResult.model_validate_json(path.read_bytes())
    return None


def result_path(out: Path, seeds: Sequence[int]) -> Path:
    """File that marks a stack of a run as finished, beside its checkpoints."""
    return out / "checkpoints" / f"seeds_{seeds[0]}-{seeds[-1]}" / "finished.json"


def train_group(
    path: Path,
    config: OnlineConfig,
    seeds: Sequence[int],
    on_step: Callable[[int], None] = lambda step: None,
) -> None:
    """Train seeds in one stack from its newest checkpoint, and write the result to
    ``path``.

    on_step: called with the environment steps per seed.
    """
    # Numbers that overflow show as divergence, not as warnings.
    quiet = np.errstate(over="ignore", invalid="ignore", divide="ignore")
    runs = [OnlineRun(config, seed) for seed in seeds]
    with quiet, threads(1), contextlib.closing(LockStep(runs)) as stack:
        training = _StackOutputs(stack, path)
        on_step(stack.steps)
        while not training.is_over:
            before = stack.steps
            stack.iterate()
            on_step(stack.steps)
            is_end = stack.steps >= config.steps
            if is_end or _passes(before, stack.steps, config.evaluation_interval):
                training.evaluate()
            is_due = _passes(before, stack.steps, config.checkpoint_interval)
            if is_end or is_due or training.is_over:
                training.save()
        training.finish()


def _remedy(config: OnlineConfig) -> str:
    """Settings to try for a policy that grows wider, as words of the command line."""
    remedies = []
    # A replay of younger actions: what helped K-loss and TD(0) on InvertedDoublePendulum
    # (scripts.bench.deviation_remedies).
    if not config.streaming and config.recency <= _OLD_REPLAY:
        recency = max(3.0 * config.recency, _OLD_REPLAY)
        remedies.append(f"--set recency={recency:.1g}")
    if config.critic in ("kloss", "memory"):
        remedies.append("--set critic=kloss_slow --set diag_weight=0.3")
    remedies.append(f"--set learning_rate={config.learning_rate / 3.0:.1g}")
    return ", or ".join(remedies)


def _passes(before: int, now: int, interval: int) -> bool:
    """Whether a multiple of ``interval`` lies in (before, now]."""
    return now // interval > before // interval


class _StackOutputs:
    """Outputs of the loop over a stack: logs, checkpoints, models, replays."""

    def __init__(self, stack: LockStep, path: Path) -> None:
        self._stack = stack
        self._path = path
        self._config = stack.runs[0].config
        self._has_warned = False
        self._folders = {
            run.seed: path.parents[2] / f"seed_{run.seed}" for run in stack.runs
        }
        settings = json.dumps(self._config.resolved(), sort_keys=True)
        self._fingerprint = hashlib.sha256(settings.encode()).hexdigest()
        saved = newest(path.parent, self._fingerprint)
        if saved is None and any(
            (folder / EVALUATION).exists() for folder in self._folders.values()
        ):
            _LOG.warning(
                "there is no checkpoint in %s; the run begins again at step 0",
                path.parent,
            )
        if saved and not stack.load_state_dict(saved["stack"]):
            _LOG.warning(
                "the running episodes of %s could not be played again and begin anew;"
                " from here on the run is as good as, but not equal to, one that was"
                " never stopped",
                self._config.env,
            )
        # the first checkpoint may come before the first evaluation
        for folder in self._folders.values():
            folder.mkdir(exist_ok=True)
        self._found = GroupResult.model_validate(saved or {})
        # earlier processes of the run included
        self._started = time.perf_counter() - self._found.seconds

    @property
    def is_over(self) -> bool:
        """Whether all steps are done, or all seeds diverged."""
        return self._stack.steps >= self._config.steps or len(
            self._found.diverged
        ) == len(self._folders)

    def evaluate(self) -> None:
        """Evaluate, and log a row per seed; a seed with non-finite networks gets no
        more rows.

        Logs are CSV files, written atomically; a log without rows has no file.
        """
        stack = self._stack
        step = self._stack.steps
        evaluations = stack.evaluate()
        metrics = stack.take_metrics()
        is_finite = stack.is_finite
        if stack.trust_region.is_inert.all() and not self._has_warned:
            self._has_warned = True
            _LOG.warning(
                "max_divergence is %g a step: over episodes of this length that is more"
                " than weights can diverge by, so that kl_coef is at its least (%g); a"
                " smaller one binds",
                self._config.max_divergence,
                self._config.kl_coef,
            )
        diverged = self._found.diverged
        for place, (seed, folder) in enumerate(self._folders.items()):
            if seed not in diverged and (stack.diverged[place] or not is_finite[place]):
                diverged[seed] = step
                _LOG.warning(
                    "seed %d diverged by step %d: its gradient is not finite",
                    seed,
                    step,
                )
            for name, columns in ((EVALUATION, evaluations), (METRICS, metrics)):
                rows = self._found.logs.setdefault(f"{folder.name}/{name}", [])
                if columns and seed not in diverged:
                    rows.append(
                        {
                            "step": step,
                            **{
                                key: float(part[place]) for key, part in columns.items()
                            },
                        }
                    )
                if rows:
                    lines = [
                        ",".join(rows[0]),
                        *(",".join(map(repr, row.values())) for row in rows),
                    ]
                    write_text(folder / name, "\n".join(lines) + "\n")
                else:
                    (folder / name).unlink(missing_ok=True)
            if seed not in diverged:
                self._warn_of_widening(seed, folder.name)

    def _warn_of_widening(self, seed: int, folder: str) -> None:
        """Warn once if a seed's policy grows wider while its returns fall."""
        logs = self._found.logs
        metrics = {row["step"]: row for row in logs.get(f"{folder}/{METRICS}", [])}
        evaluations = logs.get(f"{folder}/{EVALUATION}", [])
        measured = [row for row in evaluations if row["step"] in metrics]
        widening = find_widening(
            [row["sampled_return"] for row in measured],
            [metrics[row["step"]].get("policy_std", np.nan) for row in measured],
        )
        if widening is None or seed in self._found.widened:
            return
        step = self._stack.steps
        self._found.widened[seed] = step
        _LOG.warning(
            "seed %d by step %d: the policy's standard deviation grew from %.2g to %.2g"
            " while its returns fell from %.4g to %.4g; the critic may mislead it: try"
            " %s",
            seed,
            step,
            widening.deviation_then,
            widening.deviation_now,
            widening.return_then,
            widening.return_now,
            _remedy(self._config),
        )

    def save(self) -> None:
        """Write the finite models, then a checkpoint; a run that is killed in between
        writes both again.
        """
        stack = self._stack
        config = self._config
        for place, folder in enumerate(self._folders.values()):
            if stack.is_finite[place]:
                trust_pcl_model(stack.agent(place), config).save(str(folder / MODEL))
        state = {**self._so_far().model_dump(), "stack": stack.state_dict()}
        save(
            self._path.parent,
            self._fingerprint,
            stack.steps,
            state,
            config.keep_checkpoints,
        )

    def finish(self) -> None:
        """Write the replays of the seeds that did not diverge, then the result."""
        stack = self._stack
        config = self._config
        gamma = None
        if 0.0 < config.gamma < 1.0:
            gamma = config.gamma
        for place, (seed, folder) in enumerate(self._folders.items()):
            if seed in self._found.diverged or config.streaming:
                continue
            try:
                log = replay_transitions(stack.replay, place, gamma)
            except DataError as error:
                _LOG.warning("no log of the replay at %s: %s", folder / REPLAY, error)
            else:
                write_transitions(log, folder / REPLAY, force=True)
        write_text(self._path, self._so_far().model_dump_json(indent=2) + "\n")

    def _so_far(self) -> GroupResult:
        self._found.steps = self._stack.steps
        self._found.seconds = time.perf_counter() - self._started
        return self._found
