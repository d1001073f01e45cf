import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from PIL import Image

from koffline.experiments.reproduce import EXPERIMENTS
from koffline.experiments.results import Curves, Results
from koffline.experiments.statistics import mean_over_seeds
from koffline.experiments.style import (
    COLOURS,
    METHODS,
    Band,
    divergences,
    log_limits,
    positive_floor,
    tidy_log_ticks,
)
from tests.experiments.fake_mujoco import make_return_curves
from tests.experiments.fakes import make_ablation, make_claims, make_evaluation, make_results


def make_toy(seeds: int = 4) -> tuple[Results, Curves]:
    iterations = np.unique(np.geomspace(1, 500, 30).round().astype(int))
    iterations = np.concatenate([[0], iterations])
    growth = {"td0": 0.2, "fvi": 0.05}
    curves: dict[str, dict[str, np.ndarray]] = {}
    for number, method in enumerate(METHODS):
        error = np.exp(growth.get(method, -0.01 * (number + 1)) * iterations)[:, None] * np.linspace(
            1, 1.2, seeds
        )
        error = np.where(error > 1e7, np.nan, error + 0.02)
        curves[f"chain/{method}"] = {"iterations": iterations, "mse": error**2, "weight_error": error}
    extra = {"lstd_weight_error": 0.02, "lstd_mse": 1e-4}
    return make_results("figure-toy", extra=extra), curves


EXAMPLES = {
    "figure-toy": make_toy,
    "figure-puddle": lambda: make_evaluation("figure-puddle", ["puddle_world"], seeds=4, times=20),
    "figure-bench": lambda: make_evaluation("figure-bench", ["cart_pole", "mountain_car"], seeds=3, times=12),
    "ablation": lambda: (make_ablation(), {}),
    "claims": lambda: (make_claims(), {}),
    "figure-mujoco": lambda: (make_results("figure-mujoco"), make_return_curves()),
}


def lines_of(axes: Axes, method: str, style: str = "-") -> list[Line2D]:
    return [
        line
        for line in axes.lines
        if line.get_color() == COLOURS[method] and line.get_linestyle() == style and len(line.get_xdata()) > 1
    ]


def crosses_of(figure_axes: Axes) -> dict[str, float]:
    """Method -> where its seeds diverged."""
    names = {colour: method for method, colour in COLOURS.items()}
    return {
        names[line.get_color()]: float(np.ravel(line.get_xdata())[0])
        for line in figure_axes.lines
        if line.get_marker() == "X" and len(line.get_xdata()) == 1
    }


@pytest.fixture(scope="module")
def puddle() -> tuple[Results, Curves, Figure]:
    results, curves = EXAMPLES["figure-puddle"]()
    return results, curves, EXPERIMENTS["figure-puddle"].draw(results, curves)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_has_two_files_that_are_the_same_every_time(name: str, tmp_path: Path) -> None:
    before = dict(mpl.rcParams)
    results, curves = EXAMPLES[name]()
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        EXPERIMENTS[name].draw_into(results, curves, folder)
        names = [name, *(f"{name}-{page}" for page in EXPERIMENTS[name].pages)]
        expected = {f"{part}.{kind}" for part in names for kind in ("png", "svg")}
        assert {path.name for path in folder.iterdir()} == expected
    for kind in ("png", "svg"):
        assert (tmp_path / "a" / f"{name}.{kind}").read_bytes() == (
            tmp_path / "b" / f"{name}.{kind}"
        ).read_bytes()
    assert "<dc:date>" not in (tmp_path / "a" / f"{name}.svg").read_text()
    with Image.open(tmp_path / "a" / f"{name}.png") as picture:
        assert picture.width >= 2000
    assert dict(mpl.rcParams) == before


def test_matplotlib_waits_until_something_is_drawn() -> None:
    code = "import sys, koffline.experiments.reproduce; print('matplotlib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_the_panels_of_the_paper(puddle: tuple[Results, Curves, Figure]) -> None:
    titles = [axes.get_title(loc="left") for axes in puddle[2].axes]
    assert [title[:3] for title in titles] == ["(a)", "(b)", "(c)", "(d)"]
    labels = [text.get_text() for text in puddle[2].legends[0].get_texts()]
    assert labels[:6] == ["TD(0)", "FVI", "RG", "GTD2", "SBEED", "K-loss"]


def test_a_curve_is_the_mean_at_the_best_learning_rate(puddle: tuple[Results, Curves, Figure]) -> None:
    _, curves, figure = puddle
    for panel, name in ((0, "mse_monte_carlo"), (1, "bellman_error")):
        (line,) = lines_of(figure.axes[panel], "kloss")
        expected = curves["puddle_world/kloss"][name][:, 1].mean(axis=1)  # 0.001 is the best
        np.testing.assert_allclose(line.get_ydata(), expected, rtol=1e-5)


