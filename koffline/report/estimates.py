"""One estimate, and the table of every estimator's: in a terminal, and as a folder with a page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from koffline.ope.names import OVER_EPISODES
from koffline.ope.results import Estimate, EstimateTable, describe_coverage, percent
from koffline.report import page as pages
from koffline.report import plots, words
from koffline.report.page import write_page
from koffline.report.plots import plot_estimate, plot_forest

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ESTIMATE, ESTIMATES = "estimate.json", "estimates.json"


def write_estimate(found: Estimate, out: Path, truth: float | None, force: bool, run: Any) -> Path:
    """The folder of one estimate, see `write_page`."""

    def draw() -> dict[str, Figure]:
        figures = {"estimate": plot_estimate(found, truth)}
        seen = found.evidence
        if seen is None:
            return figures
        levels = [("final estimate", found.value, plots.ACCENT)]
        levels += [] if truth is None else [("truth", truth, plots.WARM)]
        starts, mean = "V(s) of an initial state", "mean = the estimate"
        figures["values"] = plots.plot_curves(seen, seen.values, "estimate of the value", levels)
        figures["objective"] = plots.plot_curves(seen, seen.objective, "mini-batch objective")
        figures["residuals"] = plots.plot_residuals(seen.residuals)
        figures["initial_values"] = plots.plot_histogram(
            seen.initial_values, found.value, mean, starts, "initial states", bins=40
        )
        figures["coverage"] = plots.plot_coverage(
            seen.action_support, seen.support_weights, seen.support_label
        )
        return figures

    return write_page(ESTIMATE, found, draw, out, force, run, truth=truth)


def print_estimate(estimate: Estimate, truth: float | None = None, page: Path | None = None) -> None:
    """Value, interval and the diagnostics a person needs; warnings and the report's path at the end."""
    found, own, uplift = estimate.diagnostics, estimate.diagnostics.get("logged_return"), estimate.uplift
    is_open = estimate.verdict.answer.startswith("not")
    about = "no answer: the log does not support this number" if is_open else words.return_words(estimate)
    value = f"{estimate.value:.4g}   ({about})"
    rows = [
        ("verdict", str(estimate.verdict)),
        ("value", value),
        ("interval", words.describe_interval(estimate.interval)),
    ]
    if truth is not None:
        rows.append(("truth", f"{truth:.4g}"))
    if uplift is not None:
        logger, ends = f"{uplift.behavior_value:.4g}{words.within(uplift.behavior_interval)}", words.within
        how = "" if estimate.estimator in OVER_EPISODES else ", by the same networks"
        rows.append(("logging policy", f"{logger}   (the policy that wrote the log{how})"))
        rows.append(
            ("uplift", f"{uplift.value:+.4g}{ends(uplift.interval)}   (over the logging policy, paired)")
        )
    elif own is not None and found["beyond_cuts"] and estimate.estimator in OVER_EPISODES:
        rows.append(
            ("uplift", "– (it values nothing after a cut: compare with the logged return, or ask kloss)")
        )
    if own is not None:
        beyond, error = found["beyond_cuts"], found.get("logged_return_se")
        spread = f" ± {error:.2g}" if error and error > 1e-12 * abs(own) else ""  # not for rounding alone
        cut = f"   (what was recorded; {beyond:.0%} of the discounted future comes later)" if beyond else ""
        rows.append(("logged return", f"{own:.4g}{spread}{cut}"))
    if "training_steps" in found:
        seen = f", on {found['sample_rows']:,} of the rows" if "sample_rows" in found else ""
        rows.append(("training", f"{found['training_steps']:,} steps{seen}"))
    heads = ", ".join(f"{name} {value:.4g}" for name, value in found.get("estimates_by_head", {}).items())
    near = describe_coverage(found["coverage"])
    rows += [
        ("estimator", estimate.estimator + (f"   (by head: {heads})" if heads else "")),
        ("log", words.describe_log(estimate)),
        ("coverage", near),
        *([("actions", words.action_shares(found["actions"]))] if "actions" in found else []),
        ("seed, time", f"{estimate.seed}, {estimate.seconds:.1f} s"),
    ]
    console = pages.make_console()
    pages.print_record(console, f"What {estimate.policy} is worth", rows)
    _print_groups(console, estimate)
    pages.print_end(console, estimate.warnings, page, len(estimate.notes), estimate.verdict.sentence)


