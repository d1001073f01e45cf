"""Columns that tell what happens next: scaled or jittered next values, changes, values
two rows later, copies of the reward, flags of success.

A column of the state is known before the action. So it has a memory: it follows from
its own last value and from the last action, beyond what the other columns say. A column
that was written after the action has none, and it tells the unknown part of another
column's next value, or of the reward, nearly without error. Both are measured on
episodes that were not used to fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

_MOST_ROWS = 6000  # that are compared
_FEWEST_ROWS = 100  # of each half: fewer may agree by chance
_PROBED = 600  # rows on which most pairs are seen to be unrelated
_MOST_COLUMNS = 40  # all pairs are compared
_BINS = 64  # of a column, by quantiles
_COARSE_BINS = 8  # of each of several columns
_LEFT_OPEN = 0.02  # share of the unknown part that a column of later may leave open
_LEFT_OF_FLAG = 0.1  # the same for a flag, of what is unknown of the flag
_LEFT_BY_FEW = 0.3  # share of the variance: coarse bins of a few rows leave less open
_KNOWN = 1e-4  # share of the variance: if less is unknown, nothing is to be told
_MEMORY = 0.1  # share of a column's own unknown part that its past tells
_REDUNDANT = 1e-3  # share of a column's variance that other columns leave open
_RAREST = 0.02  # share of the rows with the rarer value of a flag
_RIDGE = 1e-6


@dataclass(frozen=True)
class NumberColumn:
    """A column of numbers (N,), in the table's order."""

    name: str
    values: np.ndarray
    has_memory_name: bool = False  # whether its name says that it holds the row before


@dataclass(frozen=True)
class AdjacentRows:
    """Rows by their numbers in the table, each with the rows before and after it in its
    episode, and whether it is held out.
    """

    before: np.ndarray
    now: np.ndarray
    after: np.ndarray
    second_after: np.ndarray
    held_out: np.ndarray


@dataclass(frozen=True)
class _Quantity:
    """What a column may tell: values (M,) of the column ``of``, the values (M,) known
    before that say most of it, and words for it. is_second: whether it stands two rows
    later.
    """

    of: str
    words: str
    values: np.ndarray
    known: np.ndarray
    is_second: bool = False
    is_reward: bool = False


def rows_between(order: np.ndarray, episodes: np.ndarray) -> AdjacentRows | None:
    """Rows that have one row before and two after them in their episode; None if there
    are too few.

    order: (N,) rows by episode and time; episodes: (N,) their numbers in this order.
    """
    inside = np.flatnonzero(episodes[:-3] == episodes[3:]) + 1
    if len(inside) > _MOST_ROWS:
        chosen = np.linspace(0, len(inside) - 1, _MOST_ROWS).astype(int)
        inside = inside[chosen]
    held_out = episodes[inside] % 2 == 1
    if min(held_out.sum(), (~held_out).sum()) < _FEWEST_ROWS:
        return None
    return AdjacentRows(
        before=order[inside - 1],
        now=order[inside],
        after=order[inside + 1],
        second_after=order[inside + 2],
        held_out=held_out,
    )


def what_they_tell(
    columns: Sequence[NumberColumn],
    reward: NumberColumn | None,
    actions: np.ndarray | None,
    rows: AdjacentRows,
) -> dict[str, str]:
    """What happens later that columns tell, by their names; columns that tell nothing,
    or have a memory of their own, are not there.

    columns: the observations that are numbers. actions: (N, k).
    """
    compared = [
        column
        for column in columns
        if not column.has_memory_name and np.isfinite(column.values[rows.now]).all()
    ]
    compared = compared[:_MOST_COLUMNS]
    words: dict[str, str] = {}
    for quantity in _quantities(columns[:_MOST_COLUMNS], reward, rows):
        tellers = [
            column
            for column in compared
            if column.name not in (quantity.of, *words)
            and _tells(column.values[rows.now], quantity, rows.held_out)
        ]
        names = {column.name for column in tellers}
        silent = [column for column in compared if column.name not in names]
        for column in tellers:
            if _was_written_after_action(column, silent, quantity, actions, rows):
                words[column.name] = quantity.words
    return words


