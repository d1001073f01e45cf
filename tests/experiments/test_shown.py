"""Tables and figures of the committed results, and of what they do not hold: divergence, single seeds."""

from dataclasses import replace
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from PIL import Image

from koffline.experiments import DESCRIPTIONS
from koffline.experiments.reproduce import EXPERIMENTS
from koffline.experiments.results import Claim, Curves, Results
from koffline.experiments.statistics import mean_over_seeds
from koffline.experiments.style import COLOURS, band_over_seeds, log_limits, save_figure, tidy_log_ticks
from koffline.experiments.tables import table_text
from tests.experiments.committed import FOLDER, committed


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_committed_tables_are_those_of_the_committed_numbers(name: str) -> None:
    assert table_text(committed(name)[0]) == (FOLDER / f"{name}.md").read_text(encoding="utf-8")


def test_every_experiment_is_described() -> None:
    assert list(DESCRIPTIONS) == list(EXPERIMENTS)


def cells_of(text: str, first: str) -> list[str]:
    """The cells of the only line whose first cell is this."""
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {first} |")]
    return [cell.strip() for cell in line.replace("\\|", "¦").strip("|").split("|")]


def changed(results: Results, method: str, **changes: object) -> Results:
    rows = [replace(row, **changes) if row.method == method else row for row in results.rows]
    return replace(results, rows=tuple(rows))


@pytest.mark.parametrize(
    ("changes", "cell"),
    [
        ({"mse": None}, "not finite"),
        ({"mse": 0.5, "mse_low": -np.inf, "mse_high": np.inf}, "0.5"),  # a single seed has no interval
        ({"mse": 0.5, "mse_low": 0.25, "mse_high": 1.0}, "0.5 [0.25, 1]"),
    ],
)
def test_intervals_in_words(changes: dict[str, object], cell: str) -> None:
    text = table_text(changed(committed("figure-puddle")[0], "rg", **changes))
    assert cells_of(text, "RG")[2] == cell


def test_divergence_is_said() -> None:
    results = changed(committed("figure-puddle")[0], "rg", diverged=2)
    assert cells_of(table_text(results), "RG")[-2:] == ["2/10", "6/30"]
    lost = changed(committed("ablation")[0], "kloss", mse=None, diverged=2, seeds=3)
    assert "diverged (2/3)" in table_text(lost)


def test_a_bar_does_not_break_a_table() -> None:
    claim = Claim("a | b", "here", "chain", "not measured", None, None, None, "undecided")
    text = table_text(replace(committed("claims")[0], claims=(claim,)))
    assert cells_of(text, "“a \\| b”")[3:6] == ["not measured", "–", "**undecided**"]


def lines_of(axes: Axes, method: str, stroke: str = "-") -> list[Line2D]:
    return [
        line
        for line in axes.lines
        if line.get_color() == COLOURS[method]
        and line.get_linestyle() == stroke
        and len(line.get_xdata()) > 1
    ]


def crosses_of(axes: Axes) -> dict[str, float]:
    """Method -> where its seeds diverged."""
    names = {colour: method for method, colour in COLOURS.items()}
    marks = [line for line in axes.lines if line.get_marker() == "X" and len(line.get_xdata()) == 1]
    return {names[line.get_color()]: float(np.ravel(line.get_xdata())[0]) for line in marks}


