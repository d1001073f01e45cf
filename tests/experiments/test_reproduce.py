"""`koffline reproduce` from the command line, with experiments shrunk to seconds."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
from click.testing import Result

from koffline.experiments import ablation, choices, mujoco
from koffline.experiments.cells import Scale
from koffline.experiments.mujoco import CRITICS, NOISE_LEVELS, PAPER_CRITICS
from koffline.experiments.result_files import read_results
from koffline.experiments.style import METHODS
from tests.experiments.shrunk import blank_figures, shrink_experiments
from tests.refusals import assert_refused, run_cli, succeed

NOISE = NOISE_LEVELS["InvertedPendulum"]
Call = Callable[..., Result]


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    shrink_experiments(monkeypatch)
    blank_figures(monkeypatch)


@pytest.fixture(scope="module")
def puddle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of `figure-puddle`."""
    folder = tmp_path_factory.mktemp("puddle")
    with pytest.MonkeyPatch.context() as monkeypatch:
        shrink_experiments(monkeypatch)
        blank_figures(monkeypatch)
        succeed("reproduce", "figure-puddle", "--out", folder)
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Call:
    return lambda *arguments: run_cli(
        "reproduce", *arguments, "--quiet", "--out", tmp_path
    )


def test_a_figure_leaves_everything_it_promises(puddle: Path) -> None:
    for suffix in ("json", "png", "svg", "md", "curves.h5"):
        assert (puddle / f"figure-puddle.{suffix}").stat().st_size > 500
    content = json.loads((puddle / "figure-puddle.json").read_text())
    assert "seconds" not in content  # the same run, the same bytes
    assert "seconds" in json.loads((puddle / "figure-puddle.run.json").read_text())
    rows = [row for row in content["rows"] if row["world"] == "puddle_world"]
    assert len(rows) == 6 * 3 * 2
    assert {row["method"] for row in rows} == {
        "td0",
        "fvi",
        "rg",
        "gtd2",
        "sbeed",
        "kloss",
    }
    assert all(
        low <= value <= high for value, low, high in (row["mse"] for row in rows)
    )
    with h5py.File(puddle / "figure-puddle.curves.h5") as file:
        assert file["puddle_world/kloss/mse_monte_carlo"].shape == (4, 3, 2)
        softer = file["puddle_world T 3/kloss/mse_monte_carlo"]
        assert softer.shape == (4, 3, 2, 2)  # two logs, two seeds


