"""A table of estimates for a terminal."""

from __future__ import annotations

from pathlib import Path

from koffline.ope.estimators.table import EstimateTable
from koffline.ope.interval import percent
from koffline.report.table import describe_interval, make_console
from koffline.report.words import labelled, promise


def print_estimates(table: EstimateTable, truth: float | None = None, page: Path | None = None) -> None:
    """A line per estimator: estimate, interval and kind, effective sample size; then bounds and warnings."""
    from rich.markup import escape
    from rich.table import Table

    console = make_console()
    drawn = Table(
        title=f"What {escape(table.policy)} is worth (γ = {table.gamma:.10g})", title_justify="left"
    )
    drawn.add_column("estimator", style="bold")
    drawn.add_column("estimate", justify="right")
    drawn.add_column(f"{percent(table.level)} interval", no_wrap=True)
    drawn.add_column("kind")
    drawn.add_column("promise")
    drawn.add_column("ESS", justify="right")
    if truth is not None:
        drawn.add_column("error", justify="right")
    family = None
    for row in table.rows:
        if family not in (None, row.family):
            drawn.add_section()
        family = row.family
        error = (
            [] if truth is None else ["" if row.estimate is None else f"{row.estimate.value - truth:+.3g}"]
        )
        if row.estimate is None:
            drawn.add_row(row.name, "–", "", "", "", "", *error)
            continue
        interval = row.estimate.interval
        size = row.estimate.effective_sample_size
        drawn.add_row(
            row.name + (" !" if row.estimate.warnings else ""),
            f"{row.estimate.value:.4g}",
            "–" if interval is None else f"{interval.low:.4g} … {interval.high:.4g}",
            "" if interval is None else interval.kind,
            "" if interval is None else promise(interval.kind),
            "" if size is None else f"{size:.0f}",
            *error,
        )
    console.print(drawn)
    if truth is not None:
        console.print(f"truth: {truth:.4g}")
    for bound in table.bounds:
        text = describe_interval(bound.interval) if bound.interval is not None else f"none: {bound.reason}"
        console.print(f"[bold]{bound.kind}[/]: {escape(text)}", soft_wrap=True)
    for reason, names in collected_reasons(table):
        verb = "does" if len(names) == 1 else "do"
        console.print(f"[dim]{', '.join(names)} {verb} not apply:[/] {escape(reason)}", soft_wrap=True)
    for warning, names in collected_warnings(table):
        label, text = labelled(warning)
        console.print(f"[yellow]{label} ({', '.join(names)}):[/] {escape(text)}", soft_wrap=True)
    if page is not None:
        console.print(f"report: {escape(str(page))}", soft_wrap=True)


def collected_warnings(table: EstimateTable) -> list[tuple[str, list[str]]]:
    """Each sentence once, with the estimators that it concerns; what concerns all of them first."""
    found: dict[str, list[str]] = {text: ["all"] for text in table.warnings}
    for row in table.rows:
        for text in row.estimate.warnings if row.estimate is not None else ():
            if found.get(text) != ["all"]:
                found.setdefault(text, []).append(row.name)
    for bound in table.bounds:
        if bound.interval is not None and bound.reason is not None and found.get(bound.reason) != ["all"]:
            found.setdefault(bound.reason, []).append(bound.kind)
    return list(found.items())


def collected_reasons(table: EstimateTable) -> list[tuple[str, list[str]]]:
    """Why estimators do not apply: each reason once, with those that it concerns."""
    found: dict[str, list[str]] = {}
    for row in table.rows:
        if row.reason is not None:
            found.setdefault(row.reason, []).append(row.name)
    return list(found.items())
