"""Whether actions and rewards stand in the row of the step that they belong to.

In a log that was read rightly the action of a row explains the step of that row. Where each row holds the
action that led to its observation (as dm_env time steps do), the action of the row below explains it instead,
and the row's own action does not. The tests compare regressions on unseen episodes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from koffline.data.structure.rows import LoggedRows
from koffline.data.structure.symptom import Symptom

_MOST_ROWS = 4000
_FEWEST_ROWS, _FEWEST_EPISODES = 200, 10
_FOLDS = 2
_RIDGE = 1e-3
_LARGE_SCORE = 7.0  # standard errors
_CLEAR_GAIN = 0.05  # share of the unexplained variance that the action below explains
_LITTLE = 0.25  # of that gain: the row's own action explains less
_CLEAR_REWARD_GAIN = 0.15
_MOST_STATES = 12
_COSINES = 32
_MOST_CROSSED = 32
_FAR_ERROR = 9.0  # squared deviations: one row says no more than that


@dataclass(frozen=True)
class Gain:
    """How much of the variance an input explains beyond a base, on unseen episodes.

    share: explained share of what the base leaves, of the best target column. score: its mean over its
    standard error, over episodes.
    """

    share: float
    score: float


def alignment_symptoms(rows: LoggedRows) -> Iterator[Symptom]:
    """Yield a symptom if actions, rewards or both are one row late or early."""
    inner = _inner_rows(rows)
    if inner is None:
        return
    state = rows.states(inner)[:, :_MOST_STATES]
    following = rows.states(inner, following=True)[:, :_MOST_STATES]
    step = following - state
    episode = rows.episode[inner]
    actions = {
        "own": rows.actions(inner),
        "below": rows.actions(inner + 1),
        "above": rows.actions(inner - 1),
    }
    base = _features(rows, inner)
    before = _features(rows, inner - 1)
    both = np.hstack([base, before])  # the action of the row above also tells of that row's state
    gains = {
        "own": _gain(base, _crossed(base, actions["own"]), targets=step, episode=episode),
        "below": _gain(base, _crossed(base, actions["below"]), targets=step, episode=episode),
        "above": _gain(
            both,
            np.hstack([before, _crossed(base, actions["above"])]),
            targets=step,
            episode=episode,
        ),
    }
    shifted = None
    for name in ("below", "above"):
        is_clear = gains[name].share > _CLEAR_GAIN and gains[name].score > _LARGE_SCORE
        if is_clear and gains["own"].share < _LITTLE * gains[name].share:
            shifted = name
            break
    is_below = shifted == "below"
    if is_below and not _tells_of_the_step(rows, inner=inner, step=step, action=actions["below"]):
        shifted = None
    rewards = _reward_gain(rows=rows, inner=inner, action=actions[shifted or "own"])
    is_reward_late = rewards > _CLEAR_REWARD_GAIN
    count = len(inner)
    if shifted == "below":
        moved = "move actions up by one row, and rewards too if they are of the step before"
        if is_reward_late:
            moved = "move actions and rewards up by one row"
        elif rewards < -_CLEAR_REWARD_GAIN:
            moved = "move actions up by one row"
        yield Symptom(
            test="alignment of actions",
            kind="actions",
            rows=count,
            of=count,
            p_value=math.erfc(gains["below"].score / math.sqrt(2.0)),
            statement=(
                f"the action of the row below explains {gains['below'].share:.0%} of each step, "
                f"the row's own {max(0.0, gains['own'].share):.0%}"
            ),
            remedy=f"if each row holds what led to its observation, {moved}",
        )
    elif shifted == "above":
        yield Symptom(
            test="alignment of actions",
            kind="actions",
            rows=count,
            of=count,
            p_value=math.erfc(gains["above"].score / math.sqrt(2.0)),
            statement=(
                f"the action of the row before explains {gains['above'].share:.0%} of each step, "
                f"the row's own {max(0.0, gains['own'].share):.0%}"
            ),
            remedy=(
                "if each row holds the action of the row below, move actions down by one row; if "
                "actions act one step later, add the last action to the observation"
            ),
        )
    elif is_reward_late:
        yield Symptom(
            test="alignment of rewards",
            kind="rewards",
            rows=count,
            of=count,
            p_value=0.0,
            statement=(
                f"each row's state and action explain {rewards:.0%} more of the reward of the row "
                "below than of its own"
            ),
            remedy="if each row holds the reward of the row before, move rewards up by one row",
        )


def _inner_rows(rows: LoggedRows) -> Int[np.ndarray, " inner"] | None:
    """Up to 4000 rows with a row before and a row below in the same episode, from whole episodes."""
    lengths = np.asarray(rows.log.episode_lengths)
    if len(lengths) < _FEWEST_EPISODES:
        return None
    is_inner = ~rows.is_last
    is_inner[rows.firsts] = False
    inner = np.flatnonzero(is_inner)
    if len(inner) < _FEWEST_ROWS:
        return None
    if len(inner) > _MOST_ROWS:
        stride = len(inner) / _MOST_ROWS
        inner = inner[(np.arange(_MOST_ROWS) * stride).astype(np.int64)]
    return inner


def _features(
    rows: LoggedRows, chosen: np.ndarray, following: bool = False
) -> Float[np.ndarray, "some feature"]:
    """Features of observations: one column per observation if there are few, else smooth functions.

    The smooth functions are the numbers themselves, their squares, and random Fourier features.
    """
    keys = rows.next_keys if following else rows.observation_keys
    known = rows.few_observations
    if known is not None:
        place = np.minimum(np.searchsorted(known, keys[chosen]), len(known) - 1)
        columns = np.zeros((len(chosen), len(known) + 1), dtype=np.float32)
        columns[:, -1] = 1.0
        is_known = known[place] == keys[chosen]
        columns[np.flatnonzero(is_known), place[is_known]] = 1.0
        return columns
    return _smooth(rows.states(chosen, following=following)[:, :_MOST_STATES])


def _smooth(state: Float[np.ndarray, "row d"]) -> Float[np.ndarray, "row feature"]:
    """A one, the clipped numbers, their squares, and cosines of random directions."""
    clipped = np.clip(state, -4.0, 4.0)
    generator = np.random.default_rng(0)
    width = clipped.shape[1]
    directions = generator.normal(size=(width, _COSINES)) / np.sqrt(width)
    phases = generator.uniform(0.0, 2.0 * np.pi, size=_COSINES)
    cosines = np.cos(clipped @ directions + phases).astype(np.float32)
    ones = np.ones((len(state), 1), dtype=np.float32)
    return np.hstack([ones, clipped, clipped**2, cosines])


def _crossed(
    base: Float[np.ndarray, "row feature"], action: Float[np.ndarray, "row action"]
) -> Float[np.ndarray, "row input"]:
    """Products of every base feature with a one and with every number of the action."""
    products = base[:, :, None] * action[:, None, :]
    return np.hstack([base, products.reshape(len(base), -1)])


def _gain(
    base: Float[np.ndarray, "row feature"],
    inputs: Float[np.ndarray, "row input"],
    targets: Float[np.ndarray, "row target"],
    episode: Int[np.ndarray, " row"],
) -> Gain:
    """Gain of ``inputs`` over ``base`` for the target column that gains most."""
    before = _unseen_errors(inputs=base, targets=targets, episode=episode)
    after = _unseen_errors(inputs=inputs, targets=targets, episode=episode)
    total = before.sum(axis=0)
    has_error = total > 1e-9 * len(targets)
    if not has_error.any():
        return Gain(share=0.0, score=0.0)
    shares = np.where(has_error, 1.0 - after.sum(axis=0) / np.where(has_error, total, 1.0), -np.inf)
    best = int(shares.argmax())
    by_episode = np.bincount(episode - episode.min(), weights=before[:, best] - after[:, best])
    occupied = np.bincount(episode - episode.min()) > 0
    sums = by_episode[occupied]
    error = float(sums.std(ddof=1)) * math.sqrt(len(sums)) if len(sums) > 1 else math.inf
    score = float(sums.sum()) / error if error > 0.0 else 0.0
    return Gain(share=float(shares[best]), score=score)


def _unseen_errors(
    inputs: Float[np.ndarray, "row input"],
    targets: Float[np.ndarray, "row target"],
    episode: Int[np.ndarray, " row"],
) -> Float[np.ndarray, "row target"]:
    """Squared errors of ridge regressions that were fitted to other episodes."""
    errors = np.empty(targets.shape, dtype=np.float64)
    fold = episode % _FOLDS
    for number in range(_FOLDS):
        is_seen = fold != number
        if not is_seen.any() or is_seen.all():
            return np.zeros(targets.shape)
        seen = inputs[is_seen].astype(np.float64)
        gram = seen.T @ seen
        gram += _RIDGE * np.trace(gram) / len(gram) * np.eye(len(gram))
        weights = np.linalg.solve(gram, seen.T @ targets[is_seen].astype(np.float64))
        errors[~is_seen] = (inputs[~is_seen] @ weights - targets[~is_seen]) ** 2
    return errors


def _tells_of_the_step(
    rows: LoggedRows,
    inner: Int[np.ndarray, " inner"],
    step: Float[np.ndarray, "inner d"],
    action: Float[np.ndarray, "inner action"],
) -> bool:
    """Whether the step that led to a state predicts the action of that state's row, beyond the state.

    A policy that sees the state only does not remember the step. An action that made the step does.
    """
    base = _features(rows, inner, following=True)
    of_step = np.hstack([base, _smooth(step), _features(rows, inner)])
    products = _crossed(_features(rows, inner)[:, :_MOST_CROSSED], step)
    gain = _gain(base, np.hstack([of_step, products]), targets=action, episode=rows.episode[inner])
    return gain.share > _CLEAR_GAIN and gain.score > _LARGE_SCORE


def _reward_gain(
    rows: LoggedRows,
    inner: Int[np.ndarray, " inner"],
    action: Float[np.ndarray, "inner action"],
) -> float:
    """How much more of the next row's reward than of the own one a step explains, as a share of variance.

    Negative if the own reward is explained better; 0 if the difference is not clear.
    """
    has_below = ~rows.is_last[inner]
    inner = inner[has_below]
    base = np.hstack([_features(rows, inner), _features(rows, inner, following=True)])
    inputs = np.hstack([base, _crossed(_features(rows, inner), action[has_below])])
    rewards = np.asarray(rows.log.rewards, dtype=np.float64)
    targets = np.stack([rewards[inner], rewards[inner + 1]], axis=1)
    deviation = targets.std(axis=0)
    if not (deviation > 0.0).all():
        return 0.0
    targets = (targets - targets.mean(axis=0)) / deviation
    episode = rows.episode[inner]
    errors = np.minimum(_unseen_errors(inputs, targets=targets, episode=episode), _FAR_ERROR)
    difference = errors[:, 0] - errors[:, 1]
    occupied = np.bincount(episode) > 0
    sums = np.bincount(episode, weights=difference)[occupied]
    if len(sums) < _FEWEST_EPISODES or sums.std() == 0.0:
        return 0.0
    score = float(sums.sum()) / (float(sums.std(ddof=1)) * math.sqrt(len(sums)))
    return float(difference.mean()) if abs(score) > _LARGE_SCORE else 0.0
