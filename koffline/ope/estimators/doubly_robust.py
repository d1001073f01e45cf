"""Doubly robust estimators: right if either the values or the weights are.

``dr``, ``wdr`` and ``magic`` weigh the episodes of a log by importance ratios; ``drl``
weighs its rows by the ratio of occupancies that the networks estimate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float
from scipy import special

from koffline.ope.estimators.contract import ListedEstimator
from koffline.ope.estimators.over_episodes import EpisodeEstimator
from koffline.ope.importance.episode_means import (
    StepwiseMean,
    WeightedMean,
    plain_mean,
)
from koffline.ope.importance.episodes import EpisodeProblem
from koffline.ope.log.row_values import RowValues
from koffline.ope.networks.out_of_bag import RowSums
from koffline.ope.results import Interval, PointEstimate

if TYPE_CHECKING:
    from koffline.ope.workspace import Workspace

SANDWICH = "sandwich"
_ASSUMPTIONS = (
    "Student t over {units}, each independent of the others, or over resampled networks"
    " where these differ by more: it covers the sampling of {units}{starts}, not what"
    " no network can express."
)
_SEEN = (
    "the value function has seen the rows that correct it: the correction and its"
    " standard error are too small; resample more networks"
)


def doubly_robust(episodes: EpisodeProblem, model: RowValues | None) -> WeightedMean:
    """``dr``: the mean of v(s_0) + Σ_t γ^t w_t (r_t + discount_t v(s_{t+1}) − q(s_t,
    a_t)) (Jiang & Li 2016, equation 10).

    It equals Σ_t γ^t (w_t r_t − w_t q_t + w_{t−1} v_t) with the model's value of the
    state where recording stopped. model: values of the episodes' rows.
    """
    assert model is not None
    powers = episodes.gamma**episodes.steps
    corrections = powers * np.exp(episodes.log_weights) * _residuals(episodes, model)
    return plain_mean(
        model.starts + episodes.episode_sums(corrections),
        episodes.shares,
        episodes.clusters,
    )


def weighted_doubly_robust(
    episodes: EpisodeProblem, model: RowValues | None
) -> StepwiseMean:
    """``wdr``: `doubly_robust` with weights normalised at each step; ``magic`` blends
    its partial sums (Thomas & Brunskill 2016, section 5).

    model: values of the episodes' rows.
    """
    assert model is not None
    return StepwiseMean(episodes, _residuals(episodes, model), model.starts)


def _residuals(episodes: EpisodeProblem, model: RowValues) -> Float[np.ndarray, " row"]:
    """Bellman residuals δ = r + discount · v(s') − q(s, a) (N,)."""
    return episodes.rewards + episodes.discounts * model.later - model.now


def drl(
    sums: RowSums, least: float = 0.0, level: float = 0.95, kind: str = "episodes"
) -> PointEstimate:
    """Double reinforcement learning: J = E q(x0) + n⁻¹ Σ w ω δ, with its standard error
    over units (Kallus & Uehara 2020).

    sums: over the rows (`koffline.ope.networks.out_of_bag` has the derivation). least:
    half width of the interval from the networks' values. The standard error over units
    takes values and weights as known; if the resampled networks vary by more, the
    interval is as wide as theirs. kind: what units are called.
    """
    error = sums.standard_error()
    interval = None
    unseen = sums.unseen / sums.rows
    warnings = []
    if unseen < 0.5:
        warnings.append(_SEEN)
    if error is None:
        warnings.append(
            "a single episode has no spread: no standard error and no interval"
        )
    else:
        quantile = float(special.stdtrit(sums.count - 1, 0.5 + level / 2.0))
        half = max(quantile * error, least)
        error = half / quantile
        if "start" in sums.by_unit:
            starts = " and their start states"
        else:
            starts = ""
        text = _ASSUMPTIONS.format(units=kind, starts=starts)
        interval = Interval(sums.value - half, sums.value + half, level, SANDWICH, text)
    described = sums.diagnostics()
    direct = sums.start_value / sums.start_weight
    return PointEstimate(
        name="drl",
        value=sums.value,
        standard_error=error,
        interval=interval,
        effective_sample_size=described["effective_units"],
        warnings=(*warnings, *sums.warnings()),
        diagnostics={
            "direct_value": direct,
            "correction": sums.value - direct,
            "unseen": unseen,
            **described,
        },
    )


@dataclass(frozen=True)
class DoubleReinforcementLearning(ListedEstimator):
    """`drl` as an estimator: values and weights of rows by networks that have not seen
    them.
    """

    name: str = "drl"

    def estimate(self, workspace: Workspace) -> PointEstimate:
        """The estimate from all rows. Raises DataError where all weights are zero."""
        return drl(
            workspace.row_sums,
            least=workspace.fitted.half_width,
            level=workspace.settings.level,
            kind=workspace.problem.kind,
        )


DR = EpisodeEstimator("dr", doubly_robust)
WDR = EpisodeEstimator("wdr", weighted_doubly_robust)
MAGIC = EpisodeEstimator("magic", weighted_doubly_robust, blends=True)
DRL = DoubleReinforcementLearning()
