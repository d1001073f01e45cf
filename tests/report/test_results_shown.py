"""Every kind of result shows itself: as a text, in one line, in a notebook, as a
figure, a frame and a report.
"""

import json
import pickle
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import polars as pl
import pytest

import koffline
from koffline.data.transitions import Metadata
from koffline.errors import ConfigError, DataError
from koffline.ope.results import SUPPORTED
from koffline.report import _Images
from tests.ope.problems import discrete_log
from tests.refusals import one_line

matplotlib.use("agg")
HOSTILE = "<script>alert('x')</script>\x1b[2J"
QUICK: dict[str, Any] = {
    "gamma": 0.9,
    "steps": 40,
    "full_replicas": 1,
    "resampled_replicas": 3,
    "history": 0,
}
# for the example of a page
QUICKER = ", steps=250, full_replicas=1, resampled_replicas=4"
KINDS = ("estimate", "open", "groups", "table", "ranking", "diagnosis")
WHOLE = tuple(kind for kind in KINDS if kind != "groups")


def half_left(states: np.ndarray) -> np.ndarray:
    return np.tile([0.5, 0.5, 0.0], (len(states), 1))


half_left.__name__ = HOSTILE


def zero(states: np.ndarray, actions: np.ndarray) -> np.ndarray:
    return np.zeros(len(states))


zero.__name__ = HOSTILE


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    """One result of each kind; texts of users in them are hostile."""
    names = Metadata(
        source=HOSTILE,
        extra={
            "feature_names": ["height", "speed"],
            "action_names": ["brake", HOSTILE, "turn"],
        },
    )
    log = discrete_log(400).replace(metadata=names)
    labels = [f"{HOSTILE} {number % 2}" for number in range(log.n_episodes)]
    estimate = koffline.evaluate(
        log, half_left, by={HOSTILE: labels}, estimator="kloss", **QUICK
    )
    two_actions = log.replace(actions=np.arange(len(log)) % 2)
    never_logged = koffline.evaluate(
        two_actions, lambda states: np.full(len(states), 2), estimator="kloss", **QUICK
    )
    return {
        "estimate": estimate,
        "open": never_logged,
        "groups": estimate.groups,
        "table": koffline.estimate_all(
            log, half_left, names=["kloss", "fqe", "is"], **QUICK
        ),
        "ranking": koffline.select_policies(
            log, {HOSTILE: half_left, "uniform": "uniform"}, estimator="kloss", **QUICK
        ),
        "diagnosis": koffline.diagnose(zero, log, "uniform", 0.9),
    }


@pytest.mark.parametrize("kind", KINDS)
def test_repr_is_one_short_line(kind: str, results: dict[str, Any]) -> None:
    text = repr(results[kind])
    assert text.isprintable()
    assert len(text) < 400
    assert text.startswith(type(results[kind]).__name__ + "(")


@pytest.mark.parametrize("kind", ["estimate", "open", "table"])
def test_str_begins_with_the_sentence_of_the_verdict(
    kind: str, results: dict[str, Any]
) -> None:
    result = results[kind]
    lines = str(result).splitlines()
    assert result.verdict.sentence
    assert lines[0] == result.verdict.sentence
    assert lines[1].startswith(result.verdict.answer)


def test_without_an_answer_a_number_is_said_to_be_none(results: dict[str, Any]) -> None:
    result = results["open"]
    assert result.verdict.is_open
    assert result.interval is None
    number = f"{result.value:.4g}"
    line = str(result).splitlines()[1]
    assert f"on which nothing should rest: {number}" in line
    assert number not in repr(result)
    axes = result.plot()
    assert axes.get_xlabel().startswith("no answer: ")
    assert axes.lines[0].get_markerfacecolor() == "none"


def test_str_of_other_kinds_begins_with_their_answer(results: dict[str, Any]) -> None:
    assert str(results["diagnosis"]).startswith("Bellman test: ")
    ranking = results["ranking"]
    assert str(ranking).startswith(ranking.sentences[0])
    assert "1. " in str(ranking)
    groups = results["groups"]
    assert str(groups).splitlines()[0].startswith(groups[0].group)


