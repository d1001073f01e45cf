"""A ranking as tables for a terminal."""

from __future__ import annotations

from pathlib import Path

from koffline.ope.interval import percent
from koffline.ope.selection.metrics import SelectionMetrics
from koffline.ope.selection.ranking import PolicyRanking, RankedPolicy
from koffline.report.table import make_console
from koffline.report.words import labelled, number


def print_ranking(ranking: PolicyRanking, page: Path | None = None) -> None:
    """Places, intervals and what differs; the quality of the choice when truths are known; warnings."""
    from rich.markup import escape
    from rich.table import Table

    console = make_console()
    table = Table(title=f"What the policies are worth (γ = {ranking.gamma:.10g})", title_justify="left")
    for title, text in _columns(ranking):
        table.add_column(title, justify="left" if text else "right", overflow="fold")
    for policy in ranking.policies:
        table.add_row(*(escape(cell) for cell in _row(policy, ranking)))
    console.print(table)
    for line in describe_differences(ranking):
        console.print(escape(line), soft_wrap=True)
    if ranking.metrics is not None:
        console.print(escape(describe_metrics(ranking.metrics)), soft_wrap=True)
    for label, warning in map(labelled, ranking.warnings):
        console.print(f"[yellow]{label}:[/] {escape(warning)}", soft_wrap=True)
    console.print(escape(ranking.assumptions), soft_wrap=True, style="dim")
    if page is not None:
        console.print(f"report: {escape(str(page))}", soft_wrap=True)


def describe_differences(ranking: PolicyRanking) -> list[str]:
    """Two sentences: who may be the best, and how many pairs differ."""
    if not ranking.comparisons:
        return ["Which policies differ was not judged."]
    significant = [comparison for comparison in ranking.comparisons if comparison.significant]
    names = ", ".join(policy.name for policy in ranking.candidates)
    count = len(ranking.candidates)
    who = f"only {names}" if count == 1 else f"{count} policies: {names}"
    risk = percent(1.0 - ranking.level)
    return [
        f"May be the best (nothing is significantly better): {who}.",
        f"{len(significant)} of {len(ranking.comparisons)} pairs differ significantly (any error: {risk}).",
    ]


def describe_metrics(metrics: SelectionMetrics) -> str:
    """The quality of the choice in one line."""
    regrets = ", ".join(f"@{k} {number(regret)}" for k, regret in enumerate(metrics.regret_at_k, start=1))
    parts = [
        f"regret {regrets}",
        f"relative regret@1 {number(metrics.relative_regret_at_1)}",
        f"Spearman {number(metrics.spearman)}",
        f"Kendall {number(metrics.kendall)}",
        f"mean relative error {number(metrics.mean_relative_error)}",
        f"intervals that hold the truth {number(metrics.coverage)}",
    ]
    if metrics.type_errors is not None:
        errors = metrics.type_errors
        parts.append(
            f"false accepts {number(errors.false_accepts)}, false rejects {number(errors.false_rejects)} "
            f"at {number(errors.threshold)}"
        )
    return "Against the truth: " + "; ".join(parts) + "."


def _columns(ranking: PolicyRanking) -> list[tuple[str, bool]]:
    """Titles, and whether the column holds words."""
    best = ranking.best.interval
    interval = "interval" if best is None else f"{percent(ranking.level)} {best.kind} interval"
    found = [("", False), ("policy", True), ("value", False), (interval, True)]
    if ranking.metrics is not None:
        found.append(("truth", False))
    if ranking.threshold is not None:
        found.append((f"above {ranking.threshold:g}", True))
    return [*found, ("may be best", True)]


def _row(policy: RankedPolicy, ranking: PolicyRanking) -> list[str]:
    interval = policy.interval
    cells = [
        str(policy.rank),
        policy.name,
        number(policy.value),
        "–" if interval is None else f"{number(interval.low)} … {number(interval.high)}",
    ]
    if ranking.metrics is not None:
        cells.append(number(policy.truth))
    if ranking.threshold is not None:
        cells.append({True: "yes", False: "no", None: "unclear"}[policy.above_threshold])
    return [*cells, "yes" if policy.maybe_best else "no"]
