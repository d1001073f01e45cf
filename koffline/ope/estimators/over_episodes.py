"""Estimators that are means over the episodes of a log: what `importance` and
`doubly_robust` share.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from koffline.errors import DataError
from koffline.ope import names, thresholds
from koffline.ope.estimators.contract import ListedEstimator
from koffline.ope.importance import episode_intervals
from koffline.ope.importance.episode_means import (
    EpisodeStatistic,
    StepwiseMean,
    magic,
    plain_mean,
    standard_error,
)
from koffline.ope.importance.episodes import EpisodeProblem
from koffline.ope.log.row_values import RowValues
from koffline.ope.results import Diagnostics, Interval, PointEstimate, Uplift

if TYPE_CHECKING:
    from koffline.ope.workspace import Workspace

BOOTSTRAP_DRAWS = 1000
_NO_CALIBRATED = (
    "one episode or cluster has all weight, many resampled logs none, or the level asks"
    " for too many"
)
_NO_CERTIFIED = (
    "it needs exact behavior probabilities, episodes of equal weight, no clusters, and"
    " reward_bounds"
)
_NO_WEIGHT = (
    "the policy takes none of the logged actions: every episode's weight is zero after"
    " {steps}; use a policy that can take them (epsilon:0.1:<policy>) or an estimator"
    " without episode weights (kloss, fqe, mwl)"
)


@dataclass(frozen=True)
class EpisodeEstimator(ListedEstimator):
    """An estimator over episodes.

    statistic: the equation, from episodes and, for doubly robust ones, the values of
    their rows. uses_whole_weight: it uses the weight of the whole episode, not that of
    each step. blends: its value is a blend of partial sums (`magic`).
    """

    name: str
    statistic: Callable[[EpisodeProblem, RowValues | None], EpisodeStatistic]
    uses_whole_weight: bool = False
    blends: bool = False

    @property
    def uses_model(self) -> bool:
        """Whether it needs the values of rows."""
        return names.NETWORKS in self.needs

    def estimate(self, workspace: Workspace) -> PointEstimate:
        """The estimate; doubly robust ones use out-of-bag values of kernel-loss
        networks.

        Raises DataError and PolicyError if the estimator does not apply.
        """
        if workspace.initial_observations is not None:
            raise DataError(
                f"{self.name} is of logged episodes, and other start states were given;"
                " leave them out"
            )
        settings = workspace.settings
        if settings.interval in names.EPISODE_KINDS:
            interval = settings.interval
        else:
            interval = names.EPISODES_T
        model = None
        if self.uses_model:
            model = workspace.row_values_of_episodes
        return self.from_episodes(
            workspace.episodes,
            model,
            level=settings.level,
            interval=interval,
            reward_range=settings.reward_bounds,
            seed=settings.seed,
        )

    @np.errstate(over="ignore", invalid="ignore")  # overflow is detected in the results
    def from_episodes(
        self,
        episodes: EpisodeProblem,
        model: RowValues | None = None,
        *,
        level: float = 0.95,
        interval: str = names.EPISODES_T,
        draws: int = BOOTSTRAP_DRAWS,
        reward_range: tuple[float, float] | None = None,
        seed: int = 0,
    ) -> PointEstimate:
        """The estimate from prepared episodes.

        model: values at all rows of the log, for doubly robust estimators. interval:
        one of ``EPISODE_KINDS``; ``diagnostics["intervals"]`` holds every kind that
        applies. draws: resampled logs of bootstrap intervals. reward_range: possible
        rewards, for certified kinds (default: the log's range). Raises DataError if the
        estimator does not apply.
        """
        reason = self._why_not(episodes)
        if reason:
            raise DataError(reason)
        of_episodes = None
        if self.uses_model:
            assert model is not None
            rows, units = episodes.counted
            of_episodes = RowValues(
                now=model.now[rows],
                later=model.later[rows],
                starts=model.starts[units],
            )
        whole = self.statistic(episodes, of_episodes)
        value = whole.value
        error = standard_error(whole.deviations)
        blend: Diagnostics = {}
        if self.blends:
            assert isinstance(whole, StepwiseMean)
            value, blend = _blend(whole, draws, seed)
            error = None
        if not np.isfinite(value):
            raise DataError(
                f"the largest weight is e^{episodes.log_weights.max():.0f}, beyond what"
                " numbers hold; cap weights with clip, or use a self-normalised"
                " estimator (wis, wpdis)"
            )
        size = episodes.effective_size(stepwise=not self.uses_whole_weight)
        intervals = {
            names.EPISODES_T: episode_intervals.student_interval(
                whole.value, whole.deviations, level, size
            ),
            names.EPISODES_BOOTSTRAP: episode_intervals.bootstrap_interval(
                whole, level, draws, seed
            ),
        }
        for kind in names.CERTIFIED_EPISODE_KINDS:
            if kind in self.interval_kinds and not episodes.ratios.is_estimated:
                intervals[kind] = episode_intervals.certified_interval(
                    episodes,
                    level,
                    kind,
                    reward_range,
                    stepwise=not self.uses_whole_weight,
                )
        by_kind = {
            kind: of_kind for kind, of_kind in intervals.items() if of_kind is not None
        }
        uplift = None
        if self.blends:
            by_kind = {
                kind: _stretched(of_kind, value) for kind, of_kind in by_kind.items()
            }
        else:
            uplift = _uplift(episodes, whole, level, size)
        missing = None
        if interval not in by_kind:
            missing = interval
        return PointEstimate(
            name=self.name,
            value=value,
            standard_error=error,
            interval=by_kind.get(interval),
            uplift=uplift,
            effective_sample_size=size,
            warnings=self._warnings(episodes, of_episodes, size, missing),
            diagnostics={**episodes.diagnostics(), **blend, "intervals": by_kind},
        )

    def _why_not(self, episodes: EpisodeProblem) -> str | None:
        """Reason why the estimator does not apply; None if it does."""
        if self.blends and episodes.n_episodes < 2:
            return (
                f"{self.name} weighs bias against variance over episodes, this log has"
                " one; give more, or use wdr"
            )
        gone = episodes.weightless_from
        if gone == 0:
            return _NO_WEIGHT.format(steps="the first step")
        if self.uses_whole_weight and not (episodes.last > -np.inf).any():
            steps = "its last step"
            if gone is not None:
                steps = f"{gone} steps"
            return _NO_WEIGHT.format(steps=steps)
        return None

    def _warnings(
        self,
        problem: EpisodeProblem,
        model: RowValues | None,
        size: float,
        missing: str | None,
    ) -> tuple[str, ...]:
        """Sentences about this estimate; those on the weights come first.

        size: the effective number of episodes. missing: a kind of interval that could
        not be made.
        """
        episodes = problem.n_episodes
        gone = problem.weightless_from
        cut = problem.cut_share
        if model is None:
            rest = "rewards from there are left out"
        else:
            rest = "the model stands alone there"
        few = size < thresholds.FEW_WEIGHTED
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
        if not few and size < thresholds.UNEVEN_WEIGHTS * episodes:
            sentences.append(
                f"Uneven weights leave about {size:.0f} of {episodes} episodes:"
                " calibrated intervals can be too narrow where weights have heavy"
                " tails."
            )
        if problem.clip is not None:
            sentences.append(
                f"Weights are capped at {problem.clip or 0.0:g}: less variance, and a"
                " bias of unknown size."
            )
        if model is None and cut > thresholds.CUT_SHARE:
            sentences.append(
                "Recording stopped before episodes ended: rewards after the cut are"
                f" left out, about {cut:.1%} of the value if rewards stay as they are."
            )
        if gone is not None and not self.uses_whole_weight:
            sentences.append(f"No episode has weight left from step {gone} on: {rest}.")
        if missing is not None and episodes > 1:
            if missing in names.CERTIFIED_EPISODE_KINDS:
                reason = _NO_CERTIFIED
            else:
                reason = _NO_CALIBRATED
            sentences.append(f"No interval of kind {missing}: {reason}.")
        return (*problem.ratios.warnings, *sentences)


def _blend(whole: StepwiseMean, draws: int, seed: int) -> tuple[float, Diagnostics]:
    """The blended value of partial sums, and its steps and shares as diagnostics."""
    clusters = whole.clusters
    if clusters is None:
        clusters = np.arange(whole.episodes.n_episodes)
    cuts, mix = magic(whole, episode_intervals.resample(whole, clusters, draws, seed))
    value = float(mix @ whole.partial_values(cuts))
    return value, {"blend_steps": cuts, "blend_shares": mix.tolist()}


def _stretched(interval: Interval, value: float) -> Interval:
    """An interval of the unblended estimate that also holds the blend.

    The blend's own spread omits the model's error, so that a wrong model would seem
    exact.
    """
    return replace(
        interval,
        low=min(interval.low, value),
        high=max(interval.high, value),
        assumptions=(
            f"of the unblended wdr, stretched to hold the blend; {interval.assumptions}"
        ),
    )


def _uplift(
    episodes: EpisodeProblem, whole: EpisodeStatistic, level: float, size: float
) -> Uplift | None:
    """Uplift over the mean discounted return of the same episodes, its interval by the
    paired deviations of their jackknife; None if an episode was cut where more than
    `CUT_SHARE` of its value may follow.

    whole: the estimate on all episodes. size: their effective number.
    """
    if episodes.unseen.max() > thresholds.CUT_SHARE:
        return None
    returns = episodes.episode_sums(episodes.gamma**episodes.steps * episodes.rewards)
    logged = plain_mean(returns, episodes.shares, episodes.clusters)
    gap = whole.value - logged.value
    logged_size = 1.0 / float(np.square(episodes.shares).sum())
    uplift = episode_intervals.student_interval(
        gap, whole.deviations - logged.deviations, level, size
    )
    behavior = episode_intervals.student_interval(
        logged.value, logged.deviations, level, logged_size
    )
    return Uplift(gap, uplift, logged.value, behavior)