def test_each_truth_has_the_learning_rate_that_is_best_by_it(puddle: tuple[Results, Curves, Figure]) -> None:
    results, curves, _ = puddle
    rows = tuple(
        replace(row, best_by_truth=row.learning_rate == 0.003) if row.truth == "paper" else row
        for row in results.rows
    )
    figure = EXPERIMENTS["figure-puddle"].draw(replace(results, rows=rows), curves)
    dashed = lines_of(figure.axes[0], "rg", "--")
    assert len(dashed) == 1
    expected = curves["puddle_world/rg"]["mse_paper"][:, 0].mean(axis=1)
    np.testing.assert_allclose(dashed[0].get_ydata(), expected, rtol=1e-5)


def test_divergence_is_marked_where_it_happened(puddle: tuple[Results, Curves, Figure]) -> None:
    _, curves, figure = puddle
    lost = curves["puddle_world/td0"]["mse_monte_carlo"][:, 1]
    first = curves["puddle_world/td0"]["epochs"][np.argmax(np.isnan(lost).any(axis=1))]
    for axes in figure.axes[:2]:
        # FVI diverges at another learning rate than its best.
        assert crosses_of(axes) == {"td0": first}
        assert "2/4" in [text.get_text() for text in axes.texts]
    (solid,) = lines_of(figure.axes[0], "td0")
    (dotted,) = [line for line in lines_of(figure.axes[0], "td0", ":") if np.isfinite(line.get_ydata()).any()]
    epochs = curves["puddle_world/td0"]["epochs"]
    np.testing.assert_array_equal(np.isfinite(solid.get_ydata()), epochs < first)
    after = epochs >= first
    np.testing.assert_allclose(
        np.asarray(dotted.get_ydata())[after], np.nanmean(lost[after], axis=1), rtol=1e-5
    )


def test_an_error_above_the_axis_is_written_there() -> None:
    results, curves = EXAMPLES["figure-puddle"]()
    wild = dict(curves["puddle_world/fvi"])
    wild["mse_monte_carlo"] = np.full_like(wild["mse_monte_carlo"], 2.5e9)
    figure = EXPERIMENTS["figure-puddle"].draw(results, {**curves, "puddle_world/fvi": wild})
    assert figure.axes[0].get_ylim()[1] < 1e6
    assert "2.5e+09" in [text.get_text() for text in figure.axes[0].texts]


def test_scatter_shows_both_losses_with_their_rank_correlation(
    puddle: tuple[Results, Curves, Figure],
) -> None:
    _, curves, figure = puddle
    legend = figure.axes[2].get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == [
        "K-loss, ρ = 0.93 [0.88, 0.97]",
        "L2 loss, ρ = 0.42 [0.37, 0.46]",
    ]
    loss, _ = (line for line in figure.axes[2].lines if line.get_marker() == ".")
    group = curves["puddle_world/kloss"]  # a loss is shown on the networks of its own method
    np.testing.assert_array_equal(loss.get_xdata(), group["mse_monte_carlo"].ravel())
    np.testing.assert_array_equal(loss.get_ydata(), group["kernel_loss"].ravel())


def test_bench_has_two_worlds() -> None:
    figure = EXPERIMENTS["figure-bench"].draw(*EXAMPLES["figure-bench"]())
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles == [
        "(a) CartPole MSE",
        "(b) CartPole Bellman error",
        "(c) Mountain Car MSE",
        "(d) Mountain Car Bellman error",
    ]


def test_methods_that_were_not_run_are_left_out() -> None:
    results, curves = EXAMPLES["figure-puddle"]()
    some = {group: parts for group, parts in curves.items() if group.endswith(("rg", "kloss"))}
    figure = EXPERIMENTS["figure-puddle"].draw(results, some)
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels[:3] == ["RG", "K-loss", "truth of the paper's grid"]


def test_toy_shows_where_weights_ran_away() -> None:
    results, curves = make_toy()
    figure = EXPERIMENTS["figure-toy"].draw(results, curves)
    lost = np.isnan(curves["chain/td0"]["weight_error"]).any(axis=1)
    first = curves["chain/td0"]["iterations"][np.argmax(lost)]
    assert crosses_of(figure.axes[2])["td0"] == first
    assert set(crosses_of(figure.axes[1])) == {"td0", "fvi"}
    for axes, level in ((figure.axes[1], 1e-4), (figure.axes[2], 0.02)):
        assert level in [line.get_ydata()[0] for line in axes.lines if np.size(line.get_xdata()) == 2]
    words = {text.get_text() for text in figure.axes[0].texts}
    assert {"$w_1$", "$w_2$", "$w_3$", "$2w_3$", "0.8", "0.2", "0.95", "0.05"} <= words


