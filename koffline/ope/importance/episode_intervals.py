"""Intervals from independent episodes: Student t and bootstrap (calibrated), and
certified bounds.
"""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Float, Int
from scipy import special

from koffline.data.hashing import poisson_counts
from koffline.jobs.cores import each_on_cores
from koffline.ope import thresholds
from koffline.ope.importance.episode_means import EpisodeStatistic, standard_error
from koffline.ope.importance.episodes import MOST_NUMBERS, STEPS, EpisodeProblem
from koffline.ope.log.bounds import check_reward_bounds
from koffline.ope.names import EPISODES_BOOTSTRAP, EPISODES_T, HOEFFDING
from koffline.ope.results import Interval

_T_ASSUMPTIONS = (
    "{n} independent units (episodes or clusters), jackknife standard error, Student t"
    " with {freedom:.3g} degrees of freedom: optimistic while few episodes carry most"
    " of the weight"
)
_BOOTSTRAP_ASSUMPTIONS = (
    "{n} independent units (episodes or clusters) resampled {draws} times,"
    " bias-corrected and accelerated percentiles: optimistic while few episodes carry"
    " most of the weight"
)
_CERTIFIED_ASSUMPTIONS = (
    "{n} independent episodes{lengths}, exact behavior probabilities, rewards in"
    " [{low:.6g}, {high:.6g}] ({source}); of the return up to the log's cuts. Weights"
    " capped at {caps} (lower and upper end), the best of {count} caps by a union bound"
)
# Candidate caps, fixed in advance: the choice among them costs only a factor in the
# level.
_CAPS = (1.0, 2.0, 5.0, 10.0, 30.0, 100.0, 1000.0)
# least draws beyond each end, most draws in total
_BEYOND = 5
_MOST_DRAWS = 100_000
_COUNT_SECONDS = 3e-8  # rough time to draw and use how often an episode counts


def student_interval(
    value: float,
    deviations: Float[np.ndarray, " episode"],
    level: float,
    effective_size: float,
) -> Interval | None:
    """value ± t quantile · jackknife standard error, two-sided; None if there is no
    standard error.

    Degrees of freedom: the effective number of episodes minus one, at least one.
    """
    error = standard_error(deviations)
    n = len(deviations)
    if error is None:
        return None
    freedom = max(min(effective_size, n) - 1.0, 1.0)
    half = float(special.stdtrit(freedom, 0.5 + level / 2.0)) * error
    text = _T_ASSUMPTIONS.format(n=n, freedom=freedom)
    return Interval(value - half, value + half, level, EPISODES_T, text)


def bootstrap_interval(
    statistic: EpisodeStatistic, level: float, draws: int, seed: int
) -> Interval | None:
    """Bias-corrected and accelerated percentiles over resampled episodes, acceleration
    from the jackknife.

    More samples are drawn if fewer than five would lie beyond each end. None for a
    single episode or one with all the weight, for a level that needs over 100,000
    draws, and if more than a tenth of the draws have no weight.
    (Efron 1987)
    """
    deviations = statistic.deviations
    n = len(deviations)
    draws = max(draws, math.ceil(2 * _BEYOND / (1.0 - level)))
    if n < 2 or draws > _MOST_DRAWS or np.isnan(deviations).any():
        return None
    if statistic.clusters is None:
        numbers = np.arange(n)
    else:
        numbers = statistic.clusters
    sample = resample(statistic, numbers, draws, seed)
    if len(sample) < thresholds.FEWEST_FINITE_DRAWS * draws:
        return None
    low, high = np.quantile(
        sample, bca_levels(sample, statistic.value, deviations, level)
    )
    text = _BOOTSTRAP_ASSUMPTIONS.format(n=n, draws=draws)
    return Interval(float(low), float(high), level, EPISODES_BOOTSTRAP, text)


