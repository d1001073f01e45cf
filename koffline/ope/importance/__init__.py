"""Importance sampling and doubly robust estimates over the episodes of a log."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from koffline.errors import DataError
from koffline.ope import names
from koffline.ope.importance import episode_intervals as intervals
from koffline.ope.importance import episode_means as statistics
from koffline.ope.importance.episode_means import (
    EpisodeStatistic,
    StepwiseMean,
    make_statistic,
)
from koffline.ope.importance.episodes import EpisodeProblem, RowValues
from koffline.ope.results import PointEstimate, Uplift

BOOTSTRAP_DRAWS = 1000
_FEW_EPISODES = 10.0
# below it, 95 % intervals covered the truth in 76 to 91 % of logs of finite chains
_UNEVEN = 0.5
_CUT_SHARE = 0.01
_NEEDS = {
    False: (
        "one episode or cluster has all weight, many resampled logs none, or the level"
        " asks for too many"
    ),
    True: (
        "it needs exact behavior probabilities, episodes of equal weight, no clusters,"
        " and reward_bounds"
    ),
}
_NO_WEIGHT = (
    "the policy takes none of the logged actions: every episode's weight is zero after"
    " {steps}; use a policy that can take them (epsilon:0.1:<policy>) or an estimator"
    " without episode weights (kloss, fqe, mwl)"
)


@np.errstate(over="ignore", invalid="ignore")  # overflow is detected in the results
def estimate_one(
    name: str,
    problem: EpisodeProblem,
    model: RowValues | None,
    level: float = 0.95,
    interval: str = names.EPISODES_T,
    draws: int = BOOTSTRAP_DRAWS,
    reward_range: tuple[float, float] | None = None,
    seed: int = 0,
) -> PointEstimate:
    """Run one of ``names.OVER_EPISODES`` on prepared episodes. model: values at all
    rows of the log.

    interval: one of ``EPISODE_KINDS``; ``diagnostics["intervals"]`` holds every kind
    that applies.
    reward_range: possible rewards, for certified kinds (default: the log's range).
    Raises DataError if the estimator does not apply.
    """
    reason = _why_not(name, problem)
    if reason:
        raise DataError(reason)
    own = None
    if name in names.WITH_MODEL:
        assert model is not None
        rows, episodes = problem.counted
        own = RowValues(model.now[rows], model.later[rows], model.starts[episodes])
    whole = make_statistic(name, problem, own)
    value = whole.value
    error = statistics.standard_error(whole.deviations)
    mixed = {}
    if name == "magic":
        assert isinstance(whole, StepwiseMean)
        if problem.clusters is None:
            numbers = np.arange(problem.n_episodes)
        else:
            numbers = problem.clusters
        cuts, mix = statistics.magic(
            whole, intervals.resample(whole, numbers, draws, seed)
        )
        value = float(mix @ whole.partial_values(cuts))
        error = None
        mixed = {"blend_steps": cuts, "blend_shares": mix.tolist()}
    if not np.isfinite(value):
        raise DataError(
            f"the largest weight is e^{problem.log_weights.max():.0f}, beyond what"
            " numbers hold; cap weights with clip, or use a self-normalised estimator"
            " (wis, wpdis)"
        )
    size = problem.effective_size(stepwise=name not in names.WHOLE_WEIGHT)
    made = {
        names.EPISODES_T: intervals.student_interval(
            whole.value, whole.deviations, level, size
        ),
        names.EPISODES_BOOTSTRAP: intervals.bootstrap_interval(
            whole, level, draws, seed
        ),
    }
    if name in names.CERTIFIABLE and not problem.ratios.is_estimated:
        for kind in names.CERTIFIED_EPISODE_KINDS:
            stepwise = names.CERTIFIABLE[name]
            made[kind] = intervals.certified_interval(
                problem, level, kind, reward_range, stepwise
            )
    found = {kind: one for kind, one in made.items() if one is not None}
    # the blend's own spread omits the model's error, so that a wrong model would seem
    # exact
    if mixed:
        found = {
            kind: replace(
                one,
                low=min(one.low, value),
                high=max(one.high, value),
                assumptions=(
                    "of the unblended wdr, stretched to hold the blend;"
                    f" {one.assumptions}"
                ),
            )
            for kind, one in found.items()
        }
    return PointEstimate(
        name=name,
        value=value,
        standard_error=error,
        interval=found.get(interval),
        uplift=None if mixed else _uplift(problem, whole, level, size),
        effective_sample_size=size,
        warnings=_warnings(name, problem, own, size, interval, interval in found),
        diagnostics={**problem.diagnostics(), **mixed, "intervals": found},
    )


def _uplift(
    problem: EpisodeProblem, whole: EpisodeStatistic, level: float, size: float
) -> Uplift | None:
    """Uplift over the mean return of the same episodes; None if episodes were cut."""
    if problem.unseen.max() > _CUT_SHARE:
        return None
    logged = make_statistic(
        "pdis", replace(problem, log_weights=np.zeros(len(problem.rewards)))
    )
    gap = whole.value - logged.value
    own = 1.0 / float(np.square(problem.shares).sum())
    more = intervals.student_interval(
        gap, whole.deviations - logged.deviations, level, size
    )
    worth = intervals.student_interval(logged.value, logged.deviations, level, own)
    return Uplift(gap, more, logged.value, worth)


def _why_not(name: str, problem: EpisodeProblem) -> str | None:
    """Reason why an estimator does not apply; None if it does."""
    if name == "magic" and problem.n_episodes < 2:
        return (
            f"{name} weighs bias against variance over episodes, this log has one; give"
            " more, or use wdr"
        )
    gone = problem.weightless_from
    if gone == 0:
        return _NO_WEIGHT.format(steps="the first step")
    if name in names.WHOLE_WEIGHT and not (problem.last > -np.inf).any():
        return _NO_WEIGHT.format(steps=f"{gone} steps" if gone else "its last step")
    return None


def _warnings(
    name: str,
    problem: EpisodeProblem,
    model: RowValues | None,
    size: float,
    interval: str,
    found: bool,
) -> tuple[str, ...]:
    """Sentences about this estimate; those on the weights come first."""
    episodes = problem.n_episodes
    gone = problem.weightless_from
    cut = problem.cut_share
    if model is None:
        rest = "rewards from there are left out"
    else:
        rest = "the model stands alone there"
    few = size < _FEW_EPISODES
    sentences: list[str] = []
    if episodes == 1:
        sentences.append(
            "The log has a single episode: no standard error and no interval."
        )
    if episodes > 1 and few:
        sentences.append(
            f"Only about {size:.1f} of {episodes} episodes carry the weight: the"
            " estimate and its interval rest on them."
        )
    if not few and size < _UNEVEN * episodes:
        sentences.append(
            f"Uneven weights leave about {size:.0f} of {episodes} episodes: calibrated"
            " intervals can be too narrow where weights have heavy tails."
        )
    if problem.clip is not None:
        sentences.append(
            f"Weights are capped at {problem.clip or 0.0:g}: less variance, and a bias"
            " of unknown size."
        )
    if model is None and cut > _CUT_SHARE:
        sentences.append(
            "Recording stopped before episodes ended: rewards after the cut are left"
            f" out, about {cut:.1%} of the value if rewards stay as they are."
        )
    if gone is not None and name not in names.WHOLE_WEIGHT:
        sentences.append(f"No episode has weight left from step {gone} on: {rest}.")
    if not found and episodes > 1:
        sentences.append(
            f"No interval of kind {interval}:"
            f" {_NEEDS[interval in names.CERTIFIED_EPISODE_KINDS]}."
        )
    return (
        *problem.ratios.warnings,
        *sentences,
    )
