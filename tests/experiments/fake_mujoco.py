"""Finished cells of figure-mujoco with made-up curves, written where the experiment looks for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np

from koffline.experiments.mujoco_cells import MujocoCell, MujocoResult, mujoco_path, save_mujoco
from koffline.experiments.results import Curves
from koffline.online.config import OnlineRun

Level = Callable[[OnlineRun], float]
SPEEDS = {"kloss": 4.0, "td0": 3.0, "fvi": 2.0, "rg": 1.0}


def make_result(cell: MujocoCell, level: Level, points: int = 21) -> MujocoResult:
    """Curves that rise to level(run), at the critic's own speed; sampled ones half as high."""
    steps = np.linspace(0, cell.runs[0].config.steps, points).astype(np.int64)
    share = np.linspace(0.0, 1.0, points)
    rows = []
    for run in cell.runs:
        noise = np.random.default_rng(run.seed).normal(size=points)
        rows.append(level(run) * (1.0 - np.exp(-5.0 * SPEEDS[run.config.critic] * share)) + noise)
    returns = np.stack(rows)
    sampled = returns / 2.0
    sampled[:, 0] = np.nan
    return MujocoResult(
        steps=steps,
        returns=returns,
        lengths=np.abs(returns),
        sampled=sampled,
        metrics={"loss": np.zeros_like(returns)},
        critics=tuple(run.config.critic for run in cell.runs),
        seeds=tuple(run.seed for run in cell.runs),
        diverged_at=tuple(5000 if (run.config.critic, run.seed) == ("rg", 1) else -1 for run in cell.runs),
        configs=tuple({**asdict(run.config), "hidden": [64, 64]} for run in cell.runs),
        seconds=10.0,
        shares={"environment": 3.0, "learning": 6.0, "acting": 1.0, "evaluation": 0.0},
    )


def write_cells(cells: list[MujocoCell], folder: Path, level: Level) -> None:
    for cell in cells:
        save_mujoco(mujoco_path(cell, folder), cell.name, make_result(cell, level))


def by_critic(**levels: float) -> Level:
    return lambda run: levels[run.config.critic]


def make_return_curves() -> Curves:
    """Two panels of the figure."""
    generator = np.random.default_rng(0)
    steps = np.arange(0, 200_001, 10_000)
    return {
        f"{panel}/{critic}": {
            "steps": steps,
            "return": np.cumsum(generator.uniform(0.0, 90.0, (6, len(steps))), axis=1),
            "sampled_return": np.cumsum(generator.uniform(0.0, 50.0, (6, len(steps))), axis=1),
        }
        for panel in ("InvertedPendulum final", "Ant paper")
        for critic in SPEEDS
    }
