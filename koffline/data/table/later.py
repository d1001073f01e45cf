"""Columns that depend on what happens later: next states, returns to go, outcomes. They
are no observations.

One question, asked of the data: does the value in a row depend on what happens after
the row's action? Such a column tells the model the future, and the model then values
the logged actions by what they led to by chance.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from koffline.data.table.column_names import is_earlier, is_later
from koffline.data.table.flags import set_rows
from koffline.data.table.foresight import NumberColumn, rows_between, what_they_tell
from koffline.data.table.guesses import as_matrix
from koffline.data.table.profiles import ColumnProfile
from koffline.data.table.step_order import Steps

_NEARLY_ALL = 0.95  # share of the rows
_FEWEST_PAIRS = 20  # rows with a next row; fewer may agree by chance
_FEWEST_CHANGES = 10
_FEWEST_EPISODES = 20
_FEWEST_PER_VALUE = 5  # episodes with one value of a column
_MOST_COLUMNS = 1000  # compared with each other
_PROBED = 100  # rows on which all columns are compared first
_CLOSE = 0.01  # of the size of the rewards
_ROUNDED = 0.05  # of the mean square of the rewards: most that rounding may hide
# of a column's variance: within an episode it is constant but for noise
_NOISE = 0.02
_CORRELATED = 0.95
_MOST_VALUES = 20  # a column with more is no category
_MOST_OUTCOMES = 100  # columns whose extremes are looked at
_DISCOUNTS = (0.9, 0.95, 0.99)


@dataclass(frozen=True)
class Later:
    """A column that depends on what happens later, why it seems so, and whether that is
    sure.
    """

    column: ColumnProfile
    reason: str
    is_sure: bool


@dataclass(frozen=True)
class _ColumnNumbers:
    """A column as numbers (N, d), in the table's order."""

    column: ColumnProfile
    values: np.ndarray


def find_later(columns: Sequence[ColumnProfile], steps: Steps) -> list[Later]:
    """Columns with the role of observations that depend on what happens later, each
    once.

    Those that are next observations get this role, and their partner.
    """
    rows, _ = steps.pairs
    if len(rows) < _FEWEST_PAIRS:
        return []
    dependent = _next_values(columns, steps)
    known = {later.column.name for later in dependent}
    rewards = _rewards(columns)
    outcomes = list(_outcomes(columns, steps))
    for column in columns:
        if column.role == "observations" and column.name not in known:
            later = _later(column, rewards, outcomes, steps)
            if later is not None:
                dependent.append(later)
                known.add(column.name)
    return dependent + _foretelling(columns, known, steps)


def _foretelling(
    columns: Sequence[ColumnProfile], known: set[str], steps: Steps
) -> list[Later]:
    """Columns that tell what happens next, though not exactly. known: the names of
    columns that depend on what happens later for another reason.
    """
    rows = rows_between(steps.order, steps.episodes)
    if rows is None:
        return []
    numbers = {}
    for column in columns:
        is_compared = column.role in ("observations", "reward")
        if not is_compared or column.name in known:
            continue
        if column.is_number:
            values = as_matrix(column)
            assert values is not None, "numbers"
            single = values[:, 0]
        elif column.is_flag and not column.missing:
            single = set_rows(column).astype(np.float64)
        else:
            continue
        numbers[column.name] = NumberColumn(
            column.name, single, is_earlier(column.name)
        )
    reward = next((column for column in columns if column.role == "reward"), None)
    reward_numbers = None
    if reward is not None:
        reward_numbers = numbers.pop(reward.name, None)
    words = what_they_tell(
        list(numbers.values()), reward_numbers, _actions(columns), rows
    )
    return [
        Later(column, f"it tells {words[column.name]} nearly exactly", is_sure=False)
        for column in columns
        if column.name in words
    ]


