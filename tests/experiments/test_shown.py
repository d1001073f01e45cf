"""Tables and figures of the committed results, and of what they do not hold:
divergence, single seeds.
"""

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import h5py
import numpy as np
import pytest
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from koffline.experiments.mujoco import CRITICS
from koffline.experiments.reproduce import EXPERIMENTS, appendix_text, table_text
from koffline.experiments.result_files import (
    Curves,
    Results,
    read_curves,
    read_results,
    write_curves,
)
from koffline.experiments.style import COLOURS, HOUSE_STYLE, images_of

FOLDER = Path(__file__).parents[2] / "docs" / "reproduce"


@pytest.fixture(autouse=True)
def styled() -> Iterator[None]:
    with rc_context(HOUSE_STYLE):
        yield


@cache
def committed(name: str) -> tuple[Results, Curves]:
    """Results and curves; whoever changes them changes a copy."""
    curves: dict[str, dict[str, np.ndarray]] = {}
    path = FOLDER / f"{name}.curves.h5"
    if path.exists():
        with h5py.File(path) as file:
            curves = {
                f"{world}/{method}": {key: part[()] for key, part in group.items()}
                for world, methods in file.items()
                for method, group in methods.items()
            }
    return read_results(FOLDER / f"{name}.json"), curves


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_committed_tables_are_those_of_the_committed_numbers(name: str) -> None:
    results, _ = committed(name)
    page = FOLDER / f"{name}.md"
    assert table_text(results) == page.read_text(encoding="utf-8")
    appendix = FOLDER / f"{name}.appendix.md"
    assert appendix.exists() == (EXPERIMENTS[name].appendix is not None)
    if appendix.exists():
        assert appendix_text(results) == appendix.read_text(encoding="utf-8")


def test_the_claims_are_a_page_and_not_a_book() -> None:
    """Fifteen to twenty sentences of the paper; the comparisons are in the appendix."""
    results, _ = committed("claims")
    assert 15 <= len(results.statements) <= 20
    assert len((FOLDER / "claims.md").read_text(encoding="utf-8").split()) < 1000
    assert len({statement.sentence for statement in results.statements}) == len(
        results.statements
    )


def test_puddle_world_has_a_row_of_panels_per_temperature() -> None:
    results, curves = committed("figure-puddle")
    figure = EXPERIMENTS["figure-puddle"].draw(results, curves)
    titles = [part.get_suptitle() for part in figure.subfigs]
    assert titles[0].startswith("Target policy of temperature 3: five logs")
    assert "0.3, nearly deterministic" in titles[-1]
    group = curves["puddle_world T 3/kloss"]
    (row,) = results.select(
        world="puddle_world T 3",
        method="kloss",
        truth="monte_carlo",
        best_by_truth=True,
    )
    rate = np.isclose(group["learning_rates"], row.learning_rate)
    expected = group["mse_monte_carlo"][:, rate][:, 0].mean(axis=(1, 2))
    (line,) = lines_of(figure.subfigs[0].axes[0], "kloss")
    np.testing.assert_allclose(line.get_ydata(), expected, rtol=1e-5)


def lines_of(axes: Axes, method: str, stroke: str = "-") -> list[Line2D]:
    look = COLOURS[method], stroke
    lines = [
        line for line in axes.lines if (line.get_color(), line.get_linestyle()) == look
    ]
    return [line for line in lines if len(line.get_xdata()) > 1]


def best_of(
    name: str, world: str, method: str, curve: str, truth: str = "monte_carlo"
) -> np.ndarray:
    """The curve (T, S) at the learning rate that the rows call the best."""
    results, curves = committed(name)
    (row,) = results.select(world=world, method=method, truth=truth, best_by_truth=True)
    group = curves[f"{world}/{method}"]
    return group[curve][:, np.isclose(group["learning_rates"], row.learning_rate)][:, 0]


def test_puddle_shows_means_at_the_best_rates_and_where_a_seed_diverged() -> None:
    results, curves = committed("figure-puddle")
    lost = dict(curves["puddle_world/fvi"])
    lost["mse_monte_carlo"] = lost["mse_monte_carlo"].copy()
    lost["mse_monte_carlo"][40:, :, 3] = np.nan
    puddle = EXPERIMENTS["figure-puddle"].draw(
        results, {**curves, "puddle_world/fvi": lost}
    )
    panels = puddle.subfigs[-1].axes
    (solid,) = lines_of(panels[0], "fvi")
    np.testing.assert_array_equal(
        np.isfinite(solid.get_ydata()), np.arange(len(lost["epochs"])) < 40
    )
    marks = [line for line in panels[0].lines if line.get_marker() == "X"]
    assert [(line.get_color(), *line.get_xdata()) for line in marks] == [
        (COLOURS["fvi"], lost["epochs"][40])
    ]
    for panel, name in ((0, "mse_monte_carlo"), (1, "bellman_error")):
        expected = best_of("figure-puddle", "puddle_world", "kloss", name).mean(axis=1)
        (line,) = lines_of(panels[panel], "kloss")
        np.testing.assert_allclose(line.get_ydata(), expected, rtol=1e-5)
    paper = best_of("figure-puddle", "puddle_world", "rg", "mse_paper", "paper").mean(
        axis=1
    )
    (dashed,) = lines_of(panels[0], "rg", "--")
    np.testing.assert_allclose(dashed.get_ydata(), paper, rtol=1e-5)


def test_mujoco_shows_interquartile_means() -> None:
    results, curves = committed("figure-mujoco")
    figure = EXPERIMENTS["figure-mujoco"].draw(results, curves)
    panel = next(
        axes
        for axes in figure.axes
        if axes.get_title("left").endswith(") Inverted Pendulum")
    )
    lines = [line for line in panel.lines if len(line.get_xdata()) > 2]
    there = [
        critic for critic in CRITICS if f"InvertedPendulum final/{critic}" in curves
    ]
    assert len(there) >= 4
    for critic, line in zip(there, lines, strict=True):
        values = np.sort(
            curves[f"InvertedPendulum final/{critic}"]["return"].astype(float), axis=0
        )[1:-1]
        np.testing.assert_allclose(line.get_ydata(), values.mean(axis=0))


def test_a_figure_has_two_images_that_are_the_same_every_time() -> None:
    results, curves = committed("figure-toy")
    of_chain: Curves = {key: curves[key] for key in ("chain/td0", "chain/kloss")}
    first, second = (
        images_of(EXPERIMENTS["figure-toy"].draw(results, of_chain)) for _ in range(2)
    )
    assert first.keys() == {"png", "svg"}
    assert first == second


def test_curves_keep_three_digits_and_what_is_no_number(tmp_path: Path) -> None:
    errors = np.array([[1.2345678, -3e-30], [np.nan, np.inf]], dtype=np.float32)
    epochs = np.array([1, 2_000_003])
    path = tmp_path / "figure.curves.h5"
    write_curves({"world/kloss": {"mse": errors, "epochs": epochs}}, path)
    read = read_curves(path)["world/kloss"]
    assert read["mse"].dtype == np.float32
    np.testing.assert_allclose(read["mse"], errors, rtol=2e-3)
    np.testing.assert_array_equal(read["epochs"], epochs)
    write_curves({"world/kloss": read}, path)
    again = read_curves(path)["world/kloss"]["mse"]
    np.testing.assert_array_equal(again, read["mse"])
