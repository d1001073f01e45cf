"""stats, plot and plot-all: metrics in whatever state a run has left them, drawn, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from koffline.algos.loggers import quiet
from koffline.figures import moving_average
from tests.algos.makers import d3rlpy, fit, make, make_buffer
from tests.runs.models import command, refusal


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of d3rlpy's own logger: parameters, metrics, gradients, models."""
    folder = tmp_path_factory.mktemp("runs")
    files = d3rlpy.logging.FileAdapterFactory(str(folder))
    options = {"n_steps_per_epoch": 2, "experiment_name": "run", "with_timestamp": False}
    with quiet():
        fit(make("KLossDQN"), make_buffer("KLossDQN"), steps=4, logger_adapter=files, **options)
    return folder / "run"


@pytest.fixture
def loss(tmp_path: Path) -> str:
    (tmp_path / "loss.csv").write_text("1,100,3\n2,200,1\n")
    return str(tmp_path / "loss.csv")


def test_statistics_by_hand(loss: str) -> None:
    """The last line is being written."""
    Path(loss).write_text("1,100,1\n2,200,nan\n\n3,300,5\n4,1000000000,inf\n5,1000000")
    result = command("stats", loss)
    assert result.exit_code == 0
    assert result.stdout.splitlines()[1:] == [
        "EPOCH      : 4",
        "TOTAL STEPS: 1000000000",
        "LAST VALUE : inf",
        "MAX VALUE  : 5",
        "MIN VALUE  : 1",
        "MEAN VALUE : 3",
        "STD VALUE  : 2",
        "NOT FINITE : 2 of 4 values, left out above",
    ]


@given(st.lists(st.floats(-100, 100) | st.just(np.nan) | st.just(np.inf), min_size=1), st.integers(1, 9))
def test_moving_average_is_the_mean_of_the_window(values: list[float], window: int) -> None:
    found = moving_average(np.array(values), window)
    for row, value in enumerate(values):
        recent = [v for v in values[max(0, row - window + 1) : row + 1] if np.isfinite(v)]
        wanted = np.mean(recent) if np.isfinite(value) else np.nan
        np.testing.assert_allclose(found[row], wanted, rtol=1e-12, atol=1e-12)


def test_plot_writes_a_picture_and_prints_statistics(loss: str, tmp_path: Path) -> None:
    result = command("plot", loss, "--save", str(tmp_path / "plot.png"))
    assert result.exit_code == 0, result.output
    assert "MAX VALUE  : 3" in result.stdout
    assert result.stdout.endswith(f"wrote {tmp_path / 'plot.png'}\n")
    pixels = np.asarray(Image.open(tmp_path / "plot.png").convert("L"))
    assert pixels.shape == (630, 1050)
    assert (pixels < 200).sum() > 1000, "the picture is empty"


def test_plot_all_draws_a_run_of_d3rlpy_and_leaves_out_what_it_cannot(run: Path, tmp_path: Path) -> None:
    result = command("plot-all", str(run), "--save", str(tmp_path / "all.svg"), "--title", "A run")
    assert result.exit_code == 0, result.output
    assert "observation_shape=[4]\naction_size=3\nconfig={'type': 'kloss_dqn'" in result.stdout
    assert (tmp_path / "all.svg").read_text().startswith("<?xml")
    assert result.stderr == ""
    (tmp_path / "empty.csv").touch()
    (tmp_path / "loss.csv").write_text("1,100,3\n")
    (tmp_path / "params.json").write_text("{")
    result = command("plot-all", str(tmp_path), "--save", str(tmp_path / "all.png"))
    assert result.exit_code == 0, result.output
    assert "empty.csv holds no rows yet" in result.stderr
    assert "params.json cannot be read" in result.stderr
    (tmp_path / "loss.csv").unlink()
    assert "none of the 1 CSV files" in command("plot-all", str(tmp_path), "--save", "none.png").stderr


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds no rows yet"),
        (b"1,100,0.5\nhello\n3,300,0.5\n", "not 3 numbers"),
        (b"\x80\x04\x95\xff", "it is no text"),
    ],
)
def test_other_files_are_refused(loss: str, content: bytes, message: str) -> None:
    Path(loss).write_bytes(content)
    assert message in refusal("stats", loss)


def test_one_line_for_every_mistake(loss: str, tmp_path: Path) -> None:
    picture = str(tmp_path / "plot.png")
    assert "No such file" in refusal("stats", str(tmp_path / "nothing.csv"))
    assert "'--window': 0 is not" in refusal("plot", loss, "--window", "0", "--save", picture)
    assert "ending says the format" in refusal("plot", loss, "--save", str(tmp_path / "plot.csv"))
    assert "is no folder with metrics" in refusal("plot-all", str(tmp_path / "no"), "--save", picture)
    assert not Path(picture).exists()
