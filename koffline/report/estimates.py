"""One estimate, and the table of every estimator's: in a terminal, and as a folder with a page."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from koffline.ope.estimate import Estimate
from koffline.ope.estimators.table import EstimateTable
from koffline.ope.interval import percent
from koffline.report.interval_plots import plot_estimate, plot_forest, plot_norm_sensitivity
from koffline.report.page import write_page
from koffline.report.plots import ACCENT, WARM, plot_coverage, plot_curves, plot_histogram, plot_residuals
from koffline.report.table import (
    describe_interval,
    describe_log,
    labelled,
    make_console,
    make_table,
    print_end,
    print_labelled,
    print_record,
    promise,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ESTIMATE, ESTIMATES = "estimate.json", "estimates.json"


def write_estimate(
    estimate: Estimate,
    out: Path,
    truth: float | None,
    command: str,
    force: bool = False,
    run: Mapping[str, Any] | None = None,
) -> Path:
    """The folder of one estimate, see `write_page`."""
    evidence = estimate.evidence

    def draw() -> dict[str, Figure]:
        figures = {"estimate": plot_estimate(estimate, truth)}
        if estimate.sensitivity is not None:
            figures["sensitivity"] = plot_norm_sensitivity(estimate.sensitivity, truth)
        if evidence is None:
            return figures
        levels = [("final estimate", estimate.value, ACCENT)]
        levels += [] if truth is None else [("truth", truth, WARM)]
        starts = "V(s) of an initial state", "initial states"
        return {
            **figures,
            "values": plot_curves(evidence, evidence.values, "estimate of the value", levels),
            "objective": plot_curves(evidence, evidence.objective, "mini-batch objective"),
            "residuals": plot_residuals(evidence.residuals),
            "initial_values": plot_histogram(
                evidence.initial_values, estimate.value, "mean = the estimate", *starts, bins=40
            ),
            "coverage": plot_coverage(
                evidence.action_support, evidence.support_weights, evidence.support_label
            ),
        }

    return write_page(ESTIMATE, estimate, draw, out, force, run, truth=truth, command=command)


def print_estimate(estimate: Estimate, truth: float | None = None, page: Path | None = None) -> None:
    """Value, interval and the diagnostics a person needs; warnings and the report's path at the end."""
    found = estimate.diagnostics
    value = f"{estimate.value:.4g}   (expected discounted return, γ = {estimate.gamma:.10g})"
    rows = [("value", value), ("interval", describe_interval(estimate.interval))]
    if truth is not None:
        rows.append(("truth", f"{truth:.4g}"))
    if found.get("behavior_return") is not None:
        own, error = found["behavior_return"], found.get("behavior_return_se")
        spread = f" ± {error:.2g}" if error and error > 1e-12 * abs(own) else ""  # no spread beyond rounding
        rows.append(("log's own return", f"{own:.4g}{spread}"))
    if "training_steps" in found:
        seen = f", on {found['sample_rows']:,} of the rows" if "sample_rows" in found else ""
        rows.append(("training", f"{found['training_steps']:,} steps{seen}"))
    heads = ", ".join(f"{name} {value:.4g}" for name, value in found.get("estimates_by_head", {}).items())
    rows += [
        ("estimator", estimate.estimator + (f"   (by head: {heads})" if heads else "")),
        ("log", describe_log(estimate)),
        (
            "coverage",
            f"{found['coverage']:.0%} of the policy's actions lie near logged ones (95 % on-policy)",
        ),
        ("seed, time", f"{estimate.seed}, {estimate.seconds:.1f} s"),
    ]
    console = make_console()
    print_record(console, f"What {estimate.policy} is worth", rows)
    print_end(console, estimate.warnings, page)


def write_estimates(
    table: EstimateTable,
    out: Path,
    truth: float | None,
    command: str,
    force: bool = False,
    run: Mapping[str, Any] | None = None,
) -> Path:
    """The folder of every estimator's answer, see `write_page`."""

    def draw() -> dict[str, Figure]:
        figures = {"forest": plot_forest(table, truth)}
        if table.sensitivity is not None:
            figures["sensitivity"] = plot_norm_sensitivity(table.sensitivity, truth)
        return figures

    warnings = [f"{', '.join(names)}: {text}" for text, names in collected_warnings(table).items()]
    reasons = collected_reasons(table).items()
    context = {"truth": truth, "command": command, "warnings": warnings, "reasons": reasons}
    return write_page(ESTIMATES, table, draw, out, force, run, **context)


def print_estimates(table: EstimateTable, truth: float | None = None, page: Path | None = None) -> None:
    """A line per estimator: estimate, interval and kind, effective sample size; then bounds and warnings."""
    console = make_console()
    drawn = make_table(f"What {table.policy} is worth (γ = {table.gamma:.10g})")
    drawn.add_column("estimator", style="bold")
    drawn.add_column("estimate", justify="right")
    drawn.add_column(f"{percent(table.level)} interval", no_wrap=True)
    drawn.add_column("kind")
    drawn.add_column("promise")
    drawn.add_column("ESS", justify="right")
    if truth is not None:
        drawn.add_column("error", justify="right")
    for number, row in enumerate(table.rows):
        last = number + 1 == len(table.rows) or table.rows[number + 1].family != row.family
        if row.estimate is None:
            drawn.add_row(row.name, "–", end_section=last)
            continue
        interval, size = row.estimate.interval, row.estimate.effective_sample_size
        ends = ("–", "", "")
        if interval is not None:
            ends = (f"{interval.low:.4g} … {interval.high:.4g}", interval.kind, promise(interval.kind))
        drawn.add_row(
            row.name + (" !" if row.estimate.warnings else ""),
            f"{row.estimate.value:.4g}",
            *ends,
            "" if size is None else f"{size:.0f}",
            *([] if truth is None else [f"{row.estimate.value - truth:+.3g}"]),
            end_section=last,
        )
    console.print(drawn)
    if truth is not None:
        console.print(f"truth: {truth:.4g}")
    for bound in table.bounds:
        text = describe_interval(bound.interval) if bound.interval is not None else f"none: {bound.reason}"
        print_labelled(console, bound.kind, text, "bold")
    for reason, names in collected_reasons(table).items():
        verb = "does" if len(names) == 1 else "do"
        print_labelled(console, f"{', '.join(names)} {verb} not apply", reason, "dim")
    for warning, names in collected_warnings(table).items():
        label, text = labelled(warning)
        print_labelled(console, f"{label} ({', '.join(names)})", text)
    print_end(console, (), page)


def collected_warnings(table: EstimateTable) -> dict[str, list[str]]:
    """Each sentence once, with the estimators that it concerns; what concerns all of them first."""
    found: dict[str, list[str]] = {text: ["all"] for text in table.warnings}
    own = [(row.name, text) for row in table.rows if row.estimate for text in row.estimate.warnings]
    own += [(bound.kind, bound.reason) for bound in table.bounds if bound.interval and bound.reason]
    for name, text in own:
        if text not in table.warnings:
            found.setdefault(text, []).append(name)
    return found


def collected_reasons(table: EstimateTable) -> dict[str, list[str]]:
    """Why estimators do not apply: each reason once, with those that it concerns."""
    found: dict[str, list[str]] = {}
    for row in table.rows:
        if row.reason is not None:
            found.setdefault(row.reason, []).append(row.name)
    return found
