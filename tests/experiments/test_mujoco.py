"""figure-mujoco: its plan, its cells, and what is made of finished ones."""

import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from koffline.experiments import mujoco
from koffline.experiments.cells import Run
from koffline.experiments.figure_mujoco import finished_parts, setting_words
from koffline.experiments.mujoco import (
    BUDGETS,
    CRITICS,
    MujocoCell,
    MujocoResult,
    part_cells,
    write_mujoco,
)
from koffline.experiments.result_files import read_result
from koffline.online.config import OnlineConfig, OnlineRun
from tests.experiments import fake_mujoco as fake

PENDULUM = "InvertedPendulum"
NOISE = mujoco.NOISE_LEVELS[PENDULUM]
LEVELS = fake.by_critic(
    memory=1000.0, kloss_slow=1000.0, kloss=1000.0, td0=880.0, fvi=800.0, rg=1000.0
)
COUNT = len(mujoco.search_settings("search", "kloss"))
USUAL = setting_words(OnlineConfig(env="any"))  # what stands there for the defaults


def test_the_papers_grid_is_the_papers() -> None:
    assert {
        s["learning_rate"] for s in mujoco.search_settings("paper-search", "rg")
    } == {1e-3, 3e-4, 1e-4}
    ours = mujoco.search_settings("paper-search", "kloss")
    assert len(ours) == 54
    assert mujoco.PAPER_BASE["learning_rate"] == 1e-3
    assert not any("learning_rate" in s for s in ours)
    assert {s["bandwidth_scale"] for s in ours} == {
        0.1,
        0.01,
        1.0 / math.sqrt(math.log(64)),
    }
    assert {(s["entropy_coef"], s.get("entropy_decay")) for s in ours} == {
        (0.0, None),
        (0.1, 0.1),
    }
    assert {s["max_divergence"] for s in ours} == {0.0005, 0.001, 0.002}
    assert {s["window_length"] for s in ours} == {1, 5, 10}


def test_a_search_uses_seeds_of_its_own() -> None:
    runs = [run for cell in part_cells("search", PENDULUM, {}) for run in cell.runs]
    assert len(runs) == COUNT * len(CRITICS) * len(mujoco.SEARCH_SEEDS["search"])
    assert min(run.seed for run in runs) >= mujoco.SEEDS
    assert {run.config.steps for run in runs} == {BUDGETS[PENDULUM].search_steps}
    papers = [
        run for cell in part_cells("paper-search", "Ant", {}) for run in cell.runs
    ]
    assert len(papers) == 54 * len(mujoco.PAPER_CRITICS)
    assert {run.config.steps for run in papers} == {BUDGETS["Ant"].search_steps}
    assert part_cells("paper-search", "Ant", {}, quick=True) == []


def test_a_part_has_every_critic_with_every_seed_once() -> None:
    best = OnlineConfig(
        "Swimmer-v5", steps=9, critic="rg", window_length=1, learning_rate=1e-3
    )
    choices = {("Swimmer", "search", "rg"): best}
    cells = part_cells("final", "Swimmer", choices)
    runs = [run for cell in cells for run in cell.runs]
    whole = Counter(
        (critic, seed) for critic in CRITICS for seed in range(mujoco.SEEDS)
    )
    assert Counter((run.config.critic, run.seed) for run in runs) == whole
    usual = OnlineConfig(env="Swimmer-v5")
    for config in (run.config for run in runs):
        assert (config.env, config.steps) == ("Swimmer-v5", BUDGETS["Swimmer"].steps)
        chosen = (
            (1, 1e-3)
            if config.critic == "rg"
            else (usual.window_length, usual.learning_rate)
        )
        assert (config.window_length, config.learning_rate) == chosen
    for cell in cells:  # one shape to a stack
        assert len({run.config.window_length for run in cell.runs}) == 1
        assert len(cell.runs) <= 12


