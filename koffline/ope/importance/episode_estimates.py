"""All estimators over episodes at once: from a log and a policy to estimates with intervals and warnings."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np

from koffline.data.transitions import Transitions
from koffline.errors import ConfigError, DataError, PolicyError, nearest_name
from koffline.ope.importance import episode_intervals as intervals
from koffline.ope.importance import estimators
from koffline.ope.importance.magic import Blend, magic
from koffline.ope.importance.notes import NO_WEIGHT, notes_on_weights
from koffline.ope.importance.problem import EpisodeProblem, prepare_episodes
from koffline.ope.importance.ratios import AUTO
from koffline.ope.importance.statistics import EpisodeStatistic, standard_error
from koffline.ope.interval import Interval, check_level
from koffline.ope.names import (
    CERTIFIABLE,
    CERTIFIED_EPISODE_KINDS,
    EPISODE_KINDS,
    EPISODES_BOOTSTRAP,
    EPISODES_T,
    OVER_EPISODES,
    WHOLE_WEIGHT,
    WITH_MODEL,
)
from koffline.ope.point_estimate import PointEstimate, Unavailable
from koffline.ope.provenance import check_held_out
from koffline.ope.row_values import RowValues
from koffline.ope.value_functions import ValueFunction
from koffline.policies import ContinuousPolicy, DiscretePolicy

BOOTSTRAP_DRAWS = 1000


def episode_estimates(
    transitions: Transitions,
    policy: DiscretePolicy | ContinuousPolicy,
    gamma: float,
    *,
    q: ValueFunction | RowValues | None = None,
    names: Iterable[str] = OVER_EPISODES,
    level: float = 0.95,
    interval: str = EPISODES_T,
    behavior: str = AUTO,
    clip: float | None = None,
    draws: int = BOOTSTRAP_DRAWS,
    action_draws: int = 8,
    reward_range: tuple[float, float] | None = None,
    seed: int = 0,
) -> dict[str, PointEstimate | Unavailable]:
    """Importance sampling and doubly robust estimates of J, or why there is none, by name.

    names: among ``is``, ``pdis``, ``wis``, ``wpdis`` (rewards alone) and ``dr``, ``wdr``, ``magic``, which
    need the value function ``q``. interval: one of ``EPISODE_KINDS``; every other kind that applies
    is in ``diagnostics["intervals"]``. behavior: ``"auto"``, ``"log"`` or ``"estimate"``. clip: cap of the
    cumulative weights. reward_range: what rewards can be, for certified kinds (default: what the log holds).
    Raises ConfigError for unknown names, kinds and levels; DataError where q fails.
    """
    wanted = _checked_names(names)
    check_level(level)
    if interval not in EPISODE_KINDS:
        raise ConfigError(f"interval {interval!r} is unknown here; {nearest_name(interval, EPISODE_KINDS)}")
    try:
        problem = prepare_episodes(transitions, policy, gamma, behavior=behavior, clip=clip, seed=seed)
    except (DataError, PolicyError) as error:
        return {name: Unavailable(name, str(error)) for name in wanted}
    model = None
    if q is not None and any(name in WITH_MODEL for name in wanted):
        model = model_values(q, transitions, policy, action_draws, seed)
    return {
        name: estimate_one(name, problem, model, level, interval, draws, reward_range, seed)
        for name in wanted
    }


def model_values(
    q: ValueFunction | RowValues,
    transitions: Transitions,
    policy: DiscretePolicy | ContinuousPolicy,
    action_draws: int = 8,
    seed: int = 0,
) -> RowValues:
    """q(s, a), v(s') and v(s_0) of a log, with a note where q may have been fitted to its rows."""
    if isinstance(q, RowValues):
        return q
    generator = np.random.default_rng([seed, 12])
    return RowValues(
        now=q.values(transitions.observations, np.asarray(transitions.actions)),
        later=q.expected(transitions.next_observations, policy, action_draws, generator),
        starts=q.expected(transitions.initial_observations(), policy, action_draws, generator),
        notes=_notes_of(q, transitions),
    )


@np.errstate(over="ignore", invalid="ignore")  # what overflows is found by its value
def estimate_one(
    name: str,
    problem: EpisodeProblem,
    model: RowValues | None,
    level: float = 0.95,
    interval: str = EPISODES_T,
    draws: int = BOOTSTRAP_DRAWS,
    reward_range: tuple[float, float] | None = None,
    seed: int = 0,
) -> PointEstimate | Unavailable:
    """One of ``OVER_EPISODES`` on prepared episodes; ``model`` as of the whole log."""
    reason = _why_not(name, problem, model)
    if reason:
        return Unavailable(name, reason)
    generator = np.random.default_rng([seed, 13, OVER_EPISODES.index(name)])
    statistic = make_statistic(name, problem, model, draws, generator)
    if not np.isfinite(statistic.value):
        return Unavailable(
            name,
            f"the largest weight is e^{problem.weights.log_weights.max():.0f}, beyond what numbers hold; cap "
            "weights with clip, or use a self-normalised estimator (wis, wpdis)",
        )
    size = problem.effective_size(stepwise=name not in WHOLE_WEIGHT)
    found = all_intervals(name, statistic, problem, level, draws, reward_range, generator)
    return PointEstimate(
        name=name,
        value=statistic.value,
        standard_error=None if isinstance(statistic, Blend) else standard_error(statistic),
        interval=found.get(interval),
        effective_sample_size=size,
        warnings=_warnings(name, problem, model, size, interval, found),
        diagnostics={
            **problem.diagnostics(),
            **(statistic.diagnostics() if isinstance(statistic, Blend) else {}),
            "intervals": {kind: made.as_dict() for kind, made in found.items()},
        },
    )


def make_statistic(
    name: str,
    problem: EpisodeProblem,
    model: RowValues | None,
    draws: int,
    generator: np.random.Generator,
) -> EpisodeStatistic | Blend:
    """The estimator by name as a mean over episodes; ``draws`` and ``generator`` for MAGIC's bias."""
    weights, rewards, gamma = problem.weights, problem.rewards, problem.gamma
    plain: dict[str, Callable[..., EpisodeStatistic]] = {
        "is": estimators.trajectory_is,
        "wis": estimators.trajectory_wis,
        "pdis": estimators.per_decision_is,
        "wpdis": estimators.per_decision_wis,
    }
    if name in plain:
        return plain[name](weights, rewards, gamma)
    assert model is not None, "checked before"
    selected = problem.select(model)
    if name == "dr":
        return estimators.doubly_robust(weights, rewards, problem.discounts, gamma, selected)
    whole = estimators.weighted_doubly_robust(weights, rewards, problem.discounts, gamma, selected)
    if name == "wdr":
        return whole
    return magic(whole, intervals.resampled_counts(weights.n_episodes, draws, generator, whole.width))


def all_intervals(
    name: str,
    statistic: EpisodeStatistic | Blend,
    problem: EpisodeProblem,
    level: float,
    draws: int,
    reward_range: tuple[float, float] | None,
    generator: np.random.Generator,
) -> dict[str, Interval]:
    """Every kind of interval that applies to this estimator on this log."""
    whole = statistic.whole if isinstance(statistic, Blend) else statistic
    found = {
        EPISODES_T: intervals.student_interval(
            whole, level, problem.effective_size(stepwise=name not in WHOLE_WEIGHT)
        ),
        EPISODES_BOOTSTRAP: intervals.bootstrap_interval(whole, level, draws, generator),
    }
    if whole is not statistic:
        found = {kind: made and _stretched(made, statistic.value) for kind, made in found.items()}
    if name in CERTIFIABLE and not problem.ratios.is_estimated:
        for kind in CERTIFIED_EPISODE_KINDS:
            found[kind] = intervals.certified_interval(
                problem.weights, problem.rewards, problem.gamma, level, kind, reward_range, CERTIFIABLE[name]
            )
    return {kind: made for kind, made in found.items() if made is not None}


def _stretched(interval: Interval, value: float) -> Interval:
    """An interval of the weighted doubly robust estimate for a blend of it with the model.

    The blend's own spread leaves the model's error out: a wrong model with no variance would look exact.
    """
    return replace(
        interval,
        low=min(interval.low, value),
        high=max(interval.high, value),
        assumptions=f"of the unblended wdr, stretched to hold the blend; {interval.assumptions}",
    )


def _checked_names(names: Iterable[str]) -> tuple[str, ...]:
    wanted = tuple(names)
    for name in wanted:
        if name not in OVER_EPISODES:
            raise ConfigError(f"unknown estimator '{name}'; {nearest_name(name, OVER_EPISODES)}")
    return wanted


def _notes_of(q: ValueFunction, transitions: Transitions) -> tuple[str, ...]:
    notes = check_held_out(q, transitions, allow=True)
    if not notes:
        return ()
    return (f"The value function {q.name} may have seen these episodes: intervals leave its own error out.",)


def _why_not(name: str, problem: EpisodeProblem, model: RowValues | None) -> str | None:
    """Why an estimator has nothing to say, None where it has."""
    if name in WITH_MODEL and model is None:
        return "it needs a value function of the policy; give q, for instance one fitted by kloss or fqe"
    if name == "magic" and problem.weights.n_episodes < 2:
        return "it weighs bias against variance over episodes, this log has one; give more, or use wdr"
    gone = problem.weightless_from
    if gone == 0:
        return NO_WEIGHT.format(steps="the first step")
    if name in WHOLE_WEIGHT and not (problem.weights.last > -np.inf).any():
        return NO_WEIGHT.format(steps=f"{gone} steps" if gone else "its last step")
    return None


def _warnings(
    name: str,
    problem: EpisodeProblem,
    model: RowValues | None,
    size: float,
    interval: str,
    found: dict[str, Interval],
) -> tuple[str, ...]:
    """Sentences about this estimate, those on the weights first."""
    weights, notes = problem.weights, list(problem.ratios.warnings)
    notes += notes_on_weights(
        name, weights.n_episodes, size, problem.clip, problem.cut_share, problem.weightless_from
    )
    if model is not None and name in WITH_MODEL:
        notes.extend(model.notes)
    if interval not in found and weights.n_episodes > 1:
        notes.append(_why_no_interval(name, interval, problem))
    return tuple(notes)


def _why_no_interval(name: str, interval: str, problem: EpisodeProblem) -> str:
    if interval not in CERTIFIED_EPISODE_KINDS:
        return (
            f"No interval of kind {interval}: one episode has all the weight, too many resampled logs have "
            "none, or the level asks for too many of them."
        )
    if name not in CERTIFIABLE:
        return f"No interval of kind {interval}: it needs bounded means of episodes, as of is and pdis."
    if problem.ratios.is_estimated:
        return f"No interval of kind {interval}: it needs exact behavior probabilities, these are estimated."
    return f"No interval of kind {interval}: it needs episodes of equal weight."