def _actions(columns: Sequence[ColumnProfile]) -> np.ndarray | None:
    """(N, k) actions in the order of the table, texts as codes of their own columns;
    None if they cannot be compared.
    """
    parts = []
    for column in columns:
        if column.role != "action":
            continue
        values = as_matrix(column)
        if values is None and column.distinct <= _MOST_VALUES:
            codes = column.values.rank("dense").fill_null(0).to_numpy().astype(int)
            values = np.eye(int(codes.max()) + 1)[codes]
        if values is not None:
            parts.append(values)
    if not parts:
        return None
    return np.hstack(parts)


def _later(
    column: ColumnProfile,
    rewards: np.ndarray | None,
    outcomes: Sequence[_EpisodeOutcome],
    steps: Steps,
) -> Later | None:
    """Say so if a column sums up what follows in its episode, or goes with how the
    episode went. rewards: (N,), in the order of the table.
    """
    values = _coded(column)
    if values is None:
        return None
    is_amount = column.is_number and column.values.dtype != pl.Boolean
    if is_amount and rewards is not None:
        reason = _to_go(values[:, 0], rewards, steps)
        if reason:
            return Later(column, reason, is_sure=True)
        if _sums_so_far(values[:, 0], rewards, steps):
            reason = "the sum of the rewards up to that of its own row"
            return Later(column, reason, is_sure=False)
    return _outcome(column, values, outcomes, steps)


def _rewards(columns: Sequence[ColumnProfile]) -> np.ndarray | None:
    """Rewards (N,) in the order of the table, 0 where missing; None without numbers."""
    reward = next((column for column in columns if column.role == "reward"), None)
    if reward is None:
        return None
    values = as_matrix(reward)
    if values is None:
        return None
    return np.nan_to_num(values[:, 0])


def _coded(column: ColumnProfile) -> np.ndarray | None:
    """(N, d) numbers of a column, where equal texts have equal numbers; None if it
    cannot be compared.
    """
    if column.values.dtype == pl.String:
        # floats hold whole numbers below 2^52 exactly
        hashed = column.values.hash(0).to_numpy() % 2**52
        is_missing = column.values.is_null().to_numpy()
        codes = np.where(is_missing, np.nan, hashed.astype(np.float64))
        return codes.reshape(-1, 1)
    return as_matrix(column)


def _next_values(columns: Sequence[ColumnProfile], steps: Steps) -> list[Later]:
    """Columns that equal another column one row later, in nearly all rows in which that
    one changes.

    Those whose names say so become next observations, and are not among them.
    """
    coded = _coded_columns(columns)[:_MOST_COLUMNS]
    dependent: list[Later] = []
    partners: list[tuple[ColumnProfile, ColumnProfile]] = []
    for now, later in _candidates(coded, steps):
        if later.column.role != "observations" or is_earlier(now.column.name):
            continue
        if not _is_shifted(now, later, steps):
            continue
        reason = f"it is {now.column.name} one row later"
        if now.column.role != "observations":
            dependent.append(Later(later.column, reason, is_sure=True))
        elif is_later(later.column.name):
            partners.append((now.column, later.column))
        elif not _begins_empty(now, steps):
            reason = f"{reason}, or {now.column.name} is its value of before"
            dependent.append(Later(later.column, reason, is_sure=False))
    for column, next_column in partners:
        if next_column.role == "observations":
            next_column.role = "next_observations"
            next_column.partner = column.name
            next_column.reason = f"{column.name} one row later, in nearly all rows"
    # What is sure comes last, and replaces what is not.
    by_column: dict[str, Later] = {}
    for finding in sorted(dependent, key=lambda finding: finding.is_sure):
        if finding.column.role == "observations":
            by_column[finding.column.name] = finding
    return list(by_column.values())


def _coded_columns(columns: Sequence[ColumnProfile]) -> list[_ColumnNumbers]:
    """Observations, actions and the reward as numbers, those that can be compared."""
    by_name = {
        column.name: column
        for column in columns
        if column.role in ("observations", "action", "reward")
    }
    coded = []
    for column in by_name.values():
        values = _coded(column)
        if values is not None:
            coded.append(_ColumnNumbers(column, values))
    return coded


