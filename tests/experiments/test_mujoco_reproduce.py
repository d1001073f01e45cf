"""`koffline reproduce figure-mujoco` from the command line."""

import json
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
from click.testing import CliRunner, Result

from koffline.cli import cli
from koffline.experiments.cells import Scale
from koffline.experiments.mujoco_plan import NOISE_LEVELS
from koffline.experiments.reproduce import Run, _stored_mujoco_claims
from koffline.experiments.results import read_results
from tests.experiments.fake_mujoco import FakeLockStep
from tests.experiments.shrunk import blank_figures

NOISE = NOISE_LEVELS["InvertedPendulum"]
Call = Callable[..., Result]


@pytest.fixture(autouse=True)
def no_rendering(monkeypatch: pytest.MonkeyPatch) -> None:
    blank_figures(monkeypatch)


@pytest.fixture
def run(tmp_path: Path) -> Call:
    def call(*arguments: str) -> Result:
        command = ["reproduce", *arguments, "--out", str(tmp_path)]
        return CliRunner().invoke(cli, command, prog_name="koffline")

    return call


def test_quick_leaves_everything_it_promises(
    run: Call, tmp_path: Path, fake_stack: type[FakeLockStep]
) -> None:
    done = run("figure-mujoco", "--quick")
    assert done.exit_code == 0, done.output
    for suffix in (".json", ".png", ".svg", ".md", ".curves.h5", "-sampled.png", "-paper.png"):
        assert (tmp_path / f"figure-mujoco{suffix}").stat().st_size > 500
    content = json.loads((tmp_path / "figure-mujoco.json").read_text())
    assert content["extra"]["not_run"] == []
    assert len(content["returns"]) == 4 * (6 + 6 + len(NOISE))  # six environments twice, and noise
    assert {row["search"] for row in content["searches"]} == {"search", "paper-search"}
    with h5py.File(tmp_path / "figure-mujoco.curves.h5") as file:
        assert file["Ant final/kloss/return"].shape == (2, 4)
    made = fake_stack.made
    again = run("figure-mujoco", "--quick")
    assert again.exit_code == 0
    assert fake_stack.made == made
    assert json.loads((tmp_path / "figure-mujoco.json").read_text())["returns"] == content["returns"]


def test_a_single_environment_with_chosen_settings(
    run: Call, tmp_path: Path, fake_stack: type[FakeLockStep]
) -> None:
    some = ("--only", "Swimmer", "--part", "final", "--steps", "4000", "--seed-count", "3")
    done = run("figure-mujoco", *some, "--set", "learning_rate=0.002")
    assert done.exit_code == 0, done.output
    rows = read_results(tmp_path / "figure-mujoco.json").returns
    assert {(row.environment, row.part, row.steps, row.seeds) for row in rows} == {
        ("Swimmer", "final", 4000, 3)
    }
    assert all("lr 0.002" in row.setting for row in rows)
    assert fake_stack.made == 1
    kept = json.loads((tmp_path / "figure-mujoco.json").read_text())["extra"]["not_run"]
    assert "final of Ant" in kept
    assert run("figure-mujoco", "--only", "Ant", "--part", "final", "--steps", "2000").exit_code == 0
    # What was run with other settings than the plan's is not mixed with it.
    assert {row.environment for row in read_results(tmp_path / "figure-mujoco.json").returns} == {"Ant"}


def test_claims_read_what_lies_there(run: Call, tmp_path: Path, fake_stack: type[FakeLockStep]) -> None:
    (claim,) = _stored_mujoco_claims(Run("claims", tmp_path, Scale()))
    assert claim.verdict == "undecided"
    assert "figure-mujoco" in claim.measured
    assert run("figure-mujoco", "--only", "Swimmer", "--part", "final", "--steps", "4000").exit_code == 0
    found = _stored_mujoco_claims(Run("claims", tmp_path, Scale()))
    assert len(found) == 7
    assert found == read_results(tmp_path / "figure-mujoco.json").claims


def test_an_interrupt_says_where_to_go_on(run: Call, tmp_path: Path, fake_stack: type[FakeLockStep]) -> None:
    fake_stack.stop_at = 500
    some = ("--only", "Swimmer", "--part", "final", "--steps", "1000", "--seed-count", "1")
    done = run("figure-mujoco", *some)
    assert done.exit_code == 130
    assert "the same command goes on" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("figure-mujoco", "--only", "Humanoid"), "there is no environment 'Humanoid'; known are Swimmer"),
        (("figure-mujoco", "--part", "all"), "there is no part 'all'"),
        (("figure-mujoco", "--set", "critic=rg"), "critic is the plan's"),
        (("figure-mujoco", "--set", "learning_rate=x"), "learning_rate"),
        (("figure-mujoco", "--steps", "-1"), "steps is -1"),
        (("figure-toy", "--only", "Ant"), "only figure-mujoco has"),
    ],
)
def test_bad_requests_are_one_line(run: Call, arguments: tuple[str, ...], message: str) -> None:
    done = run(*arguments)
    assert done.exit_code == 2
    assert done.stderr.count("\n") == 1
    assert message in done.stderr


def test_with_the_real_learner(run: Call, tmp_path: Path) -> None:
    """A few hundred steps of the pendulum, with noise and without: what is measured has the right form."""
    pytest.importorskip("mujoco")
    some = ("--only", "InvertedPendulum", "--steps", "400", "--seed-count", "2")
    small = ("--set", "hidden=[8]", "--set", "learning_starts=16", "--set", "batch_size=16")
    parts = ("--part", "final", "--part", "noise", "--set", "evaluation_interval=200")
    done = run("figure-mujoco", *some, *small, *parts)
    assert done.exit_code == 0, done.output
    rows = read_results(tmp_path / "figure-mujoco.json").returns
    assert {row.noise for row in rows} == {0.0, *NOISE}
    assert len(rows) == 4 * (1 + len(NOISE))
    assert all(1.0 <= row.final <= 1000.0 for row in rows)
    assert all(row.length == pytest.approx(row.final, abs=1.5) for row in rows)  # a point per step upright
    with h5py.File(tmp_path / "figure-mujoco.curves.h5") as file:
        np.testing.assert_array_equal(file["InvertedPendulum final/kloss/steps"], [0, 200, 400])
        clean, noisy = (
            file[f"InvertedPendulum {part}/kloss/return"][:, 0] for part in ("final", f"noise {NOISE[0]:g}")
        )
    assert not np.array_equal(clean, noisy)  # the same policies before anything was learned
