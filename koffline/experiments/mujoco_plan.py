"""figure-mujoco: its plan. Environments and their budgets, grids of settings, and the resulting cells.

Parts: ``final`` (each critic at its best setting of the grid that all critics share), ``noise`` (the same
with noise on the transitions), ``search`` (that grid), ``paper-search`` and ``paper`` (the paper's own grid
and learner, and its best settings). (Feng et al. 2019, fig:mujoco_bench, fig:more_bench, sec:exp_detail)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from koffline.config import parse_assignments
from koffline.envs import NOISY_MUJOCO
from koffline.errors import ConfigError
from koffline.experiments import ENVIRONMENTS, PARTS
from koffline.experiments.mujoco_cells import MujocoCell, MujocoResult, Place, joined, read_mujoco, six_digits
from koffline.experiments.results import SearchRow, is_archive
from koffline.online.config import OnlineConfig, OnlineRun, load_config
from koffline.spread import interquartile_mean

CRITICS = ("td0", "fvi", "rg", "kloss", "memory", "kloss_slow")
_APART = "kloss_slow"  # in stacks of its own: cells are named by who learns beside whom
PAPER_CRITICS = CRITICS[:4]
SEARCHES = {"final": "search", "noise": "search", "paper": "paper-search"}
"""Where the settings of a part come from."""
SEARCHED = ("search", "paper-search")

Setting = tuple[tuple[str, Any], ...]
"""Differences from the defaults of OnlineConfig, sorted by name."""
Choices = Mapping[tuple[str, str, str], Setting]  # (environment, search, critic)
Finished = list[tuple[MujocoCell, MujocoResult]]


@dataclass(frozen=True)
class Budget:
    """Environment steps per run. search_steps: steps of each run of a search, 0 without a search.

    threshold: the environment's own "solved", None where it has none.
    """

    steps: int
    evaluation_interval: int
    search_steps: int
    threshold: float | None
    base: Mapping[str, Any] = field(default_factory=dict)  # settings of every critic and part


BUDGETS: dict[str, Budget] = {
    "Swimmer": Budget(1_000_000, 25_000, 50_000, 360.0),
    "InvertedDoublePendulum": Budget(1_000_000, 25_000, 50_000, 9100.0, {"reward_scale": 0.1}),
    "Ant": Budget(300_000, 10_000, 20_000, 6000.0),
    "InvertedPendulum": Budget(1_000_000, 10_000, 30_000, 950.0),
    "Walker2d": Budget(500_000, 20_000, 50_000, None),
    "HalfCheetah": Budget(500_000, 20_000, 50_000, 4800.0),
}
PAPER_SEARCHED = ("InvertedPendulum", "Swimmer")  # the paper's own grid is seven times as large as ours
NOISE_LEVELS: dict[str, tuple[float, ...]] = {"InvertedPendulum": (0.05,)}  # of each velocity in each step
NOISE_STEPS = 100_000
SEEDS, SEARCH_SEEDS, PAPER_SEARCH_SEEDS = 6, 2, 1
_FIRST_SEARCH_SEED = 1000  # final runs use other seeds than the search
_MOST_RUNS, _MOST_SEARCH_RUNS = 12, 36  # runs per stack
_QUICK_STEPS, _QUICK_INTERVAL, _QUICK_SEEDS, _QUICK_SEARCH_STEPS = 3_000, 1_000, 2, 1_000

# The paper's learner where it differs from our defaults.
PAPER_BASE: dict[str, Any] = {
    "standardise": False,
    "adam_epsilon": 2e-4,
    "learning_rate": 1e-3,
    "max_divergence": 0.001,
    "kl_coef": 1e-3,
    "divergence_per": "step",
    "kernel_inputs": "state_action",
}
# Settings in use where an environment was not searched (or not yet): by search, environment ("" any), critic.
CHOSEN: dict[tuple[str, str, str], dict[str, Any]] = {
    ("paper-search", "", "kloss"): {"bandwidth_scale": 1.0 / math.sqrt(math.log(64))},
}
_PLANNED = ("env", "env_options", "critic", "steps")
# Settings that may differ within one stack; all others determine array shapes or the schedule.
_STACKED = (
    "critic", "learning_rate", "adam_epsilon", "kl_coef", "max_divergence", "entropy_coef", "entropy_decay",
    "bandwidth_scale", "diag_weight",
)  # fmt: skip


@dataclass(frozen=True)
class MujocoRequest:
    """Parts of the experiment to run; by default all of it with the planned budget.

    steps, seed_count and changes (settings of every run) replace the plan's for the environments named.
    """

    environments: tuple[str, ...] = ENVIRONMENTS
    parts: tuple[str, ...] = PARTS
    steps: int | None = None
    seed_count: int | None = None
    changes: Setting = ()
    quick: bool = False

    def steps_of(self, environment: str) -> int:
        """Environment steps of a final run."""
        if self.steps is not None and environment in self.environments:
            return self.steps
        return _QUICK_STEPS if self.quick else BUDGETS[environment].steps

    def search_steps(self, environment: str) -> int:
        """Steps of each run of a search; 0 where none is made."""
        if self.quick:
            return _QUICK_SEARCH_STEPS if environment == PAPER_SEARCHED[0] else 0
        return BUDGETS[environment].search_steps

    def seeds(self, environment: str) -> int:
        """Seeds of a final run."""
        if self.seed_count is not None and environment in self.environments:
            return self.seed_count
        return _QUICK_SEEDS if self.quick else SEEDS


def as_setting(changes: Mapping[str, Any]) -> Setting:
    """Setting as a sorted tuple, so that equal settings compare equal."""
    return tuple(sorted(changes.items()))


def read_changes(assignments: Iterable[str]) -> Setting:
    """``learning_rate=0.001 hidden=[32,32]`` as values of their types. Raises ConfigError."""
    names = list(parse_assignments(assignments))
    for name in names:
        if name.partition(".")[0] in _PLANNED:
            raise ConfigError(f"{name} is the plan's; choose environments and steps with --only and --steps")
    config = load_config({"env": "any"}, assignments)
    return as_setting({name: getattr(config, name) for name in names})


def search_settings(search: str, critic: str, quick: bool = False) -> list[Setting]:
    """The grid of one critic: as many settings for each.

    ``search``: the same for all. ``paper-search``: learning rates for the rivals, bandwidths for the K-loss
    at a learning rate of 1e-3. (Feng et al. 2019, Hyperparameter Search)
    """
    windows, rates = _axis("window_length", 1, 5, 10), _axis("learning_rate", 1e-3, 3e-4, 1e-4)
    if search == "search":
        # A constant kl_coef learns faster than any trust region, whatever the critic.
        windows, rates = _axis("window_length", 1, 10), _axis("learning_rate", 3e-3, 1e-3)
        axes = [windows, _axis("kl_coef", 1.0, 10.0), rates]
        if critic == "kloss_slow":  # with 1/m the part that a slow copy makes stable is hardly learned
            axes.append([{"diag_weight": 0.3}])
    else:
        regions = _axis("max_divergence", 0.0005, 0.001, 0.002)
        entropies = [{"entropy_coef": 0.0}, {"entropy_coef": 0.1, "entropy_decay": 0.1}]
        scales = _axis("bandwidth_scale", 0.1, 0.01, 1.0 / math.sqrt(math.log(64)))
        axes = [windows, regions, entropies, scales if critic == "kloss" else rates]
    combined = itertools.product(*axes)
    grid = [as_setting({k: v for part in parts for k, v in part.items()}) for parts in combined]
    return grid[-2:] if quick else grid


def _axis(name: str, *values: Any) -> list[dict[str, Any]]:
    return [{name: value} for value in values]


def chosen_setting(choices: Choices, environment: str, search: str, critic: str) -> Setting:
    """The setting that the search chose, or the table's without a search."""
    table = {**CHOSEN.get((search, "", critic), {}), **CHOSEN.get((search, environment, critic), {})}
    return choices.get((environment, search, critic), as_setting(table))


