"""A ranking in a terminal and as a folder with a page: places, differences of pairs, estimates and truths."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from koffline.ope.comparisons import SelectionMetrics
from koffline.ope.ranking import PolicyRanking, RankedPolicy
from koffline.ope.results import percent
from koffline.report import Report, print_labelled, print_table
from koffline.report.plots import ACCENT, SOFT, WARM, list_rows, make_figure
from koffline.report.words import ends, number, return_words, uplift

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MARKER = "ranking.json"
_NO_FOLDERS = re.compile(r"[^:]*/(?=.)")  # of the names of policies in the figure


def report_ranking(ranking: PolicyRanking) -> Report:
    """The report of a ranking."""
    rows = [_row(policy, ranking) for policy in ranking.policies]
    context = {
        "columns": list(rows[0]),
        "rows": [list(row.values()) for row in rows],
        "sentences": describe_differences(ranking),
        "quality": None if ranking.metrics is None else describe_metrics(ranking.metrics),
    }
    figures = {"ranking": partial(plot_ranking, ranking)}
    return Report(MARKER, ranking, figures, partial(_show, ranking, context), context)


def _show(ranking: PolicyRanking, context: Mapping[str, Any], console: Any) -> None:
    """Print places, intervals and what differs; the quality of the choice when truths are known; warnings."""
    title, right = f"What the policies are worth (γ = {ranking.gamma:.10g})", ("", "value", "truth")
    print_table(console, title, context["columns"], context["rows"], right=right)
    for line in [*context["sentences"], context["quality"]]:
        if line:
            console.print(line, soft_wrap=True)
    for warning in ranking.warnings:
        print_labelled(console, "warning", warning)
    console.print(ranking.assumptions, soft_wrap=True, style="dim")


def describe_differences(ranking: PolicyRanking) -> list[str]:
    """Two sentences: who may be the best, and how many pairs differ."""
    if not ranking.comparisons:
        return ["Which policies differ was not judged."]
    names = [policy.name for policy in ranking.candidates]
    who = f"only {names[0]}" if len(names) == 1 else f"{len(names)} policies: {', '.join(names)}"
    significant = sum(comparison.significant for comparison in ranking.comparisons)
    risk = percent(1.0 - ranking.level)
    return [
        f"May be the best (nothing is significantly better): {who}.",
        f"{significant} of {len(ranking.comparisons)} pairs differ significantly (any error: {risk}).",
    ]


def describe_metrics(metrics: SelectionMetrics) -> str:
    """The quality of the choice in one line."""
    regrets = (f"@{k} {number(regret)}" for k, regret in enumerate(metrics.regret_at_k, start=1))
    parts = {
        "regret": ", ".join(regrets),
        "relative regret@1": number(metrics.relative_regret_at_1),
        "Spearman": number(metrics.spearman),
        "mean relative error": number(metrics.mean_relative_error),
        "intervals that hold the truth": number(metrics.coverage),
    }
    return "Against the truth: " + "; ".join(f"{name} {value}" for name, value in parts.items()) + "."


def _row(policy: RankedPolicy, ranking: PolicyRanking) -> dict[str, str]:
    """Cells of a policy's line by the heads of their columns, which are the same for all policies."""
    best, interval = ranking.best, policy.interval
    head = "interval" if best.interval is None else f"{percent(ranking.level)} {best.interval.kind} interval"
    cells = {"": str(policy.rank), "policy": policy.name, "value": number(policy.value)}
    cells[head] = "–" if interval is None else ends(interval)
    if best.uplift is not None:
        cells["uplift"] = uplift(policy.uplift)
    if ranking.metrics is not None:
        cells["truth"] = number(policy.truth)
    return {**cells, "may be best": "yes" if policy.maybe_best else "no"}


def plot_ranking(ranking: PolicyRanking) -> Figure:
    """One line per policy, the best on top; those significantly worse than another are pale."""
    policies = ranking.policies

    def draw(axes: Axes) -> None:
        for place, policy in enumerate(policies):
            color = ACCENT if policy.maybe_best else SOFT
            if policy.interval is not None:
                axes.hlines(place, policy.interval.low, policy.interval.high, color=color, lw=5, alpha=0.4)
            axes.plot(policy.value, place, "o", color=color, ms=8)
        truths = [np.nan if policy.truth is None else policy.truth for policy in policies]
        if np.isfinite(truths).any():
            axes.plot(truths, range(len(truths)), "D", color=WARM, ms=5, label="truth", zorder=3)
        if axes.get_legend_handles_labels()[1]:
            axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
        list_rows(axes, [f"{_NO_FOLDERS.sub('', policy.name)}  {policy.rank}" for policy in policies])

    return make_figure(draw, 7.6, 1.4 + 0.42 * len(policies), xlabel=return_words(ranking))