def _print_groups(console: Any, estimate: Estimate) -> None:
    """Print the value of each group of start states."""
    if not estimate.groups:
        return
    together = f"{percent(estimate.settings['level'])}, together"
    drawn = pages.make_table(f"By {estimate.by}", str(estimate.by), "start states", "value", together)
    for row in words.group_rows(estimate):
        drawn.add_row(*row)
    console.print(drawn)


def write_estimates(found: EstimateTable, out: Path, truth: float | None, force: bool, run: Any) -> Path:
    """The folder of every estimator's answer, see `write_page`."""

    warnings = [f"{', '.join(names)}: {text}" for text, names in collected_warnings(found).items()]
    context = {"truth": truth, "reasons": collected_reasons(found).items()}
    return write_page(
        ESTIMATES,
        found,
        lambda: {"forest": plot_forest(found, truth)},
        out,
        force,
        run,
        warnings=warnings,
        **context,
    )


def print_estimates(found: EstimateTable, truth: float | None = None, page: Path | None = None) -> None:
    """A line per estimator: estimate, interval and kind, effective sample size; then bounds and warnings."""
    console = pages.make_console()
    drawn = pages.make_table(f"What {found.policy} is worth ({words.return_words(found)})")
    columns = [
        "estimator",
        "estimate",
        f"{percent(found.level)} interval",
        "uplift",
        "kind",
        "promise",
        "ESS",
    ]
    for name in columns if truth is None else [*columns, "error"]:
        drawn.add_column(name, justify="right" if name in ("estimate", "ESS", "error") else "left")
    for number, row in enumerate(found.rows):
        last = number + 1 == len(found.rows) or found.rows[number + 1].family != row.family
        cells = [words.estimator_words(row, found), "–"]
        if row.estimate is not None:
            interval, size = row.estimate.interval, row.estimate.effective_sample_size
            about = ["–", words.uplift(row.estimate.uplift), "", ""]
            if interval is not None:
                kind, ends = interval.kind, f"{interval.low:.4g} … {interval.high:.4g}"
                about = [ends, about[1], kind, words.promise(interval)]
            value = row.estimate.value
            error = [] if truth is None else [f"{value - truth:+.3g}"]
            cells = [cells[0], f"{value:.4g}", *about, "" if size is None else f"{size:.0f}", *error]
        drawn.add_row(*cells, end_section=last)
    console.print(drawn)
    pages.print_labelled(console, "verdict", str(found.verdict), "bold")
    if "actions" in found.diagnostics:
        pages.print_labelled(console, "actions", words.action_shares(found.diagnostics["actions"]), "bold")
    if truth is not None:
        console.print(f"truth: {truth:.4g}")
    for bound in found.bounds:
        text = f"none: {bound.reason}" if bound.interval is None else words.describe_interval(bound.interval)
        pages.print_labelled(console, bound.kind, text, "bold")
    guessed = {bound.reason: bound.kind for bound in found.bounds if bound.interval and bound.reason}
    for reason in guessed:
        kinds = [bound.kind for bound in found.bounds if bound.interval and bound.reason == reason]
        pages.print_labelled(console, f"note ({', '.join(kinds)})", str(reason), "dim")
    for reason, names in collected_reasons(found).items():
        verb = "does" if len(names) == 1 else "do"
        pages.print_labelled(console, f"{', '.join(names)} {verb} not apply", reason, "dim")
    for warning, names in collected_warnings(found).items():
        pages.print_labelled(console, f"warning ({', '.join(names)})", warning)
    pages.print_end(console, (), page, len(found.notes), found.verdict.sentence)


def collected_warnings(found: EstimateTable) -> dict[str, list[str]]:
    """Each sentence once, with the estimators that it concerns; what concerns all of them first."""
    collected: dict[str, list[str]] = {text: ["all"] for text in found.warnings}
    own = [(row.name, text) for row in found.rows if row.estimate for text in row.estimate.warnings]
    for name, text in own:
        if text not in found.warnings:
            collected.setdefault(text, []).append(name)
    return collected


def collected_reasons(found: EstimateTable) -> dict[str, list[str]]:
    """Reasons why estimators do not apply, each once, with the estimators concerned."""
    reasons = dict.fromkeys(row.reason for row in found.rows if row.reason is not None)
    return {reason: [row.name for row in found.rows if row.reason == reason] for reason in reasons}
