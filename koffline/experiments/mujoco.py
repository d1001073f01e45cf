"""figure-mujoco: its plan (budgets, grids of settings) and its cells (stacks of runs
trained together).

Parts: ``final`` (each critic at its best setting in the shared grid), ``noise`` (the
same with transition noise), ``search`` (that grid), ``paper-search`` and ``paper`` (the
paper's grid, and the best settings there, with what the paper states of its learner).
(Feng et al. 2019, fig:mujoco_bench, fig:more_bench, sec:exp_detail)

A cell's result is one .npz, written atomically. During a run, checkpoints are kept
beside it; a killed run continues from them.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from jaxtyping import Float, Int

from koffline.checkpoints import newest, save
from koffline.envs import NOISY_MUJOCO
from koffline.experiments.cells import Run
from koffline.experiments.result_files import (
    digest_of,
    is_result,
    read_result,
    write_result,
)
from koffline.fitting import threads
from koffline.online.config import OnlineConfig, OnlineRun
from koffline.spread import interquartile_mean

if TYPE_CHECKING:
    from koffline.online.lockstep import LockStep

CRITICS = ("td0", "fvi", "rg", "kloss", "memory", "kloss_slow")
# trained in stacks of its own, because a cell's name depends on all its runs
_APART = "kloss_slow"
PAPER_CRITICS = CRITICS[:4]
# The search that a part takes its settings from.
SEARCHES = {"final": "search", "noise": "search", "paper": "paper-search"}
SEARCHED = ("search", "paper-search")


@dataclass(frozen=True)
class Budget:
    """Environment steps per run. search_steps: steps per run of a search, 0 for no
    search.

    threshold: return at which the environment counts as solved; None if it defines
    none.
    """

    steps: int
    evaluation_interval: int
    search_steps: int
    threshold: float | None
    reward_scale: float = 1.0


BUDGETS: dict[str, Budget] = {
    "Swimmer": Budget(1_000_000, 25_000, 50_000, 360.0),
    "InvertedDoublePendulum": Budget(1_000_000, 25_000, 50_000, 9100.0, 0.1),
    "Ant": Budget(300_000, 10_000, 20_000, 6000.0),
    "InvertedPendulum": Budget(1_000_000, 10_000, 30_000, 950.0),
    "Walker2d": Budget(500_000, 20_000, 50_000, None),
    "HalfCheetah": Budget(500_000, 20_000, 50_000, 4800.0),
}
# The paper's own grid is seven times as large as ours. The first one is searched in a
# quick run, too.
PAPER_SEARCHED = (
    "InvertedPendulum",
    "Swimmer",
    "InvertedDoublePendulum",
    "HalfCheetah",
    "Walker2d",
    "Ant",
)
# of each velocity in each step
NOISE_LEVELS: dict[str, tuple[float, ...]] = {"InvertedPendulum": (0.05,)}
NOISE_STEPS = 100_000
SEEDS = 6
QUICK_SEEDS = 2
# not those of the finals
SEARCH_SEEDS = {
    "search": range(1000, 1002),
    "paper-search": range(1000, 1001),
}
# runs per stack
_MOST_RUNS = 12
_MOST_SEARCH_RUNS = 36

_LARGEST_BANDWIDTH = 1.0 / math.sqrt(math.log(64))  # of the paper's grid
# What the paper states of its learner, where our defaults differ. It does not state the
# weight of the diagonal, which stays 1/m, nor the floor of kl_coef.
Settings: TypeAlias = dict[str, Any]  # of `OnlineConfig`, by name
PAPER_BASE: Settings = {
    "standardise": False,
    "adam_epsilon": 2e-4,
    "learning_rate": 1e-3,
    "max_divergence": 0.001,
    "kl_coef": 1e-3,
    "divergence_per": "step",
    "kernel_inputs": "state_action",
}

FORMAT = 1  # version of the files; part of the digest
_CHECKPOINT_SECONDS = 240.0
# share of the evaluations that the final return averages, to reduce noise
_LAST_SHARE = 0.1
CURVES = {"returns": "return", "lengths": "length", "sampled": "sampled_return"}
# Settings that change the files of a run but not what it learns.
_NOT_LEARNING = ("checkpoint_interval", "keep_checkpoints")


@dataclass(frozen=True)
class MujocoCell:
    """Runs of one environment, budget and network shape.

    ``part``: the part of the experiment.
    """

    part: str
    environment: str
    noise: float
    runs: tuple[OnlineRun, ...]

    @property
    def name(self) -> str:
        """Short unique name: part, environment and a digest of all settings."""
        stated = [(learned_by(run.config), run.seed) for run in self.runs]
        digest = digest_of(FORMAT, self.part, self.noise, stated)
        return f"mujoco-{self.part}-{self.environment}-{digest}"


# (environment, search, critic) -> its best config
Choices = Mapping[tuple[str, str, str], OnlineConfig]


@dataclass(frozen=True, eq=False)
class MujocoResult:
    """Curves (R, T) of R runs at ``steps`` (T,).

    returns, lengths: of the mean action. sampled: returns of training episodes since
    the last evaluation; NaN before the first finished episode. diverged_at: steps at
    the first evaluation that found the run diverged; −1 if it did not.
    """

    steps: Int[np.ndarray, " time"]
    returns: Float[np.ndarray, "run time"]
    lengths: Float[np.ndarray, "run time"]
    sampled: Float[np.ndarray, "run time"]
    diverged_at: Int[np.ndarray, " run"]

    def final(self, curve: str = "returns") -> Float[np.ndarray, " run"]:
        """Mean of the last tenth of the evaluations."""
        last = max(1, round(_LAST_SHARE * len(self.steps)))
        return getattr(self, curve)[:, -last:].mean(axis=1)

    def area(self, curve: str = "returns") -> Float[np.ndarray, " run"]:
        """Mean height of a curve (area divided by the number of steps)."""
        heights = getattr(self, curve)
        widths = np.diff(self.steps)
        if not len(widths):
            return heights[:, 0]
        return (heights[:, 1:] + heights[:, :-1]) / 2.0 @ widths / widths.sum()

    def reached(self, threshold: float | None) -> Float[np.ndarray, " run"]:
        """Environment steps at the first return that reaches the threshold, else ∞."""
        if threshold is None:
            threshold = math.inf
        is_there = self.returns >= threshold  # (run, time)
        first = self.steps[is_there.argmax(axis=1)]
        return np.where(is_there.any(axis=1), first, math.inf)


Finished = Sequence[tuple[MujocoCell, MujocoResult]]


def learned_by(config: OnlineConfig) -> Settings:
    """The settings that affect what a run learns."""
    settings = {
        name: value
        for name, value in config.resolved().items()
        if name not in _NOT_LEARNING
    }
    if not config.exploration:
        settings.pop("exploration", None)  # a setting younger than stored cells
    return settings


def search_settings(search: str, critic: str) -> list[Settings]:
    """The grid of one critic; all critics have equally many settings.

    ``search``: the same grid for all. ``paper-search``: learning rates for the other
    critics, bandwidths for the K-loss at a learning rate of 1e-3.
    (Feng et al. 2019, Hyperparameter Search)
    """
    if search == "search":
        # A constant kl_coef learns faster than any trust region, whatever the critic.
        axes = {
            "window_length": (1, 10),
            "kl_coef": (1.0, 10.0),
            "learning_rate": (3e-3, 1e-3),
        }
        # With weight 1/m, the diagonal part (stable with
        # a slow copy) is hardly learned.
        fixed = {}
        if critic == "kloss_slow":
            fixed = {"diag_weight": 0.3}
        return [
            dict(zip(axes, values, strict=True)) | fixed
            for values in itertools.product(*axes.values())
        ]
    name = "learning_rate"
    values = (1e-3, 3e-4, 1e-4)
    if critic == "kloss":
        name = "bandwidth_scale"
        values = (0.1, 0.01, _LARGEST_BANDWIDTH)
    entropies = {"entropy_coef": 0.0}, {"entropy_coef": 0.1, "entropy_decay": 0.1}
    grid = itertools.product((1, 5, 10), (0.0005, 0.001, 0.002), entropies, values)
    return [
        {"window_length": window, "max_divergence": region, **entropy, name: value}
        for window, region, entropy, value in grid
    ]


def part_cells(
    part: str, environment: str, chosen: Choices, quick: bool = False
) -> list[MujocoCell]:
    """The cells of a part on an environment; empty if the part is not run there.

    quick: 3000 steps and two seeds, and a search of two settings on one environment
    only.
    """
    budget = BUDGETS[environment]
    if quick:
        searched = 0
        if environment == PAPER_SEARCHED[0]:
            searched = 1_000
        budget = Budget(3_000, 1_000, searched, budget.threshold, budget.reward_scale)
    is_search = part in SEARCHED
    if is_search:
        steps = budget.search_steps
        interval = max(1, steps // 2)
        seeds = SEARCH_SEEDS[part]
    else:
        steps = budget.steps
        interval = steps
        seeds = range(SEEDS)
        if quick:
            seeds = range(QUICK_SEEDS)
    if not steps or (part == "paper-search" and environment not in PAPER_SEARCHED):
        return []
    noises: Sequence[float] = (0.0,)
    if part == "noise":
        noises = NOISE_LEVELS.get(environment, ())
    cells: list[MujocoCell] = []
    for noise in noises:
        where: Settings = {
            "env": f"{environment}-v5",
            "evaluation_interval": min(budget.evaluation_interval, interval),
            "steps": steps,
        }
        if noise:
            options = {"environment": where["env"], "transition_noise": noise}
            where |= {
                "env": NOISY_MUJOCO,
                "env_options": options,
                "steps": min(steps, NOISE_STEPS),
            }
        configs = _configs_of(part, environment, where, budget, chosen, quick)
        runs = [OnlineRun(config, seed) for seed in seeds for config in configs]
        most = _MOST_RUNS
        if is_search:
            most = _MOST_SEARCH_RUNS
        cells += [
            MujocoCell(part, environment, noise, stack) for stack in _stacks(runs, most)
        ]
    return cells


def _configs_of(
    part: str,
    environment: str,
    where: Settings,
    budget: Budget,
    chosen: Choices,
    quick: bool,
) -> list[OnlineConfig]:
    """The settings that a part runs: a search's grids, or each critic's best setting.

    where: environment and steps. chosen: the best settings that are known. The critic
    whose stacks are apart comes last.
    """
    is_paper = part.startswith("paper")
    critics: Sequence[str] = CRITICS
    learner: Settings = {
        "reward_scale": budget.reward_scale,
        "evaluation_episodes": 2,
    }
    if is_paper:
        critics = PAPER_CRITICS
        learner |= PAPER_BASE
    configs: list[OnlineConfig] = []
    for critic in critics:
        usual = OnlineConfig(critic=critic, **learner, **where)
        if is_paper and critic == "kloss":
            usual = usual.with_changes(bandwidth_scale=_LARGEST_BANDWIDTH)
        if part in SEARCHED:
            grid = search_settings(part, critic)
            if quick:
                grid = grid[-2:]
            configs += [usual.with_changes(**setting) for setting in grid]
        else:
            config = chosen.get((environment, SEARCHES[part], critic), usual)
            configs.append(config.with_changes(**where))
    return sorted(configs, key=lambda config: config.critic == _APART)


def _stacks(runs: Sequence[OnlineRun], most: int) -> Iterator[tuple[OnlineRun, ...]]:
    """Runs that can be trained as one stack, at most ``most`` in each, of about equal
    sizes: all but the window's length may differ in a stack.
    """
    by_kind: dict[tuple[bool, int], list[OnlineRun]] = {}
    for run in runs:
        kind = (run.config.critic == _APART, run.config.window_length)
        by_kind.setdefault(kind, []).append(run)
    for alike in by_kind.values():
        count = math.ceil(len(alike) / most)
        size = math.ceil(len(alike) / count)
        for start in range(0, len(alike), size):
            yield tuple(alike[start : start + size])


def finished_cells(
    run: Run, parts: Iterable[str], chosen: Choices
) -> tuple[Finished, list[str]]:
    """Results of the parts whose cells are all finished, and the names of unfinished
    parts.
    """
    finished: list[tuple[MujocoCell, MujocoResult]] = []
    missing = []
    for part, environment in itertools.product(parts, BUDGETS):
        cells = part_cells(part, environment, chosen, run.scale.quick)
        if all(is_result(run.path(cell)) for cell in cells):
            finished += [
                (cell, read_result(run.path(cell), MujocoResult)) for cell in cells
            ]
        else:
            missing.append(f"{part} of {environment}")
    return finished, missing


def best_settings(finished: Finished) -> Choices:
    """For each environment, search and critic: the config with the largest area (the
    first if tied).
    """
    searches: dict[
        tuple[str, str, str], dict[str, list[tuple[float, OnlineConfig]]]
    ] = {}
    for cell, result in finished:
        for run, area in zip(cell.runs, result.area().tolist(), strict=True):
            by_setting = searches.setdefault(
                (cell.environment, cell.part, run.config.critic), {}
            )
            by_setting.setdefault(repr(run.config), []).append((area, run.config))

    def area_of(runs: Sequence[tuple[float, OnlineConfig]]) -> float:
        return float(interquartile_mean(np.array([area for area, _ in runs])))

    return {
        key: max(by_setting.values(), key=area_of)[0][1]
        for key, by_setting in searches.items()
    }


def write_mujoco(path: Path, cell: MujocoCell) -> None:
    """Train all runs of a cell, from its checkpoint if there is one, and write the
    result.
    """
    from koffline.online.lockstep import LockStep  # environments are needed only here

    folder = path.with_suffix(".partial")
    with threads(1), contextlib.closing(LockStep(cell.runs)) as stack:
        result = _learn(cell, stack, folder)
    write_result(path, vars(result))
    shutil.rmtree(folder, ignore_errors=True)


def _learn(cell: MujocoCell, stack: LockStep, folder: Path) -> MujocoResult:
    """Train one stack with evaluations and checkpoints.

    The first evaluation is of the initial policy.
    """
    config = cell.runs[0].config
    saved = time.perf_counter()
    state = newest(folder, cell.name) or {"steps": [], "rows": [], "diverged": {}}
    steps = state["steps"]
    rows = state["rows"]
    diverged = state["diverged"]
    if "stack" in state:
        stack.load_state_dict(state["stack"])
    while True:
        is_over = stack.steps >= config.steps
        if stack.steps >= len(steps) * config.evaluation_interval or (
            is_over and steps[-1] < stack.steps
        ):
            evaluated = stack.evaluate()
            rows.append({key: evaluated[name].tolist() for key, name in CURVES.items()})
            steps.append(stack.steps)
            for run in np.flatnonzero(stack.diverged):
                diverged.setdefault(int(run), stack.steps)
        if is_over:
            break
        if time.perf_counter() - saved > _CHECKPOINT_SECONDS:
            save(
                folder,
                cell.name,
                stack.steps,
                {**state, "stack": stack.state_dict()},
                keep=1,
            )
            saved = time.perf_counter()
        stack.iterate()
    return MujocoResult(
        steps=np.asarray(steps),
        **{
            key: np.asarray([row[key] for row in rows], dtype=np.float64).T
            for key in CURVES
        },
        diverged_at=np.asarray(
            [diverged.get(place, -1) for place in range(len(cell.runs))]
        ),
    )
