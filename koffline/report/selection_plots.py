"""Figures of a ranking: policies with their intervals, differences of pairs, estimates against truths."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from koffline.ope.selection.ranking import PolicyRanking, RankedPolicy
from koffline.report.plots import ACCENT, INK, SOFT, WARM, make_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LONGEST_NAME = 36
_MOST_IN_MATRIX = 15


def plot_ranking(ranking: PolicyRanking) -> Figure:
    """One line per policy, the best on top; those significantly worse than another are pale."""
    policies = ranking.policies

    def draw(axes: Axes) -> None:
        for place, policy in enumerate(policies):
            color = ACCENT if policy.maybe_best else SOFT
            if policy.interval is not None:
                low, high = policy.interval.low, policy.interval.high
                axes.hlines(place, low, high, color=color, lw=5, alpha=0.4)
            axes.plot(policy.value, place, "o", color=color, ms=8)
        _mark(axes, policies, ranking.threshold)
        axes.set_yticks(range(len(policies)), [_label(policy) for policy in policies])
        axes.set_ylim(len(policies) - 0.4, -0.6)
        axes.set_xlabel(f"expected discounted return (γ = {ranking.gamma:.10g})")
        axes.grid(visible=False, axis="y")

    return make_figure(draw, width=7.6, height=1.4 + 0.42 * len(policies))


def plot_differences(ranking: PolicyRanking) -> Figure:
    """Row minus column for the best policies; filled cells are significant after Holm's correction."""
    policies = ranking.policies[:_MOST_IN_MATRIX]
    place = {policy.name: number for number, policy in enumerate(policies)}

    def draw(axes: Axes) -> None:
        from matplotlib.patches import Rectangle

        for comparison in ranking.comparisons:
            if comparison.better not in place or comparison.worse not in place:
                continue
            row, column = place[comparison.better], place[comparison.worse]
            if comparison.significant:
                axes.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, color=ACCENT, alpha=0.22, lw=0))
            weight = "bold" if comparison.significant else "normal"
            text = f"{comparison.difference:+.3g}"
            axes.text(column, row, text, ha="center", va="center", fontsize=8.5, weight=weight, color=INK)
        count = len(policies)
        axes.set_xticks(range(count), [str(policy.rank) for policy in policies])
        axes.set_yticks(range(count), [_label(policy) for policy in policies])
        axes.set_xlim(-0.5, count - 0.5)
        axes.set_ylim(count - 0.5, -0.5)
        axes.grid(visible=False)
        axes.set_xlabel("worth less")
        axes.set_ylabel("worth more")

    return make_figure(draw, width=3.4 + 0.65 * len(policies), height=1.4 + 0.42 * len(policies))


def plot_truths(ranking: PolicyRanking) -> Figure:
    """Estimates with intervals against the true values; on the line they are equal."""
    known = [policy for policy in ranking.policies if policy.truth is not None]

    def draw(axes: Axes) -> None:
        truths = np.array([policy.truth for policy in known], dtype=np.float64)
        ends = np.array([_ends(policy) for policy in known])
        axes.vlines(truths, ends[:, 0], ends[:, 1], color=ACCENT, lw=4, alpha=0.35)
        axes.plot(truths, [policy.value for policy in known], "o", color=ACCENT, ms=7)
        reach = [min(truths.min(), ends.min()), max(truths.max(), ends.max())]
        axes.plot(reach, reach, color=WARM, lw=1.2, ls="--", label="estimate = truth")
        axes.set_xlabel("true value")
        axes.set_ylabel("estimate")
        axes.legend(frameon=False)

    return make_figure(draw)


def short_name(name: str) -> str:
    """Without folders, and without the middle of what is still long."""
    bare = re.sub(r"[^:]*/", "", name) or name
    if len(bare) <= _LONGEST_NAME:
        return bare
    half = _LONGEST_NAME // 2
    return f"{bare[: half - 1]}…{bare[-half:]}"


def _ends(policy: RankedPolicy) -> tuple[float, float]:
    """The interval; the value alone where there is none."""
    interval = policy.interval
    return (policy.value, policy.value) if interval is None else (interval.low, interval.high)


def _label(policy: RankedPolicy) -> str:
    return f"{short_name(policy.name)}  {policy.rank}"


def _mark(axes: Axes, policies: tuple[RankedPolicy, ...], threshold: float | None) -> None:
    """True values and the threshold, where known."""
    truths = [(place, policy.truth) for place, policy in enumerate(policies) if policy.truth is not None]
    if truths:
        places, values = zip(*truths, strict=True)
        axes.plot(values, places, "D", color=WARM, ms=5, label="truth", zorder=3)
    if threshold is not None:
        axes.axvline(threshold, color=INK, lw=1.0, ls=":", label="threshold")
    if truths or threshold is not None:
        axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
