"""Figures whatever settings lie about: results are there, names are plain text, a
failure is one warning.
"""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import matplotlib.figure
import numpy as np
import pytest

from koffline import figures
from koffline.data.sources import write_transitions
from koffline.ope.results import Interval
from koffline.policies import save_mlp_policy
from koffline.report import plots
from tests.ope.problems import discrete_log
from tests.refusals import run_cli

KOFFLINE = str(Path(sys.executable).with_name("koffline"))
SETTINGS = (
    "--gamma",
    "0.9",
    "--set",
    "steps=5",
    "--set",
    "resampled_replicas=2",
    "--quiet",
    "--out",
    "out",
)
EVALUATE = (
    "evaluate",
    "log.hdf5",
    "--policy",
    "uniform",
    "--estimator",
    "is",
    *SETTINGS,
)
SELECT = (
    "select",
    "log.hdf5",
    "--policies",
    "./$^$.npz",
    "./$x_$.npz",
    "./動\\frac{.npz",
    *SETTINGS,
)
PLOT = (
    "d3rlpy",
    "plot",
    "numbers.csv",
    "--save",
    "out.png",
    "--title",
    "$^$",
    "--label",
    r"$\frac{$",
)
COMMANDS = {"evaluate": EVALUATE, "select": SELECT, "plot": PLOT}
RC = {
    "no text": b"\xff\xfe\x00",
    "usetex": b"text.usetex: True\n",
    "no such backend": b"backend: junk\n",
    "nonsense": b"figure.dpi: many\nno colon\n",
    "huge figures": (
        b"savefig.dpi: 1e9\nsavefig.bbox: tight\naxes.formatter.use_mathtext: True\n"
    ),
    "LaTeX to come": (
        b"text.latex.preamble: \\input{/etc/passwd}\ntext.usetex: True\nfont.family:"
        b" serif\n"
    ),
}
OFTEN = ("no text", "usetex")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_transitions(discrete_log(120, 20), tmp_path / "log.hdf5")
    layers = [(np.ones((discrete_log(120, 20).observation_shape[0], 3)), np.zeros(3))]
    for name in ("$^$.npz", "$x_$.npz", "動\\frac{.npz"):
        save_mlp_policy(tmp_path / name, layers, "softmax")
    Path("numbers.csv").write_text("1,10,0.5\n2,20,0.25\n")
    return tmp_path


def check_result(folder: Path, words: tuple[str, ...]) -> None:
    if words is PLOT:
        assert (folder / "out.png").stat().st_size > 1000
        return
    assert list((folder / "out" / "plots").glob("*.png"))
    page = (folder / "out" / "report.html").read_text(encoding="utf-8")
    assert "<svg" in page
    json.loads((folder / "out" / "run.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_names_are_no_formulas(folder, words):
    done = run_cli(*words)
    assert done.exit_code == 0, done.output
    assert "not drawn" not in done.stderr
    check_result(folder, words)


@pytest.fixture(scope="module")
def images_of_defaults(tmp_path_factory):
    """The figures that a process of its own makes where no settings lie about."""
    folder = tmp_path_factory.mktemp("defaults")
    write_transitions(discrete_log(120, 20), folder / "log.hdf5")
    done = run(EVALUATE, cwd=folder)
    assert done.returncode == 0, done.stderr
    return images_in(folder)


def images_in(folder):
    plots = (folder / "out" / "plots").iterdir()
    return {path.name: path.read_bytes() for path in plots}


def run(words, cwd=None, **environment):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(
        [KOFFLINE, *words],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(content, marks=() if name in OFTEN else pytest.mark.slow)
        for name, content in RC.items()
    ],
    ids=RC,
)
def test_no_settings_of_the_current_folder_reach_a_figure(
    folder, content, images_of_defaults
):
    Path("matplotlibrc").write_bytes(content)
    done = run(EVALUATE, MPLBACKEND="junk")
    assert (done.returncode, done.stderr) == (0, "")
    assert images_in(folder) == images_of_defaults
    plot = run(PLOT, MPLBACKEND="junk")
    assert plot.returncode == 0, plot.stderr
    check_result(folder, PLOT)


@pytest.mark.parametrize("words", [EVALUATE, SELECT], ids=["evaluate", "select"])
def test_a_figure_that_fails_is_one_warning(folder, words, monkeypatch, caplog):
    def fail(*arguments, **options):
        raise RuntimeError("the font\nis broken")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", fail)
    with caplog.at_level(logging.WARNING):
        done = run_cli(*words)
    assert done.exit_code == 0, done.output
    name = "ranking" if words is SELECT else "estimate"
    expected = (
        f"the figure {name} was not drawn (RuntimeError: the font is broken); the"
        " results are complete"
    )
    assert [record.getMessage() for record in caplog.records].count(expected) == 1
    assert (folder / "out" / "report.html").exists()
    assert (folder / "out" / f"{name}.json").exists()
    assert list((folder / "out" / "plots").iterdir()) == []


def test_results_are_printed_also_where_they_cannot_be_written(folder, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("koffline.store.files.flush_to_disk", full)
    done = run_cli(*EVALUATE, "--json")
    assert done.exit_code == 2
    assert "No space left on device" in done.stderr
    assert json.loads(done.stdout)["estimator"] == "is"
    assert not (folder / "out").exists()


def test_a_learning_curve_that_fails_loses_no_run(folder, monkeypatch, caplog):
    monkeypatch.setattr(
        "matplotlib.figure.Figure.savefig",
        lambda *_, **__: (_ for _ in ()).throw(ValueError("no font")),
    )
    words = (
        "online",
        "--set",
        "env=Pendulum-v1",
        "--set",
        "steps=300",
        "--seeds",
        "1",
        "--out",
        "run",
    )
    done = run_cli(*words, "--quiet")
    assert done.exit_code == 0, done.output
    assert "learning_curve was not drawn" in caplog.text
    assert json.loads(Path("run/run.json").read_text())["finished"]
    assert not Path("run/learning_curve.png").exists()


def test_settings_of_a_program_are_left_as_they_were():
    import matplotlib

    with matplotlib.rc_context({"text.usetex": True, "font.size": 33.0}):
        before = dict(matplotlib.rcParams.copy())
        with figures.drawing({"text.parse_math": False}):
            assert not matplotlib.rcParams["text.usetex"]
            assert matplotlib.rcParams["font.size"] == 10.0
            assert not matplotlib.rcParams["text.parse_math"]
        assert dict(matplotlib.rcParams.copy()) == before


@pytest.mark.parametrize(("whole", "is_shown"), [(1, False), (2, True)])
def test_the_first_intervals_are_shown_whole(whole: int, is_shown: bool) -> None:
    ends = [(1.0, 2.0), (-60.0, 60.0), (1.0, 2.0), (0.5, 2.0)]
    lines = []
    for low, high in ends:
        interval = Interval(low, high, 0.95, "bootstrap")
        lines.append(plots.Line("name", 1.5, interval))
    axes = matplotlib.figure.Figure().add_subplot()
    plots.draw_intervals(lines, "return", whole=whole).draw(axes)
    left, right = axes.get_xlim()
    assert (left < -60.0 and right > 60.0) == is_shown
    assert left < 0.5
