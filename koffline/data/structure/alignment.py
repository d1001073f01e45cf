"""Whether actions and rewards stand in the row of the step that they belong to.

In a log that was read rightly the action of a row explains the step of that row. Where
each row holds the action that led to its observation (as dm_env time steps do), the
action of the row below explains it instead, and the row's own action does not. Two
kinds of tests compare regressions on unseen episodes: over all rows, and episode by
episode, for logs of which only some episodes are shifted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Float, Int

from koffline.data.structure.chances import SIGNIFICANT, chance_of_count
from koffline.data.structure.late_episodes import late_episode_symptoms
from koffline.data.structure.logged_rows import LoggedRows
from koffline.data.structure.symptom import Symptom
from koffline.errors import counted

_MOST_ROWS = 4000
_FEWEST_ROWS = 200
_FEWEST_EPISODES = 10
_FOLDS = 2
_RIDGE = 1e-3
_LARGE_SCORE = 5.0  # standard errors
_CLEAR_GAIN = 0.03  # share of the variance left by the state that an action explains
_LITTLE = 0.25  # of that gain: the row's own action explains less
_CLEAR_REWARD_GAIN = 0.15
_SMALLER_ERROR = 0.7  # times the other error
_MOST_STATES = 12
_COSINES = 32
_MOST_CROSSED = 32
_FAR_ERROR = 9.0  # squared deviations: one row says no more than that
_TAIL = 0.01  # of the steps on either side, which are cut
_FEWEST_IN_EPISODE = 5
_CLEAR_EPISODE = 3.0  # standard errors, within one episode
_CHANCE_OF_EPISODE = 0.01  # that an episode looks shifted by chance

Shift = Literal["below", "above"]
Errors = Float[np.ndarray, "row target"]


@dataclass(frozen=True, eq=False)
class _InnerRows:
    """Rows with a row before and a row below in their episode, and what may explain
    their steps.
    """

    rows: LoggedRows
    inner: Int[np.ndarray, " row"]
    episode: Int[np.ndarray, " row"]
    base: Float[np.ndarray, "row feature"]
    step: Float[np.ndarray, "row target"]

    @classmethod
    def of(cls, rows: LoggedRows) -> _InnerRows | None:
        """Up to 4000 such rows; None if there are too few."""
        inner = _inner_rows(rows)
        if inner is None:
            return None
        state = rows.states(inner)[:, :_MOST_STATES]
        following = rows.states(inner, following=True)[:, :_MOST_STATES]
        step = following - state
        low, high = np.quantile(step, [_TAIL, 1.0 - _TAIL], axis=0)
        return cls(
            rows=rows,
            inner=inner,
            episode=rows.episode[inner],
            base=_features(rows, inner),
            step=np.where(high > low, np.clip(step, low, high), step),
        )


def alignment_symptoms(rows: LoggedRows) -> Iterator[Symptom]:
    """Yield a symptom if actions, rewards or both are one row late or early."""
    steps = _InnerRows.of(rows)
    if steps is None:
        return
    below = _compare_actions(steps, shift="below")
    if below is not None:
        yield _late_actions(steps=steps, gains=below)
        return
    above = _compare_actions(steps, shift="above")
    if above is not None:
        yield _early_actions(steps=steps, gains=above)
        return
    gain = _reward_gain(rows=rows, inner=steps.inner, action=rows.actions(steps.inner))
    if gain > _CLEAR_REWARD_GAIN:
        yield _late_rewards(steps=steps, gain=gain)
        return
    yield from _shifted_episodes(steps)


def rewards_fit_their_rows(rows: LoggedRows) -> bool:
    """Whether a row's state, action and next state clearly explain its own reward
    better than that of the row below.
    """
    inner = _inner_rows(rows)
    if inner is None:
        return False
    errors = _reward_errors(rows=rows, inner=inner, action=rows.actions(inner))
    if errors is None:
        return False
    of_row = errors[:, 0]
    of_row_below = errors[:, 1]
    score = _score(of_row_below - of_row, episode=rows.episode[inner])
    is_smaller = of_row.mean() < _SMALLER_ERROR * of_row_below.mean()
    return bool(is_smaller) and score > _LARGE_SCORE


@dataclass(frozen=True)
class _Gains:
    """Shares of a step's variance explained by the shifted action and by the row's own.

    score: mean advantage of the shifted action over its standard error, over episodes.
    """

    shifted: float
    unshifted: float
    score: float


def _compare_actions(steps: _InnerRows, shift: Shift) -> _Gains | None:
    """Gains of the shifted action where it explains steps and the row's own action does
    not; else None.
    """
    rows = steps.rows
    inner = steps.inner
    base = steps.base
    if shift == "below":
        shifted_action = rows.actions(inner + 1)
    else:
        shifted_action = rows.actions(inner - 1)
        # the action of the row above tells of that row's state, too
        before = _features(rows, inner - 1)
        base = np.hstack([base, before])
    own_action = rows.actions(inner)
    without = _unseen_errors(base, targets=steps.step, episode=steps.episode)
    unshifted = _unseen_errors(
        _crossed(steps.base, own_action, beside=base),
        targets=steps.step,
        episode=steps.episode,
    )
    shifted = _unseen_errors(
        _crossed(steps.base, shifted_action, beside=base),
        targets=steps.step,
        episode=steps.episode,
    )
    total = without.sum(axis=0)
    is_usable = total > 1e-6 * len(inner)
    if not is_usable.any():
        return None
    safe_total = np.where(is_usable, total, 1.0)
    shifted_share = np.where(is_usable, 1.0 - shifted.sum(axis=0) / safe_total, -np.inf)
    own_share = np.where(is_usable, 1.0 - unshifted.sum(axis=0) / safe_total, 0.0)
    best = int((shifted_share - own_share).argmax())
    gains = _Gains(
        shifted=float(shifted_share[best]),
        unshifted=float(max(own_share[best], 0.0)),
        score=_score(unshifted[:, best] - shifted[:, best], episode=steps.episode),
    )
    explains_elsewhere = bool(
        (own_share > np.maximum(_CLEAR_GAIN, shifted_share)).any()
    )
    is_clear = gains.shifted > _CLEAR_GAIN and gains.score > _LARGE_SCORE
    if not is_clear or gains.unshifted > _LITTLE * gains.shifted or explains_elsewhere:
        return None
    if shift == "below" and not _tells_of_the_step(steps, action=shifted_action):
        return None
    return gains


def _late_actions(steps: _InnerRows, gains: _Gains) -> Symptom:
    """The symptom of actions that stand one row late; the remedy names rewards as far
    as they tell.
    """
    action = steps.rows.actions(steps.inner + 1)
    reward_gain = _reward_gain(rows=steps.rows, inner=steps.inner, action=action)
    remedy = (
        "move actions up by one row, and rewards too if they are of the step before"
    )
    if reward_gain > _CLEAR_REWARD_GAIN:
        remedy = "move actions and rewards up by one row"
    elif reward_gain < -_CLEAR_REWARD_GAIN:
        remedy = "move actions up by one row"
    return Symptom(
        test="alignment of actions",
        kind="actions",
        rows=len(steps.inner),
        of=len(steps.inner),
        p_value=math.erfc(gains.score / math.sqrt(2.0)),
        statement=(
            f"the action of the row below explains {gains.shifted:.0%} of each step,"
            f" the row's own action {gains.unshifted:.0%}"
        ),
        remedy=f"if each row holds what led to its observation, {remedy}",
    )


def _early_actions(steps: _InnerRows, gains: _Gains) -> Symptom:
    """The symptom of actions that stand one row early, or act one step late."""
    return Symptom(
        test="alignment of actions",
        kind="actions",
        rows=len(steps.inner),
        of=len(steps.inner),
        p_value=math.erfc(gains.score / math.sqrt(2.0)),
        statement=(
            f"the action of the row before explains {gains.shifted:.0%} of each step,"
            f" the row's own action {gains.unshifted:.0%}"
        ),
        remedy=(
            "if each row holds the action of the row below, move actions down by one"
            " row; if actions act one step later, add the last action to the"
            " observation"
        ),
    )


def _late_rewards(steps: _InnerRows, gain: float) -> Symptom:
    """The symptom of rewards that stand one row late."""
    return Symptom(
        test="alignment of rewards",
        kind="rewards",
        rows=len(steps.inner),
        of=len(steps.inner),
        p_value=SIGNIFICANT,
        statement=(
            f"each row's state and action explain {gain:.0%} more of the reward of the"
            " row below than of its own"
        ),
        remedy=(
            "if each row holds the reward of the row before, move rewards up by one row"
        ),
    )


def _shifted_episodes(steps: _InnerRows) -> Iterator[Symptom]:
    """Yield a symptom if the model of all episodes says that some of them are one row
    late.
    """
    rows = steps.rows
    inner = steps.inner
    own_inputs = _crossed(steps.base, rows.actions(inner))
    below_inputs = _crossed(steps.base, rows.actions(inner + 1))
    unshifted, below = _errors_of_one_model(
        inputs=(own_inputs, below_inputs),
        targets=(steps.step, steps.step),
        episode=steps.episode,
    )
    without = _unseen_errors(steps.base, targets=steps.step, episode=steps.episode)
    total = np.maximum(without.sum(axis=0), 1e-6 * len(inner))
    share = 1.0 - unshifted.sum(axis=0) / total
    best = int(share.argmax())
    symptoms: list[Symptom] = []
    if share[best] > _CLEAR_GAIN:
        symptoms.extend(
            _of_some_episodes(
                difference=unshifted[:, best] - below[:, best],
                episode=steps.episode,
                column="action",
            )
        )
    if not symptoms:
        symptoms.extend(late_episode_symptoms(rows))
    yield from symptoms
    following = _features(rows, inner, following=True)
    inputs = _crossed(
        steps.base, rows.actions(inner), beside=np.hstack([steps.base, following])
    )
    rewards = np.asarray(rows.log.rewards, dtype=np.float64)
    deviation = float(rewards[inner].std())
    if deviation == 0.0:
        return
    own_reward = ((rewards[inner] - rewards[inner].mean()) / deviation)[:, None]
    below_reward = ((rewards[inner + 1] - rewards[inner].mean()) / deviation)[:, None]
    unshifted, below = _errors_of_one_model(
        inputs=(inputs, inputs),
        targets=(own_reward, below_reward),
        episode=steps.episode,
    )
    if float(unshifted.mean()) < 1.0 - _CLEAR_REWARD_GAIN:
        yield from _of_some_episodes(
            difference=(unshifted - below)[:, 0], episode=steps.episode, column="reward"
        )


def _of_some_episodes(
    difference: Float[np.ndarray, " row"], episode: Int[np.ndarray, " row"], column: str
) -> Iterator[Symptom]:
    """Yield a symptom if the value of the row below fits far better in more episodes
    than by chance.
    """
    scores = []
    for rows in np.split(difference, np.flatnonzero(np.diff(episode)) + 1):
        unequal = rows[rows != 0.0]
        if len(unequal) < _FEWEST_IN_EPISODE:
            continue
        spread = float(unequal.std(ddof=1))
        if spread > 0.0:
            scores.append(float(unequal.mean()) / spread * math.sqrt(len(unequal)))
    count = sum(score > _CLEAR_EPISODE for score in scores)
    p_value = chance_of_count(count=count, trials=len(scores), rate=_CHANCE_OF_EPISODE)
    if count < _FEWEST_IN_EPISODE or p_value >= SIGNIFICANT:
        return
    yield Symptom(
        test=f"alignment of {column}s in some episodes",
        kind=f"{column}s",
        rows=count,
        of=len(scores),
        p_value=p_value,
        statement=(
            f"in {count} of {counted(len(scores), 'episode')} the {column} of the row"
            f" below fits each step, and the row's own {column} does not"
        ),
        remedy=(
            f"check how these episodes were recorded; move their {column}s up by one row"
        ),
    )


def _inner_rows(rows: LoggedRows) -> Int[np.ndarray, " inner"] | None:
    """Up to 4000 rows with a row before and a row below in the same episode, from whole
    episodes.
    """
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
    """Features of observations: one column per observation if there are few, else
    smooth functions.
    """
    known = rows.few_observations
    if known is None:
        return _smooth(rows.states(chosen, following=following)[:, :_MOST_STATES])
    if following:
        keys = rows.next_keys[chosen]
    else:
        keys = rows.observation_keys[chosen]
    place = np.minimum(np.searchsorted(known, keys), len(known) - 1)
    is_known = known[place] == keys
    columns = np.zeros((len(chosen), len(known) + 1), dtype=np.float32)
    columns[:, -1] = 1.0
    columns[np.flatnonzero(is_known), place[is_known]] = 1.0
    return columns


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
    features: Float[np.ndarray, "row feature"],
    action: Float[np.ndarray, "row action"],
    beside: Float[np.ndarray, "row other"] | None = None,
) -> Float[np.ndarray, "row input"]:
    """Products of every feature with every number of the action, beside the features
    (or ``beside``).
    """
    products = features[:, :, None] * action[:, None, :]
    if beside is None:
        beside = features
    return np.hstack([beside, products.reshape(len(features), -1)])


def _unseen_errors(
    inputs: Float[np.ndarray, "row input"],
    targets: Errors,
    episode: Int[np.ndarray, " row"],
) -> Errors:
    """Squared errors of ridge regressions that were fitted to other episodes."""
    (errors,) = _errors_of_one_model(
        inputs=(inputs,), targets=(targets,), episode=episode
    )
    return errors


def _errors_of_one_model(
    inputs: tuple[np.ndarray, ...],
    targets: tuple[np.ndarray, ...],
    episode: Int[np.ndarray, " row"],
) -> tuple[Errors, ...]:
    """Squared errors for several pairs of inputs and targets of ridge regressions
    fitted to the first pair.

    Each error is of a model that was fitted to other episodes.
    """
    errors = tuple(np.zeros(target.shape) for target in targets)
    fold = episode % _FOLDS
    for number in range(_FOLDS):
        is_seen = fold != number
        if not is_seen.any() or is_seen.all():
            continue
        seen = inputs[0][is_seen].astype(np.float64)
        gram = seen.T @ seen
        gram += _RIDGE * np.trace(gram) / len(gram) * np.eye(len(gram))
        weights = np.linalg.solve(gram, seen.T @ targets[0][is_seen].astype(np.float64))
        for error, values, target in zip(errors, inputs, targets, strict=True):
            error[~is_seen] = (values[~is_seen] @ weights - target[~is_seen]) ** 2
    return errors


def _score(
    difference: Float[np.ndarray, " row"], episode: Int[np.ndarray, " row"]
) -> float:
    """Mean of the episodes' mean differences over its standard error; 0 without
    spread.
    """
    counts = np.bincount(episode)
    means = np.bincount(episode, weights=difference)[counts > 0] / counts[counts > 0]
    if len(means) < 2:
        return 0.0
    error = float(means.std(ddof=1)) / math.sqrt(len(means))
    if error > 0.0:
        return float(means.mean()) / error
    return 0.0


def _tells_of_the_step(
    steps: _InnerRows, action: Float[np.ndarray, "row action"]
) -> bool:
    """Whether the step that led to a state predicts the action of that state's row,
    beyond the state.

    A policy that sees the state only does not remember the step. An action that made
    the step does.
    """
    rows = steps.rows
    inner = steps.inner
    base = _features(rows, inner, following=True)
    with_step = np.hstack([base, _smooth(steps.step), steps.base])
    inputs = _crossed(steps.base[:, :_MOST_CROSSED], steps.step, beside=with_step)
    before = _unseen_errors(base, targets=action, episode=steps.episode)
    after = _unseen_errors(inputs, targets=action, episode=steps.episode)
    total = np.maximum(before.sum(axis=0), 1e-9)
    shares = 1.0 - after.sum(axis=0) / total
    best = int(shares.argmax())
    score = _score(before[:, best] - after[:, best], episode=steps.episode)
    return float(shares[best]) > _CLEAR_GAIN and score > _LARGE_SCORE


def _reward_gain(
    rows: LoggedRows,
    inner: Int[np.ndarray, " inner"],
    action: Float[np.ndarray, "inner action"],
) -> float:
    """How much more of the next row's reward than of the own one a step explains, as a
    share of variance.

    Negative if the own reward is explained better; 0 if the difference is not clear.
    """
    errors = _reward_errors(rows=rows, inner=inner, action=action)
    if errors is None:
        return 0.0
    difference = errors[:, 0] - errors[:, 1]
    if abs(_score(difference, episode=rows.episode[inner])) < _LARGE_SCORE:
        return 0.0
    return float(difference.mean())


def _reward_errors(
    rows: LoggedRows,
    inner: Int[np.ndarray, " inner"],
    action: Float[np.ndarray, "inner action"],
) -> Float[np.ndarray, "inner 2"] | None:
    """Squared errors, in variances and at most 9, with which a step on unseen episodes
    explains the reward of its row and that of the row below; None if one is constant.
    """
    base = _features(rows, inner)
    following = _features(rows, inner, following=True)
    inputs = _crossed(base, action, beside=np.hstack([base, following]))
    rewards = np.asarray(rows.log.rewards, dtype=np.float64)
    targets = np.stack([rewards[inner], rewards[inner + 1]], axis=1)
    deviation = targets.std(axis=0)
    if not (deviation > 0.0).all():
        return None
    targets = (targets - targets.mean(axis=0)) / deviation
    errors = _unseen_errors(inputs, targets=targets, episode=rows.episode[inner])
    return np.minimum(errors, _FAR_ERROR)
