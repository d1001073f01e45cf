"""A stack that learns nothing: returns that follow from critic, seed and steps, for tests around it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from koffline.online.config import OnlineRun

LEVELS = {"td0": 60.0, "fvi": 50.0, "rg": 40.0, "kloss": 90.0}


@dataclass(frozen=True)
class FakeEvaluation:
    step: int
    mean_return: float
    length: float
    sampled_return: float


def fake_return(run: OnlineRun, steps: int) -> float:
    """Higher for lr 3e-3 and for d 5; a cell of its own for each seed."""
    config = run.config
    level = LEVELS[config.critic] + 1000.0 * config.learning_rate + (config.window_length == 5)
    return level * (1.0 - np.exp(-steps / 500.0)) + run.seed % 7


class FakeLockStep:
    """Counts its iterations; `stop_at` raises there, as a killed process would."""

    stop_at: int | None = None
    made: int = 0

    def __init__(self, runs: Sequence[OnlineRun]) -> None:
        type(self).made += 1
        self.runs, self.steps, self.closed = tuple(runs), 0, False
        self.seconds = dict.fromkeys(("environment", "acting", "learning", "evaluation"), 0.25)

    def iterate(self) -> None:
        if self.stop_at is not None and self.steps >= self.stop_at:
            raise KeyboardInterrupt
        self.steps += self.runs[0].config.steps_per_iteration

    def evaluate(self) -> list[FakeEvaluation]:
        values = [fake_return(run, self.steps) for run in self.runs]
        return [FakeEvaluation(self.steps, v, v + 1.0, v / 2.0 if self.steps else np.nan) for v in values]

    @property
    def diverged(self) -> np.ndarray:
        """RG's seed 1 stands still after its first evaluations."""
        return np.array(
            [run.config.critic == "rg" and run.seed == 1 and self.steps >= 1500 for run in self.runs]
        )

    def take_metrics(self) -> list[dict[str, float]]:
        return [{"loss": float(self.steps), **({"kl_coef": 1.0} if self.steps else {})} for _ in self.runs]

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]

    def close(self) -> None:
        self.closed = True
