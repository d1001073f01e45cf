"""``diagnose``: test a value function on rows it has not seen, and look where it fails. Top to bottom."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from koffline.data.copies import without_copies
from koffline.data.transitions import Discrete, Transitions
from koffline.errors import ConfigError
from koffline.ope.bellman_test import BellmanTest, TestedRows, bellman_test
from koffline.ope.bellman_test.witness import Witness, WitnessMap
from koffline.ope.coverage import measure_coverage
from koffline.ope.cross_fit import CrossFitted, read_value_function
from koffline.ope.diagnose.diagnosis import Diagnosis, WitnessLine
from koffline.ope.diagnose.findings import collect_findings, collect_warnings
from koffline.ope.diagnose.profiles import Profile, make_profile
from koffline.ope.problem import EvaluationProblem, prepare_problem
from koffline.ope.provenance import Provenance
from koffline.ope.value_functions import ValueFunction
from koffline.policies import Policy
from koffline.policy_specs import as_policy
from koffline.store.run_record import versions

_MOST_MAPS = 6  # one per discrete action
_RESOLUTION = 50
_SHOWN = (
    "Places, maps and profiles are of the model of the first fold, on the {:,} rows it has not seen: each "
    "model has errors of its own, which cancel where folds are pooled."
)


def diagnose(
    q: Any,
    transitions: Transitions,
    policy: Any,
    gamma: float | None = None,
    *,
    seed: int = 0,
    trained_on: Transitions | Provenance | None = None,
    allow_training_rows: bool = False,
    regions: int = 5,
    **options: Any,
) -> Diagnosis:
    """Does q solve the policy's Bellman equation, and where does it not?

    q: anything `koffline.bellman_test` takes as a function, or what `koffline.ope.cross_fit.cross_fit` made
    of this very log. policy, gamma, trained_on, allow_training_rows and ``options`` (method, level, window,
    …): as in `koffline.bellman_test`. regions: how many places of the largest error to name.
    Raises KofflineError in one line.
    """
    started = time.perf_counter()
    if isinstance(regions, bool) or not isinstance(regions, int) or regions < 1:
        raise ConfigError(f"regions is {regions!r}; give a number of places of at least 1")
    space, shape = transitions.action_space, transitions.observation_shape
    policy = as_policy(policy, space, shape)
    function = read_value_function(q, space, shape)
    merged = without_copies(transitions)
    given, transitions = transitions, merged.transitions
    freshness: dict[str, Any] = {"trained_on": trained_on, "allow_training_rows": allow_training_rows}
    test = bellman_test(function, transitions, policy, gamma, seed=seed, **freshness, **options)
    shown = _shown(function, test, transitions, policy, options)
    draws, generator = int(options.get("action_draws", 8)), np.random.default_rng([seed, 1])
    problem = prepare_problem(transitions, policy, test.gamma, draws, generator)
    coverage, ratio = measure_coverage(problem, generator), _kernel_ratio(test)
    value = _start_value(function, transitions, policy, problem, draws, generator)
    looks = _look(shown, regions)
    return Diagnosis(
        test=test,
        value=value,
        behavior_return=_behavior_return(transitions, test.gamma),
        kernel_loss=test.kernel_loss,
        kernel_ratio=ratio,
        coverage=coverage,
        **looks,
        findings=collect_findings(
            test, ratio, coverage, looks["regions"], looks["by_value"], looks["by_step"]
        ),
        warnings=(*collect_warnings(test, coverage, function.notes), *merged.notes),
        n_transitions=len(given),
        n_episodes=given.n_episodes,
        source=given.metadata.source,
        data_sha256=given.sha256,
        seed=seed,
        seconds=time.perf_counter() - started,
        settings=_named({**options, "regions": regions, "allow_training_rows": allow_training_rows}),
        versions=versions(),
    )


@dataclass(frozen=True, eq=False)
class _Shown:
    """The test whose rows and witness are drawn, its log, and a sentence where that is not all of it."""

    test: BellmanTest
    log: Transitions
    note: str | None = None


def _shown(
    function: ValueFunction | CrossFitted,
    test: BellmanTest,
    transitions: Transitions,
    policy: Policy,
    options: dict[str, Any],
) -> _Shown:
    """The test itself; of cross-fitted values the first model on its own rows, which are fresh."""
    if not isinstance(function, CrossFitted):
        return _Shown(test, transitions)
    rows, model = next(function.over(transitions))
    log = transitions.select(rows)
    first = bellman_test(model, log, policy, test.gamma, seed=test.seed, allow_training_rows=True, **options)
    return _Shown(first, log, _SHOWN.format(len(rows)))


def _look(shown: _Shown, regions: int) -> dict[str, Any]:
    """Residuals, places, maps and profiles: fields of `Diagnosis`."""
    test, log = shown.test, shown.log
    assert test.witness is not None
    assert test.rows is not None
    by_value, by_step = _profiles(test.rows, log)
    return {
        "residuals": test.rows,
        "by_value": by_value,
        "by_step": by_step,
        "regions": tuple(test.witness.top_regions(regions)),
        "maps": _maps(test.witness, log, test.kind),
        "lines": _lines(test.witness, log, test.kind),
        "shown": shown.note,
    }


def _named(options: dict[str, Any]) -> dict[str, Any]:
    """Options for the record: functions and kernels by their names."""
    plain = (bool, int, float, str, type(None))
    return {
        key: value if isinstance(value, plain) else getattr(value, "__name__", str(value))
        for key, value in options.items()
    }


def _profiles(rows: TestedRows, log: Transitions) -> tuple[Profile, Profile | None]:
    """Residuals against the value and against the time step; None where there are no episodes."""
    by_value = make_profile("value", rows.values, rows.residuals, rows.weights)
    if log.steps is None:
        return by_value, None
    steps = np.asarray(log.steps, dtype=np.float64)
    return by_value, make_profile("time step", steps, rows.residuals, rows.weights)


def _kernel_ratio(test: BellmanTest) -> float:
    """ΣΣ δ_i k_ij δ_j over its diagonal: 1 where residuals are noise. NaN where all residuals are zero."""
    assert test.rows is not None
    assert test.witness is not None
    weighted = np.square(test.rows.window_residuals * test.rows.weights)
    own = test.witness.space.kernel.diagonal(torch.as_tensor(test.witness.inputs)).numpy()
    diagonal = float(weighted @ own)
    return test.statistic * test.n / diagonal if diagonal > 0.0 else math.nan


def _start_value(
    function: ValueFunction | CrossFitted,
    transitions: Transitions,
    policy: Policy,
    problem: EvaluationProblem,
    draws: int,
    generator: np.random.Generator,
) -> float:
    """E_{s0, a~π} Q(s0, a) over the log's start states, as its rows are weighted."""
    starts = transitions.episode_starts if transitions.has_episodes else np.arange(len(transitions))
    values = np.empty(len(starts))
    parts = (
        list(function.over(transitions))
        if isinstance(function, CrossFitted)
        else [(np.arange(len(transitions)), function)]
    )
    for rows, part in parts:
        own = np.isin(starts, rows)
        values[own] = part.expected(transitions.observations[starts[own]], policy, draws, generator)
    weights = problem.start_weights
    return float(values @ weights / weights.sum())


