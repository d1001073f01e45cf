"""``diagnose``: test a value function on rows it was not fitted to, and show where it
fails.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Float

from koffline.data.columns import rows_if_given
from koffline.data.copies import without_copies
from koffline.data.late_ends import without_late_ends
from koffline.data.sources import LogMapping, LogSource, open_transitions
from koffline.data.spaces import SpaceRequest
from koffline.data.structure import symptoms_of
from koffline.data.transitions import Discrete, Transitions
from koffline.errors import printable
from koffline.json_types import JsonObject
from koffline.ope.bellman_test import BellmanTest, bellman_test
from koffline.ope.bellman_test.witness import (
    Region,
    ResidualProfile,
    WitnessMap,
    make_profile,
)
from koffline.ope.cross_fit import CrossFitted
from koffline.ope.log.coverage import Coverage, describe_coverage, measure_coverage
from koffline.ope.log.problem import EvaluationProblem, prepare_problem
from koffline.ope.results import Cells, LogResult, describe_log, plain
from koffline.ope.value_functions import (
    ValueFunction,
    ValueSource,
    as_value_function,
    log_to_test,
)
from koffline.policies.base import Policy, PolicySource
from koffline.policy_specs import as_policy

_MOST_NUMBERS = 6  # numbers shown of a state
_MOST_MAPS = 6  # most maps, one per discrete action
_SHOWN = (
    "Places, maps and profiles are of the model of the first fold, on the {:,} rows it"
    " has not seen: each model has errors of its own, which cancel where folds are"
    " pooled."
)


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class Diagnosis(LogResult):
    """Result of `diagnose`: whether a value function is Q^π on the log's rows, and
    where it is not.

    Values and residuals are in the user's units. ``value``: E_{s0, a~π} Q, what the
    value function says the policy is worth. ``regions``: places where residuals of one
    sign gather, the strongest first. ``maps``: the same over two-dimensional states.
    ``by_step``: residuals by step; None if the log has no episodes.
    ``shown_test``: the test on the rows that regions, maps and profiles show: all rows,
    or those that ``shown`` describes. ``findings``: sentences on the results;
    ``warnings``: their limitations.
    """

    test: BellmanTest
    shown_test: BellmanTest = field(repr=False)
    value: float
    logged_return: float | None
    coverage: Coverage = field(repr=False)
    by_value: ResidualProfile = field(metadata={"key": "residual_by_value"})
    by_step: ResidualProfile | None = field(metadata={"key": "residual_by_step"})
    regions: tuple[Region, ...]
    maps: tuple[WitnessMap, ...] = field(repr=False)
    shown: str | None
    findings: tuple[str, ...]
    warnings: tuple[str, ...]

    def as_dict(self) -> JsonObject:
        """The record as plain JSON types, without maps and rows."""
        test = self.test
        content = {
            "model": test.value_function,
            "policy": test.policy,
            **super().as_dict(),
            "kernel_loss": test.kernel_loss,
            "kernel_ratio": test.kernel_ratio,
            "coverage": self.coverage.fraction,
        }
        return {name: plain(value) for name, value in content.items()}

    def __str__(self) -> str:
        return "\n".join(
            [*self.findings, *(f"warning: {sentence}" for sentence in self.warnings)]
        )

    def __repr__(self) -> str:
        test = self.test
        answer = "not rejected"
        if test.rejects:
            answer = "rejected"
        return printable(
            f"Diagnosis({answer}, p = {test.p_value:.3g}; {test.value_function} for"
            f" {test.policy})"
        )

    def frame_rows(self) -> list[Cells]:
        """A row for each place where residuals of one sign gather, the strongest first;
        one row without a place if there is none.
        """
        about: Cells = {
            "model": self.test.value_function,
            "policy": self.test.policy,
            "rejects": self.test.rejects,
            "p_value": self.test.p_value,
        }
        rows: list[Cells] = []
        for region in self.regions:
            rows.append(
                {
                    **about,
                    "state": np.ravel(region.center).tolist(),
                    "action": np.ravel(region.action).tolist(),
                    "rows": region.size,
                    "mean_residual": region.mean_residual,
                    "standard_error": region.standard_error,
                    "z_score": region.z_score,
                    "beyond_chance": bool(region.is_significant),
                }
            )
        return rows or [about]


def diagnose(  # noqa: PLR0913
    q: ValueSource,
    transitions: LogSource,
    policy: PolicySource,
    gamma: float | None = None,
    *,
    mapping: LogMapping = None,
    action_space: SpaceRequest | None = None,
    seed: int = 0,
    trained_on: LogSource | None = None,
    allow_training_rows: bool = False,
    regions: int = 5,
    **options: Any,
) -> Diagnosis:
    """Test whether q solves the policy's Bellman equation, and find where it does not.

    Returns a `Diagnosis`; its values and residuals are in the units of the log's
    rewards. q: anything `koffline.bellman_test` takes as a value function, or what
    `koffline.cross_fit` made of this log. transitions, policy, gamma, mapping,
    action_space, seed, trained_on, allow_training_rows and ``options`` (level, draws,
    …): as in `koffline.bellman_test`. regions: how many places with the largest errors
    to list. Raises KofflineError in one line (DataError for a log on disk).
    """
    started = time.perf_counter()
    transitions = log_to_test(q, transitions, action_space, mapping)
    space = transitions.action_space
    shape = transitions.observation_shape
    policy = as_policy(policy, space, shape, features=transitions.metadata.features)
    function: ValueFunction | CrossFitted
    if isinstance(q, CrossFitted):
        function = q
    else:
        function = as_value_function(q, space, shape)
    judged = without_late_ends(transitions)
    merged = without_copies(judged)
    log = merged.transitions
    if isinstance(function, CrossFitted):
        function.check_rows(judged)
        is_kept = merged.row_of == np.arange(len(judged))
        function = function.of_rows(np.flatnonzero(is_kept))
    if trained_on is not None:
        trained_on = open_transitions(trained_on, action_space, mapping=mapping)
    test = bellman_test(
        function,
        log,
        policy,
        gamma,
        seed=seed,
        trained_on=trained_on,
        allow_training_rows=allow_training_rows,
        **options,
    )
    shown = Shown(test, log)
    if isinstance(function, CrossFitted):
        shown = _first_model(function, log, policy, test, options)
    draws = test.rows.settings.action_draws
    generator = np.random.default_rng([seed, 1])
    problem = prepare_problem(log, policy, test.gamma, draws, generator)
    coverage = measure_coverage(problem, generator)
    values = _start_values(function, log, policy, problem, draws, generator)
    shares = problem.start_weights / problem.start_weights.sum()
    about_log = describe_log(transitions, seed, started)
    about_log["notes"] = (*about_log["notes"], *policy.notes)
    places = tuple(shown.test.witness.top_regions(regions))
    logged_return = None
    if log.has_episodes:
        logged_return = float(log.returns(test.gamma) @ shares)
    return Diagnosis(
        test=test,
        shown_test=shown.test,
        value=float(values @ shares),
        logged_return=logged_return,
        coverage=coverage,
        by_value=shown.by_value(),
        by_step=shown.by_step(),
        regions=places,
        maps=_maps(shown.test),
        shown=shown.sentence,
        findings=_findings(test, coverage, places),
        warnings=(
            *structure_warnings(transitions),
            *dict.fromkeys(test.warnings),
            *merged.notes,
        ),
        gamma=test.gamma,
        settings={
            **options,
            "regions": regions,
            "allow_training_rows": allow_training_rows,
        },
        **about_log,
    )


@dataclass(frozen=True, eq=False)
class Shown:
    """The rows that places, maps and profiles show, and the test on them.

    ``sentence``: which rows these are; None for all.
    """

    test: BellmanTest
    log: Transitions
    sentence: str | None = None

    def by_value(self) -> ResidualProfile:
        """Residuals by value."""
        rows = self.test.rows
        return make_profile(rows.values, rows.residuals, rows.weights)

    def by_step(self) -> ResidualProfile | None:
        """Residuals by step; None without episodes."""
        if self.log.steps is None:
            return None
        rows = self.test.rows
        steps = 1.0 * np.asarray(self.log.steps)
        return make_profile(steps, rows.residuals, rows.weights)


def _first_model(
    function: CrossFitted,
    log: Transitions,
    policy: Policy,
    test: BellmanTest,
    options: dict[str, Any],
) -> Shown:
    """The first model on the rows that its fold held out. test: of all models; options:
    of that test.
    """
    held_out, model = next(function.over(log))
    rows = log.select(held_out)
    of_model = bellman_test(
        model,
        rows,
        policy,
        test.gamma,
        seed=test.rows.settings.seed,
        allow_training_rows=True,
        **options,
    )
    return Shown(of_model, rows, _SHOWN.format(len(held_out)))


def _start_values(
    function: ValueFunction | CrossFitted,
    log: Transitions,
    policy: Policy,
    problem: EvaluationProblem,
    draws: int,
    generator: np.random.Generator,
) -> Float[np.ndarray, " episode"]:
    """E_{a~π} Q at the start of every episode, by the model that has not seen it.

    draws: of continuous actions.
    """
    starts = problem.episode_starts
    values = np.empty(len(starts))
    for rows_of_model, model in function.over(log):
        is_valued = np.isin(starts, rows_of_model)
        chosen = starts[is_valued]
        values[is_valued] = model.expected(
            log.observations[chosen],
            policy,
            draws,
            generator,
            rows_if_given(log.action_mask, chosen),
        )
    return values


def structure_warnings(log: Transitions) -> tuple[str, ...]:
    """One sentence for each sign that the log is not what it says it is."""
    return tuple(
        f"The log may be misread: {symptom.text}." for symptom in symptoms_of(log)
    )


def _maps(test: BellmanTest) -> tuple[WitnessMap, ...]:
    """Maps over two-dimensional states, one per discrete action; none if there are many
    actions.
    """
    log = test.rows.transitions
    space = log.action_space
    if math.prod(log.observation_shape) != 2:
        return ()
    if not isinstance(space, Discrete) or space.n > _MOST_MAPS:
        return ()
    return tuple(test.witness.map(int(action)) for action in np.unique(log.actions))


def _findings(
    test: BellmanTest, coverage: Coverage, regions: tuple[Region, ...]
) -> tuple[str, ...]:
    """The conclusion, the kernel loss in words, and the clearest region of error if one
    is significant.
    """
    findings = [f"Bellman test: {test.conclusion}."]
    if math.isfinite(test.kernel_ratio):
        findings.append(
            f"The kernel loss on these rows is {test.kernel_ratio:.3g} times what noise"
            " alone would leave (1: nothing left to explain)."
        )
    significant = [region for region in regions if region.is_significant]
    if significant:
        findings.append(_describe_region(significant[0], len(significant)))
    findings.append(f"{describe_coverage(coverage.fraction)}.")
    return tuple(findings)


def describe_place(center: np.ndarray) -> str:
    """Short text of a state."""
    parts = [f"{number:.3g}" for number in center[:_MOST_NUMBERS]]
    if len(center) > _MOST_NUMBERS:
        parts.append("…")
    return f"({', '.join(parts)})"


def describe_action(action: int | np.ndarray) -> str:
    """Short text of an action."""
    if isinstance(action, np.ndarray):
        return describe_place(action)
    return str(action)


def _describe_region(region: Region, count: int) -> str:
    """Sentence on the clearest of ``count`` significant regions."""
    side = "above" if region.mean_residual < 0.0 else "below"
    listed = ""
    if count > 1:
        listed = f" ({count} such places are listed)"
    return (
        f"The error is clearest near state {describe_place(region.center)}, action"
        f" {describe_action(region.action)}: there the value is {side} reward plus"
        f" discounted next value by {abs(region.mean_residual):.3g} ±"
        f" {region.standard_error:.2g} on average over {region.size} rows{listed}."
    )
