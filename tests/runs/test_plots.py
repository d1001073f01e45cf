"""plot and plot-all: what is drawn, where it goes, what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from koffline.errors import ConfigError
from koffline.runs.figures import PlotOptions, draw_grid, draw_metrics, short_names
from koffline.runs.metrics import Metric, read_metric
from tests.runs.models import command, refusal, train_run


def metric(values: list[float], path: str = "run/loss.csv", first: int = 1) -> Metric:
    epochs = np.arange(first, first + len(values), dtype=float)
    return Metric(Path(path), epochs, 100 * epochs, np.array(values, dtype=float))


def drawn(*metrics: Metric, **options) -> Figure:
    figure = Figure()
    draw_metrics(figure, metrics, PlotOptions(**options))
    return figure


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_run(tmp_path_factory.mktemp("runs"))


@pytest.fixture
def loss(tmp_path: Path) -> str:
    (tmp_path / "loss.csv").write_text("1,100,3\n2,200,1\n")
    return str(tmp_path / "loss.csv")


def test_lines_are_the_metrics() -> None:
    (axes,) = drawn(metric([3.0, 1.0]), metric([2.0], "other/loss.csv")).axes
    lines = [line for line in axes.lines if not str(line.get_label()).startswith("_")]
    assert [line.get_label() for line in lines] == ["run/loss.csv", "other/loss.csv"]
    np.testing.assert_array_equal(lines[0].get_xydata(), [[1, 3], [2, 1]])
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("epochs", "loss")


def test_options_of_d3rlpy() -> None:
    (axes,) = drawn(
        metric([1.0, 3.0, 8.0]),
        window=2,
        show_steps=True,
        show_max=True,
        labels=("ours",),
        xlim=(0.0, 500.0),
        ylim=(-1.0, 9.0),
        title="Title",
        ylabel="y",
    ).axes
    np.testing.assert_array_equal(axes.lines[0].get_xydata(), [[100, 1], [200, 2], [300, 5.5]])
    assert axes.lines[-1].get_ydata()[0] == 8.0, "the largest value itself, not of the moving average"
    assert (axes.get_xlim(), axes.get_ylim()) == ((0.0, 500.0), (-1.0, 9.0))
    assert axes.get_title(loc="left") == "Title"
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("steps", "y")
    assert axes.get_legend().get_texts()[0].get_text() == "ours"


def test_values_that_stand_alone_are_points() -> None:
    """A line through one row, or through a value between two that are not finite, would not be seen."""
    (axes,) = drawn(metric([1.0, np.nan, 2.0, np.nan, 3.0, 4.0])).axes
    np.testing.assert_array_equal(axes.lines[1].get_xydata(), [[1, 1], [3, 2]])
    assert axes.lines[1].get_marker() == "o"


def test_runs_without_a_finite_value() -> None:
    (axes,) = drawn(metric([np.nan, np.nan, np.nan]), metric([1.0], "b/loss.csv"), show_max=True).axes
    assert axes.get_legend().get_texts()[0].get_text() == "run/loss.csv (no finite value)"
    assert axes.get_xlim()[1] >= 3.0, "the axis shows how far the run went"
    (axes,) = drawn(metric([np.nan]), show_max=True).axes
    assert "no finite value" in [text.get_text() for text in axes.texts]


def test_names_tell_the_paths_apart() -> None:
    assert short_names([Path("runs/a/loss.csv"), Path("runs/b/loss.csv")]) == ("a/loss.csv", "b/loss.csv")
    paths = [Path("1/seed/loss.csv"), Path("2/seed/loss.csv")]
    assert short_names(paths) == ("1/seed/loss.csv", "2/seed/loss.csv")
    assert short_names([Path("loss.csv")]) == ("loss.csv",)


@pytest.mark.parametrize(
    "options", [{"window": 0}, {"xlim": (2.0, 1.0)}, {"ylim": (0.0, float("nan"))}, {"ylim": (1.0, 1.0)}]
)
def test_options_that_make_no_sense(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="give"):
        PlotOptions(**options)


def test_the_grid_has_a_panel_for_each(run: Path) -> None:
    metrics = [read_metric(path) for path in sorted(run.glob("*.csv"))]
    figure = Figure()
    draw_grid(figure, metrics, "All")
    titles = [axes.get_title(loc="left").replace("\n", "") for axes in figure.axes]
    assert titles == [metric.name for metric in metrics]
    assert any(name.endswith("_grad") for name in titles)
    gradients = [axes for axes, name in zip(figure.axes, titles, strict=True) if name.endswith("_grad")]
    assert all(len(axes.collections) == 1 for axes in gradients), "the range around the mean"


def test_plot_writes_a_picture_and_prints_statistics(loss: str, tmp_path: Path) -> None:
    result = command("plot", loss, "--save", str(tmp_path / "plot.png"))
    assert result.exit_code == 0, result.output
    assert "MAX VALUE  : 3" in result.stdout
    assert result.stdout.endswith(f"wrote {tmp_path / 'plot.png'}\n")
    pixels = np.asarray(Image.open(tmp_path / "plot.png").convert("L"))
    assert pixels.shape == (630, 1050)
    assert (pixels < 200).sum() > 1000, "the picture is empty"


def test_plot_all_draws_a_run_of_d3rlpy(run: Path, tmp_path: Path) -> None:
    result = command("plot-all", str(run), "--save", str(tmp_path / "all.svg"), "--title", "A run")
    assert result.exit_code == 0, result.output
    assert "observation_shape=[4]\naction_size=3\nconfig={'type': 'kloss_dqn'" in result.stdout
    assert (tmp_path / "all.svg").read_text().startswith("<?xml")
    assert result.stderr == ""


def test_plot_all_leaves_out_what_cannot_be_drawn(loss: str, tmp_path: Path) -> None:
    (tmp_path / "empty.csv").touch()
    (tmp_path / "params.json").write_text("{")
    result = command("plot-all", str(tmp_path), "--save", str(tmp_path / "all.png"))
    assert result.exit_code == 0, result.output
    assert "left out: " in result.stderr
    assert "empty.csv holds no rows yet" in result.stderr
    assert "params.json cannot be read" in result.stderr
    Path(loss).unlink()
    result = command("plot-all", str(tmp_path), "--save", str(tmp_path / "none.png"))
    assert result.exit_code == 2
    assert "none of the 1 CSV files" in result.stderr
    assert not (tmp_path / "none.png").exists()


def test_stats_prints_d3rlpys_lines(loss: str) -> None:
    result = command("stats", loss)
    assert result.exit_code == 0
    labels = [line.split(":")[0].rstrip() for line in result.stdout.splitlines()]
    wanted = ["FILE NAME", "EPOCH", "TOTAL STEPS", "LAST VALUE", "MAX VALUE", "MIN VALUE", "MEAN VALUE"]
    assert labels == [*wanted, "STD VALUE"]


def test_one_line_for_every_mistake(loss: str, tmp_path: Path) -> None:
    picture = str(tmp_path / "plot.png")
    assert "no such file" in refusal("stats", str(tmp_path / "nothing.csv"))
    assert "2 --label and 1 files" in refusal("plot", loss, "--label", "a", "--label", "b", "--save", picture)
    assert "--window is 0" in refusal("plot", loss, "--window", "0", "--save", picture)
    assert "ending says the format" in refusal("plot", loss, "--save", str(tmp_path / "plot.csv"))
    assert "does not exist; create it" in refusal("plot", loss, "--save", str(tmp_path / "no" / "plot.png"))
    assert "Missing argument" in refusal("plot", "--save", picture)
    assert "no such folder" in refusal("plot-all", str(tmp_path / "nothing"), "--save", picture)
    assert not Path(picture).exists()


def test_without_a_display_the_line_names_save(loss: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import matplotlib.pyplot as pyplot

    monkeypatch.setattr(pyplot, "get_backend", lambda: "agg")
    assert "no display to show the plot on; give --save plot.png" in refusal("plot", loss)
    assert "no display" in refusal("plot-all", str(Path(loss).parent))


def test_with_a_display_the_plot_is_shown(loss: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import matplotlib.pyplot as pyplot

    shown = []
    monkeypatch.setattr(pyplot, "get_backend", lambda: "tkagg")
    monkeypatch.setattr(pyplot, "show", lambda: shown.extend(pyplot.get_fignums()))
    result = command("plot", loss)
    pyplot.close("all")
    assert result.exit_code == 0, result.output
    assert len(shown) == 1
    assert "wrote" not in result.stdout


def test_a_picture_that_cannot_be_written_leaves_the_old_one(
    loss: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    picture = tmp_path / "plot.png"
    picture.write_bytes(b"old")
    monkeypatch.setattr(Figure, "savefig", fail)
    assert "No space left" in refusal("plot", loss, "--save", str(picture))
    assert picture.read_bytes() == b"old"
