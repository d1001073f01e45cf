"""``NAME.md``: the final numbers of an experiment as Markdown tables."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from koffline.experiments.results import FAILS, HOLDS, UNDECIDED, Results, ReturnRow, Row, SearchRow, grouped
from koffline.experiments.style import LABELS, LOSSES

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
_METHODS_HEADER = (
    "method | best rate | MSE, Monte Carlo | rate without truth | its MSE | best rate, paper's grid | "
    "MSE, paper's grid | Bellman error | diverged at best rate | diverged at any rate"
)
_RETURNS_HEADER = (
    "critic | setting | final return, IQM | best but one | sampled policy, IQM | best but one | area | "
    "area, sampled | median steps to threshold | diverged"
)
_RETURNS_NOTE = (
    "IQM over all seeds and its 95 % bootstrap interval; “best but one”: mean without the worst seed, as the "
    "paper reports. Final: mean of the last tenth of the evaluations; area: mean height of the learning "
    "curve; sampled: the return of the sampled policy instead of the mean action's."
)
_PARTS = {
    "final": "Each critic at its best setting of the same grid",
    "paper": "The paper's learner, each critic at its best setting of the paper's grid",
    "noise": "Noise on the transitions",
}
_SEARCHES = {"search": "The same grid for all critics", "paper-search": "The paper's grid"}
_SHOWN = 3  # settings of a critic in the table of a search


def table_text(results: Results) -> str:
    """Everything the results hold, as Markdown."""
    return "\n\n".join(_sections(results)) + "\n"


def _sections(results: Results) -> Iterator[str]:
    versions = ", ".join(f"{name} {version}" for name, version in results.versions.items())
    settings = ", ".join(f"{name} {value}" for name, value in results.settings.items())
    note = _DEFAULT_NOTE if results.name == "ablation" else ""
    yield f"# {results.name}\n\n`{results.command}`\n\n{settings}; {versions}.{note}"
    if results.claims:
        yield _claims(results)
    by_group = grouped(results.rows, "group")
    for world, rows in grouped(by_group.pop(None, ()), "world").items():
        yield _toy(results, rows) if world == "chain" else _world(results, world, rows)
    if results.correlations:
        yield _correlations(results)
    if results.returns:
        yield "\n\n".join(["## Returns", _RETURNS_NOTE, *_what_ran(results.extra)])
    by_part = grouped(results.returns, "part")
    for part, title in _PARTS.items():
        for found in grouped(by_part.get(part, ()), "environment", "noise").values():
            yield _returns(title, found)
    for search, settings_found in grouped(results.searches, "search").items():
        yield _search(_SEARCHES[search], settings_found)
    for group, rows in by_group.items():
        yield _group(group, rows)


def _table(header: str, rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; header: the names between bars. A bar inside a cell would end it."""
    names = header.split(" | ")
    lines = (names, ["---"] * len(names), *rows)
    return "\n".join(
        "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in line) + " |"
        for line in lines
    )


def _section(title: str, note: str, header: str, rows: Iterable[Sequence[str]]) -> str:
    return "\n".join([title, "", *([note, ""] if note else []), _table(header, rows)])


def _text(record: Any, name: str) -> str:
    """The number of that name with its interval."""
    return interval_text(*(getattr(record, f"{name}{end}") for end in ("", "_low", "_high")))


def interval_text(value: float | None, low: float | None, high: float | None) -> str:
    """0.12 [0.1, 0.14]; without the ends where there is a single seed, 'not finite' after a divergence."""
    if value is None or math.isnan(value):
        return "not finite"
    if low is None or high is None or not (math.isfinite(low) and math.isfinite(high)):
        return number_text(value)
    return f"{number_text(value)} [{number_text(low)}, {number_text(high)}]"


def number_text(value: float | None) -> str:
    """Three digits; a dash where there is none."""
    if value is None or math.isnan(value):
        return "–"
    return "∞" if math.isinf(value) else f"{value:.3g}"


