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
_LONGEST_NAME = 36


def report_ranking(ranking: PolicyRanking) -> Report:
    """The report of a ranking."""
    context = {
        "columns": _columns(ranking),
        "rows": [_row(policy, ranking) for policy in ranking.policies],
        "sentences": describe_differences(ranking),
        "quality": None if ranking.metrics is None else describe_metrics(ranking.metrics),
    }
    return Report(MARKER, ranking, partial(_draw, ranking), partial(_show, ranking, context), context)


def _draw(ranking: PolicyRanking) -> dict[str, Figure]:
    return {"ranking": plot_ranking(ranking)}


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


def _columns(ranking: PolicyRanking) -> list[str]:
    best, level = ranking.best.interval, percent(ranking.level)
    columns = ["", "policy", "value", "interval" if best is None else f"{level} {best.kind} interval"]
    columns += ["uplift"] if ranking.best.uplift is not None else []
    columns += [] if ranking.metrics is None else ["truth"]
    return [*columns, "may be best"]


def _row(policy: RankedPolicy, ranking: PolicyRanking) -> list[str]:
    interval = policy.interval
    reach = "–" if interval is None else ends(interval)
    cells = [str(policy.rank), policy.name, number(policy.value), reach]
    cells += [uplift(policy.uplift)] if ranking.best.uplift is not None else []
    cells += [] if ranking.metrics is None else [number(policy.truth)]
    return [*cells, "yes" if policy.maybe_best else "no"]


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
        list_rows(axes, [_label(policy) for policy in policies])

    return make_figure(draw, 7.6, 1.4 + 0.42 * len(policies), xlabel=return_words(ranking))


def short_name(name: str) -> str:
    """Without folders, and without the middle of what is still long."""
    bare = re.sub(r"[^:]*/", "", name) or name
    if len(bare) <= _LONGEST_NAME:
        return bare
    half = _LONGEST_NAME // 2
    return f"{bare[: half - 1]}…{bare[-half:]}"


def _label(policy: RankedPolicy) -> str:
    return f"{short_name(policy.name)}  {policy.rank}"
