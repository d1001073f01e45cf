"""The sections of figure-mujoco: returns by environment, the noise ablation, what the searches found."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from koffline.experiments.markdown import table_lines
from koffline.experiments.methods import LABELS
from koffline.experiments.results import Results, ReturnRow, SearchRow

_PARTS = {
    "final": "Each critic at its best setting of the same grid",
    "paper": "The paper's learner, each critic at its best setting of the paper's grid",
    "noise": "Noise on the transitions",
}
_SEARCHES = {"search": "The same grid for all critics", "paper-search": "The paper's grid"}
_SHOWN = 3  # settings of a critic in the table of a search
_HEADER = (
    "critic",
    "setting",
    "final return, IQM",
    "best but one",
    "sampled policy, IQM",
    "best but one",
    "area",
    "area, sampled",
    "median steps to threshold",
    "diverged",
)
_BUDGET = ("environment", "steps of a run", "seeds", "steps of a run of the search")
_NOTE = (
    "IQM over all seeds and its 95 % bootstrap interval; “best but one”: mean without the worst seed, as the "
    "paper reports. Final: mean of the last tenth of the evaluations; area: mean height of the learning "
    "curve; sampled: the return of the sampled policy instead of the mean action's."
)


def mujoco_sections(results: Results) -> Iterator[str]:
    """Nothing where the results have no returns."""
    if results.returns:
        yield "\n\n".join(["## Returns", _NOTE, *_what_ran(results)])
    for part, title in _PARTS.items():
        rows = [row for row in results.returns if row.part == part]
        for environment, noise in dict.fromkeys((row.environment, row.noise) for row in rows):
            yield _environment(title, [r for r in rows if (r.environment, r.noise) == (environment, noise)])
    for search, title in _SEARCHES.items():
        rows_found = [row for row in results.searches if row.search == search]
        if rows_found:
            yield _search(title, rows_found)


def _what_ran(results: Results) -> Iterator[str]:
    extra: Any = results.extra
    budgets = extra.get("budgets", {})
    if budgets:
        yield "\n".join(table_lines(_BUDGET, [_budget_cells(name, part) for name, part in budgets.items()]))
    missing = extra.get("not_run", ())
    yield f"Not run: {', '.join(missing)}." if missing else "Everything of the plan was run."
    if extra.get("runs"):
        yield f"{extra['runs']} runs, {extra['environment_steps'] / 1e6:.3g} million environment steps."


def _budget_cells(name: str, budget: Mapping[str, int]) -> list[str]:
    searched = f"{budget['search_steps']:,}" if budget["search_steps"] else "not searched"
    return [name, f"{budget['steps']:,}", str(budget["seeds"]), searched]


def _environment(title: str, rows: Sequence[ReturnRow]) -> str:
    first = rows[0]
    noise = f", noise {first.noise:g} per step on every velocity" if first.noise else ""
    about = f"{title}; {first.steps:,} environment steps, {first.seeds} seeds."
    lines = table_lines(_HEADER, [_cells(row) for row in rows])
    return "\n".join([f"### {first.environment}{noise} ({first.part})", "", about, "", *lines])


def _cells(row: ReturnRow) -> list[str]:
    reached = "–" if row.reached is None else f"{row.reached:,.0f}"
    return [
        LABELS[row.critic],
        row.setting,
        _interval(row.final, row.final_low, row.final_high),
        _number(row.final_best),
        _interval(row.sampled, row.sampled_low, row.sampled_high),
        _number(row.sampled_best),
        _interval(row.area, row.area_low, row.area_high),
        _number(row.sampled_area),
        f"{reached} ({row.reached_seeds}/{row.seeds})",
        f"{row.diverged}/{row.seeds}",
    ]


def _search(title: str, rows: Sequence[SearchRow]) -> str:
    """The best settings of each critic; every one is in the JSON file."""
    cells = []
    for environment, critic in dict.fromkeys((row.environment, row.critic) for row in rows):
        mine = sorted(
            (row for row in rows if (row.environment, row.critic) == (environment, critic)),
            key=lambda row: row.rank,
        )
        cells += [
            [
                environment,
                LABELS[critic],
                f"{row.rank + 1} of {len(mine)}",
                row.setting,
                _number(row.area),
                _number(row.final),
                _number(row.sampled),
            ]
            for row in mine[:_SHOWN]
        ]
    header = ("environment", "critic", "rank by area", "setting", "area", "final return", "final, sampled")
    budget = "; ".join(
        f"{environment}: {row.steps:,} steps, {row.seeds} seeds a setting"
        for environment, row in {row.environment: row for row in rows}.items()
    )
    note = f"{budget}. The seeds of the search are not those of the comparison."
    return "\n".join([f"## Search: {title}", "", note, "", *table_lines(header, cells)])


def _interval(value: float, low: float | None, high: float | None) -> str:
    ends = "" if low is None or high is None else f" [{_number(low)}, {_number(high)}]"
    return _number(value) + ends


def _number(value: float) -> str:
    """Returns go from fractions to ten thousands: three digits at least, no exponents."""
    return f"{value:.0f}" if abs(value) >= 100.0 else f"{value:.3g}"