def part_cells(request: MujocoRequest, part: str, environment: str, choices: Choices) -> list[MujocoCell]:
    """The cells of a part on an environment; none where it does not belong to the plan."""
    interval, searched = BUDGETS[environment].evaluation_interval, part in SEARCHED
    steps = request.search_steps(environment) if searched else request.steps_of(environment)
    if searched and (not steps or (part == "paper-search" and environment not in PAPER_SEARCHED)):
        return []
    found: list[MujocoCell] = []
    critics = PAPER_CRITICS if part.startswith("paper") else CRITICS
    for noise in NOISE_LEVELS.get(environment, ()) if part == "noise" else (0.0,):
        if searched:
            count = SEARCH_SEEDS if part == "search" else PAPER_SEARCH_SEEDS
            seeds, most = range(_FIRST_SEARCH_SEED, _FIRST_SEARCH_SEED + count), _MOST_SEARCH_RUNS
            interval = min(interval, max(1, steps // 2))
            settings = [(c, s) for c in critics for s in search_settings(part, c, request.quick)]
        else:
            seeds, most = range(request.seeds(environment)), _MOST_RUNS
            interval = min(_QUICK_INTERVAL if request.quick else interval, steps)
            settings = [(c, chosen_setting(choices, environment, SEARCHES[part], c)) for c in critics]
        base = {"steps": min(steps, NOISE_STEPS) if noise else steps, "evaluation_interval": interval}
        configs = [
            _config(request, part, environment, noise, {"critic": critic, **base, **dict(setting)})
            for critic, setting in settings
        ]
        for is_apart in (False, True):
            together = [config for config in configs if (config.critic == _APART) is is_apart]
            runs = [OnlineRun(config, seed) for seed in seeds for config in together]
            found += _stacks(part, environment, noise, runs, most)
    return found


def _config(
    request: MujocoRequest, part: str, environment: str, noise: float, settings: Mapping[str, Any]
) -> OnlineConfig:
    identifier = f"{environment}-v5"
    learner = PAPER_BASE if part.startswith("paper") else {}
    changes = dict(request.changes) if environment in request.environments else {}
    where: dict[str, Any] = {"env": identifier}
    if noise:
        options = {"environment": identifier, "transition_noise": noise}
        where = {"env": NOISY_MUJOCO, "env_options": options}
    base = {"evaluation_episodes": 2, **BUDGETS[environment].base}
    return OnlineConfig(**{**base, **learner, **settings, **changes, **where})


def _stacks(
    part: str, environment: str, noise: float, runs: list[OnlineRun], most: int
) -> Iterator[MujocoCell]:
    """Yield cells of runs of equal shape, in chunks of nearly equal size."""
    shapes: dict[str, list[OnlineRun]] = {}
    for run in runs:
        shape = {key: part for key, part in run.config.resolved().items() if key not in _STACKED}
        shapes.setdefault(repr(shape), []).append(run)
    for group in shapes.values():
        size = math.ceil(len(group) / math.ceil(len(group) / most))
        for start in range(0, len(group), size):
            yield MujocoCell(part, environment, noise, tuple(group[start : start + size]))


def whole_parts(
    request: MujocoRequest, folder: Path, parts: Iterable[str], choices: Choices
) -> tuple[Finished, list[str]]:
    """Results of the parts whose cells are all finished, and the names of the unfinished parts."""
    finished: Finished = []
    missing = []
    for part, environment in itertools.product(parts, BUDGETS):
        cells = part_cells(request, part, environment, choices)
        if all(is_archive(cell.path(folder)) for cell in cells):
            finished += [(cell, read_mujoco(cell.path(folder))) for cell in cells]
        else:
            missing.append(f"{part} of {environment}")
    return finished, missing


def choose_settings(finished: Finished) -> tuple[dict[tuple[str, str, str], Setting], list[SearchRow]]:
    """Best setting of each critic by the area under the greedy curve, and the ranking of all settings."""
    runs: dict[tuple[str, str, str], dict[Setting, list[Place]]] = {}
    for cell, result in finished:
        for row, run in enumerate(cell.runs):
            critic = run.config.critic
            # The run's values of the settings that its grid varies.
            names = {name for setting in search_settings(cell.part, critic) for name, _ in setting}
            setting = as_setting({name: getattr(run.config, name) for name in names})
            by_setting = runs.setdefault((cell.environment, cell.part, critic), {})
            by_setting.setdefault(setting, []).append((run, result, row))
    choices, rows = {}, []
    for key, by_setting in runs.items():
        learned = {setting: joined(part) for setting, part in by_setting.items()}
        # The sort is stable: the first of equal settings wins.
        ranking = sorted(learned, key=lambda s: -float(interquartile_mean(learned[s].scores("returns").area)))
        choices[key] = ranking[0]
        for rank, part in enumerate(learned[setting] for setting in ranking):
            greedy, sampled = part.scores("returns"), part.scores("sampled")
            area, final, drawn = (six_digits(s.mean()) for s in (greedy.area, greedy.final, sampled.final))
            runs_of = (part.setting, len(part.returns), int(part.steps[-1]))
            rows.append(SearchRow(*key, *runs_of, area, final, drawn, rank))
    return choices, rows
