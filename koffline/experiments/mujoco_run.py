"""figure-mujoco: run what is missing, gather what is finished, and judge the paper's sentences by it.

A comparison is the difference of interquartile means over seeds, K-loss minus a rival, each at its best
setting: it holds or does not where the 95 % bootstrap interval lies on one side of 0, else undecided; so is
what fewer than five seeds say.
(Feng et al. 2019, Section 5.3, fig:mujoco_bench)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from koffline.experiments.claims import verdict_of
from koffline.experiments.mujoco import (
    Finished,
    Group,
    Learned,
    choose_settings,
    costs_of,
    curves_of_returns,
    gather,
    rows_of_returns,
)
from koffline.experiments.mujoco_cells import is_mujoco, mujoco_jobs, mujoco_path, read_mujoco
from koffline.experiments.mujoco_plan import (
    BUDGETS,
    CRITICS,
    PARTS,
    SEARCHED,
    Choices,
    MujocoRequest,
    part_cells,
)
from koffline.experiments.results import FAILS, HOLDS, UNDECIDED, Claim, Curves
from koffline.experiments.statistics import Interval, difference, scores_of
from koffline.experiments.style import LABELS
from koffline.jobs import run_jobs

_OTHERS = tuple(part for part in PARTS if part not in SEARCHED)
_WHERE = "Section 5.3, fig:mujoco_bench"
_GRIDS = {"final": "equal settings or grid for all", "paper": "the paper's grid and learner"}
_RIVALS = tuple(critic for critic in CRITICS if critic != "kloss")

Runs = Mapping[Group, Learned]


def run_mujoco(
    request: MujocoRequest, folder: Path, workers: int = 1, ray: str | None = None
) -> tuple[dict[str, Any], Curves]:
    """Searches first, then what uses their choices; the parts of the results and the curves.

    folder: of the cells. What was not asked for is shown where it is finished.
    """
    for parts in (SEARCHED, _OTHERS):
        choices, _ = choose_settings(_whole(request, folder, SEARCHED, {})[0])
        asked = [(part, name) for part in request.parts if part in parts for name in request.environments]
        cells = [cell for part, name in asked for cell in part_cells(request, part, name, choices)]
        run_jobs(mujoco_jobs(cells, folder), workers=workers, ray=ray)
    return collect_mujoco(request, folder)


def collect_mujoco(request: MujocoRequest, folder: Path) -> tuple[dict[str, Any], Curves]:
    """Rows, claims and curves of everything that is finished, and the names of what is not."""
    searched, missing = _whole(request, folder, SEARCHED, {})
    choices, searches = choose_settings(searched)
    finished, also_missing = _whole(request, folder, _OTHERS, choices)
    learned = gather(finished)
    extra = {
        **costs_of([*finished, *searched]),
        "not_run": [*missing, *also_missing],
        "budgets": _budgets(request),
    }
    parts = {
        "rows": (),
        "returns": tuple(rows_of_returns(learned)),
        "searches": tuple(searches),
        "claims": tuple(mujoco_claims(learned)),
        "extra": extra,
    }
    return parts, curves_of_returns(learned)


def _whole(
    request: MujocoRequest, folder: Path, parts: Iterable[str], choices: Choices
) -> tuple[Finished, list[str]]:
    """The cells of the parts that are finished as a whole, also without any, and the names of the others."""
    finished: list[Any] = []
    missing = []
    for part in parts:
        for environment in BUDGETS:
            cells = part_cells(request, part, environment, choices)
            if all(is_mujoco(cell, folder) for cell in cells):
                finished += [(cell, read_mujoco(mujoco_path(cell, folder))) for cell in cells]
            else:
                missing.append(f"{part} of {environment}")
    return finished, missing


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


def mujoco_claims(learned: Runs) -> Iterator[Claim]:
    """Everything that the finished runs can say."""
    for part, grid in _GRIDS.items():
        found = [claim for environment in BUDGETS for claim in _against_rivals(learned, part, environment)]
        if found:
            yield _consistently(found, grid)
            yield from found
    yield from _with_noise(learned)


def _against_rivals(learned: Runs, part: str, environment: str) -> Iterator[Claim]:
    """Better policies (final return) with fewer data (area under the curve), rival by rival."""
    ours = learned.get(Group(part, environment, 0.0, "kloss"))
    for rival in _RIVALS:
        theirs = learned.get(Group(part, environment, 0.0, rival))
        if ours is None or theirs is None:
            continue
        label = LABELS[rival]
        for number, words, sentence in (
            ("final", "final return", f"K-loss learns a better policy than {label}"),
            ("area", "area under the curve", f"K-loss learns with fewer data than {label}"),
        ):
            greedy = _difference(ours, theirs, "returns", number)
            sampled = _difference(ours, theirs, "sampled", number)
            yield Claim(
                sentence, _WHERE, environment,
                f"{words}, K-loss − {label}, IQM of {len(ours.returns)} seeds ({_GRIDS[part]})",
                greedy.value, greedy.low, greedy.high, verdict_of(greedy, 0.0),
                f"by the sampled policy: {sampled} ({verdict_of(sampled, 0.0)})",
            )  # fmt: skip


def _consistently(found: Sequence[Claim], grid: str) -> Claim:
    """One that goes the other way refutes "consistently"; one that is undecided leaves it open."""
    counts = {verdict: sum(claim.verdict == verdict for claim in found) for verdict in (HOLDS, FAILS)}
    verdict = FAILS if counts[FAILS] else HOLDS if counts[HOLDS] == len(found) else UNDECIDED
    environments = dict.fromkeys(claim.world for claim in found)
    return Claim(
        "K-loss consistently outperforms all the other methods, learning better policy with fewer data",
        _WHERE, "MuJoCo",
        f"comparisons of {len(found)} that hold ({len(environments)} environments, {grid})",
        float(counts[HOLDS]), None, None, verdict, f"{counts[FAILS]} go the other way",
    )  # fmt: skip


def _with_noise(learned: Runs) -> Iterator[Claim]:
    """Double sampling biases the residual gradient where transitions are random, and not the K-loss."""
    for group, ours in learned.items():
        if (group.part, group.critic) != ("noise", "kloss"):
            continue
        for rival in _RIVALS:
            theirs = learned.get(Group("noise", group.environment, group.noise, rival))
            if theirs is None:
                continue
            label = LABELS[rival]
            sentence = f"K-loss learns a better policy than {label} where transitions are random"
            greedy = _difference(ours, theirs, "returns", "final")
            sampled = _difference(ours, theirs, "sampled", "final")
            yield Claim(
                sentence, "Sections 2 and 3 (double sampling), inside Trust-PCL",
                f"{group.environment}, noise {group.noise:g}",
                f"final return, K-loss − {label}, IQM of {len(ours.returns)} seeds",
                greedy.value, greedy.low, greedy.high, verdict_of(greedy, 0.0),
                f"by the sampled policy: {sampled} ({verdict_of(sampled, 0.0)})",
            )  # fmt: skip


def _difference(ours: Learned, theirs: Learned, curve: str, number: str) -> Interval:
    scores = [getattr(scores_of(part.steps, getattr(part, curve)), number) for part in (ours, theirs)]
    return difference(scores[0], scores[1])