def _candidates(
    columns: Sequence[_ColumnNumbers], steps: Steps
) -> Iterator[tuple[_ColumnNumbers, _ColumnNumbers]]:
    """Pairs of columns in which the second equals the first one row later, in a few
    rows.
    """
    rows, following = steps.pairs
    probed = np.linspace(0, len(rows) - 1, min(_PROBED, len(rows))).astype(int)
    rows = rows[probed]
    following = following[probed]
    by_width: dict[int, list[_ColumnNumbers]] = {}
    for column in columns:
        by_width.setdefault(column.values.shape[1], []).append(column)
    for of_one_width in by_width.values():
        # (k, P, d)
        next_values = np.stack([column.values[following] for column in of_one_width])
        for later in of_one_width:
            share = _equal(later.values[rows], next_values).mean(axis=1)
            for place in np.flatnonzero(share >= _NEARLY_ALL - 0.05):
                now = of_one_width[place]
                if now is not later:
                    yield now, later


def _equal(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Whether (…, P) rows of (…, P, d) are equal up to rounding."""
    return np.isclose(left, right, rtol=1e-5, atol=1e-7).all(axis=-1)


def _is_shifted(now: _ColumnNumbers, later: _ColumnNumbers, steps: Steps) -> bool:
    """Whether ``later`` equals ``now`` one row later, and is no function of ``now``."""
    rows, following = steps.pairs
    is_equal = _equal(later.values[rows], now.values[following])
    changes = ~_equal(now.values[rows], now.values[following])
    if changes.sum() < _FEWEST_CHANGES:
        return False
    if min(is_equal.mean(), is_equal[changes].mean()) < _NEARLY_ALL:
        return False
    differences = now.values[following] - now.values[rows]
    if np.isclose(differences, differences[0], rtol=1e-6, atol=1e-9).all():
        return False  # a counter: its next value is known
    pairs = np.unique(np.hstack([now.values, later.values]), axis=0)
    n_values = len(np.unique(now.values, axis=0))
    is_function = len(pairs) == n_values and n_values <= len(now.values) / 5
    return not is_function


def _begins_empty(now: _ColumnNumbers, steps: Steps) -> bool:
    """Whether a column has one value, or none, in nearly all first rows: then it holds
    the row before.
    """
    firsts = now.values[steps.first_rows]
    if len(firsts) < _FEWEST_PER_VALUE:
        return False
    if np.isnan(firsts).all(axis=1).mean() >= _NEARLY_ALL:
        return True
    usual = np.median(firsts, axis=0)
    inside = now.values[~steps.first_rows]
    is_usual = np.isclose(firsts, usual, equal_nan=True).all(axis=1)
    is_usual_inside = np.isclose(inside, usual, equal_nan=True).all(axis=1)
    return bool(is_usual.mean() >= _NEARLY_ALL and is_usual_inside.mean() < 0.5)


def _to_go(values: np.ndarray, rewards: np.ndarray, steps: Steps) -> str:
    """Why a column (N,) is a sum of the rewards (N,) that follow, or of the rows that
    follow; empty if it is none.
    """
    amounts_by_words = {
        "the sum of the rewards that follow": rewards,
        "the number of rows that follow": np.ones_like(rewards),
    }
    for words, amounts in amounts_by_words.items():
        if amounts is not rewards and len(np.unique(steps.lengths)) < 2:
            # where all episodes are equally long, the rows that are left are known
            continue
        for inclusive in (True, False):
            if _sums_what_follows(values, amounts, steps, inclusive):
                return words
    return ""


def _sums_what_follows(
    values: np.ndarray, amounts: np.ndarray, steps: Steps, inclusive: bool
) -> bool:
    """Whether x(t) = a(t) + γ x(t + 1), or x(t) = a(t + 1) + γ x(t + 1), with one γ,
    and ends accordingly.

    values: x, (N,). amounts: a, (N,). inclusive: whether the row's own amount counts,
    as in the first equation.
    """
    rows, following = steps.pairs
    last = steps.order[steps.is_last]
    if inclusive:
        spent = amounts[rows]
        final = amounts[last]
    else:
        spent = amounts[following]
        final = np.zeros(len(last))
    active = np.flatnonzero(spent != 0.0)
    if len(active) < _FEWEST_PAIRS or np.nanstd(values) == 0.0:
        return False
    left = values[rows] - spent
    after = values[following]
    squares = float(np.nansum(after**2))
    if not squares:
        return False
    # least squares of left = γ · after
    discount = float(np.nansum(left * after)) / squares
    if not 0.1 < discount < 1.001:
        return False
    tolerance = _tolerance(values, spent[active])
    error = left - discount * after
    fits = np.abs(error) <= tolerance
    ends = np.abs(values[last] - final) <= tolerance
    if min(fits[active].mean(), ends.mean()) < _NEARLY_ALL:
        return False
    # Where a column is rounded to whole numbers, small rewards would always fit.
    scale = float(np.mean(spent[active] ** 2))
    return float(np.nanmean(error[active] ** 2)) <= _ROUNDED * scale


def _sums_so_far(values: np.ndarray, rewards: np.ndarray, steps: Steps) -> bool:
    """Whether values (N,) are the sums of the rewards (N,) of their episode up to and
    with that of their own row.
    """
    rows, following = steps.pairs
    gained = rewards[following]
    active = np.flatnonzero(gained != 0.0)
    if len(active) < _FEWEST_PAIRS:
        return False
    firsts = steps.order[steps.firsts]
    tolerance = _tolerance(values, gained[active])
    error = values[following] - values[rows] - gained
    fits = np.abs(error) <= tolerance
    begins = np.abs(values[firsts] - rewards[firsts]) <= tolerance
    if min(fits[active].mean(), begins.mean()) < _NEARLY_ALL:
        return False
    scale = float(np.mean(gained[active] ** 2))
    return float(np.nanmean(error[active] ** 2)) <= _ROUNDED * scale


def _tolerance(values: np.ndarray, amounts: np.ndarray) -> float:
    """How far two values and an amount (M,) may be apart: a little of the size of the
    amounts, and at least what values (N,) were rounded by.
    """
    close = _CLOSE * float(np.abs(amounts).mean())
    return max(close, 1.01 * _rounding(values))


def _rounding(values: np.ndarray) -> float:
    """The step to which all values (N,) were rounded, 0.01 for two decimals; 0 if they
    have more than six.
    """
    present = values[np.isfinite(values)]
    for decimals in range(7):
        scaled = present * 10.0**decimals
        if np.abs(scaled - scaled.round()).max(initial=0.0) < 1e-6:
            return float(10.0**-decimals)
    return 0.0


@dataclass(frozen=True)
class _EpisodeOutcome:
    """What is known at the end of each episode: its name, and (E,) numbers that differ
    between episodes.
    """

    name: str
    values: np.ndarray
    is_final: bool = True  # else an extreme of an observation, which may be a bound


def _by_episode(
    column: ColumnProfile, coded: np.ndarray, steps: Steps
) -> np.ndarray | None:
    """(E, d) values of a column that is constant in every episode, or the means of one
    that is so but for noise; None if it is not. coded: (N, d).
    """
    rows, following = steps.pairs
    # A few rows first: most columns change there already.
    is_constant = all(
        np.array_equal(coded[rows[probed]], coded[following[probed]], equal_nan=True)
        for probed in (slice(_PROBED), slice(None))
    )
    if is_constant:
        return coded[steps.order[steps.firsts]]
    if not column.is_number or column.width is not None:
        return None
    ordered = coded[steps.order]
    if not np.isfinite(ordered).all():
        return None
    means = np.add.reduceat(ordered, steps.firsts) / steps.lengths.reshape(-1, 1)
    noise = ordered - means[steps.episodes]
    if noise.var() > _NOISE * ordered.var():
        return None
    return means


def _outcome(
    column: ColumnProfile,
    coded: np.ndarray,
    outcomes: Sequence[_EpisodeOutcome],
    steps: Steps,
) -> Later | None:
    """Say so if a column, (N, d), is constant in every episode and goes with how the
    episode went.
    """
    lengths = steps.lengths
    if len(lengths) < _FEWEST_EPISODES or lengths.mean() < 2.0:
        return None
    values = _by_episode(column, coded, steps)
    if values is None:
        return None
    n_values = len(np.unique(values, axis=0))
    if n_values < 2:
        return None
    for outcome in outcomes:
        known = outcome.values
        if column.is_number:
            is_same = np.isclose(values[:, 0], known, rtol=1e-3, atol=1e-6)
            if is_same.mean() >= _NEARLY_ALL:
                reason = f"in every episode it is {outcome.name}"
                return Later(column, reason, is_sure=outcome.is_final)
        if not outcome.is_final:
            continue
        if n_values <= _MOST_VALUES and _separates(values, known):
            reason = f"it goes with {outcome.name}: known only at the end?"
            return Later(column, reason, is_sure=False)
        if column.is_number and n_values > 2 and np.isfinite(values).all():
            correlation = abs(float(np.corrcoef(values[:, 0], known)[0, 1]))
            if correlation >= _CORRELATED:
                reason = (
                    f"it goes with {outcome.name} (correlation {correlation:.2f}):"
                    " known only at the end?"
                )
                return Later(column, reason, is_sure=False)
    return None


def _outcomes(
    columns: Sequence[ColumnProfile], steps: Steps
) -> Iterator[_EpisodeOutcome]:
    """Yield what is known at the end of each episode, if it differs between them."""
    firsts = steps.firsts
    rewards = _rewards(columns)
    outcomes = [_EpisodeOutcome("its number of rows", steps.lengths.astype(float))]
    if rewards is not None:
        ordered = rewards[steps.order]
        outcomes.append(_EpisodeOutcome("its last reward", ordered[steps.is_last]))
        sums = np.add.reduceat(ordered, firsts)
        outcomes.append(_EpisodeOutcome("its sum of rewards", sums))
        age = np.arange(len(ordered)) - firsts[steps.episodes]
        for discount in _DISCOUNTS:
            returns = np.add.reduceat(ordered * discount**age, firsts)
            outcomes.append(_EpisodeOutcome(f"its return (γ = {discount})", returns))
    outcomes += _extremes(columns, steps)
    flag = next((column for column in columns if column.role == "terminal"), None)
    if flag is not None:
        last = set_rows(flag)[steps.order[steps.is_last]]
        outcomes.append(_EpisodeOutcome(f"its last {flag.name}", last.astype(float)))
    for outcome in outcomes:
        if np.isfinite(outcome.values).all() and np.ptp(outcome.values) > 0.0:
            yield outcome


def _extremes(
    columns: Sequence[ColumnProfile], steps: Steps
) -> Iterator[_EpisodeOutcome]:
    """Yield the largest and the smallest value of each observation in each episode, if
    the first rows do not have it already.
    """
    numbers = [
        column
        for column in columns
        if column.role == "observations" and column.is_number
    ]
    for column in numbers[:_MOST_OUTCOMES]:
        values = as_matrix(column)
        assert values is not None, "numbers"
        ordered = values[steps.order, 0]
        first = ordered[steps.firsts]
        for word, extreme in (("largest", np.maximum), ("smallest", np.minimum)):
            reached = extreme.reduceat(ordered, steps.firsts)
            if np.mean(reached == first) < 0.5:
                name = f"the {word} {column.name} in it"
                yield _EpisodeOutcome(name, reached, is_final=False)


def _separates(values: np.ndarray, outcomes: np.ndarray) -> bool:
    """Whether episodes with different values (E, d) have outcomes (E,) in different
    ranges.
    """
    _, group = np.unique(values, axis=0, return_inverse=True)
    group = group.reshape(-1)
    counts = np.bincount(group)
    if counts.min() < _FEWEST_PER_VALUE:
        return False
    lows = np.full(len(counts), np.inf)
    highs = np.full(len(counts), -np.inf)
    np.minimum.at(lows, group, outcomes)
    np.maximum.at(highs, group, outcomes)
    order = np.argsort(lows)
    return bool((highs[order][:-1] < lows[order][1:]).all())