def words_of(axes: Axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def best_of(name: str, world: str, method: str, curve: str, truth: str = "monte_carlo") -> np.ndarray:
    """The curve (T, S) at the learning rate that the rows call the best."""
    results, curves = committed(name)
    (row,) = results.select(world=world, method=method, truth=truth, best_by_truth=True)
    group = curves[f"{world}/{method}"]
    return group[curve][:, np.isclose(group["learning_rates"], row.learning_rate)][:, 0]


@pytest.fixture(scope="module")
def puddle() -> Figure:
    return EXPERIMENTS["figure-puddle"].draw(*committed("figure-puddle"))


def test_puddle_shows_the_papers_panels(puddle: Figure) -> None:
    titles = [axes.get_title(loc="left") for axes in puddle.axes]
    assert [title[:3] for title in titles] == ["(a)", "(b)", "(c)", "(d)"]
    labels = [text.get_text() for text in puddle.legends[0].get_texts()]
    assert labels[:6] == ["TD(0)", "FVI", "RG", "GTD2", "SBEED", "K-loss"]
    for panel, name in ((0, "mse_monte_carlo"), (1, "bellman_error")):
        expected = best_of("figure-puddle", "puddle_world", "kloss", name).mean(axis=1)
        (line,) = lines_of(puddle.axes[panel], "kloss")
        np.testing.assert_allclose(line.get_ydata(), expected, rtol=1e-5)
    paper = best_of("figure-puddle", "puddle_world", "rg", "mse_paper", "paper").mean(axis=1)
    (dashed,) = lines_of(puddle.axes[0], "rg", "--")
    np.testing.assert_allclose(dashed.get_ydata(), paper, rtol=1e-5)


def test_scatter_shows_each_loss_on_the_networks_of_its_own_method(puddle: Figure) -> None:
    results, curves = committed("figure-puddle")
    legend = puddle.axes[2].get_legend()
    assert legend is not None
    found = next(c for c in results.correlations if (c.loss, c.error, c.networks) == ("kloss", "mse", "own"))
    text = f"K-loss, ρ = {found.spearman:.2f} [{found.low:.2f}, {found.high:.2f}]"
    assert legend.get_texts()[0].get_text() == text
    points = {line.get_color(): line for line in puddle.axes[2].lines if line.get_marker() == "."}
    for method, loss in (("kloss", "kernel_loss"), ("rg", "l2_loss")):
        group = curves[f"puddle_world/{method}"]
        shown = points[COLOURS[method]]
        assert set(shown.get_xdata()) <= set(group["mse_monte_carlo"].ravel())
        assert set(shown.get_ydata()) <= set(group[loss].ravel())


def test_what_diverged_is_marked_and_what_is_far_leaves_the_axes() -> None:
    results, curves = committed("figure-puddle")
    some: dict[str, dict[str, np.ndarray]] = {
        key: dict(group) for key, group in curves.items() if key.endswith(("kloss", "rg", "fvi"))
    }
    lost, wild = (some[f"puddle_world/{method}"] for method in ("rg", "fvi"))
    lost["mse_monte_carlo"] = lost["mse_monte_carlo"].copy()
    lost["mse_monte_carlo"][40:, :, 3] = np.nan
    wild["mse_monte_carlo"] = np.full_like(wild["mse_monte_carlo"], 2.5e9)
    axes = EXPERIMENTS["figure-puddle"].draw(results, some).axes[0]
    assert crosses_of(axes) == {"rg": lost["epochs"][40]}
    assert "1/10" in words_of(axes)
    assert axes.get_ylim()[1] < 1e6
    (solid,) = lines_of(axes, "rg")
    np.testing.assert_array_equal(np.isfinite(solid.get_ydata()), np.arange(len(lost["epochs"])) < 40)
    (dotted,) = [line for line in lines_of(axes, "rg", ":") if np.isfinite(line.get_ydata()).any()]
    assert np.isfinite(dotted.get_ydata())[40:].all()


def test_bench_has_two_worlds() -> None:
    group = committed("figure-puddle")[1]["puddle_world/rg"]
    curves = {f"{world}/rg": group for world in ("cart_pole", "mountain_car")}
    figure = EXPERIMENTS["figure-bench"].draw(committed("figure-bench")[0], curves)
    assert [axes.get_title(loc="left") for axes in figure.axes] == [
        "(a) CartPole MSE",
        "(b) CartPole Bellman error",
        "(c) Mountain Car MSE",
        "(d) Mountain Car Bellman error",
    ]


def test_toy_shows_where_weights_ran_away() -> None:
    results, curves = committed("figure-toy")
    figure = EXPERIMENTS["figure-toy"].draw(results, curves)
    lost = np.isnan(curves["chain/td0"]["weight_error"]).any(axis=1)
    assert crosses_of(figure.axes[2])["td0"] == curves["chain/td0"]["iterations"][np.argmax(lost)]
    assert set(crosses_of(figure.axes[1])) == {"td0", "fvi"}
    for axes, level in ((figure.axes[1], "lstd_mse"), (figure.axes[2], "lstd_weight_error")):
        levels = [line.get_ydata()[0] for line in axes.lines if np.size(line.get_xdata()) == 2]
        assert results.extra[level] in levels
    assert {"$w_1$", "$w_2$", "$w_3$", "$2w_3$", "0.8", "0.2", "0.95", "0.05"} <= set(
        words_of(figure.axes[0])
    )


def test_ablation_has_a_panel_for_each_group_and_world() -> None:
    results, _ = committed("ablation")
    wanted = {"group": "bandwidth", "variant": "0.1", "truth": "monte_carlo", "best_by_truth": True}
    row = results.select(world="puddle_world", **wanted)[0]
    rows = [
        replace(r, mse=40.0 * r.value_variance) if (r.group, r.variant) == ("bandwidth", "1.0") else r
        for r in results.rows
        if r.group in ("bandwidth", "reward")
    ]
    figure = EXPERIMENTS["ablation"].draw(replace(results, rows=tuple(rows)), {})
    panel = figure.axes[0]
    assert panel.get_title(loc="left") == "bandwidth"
    assert [axes.get_title() for axes in figure.axes[:3]] == ["Puddle World", "CartPole", "Mountain Car"]
    assert [label.get_text() for label in panel.get_yticklabels()][:2] == ["0.05", "0.1"]
    points = [
        (float(line.get_xdata()[0]), float(line.get_ydata()[0]))
        for line in panel.lines
        if line.get_marker() == "o"
    ]
    assert (pytest.approx(row.shares[0]), 1.0) in points
    assert "40" in words_of(panel)  # beyond the axis
    first, pole, last = figure.axes[-3:]
    assert first.get_title(loc="left") == "reward of the pole"
    assert [len(axes.lines) > 0 for axes in (first, pole, last)] == [False, True, False]
    lost = changed(results, "kloss", mse=None, diverged=2, seeds=3)
    assert "2/3 diverged" in words_of(EXPERIMENTS["ablation"].draw(lost, {}).axes[0])


def test_claims_have_a_mark_each() -> None:
    results, _ = committed("claims")
    ratio = next(claim for claim in results.claims if claim.measured.count("MSE of") == 2)
    claims = (replace(ratio, value=None, low=None, high=None), *results.claims)
    figure = EXPERIMENTS["claims"].draw(replace(results, claims=claims), {})
    marks = [
        [line for line in axes.lines if line.get_marker() in ("o", "X", "D") and len(line.get_xdata()) == 1]
        for axes in figure.axes
    ]
    assert sum(map(len, marks)) == len(claims)
    assert float(marks[0][0].get_xdata()[0]) == 100.0  # an infinite ratio stands at the edge


def test_mujoco_shows_interquartile_means_in_the_papers_panels() -> None:
    results, curves = committed("figure-mujoco")
    figure = EXPERIMENTS["figure-mujoco"].draw(results, curves)
    titles = [axes.get_title(loc="left")[4:] for axes in figure.axes if axes.axison]
    assert titles[:4] == ["Swimmer", "Inv. Double Pendulum", "Ant", "Inverted Pendulum"]
    assert titles[4:] == ["Walker2d", "HalfCheetah", "Inverted Pendulum, noise 0.05"]
    lines = [line for line in figure.axes[3].lines if len(line.get_xdata()) > 2]
    for critic, line in zip(("td0", "fvi", "rg", "kloss"), lines, strict=True):
        values = np.sort(curves[f"InvertedPendulum final/{critic}"]["return"].astype(float), axis=0)[1:-1]
        np.testing.assert_allclose(line.get_ydata(), values.mean(axis=0))
    some = {key: group for key, group in curves.items() if key.startswith("Swimmer final")}
    sampled = EXPERIMENTS["figure-mujoco"].pages["sampled"](results, some)
    assert sampled is not None
    assert ["not run" in words_of(axes) for axes in sampled.axes[:4]] == [False, True, True, True]
    assert EXPERIMENTS["figure-mujoco"].pages["paper"](results, some) is None


def test_a_figure_has_two_files_that_are_the_same_every_time(tmp_path: Path) -> None:
    before, (results, curves) = dict(mpl.rcParams), committed("figure-toy")
    some: Curves = {key: curves[key] for key in ("chain/td0", "chain/kloss")}
    for name in ("first", "second"):
        save_figure(EXPERIMENTS["figure-toy"].draw(results, some), tmp_path / name)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "first.png", "first.svg", "second.png", "second.svg"
    ]  # fmt: skip
    for kind in ("png", "svg"):
        assert (tmp_path / f"first.{kind}").read_bytes() == (tmp_path / f"second.{kind}").read_bytes()
    assert "<dc:date>" not in (tmp_path / "first.svg").read_text()
    with Image.open(tmp_path / "first.png") as picture:
        assert picture.width >= 2000
    assert dict(mpl.rcParams) == before


