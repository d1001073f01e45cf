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

from koffline.data.table.flags import set_rows
from koffline.data.table.guesses import as_matrix
from koffline.data.table.names import is_earlier, is_later
from koffline.data.table.profiles import Profile
from koffline.data.table.steps import Steps

_NEARLY_ALL = 0.95  # share of the rows
_FEWEST_PAIRS = 20  # rows with a next row; fewer may agree by chance
_FEWEST_CHANGES = 10
_FEWEST_EPISODES = 20
_FEWEST_PER_VALUE = 5  # episodes with one value of a column
_MOST_COLUMNS = 1000  # compared with each other
_PROBED = 100  # rows on which all columns are compared first
_CLOSE = 0.01  # of the size of the rewards
_CORRELATED = 0.95
_MOST_VALUES = 20  # a column with more is no category
_DISCOUNTS = (0.9, 0.95, 0.99)


@dataclass(frozen=True)
class Later:
    """A column that depends on what happens later, why it seems so, and whether that is
    sure.
    """

    column: Profile
    reason: str
    is_sure: bool


@dataclass(frozen=True)
class _Numbers:
    """A column as numbers (N, d), in the table's order."""

    column: Profile
    values: np.ndarray


def find_later(columns: Sequence[Profile], steps: Steps) -> list[Later]:
    """Columns with the role of observations that depend on what happens later, each
    once.

    Those that are next observations get this role, and their partner.
    """
    if len(steps.pairs[0]) < _FEWEST_PAIRS:
        return []
    found = _next_values(columns, steps)
    known = {each.column.name for each in found}
    rewards = _rewards(columns)
    outcomes = list(_outcomes(columns, steps))
    for each in columns:
        if each.role == "observations" and each.name not in known:
            later = _later(each, rewards, outcomes, steps)
            found += [later] if later is not None else []
    return found


def _later(
    column: Profile,
    rewards: np.ndarray | None,
    outcomes: Sequence[_Outcome],
    steps: Steps,
) -> Later | None:
    """Say so if a column sums up what follows in its episode, or goes with how the
    episode went.
    """
    values = _coded(column)
    if values is None:
        return None
    is_amount = column.is_number and column.values.dtype != pl.Boolean
    if is_amount and rewards is not None:
        reason = _to_go(values[:, 0], rewards, steps)
        if reason:
            return Later(column, reason, is_sure=True)
    return _outcome(column, values, outcomes, steps)


def _rewards(columns: Sequence[Profile]) -> np.ndarray | None:
    reward = next((each for each in columns if each.role == "reward"), None)
    values = None if reward is None else as_matrix(reward)
    if values is None:
        return None
    return np.nan_to_num(values[:, 0])


def _coded(column: Profile) -> np.ndarray | None:
    """(N, d) numbers of a column, where equal texts have equal numbers; None if it
    cannot be compared.
    """
    if column.values.dtype == pl.String:
        hashed = column.values.hash(0).to_numpy() % 2**52
        return np.where(
            column.values.is_null().to_numpy(), np.nan, hashed.astype(np.float64)
        ).reshape(-1, 1)
    return as_matrix(column)


def _next_values(columns: Sequence[Profile], steps: Steps) -> list[Later]:
    """Columns that equal another column one row later, in nearly all rows in which that
    one changes.
    """
    by_name = {
        each.name: each
        for each in columns
        if each.role in ("observations", "action", "reward")
    }
    coded = [
        _Numbers(each, values)
        for each in by_name.values()
        if (values := _coded(each)) is not None
    ]
    found: list[Later] = []
    partners: list[tuple[Profile, Profile]] = []
    for now, later in _candidates(coded[:_MOST_COLUMNS], steps):
        if later.column.role != "observations" or is_earlier(now.column.name):
            continue
        if not _is_shifted(now, later, steps):
            continue
        if now.column.role != "observations":
            found.append(
                Later(
                    later.column, f"it is {now.column.name} one row later", is_sure=True
                )
            )
        elif is_later(later.column.name):
            partners.append((now.column, later.column))
        elif not _begins_empty(now, steps):
            reason = (
                f"it is {now.column.name} one row later, or {now.column.name} is its"
                " value of before"
            )
            found.append(Later(later.column, reason, is_sure=False))
    for column, next_column in partners:
        if next_column.role == "observations":
            next_column.role = "next_observations"
            next_column.partner = column.name
            next_column.reason = f"{column.name} one row later, in nearly all rows"
    by_column: dict[str, Later] = {}
    for each in sorted(found, key=lambda each: each.is_sure):
        if each.column.role == "observations":
            by_column[each.column.name] = each
    return list(by_column.values())


