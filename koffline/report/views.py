"""The views of results in a Python session: axes, a report, the top of a page."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from koffline import display
from koffline.figures import drawing
from koffline.improvement.outcome import Improvement
from koffline.ope.diagnosis import Diagnosis
from koffline.ope.groups import GroupValues
from koffline.ope.ranking import PolicyRanking
from koffline.ope.results import Estimate, EstimateTable, plain
from koffline.report import Report, plots, words
from koffline.report.diagnosis import report_diagnosis
from koffline.report.estimates import (
    draw_groups,
    report_estimate,
    report_estimates,
    report_ranking,
)
from koffline.report.improvement import report_improvement
from koffline.store.run_record import now, start_run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Result: TypeAlias = Estimate | EstimateTable | PolicyRanking | Diagnosis | Improvement
_PAGES = (".html", ".htm")


def report_of(result: Result) -> Report:
    """The report of a result that was made in Python."""
    if isinstance(result, Estimate):
        report = report_estimate(result)
        call = "koffline.evaluate(log, policy, …)"
    elif isinstance(result, EstimateTable):
        report = report_estimates(result)
        call = "koffline.estimate_all(log, policy, …)"
    elif isinstance(result, PolicyRanking):
        report = report_ranking(result)
        call = "koffline.select_policies(log, policies, …)"
    elif isinstance(result, Improvement):
        report = report_improvement(result)
        call = "koffline.improve(log, …)"
    else:
        assert isinstance(result, Diagnosis), type(result)
        report = report_diagnosis(result)
        call = "koffline.diagnose(value_function, log, policy, …)"
    return replace(report, call=f"{call}  # with these settings:")


def plot(result: Result | GroupValues, ax: Axes | None) -> Axes:
    """Draw the figure at the top of a result's report; new axes are those of pyplot.

    pyplot belongs to the session, with its own backend and settings; ours apply while
    we draw.
    """
    if isinstance(result, GroupValues):
        drawn = draw_groups(result)
    else:
        drawn = report_of(result).drawing()
    if ax is not None:
        with drawing(plots.STYLE):
            drawn.on(ax)
        return ax
    from matplotlib import pyplot

    with drawing(plots.STYLE):
        size = (drawn.width, drawn.height)
        _, ax = pyplot.subplots(figsize=size, layout="constrained")
        drawn.on(ax)
    return ax


def write(result: Result, path: str | Path, force: bool) -> Path:
    """Write a result's report as a folder, or as one page if the path ends in .html;
    return the path of the page. Raises DataError.
    """
    report = report_of(result)
    out = Path(os.path.expanduser(path))
    if is_page(out):
        return report.write_page(out, force)
    run = start_run(report.marker.removesuffix(".json"))
    run |= {
        "seed": result.seed,
        "settings": plain(result.settings),
        "seconds": round(result.seconds, 3),
        "finished": now(),
    }
    return report.write(out, force, run)


def is_page(path: str | Path) -> bool:
    """Whether a report goes to a page alone, not to a folder: the path ends in .html."""
    return Path(path).suffix.lower() in _PAGES


def html(result: Result | GroupValues) -> str:
    """The top of a result's page; of groups their table."""
    # the session's own settings of matplotlib, and its backend, stay as they are
    import matplotlib  # noqa: F401

    if isinstance(result, GroupValues):
        columns = ("group", "start states", "value", "interval, all groups together")
        rows = words.cells_of_groups(result)
        return display.html_box(display.html_table("Values by group", columns, rows))
    return report_of(result).top()