def _world(results: Results, world: str, rows: Sequence[Row]) -> str:
    """Methods against both truths, at the learning rates that the two rules choose."""
    about = "Mean squares over the training states in native reward units, mean and 95 % interval over seeds."
    if variance := next((row.value_variance for row in rows if row.value_variance), None):
        about += f" The best constant has MSE {number_text(variance)} (the variance of V)."
    gap = results.extra.get("truths", {}).get(world, {}).get("paper_against_monte_carlo_mse")
    if gap is not None:
        about += f" The paper's grid itself is off by MSE {number_text(gap)} against Monte Carlo."
    by_method = grouped(rows, "method")
    order = sorted(by_method, key=lambda method: list(LABELS).index(method))
    cells = [_method_cells(method, by_method[method]) for method in order]
    return _section(f"## {_WORLDS.get(world, world)}", about, _METHODS_HEADER, cells)


def _method_cells(method: str, rows: Sequence[Row]) -> list[str]:
    by_truth = grouped(rows, "truth")
    mine = by_truth.get("monte_carlo", [])
    best = next((row for row in mine if row.best_by_truth), None)
    blind = next((row for row in mine if row.best_without_truth), None)
    by_grid = next((row for row in by_truth.get("paper", ()) if row.best_by_truth), None)
    chosen = [
        text
        for row in (best, blind, by_grid)
        for text in (("–", "–") if row is None else (f"{row.learning_rate:g}", _text(row, "mse")))
    ]
    at_best = ("–", "–") if best is None else (_text(best, "bellman_error"), f"{best.diverged}/{best.seeds}")
    diverged, runs = sum(row.diverged for row in mine), sum(row.seeds for row in mine)
    return [LABELS[method], *chosen, *at_best, f"{diverged}/{runs}"]


def _toy(results: Results, rows: Sequence[Row]) -> str:
    extra, first = results.extra, rows[0]
    note = (
        f"Plain gradient descent, {first.epochs} iterations at learning rate {first.learning_rate:g}, "
        f"{first.seeds} draws of the tuples."
    )
    if "lstd_weight_error" in extra:
        error = interval_text(*(extra.get(f"lstd_weight_error{end}") for end in ("", "_low", "_high")))
        note += f" The LSTD solution of the same tuples is {error} away from w*: that much is sampling error."
    gaps, cells = extra.get("largest_distance_from_lstd", {}), []
    for row in rows:
        steps = [step for step in row.diverged_at if step is not None]
        when = f" (iterations {min(steps)}–{max(steps)})" if steps else ""
        errors = [_text(row, "weight_error"), _text(row, "mse"), number_text(gaps.get(row.method))]
        cells.append([LABELS[row.method], *errors, f"{row.diverged}/{row.seeds}{when}"])
    header = "method | ‖w − w*‖ | MSE | largest distance from LSTD | diverged"
    return _section(f"## {_WORLDS['chain']}", note, header, cells)


def _correlations(results: Results) -> str:
    cells = [
        [
            _WORLDS.get(found.world, found.world),
            LOSSES[found.loss],
            _ERRORS[found.error],
            _NETWORKS[found.networks],
            interval_text(found.spearman, found.low, found.high),
            str(found.points),
        ]
        for found in results.correlations
    ]
    header = "world | loss | with | networks of | Spearman | points"
    return _section("## What the losses tell about the errors", "", header, cells)


def _group(group: str, rows: Sequence[Row]) -> str:
    """Variants down, worlds across: error as a share of the variance of V, best learning rate of each."""
    best = [row for row in rows if row.truth == "monte_carlo" and row.best_by_truth]
    worlds, several = list(grouped(rows, "world")), len(grouped(rows, "method")) > 1
    found = grouped(best, "variant_name", "method", "world")
    cells = []
    for name, method in grouped(best, "variant_name", "method"):
        line = [f"{name}, {LABELS[method]}" if several else name]
        for world in worlds:
            # Methods are compared at the same variant, variants of one method with each other.
            rivals = [r for r in best if r.world == world and (not several or r.variant_name == name)]
            line.append(_share_cell(found.get((name, method, world)), rivals))
        cells.append(line)
    title = group.replace("_", " ")
    rate = " at the best learning rate of each" if any(row.learning_rate for row in rows) else ""
    bold = "of the methods in bold" if several else "in bold"
    note = f"MSE / Var V against Monte Carlo{rate}; the smallest {bold}."
    header = " | ".join((title, *(_WORLDS.get(world, world) for world in worlds)))
    return _section(f"## {title.capitalize()}", note, header, cells)


