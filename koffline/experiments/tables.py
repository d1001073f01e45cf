"""``NAME.md``: the final numbers of an experiment as Markdown tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from koffline.experiments.figure_mujoco import mujoco_sections
from koffline.experiments.results import Results, Row
from koffline.experiments.style import LABELS, LOSSES, interval_text, number_text, table_lines
from koffline.store.files import atomic_file

_WORLDS = {
    "chain": "Chain of Tsitsiklis and Van Roy",
    "puddle_world": "Puddle World",
    "cart_pole": "CartPole (noisy pole)",
    "mountain_car": "Mountain Car (noisy)",
}
_ERRORS = {"mse": "MSE", "bellman_error": "Bellman error"}
_NETWORKS = {"own": "the method trained by it", "both": "K-loss and RG"}

_DEFAULT_NOTE = (
    "\n\nHalf the epochs of the figures, two learning rates, three seeds: compare within a table. "
    "The default that comes out is `koffline.objectives.default_kernel_loss` (group combined); "
    "the figures keep the paper's kernel."
)


def write_table(results: Results, path: Path) -> None:
    """Write the tables, whole or not at all."""
    with atomic_file(path, force=True) as temporary:
        temporary.write_text(table_text(results), encoding="utf-8")


def table_text(results: Results) -> str:
    """Everything the results hold, as Markdown."""
    sections = [_heading(results)]
    if results.claims:
        sections.append(_claims(results))
    plain = [row for row in results.rows if row.group is None]
    for world in dict.fromkeys(row.world for row in plain):
        rows = [row for row in plain if row.world == world]
        sections.append(_toy(results, rows) if world == "chain" else _world(results, world, rows))
    if results.correlations:
        sections.append(_correlations(results))
    sections += mujoco_sections(results)
    grouped = [row for row in results.rows if row.group is not None]
    for group in dict.fromkeys(row.group for row in grouped):
        sections.append(_group(str(group), [row for row in grouped if row.group == group]))
    return "\n\n".join(sections) + "\n"


def _heading(results: Results) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in results.versions.items())
    settings = ", ".join(f"{name} {value}" for name, value in results.settings.items())
    note = _DEFAULT_NOTE if results.name == "ablation" else ""
    return f"# {results.name}\n\n`{results.command}`\n\n{settings}; {versions}.{note}"


def _world(results: Results, world: str, rows: Sequence[Row]) -> str:
    """Methods against both truths, at the learning rates that the two rules choose."""
    lines = [f"## {_WORLDS.get(world, world)}", "", _about(results, world, rows), ""]
    header = (
        "method",
        "best rate",
        "MSE, Monte Carlo",
        "rate without truth",
        "its MSE",
        "best rate, paper's grid",
        "MSE, paper's grid",
        "Bellman error",
        "diverged at best rate",
        "diverged at any rate",
    )
    return "\n".join([*lines, *table_lines(header, [_method_cells(rows, m) for m in _methods_of(rows)])])


def _method_cells(rows: Sequence[Row], method: str) -> list[str]:
    mine = [row for row in rows if row.method == method and row.truth == "monte_carlo"]
    paper = [row for row in rows if row.method == method and row.truth == "paper"]
    best, blind = _flagged(mine, "best_by_truth"), _flagged(mine, "best_without_truth")
    by_grid = _flagged(paper, "best_by_truth")
    runs = sum(row.seeds for row in mine)
    return [
        LABELS.get(method, method),
        _rate(best),
        _mse(best),
        _rate(blind),
        _mse(blind),
        _rate(by_grid),
        _mse(by_grid),
        "–"
        if best is None
        else interval_text(best.bellman_error, best.bellman_error_low, best.bellman_error_high),
        "–" if best is None else f"{best.diverged}/{best.seeds}",
        f"{sum(row.diverged for row in mine)}/{runs}",
    ]


def _about(results: Results, world: str, rows: Sequence[Row]) -> str:
    """What the numbers are measured against."""
    parts = [
        "Mean squares over the training states in native reward units, mean and 95 % interval over seeds."
    ]
    variance = next((row.value_variance for row in rows if row.value_variance), None)
    if variance:
        parts.append(f"The best constant has MSE {number_text(variance)} (the variance of V).")
    truths: Any = results.extra.get("truths", {}).get(world, {})
    gap = truths.get("paper_against_monte_carlo_mse")
    if gap is not None:
        parts.append(f"The paper's grid itself is off by MSE {number_text(gap)} against Monte Carlo.")
    return " ".join(parts)


def _toy(results: Results, rows: Sequence[Row]) -> str:
    extra = results.extra
    note = (
        f"Plain gradient descent, {rows[0].epochs} iterations at learning rate {rows[0].learning_rate:g}, "
        f"{rows[0].seeds} draws of the tuples."
    )
    if "lstd_weight_error" in extra:
        error = interval_text(*(extra.get(f"lstd_weight_error{end}") for end in ("", "_low", "_high")))
        note += f" The LSTD solution of the same tuples is {error} away from w*: that much is sampling error."
    gaps = extra.get("largest_distance_from_lstd", {})
    cells = []
    for row in rows:
        steps = [step for step in row.diverged_at if step is not None]
        when = f" (iterations {min(steps)}–{max(steps)})" if steps else ""
        cells.append(
            [
                LABELS.get(row.method, row.method),
                interval_text(row.weight_error, row.weight_error_low, row.weight_error_high),
                _mse(row),
                number_text(gaps.get(row.method)),
                f"{row.diverged}/{row.seeds}{when}",
            ]
        )
    header = ("method", "‖w − w*‖", "MSE", "largest distance from LSTD", "diverged")
    return "\n".join([f"## {_WORLDS['chain']}", "", note, "", *table_lines(header, cells)])


def _correlations(results: Results) -> str:
    cells = [
        [
            _WORLDS.get(found.world, found.world),
            LOSSES.get(found.loss, found.loss),
            _ERRORS.get(found.error, found.error),
            _NETWORKS.get(found.networks, found.networks),
            interval_text(found.spearman, found.low, found.high),
            str(found.points),
        ]
        for found in results.correlations
    ]
    header = ("world", "loss", "with", "networks of", "Spearman", "points")
    return "\n".join(["## What the losses tell about the errors", "", *table_lines(header, cells)])


def _group(group: str, rows: Sequence[Row]) -> str:
    """Variants down, worlds across: error as a share of the variance of V, best learning rate of each."""
    worlds = list(dict.fromkeys(row.world for row in rows))
    best = [row for row in rows if row.truth == "monte_carlo" and row.best_by_truth]
    several = len({row.method for row in rows}) > 1
    cells = []
    for name, method in dict.fromkeys((row.variant_name, row.method) for row in best):
        line = [f"{name}, {LABELS.get(method, method)}" if several else name]
        for world in worlds:
            here = [row for row in best if row.world == world]
            row = next((row for row in here if (row.variant_name, row.method) == (name, method)), None)
            # Methods are compared at the same variant, variants of one method with each other.
            rivals = [row for row in here if not several or row.variant_name == name]
            line.append(_share_cell(row, rivals))
        cells.append(line)
    title = group.replace("_", " ")
    rate = " at the best learning rate of each" if any(row.learning_rate for row in rows) else ""
    note = f"MSE / Var V against Monte Carlo{rate}; the smallest "
    note += "of the methods in bold." if several else "in bold."
    header = (title, *(_WORLDS.get(world, world) for world in worlds))
    return "\n".join([f"## {title.capitalize()}", "", note, "", *table_lines(header, cells)])


def _share_cell(row: Row | None, rivals: Sequence[Row]) -> str:
    if row is None:
        return "–"
    share, low, high = row.shares
    if share is None:
        return f"diverged ({row.diverged}/{row.seeds})"
    text = interval_text(share, low, high)
    others = [other for rival in rivals if (other := rival.shares[0]) is not None]
    return f"**{text}**" if share == min(others) else text


def _claims(results: Results) -> str:
    cells = [
        [
            f"“{claim.sentence}”",
            claim.where,
            _WORLDS.get(claim.world, claim.world),
            claim.measured,
            "–"
            if claim.value is None and claim.low is None
            else interval_text(claim.value, claim.low, claim.high),
            f"**{claim.verdict}**",
            claim.reason,
        ]
        for claim in results.claims
    ]
    counts = {
        verdict: sum(c.verdict == verdict for c in results.claims)
        for verdict in ("holds", "does not hold", "undecided")
    }
    summary = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    header = ("claim", "where", "world", "measured", "value", "verdict", "reason")
    return "\n".join(
        ["## Claims", "", f"{len(results.claims)} sentences: {summary}.", "", *table_lines(header, cells)]
    )


def _methods_of(rows: Sequence[Row]) -> list[str]:
    present = dict.fromkeys(row.method for row in rows)
    return [*(m for m in LABELS if m in present), *(m for m in present if m not in LABELS)]


def _flagged(rows: Sequence[Row], flag: str) -> Row | None:
    return next((row for row in rows if getattr(row, flag)), None)


def _rate(row: Row | None) -> str:
    return "–" if row is None else f"{row.learning_rate:g}"


def _mse(row: Row | None) -> str:
    return "–" if row is None else interval_text(row.mse, row.mse_low, row.mse_high)
