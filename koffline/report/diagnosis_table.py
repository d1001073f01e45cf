"""A diagnosis as tables for a terminal."""

from __future__ import annotations

from pathlib import Path

from koffline.ope.diagnose.diagnosis import Diagnosis
from koffline.ope.diagnose.findings import Z_NOTE, describe_action, describe_place
from koffline.report.words import labelled, number


def print_diagnosis(diagnosis: Diagnosis, page: Path | None = None) -> None:
    """Test, kernel loss, coverage, places of the largest error; findings, warnings and the report's path."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console, test = Console(emoji=False), diagnosis.test
    title = f"Is {escape(test.value_function)} the value function of {escape(test.policy)}?"
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, text in _rows(diagnosis):
        table.add_row(name, escape(text))
    console.print(table)
    if diagnosis.regions:
        places = Table(title="Where residuals of one sign gather", title_justify="left")
        for column in ("state", "action", "rows", "mean residual", "z", "beyond chance"):
            places.add_column(column)
        for region in diagnosis.regions:
            places.add_row(
                escape(describe_place(region.center)),
                escape(describe_action(region.action).removeprefix("action ") or "–"),
                f"{region.size:,}",
                f"{region.mean_residual:+.3g} ± {region.standard_error:.2g}",
                f"{region.z_score:+.1f}",
                "yes" if region.is_significant else "no",
            )
        console.print(places)
        console.print(Z_NOTE, soft_wrap=True, style="dim")
    for sentence in diagnosis.findings:
        console.print(escape(sentence), soft_wrap=True)
    if diagnosis.shown:
        console.print(escape(diagnosis.shown), soft_wrap=True, style="dim")
    for label, text in map(labelled, diagnosis.warnings):
        console.print(f"[yellow]{label}:[/] {escape(text)}", soft_wrap=True)
    if page is not None:
        console.print(f"report: {escape(str(page))}", soft_wrap=True)


def _rows(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    test = diagnosis.test
    verdict = "rejected" if test.rejects else "not rejected"
    fresh = {True: "yes", False: "no", None: "unknown"}[test.held_out]
    own = diagnosis.behavior_return
    episodes = f", {diagnosis.n_episodes:,} episodes" if diagnosis.n_episodes else ", no episodes"
    rows = [
        ("test", f"{verdict}   (p = {number(test.p_value)}, {test.method}, level {test.level:g})"),
        ("power", f"{number(test.power)} against {test.alternative_name}"),
        ("found with 80 %", f"an error of {number(test.detectable)} everywhere"),
        (
            "kernel loss",
            f"{number(diagnosis.kernel_loss)}   ({number(diagnosis.kernel_ratio)} × noise alone)",
        ),
        ("coverage", f"{diagnosis.coverage.fraction:.0%} of the policy's actions lie near logged ones"),
        ("value", f"{number(diagnosis.value)} by this model   (γ = {test.gamma:.10g})"),
    ]
    if own is not None:
        rows.append(("log's own return", number(own)))
    source = diagnosis.source or "in memory"
    rows += [
        ("rows held out", fresh),
        ("log", f"{source}: {diagnosis.n_transitions:,} transitions{episodes}"),
        ("seed, time", f"{diagnosis.seed}, {diagnosis.seconds:.1f} s"),
    ]
    return rows
