"""`koffline reproduce` from the command line, with experiments shrunk to seconds."""

import json
import shutil

import h5py
import pytest
from click.testing import CliRunner

from koffline.cli import cli
from koffline.experiments import ablation, reproduce
from koffline.experiments.cells import EPOCHS, Scale
from koffline.experiments.results import read_results
from tests.experiments.shrunk import blank_figures, shrink_experiments


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    shrink_experiments(monkeypatch)
    blank_figures(monkeypatch)


@pytest.fixture(scope="module")
def puddle(tmp_path_factory):
    """The folder of `figure-puddle`, its cells trained by two workers."""
    folder = tmp_path_factory.mktemp("puddle")
    with pytest.MonkeyPatch.context() as monkeypatch:
        shrink_experiments(monkeypatch)
        words = ["reproduce", "figure-puddle", "--workers", "2", "--out", str(folder)]
        done = CliRunner().invoke(cli, words, prog_name="koffline")
    assert done.exit_code == 0, done.output
    return folder


@pytest.fixture
def run(tmp_path):
    def call(*arguments):
        where = () if "--out" in arguments else ("--out", str(tmp_path))
        return CliRunner().invoke(cli, ["reproduce", *arguments, *where], prog_name="koffline")

    return call


def test_a_figure_leaves_everything_it_promises(puddle):
    for suffix in ("json", "png", "svg", "md", "curves.h5"):
        assert (puddle / f"figure-puddle.{suffix}").stat().st_size > 500
    content = json.loads((puddle / "figure-puddle.json").read_text())
    assert content["name"] == "figure-puddle"
    assert {"command", "versions"} <= set(content)
    assert "seconds" not in content  # the same run, the same bytes
    assert "seconds" in json.loads((puddle / "figure-puddle.run.json").read_text())
    rows = content["rows"]
    assert len(rows) == 6 * 3 * 2
    assert {row["method"] for row in rows} == {"td0", "fvi", "rg", "gtd2", "sbeed", "kloss"}
    assert {row["truth"] for row in rows} == {"paper", "monte_carlo"}
    for row in rows:
        assert row["world"] == "puddle_world"
        assert row["mse_low"] <= row["mse"] <= row["mse_high"]
        assert row["seeds"] == 2
    for flag in ("best_by_truth", "best_without_truth"):
        chosen = [(row["method"], row["truth"]) for row in rows if row[flag]]
        assert len(chosen) == len(set(chosen)) == 12
    with h5py.File(puddle / "figure-puddle.curves.h5") as file:
        assert file["puddle_world/kloss/mse_monte_carlo"].shape == (4, 3, 2)


def test_a_second_run_finds_the_cells_and_says_the_same(run, puddle, tmp_path, monkeypatch):
    shutil.copytree(puddle, tmp_path, dirs_exist_ok=True)
    first = read_results(tmp_path / "figure-puddle.json")
    monkeypatch.setattr("koffline.experiments.cells._train", lambda *arguments: 1 / 0)
    assert run("figure-puddle").exit_code == 0
    assert read_results(tmp_path / "figure-puddle.json").rows == first.rows
    broken = next((tmp_path / "cells").glob("puddle_world-rg-*.npz"))
    broken.unlink()
    failed = run("figure-puddle")
    assert failed.exit_code == 2
    assert "rg on puddle_world" in failed.stderr
    assert failed.stderr.count("\n") == 1


def test_claims_share_cells_and_carry_verdicts(run, tmp_path, monkeypatch):
    done = run("claims")
    assert done.exit_code == 0, done.output
    found = read_results(tmp_path / "claims.json").claims
    assert {claim.verdict for claim in found} <= {"holds", "does not hold", "undecided"}
    assert len({claim.sentence for claim in found}) >= 10
    assert any("Trust-PCL" in claim.sentence and claim.verdict == "undecided" for claim in found)
    monkeypatch.setattr("koffline.experiments.cells._train", lambda *arguments: 1 / 0)
    assert run("ablation").exit_code == 0  # its cells are there


def test_toy_leaves_files_of_others_and_of_another_scale_alone(run, tmp_path):
    (tmp_path / "figure-toy.md").write_text("precious")
    refused = run("figure-toy")
    assert refused.exit_code == 2
    assert "figure-toy.md exists already" in refused.stderr
    assert (tmp_path / "figure-toy.md").read_text() == "precious"
    done = run("figure-toy", "--force")
    assert done.exit_code == 0, done.output
    before = (tmp_path / "figure-toy.json").read_bytes()
    rows = json.loads(before)["rows"]
    assert {row["world"] for row in rows} == {"chain"}
    assert all("weight_error" in row for row in rows)
    refused = run("figure-toy", "--quick")
    assert refused.exit_code == 2
    assert refused.stderr.startswith("error: ")
    assert "--force" in refused.stderr
    assert (tmp_path / "figure-toy.json").read_bytes() == before
    assert run("figure-toy", "--quick", "--force").exit_code == 0


def test_an_interrupt_says_where_to_go_on(run, tmp_path, monkeypatch):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(reproduce, "run_jobs", interrupted)
    done = run("figure-puddle")
    assert done.exit_code == 130
    assert done.stderr == f"interrupted; what is finished is in {tmp_path}/cells: the same command goes on\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("figure-9",), "'NAME': 'figure-9' is not one of 'figure-toy'"),
        (("figure-puddle", "--workers", "0"), "workers is 0"),
        (("figure-puddle", "--seed", "-1"), "seed is -1"),
    ],
)
def test_bad_requests_are_one_line(run, tmp_path, arguments, message):
    done = run(*arguments)
    assert done.exit_code == 2
    assert done.stderr.count("\n") == 1
    assert message in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("content", ["", "{}", '{"version": 99}', "[1]", '{"version": 1, "rows": 3}'])
def test_a_results_file_that_is_not_ours_is_left_alone(run, tmp_path, content):
    path = tmp_path / "figure-toy.json"
    path.write_text(content)
    done = run("figure-toy")
    assert done.exit_code == 2
    assert "figure-toy.json" in done.stderr
    assert done.stderr.count("\n") == 1
    assert path.read_text() == content


def test_the_scales_are_those_of_the_paper(monkeypatch):
    monkeypatch.undo()
    assert EPOCHS == {"puddle_world": 2000, "cart_pole": 2000, "mountain_car": 3000}
    full, quick = Scale(), Scale(quick=True)
    settings = full.training("mountain_car")
    assert (settings.epochs, settings.seeds, settings.batch_size, settings.hidden) == (3000, 10, 150, (80,))
    assert settings.learning_rates == (0.003, 0.001, 0.0003)
    assert full.problem("puddle_world").rows == 5000
    assert quick.training("mountain_car").epochs == 150
    variants = ablation.ablation_variants(full)
    bandwidths = {v.name for v in variants if v.group == "bandwidth"}
    assert bandwidths == {"0.05", "0.1", "0.25", "0.5", "1.0", "median"}
    assert len({v.cell.name for v in variants}) == len({v.cell for v in variants})
    assert list(reproduce.DESCRIPTIONS) == list(reproduce.EXPERIMENTS)
