"""figure-mujoco: what is run. Environments and their budgets, grids of settings, and the cells they make.

Parts: ``final`` (each critic at its best setting of the grid that all critics share), ``noise`` (the same
with noise on the transitions), ``search`` (that grid), ``paper-search`` and ``paper`` (the paper's own grid
and learner, and its best settings). (Feng et al. 2019, fig:mujoco_bench, fig:more_bench, sec:exp_detail)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from koffline.config import parse_assignments
from koffline.envs.gymnasium_worlds import NOISY_MUJOCO
from koffline.errors import ConfigError
from koffline.experiments.mujoco_cells import MujocoCell
from koffline.online.config import OnlineConfig, OnlineRun, load_config

CRITICS = ("td0", "fvi", "rg", "kloss")
PARTS = ("search", "final", "noise", "paper-search", "paper")
SEARCHES = {"final": "search", "noise": "search", "paper": "paper-search"}
"""Where the settings of a part come from."""
SEARCHED = ("search", "paper-search")

Setting = tuple[tuple[str, Any], ...]
"""Differences from the defaults of OnlineConfig, sorted by name."""
Choices = Mapping[tuple[str, str, str], Setting]  # (environment, search, critic)


@dataclass(frozen=True)
class Budget:
    """Environment steps per run. search_steps: of each run of a search, 0 where none is made.

    threshold: the environment's own "solved", None where it has none.
    """

    identifier: str
    steps: int
    evaluation_interval: int
    search_steps: int
    threshold: float | None
    base: Mapping[str, Any] = field(default_factory=dict)  # of every critic and part


BUDGETS: dict[str, Budget] = {  # in the order of the paper's panels
    "Swimmer": Budget("Swimmer-v5", 200_000, 10_000, 50_000, 360.0),
    "InvertedDoublePendulum": Budget(
        "InvertedDoublePendulum-v5", 200_000, 10_000, 0, 9100.0, {"reward_scale": 0.1}
    ),
    "Ant": Budget("Ant-v5", 50_000, 5_000, 0, 6000.0),
    "InvertedPendulum": Budget("InvertedPendulum-v5", 200_000, 5_000, 30_000, 950.0),
    "Walker2d": Budget("Walker2d-v5", 50_000, 5_000, 0, None),
    "HalfCheetah": Budget("HalfCheetah-v5", 50_000, 5_000, 0, 4800.0),
}
PAPER_SEARCHED = ("InvertedPendulum",)  # the paper's own grid is twice as large; it is searched here alone
NOISE_LEVELS: dict[str, tuple[float, ...]] = {"InvertedPendulum": (0.05,)}  # of each velocity, each step
NOISE_STEPS = 100_000
SEEDS, SEARCH_SEEDS, PAPER_SEARCH_SEEDS = 6, 2, 1
_FIRST_SEARCH_SEED = 1000  # a setting is not judged by the seeds it was chosen with
_MOST_RUNS, _MOST_SEARCH_RUNS = 12, 36  # in one stack
_QUICK_STEPS, _QUICK_INTERVAL, _QUICK_SEEDS = 3_000, 1_000, 2

# The paper's learner where it differs from our defaults.
PAPER_BASE: dict[str, Any] = {
    "standardise": False,
    "adam_epsilon": 2e-4,
    "learning_rate": 1e-3,
    "max_divergence": 0.001,
    "kl_coef_min": 1e-3,
    "kernel_inputs": "state_action",
}
# Settings in use where an environment was not searched (or not yet): by search, environment ("" any), critic.
CHOSEN: dict[tuple[str, str, str], dict[str, Any]] = {
    ("paper-search", "", "kloss"): {"bandwidth_scale": 1.0 / math.sqrt(math.log(64))},
}
_PLANNED = ("environment", "environment_options", "critic", "steps")
# What may differ within one stack; everything else gives arrays their shape or the stack its rhythm.
_STACKED = frozenset(
    {"critic", "learning_rate", "adam_epsilon", "max_divergence", "entropy_coef", "entropy_decay"}
    | {"bandwidth_scale", "diag_weight"}
)


@dataclass(frozen=True)
class MujocoRequest:
    """What of the experiment to run; the defaults are all of it at its own budget.

    steps, seed_count and changes (settings of every run) replace the plan's for the environments named.
    """

    environments: tuple[str, ...] = tuple(BUDGETS)
    parts: tuple[str, ...] = PARTS
    steps: int | None = None
    seed_count: int | None = None
    changes: Setting = ()
    quick: bool = False

    def __post_init__(self) -> None:
        for kind, given, known in (
            ("environment", self.environments, tuple(BUDGETS)),
            ("part", self.parts, PARTS),
        ):
            for name in given:
                if name not in known:
                    raise ConfigError(f"there is no {kind} '{name}'; known are {', '.join(known)}")
        for name, number in (("steps", self.steps), ("seed_count", self.seed_count)):
            if number is not None and number < 1:
                raise ConfigError(f"{name} is {number}; give a positive number")

    def budget(self, environment: str) -> tuple[int, int]:
        """Steps of a final run and between evaluations."""
        whole = BUDGETS[environment]
        steps, interval = whole.steps, whole.evaluation_interval
        if self.quick:
            steps, interval = _QUICK_STEPS, _QUICK_INTERVAL
        if self.steps is not None and environment in self.environments:
            steps = self.steps
        return steps, min(interval, steps)

    def search_steps(self, environment: str) -> int:
        """Steps of each run of a search; 0 where none is made."""
        if self.quick:
            return 1_000 if environment == "InvertedPendulum" else 0
        return BUDGETS[environment].search_steps

    def seeds(self, environment: str) -> int:
        """Seeds of a final run."""
        if self.seed_count is not None and environment in self.environments:
            return self.seed_count
        return _QUICK_SEEDS if self.quick else SEEDS


def as_setting(changes: Mapping[str, Any]) -> Setting:
    """Sorted, so that equal settings are equal tuples."""
    return tuple(sorted(changes.items()))


def read_changes(assignments: Iterable[str]) -> dict[str, Any]:
    """``learning_rate=0.001 hidden=[32,32]`` as values of their types. Raises ConfigError."""
    names = list(parse_assignments(assignments))
    for name in names:
        if name.partition(".")[0] in _PLANNED:
            raise ConfigError(f"{name} is the plan's; choose environments and steps with --only and --steps")
    config = load_config({"environment": "any"}, assignments)
    return {name: getattr(config, name) for name in names}


def search_settings(search: str, critic: str, quick: bool = False) -> list[Setting]:
    """The grid of one critic: as many settings for each.

    ``search``: the same for all. ``paper-search``: learning rates for the rivals, bandwidths for the K-loss
    at a learning rate of 1e-3. (Feng et al. 2019, Hyperparameter Search)
    """
    axes: list[list[dict[str, Any]]]
    windows = [{"window_length": d} for d in (1, 5, 10)]
    if search == "search":
        # The paper's bounds are too tight for every critic: wider ones learn three times faster.
        regions = [{"max_divergence": bound} for bound in (0.01, 0.05, 0.2)]
        axes = [windows, regions, [{"learning_rate": rate} for rate in (3e-3, 1e-3)]]
    else:
        regions = [{"max_divergence": bound} for bound in (0.0005, 0.001, 0.002)]
        entropies = [{"entropy_coef": 0.0}, {"entropy_coef": 0.1, "entropy_decay": 0.1}]
        rates = [{"learning_rate": rate} for rate in (1e-3, 3e-4, 1e-4)]
        scales = [{"bandwidth_scale": scale} for scale in (0.1, 0.01, 1.0 / math.sqrt(math.log(64)))]
        axes = [windows, regions, entropies, scales if critic == "kloss" else rates]
    grid = [
        as_setting({k: v for part in parts for k, v in part.items()}) for parts in itertools.product(*axes)
    ]
    return grid[-2:] if quick else grid


def chosen_setting(choices: Choices, environment: str, search: str, critic: str) -> Setting:
    """What the search found where there was one, else the table's."""
    found = choices.get((environment, search, critic))
    if found is not None:
        return found
    table = {**CHOSEN.get((search, "", critic), {}), **CHOSEN.get((search, environment, critic), {})}
    return as_setting(table)


