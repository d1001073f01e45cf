"""``diagnose``: test a value function on rows it has not seen, and look where it fails. Top to bottom."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from koffline.data.transitions import Discrete, Transitions
from koffline.data.units import without_copies
from koffline.errors import ConfigError
from koffline.ope.bellman_test.front import BellmanTest, bellman_test
from koffline.ope.bellman_test.witness import Region, Witness, WitnessMap
from koffline.ope.coverage import Coverage, measure_coverage
from koffline.ope.cross_fit import CrossFitted, read_value_function, row_parts
from koffline.ope.estimate import plain
from koffline.ope.findings import Profile, collect_findings, collect_warnings, make_profile
from koffline.ope.problem import prepare_problem
from koffline.ope.provenance import Provenance
from koffline.ope.results import Record
from koffline.ope.value_functions import ACTION
from koffline.policy_specs import as_policy
from koffline.store.run_record import versions

_MOST_MAPS = 6  # one per discrete action
_RESOLUTION = {1: 200, 2: 50}  # of a map, by how many numbers a state has
_BEHIND = ("shown_test", "by_value", "by_step", "maps")
_SHOWN = (
    "Places, maps and profiles are of the model of the first fold, on the {:,} rows it has not seen: each "
    "model has errors of its own, which cancel where folds are pooled."
)


@dataclass(frozen=True, eq=False)
class Diagnosis(Record):
    """Is this value function Q^π where the log has rows, and where is it not?

    ``value``: E_{s0, a~π} Q, what the value function says the policy is worth. ``regions``: where residuals
    of one sign gather, the strongest first. ``maps``: the same over one- or two-dimensional states.
    ``by_step``: None where the log has no episodes. ``shown_test``: of the rows that regions, maps and
    profiles are of: all, or those that ``shown`` names. ``findings`` say in sentences what was seen,
    ``warnings`` what to keep in mind. User's units.
    """

    test: BellmanTest
    shown_test: BellmanTest
    value: float
    behavior_return: float | None
    coverage: Coverage
    by_value: Profile
    by_step: Profile | None
    regions: tuple[Region, ...]
    maps: tuple[WitnessMap, ...]
    shown: str | None
    findings: tuple[str, ...]
    warnings: tuple[str, ...]
    n_transitions: int
    n_episodes: int
    source: str | None
    data_sha256: str
    seed: int
    seconds: float
    settings: dict[str, Any]
    versions: dict[str, str]

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types; maps and rows stay behind."""
        test = self.test
        found = {
            "model": test.value_function,
            "policy": test.policy,
            "gamma": test.gamma,
            **{name: value for name, value in vars(self).items() if name not in _BEHIND},
            "test": test.as_dict(),
            "kernel_loss": test.kernel_loss,
            "kernel_ratio": test.kernel_ratio,
            "coverage": self.coverage.fraction,
            "regions": [{k: v for k, v in vars(region).items() if k != "rows"} for region in self.regions],
            "residual_by_value": vars(self.by_value),
            "residual_by_step": None if self.by_step is None else vars(self.by_step),
        }
        return {name: plain(value) for name, value in found.items()}

    def __str__(self) -> str:
        return "\n".join([*self.findings, *(f"warning: {sentence}" for sentence in self.warnings)])


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
    if regions < 1:
        raise ConfigError(f"regions is {regions}; give a number of places of at least 1")
    space, shape = transitions.action_space, transitions.observation_shape
    policy = as_policy(policy, space, shape)
    function = read_value_function(q, space, shape)
    merged = without_copies(transitions)
    log = merged.transitions
    freshness: dict[str, Any] = {"trained_on": trained_on, "allow_training_rows": allow_training_rows}
    test = bellman_test(function, log, policy, gamma, seed=seed, **freshness, **options)
    seen, seen_log, shown = test, log, None
    if isinstance(function, CrossFitted):  # the first model on its own rows, which are fresh
        rows, model = next(function.over(log))
        seen_log, shown = log.select(rows), _SHOWN.format(len(rows))
        freshness = {"allow_training_rows": True}
        seen = bellman_test(model, seen_log, policy, test.gamma, seed=seed, **freshness, **options)
    draws, generator = int(options.get("action_draws", 8)), np.random.default_rng([seed, 1])
    problem = prepare_problem(log, policy, test.gamma, draws, generator)
    coverage = measure_coverage(problem, generator)
    starts, values = problem.episode_starts, np.empty(len(problem.episode_starts))
    for rows, part in row_parts(function, log):
        own = np.isin(starts, rows)
        values[own] = part.expected(log.observations[starts[own]], policy, draws, generator)
    tested, steps = seen.rows, seen_log.steps
    by_value = make_profile("value", tested.values, tested.residuals, tested.weights)
    by_step = None
    if steps is not None:
        by_step = make_profile("time step", 1.0 * np.asarray(steps), tested.residuals, tested.weights)
    places = tuple(seen.witness.top_regions(regions))
    return Diagnosis(
        test=test,
        shown_test=seen,
        value=float(values @ problem.start_weights / problem.start_weights.sum()),
        behavior_return=_behavior_return(log, test.gamma),
        coverage=coverage,
        by_value=by_value,
        by_step=by_step,
        regions=places,
        maps=_maps(seen.witness, seen_log, test.kind),
        shown=shown,
        findings=collect_findings(test, coverage, places, by_value, by_step),
        warnings=(*collect_warnings(test, coverage, function.notes), *merged.notes),
        n_transitions=len(transitions),
        n_episodes=transitions.n_episodes,
        source=transitions.metadata.source,
        data_sha256=transitions.sha256,
        seed=seed,
        seconds=round(time.perf_counter() - started, 3),
        settings=_named({**options, "regions": regions, "allow_training_rows": allow_training_rows}),
        versions=versions(),
    )


def _named(options: dict[str, Any]) -> dict[str, Any]:
    """Options for the record: functions and kernels by their names."""
    known = (bool, int, float, str, type(None))
    names = {key: getattr(value, "__name__", str(value)) for key, value in options.items()}
    return {key: value if isinstance(value, known) else names[key] for key, value in options.items()}


def _behavior_return(log: Transitions, gamma: float) -> float | None:
    """Mean discounted return of the log's own episodes as recorded, None without episodes."""
    if not log.has_episodes:
        return None
    weights = np.ones(log.n_episodes) if log.weights is None else log.weights[log.episode_starts]
    return float(np.average(log.returns(gamma), weights=weights)) if weights.any() else None


def _maps(witness: Witness, log: Transitions, kind: str) -> tuple[WitnessMap, ...]:
    """One map per discrete action, where they are few; else one over all. None unless states are one number
    or two.
    """
    numbers, space = math.prod(log.observation_shape), log.action_space
    if numbers not in _RESOLUTION:
        return ()
    by_action = kind == ACTION and isinstance(space, Discrete) and space.n <= _MOST_MAPS
    actions = [int(action) for action in np.unique(log.actions)] if by_action else [None]
    columns = tuple(range(numbers))
    return tuple(witness.map(_RESOLUTION[numbers], action, columns) for action in actions)
