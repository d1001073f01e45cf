"""Tables and figures of the committed results, and of what they do not hold: divergence, single seeds."""

from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from PIL import Image

from koffline.experiments.reproduce import EXPERIMENTS, table_text
from koffline.experiments.results import Curves
from koffline.experiments.statistics import mean_over_seeds
from koffline.experiments.style import COLOURS, band_over_seeds, save_figure
from tests.experiments.committed import FOLDER, committed


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_committed_tables_are_those_of_the_committed_numbers(name: str) -> None:
    assert table_text(committed(name)[0]) == (FOLDER / f"{name}.md").read_text(encoding="utf-8")


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
        assert picture.width >= 1600
    assert dict(mpl.rcParams) == before


def test_bands_agree_with_the_tables() -> None:
    values = np.array([[1.0, 2.0, 4.0], [3.0, np.nan, 5.0], [np.nan] * 3])
    band, interval = band_over_seeds(values), mean_over_seeds(values[0])
    assert [float(part[0]) for part in band] == pytest.approx(list(interval))
    assert np.isnan([part[1:] for part in band]).all()