def resample(
    statistic: EpisodeStatistic,
    numbers: Int[np.ndarray, " episode"],
    draws: int,
    seed: int,
) -> Float[np.ndarray, " draw"]:
    """The statistic on episodes resampled by their numbers, in batches; draws without
    weight are left out.
    """
    batch = max(1, min(draws, MOST_NUMBERS // max(len(numbers), STEPS)))

    def values_of(start: int) -> np.ndarray:
        """The statistic on a batch that begins with this draw."""
        streams = range(start, min(start + batch, draws))
        counts = poisson_counts(seed, streams, numbers)
        return statistic.resampled(counts.astype(np.float64))

    batches = each_on_cores(
        values_of,
        items=range(0, draws, batch),
        seconds=draws * len(numbers) * _COUNT_SECONDS,
    )
    values = np.concatenate(batches)
    return values[np.isfinite(values)]


def bca_levels(
    sample: Float[np.ndarray, " draw"],
    value: float,
    deviations: Float[np.ndarray, " unit"],
    level: float,
) -> list[float]:
    """Probabilities of the two quantiles to take: Φ(z0 + (z0 + z)/(1 − a(z0 + z))) for
    z = ± z_{level}.

    z0 = Φ⁻¹ of the share of draws below the value (ties count half), a = Σ d³ / (6 (Σ
    d²)^{3/2}).
    """
    spread = float(np.square(deviations).sum())
    if spread == 0.0:
        return [0.5, 0.5]
    below = float(np.mean(sample < value) + 0.5 * np.mean(sample == value))
    edge = 0.5 / len(sample)
    shift = float(special.ndtri(min(max(below, edge), 1.0 - edge)))
    acceleration = float(np.power(deviations / math.sqrt(spread), 3).sum()) / 6.0
    tails = []
    for z in (special.ndtri(0.5 - level / 2.0), special.ndtri(0.5 + level / 2.0)):
        moved = shift + float(z)
        stretch = 1.0 - acceleration * moved
        if stretch > 0.0:
            tails.append(float(special.ndtr(shift + moved / stretch)))
        else:  # the correction changes sign: take the extreme draw
            tails.append(float(moved > 0.0))
    return tails


def certified_interval(
    episodes: EpisodeProblem,
    level: float,
    kind: str,
    reward_range: tuple[float, float] | None = None,
    stepwise: bool = False,
) -> Interval | None:
    """Two one-sided bounds at (1 − level)/2 each, from capped weights; None if their
    conditions do not hold.

    With rewards at least m, Σ γ^t w_t (r_t − m) has expectation J − m Σ γ^t. If all
    episodes have the same length, the sums end there. Otherwise they go on for ever (γ
    < 1) or up to the longest episode (γ = 1): an ended episode has rewards of 0 and
    keeps its weight, so that m ≤ 0 ≤ M is required. Every term is at least zero, so
    capping weights at c can only lower the expectation, and then the sum lies in [0, c
    (M − m) Σ γ^t]: a concentration bound applies for any weights. The upper end is the
    mirror image. ``stepwise``: use w_t of each step, not that of the whole episode. The
    lowest and highest possible returns bound the interval in any case. None for unequal
    shares of episodes, for clusters, and if all rewards are equal and no range was
    given. Raises ConfigError if the log exceeds the range. (Thomas et al. 2015 for
    capping; Hoeffding 1963; Maurer and Pontil 2009)
    """
    if episodes.clusters is not None or not np.allclose(
        episodes.shares, episodes.shares[0]
    ):
        return None
    low, high = check_reward_bounds(
        reward_range, (float(episodes.rewards.min()), float(episodes.rewards.max()))
    )
    if low == high:
        return None
    horizon = episodes.horizon
    bottom, top = (low, high)
    powers = episodes.gamma ** np.arange(horizon)
    total = float(powers.sum())
    lengths = f" all of {horizon} steps"
    if np.any(episodes.lengths < horizon):
        bottom = min(low, 0.0)
        top = max(high, 0.0)
        lengths = f" at most of {horizon} steps"
        if episodes.gamma < 1.0:
            total = 1.0 / (1.0 - episodes.gamma)
            lengths = " of any length"

    # Σ γ^t after each episode's end
    later = (total - np.cumsum(powers))[episodes.lengths - 1]

    def lower_end(
        rewards: np.ndarray, bottom: float, top: float
    ) -> tuple[float, float]:
        """The best lower bound over the caps, and its cap; ended episodes go on with a
        reward of zero.
        """
        alpha = (1.0 - level) / 2.0 / len(_CAPS)
        bounds = [(bottom * total, _CAPS[0])]
        rows = powers[episodes.steps] * (rewards - bottom)
        tails = -bottom * later
        for cap in _CAPS:
            last = np.exp(np.minimum(episodes.last, math.log(cap)))
            if stepwise:
                capped = rows * np.exp(np.minimum(episodes.log_weights, math.log(cap)))
                sums = episodes.episode_sums(capped) + last * tails
            else:
                sums = last * (episodes.episode_sums(rows) + tails)
            bound = mean_lower_bound(sums, cap * (top - bottom) * total, alpha, kind)
            bounds.append((bottom * total + bound, cap))
        return max(bounds, key=lambda pair: pair[0])

    lower, low_cap = lower_end(episodes.rewards, bottom, top)
    upper, high_cap = lower_end(-episodes.rewards, -top, -bottom)
    source = "the range seen in the log"
    if reward_range is not None:
        source = "given"
    text = _CERTIFIED_ASSUMPTIONS.format(
        n=episodes.n_episodes,
        low=low,
        high=high,
        source=source,
        lengths=lengths,
        caps=f"{low_cap:g} and {high_cap:g}",
        count=len(_CAPS),
    )
    return Interval(lower, -upper, level, kind, text)


def mean_lower_bound(
    values: Float[np.ndarray, " unit"], value_range: float, alpha: float, kind: str
) -> float:
    """Lower bound of the expectation of ``values`` in [0, R] that fails with
    probability at most α.

    The mean minus R·sqrt(log(1/α) / 2n) (Hoeffding 1963, Theorem 2), or minus sqrt(2 s²
    log(2/α) / n) + 7 R log(2/α) / (3(n − 1)), s² the sample variance (Maurer and Pontil
    2009, Theorem 4).
    """
    n = len(values)
    if kind == HOEFFDING:
        width = value_range * math.sqrt(math.log(1.0 / alpha) / (2.0 * n))
    elif n < 2:
        return 0.0
    else:
        log_term = math.log(2.0 / alpha)
        noise = math.sqrt(2.0 * float(values.var(ddof=1)) * log_term / n)
        width = noise + 7.0 * value_range * log_term / (3.0 * (n - 1))
    return max(float(values.mean()) - width, 0.0)
