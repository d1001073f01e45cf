"""The estimate as a table for a terminal."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from koffline.ope.estimate import Estimate
from koffline.ope.interval import Interval, percent
from koffline.report.words import count_of, labelled, promise

if TYPE_CHECKING:
    from rich.console import Console

_WIDTH = 116


def print_estimate(estimate: Estimate, truth: float | None = None, page: Path | None = None) -> None:
    """Value, interval and the diagnostics a person needs; warnings and the report's path at the end."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(emoji=False)
    table = Table(title=f"What {escape(estimate.policy)} is worth", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, text in _rows(estimate, truth):
        table.add_row(name, escape(text))
    console.print(table)
    for label, text in map(labelled, estimate.warnings):
        console.print(f"[yellow]{label}:[/] {escape(text)}", soft_wrap=True)
    if page is not None:
        console.print(f"report: {escape(str(page))}", soft_wrap=True)


def _rows(estimate: Estimate, truth: float | None) -> list[tuple[str, str]]:
    found = estimate.diagnostics
    episodes = f", {count_of(estimate.n_episodes, 'episode')}" if estimate.n_episodes else ", no episodes"
    rows = [
        ("value", f"{estimate.value:.4g}   (expected discounted return, γ = {estimate.gamma:.10g})"),
        ("interval", describe_interval(estimate.interval)),
    ]
    if truth is not None:
        rows.append(("truth", f"{truth:.4g}"))
    if found.get("behavior_return") is not None:
        own, error = found["behavior_return"], found.get("behavior_return_se")
        spread = f" ± {error:.2g}" if error and error > 1e-12 * abs(own) else ""  # no spread beyond rounding
        rows.append(("log's own return", f"{own:.4g}{spread}"))
    heads = ", ".join(f"{name} {value:.4g}" for name, value in found.get("estimates_by_head", {}).items())
    if "training_steps" in found:
        seen = f", on {found['sample_rows']:,} of the rows" if "sample_rows" in found else ""
        rows.append(("training", f"{found['training_steps']:,} steps{seen}"))
    rows += [
        ("estimator", estimate.estimator + (f"   (by head: {heads})" if heads else "")),
        (
            "log",
            f"{estimate.source or 'in memory'}: {count_of(estimate.n_transitions, 'transition')}{episodes}",
        ),
        (
            "coverage",
            f"{found['coverage']:.0%} of the policy's actions lie near logged ones (95 % on-policy)",
        ),
        ("seed, time", f"{estimate.seed}, {estimate.seconds:.1f} s"),
    ]
    return rows


def make_console() -> Console:
    """As wide as the terminal; where there is none, wide enough that no number is broken."""
    from rich.console import Console

    console = Console(emoji=False)
    return console if console.is_terminal else Console(width=max(console.width, _WIDTH), emoji=False)


def describe_interval(interval: Interval | None) -> str:
    """Ends, level and kind."""
    if interval is None:
        return "none; the warnings say why"
    about = f"{percent(interval.level)} {interval.kind}, {promise(interval.kind)}"
    return f"{interval.low:.4g} … {interval.high:.4g}   ({about})"
