"""Logs of 300 to 1,000 rows: errors, coverage and widths, the least error possible, and
what attempts to lessen them did.

    python -m scripts.bench.small_logs --draws 12 --runs out/small_logs.jsonl
        --out docs/results/small_logs.json

A ward has 60 states, a severity and a kind of illness, seen through an embedding of 8
numbers; a treatment helps with some kinds, and a stay pays 1 when the patient leaves
well. A queue has up to 20 customers; a fast server costs more. The grid is the exact
problem of that name, the treatment that of the leaderboard's development half. Answers
are at the defaults, without a search for a longer state. Each log is one line of
``--runs``: called again, it goes on.

The least error is that of a normal estimate with the variance of the semiparametric
efficiency bound (`scripts.bench.efficiency`).
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from koffline import Transitions
from koffline.config import make_settings, parse_assignments
from koffline.envs.finite import FiniteMDP
from koffline.errors import KofflineError
from koffline.ope.estimators.running import run_estimator
from koffline.ope.names import AVERAGED
from koffline.ope.networks.fitted_values import FittedValues
from koffline.ope.results import Interval
from koffline.ope.verdict import verdict_on
from koffline.ope.workspace import Workspace, open_workspace
from koffline.policies import Policy
from scripts.bench.coverage import kept_runs
from scripts.bench.efficiency import efficiency_bound
from scripts.bench.embedded import EmbeddedMDP
from scripts.bench.percent_table import percent_table
from scripts.bench.user_logs import problems as user_problems
from tests.exact_problems import CASES, FiniteCase

_SHOWN = {
    "world": "world",
    "rows": "rows",
    "attempt": "attempt",
    "draws": "draws",
    "error": "mean error",
    "least_error": "least possible",
    "bias": "bias",
    "width": "mean width",
}
ROWS = (300, 1000)
TODAY = "as it is"
TOWARD_BEHAVIOR = "toward the behavior policy's value"
WITH_WDR = "mean with wdr"
SMALLER = "8 units where the held-out loss is less"
ALWAYS_SMALLER = "8 units"
CUT = "cut at logged returns"
ATTEMPTS = (TODAY, TOWARD_BEHAVIOR, WITH_WDR, SMALLER, ALWAYS_SMALLER, CUT)
_SEVERITIES = 5
_KINDS = 12
_TREATMENTS = 4
_EMBEDDED = 8
_CUSTOMERS = 20
_SMALL = (8,)


# --- Worlds ---------------------------------------------------------------------------


def ward() -> FiniteCase:
    """A ward: clinicians who often choose well, and a policy that chooses better."""
    generator = np.random.default_rng(7)
    inner = _SEVERITIES * _KINDS
    well = inner
    dead = inner + 1
    transition = np.zeros((inner + 2, _TREATMENTS, inner + 2))
    best = generator.integers(_TREATMENTS, size=_KINDS)
    for severity in range(_SEVERITIES):
        for kind in range(_KINDS):
            state = severity * _KINDS + kind
            for treatment in range(_TREATMENTS):
                helps = 0.25
                if treatment == best[kind]:
                    helps = 0.55
                harms = 0.45 - 0.5 * helps
                better = state - _KINDS
                if severity == 0:
                    better = well
                worse = state + _KINDS
                if severity == _SEVERITIES - 1:
                    worse = dead
                other_kind = severity * _KINDS + (kind + 1) % _KINDS
                transition[state, treatment, better] += helps
                transition[state, treatment, worse] += harms
                transition[state, treatment, other_kind] += 0.1
                transition[state, treatment, state] += 0.9 - helps - harms
    reward = np.zeros_like(transition)
    reward[:, :, well] = 1.0
    initial = np.zeros(inner + 2)
    initial[2 * _KINDS : 3 * _KINDS] = 1.0 / _KINDS
    mdp = FiniteMDP(transition, reward, np.arange(inner + 2) >= inner, initial)
    points = generator.standard_normal((inner + 2, _EMBEDDED))
    points[:inner, 0] = np.repeat(np.arange(_SEVERITIES), _KINDS)
    right = np.zeros((inner + 2, _TREATMENTS))
    right[np.arange(inner), np.tile(best, _SEVERITIES)] = 1.0
    right[inner:] = 1.0 / _TREATMENTS
    return FiniteCase(
        "ward",
        EmbeddedMDP(mdp, points),
        behavior=0.4 * right + 0.6 / _TREATMENTS,
        target=0.8 * right + 0.2 / _TREATMENTS,
        gamma=0.97,
    )


def queue() -> FiniteCase:
    """A queue: a log that chooses the fast server by chance, a policy that does so when
    many wait.
    """
    arrives = 0.4
    states = np.arange(_CUSTOMERS + 1)
    transition = np.zeros((len(states), 2, len(states)))
    reward = np.zeros_like(transition)
    for count in states.tolist():
        for action, served in enumerate((0.35, 0.6)):
            up = min(count + 1, _CUSTOMERS)
            down = max(count - 1, 0)
            transition[count, action, up] += arrives * (1.0 - served)
            transition[count, action, down] += (1.0 - arrives) * served
            stays = 1.0 - arrives * (1.0 - served) - (1.0 - arrives) * served
            transition[count, action, count] += stays
            reward[count, action, :] = -0.1 * count - 0.4 * action
    initial = np.zeros(len(states))
    initial[:6] = 1.0 / 6.0
    mdp = FiniteMDP(transition, reward, np.zeros(len(states), dtype=bool), initial)
    fast = np.where(states >= 4, 0.9, 0.1)
    return FiniteCase(
        "queue",
        EmbeddedMDP(mdp, states[:, None] / 5.0),
        behavior=np.full((len(states), 2), 0.5),
        target=np.column_stack([1.0 - fast, fast]),
        gamma=0.95,
        time_limit=50,
    )


def exact_grid() -> FiniteCase:
    """The exact problem of a grid, off the policy, with a time limit."""
    by_name = {case.name: case for case in CASES}
    case = by_name["grid_off_limited"]
    assert isinstance(case, FiniteCase)
    return case


FINITE: dict[str, Callable[[], FiniteCase]] = {
    "ward": ward,
    "queue": queue,
    "grid": exact_grid,
}
TREATMENT = "treatment"
WORLDS = (*FINITE, TREATMENT)


@dataclass(frozen=True, eq=False)
class Question:
    """A log, a policy, γ and the policy's true value."""

    log: Transitions
    policy: Policy
    gamma: float
    truth: float