def _quantities(
    columns: Sequence[NumberColumn], reward: NumberColumn | None, rows: AdjacentRows
) -> Iterator[_Quantity]:
    """Yield what is not known before the action: next values, changes, rewards."""
    for column in columns:
        now = column.values[rows.now]
        after = column.values[rows.after]
        second = column.values[rows.second_after]
        if not (np.isfinite(now) & np.isfinite(after) & np.isfinite(second)).all():
            continue
        name = column.name
        yield _Quantity(name, f"{name} one row later", after, now)
        yield _Quantity(name, f"the next change of {name}", after - now, now)
        yield _Quantity(name, f"{name} two rows later", second, after, is_second=True)
    if reward is not None:
        rewards = reward.values[rows.now]
        previous = reward.values[rows.before]
        if np.isfinite(rewards).all() and np.isfinite(previous).all():
            words = f"{reward.name} of the same row"
            yield _Quantity(reward.name, words, rewards, previous, is_reward=True)


def _tells(values: np.ndarray, quantity: _Quantity, held_out: np.ndarray) -> bool:
    """Whether values (M,) of a column tell the unknown part of a quantity nearly
    without error; or a quantity tells that of a flag.
    """
    scale = float(np.var(quantity.values[held_out]))
    if scale == 0.0 or not _may_tell(values, quantity, held_out):
        return False
    unknown = _unexplained(quantity.known, quantity.values, held_out)
    if unknown < _KNOWN * scale:
        return False
    if _unexplained(values, quantity.values, held_out) <= _LEFT_OPEN * unknown:
        return True
    levels = np.unique(values)
    if len(levels) != 2:
        return False
    share = float(np.mean(values == levels[0]))
    if min(share, 1.0 - share) < _RAREST:
        return False
    flag_unknown = _unexplained(quantity.known, values, held_out)
    if flag_unknown < _KNOWN:
        return False
    left = _unexplained(quantity.values, values, held_out)
    return left <= _LEFT_OF_FLAG * flag_unknown


