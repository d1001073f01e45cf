"""One method's score over the rows that `leaderboard.py` keeps: errors, ranks,
coverage, time.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from koffline.ope.names import AVERAGED, ESTIMATORS

AUTO = "auto"
PEERS = ("d3rlpy", "scope-rl", "plain")
# policies that a method must have answered about to be asked for a ranking
FEWEST_RANKED = 3


@dataclass(frozen=True)
class Score:
    """One method over a set of cells; None where it gave nothing to be judged by."""

    method: str
    family: str
    answered: int
    asked: int
    median_error: float | None
    mean_error: float | None
    rank_correlation: float | None
    regret: float | None
    covered: int
    intervals: int
    width: float | None
    seconds: float | None


def with_default(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The cells with what `koffline.evaluate` answers: `dr` for single steps of known
    chances, else the mean.

    (`koffline.ope.estimators.registry.choose_estimator`)
    """
    extended = []
    for cell in cells:
        by_method = {answer["method"]: answer for answer in cell["answers"]}
        name = AVERAGED
        is_one_step = cell["n_rows"] == cell["n_episodes"]
        if is_one_step and "value" in by_method.get("dr", {}):
            name = "dr"
        chosen = by_method.get(name)
        verdict = {
            key: part
            for key, part in by_method.get(AVERAGED, {}).items()
            if key == "verdict"
        }
        if chosen is None:
            default = []
        else:
            default = [{**chosen, **verdict, "method": AUTO}]
        extended.append({**cell, "answers": [*default, *cell["answers"]]})
    return extended


def scales(cells: list[dict[str, Any]]) -> dict[str, float]:
    """Mean |true value| over a problem's policies: the unit of errors and widths."""
    truths: dict[str, dict[str, float]] = defaultdict(dict)
    for cell in cells:
        truths[cell["problem"]][cell["policy"]] = abs(cell["truth"])
    return {
        problem: statistics.mean(values.values()) for problem, values in truths.items()
    }


def score_methods(
    cells: list[dict[str, Any]], unit: dict[str, float] | None = None
) -> list[Score]:
    """One score per method, best median error first.

    Methods that answered less than half of what they were asked come after the others,
    those without estimates last.
    """
    unit = unit or scales(cells)
    by_method: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = defaultdict(
        list
    )
    for cell in cells:
        for answer in cell["answers"]:
            by_method[answer["method"]].append((cell, answer))
    scores = [_score(method, pairs, unit) for method, pairs in by_method.items()]
    return sorted(scores, key=_place)


def _place(score: Score) -> tuple[bool, float, str]:
    if score.median_error is None:
        error = math.inf
    else:
        error = score.median_error
    return 2 * score.answered < score.asked, error, score.method


def _score(
    method: str,
    pairs: list[tuple[dict[str, Any], dict[str, Any]]],
    unit: dict[str, float],
) -> Score:
    errors = [
        abs(answer["value"] - cell["truth"]) / unit[cell["problem"]]
        for cell, answer in pairs
        if "value" in answer
    ]
    held = [(cell, answer) for cell, answer in pairs if "low" in answer]
    logs: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
    for cell, answer in pairs:
        if "value" in answer:
            logs[cell["problem"], cell["seed"]].append((answer["value"], cell["truth"]))
    ranked = [
        np.array(values).T for values in logs.values() if len(values) >= FEWEST_RANKED
    ]
    return Score(
        method=method,
        family=family_of(method),
        answered=len(errors),
        asked=len(pairs),
        median_error=_median(errors),
        mean_error=statistics.mean(errors) if errors else None,
        # Equal estimates of all policies say nothing about their order: correlation 0.
        rank_correlation=_mean(
            spearman(values, truths) or 0.0 for values, truths in ranked
        ),
        regret=_mean(
            relative_regret_at_1(values, truths) or 0.0 for values, truths in ranked
        ),
        covered=sum(
            answer["low"] <= cell["truth"] <= answer["high"] for cell, answer in held
        ),
        intervals=len(held),
        width=_median([(a["high"] - a["low"]) / unit[c["problem"]] for c, a in held]),
        seconds=_median(
            [answer["seconds"] for _, answer in pairs if "seconds" in answer]
        ),
    )


def family_of(method: str) -> str:
    """Whose estimator it is, and of what kind."""
    if method in ESTIMATORS:
        return f"koffline, {ESTIMATORS[method]}"
    if method == AUTO:
        return "koffline, the default"
    if method.startswith(PEERS):
        return method.split(" ")[0]
    return "koffline, bounds"


def common_cells(cells: list[dict[str, Any]], method: str) -> list[dict[str, Any]]:
    """The cells that this method answered."""
    return [
        cell
        for cell in cells
        if any(a["method"] == method and "value" in a for a in cell["answers"])
    ]


def _median(values: list[float]) -> float | None:
    if values:
        return statistics.median(values)
    return None


def _mean(values: Iterable[float]) -> float | None:
    numbers = list(values)
    if numbers:
        return statistics.mean(numbers)
    return None


def relative_regret_at_1(estimates: np.ndarray, truths: np.ndarray) -> float | None:
    """Best value less that of the policy with the largest estimate, as a share of best
    − worst; None for 0/0.

    Ties go to the earlier policy. (Fu et al. 2021, Benchmarks for deep off-policy
    evaluation)
    """
    reach = float(np.ptp(truths))
    if reach > 0.0:
        return float(np.max(truths) - truths[np.argmax(estimates)]) / reach
    return None


def spearman(estimates: np.ndarray, truths: np.ndarray) -> float | None:
    """Correlation of the ranks (mean ranks for ties); None when one column is
    constant.
    """
    from scipy import stats

    if not (np.ptp(estimates) > 0.0 and np.ptp(truths) > 0.0):
        return None
    return float(stats.spearmanr(estimates, truths)[0])