def question_of(world: str, rows: int, draw: int) -> Question:
    """The question of a world about one draw of its log."""
    if world == TREATMENT:
        problem = user_problems("development")["treatment 300"]
        truth, _ = problem.truth("careful")
        # the leaderboard's own logs have low seeds
        log = problem.log(5000 + draw, rows)
        return Question(log, problem.policy("careful"), problem.gamma, truth)
    drawn = FINITE[world]()(5000 + draw, rows)
    return Question(drawn.transitions, drawn.policy, drawn.gamma, drawn.value)


@cache
def least_error(world: str, rows: int) -> float | None:
    """Mean |error| of a normal estimate with the variance of the efficiency bound; None
    where the bound is not known.
    """
    if world not in FINITE:
        return None
    return math.sqrt(2.0 / math.pi * efficiency_bound(FINITE[world]()) / rows)


# --- Attempts -------------------------------------------------------------------------


def answer(world: str, rows: int, draw: int, options: dict[str, Any]) -> dict[str, Any]:
    """Value and interval of one log by every attempt."""
    question = question_of(world, rows, draw)
    settings = {"gamma": question.gamma, "seed": draw, "cores": 1, **options}
    with opened(question, settings) as workspace:
        estimate = run_estimator(workspace, AVERAGED)
        verdict = verdict_on(workspace, estimate).answer
        fitted = workspace.fitted
        loss = held_out_loss(workspace)
        by_attempt = {TODAY: ends(estimate.value, estimate.interval)}
        usual = ends(fitted.summarise(values_of(fitted)).value, whole_interval(fitted))
        by_attempt[TOWARD_BEHAVIOR] = toward_behavior(fitted) or usual
        by_attempt[WITH_WDR] = with_wdr(workspace) or usual
        by_attempt[CUT] = cut_at_returns(question, estimate.value, estimate.interval)
        steps = fitted.record.steps
        # the same critics for both, so that their losses compare
        instruments = fitted.duals.shape[1]
    smaller = {**settings, "hidden_units": _SMALL, "instruments": instruments}
    with opened(question, smaller) as workspace:
        small_estimate = run_estimator(workspace, AVERAGED)
        small_loss = held_out_loss(workspace)
    by_attempt[ALWAYS_SMALLER] = ends(small_estimate.value, small_estimate.interval)
    if small_loss < loss:
        by_attempt[SMALLER] = by_attempt[ALWAYS_SMALLER]
    else:
        by_attempt[SMALLER] = by_attempt[TODAY]
    return {
        "world": world,
        "rows": rows,
        "draw": draw,
        "truth": question.truth,
        "verdict": verdict,
        "steps": steps,
        "held_out_losses": [loss, small_loss],
        "answers": by_attempt,
    }


def opened(question: Question, settings: dict[str, Any]) -> Any:
    """The open workspace of a question."""
    return open_workspace(question.log, question.policy, make_settings(settings))


def held_out_loss(workspace: Workspace) -> float:
    """The kernel loss on rows that the networks have not seen."""
    scale = workspace.problem.reward_scale
    return workspace.held_pass.diagnostics(scale)["held_out_kernel_loss"]


def values_of(fitted: FittedValues) -> np.ndarray:
    """J (R, 2) by the default's head."""
    return fitted.values_of(AVERAGED)


def whole_interval(fitted: FittedValues) -> Interval:
    """The default's interval, before anything refuses it."""
    return fitted.interval(values_of(fitted))