def _share_cell(found: Sequence[Row] | None, rivals: Sequence[Row]) -> str:
    if not found:
        return "–"
    row, (share, low, high) = found[0], found[0].shares
    if share is None:
        return f"diverged ({row.diverged}/{row.seeds})"
    text = interval_text(share, low, high)
    others = [other for rival in rivals if (other := rival.shares[0]) is not None]
    return f"**{text}**" if share == min(others) else text


def _claims(results: Results) -> str:
    cells = []
    for claim in results.claims:
        is_measured = claim.value is not None or claim.low is not None
        value = interval_text(claim.value, claim.low, claim.high) if is_measured else "–"
        world = _WORLDS.get(claim.world, claim.world)
        said = (f"“{claim.sentence}”", claim.where, world, claim.measured)
        cells.append([*said, value, f"**{claim.verdict}**", claim.reason])
    by_verdict = grouped(results.claims, "verdict")
    summary = ", ".join(f"{len(by_verdict.get(kind, ()))} {kind}" for kind in (HOLDS, FAILS, UNDECIDED))
    header = "claim | where | world | measured | value | verdict | reason"
    return _section("## Claims", f"{len(results.claims)} sentences: {summary}.", header, cells)


def _what_ran(extra: Any) -> Iterator[str]:
    if budgets := extra.get("budgets"):
        cells = [
            [name, f"{part['steps']:,}", str(part["seeds"]), f"{part['search_steps']:,}"]
            if part["search_steps"]
            else [name, f"{part['steps']:,}", str(part["seeds"]), "not searched"]
            for name, part in budgets.items()
        ]
        yield _table("environment | steps of a run | seeds | steps of a run of the search", cells)
    missing = extra.get("not_run", ())
    yield f"Not run: {', '.join(missing)}." if missing else "Everything of the plan was run."
    if extra.get("runs"):
        yield f"{extra['runs']} runs, {extra['environment_steps'] / 1e6:.3g} million environment steps."


def _returns(title: str, rows: Sequence[ReturnRow]) -> str:
    first = rows[0]
    noise = f", noise {first.noise:g} per step on every velocity" if first.noise else ""
    about = f"{title}; {first.steps:,} environment steps, {first.seeds} seeds."
    cells = [
        [
            LABELS[row.critic],
            row.setting,
            _return(row.final, row.final_low, row.final_high),
            _return(row.final_best),
            _return(row.sampled, row.sampled_low, row.sampled_high),
            _return(row.sampled_best),
            _return(row.area, row.area_low, row.area_high),
            _return(row.sampled_area),
            f"{'–' if row.reached is None else f'{row.reached:,.0f}'} ({row.reached_seeds}/{row.seeds})",
            f"{row.diverged}/{row.seeds}",
        ]
        for row in rows
    ]
    return _section(f"### {first.environment}{noise} ({first.part})", about, _RETURNS_HEADER, cells)


def _search(title: str, rows: Sequence[SearchRow]) -> str:
    """The best settings of each critic; every one is in the JSON file."""
    cells = []
    for (environment, critic), mine in grouped(rows, "environment", "critic").items():
        for row in sorted(mine, key=lambda row: row.rank)[:_SHOWN]:
            rank = f"{row.rank + 1} of {len(mine)}"
            scores = (_return(row.area), _return(row.final), _return(row.sampled))
            cells.append([environment, LABELS[critic], rank, row.setting, *scores])
    budget = "; ".join(
        f"{environment}: {found[-1].steps:,} steps, {found[-1].seeds} seeds a setting"
        for environment, found in grouped(rows, "environment").items()
    )
    note = f"{budget}. The seeds of the search are not those of the comparison."
    header = "environment | critic | rank by area | setting | area | final return | final, sampled"
    return _section(f"## Search: {title}", note, header, cells)


def _return(value: float, low: float | None = None, high: float | None = None) -> str:
    """Returns go from fractions to ten thousands: three digits at least, no exponents."""
    texts = [
        f"{end:.0f}" if abs(end) >= 100.0 else f"{end:.3g}" for end in (value, low, high) if end is not None
    ]
    return f"{texts[0]} [{texts[1]}, {texts[2]}]" if len(texts) == 3 else texts[0]
