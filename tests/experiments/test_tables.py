from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from koffline.experiments.results import Results
from koffline.experiments.tables import table_text, write_table
from tests.experiments.fakes import make_ablation, make_claims, make_evaluation, make_results


def cells_of(text: str, first: str) -> list[str]:
    """The cells of the only line whose first cell is this."""
    lines = [line for line in text.splitlines() if line.startswith(f"| {first} |")]
    assert len(lines) == 1, lines
    return [cell.strip() for cell in lines[0].replace("\\|", "¦").strip("|").split("|")]


@pytest.fixture(scope="module")
def results() -> Results:
    truths = {"puddle_world": {"paper_against_monte_carlo_mse": 3.125}}
    found = make_evaluation("figure-puddle", ["puddle_world"], seeds=4, times=8)[0]
    return replace(found, extra={"truths": truths})


def test_a_world_has_a_line_per_method(results: Results, tmp_path: Path) -> None:
    write_table(results, tmp_path / "a.md")
    text = (tmp_path / "a.md").read_text()
    assert text.startswith("# figure-puddle\n\n`koffline reproduce figure-puddle --quick`")
    assert "The best constant has MSE 100 " in text
    assert "off by MSE 3.12 against Monte Carlo" in text
    best, blind = (
        results.select(method="kloss", truth="monte_carlo", **{flag: True})[0]
        for flag in ("best_by_truth", "best_without_truth")
    )
    paper = results.select(method="kloss", truth="paper", best_by_truth=True)[0]
    cells = cells_of(text, "K-loss")
    assert cells[1:7] == [
        "0.001",
        f"{best.mse:.3g} [{best.mse_low:.3g}, {best.mse_high:.3g}]",
        "0.0003",
        f"{blind.mse:.3g} [{blind.mse_low:.3g}, {blind.mse_high:.3g}]",
        "0.001",
        f"{paper.mse:.3g} [{paper.mse_low:.3g}, {paper.mse_high:.3g}]",
    ]
    assert cells[-2:] == ["0/4", "0/12"]


def test_divergence_is_said(results: Results) -> None:
    text = table_text(results)
    assert cells_of(text, "TD(0)")[-2:] == ["2/4", "2/12"]
    assert cells_of(text, "FVI")[-2:] == ["0/4", "4/12"]
    lost = [replace(row, mse=None) if row.method == "rg" else row for row in results.rows]
    assert cells_of(table_text(replace(results, rows=tuple(lost))), "RG")[2] == "not finite"


def test_methods_stand_in_their_fixed_order(results: Results) -> None:
    turned = replace(results, rows=results.rows[::-1])
    names = [line.split(" | ")[0] for line in table_text(turned).splitlines() if line.startswith("| ")]
    assert [name.strip("| ") for name in names[2:8]] == ["TD(0)", "FVI", "RG", "GTD2", "SBEED", "K-loss"]


def test_correlations(results: Results) -> None:
    text = table_text(results)
    assert "| Puddle World | K-loss | MSE | the method trained by it | 0.93 [0.88, 0.97] | 6000 |" in text
    assert "| Puddle World | L2 loss | Bellman error | K-loss and RG | 0.35 [0.3, 0.59] | 6000 |" in text


def test_a_single_seed_has_no_interval(results: Results) -> None:
    row = results.select(method="kloss", truth="monte_carlo", best_by_truth=True)[0]
    single = replace(row, mse=0.5, mse_low=-np.inf, mse_high=np.inf, best_without_truth=True)
    assert cells_of(table_text(make_results("figure-puddle", [single])), "K-loss")[2] == "0.5"


def test_the_toy_table_names_the_iterations_of_divergence(results: Results) -> None:
    base = replace(results.rows[0], world="chain", truth="exact", epochs=2000, learning_rate=0.5, seeds=3)
    rows = [
        replace(base, method="td0", mse=None, weight_error=None, diverged=2, diverged_at=(90, None, 85)),
        replace(base, method="kloss", mse=1e-4, mse_low=0.0, mse_high=2e-4, weight_error=0.0125),
    ]
    extra = {"lstd_weight_error": 0.0125, "largest_distance_from_lstd": {"td0": None, "kloss": 4e-15}}
    text = table_text(make_results("figure-toy", rows, extra=extra))
    assert "The LSTD solution of the same tuples is 0.0125 away from w*" in text
    assert cells_of(text, "TD(0)")[1:] == ["not finite", "not finite", "–", "2/3 (iterations 85–90)"]
    assert cells_of(text, "K-loss")[1:4] == ["0.0125", "0.0001 [0, 0.0002]", "4e-15"]


def test_the_toy_in_the_table_of_claims_has_no_lstd_line(results: Results) -> None:
    row = replace(results.rows[0], world="chain", truth="exact")
    assert "LSTD solution" not in table_text(make_results("claims", [row]))


def test_ablation_gives_shares_of_the_variance() -> None:
    results = make_ablation()
    text = table_text(results)
    row = results.select(world="cart_pole", group="kernel", variant="laplacian", best_by_truth=True)[0]
    assert row.mse is not None
    assert cells_of(text, "laplacian")[2].strip("*").startswith(f"{row.mse / 5.0:.3g} [")
    assert cells_of(text, "unscaled")[1:] == ["diverged (2/3)"] * 3
    bandwidths = [cells_of(text, name)[1] for name in ("0.1", "0.5", "median")]
    assert sum(cell.startswith("**") for cell in bandwidths) <= 1


def test_ablation_compares_methods_at_the_same_variant() -> None:
    text = table_text(make_ablation())
    for factor in ("0x", "0.5x", "1x", "2x", "4x"):
        pair = [cells_of(text, f"{factor}, {name}") for name in ("K-loss", "RG")]
        for ours, theirs in zip(*(cells[1:] for cells in pair), strict=True):
            assert ours.startswith("**") != theirs.startswith("**")
    assert len(cells_of(text, "fall, FVI")) == 2  # only the pole has this group


def test_claims_are_counted_and_bars_do_not_break_the_table() -> None:
    text = table_text(make_claims())
    assert "19 sentences: 11 holds, 3 does not hold, 5 undecided." in text
    widths = {line.replace("\\|", "").count("|") for line in text.splitlines() if line.startswith("| “")}
    assert widths == {8}
    assert "| 0.64 [0.6, 0.75] | **undecided** |" in text
    assert "| not measured | – | **undecided** |" in text
