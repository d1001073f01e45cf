"""For figure-mujoco: a stack that learns nothing, and finished cells with made-up
curves.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from koffline.experiments.cells import Run, Scale
from koffline.experiments.mujoco import MujocoCell, MujocoResult
from koffline.experiments.result_files import write_result
from koffline.online.config import OnlineRun

Level = Callable[[OnlineRun], float]
SPEEDS = {
    "kloss_slow": 4.5,
    "memory": 5.0,
    "kloss": 4.0,
    "td0": 3.0,
    "fvi": 2.0,
    "rg": 1.0,
}
LEVELS = {
    "td0": 60.0,
    "fvi": 50.0,
    "rg": 40.0,
    "kloss": 90.0,
    "memory": 95.0,
    "kloss_slow": 92.0,
}


def make_result(cell: MujocoCell, level: Level, points: int = 21) -> MujocoResult:
    """Curves that rise to level(run), at the critic's own speed; sampled ones half as
    high.
    """
    share = np.linspace(0.0, 1.0, points)
    rows = []
    for run in cell.runs:
        noise = np.random.default_rng(run.seed).normal(size=points)
        rows.append(
            level(run) * (1.0 - np.exp(-5.0 * SPEEDS[run.config.critic] * share))
            + noise
        )
    returns = np.stack(rows)
    sampled = returns / 2.0
    sampled[:, 0] = np.nan
    return MujocoResult(
        steps=np.linspace(0, cell.runs[0].config.steps, points).astype(np.int64),
        returns=returns,
        lengths=np.abs(returns),
        sampled=sampled,
        diverged_at=np.array(
            [5000 if (r.config.critic, r.seed) == ("rg", 1) else -1 for r in cell.runs]
        ),
    )


def write_cells(cells: list[MujocoCell], run: Run, level: Level) -> None:
    for cell in cells:
        write_result(run.path(cell), vars(make_result(cell, level)))


def folder_run(folder: Path) -> Run:
    run = Run("figure-mujoco", folder, Scale())
    run.cells_folder.mkdir(parents=True)
    return run


def by_critic(**levels: float) -> Level:
    return lambda run: levels[run.config.critic]


def fake_return(run: OnlineRun, steps: int) -> float:
    """Higher for lr 3e-3 and for d 5; a cell of its own for each seed."""
    config = run.config
    level = (
        LEVELS[config.critic]
        + 1000.0 * config.learning_rate
        + (config.window_length == 5)
    )
    return level * (1.0 - np.exp(-steps / 500.0)) + run.seed % 7


class FakeLockStep:
    """Counts its iterations; `stop_at` raises there, as a killed process would."""

    stop_at: int | None = None
    made: int = 0

    def __init__(self, runs: Sequence[OnlineRun]) -> None:
        type(self).made += 1
        self.runs = tuple(runs)
        self.steps = 0

    def iterate(self) -> None:
        if self.stop_at is not None and self.steps >= self.stop_at:
            raise KeyboardInterrupt
        self.steps += self.runs[0].config.steps_per_iteration

    def evaluate(self) -> dict[str, np.ndarray]:
        values = np.array([fake_return(run, self.steps) for run in self.runs])
        halves = values / 2.0 if self.steps else np.full_like(values, np.nan)
        return {"return": values, "length": values + 1.0, "sampled_return": halves}

    @property
    def diverged(self) -> np.ndarray:
        """RG's seed 1 stands still after its first evaluations."""
        return np.array(
            [
                r.config.critic == "rg" and r.seed == 1 and self.steps >= 1500
                for r in self.runs
            ]
        )

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]

    def close(self) -> None:
        pass