def make_cell(
    steps: int = 5_000, seeds: int = 2, interval: int = 1_000, **changes: object
) -> MujocoCell:
    settings = {
        "env": "InvertedPendulum-v5",
        "steps": steps,
        "evaluation_interval": interval,
    }
    configs = [
        OnlineConfig(**{**settings, **changes, "critic": critic})
        for critic in ("kloss", "rg")
    ]
    runs = tuple(OnlineRun(config, seed) for seed in range(seeds) for config in configs)
    return MujocoCell("final", PENDULUM, 0.0, runs)


def test_a_result_comes_back_as_it_was_learned(
    fake_stack: type[fake.FakeLockStep], tmp_path: Path
) -> None:
    cell = make_cell(steps=4_500)  # the last stretch is a short one
    path = tmp_path / "cell.npz"
    write_mujoco(path, cell)
    result = read_result(path, MujocoResult)
    np.testing.assert_array_equal(result.steps, [0, 1000, 2000, 3000, 4000, 4500])
    expected = np.array(
        [
            [fake.fake_return(run, int(step)) for step in result.steps]
            for run in cell.runs
        ]
    )
    np.testing.assert_allclose(result.returns, expected)
    np.testing.assert_allclose(result.lengths, expected + 1.0)
    np.testing.assert_allclose(result.sampled[:, 1:], expected[:, 1:] / 2.0)
    assert np.isnan(result.sampled[:, 0]).all()
    assert list(result.diverged_at) == [-1, -1, -1, 2000]


def test_a_killed_cell_goes_on_from_its_checkpoint(fake_stack, tmp_path, monkeypatch):
    cell = make_cell(steps=500, interval=100)
    whole = tmp_path / "whole.npz"
    path = tmp_path / "cut.npz"
    write_mujoco(whole, cell)
    monkeypatch.setattr(mujoco, "_CHECKPOINT_SECONDS", 0.0)
    fake_stack.stop_at = 330
    with pytest.raises(KeyboardInterrupt):
        write_mujoco(path, cell)
    assert not path.exists()
    fake_stack.stop_at = None
    seen = []
    iterate = fake_stack.iterate
    monkeypatch.setattr(
        fake_stack, "iterate", lambda self: (seen.append(self.steps), iterate(self))
    )
    write_mujoco(path, cell)
    assert seen[0] == 330
    first, again = (read_result(file, MujocoResult) for file in (whole, path))
    np.testing.assert_array_equal(again.returns, first.returns)
    np.testing.assert_array_equal(again.steps, first.steps)
    assert not path.with_suffix(".partial").exists()


def test_a_cell_is_known_by_what_it_learns(
    fake_stack: type[fake.FakeLockStep], tmp_path: Path
) -> None:
    assert make_cell().name == make_cell(keep_checkpoints=7).name
    assert make_cell().name != make_cell(target_decay=0.5).name
    cell = make_cell(steps=1_000)
    run = fake.folder_run(tmp_path)
    for _ in range(2):
        run.work_off([cell], write_mujoco)
    assert fake_stack.made == 1
    run.path(cell).write_bytes(b"PK\x03\x04 half")
    run.work_off([cell], write_mujoco)
    assert fake_stack.made == 2


def scattered(run: OnlineRun) -> float:
    """Seeds of a critic differ by up to 50."""
    return LEVELS(run) + 10.0 * run.seed


def searched(run: OnlineRun) -> float:
    """RG wants d = 1 and the largest step, all others d = 10."""
    best = 1 if run.config.critic == "rg" else 10
    return 100.0 * (run.config.window_length == best) + 1e4 * run.config.learning_rate