def _behavior_return(transitions: Transitions, gamma: float) -> float | None:
    """Mean discounted return of the log's own episodes as recorded, None without episodes."""
    if not transitions.has_episodes:
        return None
    starts = transitions.episode_starts
    weights = np.ones(len(starts)) if transitions.weights is None else transitions.weights[starts]
    return float(np.average(transitions.returns(gamma), weights=weights)) if weights.any() else None


def _maps(witness: Witness, transitions: Transitions, kind: str) -> tuple[WitnessMap, ...]:
    """One map per discrete action, one over all actions otherwise; none unless states are two numbers."""
    if math.prod(transitions.observation_shape) != 2:
        return ()
    return tuple(witness.map(_RESOLUTION, action=action) for action in _actions(transitions, kind))


def _lines(witness: Witness, transitions: Transitions, kind: str) -> tuple[WitnessLine, ...]:
    """The same for states of one number and discrete actions or V(s)."""
    shape = transitions.observation_shape
    continuous = not isinstance(transitions.action_space, Discrete) and kind == "action"
    if math.prod(shape) != 1 or continuous:
        return ()
    flat = np.asarray(transitions.observations, dtype=np.float64).reshape(len(transitions))
    x = np.linspace(flat.min(), flat.max(), 4 * _RESOLUTION)
    lines = []
    for action in _actions(transitions, kind):
        actions = None if action is None else np.full(len(x), action)
        if action is None and kind == "action":
            continue
        lines.append(WitnessLine(x, witness(x.reshape(-1, *shape), actions), action))
    return tuple(lines)


def _actions(transitions: Transitions, kind: str) -> list[int | None]:
    """The logged actions one by one, where they are few and matter; else None for all together."""
    space = transitions.action_space
    if kind != "action" or not isinstance(space, Discrete) or space.n > _MOST_MAPS:
        return [None]
    return [int(action) for action in np.unique(transitions.actions)]