def test_ablation_points() -> None:
    results = make_ablation()
    figure = EXPERIMENTS["ablation"].draw(results, {})
    panel = figure.axes[0]
    assert panel.get_title(loc="left") == "bandwidth"
    assert [axes.get_title() for axes in figure.axes[:3]] == ["Puddle World", "CartPole", "Mountain Car"]
    assert [label.get_text() for label in panel.get_yticklabels()][:2] == ["0.05", "0.1"]
    row = results.select(world="puddle_world", group="bandwidth", variant="0.1", best_by_truth=True)[0]
    assert row.mse is not None
    points = [
        (float(line.get_xdata()[0]), float(line.get_ydata()[0]))
        for line in panel.lines
        if line.get_marker() == "o"
    ]
    assert (pytest.approx(row.mse / 5.0), 1.0) in points
    assert "40" in [text.get_text() for text in panel.texts]  # 40 times the variance is beyond the axis
    scale = next(axes for axes in figure.axes if axes.get_title(loc="left") == "reward scale")
    assert "2/3 diverged" in [text.get_text() for text in scale.texts]


def test_ablation_leaves_panels_without_rows_empty() -> None:
    figure = EXPERIMENTS["ablation"].draw(make_ablation(), {})
    first, pole, last = figure.axes[-3:]
    assert first.get_title(loc="left") == "reward of the pole"
    assert [len(axes.lines) > 0 for axes in (first, pole, last)] == [False, True, False]


def test_claims_have_a_mark_each() -> None:
    results = make_claims()
    figure = EXPERIMENTS["claims"].draw(results, {})
    marks = [
        [line for line in axes.lines if line.get_marker() in ("o", "X", "D") and len(line.get_xdata()) == 1]
        for axes in figure.axes
    ]
    assert [len(panel) for panel in marks] == [15, 4]
    assert float(marks[0][1].get_xdata()[0]) == 0.5  # FVI on Puddle World
    assert (
        max(float(mark.get_xdata()[0]) for mark in marks[0]) == 100.0
    )  # an infinite ratio stands at the edge


def test_bands_agree_with_the_tables() -> None:
    values = np.array([[1.0, 2.0, 4.0], [3.0, np.nan, 5.0], [np.nan, np.nan, 6.0], [np.nan] * 3])
    band = Band.over_seeds(values)
    expected = [mean_over_seeds(values[0]), mean_over_seeds(values[1, [0, 2]])]
    for index, interval in enumerate(expected):
        assert (band.mean[index], band.low[index], band.high[index]) == pytest.approx(
            (interval.value, interval.low, interval.high)
        )
    assert band.mean[2] == 6.0
    assert np.isnan(band.low[2])
    assert np.isnan(band.mean[3])
    assert band.alive.tolist() == [3, 2, 1, 0]


@pytest.mark.parametrize(
    ("ends", "expected"), [((1.5, 22.0), ["2", "5", "10", "20"]), ((3e-3, 0.03), ["0.005", "0.01", "0.02"])]
)
def test_a_short_logarithmic_axis_is_labelled_at_1_2_5(
    ends: tuple[float, float], expected: list[str]
) -> None:
    figure = Figure()
    axes = figure.add_subplot()
    axes.set_yscale("log")
    axes.set_ylim(*ends)
    tidy_log_ticks(axes.yaxis)
    figure.draw_without_rendering()
    inside = [
        label.get_text()
        for label, place in zip(axes.get_yticklabels(), axes.get_yticks(), strict=True)
        if ends[0] <= place <= ends[1]
    ]
    assert inside == expected
    assert not any(label.get_text() for label in axes.get_yticklabels(minor=True))


def test_divergences_and_limits_by_hand() -> None:
    values = np.array([[1.0, 1.0], [2.0, np.nan], [3.0, np.inf]])
    assert divergences(values).tolist() == [-1, 1]
    assert positive_floor(np.array([-1.0, 0.0, 5.0, np.nan])) == pytest.approx(0.5)
    assert positive_floor(np.array([0.0])) > 0.0
    axes = Figure().add_subplot()
    log_limits(axes, [np.array([-3.0, 1e-2, np.nan]), np.array([10.0, 1e9])], most=1e2)
    low, high = axes.get_ylim()
    assert 3e-3 < low < 1e-2
    assert 1e2 < high < 3e2