def test_bands_agree_with_the_tables() -> None:
    values = np.array([[1.0, 2.0, 4.0], [3.0, np.nan, 5.0], [np.nan, np.inf, 6.0], [np.nan] * 3])
    band = band_over_seeds(values)
    for index, interval in enumerate((mean_over_seeds(values[0]), mean_over_seeds(values[1, [0, 2]]))):
        found = (band.mean[index], band.low[index], band.high[index])
        assert found == pytest.approx((interval.value, interval.low, interval.high))
    assert band.mean[2] == 6.0
    assert np.isnan([band.low[2], band.mean[3]]).all()
    assert band.alive.tolist() == [3, 2, 1, 0]


def test_logarithmic_axes_by_hand() -> None:
    axes = Figure().add_subplot()
    log_limits(axes, [np.array([-3.0, 1e-2, np.nan]), np.array([10.0, 1e9])], most=1e2)
    low, high = axes.get_ylim()
    assert 3e-3 < low < 1e-2
    assert 1e2 < high < 3e2
    axes.set_ylim(1.5, 22.0)
    tidy_log_ticks(axes.yaxis)
    axes.figure.draw_without_rendering()
    places = zip(axes.get_yticklabels(), axes.get_yticks(), strict=True)
    assert [label.get_text() for label, place in places if 1.5 <= place <= 22.0] == ["2", "5", "10", "20"]