def test_puddle_world_has_the_papers_temperature_beside_ours(
    run: Call, puddle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(puddle, tmp_path, dirs_exist_ok=True)
    first = read_results(puddle / "figure-puddle.json")
    assert {row.temperature for row in first.choices} == {3.0}
    assert {row.method for row in first.choices} == set(METHODS)
    assert {row.world for row in first.rows} == {"puddle_world", "puddle_world T 3"}
    assert first.extra["not_run"] == []
    monkeypatch.setattr("koffline.experiments.cells._train", lambda *arguments: 1 / 0)
    monkeypatch.setattr(choices, "train_on_logs", lambda *arguments: 1 / 0)
    gone = next((tmp_path / "cells").glob("choices-puddle_world-gtd2-*.npz"))
    gone.unlink()
    for cell in (tmp_path / "cells").glob("puddle_world-*.npz"):
        cell.unlink()  # the page needs them no longer
    assert run("figure-puddle", "--only-finished").exit_code == 0
    again = read_results(tmp_path / "figure-puddle.json")
    assert again.extra["not_run"] == ["Puddle World, T 3: GTD2"]
    assert len(again.choices) == len(first.choices) - 1
    published = [row for row in first.rows if row.world == "puddle_world"]
    assert [row for row in again.rows if row.world == "puddle_world"] == published
    page = (tmp_path / "figure-puddle.md").read_text(encoding="utf-8")
    assert "koffline reproduce choices --only puddle_world --part temperature" in page
    (tmp_path / "figure-puddle.curves.h5").write_bytes(b"no curves")
    assert_refused(run("figure-puddle", "--only-finished"), "holds no curves")
    (tmp_path / "figure-puddle.json").unlink()
    assert_refused(
        run("figure-puddle", "--only-finished", "--force"), "nothing of the figure"
    )


def test_cells_are_shared_found_again_and_missed_in_one_line(
    run, puddle, tmp_path, monkeypatch
):
    shutil.copytree(puddle, tmp_path, dirs_exist_ok=True)
    first = read_results(tmp_path / "figure-puddle.json")
    assert run("claims").exit_code == 0
    judged = read_results(tmp_path / "claims.json")
    assert {claim.verdict for claim in judged.claims} <= {
        "holds",
        "does not hold",
        "level",
        "undecided",
    }
    assert len({claim.sentence for claim in judged.claims}) >= 10
    assert len({part.sentence for part in judged.statements}) >= 10
    page = (tmp_path / "claims.md").read_text(encoding="utf-8")
    appendix = (tmp_path / "claims.appendix.md").read_text(encoding="utf-8")
    assert all(part.sentence in page for part in judged.statements)
    assert appendix.count("| **") >= len(judged.claims) > page.count("| **")
    assert run("claims", "--only-finished").exit_code == 0
    again = read_results(tmp_path / "claims.json")
    assert again.statements == judged.statements
    assert set(again.claims) == set(judged.claims)
    monkeypatch.setattr("koffline.experiments.cells._train", lambda *arguments: 1 / 0)
    assert run("figure-puddle").exit_code == 0
    assert read_results(tmp_path / "figure-puddle.json").rows == first.rows
    assert run("ablation").exit_code == 0
    cell = next((tmp_path / "cells").glob("puddle_world-rg-*.npz"))
    cell.write_bytes(cell.read_bytes()[: cell.stat().st_size // 2])
    assert_refused(run("figure-puddle"), "puddle_world-rg")


def test_files_of_others_and_of_another_scale_are_left_alone(
    run: Call, tmp_path: Path
) -> None:
    (tmp_path / "figure-toy.md").write_text("precious")
    assert_refused(run("figure-toy"), "figure-toy.md exists already")
    assert (tmp_path / "figure-toy.md").read_text() == "precious"
    assert run("figure-toy", "--force").exit_code == 0
    before = (tmp_path / "figure-toy.json").read_bytes()
    assert {row["world"] for row in json.loads(before)["rows"]} == {"chain"}
    assert_refused(run("figure-toy", "--quick"), "--force")
    assert (tmp_path / "figure-toy.json").read_bytes() == before
    assert run("figure-toy", "--quick", "--force").exit_code == 0
    (tmp_path / "figure-toy.json").write_text("{}")
    assert_refused(run("figure-toy"))
    assert (tmp_path / "figure-toy.json").read_text() == "{}"


def test_mujoco_leaves_everything_it_promises(run, tmp_path, fake_stack):
    assert run("figure-mujoco", "--quick").exit_code == 0
    for suffix in (
        ".json",
        ".png",
        ".svg",
        ".md",
        ".curves.h5",
        "-sampled.png",
        "-paper.png",
    ):
        assert (tmp_path / f"figure-mujoco{suffix}").stat().st_size > 500
    content = json.loads((tmp_path / "figure-mujoco.json").read_text())
    assert content["extra"]["not_run"] == []
    assert (
        len(content["returns"])
        == len(CRITICS) * (6 + len(NOISE)) + len(PAPER_CRITICS) * 6
    )
    with h5py.File(tmp_path / "figure-mujoco.curves.h5") as file:
        assert file["Ant final/kloss/return"].shape == (2, 4)
    count = fake_stack.made
    assert run("figure-mujoco", "--quick").exit_code == 0
    assert fake_stack.made == count
    assert (
        json.loads((tmp_path / "figure-mujoco.json").read_text())["returns"]
        == content["returns"]
    )


def test_bad_requests_are_one_line(run: Call) -> None:
    assert_refused(run("figure-puddle", "--workers", "0"), "workers")
    assert_refused(run("figure-toy", "--only", "Ant"), "only figure-mujoco has")


def test_mujoco_with_the_real_learner(
    run: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few hundred steps of the pendulum, with noise and without: what is measured has
    the right form.
    """
    pytest.importorskip("mujoco")
    monkeypatch.setitem(
        mujoco.BUDGETS, "InvertedPendulum", mujoco.Budget(200, 100, 0, 950.0)
    )
    monkeypatch.setattr(mujoco, "SEEDS", 2)
    done = run(
        "figure-mujoco",
        "--only",
        "InvertedPendulum",
        "--part",
        "final",
        "--part",
        "noise",
    )
    assert done.exit_code == 0, done.output
    rows = read_results(tmp_path / "figure-mujoco.json").returns
    assert {row.noise for row in rows} == {0.0, *NOISE}
    assert len(rows) == len(CRITICS) * (1 + len(NOISE))
    assert all(1.0 <= row.final.value <= 1000.0 for row in rows)
    with h5py.File(tmp_path / "figure-mujoco.curves.h5") as file:
        np.testing.assert_array_equal(
            file["InvertedPendulum final/kloss/steps"], [0, 100, 200]
        )
        names = (
            f"InvertedPendulum {part}/kloss/return"
            for part in ("final", f"noise {NOISE[0]:g}")
        )
        clean, noisy = (file[name][:, 0] for name in names)
    # the same policies before anything was learned
    assert not np.array_equal(clean, noisy)


def test_the_scales_are_those_of_the_paper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    full = Scale()
    quick = Scale(quick=True)
    settings = full.training("mountain_car")
    assert (settings.epochs, settings.seeds, settings.batch_size, settings.hidden) == (
        3000,
        10,
        150,
        (80,),
    )
    assert settings.learning_rates == (0.003, 0.001, 0.0003)
    assert full.problem("puddle_world").rows == 5000
    assert quick.training("mountain_car").epochs == 150
    cells = [cell for *_, cell in ablation.variants("ablation", full)]
    assert len({cell.name for cell in cells}) == len(set(cells))
    # cells lie in folders of users
    assert cells[0].name == "puddle_world-kloss-c3fd3af8c268"
