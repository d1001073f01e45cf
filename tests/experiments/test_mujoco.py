"""figure-mujoco from finished cells to choices, rows, claims, curves and tables."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from koffline.experiments.mujoco import choose_settings, gather, rows_of_returns, setting_words
from koffline.experiments.mujoco_plan import (
    BUDGETS,
    CRITICS,
    NOISE_LEVELS,
    NOISE_STEPS,
    MujocoRequest,
    part_cells,
    search_settings,
)
from koffline.experiments.mujoco_run import collect_mujoco
from koffline.experiments.reproduce import EXPERIMENTS
from koffline.experiments.results import Results, read_results, write_results
from koffline.experiments.tables import table_text
from koffline.online.config import OnlineConfig, OnlineRun
from tests.experiments.fake_mujoco import by_critic, make_result, write_cells
from tests.experiments.fakes import make_results

WHOLE = MujocoRequest()
LEVELS = by_critic(kloss=1000.0, td0=880.0, fvi=800.0, rg=1000.0)


NOISE = NOISE_LEVELS["InvertedPendulum"]
COUNT = len(search_settings("search", "kloss"))
USUAL = setting_words({**vars(OnlineConfig("any")), "hidden": [64, 64]})  # what stands there for the defaults


def scattered(run: OnlineRun) -> float:
    """Seeds of a critic differ by up to 50."""
    return LEVELS(run) + 10.0 * run.seed


def collect(folder: Path, request: MujocoRequest = WHOLE) -> tuple[Results, dict]:
    parts, curves = collect_mujoco(request, folder)
    return make_results("figure-mujoco", **parts), curves


def searched(run: OnlineRun) -> float:
    """RG wants d = 1 and the largest step, all others d = 5."""
    best = 1 if run.config.critic == "rg" else 5
    return 100.0 * (run.config.window_length == best) + 1e4 * run.config.learning_rate


@pytest.fixture
def pendulum(tmp_path: Path) -> Path:
    """The final part of InvertedPendulum and its noise are finished."""
    for part in ("final", "noise"):
        write_cells(part_cells(WHOLE, part, "InvertedPendulum", {}), tmp_path, scattered)
    return tmp_path


def test_rows_say_what_the_curves_do(pendulum: Path) -> None:
    results, curves = collect(pendulum)
    rows = {row.critic: row for row in results.returns if row.part == "final"}
    assert list(rows) == list(CRITICS)
    ours = rows["kloss"]
    steps = BUDGETS["InvertedPendulum"].steps
    assert (ours.environment, ours.seeds, ours.steps) == ("InvertedPendulum", 6, steps)
    assert ours.final == pytest.approx(1025.0, abs=5.0)
    assert ours.sampled == pytest.approx(512.5, abs=2.5)
    assert ours.final_low is not None
    assert ours.final_low <= ours.final <= ours.final_high
    assert ours.reached_seeds == 6
    assert 0 < ours.reached < 0.25 * steps
    assert rows["td0"].reached is None
    assert rows["rg"].area < ours.area
    assert (rows["rg"].diverged, ours.diverged) == (1, 0)
    assert ours.setting == USUAL
    group = curves["InvertedPendulum final/kloss"]
    assert group["return"].shape == (6, 21)
    assert np.isfinite(group["sampled_return"]).all()


def test_what_was_not_run_is_said(pendulum: Path) -> None:
    results, _ = collect(pendulum)
    missing = results.extra["not_run"]
    assert "final of Ant" in missing
    assert "search of InvertedPendulum" in missing
    assert "final of InvertedPendulum" not in missing
    assert "noise of InvertedPendulum" not in missing
    assert "search of Ant" not in missing  # the plan has none
    assert "Not run: search of Swimmer" in table_text(results)


def test_half_a_part_is_not_shown(pendulum: Path) -> None:
    next(pendulum.glob("mujoco-final-*.npz")).unlink()
    results, curves = collect(pendulum)
    assert not any(row.part == "final" for row in results.returns)
    assert "InvertedPendulum final/kloss" not in curves
    assert "final of InvertedPendulum" in results.extra["not_run"]


def test_claims_have_the_verdicts_of_their_intervals(pendulum: Path) -> None:
    results, _ = collect(pendulum)
    found = {
        (claim.sentence, claim.world): claim
        for claim in results.claims
        if claim.world in ("InvertedPendulum", "MuJoCo")
    }
    better = {
        name: found[f"K-loss learns a better policy than {name}", "InvertedPendulum"]
        for name in ("TD(0)", "RG")
    }
    assert better["TD(0)"].verdict == "holds"
    assert better["TD(0)"].value == pytest.approx(120.0, abs=3.0)
    assert better["TD(0)"].reason.startswith("by the sampled policy: 60")
    assert better["RG"].verdict == "undecided"
    faster = found["K-loss learns with fewer data than RG", "InvertedPendulum"]
    assert faster.verdict == "holds"
    whole = next(claim for claim in results.claims if "consistently" in claim.sentence)
    assert (whole.verdict, whole.value) == ("undecided", 5.0)
    noisy = [claim for claim in results.claims if "noise" in claim.world]
    assert len(noisy) == 3 * len(NOISE)


def test_one_defeat_refutes_consistently(tmp_path: Path) -> None:
    cells = part_cells(WHOLE, "final", "Swimmer", {})
    write_cells(cells, tmp_path, by_critic(kloss=90.0, td0=100.0, fvi=50.0, rg=50.0))
    results, _ = collect(tmp_path)
    whole = next(claim for claim in results.claims if "consistently" in claim.sentence)
    assert whole.verdict == "does not hold"
    few = replace(WHOLE, seed_count=2, environments=("Swimmer",))
    write_cells(part_cells(few, "final", "Swimmer", {}), tmp_path, by_critic(kloss=9, td0=1, fvi=1, rg=1))
    assert {claim.verdict for claim in collect(tmp_path, few)[0].claims} == {"undecided"}


def test_the_search_chooses_by_area_and_finals_follow(tmp_path: Path) -> None:
    cells = part_cells(WHOLE, "search", "InvertedPendulum", {})
    finished = [(cell, make_result(cell, searched)) for cell in cells]
    choices, rows = choose_settings(finished)
    assert dict(choices["InvertedPendulum", "search", "rg"])["window_length"] == 1
    for critic in ("kloss", "td0", "fvi"):
        assert dict(choices["InvertedPendulum", "search", critic])["window_length"] == 5
        assert dict(choices["InvertedPendulum", "search", critic])["learning_rate"] == 3e-3
    assert len(rows) == 4 * COUNT
    for critic in CRITICS:
        mine = sorted((row for row in rows if row.critic == critic), key=lambda row: row.rank)
        assert [row.rank for row in mine] == list(range(COUNT))
        assert [row.area for row in mine] == sorted((row.area for row in mine), reverse=True)
        assert {row.seeds for row in mine} == {2}
    write_cells(cells, tmp_path, searched)
    write_cells(part_cells(WHOLE, "final", "InvertedPendulum", choices), tmp_path, scattered)
    results, _ = collect(tmp_path)
    settings = {row.critic: row.setting for row in results.returns}
    assert settings["rg"].startswith("d 1, ")
    assert settings["kloss"].startswith("d 5, ")
    text = table_text(results)
    assert "## Search: The same grid for all critics" in text
    assert f"| InvertedPendulum | K-loss | 1 of {COUNT} | d 5, lr 0.003" in text


def test_a_search_that_is_not_whole_chooses_nothing(tmp_path: Path) -> None:
    cells = part_cells(WHOLE, "search", "InvertedPendulum", {})
    write_cells(cells[1:], tmp_path, searched)
    assert collect(tmp_path)[0].searches == ()


def test_results_come_back_as_they_were(pendulum: Path) -> None:
    results, _ = collect(pendulum)
    write_results(results, pendulum / "a.json")
    again = read_results(pendulum / "a.json")
    assert (again.returns, again.claims, again.searches) == (
        results.returns,
        results.claims,
        results.searches,
    )


def test_the_table(pendulum: Path) -> None:
    results, _ = collect(pendulum)
    text = table_text(results)
    row = next(row for row in results.returns if (row.part, row.critic) == ("final", "kloss"))
    assert f"| K-loss | {USUAL} | {row.final:.0f} [{row.final_low:.0f}, " in text
    assert f"### InvertedPendulum, noise {NOISE[0]:g} per step on every velocity (noise)" in text
    assert "| 1/6 |" in text
    assert f"| InvertedPendulum | {row.steps:,} | 6 | " in text
    assert f"| Ant | {BUDGETS['Ant'].steps:,} | 6 | not searched |" in text
    runs, steps = 24 * (1 + len(NOISE)), 24 * (row.steps + len(NOISE) * NOISE_STEPS)
    assert f"{runs} runs, {steps / 1e6:.3g} million environment steps" in text
    widths = {line.count("|") for line in text.splitlines() if line.startswith(("| TD(0)", "| K-loss"))}
    assert widths == {11}


def test_the_figure_has_the_panels_of_the_paper(pendulum: Path) -> None:
    results, curves = collect(pendulum)
    figure = EXPERIMENTS["figure-mujoco"].draw(results, curves)
    titles = [axes.get_title(loc="left") for axes in figure.axes if axes.axison]
    assert [title[4:] for title in titles] == [
        "Swimmer", "Inv. Double Pendulum", "Ant", "Inverted Pendulum", "Walker2d", "HalfCheetah",
        *(f"Inverted Pendulum, noise {level:g}" for level in NOISE),
    ]  # fmt: skip
    words = ["not run" in [text.get_text() for text in axes.texts] for axes in figure.axes]
    assert words[: 6 + len(NOISE)] == [True, True, True, False, True, True, *[False] * len(NOISE)]
    lines = [line for line in figure.axes[3].lines if len(line.get_xdata()) > 2]
    assert len(lines) == 4
    for critic, line in zip(CRITICS, lines, strict=True):
        values = np.sort(curves[f"InvertedPendulum final/{critic}"]["return"].astype(float), axis=0)[1:-1]
        np.testing.assert_allclose(line.get_ydata(), values.mean(axis=0))
        assert line.get_xdata()[-1] == BUDGETS["InvertedPendulum"].steps / 1000.0
    sampled = EXPERIMENTS["figure-mujoco"].pages["sampled"](results, curves)
    assert max(sampled.axes[3].lines[0].get_ydata()) < 600.0
    assert EXPERIMENTS["figure-mujoco"].pages["paper"](results, curves) is None


def test_setting_words_name_what_is_unusual() -> None:
    config = OnlineConfig("Swimmer-v5", bandwidth_scale=0.01, standardise=False, reward_scale=3.0, steps=7)
    words = setting_words(json.loads(json.dumps(vars(config))))
    assert words == f"{USUAL}, bandwidth_scale 0.01, standardise False"
    assert USUAL.startswith("d ")


def test_chunks_of_seeds_become_one_group() -> None:
    cells = part_cells(WHOLE, "final", "Ant", {})
    assert len(cells) == 2
    learned = gather([(cell, make_result(cell, scattered)) for cell in cells])
    assert {len(part.returns) for part in learned.values()} == {6}
    assert [row.critic for row in rows_of_returns(learned)] == list(CRITICS)