def ends(value: float, interval: Interval | None) -> dict[str, Any]:
    """A value and the ends of its interval as plain numbers."""
    if interval is None:
        return {"value": value, "interval": None}
    return {"value": value, "interval": [interval.low, interval.high]}


def toward_behavior(fitted: FittedValues) -> dict[str, Any] | None:
    """B + λ u of the behavior policy's value B and the uplift u, with λ = u² / (u² +
    variance of u): the mean of u if it were as likely to be this size as it is.

    None where the behavior policy has no value.
    """
    behavior = fitted.behavior
    if behavior is None or not np.isfinite(behavior[fitted.alive]).all():
        return None
    gains = values_of(fitted) - behavior
    uplift = fitted.summarise(gains)
    units = max(fitted.units, 2.0)
    variance = uplift.deviation**2 * units / (units - 1.0)
    share = uplift.value**2 / (uplift.value**2 + variance)
    values = behavior + share * gains
    return ends(fitted.summarise(values).value, fitted.interval(values))


def with_wdr(workspace: Workspace) -> dict[str, Any] | None:
    """The mean of the networks and `wdr`, weighted by inverse squared standard errors;
    its interval as if both erred alike. None where `wdr` has no interval.
    """
    fitted = workspace.fitted
    try:
        robust = run_estimator(workspace, "wdr")
    except KofflineError:
        return None
    if robust.interval is None or not robust.standard_error:
        return None
    mean = fitted.summarise(values_of(fitted))
    of_networks = mean.deviation**-2.0
    of_robust = robust.standard_error**-2.0
    share = of_networks / (of_networks + of_robust)
    value = share * mean.value + (1.0 - share) * robust.value
    half = share * whole_interval(fitted).width / 2.0
    half += (1.0 - share) * robust.interval.as_measured.width / 2.0
    return {"value": value, "interval": [value - half, value + half]}


def cut_at_returns(
    question: Question, value: float, interval: Interval | None
) -> dict[str, Any]:
    """Value and interval cut at the least and the largest return that the log shows
    from any of its rows on.
    """
    returns = question.log.returns_to_go(question.gamma)
    low = float(returns.min())
    high = float(returns.max())
    cut_value = float(np.clip(value, low, high))
    if interval is None:
        return {"value": cut_value, "interval": None}
    cut_ends = np.clip([interval.low, interval.high], low, high).tolist()
    return {"value": cut_value, "interval": cut_ends}


# --- Runs -----------------------------------------------------------------------------


def cells(draws: int, worlds: Sequence[str]) -> Iterator[tuple[str, int, int]]:
    """Yield (world, rows, draw), draw by draw."""
    for draw in range(draws):
        for name in worlds:
            for rows in ROWS:
                yield name, rows, draw


def summarise(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mean error, coverage and mean width by world, size and attempt, relative to the
    truth, beside the least error.
    """
    groups: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for run in runs:
        groups.setdefault((run["world"], run["rows"]), []).append(run)
    summary = []
    for (world, rows), of_group in groups.items():
        size = abs(of_group[0]["truth"])
        least = least_error(world, rows)
        if least is not None:
            least /= size
        for attempt in ATTEMPTS:
            errors = []
            covered = 0
            widths = []
            for run in of_group:
                by_attempt = run["answers"][attempt]
                errors.append((by_attempt["value"] - run["truth"]) / size)
                if by_attempt["interval"] is None:
                    continue
                low, high = by_attempt["interval"]
                covered += low <= run["truth"] <= high
                widths.append((high - low) / size)
            width = None
            if widths:
                width = float(np.mean(widths))
            summary.append(
                {
                    "world": world,
                    "rows": rows,
                    "attempt": attempt,
                    "draws": len(errors),
                    "error": float(np.mean(np.abs(errors))),
                    "bias": float(np.mean(errors)),
                    "least_error": least,
                    "intervals": len(widths),
                    "covered": covered,
                    "width": width,
                }
            )
    return summary


def main() -> None:
    """Answer what is missing, then print and write the summary."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--draws", type=int, default=12)
    parser.add_argument("--worlds", nargs="*", choices=WORLDS, default=WORLDS)
    parser.add_argument("--runs", type=Path, default=Path("out/small_logs.jsonl"))
    parser.add_argument("--set", nargs="*", default=[], help="settings, as ridge=1e-3")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    options = parse_assignments(arguments.set)

    def measure(world: str, rows: int, draw: int) -> dict[str, Any]:
        return answer(world, rows, draw, options)

    names = ("world", "rows", "draw")
    runs = kept_runs(
        arguments.runs, names, cells(arguments.draws, arguments.worlds), measure
    )
    summary = summarise(runs)
    print(percent_table(summary, _SHOWN))
    if arguments.out is not None:
        command = ["python", "-m", "scripts.bench.small_logs", *sys.argv[1:]]
        content = {"command": shlex.join(command), "summary": summary, "runs": runs}
        arguments.out.write_text(json.dumps(content) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