class Tags(HTMLParser):
    """Names of the elements, and attributes that load or run something."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.loaded: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            is_url = name in ("src", "href", "xlink:href")
            if is_url and not str(value).startswith(("data:image/png;base64,", "#")):
                self.loaded.append(str(value))
            if name.startswith("on"):
                self.loaded.append(name)
        if tag not in ("img", "br", "meta"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize("kind", KINDS)
def test_a_notebook_shows_the_top_of_the_page(
    kind: str, results: dict[str, Any]
) -> None:
    page = results[kind]._repr_html_()
    parser = Tags()
    parser.feed(page)
    assert parser.open == []
    assert parser.tags[0] == "div"
    assert not {"script", "iframe", "link", "html", "body"} & set(parser.tags)
    assert parser.loaded == []
    assert "alert(" not in page or "&lt;script&gt;alert(" in page
    assert "\x1b" not in page
    if kind != "groups":
        assert "img" in parser.tags
    # styles reach nothing else on the page
    for style in re.findall(r"<style>(.*?)</style>", page, flags=re.DOTALL):
        for rule in re.findall(r"([^{}]+)\{", style):
            for selector in rule.split(","):
                assert ".koffline" in selector, selector


@pytest.mark.parametrize("kind", ["estimate", "open", "table"])
def test_a_notebook_shows_the_verdict(kind: str, results: dict[str, Any]) -> None:
    page = results[kind]._repr_html_()
    assert results[kind].verdict.answer.capitalize() in page
    of_file = results[kind].verdict.sentence.split(";")[0]
    assert of_file.replace("'", "&#39;") in page


@pytest.mark.parametrize("kind", KINDS)
def test_plot_returns_axes_with_labels(kind: str, results: dict[str, Any]) -> None:
    from matplotlib import pyplot

    axes = results[kind].plot()
    assert axes.get_xlabel()
    assert axes.figure.canvas.manager is not None  # pyplot's: a notebook shows it
    figure, (left, right) = pyplot.subplots(1, 2)
    assert results[kind].plot(ax=right) is right
    assert right.has_data()
    assert not left.has_data()
    figure.canvas.draw()
    pyplot.close("all")


@pytest.mark.parametrize("kind", KINDS)
def test_to_dict_is_the_json_of_the_commands(
    kind: str, results: dict[str, Any]
) -> None:
    result = results[kind]
    content = result.to_dict()
    assert content == json.loads(json.dumps(content))
    if kind == "groups":
        assert content == results["estimate"].to_dict()["groups"]
    else:
        assert content == json.loads(result.to_json())


ROWS = {"estimate": 1, "open": 1, "groups": 2, "ranking": 2}


@pytest.mark.parametrize("kind", KINDS)
def test_to_frame_of_polars_and_pandas(kind: str, results: dict[str, Any]) -> None:
    pandas = pytest.importorskip("pandas")
    result = results[kind]
    frame = result.to_frame()
    assert isinstance(frame, pl.DataFrame)
    assert frame.height == ROWS.get(kind, frame.height) > 0
    of_pandas = result.to_frame("pandas")
    assert isinstance(of_pandas, pandas.DataFrame)
    assert list(of_pandas.columns) == frame.columns
    for name in ("value", "low", "high"):
        if name in frame.columns:
            assert frame.schema[name] == pl.Float64
            assert of_pandas[name].dtype == np.float64
    with one_line(ConfigError, "frames of 'dask' are not known"):
        result.to_frame("dask")


def test_frames_hold_the_numbers(results: dict[str, Any]) -> None:
    estimate = results["estimate"]
    row = estimate.to_frame().row(0, named=True)
    assert row["value"] == estimate.value
    assert row["low"] == estimate.interval.low
    assert row["verdict"] == estimate.verdict.answer
    groups = estimate.groups.to_frame()
    assert groups["value"].to_list() == [group.value for group in estimate.groups]
    table = results["table"]
    frame = table.to_frame()
    names = frame["estimator"].to_list()
    assert names[: len(table.rows)] == [row.name for row in table]
    assert frame["kind"].to_list()[len(table.rows) :] == [
        bound.kind for bound in table.bounds
    ]
    ranking = results["ranking"].to_frame()
    assert ranking["rank"].to_list() == [1, 2]
    regions = results["diagnosis"].to_frame()
    assert regions["z_score"].to_list() == [
        region.z_score for region in results["diagnosis"].regions
    ]


@pytest.mark.parametrize("kind", WHOLE)
def test_reports_are_folders_or_single_pages(
    kind: str,
    results: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    result = results[kind]
    page = result.report(tmp_path / "runs" / kind)
    assert page == tmp_path / "runs" / kind / "report.html"
    folder = tmp_path / "runs" / kind
    (marker,) = {path for path in folder.glob("*.json") if path.name != "run.json"}
    assert json.loads(marker.read_text()) == json.loads(result.to_json(timing=False))
    assert list((tmp_path / "runs" / kind / "plots").glob("*.png"))
    text = page.read_text(encoding="utf-8")
    assert "<script" not in text
    assert "koffline." in re.findall(r"<p><code>(.*?)</code>", text)[0]
    alone = result.report(str(tmp_path / "page.html"))
    assert alone.read_text(encoding="utf-8") == text
    images = _Images(b"", "<svg></svg>", 1)  # to render them takes most of the time
    monkeypatch.setattr("koffline.report._images", lambda figure: images)
    for path in (tmp_path / "runs" / kind, alone):
        with one_line(DataError, "exists already"):
            result.report(path)
        assert result.report(path, force=True).exists()


def test_a_report_deletes_nothing_of_others(
    results: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with one_line(DataError, "thesis.txt"):
        results["estimate"].report(tmp_path, force=True)
    assert (tmp_path / "thesis.txt").read_text() == "mine"


@pytest.mark.parametrize("kind", KINDS)
def test_results_travel_as_pickles(kind: str, results: dict[str, Any]) -> None:
    travelled = pickle.loads(pickle.dumps(results[kind]))
    assert repr(travelled) == repr(results[kind])
    assert str(travelled) == str(results[kind])


def test_groups_stay_a_tuple(results: dict[str, Any]) -> None:
    groups = results["groups"]
    assert isinstance(groups, tuple)
    assert results["open"].groups == ()
    assert [group.starts for group in groups] == [group.starts for group in [*groups]]


@pytest.mark.parametrize(
    "settings", [QUICKER, pytest.param("", marks=pytest.mark.slow, id="as written")]
)
def test_the_evaluate_page_prints_no_number_that_is_no_answer(settings: str) -> None:
    root = Path(koffline.__file__).parents[1]
    page = (root / "docs" / "evaluate.md").read_text(encoding="utf-8")
    example = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)[0]
    example = example.replace('"datasets/', f'"{root}/datasets/')
    example = example.replace("seed=0", f"seed=0{settings}")
    names: dict[str, Any] = {}
    exec(compile(example, "evaluate.md", "exec"), names)
    assert names["estimate"].verdict.answer == SUPPORTED
