import math
from collections import Counter
from dataclasses import replace

import pytest

from koffline.errors import ConfigError
from koffline.experiments.mujoco_plan import (
    BUDGETS,
    CRITICS,
    NOISE_LEVELS,
    PAPER_BASE,
    SEARCH_SEEDS,
    SEEDS,
    MujocoRequest,
    as_setting,
    part_cells,
    read_changes,
    search_settings,
)
from koffline.online.config import OnlineConfig

WHOLE = MujocoRequest()


def test_the_panels_stand_as_in_the_paper() -> None:
    assert list(BUDGETS) == [
        "Swimmer", "InvertedDoublePendulum", "Ant", "InvertedPendulum", "Walker2d", "HalfCheetah",
    ]  # fmt: skip
    assert all(budget.identifier == f"{name}-v5" for name, budget in BUDGETS.items())


def test_every_critic_has_as_many_settings_as_the_others() -> None:
    for search in ("search", "paper-search"):
        counts = set()
        for critic in CRITICS:
            grid = search_settings(search, critic)
            assert len(set(grid)) == len(grid)
            counts.add(len(grid))
        assert len(counts) == 1
    assert len({tuple(search_settings("search", critic)) for critic in CRITICS}) == 1


def test_the_papers_grid_is_the_papers() -> None:
    rates = {dict(s)["learning_rate"] for s in search_settings("paper-search", "rg")}
    assert rates == {1e-3, 3e-4, 1e-4}
    ours = [dict(s) for s in search_settings("paper-search", "kloss")]
    assert {s["bandwidth_scale"] for s in ours} == {0.1, 0.01, 1.0 / math.sqrt(math.log(64))}
    assert not any("learning_rate" in s for s in ours)
    assert PAPER_BASE["learning_rate"] == 1e-3
    assert len(ours) == 54
    assert {(s["entropy_coef"], s.get("entropy_decay")) for s in ours} == {(0.0, None), (0.1, 0.1)}
    assert {s["max_divergence"] for s in ours} == {0.0005, 0.001, 0.002}
    assert {s["window_length"] for s in ours} == {1, 5, 10}


def test_a_part_has_every_critic_with_every_seed_once() -> None:
    choices = {("Swimmer", "search", "rg"): as_setting({"window_length": 1, "learning_rate": 1e-3})}
    cells = part_cells(WHOLE, "final", "Swimmer", choices)
    runs = [run for cell in cells for run in cell.runs]
    assert Counter((run.config.critic, run.seed) for run in runs) == Counter(
        (critic, seed) for critic in CRITICS for seed in range(SEEDS)
    )
    for run in runs:
        config = run.config
        assert (config.environment, config.steps) == ("Swimmer-v5", BUDGETS["Swimmer"].steps)
        usual = OnlineConfig("Swimmer-v5")
        assert (config.window_length, config.learning_rate) == (
            (1, 1e-3) if config.critic == "rg" else (usual.window_length, usual.learning_rate)
        )
    for cell in cells:  # one shape to a stack
        assert len({run.config.window_length for run in cell.runs}) == 1
        assert len(cell.runs) <= 12


def test_a_search_uses_seeds_of_its_own() -> None:
    cells = part_cells(WHOLE, "search", "InvertedPendulum", {})
    runs = [run for cell in cells for run in cell.runs]
    assert len(runs) == len(search_settings("search", "rg")) * len(CRITICS) * SEARCH_SEEDS
    assert min(run.seed for run in runs) >= SEEDS
    assert {run.config.steps for run in runs} == {BUDGETS["InvertedPendulum"].search_steps}
    assert all(len({run.config.window_length for run in cell.runs}) == 1 for cell in cells)
    assert part_cells(WHOLE, "search", "Ant", {}) == []


def test_noise_reaches_the_environment() -> None:
    cells = part_cells(WHOLE, "noise", "InvertedPendulum", {})
    levels = {cell.noise for cell in cells}
    assert levels == set(NOISE_LEVELS["InvertedPendulum"])
    for cell in cells:
        for run in cell.runs:
            assert run.config.environment_options == {
                "environment": "InvertedPendulum-v5", "transition_noise": cell.noise,
            }  # fmt: skip
    assert part_cells(WHOLE, "noise", "Swimmer", {}) == []


def test_the_papers_learner_is_in_the_papers_part_only() -> None:
    for part, standardise in (("paper", False), ("final", True)):
        (cell, *_) = part_cells(WHOLE, part, "InvertedPendulum", {})
        assert {run.config.standardise for run in cell.runs} == {standardise}


def test_requests_change_only_what_they_name() -> None:
    changes = as_setting(read_changes(["learning_rate=1e-3", "windows_per_path=0"]))
    request = MujocoRequest(("Swimmer",), ("final",), 3_000, 1, changes)
    (cell,) = part_cells(request, "final", "Swimmer", {})
    assert len(cell.runs) == len(CRITICS)
    assert {run.config.steps for run in cell.runs} == {3_000}
    assert {(run.config.learning_rate, run.config.windows_per_path) for run in cell.runs} == {(1e-3, 0)}
    assert all(run.config.evaluation_interval <= 3_000 for run in cell.runs)
    names = {c.name for c in part_cells(request, "final", "InvertedPendulum", {})}
    assert names == {c.name for c in part_cells(WHOLE, "final", "InvertedPendulum", {})}


def test_quick_is_small() -> None:
    quick = replace(WHOLE, quick=True)
    runs = [
        run
        for part in ("search", "final", "noise", "paper-search", "paper")
        for name in BUDGETS
        for cell in part_cells(quick, part, name, {})
        for run in cell.runs
    ]
    assert sum(run.config.steps for run in runs) < 500_000
    assert {run.config.environment for run in runs} >= {b.identifier for b in BUDGETS.values()}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MujocoRequest(("Humanoid",)), "there is no environment 'Humanoid'; known are Swimmer"),
        (lambda: MujocoRequest(parts=("last",)), "there is no part 'last'; known are search, final"),
        (lambda: MujocoRequest(steps=0), "steps is 0"),
        (lambda: MujocoRequest(seed_count=0), "seed_count is 0"),
        (lambda: read_changes(["critic=rg"]), "critic is the plan's"),
        (lambda: read_changes(["learning_rat=1"]), "did you mean 'learning_rate'"),
    ],
)
def test_refusals(make, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)
