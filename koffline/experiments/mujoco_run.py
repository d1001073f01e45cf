"""figure-mujoco: run what is missing of what was asked for, then gather everything that is finished."""

from __future__ import annotations

from collections.abc import Iterable
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
from koffline.experiments.mujoco_plan import BUDGETS, PARTS, MujocoRequest, part_cells
from koffline.experiments.results import Curves, SearchRow
from koffline.jobs import run_jobs

Finished = list[tuple[MujocoCell, MujocoResult]]


def run_mujoco(
    request: MujocoRequest, folder: Path, workers: int = 1, ray: str | None = None
) -> tuple[dict[str, Any], Curves]:
    """Searches first, then what uses their choices; the parts of the results and the curves.

    folder: of the cells. What was not asked for is shown where it is finished.
    """
    for searching in (True, False):
        choices = _choices(request, folder)[0]
        cells = [
            cell
            for part in request.parts
            if part.endswith("search") == searching
            for environment in request.environments
            for cell in part_cells(request, part, environment, choices)
        ]
        run_jobs(mujoco_jobs(cells, folder), workers=workers, ray=ray)
    return collect_mujoco(request, folder)


def collect_mujoco(request: MujocoRequest, folder: Path) -> tuple[dict[str, Any], Curves]:
    """Rows, claims and curves of everything that is finished, and the names of what is not."""
    choices, searches, searched = _choices(request, folder)
    finished: Finished = []
    missing = []
    for part in PARTS:
        for environment in BUDGETS:
            cells = part_cells(request, part, environment, choices)
            if not _are_finished(cells, folder):
                missing.append(f"{part} of {environment}")
            elif not part.endswith("search"):
                finished += _read(cells, folder)
    learned = gather(finished)
    extra = {**costs_of([*finished, *searched]), "not_run": missing, "budgets": _budgets(request)}
    parts = {
        "rows": (),
        "returns": tuple(rows_of_returns(learned)),
        "searches": tuple(searches),
        "claims": tuple(mujoco_claims(learned)),
        "extra": extra,
    }
    return parts, curves_of_returns(learned)


def _choices(
    request: MujocoRequest, folder: Path
) -> tuple[dict[tuple[str, str, str], Any], list[SearchRow], Finished]:
    """What the searches that are whole have found."""
    searched: Finished = []
    for search in ("search", "paper-search"):
        for environment in BUDGETS:
            cells = part_cells(request, search, environment, {})
            if _are_finished(cells, folder):
                searched += _read(cells, folder)
    choices, rows = choose_settings(searched)
    return choices, rows, searched


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