def part_cells(request: MujocoRequest, part: str, environment: str, choices: Choices) -> list[MujocoCell]:
    """The cells of a part on an environment; none where it does not belong to the plan."""
    if part in SEARCHED:
        return _search_cells(request, part, environment)
    levels = NOISE_LEVELS.get(environment, ()) if part == "noise" else (0.0,)
    found: list[MujocoCell] = []
    for noise in levels:
        steps, interval = request.budget(environment)
        if noise:
            steps = min(steps, NOISE_STEPS)
        chosen = {c: chosen_setting(choices, environment, SEARCHES[part], c) for c in CRITICS}
        runs = [
            OnlineRun(
                _config(request, part, environment, critic, chosen[critic], steps, interval, noise), seed
            )
            for seed in range(request.seeds(environment))
            for critic in CRITICS
        ]
        found += _stacks(part, environment, noise, runs, _MOST_RUNS)
    return found


def _search_cells(request: MujocoRequest, part: str, environment: str) -> list[MujocoCell]:
    steps = request.search_steps(environment)
    if not steps or (part == "paper-search" and environment not in PAPER_SEARCHED):
        return []
    interval = min(BUDGETS[environment].evaluation_interval, max(1, steps // 2))
    seeds = SEARCH_SEEDS if part == "search" else PAPER_SEARCH_SEEDS
    runs = [
        OnlineRun(_config(request, part, environment, critic, setting, steps, interval, 0.0), seed)
        for seed in range(_FIRST_SEARCH_SEED, _FIRST_SEARCH_SEED + seeds)
        for critic in CRITICS
        for setting in search_settings(part, critic, request.quick)
    ]
    return list(_stacks(part, environment, 0.0, runs, _MOST_SEARCH_RUNS))


def _config(
    request: MujocoRequest,
    part: str,
    environment: str,
    critic: str,
    setting: Setting,
    steps: int,
    interval: int,
    noise: float,
) -> OnlineConfig:
    budget = BUDGETS[environment]
    settings: dict[str, Any] = {"environment": budget.identifier, "evaluation_episodes": 2, **budget.base}
    if part.startswith("paper"):
        settings |= PAPER_BASE
    settings |= dict(setting)
    if environment in request.environments:
        settings |= dict(request.changes)
    if noise:
        options = {"environment": budget.identifier, "transition_noise": noise}
        settings |= {"environment": NOISY_MUJOCO, "environment_options": options}
    return OnlineConfig(**{"critic": critic, "steps": steps, "evaluation_interval": interval, **settings})


def _stacks(
    part: str, environment: str, noise: float, runs: list[OnlineRun], most: int
) -> Iterator[MujocoCell]:
    """Runs of equal shape together, in chunks of nearly equal size."""
    shapes: dict[str, list[OnlineRun]] = {}
    for run in runs:
        shape = {k: v for k, v in sorted(vars(run.config).items()) if k not in _STACKED}
        shapes.setdefault(repr(shape), []).append(run)
    for group in shapes.values():
        chunks = math.ceil(len(group) / most)
        size = math.ceil(len(group) / chunks)
        for start in range(0, len(group), size):
            yield MujocoCell(part, environment, noise, tuple(group[start : start + size]))