@pytest.fixture(scope="module")
def pendulum(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The final part of InvertedPendulum and its noise are finished, the final part of
    Ant is not.
    """
    run = fake.folder_run(tmp_path_factory.mktemp("mujoco"))
    for part in ("final", "noise"):
        fake.write_cells(part_cells(part, PENDULUM, {}), run, scattered)
    fake.write_cells(part_cells("final", "Ant", {})[1:], run, scattered)
    return run


def test_rows_say_what_the_curves_do(pendulum: Run) -> None:
    parts, curves = finished_parts(pendulum)
    rows = {row.critic: row for row in parts["returns"] if row.part == "final"}
    assert list(rows) == list(CRITICS)
    ours = rows["kloss"]
    steps = BUDGETS[PENDULUM].steps
    assert (ours.environment, ours.seeds, ours.steps, ours.setting) == (
        PENDULUM,
        6,
        steps,
        USUAL,
    )
    assert ours.final.value == pytest.approx(1025.0, abs=5.0)
    assert ours.sampled.value == pytest.approx(512.5, abs=2.5)
    assert ours.final.low <= ours.final.value <= ours.final.high
    finals = np.sort(curves[f"{PENDULUM} final/kloss"]["return"][:, -2:].mean(axis=1))
    # the paper's best 5 of 6
    assert ours.final_best == pytest.approx(finals[1:].mean(), rel=1e-5)
    assert ours.reached_seeds == 6
    assert 0 < ours.reached < 0.25 * steps
    assert rows["td0"].reached is None
    assert rows["rg"].area.value < ours.area.value
    assert (rows["rg"].diverged, ours.diverged) == (1, 0)
    missing = parts["extra"]["not_run"]
    # Half a part is not shown.
    assert {"final of Ant", "search of InvertedPendulum", "search of Ant"} <= set(
        missing
    )
    assert not {"final of InvertedPendulum", "noise of InvertedPendulum"} & set(missing)


def test_claims_have_the_verdicts_of_their_intervals(pendulum: Run) -> None:
    claims = finished_parts(pendulum)[0]["claims"]
    verdicts = {
        claim.sentence: claim for claim in claims if claim.world in (PENDULUM, "MuJoCo")
    }
    better = verdicts["K-loss learns a better policy than TD(0)"]
    assert better.verdict == "holds"
    assert better.number.value == pytest.approx(120.0, abs=3.0)
    assert better.reason.startswith("by the sampled policy: 60")
    assert verdicts["K-loss learns a better policy than RG"].verdict == "level"
    assert verdicts["K-loss learns with fewer data than RG"].verdict == "holds"
    assert (
        verdicts["K-loss with memory learns a better policy than FVI"].verdict
        == "holds"
    )
    whole = next(
        claim
        for sentence, claim in verdicts.items()
        if sentence.startswith("K-loss consistently")
    )
    assert (whole.verdict, whole.number.value) == ("level", 5.0)
    assert sum("noise" in claim.world for claim in claims) == 3 * 3 * len(NOISE)


def test_one_defeat_refutes_consistently_and_few_seeds_say_nothing(
    tmp_path, monkeypatch
):
    levels = fake.by_critic(
        memory=90.0, kloss_slow=90.0, kloss=90.0, td0=100.0, fvi=50.0, rg=50.0
    )
    run = fake.folder_run(tmp_path)
    fake.write_cells(part_cells("final", "Swimmer", {}), run, levels)
    claims = finished_parts(run)[0]["claims"]
    assert (
        next(c for c in claims if "consistently" in c.sentence).verdict
        == "does not hold"
    )
    monkeypatch.setattr(mujoco, "SEEDS", 2)
    fake.write_cells(part_cells("final", "Swimmer", {}), run, levels)
    assert {claim.verdict for claim in finished_parts(run)[0]["claims"]} == {
        "undecided"
    }


def test_the_search_chooses_by_area_and_finals_follow(tmp_path: Path) -> None:
    run = fake.folder_run(tmp_path)
    cells = part_cells("search", PENDULUM, {})
    choices = mujoco.best_settings(
        [(cell, fake.make_result(cell, searched)) for cell in cells]
    )
    for critic in CRITICS:
        chosen = choices[PENDULUM, "search", critic]
        assert (chosen.window_length, chosen.learning_rate) == (
            1 if critic == "rg" else 10,
            3e-3,
        )
    fake.write_cells(part_cells("final", PENDULUM, choices), run, scattered)
    fake.write_cells(cells[1:], run, searched)
    assert finished_parts(run)[0]["returns"] == ()  # not whole: it chooses nothing
    fake.write_cells(cells, run, searched)
    settings = {row.critic: row.setting for row in finished_parts(run)[0]["returns"]}
    assert settings["rg"].startswith("d 1, ")
    assert settings["kloss"].startswith("d 10, ")
