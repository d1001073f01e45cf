"""Everybody's answers to one question of the leaderboard: koffline, d3rlpy's FQE, a
plain FQE, scope-rl.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from koffline.data.transitions import Discrete, Transitions
from koffline.ope.evaluation import estimate_all
from koffline.ope.names import AVERAGED
from koffline.policies import DiscretePolicy, Policy
from scripts.bench import leaderboard_d3rlpy, leaderboard_scope_rl
from scripts.bench.leaderboard_fqe import fqe_value

LEVEL = 0.95


@dataclass(frozen=True)
class Answer:
    """``value`` is None where there is a ``reason``; an interval of its own kind may be
    missing.

    A row with an interval and no value is a bound: it belongs to no single estimate.
    """

    method: str
    value: float | None = None
    low: float | None = None
    high: float | None = None
    kind: str | None = None
    seconds: float | None = None
    reason: str | None = None
    verdict: str | None = None  # of koffline, beside its `kloss+fqe`

    def as_dict(self) -> dict[str, Any]:
        """What there is, to five digits."""
        items = {key: item for key, item in asdict(self).items() if item is not None}
        for key, item in items.items():
            if isinstance(item, float):
                items[key] = float(f"{item:.5g}")
        return items


def answer_all(
    log: Transitions,
    policy: Policy,
    gamma: float,
    seed: int,
    options: dict[str, Any],
    fqe_steps: int,
) -> Iterator[Answer]:
    """Every method's answer. options: koffline's settings. fqe_steps: gradient steps of
    d3rlpy's FQE.

    The plain FQE takes three times as many: its steps are cheaper.
    """
    yield from _koffline(log, policy, gamma, seed, options)
    model = None
    if leaderboard_d3rlpy.is_greedy(policy, log.observations):
        answer, model = _d3rlpy(log, policy, gamma, seed, fqe_steps)
        yield answer
    else:
        yield Answer("d3rlpy FQE", reason="it evaluates greedy policies only")
    started = time.perf_counter()
    value = fqe_value(log, policy, gamma, seed, 3 * fqe_steps)
    yield Answer("plain FQE", value, seconds=time.perf_counter() - started)
    if leaderboard_scope_rl.is_installed():
        yield from _scope_rl(log, policy, gamma, seed, model)


def _koffline(
    log: Transitions, policy: Policy, gamma: float, seed: int, options: dict[str, Any]
) -> Iterator[Answer]:
    """All of `estimate_all`.

    What several of them share is in the seconds of the first that needs it.
    """
    table = estimate_all(log, policy, gamma, level=LEVEL, seed=seed, **options)
    for row in table.rows:
        estimate = row.estimate
        if estimate is None:
            yield Answer(row.name, reason=row.reason)
            continue
        interval = estimate.interval
        if row.name == AVERAGED:
            verdict = table.verdict.answer
        else:
            verdict = None
        answer = Answer(row.name, estimate.value, seconds=row.seconds, verdict=verdict)
        if interval is not None:
            answer = replace(
                answer, low=interval.low, high=interval.high, kind=interval.kind
            )
        yield answer
    for bound in table.bounds:
        if bound.interval is None:
            yield Answer(bound.kind, reason=bound.reason)
        else:
            interval = bound.interval
            yield Answer(bound.kind, None, interval.low, interval.high, interval.kind)


def _d3rlpy(
    log: Transitions, policy: Policy, gamma: float, seed: int, steps: int
) -> tuple[Answer, Callable[[np.ndarray], np.ndarray] | None]:
    """Its answer, and its values of all actions for scope-rl's doubly robust
    estimator.
    """
    started = time.perf_counter()
    fqe = leaderboard_d3rlpy.fit_fqe(log, policy, gamma, seed, n_steps=steps)
    value = fqe.start_value(log, policy)
    seconds = time.perf_counter() - started
    if not math.isfinite(value):
        return Answer("d3rlpy FQE", seconds=seconds, reason="it diverged"), None
    model = None
    if isinstance(log.action_space, Discrete):
        n = log.action_space.n

        def model(observations: np.ndarray) -> np.ndarray:
            actions = [np.full(len(observations), action) for action in range(n)]
            return np.stack(
                [fqe.values(observations, action) for action in actions], axis=1
            )

    return Answer("d3rlpy FQE", value, seconds=seconds), model


def _scope_rl(
    log: Transitions,
    policy: Policy,
    gamma: float,
    seed: int,
    model: Callable[..., np.ndarray] | None,
) -> Iterator[Answer]:
    padded: dict[str, Any] = {}
    for name in leaderboard_scope_rl.ESTIMATORS:
        method = f"scope-rl {name}"
        reason = leaderboard_scope_rl.refusal(name, log, policy, model is not None)
        if reason is not None:
            yield Answer(method, reason=reason)
            continue
        assert isinstance(policy, DiscretePolicy)
        padded = padded or leaderboard_scope_rl.pad_episodes(log, policy, gamma, model)
        started = time.perf_counter()
        value, low, high = leaderboard_scope_rl.estimate(name, padded, LEVEL, seed)
        seconds = time.perf_counter() - started
        yield Answer(method, value, low, high, "bootstrap", seconds)