def _candidates(
    columns: Sequence[_Numbers], steps: Steps
) -> Iterator[tuple[_Numbers, _Numbers]]:
    """Pairs of columns in which the second equals the first one row later, in a few
    rows.
    """
    rows, following = steps.pairs
    probed = np.linspace(0, len(rows) - 1, min(_PROBED, len(rows))).astype(int)
    rows = rows[probed]
    following = following[probed]
    by_width: dict[int, list[_Numbers]] = {}
    for each in columns:
        by_width.setdefault(each.values.shape[1], []).append(each)
    for several in by_width.values():
        # (k, P, d)
        next_values = np.stack([each.values[following] for each in several])
        for later in several:
            share = _equal(later.values[rows], next_values).mean(axis=1)
            for place in np.flatnonzero(share >= _NEARLY_ALL - 0.05):
                if several[place] is not later:
                    yield several[place], later


def _equal(values: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Whether (…, P) rows of (…, P, d) are equal up to rounding."""
    return np.isclose(values, others, rtol=1e-5, atol=1e-7).all(axis=-1)


def _is_shifted(now: _Numbers, later: _Numbers, steps: Steps) -> bool:
    """Whether ``later`` equals ``now`` one row later, and is no function of ``now``."""
    rows, following = steps.pairs
    equal = _equal(later.values[rows], now.values[following])
    changes = ~_equal(now.values[rows], now.values[following])
    if (
        changes.sum() < _FEWEST_CHANGES
        or min(equal.mean(), equal[changes].mean()) < _NEARLY_ALL
    ):
        return False
    steps_taken = now.values[following] - now.values[rows]
    if np.isclose(steps_taken, steps_taken[0], rtol=1e-6, atol=1e-9).all():
        return False  # a counter: its next value is known
    pairs = np.unique(np.hstack([now.values, later.values]), axis=0)
    n_values = len(np.unique(now.values, axis=0))
    return not (len(pairs) == n_values and n_values <= len(now.values) / 5)


def _begins_empty(now: _Numbers, steps: Steps) -> bool:
    """Whether a column has one value, or none, in nearly all first rows: then it holds
    the row before.
    """
    firsts = now.values[steps.first_rows]
    if len(firsts) < _FEWEST_PER_VALUE:
        return False
    if np.isnan(firsts).all(axis=1).mean() >= _NEARLY_ALL:
        return True
    usual = np.median(firsts, axis=0)
    is_usual = np.isclose(firsts, usual, equal_nan=True).all(axis=1).mean()
    elsewhere = (
        np.isclose(now.values[~steps.first_rows], usual, equal_nan=True)
        .all(axis=1)
        .mean()
    )
    return bool(is_usual >= _NEARLY_ALL and elsewhere < 0.5)


def _to_go(values: np.ndarray, rewards: np.ndarray, steps: Steps) -> str:
    """Why a column is a sum of the rewards that follow, or of the rows that follow;
    empty if it is none.
    """
    for amounts, name in ((rewards, "rewards"), (np.ones_like(rewards), "rows")):
        if name == "rows" and len(np.unique(steps.lengths)) < 2:
            # where all episodes are equally long, the rows that are left are known
            continue
        for inclusive in (True, False):
            if _sums_what_follows(values, amounts, steps, inclusive):
                return f"the sum of the {name} that follow"
    return ""


def _sums_what_follows(
    values: np.ndarray, amounts: np.ndarray, steps: Steps, inclusive: bool
) -> bool:
    """Whether x(t) = a(t) + γ x(t + 1), or x(t) = a(t + 1) + γ x(t + 1), with one γ,
    and ends accordingly.
    """
    rows, following = steps.pairs
    spent = amounts[rows] if inclusive else amounts[following]
    active = np.flatnonzero(spent != 0.0)
    if len(active) < _FEWEST_PAIRS or np.nanstd(values) == 0.0:
        return False
    left = values[rows] - spent
    after = values[following]
    squares = float(np.nansum(after**2))
    if squares:
        discount = float(np.nansum(left * after)) / squares
    else:
        discount = 0.0
    if not 0.1 < discount < 1.001:
        return False
    scale = _CLOSE * float(np.abs(spent[active]).mean())
    fits = np.abs(left - discount * after) <= scale
    last = steps.order[steps.is_last]
    final = amounts[last] if inclusive else np.zeros(len(last))
    ends = np.abs(values[last] - final) <= scale
    return bool(fits[active].mean() >= _NEARLY_ALL and ends.mean() >= _NEARLY_ALL)


@dataclass(frozen=True)
class _Outcome:
    """What is known at the end of each episode: its name, and (E,) numbers that differ
    between episodes.
    """

    name: str
    values: np.ndarray


def _outcome(
    column: Profile, coded: np.ndarray, outcomes: Sequence[_Outcome], steps: Steps
) -> Later | None:
    """Say so if a column, (N, d), is constant in every episode and goes with how the
    episode went.
    """
    lengths = steps.lengths
    if len(lengths) < _FEWEST_EPISODES or lengths.mean() < 2.0:
        return None
    rows, following = steps.pairs
    for probed in (slice(_PROBED), slice(None)):
        if not np.array_equal(
            coded[rows[probed]], coded[following[probed]], equal_nan=True
        ):
            return None
    values = coded[steps.order[steps.firsts]]
    several = len(np.unique(values, axis=0))
    if several < 2:
        return None
    is_amount = column.is_number
    for outcome in outcomes:
        known = outcome.values
        name = outcome.name
        if (
            is_amount
            and np.isclose(values[:, 0], known, rtol=1e-3, atol=1e-6).mean()
            >= _NEARLY_ALL
        ):
            return Later(column, f"in every episode it is {name}", is_sure=True)
        if several <= _MOST_VALUES and _separates(values, known):
            return Later(
                column, f"it goes with {name}: known only at the end?", is_sure=False
            )
        if is_amount and several > 2 and np.isfinite(values).all():
            correlation = abs(float(np.corrcoef(values[:, 0], known)[0, 1]))
            if correlation >= _CORRELATED:
                said = (
                    f"it goes with {name} (correlation {correlation:.2f}): known only"
                    " at the end?"
                )
                return Later(column, said, is_sure=False)
    return None


def _outcomes(columns: Sequence[Profile], steps: Steps) -> Iterator[_Outcome]:
    """What is known at the end of each episode."""
    lengths = steps.lengths
    episodes = steps.episodes
    firsts = steps.firsts
    rewards = _rewards(columns)
    found: list[tuple[str, np.ndarray]] = [
        ("its number of rows", lengths.astype(float))
    ]
    if rewards is not None:
        ordered = rewards[steps.order]
        found.append(("its last reward", ordered[steps.is_last]))
        found.append(("its sum of rewards", np.add.reduceat(ordered, firsts)))
        age = np.arange(len(ordered)) - firsts[episodes]
        for discount in _DISCOUNTS:
            found.append(
                (
                    f"its return (γ = {discount})",
                    np.add.reduceat(ordered * discount**age, firsts),
                )
            )
    flag = next((each for each in columns if each.role == "terminal"), None)
    if flag is not None:
        last = set_rows(flag)[steps.order[steps.is_last]]
        found.append((f"its last {flag.name}", last.astype(float)))
    for name, outcomes in found:
        if np.isfinite(outcomes).all() and np.ptp(outcomes) > 0.0:
            yield _Outcome(name, outcomes)


def _separates(values: np.ndarray, outcomes: np.ndarray) -> bool:
    """Whether episodes with different values have outcomes in different ranges."""
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
