"""figure-mujoco: run what is missing of what was asked for, then gather everything that is finished."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from koffline.experiments.mujoco import (
    choose_settings,
    costs_of,
    curves_of_returns,
    gather,
    rows_of_returns,
)
from koffline.experiments.mujoco_cells import (
    MujocoCell,
    MujocoResult,
    is_mujoco,
    mujoco_jobs,
    mujoco_path,
    read_mujoco,
)
from koffline.experiments.mujoco_claims import mujoco_claims
from koffline.experiments.mujoco_plan import (
    BUDGETS,
    PARTS,
    SEARCHED,
    Choices,
    MujocoRequest,
    Setting,
    part_cells,
)
from koffline.experiments.results import Curves, SearchRow
from koffline.jobs import run_jobs

Finished = list[tuple[MujocoCell, MujocoResult]]


def run_mujoco(
    request: MujocoRequest, folder: Path, workers: int = 1, ray: str | None = None
) -> tuple[dict[str, Any], Curves]:
    """Searches first, then what uses their choices; the parts of the results and the curves.

    folder: of the cells. What was not asked for is shown where it is finished.
    """
    cells = [cell for part in request.parts if part in SEARCHED for cell in _cells(request, part, {})]
    run_jobs(mujoco_jobs(cells, folder), workers=workers, ray=ray)
    choices = _searches(request, folder).choices
    cells = [
        cell for part in request.parts if part not in SEARCHED for cell in _cells(request, part, choices)
    ]
    run_jobs(mujoco_jobs(cells, folder), workers=workers, ray=ray)
    return collect_mujoco(request, folder)


def collect_mujoco(request: MujocoRequest, folder: Path) -> tuple[dict[str, Any], Curves]:
    """Rows, claims and curves of everything that is finished, and the names of what is not."""
    searches = _searches(request, folder)
    finished: Finished = []
    missing = list(searches.missing)
    for part in (part for part in PARTS if part not in SEARCHED):
        for environment in BUDGETS:
            cells = part_cells(request, part, environment, searches.choices)
            if _are_finished(cells, folder):
                finished += _read(cells, folder)
            else:
                missing.append(f"{part} of {environment}")
    learned = gather(finished)
    extra = {**costs_of([*finished, *searches.finished]), "not_run": missing, "budgets": _budgets(request)}
    parts = {
        "rows": (),
        "returns": tuple(rows_of_returns(learned)),
        "searches": searches.rows,
        "claims": tuple(mujoco_claims(learned)),
        "extra": extra,
    }
    return parts, curves_of_returns(learned)


@dataclass(frozen=True)
class _Searches:
    """What the searches that are whole have found, and the names of the others."""

    choices: dict[tuple[str, str, str], Setting]
    rows: tuple[SearchRow, ...]
    finished: Finished
    missing: tuple[str, ...]


def _searches(request: MujocoRequest, folder: Path) -> _Searches:
    finished: Finished = []
    missing = []
    for search in SEARCHED:
        for environment in BUDGETS:
            cells = part_cells(request, search, environment, {})
            if _are_finished(cells, folder):
                finished += _read(cells, folder)
            else:
                missing.append(f"{search} of {environment}")
    choices, rows = choose_settings(finished)
    return _Searches(choices, tuple(rows), finished, tuple(missing))


def _cells(request: MujocoRequest, part: str, choices: Choices) -> list[MujocoCell]:
    """Of the environments asked for."""
    return [cell for name in request.environments for cell in part_cells(request, part, name, choices)]


def _are_finished(cells: Iterable[MujocoCell], folder: Path) -> bool:
    """Also where there is nothing to do."""
    return all(is_mujoco(cell, folder) for cell in cells)


def _read(cells: Iterable[MujocoCell], folder: Path) -> Finished:
    return [(cell, read_mujoco(mujoco_path(cell, folder))) for cell in cells]


def _budgets(request: MujocoRequest) -> dict[str, dict[str, int]]:
    """Steps of a run, by environment."""
    return {
        name: {
            "steps": request.budget(name)[0],
            "seeds": request.seeds(name),
            "search_steps": request.search_steps(name),
        }
        for name in BUDGETS
    }