def _may_tell(values: np.ndarray, quantity: _Quantity, held_out: np.ndarray) -> bool:
    """Whether a few rows leave it open that values (M,) tell a quantity."""
    probed = slice(None, None, max(1, len(values) // _PROBED))
    held_out = held_out[probed]
    values = values[probed]
    target = quantity.values[probed]
    if min(held_out.sum(), (~held_out).sum()) < _FEWEST_ROWS:
        return True
    ways = [(values, target)]
    if len(np.unique(values)) == 2:
        ways.append((target, values))
    for source, aim in ways:
        scale = float(np.var(aim[held_out]))
        if _unexplained(source, aim, held_out) < _LEFT_BY_FEW * scale:
            return True
    return False


def _unexplained(source: np.ndarray, target: np.ndarray, held_out: np.ndarray) -> float:
    """Mean squared error on held-out rows of a target (M,) by a source (M,): by a line,
    by means of bins, or by a rising or falling curve, whichever is smallest.
    """
    fitted = ~held_out
    x = source[fitted]
    y = target[fitted]
    centred = x - x.mean()
    squares = float(centred @ centred)
    slope = 0.0
    if squares > 0.0:
        slope = float(centred @ (y - y.mean())) / squares
    line = y.mean() + slope * (source[held_out] - x.mean())
    by_line = float(np.mean((target[held_out] - line) ** 2))
    edges = _edges(x, _BINS)
    bins = np.searchsorted(edges, x, side="right")
    counts = np.bincount(bins, minlength=len(edges) + 1)
    sums = np.bincount(bins, y, minlength=len(edges) + 1)
    means = np.where(counts > 0, sums / np.maximum(counts, 1), y.mean())
    by_bins = means[np.searchsorted(edges, source[held_out], side="right")]
    errors = [by_line, float(np.mean((target[held_out] - by_bins) ** 2))]
    # The curve takes the quantiles of the source to those of the target.
    quantiles = np.sort(y)
    for curve in (quantiles, quantiles[::-1]):
        by_curve = np.interp(source[held_out], np.sort(x), curve)
        errors.append(float(np.mean((target[held_out] - by_curve) ** 2)))
    return min(errors)


def _edges(values: np.ndarray, bins: int) -> np.ndarray:
    """Borders (B,) between bins of values (M,): between all of a few values, else by
    quantiles.
    """
    levels = np.unique(values)
    if len(levels) <= bins:
        return (levels[1:] + levels[:-1]) / 2.0
    return np.unique(np.quantile(values, np.arange(1, bins) / bins))


def _was_written_after_action(
    column: NumberColumn,
    silent: Sequence[NumberColumn],
    quantity: _Quantity,
    actions: np.ndarray | None,
    rows: AdjacentRows,
) -> bool:
    """Whether a column was written after the row's action: the past does not explain
    what other columns leave open of it; and if it is like the reward, the row's own
    action does.

    To explain: a least-squares fit of the column's ranks leaves a tenth less of their
    held-out variance. The past: the column's value in the row before, and the action
    there. Rewards often are a function of the state alone, so that a column of the
    state is like the reward, too. silent: columns that do not tell the quantity.
    actions: (N, k), or None if they are no numbers.
    """
    # Ranks: of a curve of a column, no more is left open than of the column itself.
    target = _ranks(column.values[rows.now])
    present = [other.values[rows.now] for other in silent if other.name != column.name]
    if quantity.is_second:
        # what the value of the row before tells of it
        present.append(quantity.known)
    past = [column.values[rows.before]]
    if actions is not None:
        past += list(actions[rows.before].T)
    past = [values for values in past if np.isfinite(values).all()]
    known = _basis(present, rows)
    without = _left(known, target, rows.held_out)
    if without <= _REDUNDANT * float(np.var(target)):
        # Other columns make it up: of two that were written later, each hides the other.
        known = _basis([quantity.known], rows)
        without = _left(known, target, rows.held_out)
    with_past = np.hstack([known, _basis(past, rows)])
    most_left = (1.0 - _MEMORY) * without
    if _left(with_past, target, rows.held_out) <= most_left:
        return False
    if not quantity.is_reward:
        return True
    if actions is None:
        return False
    own_action = _basis(list(actions[rows.now].T), rows)
    return _left(np.hstack([known, own_action]), target, rows.held_out) <= most_left


def _basis(columns: Sequence[np.ndarray], rows: AdjacentRows) -> np.ndarray:
    """(M, B) functions of columns (M,): each itself, its rank, and which of its bins it
    is in.
    """
    parts = [np.ones((len(rows.now), 1))]
    for values in columns:
        spread = float(values.std())
        if spread == 0.0:
            continue
        edges = _edges(values, _COARSE_BINS)
        bins = np.searchsorted(edges, values, side="right")
        parts.append(((values - values.mean()) / spread).reshape(-1, 1))
        parts.append(_ranks(values).reshape(-1, 1))
        parts.append(np.eye(len(edges) + 1)[bins])
    return np.hstack(parts)


def _ranks(values: np.ndarray) -> np.ndarray:
    """Ranks (M,) of values from 0 to 1, those of equal values equal."""
    levels, places = np.unique(values, return_inverse=True)
    counts = np.bincount(places, minlength=len(levels))
    below = np.cumsum(counts) - counts
    return ((below + 0.5 * counts) / len(values))[places]


def _left(basis: np.ndarray, target: np.ndarray, held_out: np.ndarray) -> float:
    """Mean squared error of a target (M,) on held-out rows, by least squares on a basis
    (M, B).
    """
    fitted = basis[~held_out]
    gram = fitted.T @ fitted  # (B, M) @ (M, B)
    gram += _RIDGE * len(fitted) * np.eye(len(gram))
    weights = np.linalg.solve(gram, fitted.T @ target[~held_out])
    error = target[held_out] - basis[held_out] @ weights
    return float(np.mean(error**2))
