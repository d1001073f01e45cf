"""Are the columns of a policy's array in another order than the log's actions?

A policy written by another program may number the actions in its own order: of letters,
where the log has natural order (banner_10 before banner_2), or of first appearance. The
log can tell if the policy follows the logged actions. Let p_i(a) be the policy's
probability of action a in row i, less its mean over all rows, and a_i the logged
action. The agreement mean_i p_i(a_i) is the sum over actions of the covariances between
the policy's and the logger's choice. A policy that resembles the logger has a positive
one; one that is read in the wrong order has hardly any.

A policy may rightly differ from the logger, even be its opposite, or take the next
higher dose. Hence only orders that programs make are compared, with at least
`_FEWEST_MOVED` actions in other places, and the policy is doubted only where it clearly
agrees under one of these and not at all under the stated one. Agreement is of choices
that vary with the state: of a policy that ignores it, or of a logger that does, nothing
is said.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int
from scipy import special
from scipy.optimize import linear_sum_assignment

from koffline.data.columns import in_natural_order
from koffline.errors import chance, listed

_FEWEST_MOVED = 6
_CLEAR = 1e-6  # p-value of agreement under the other order, times the number of orders
_NONE = 0.25  # largest share of that agreement which may remain under the stated order
_FEWEST_UNITS = 30
_BEST = 0.8  # least share of the agreement under the best of all orders
_FAR = 4.0  # standard deviations of the agreement under random orders


@dataclass(frozen=True)
class OtherOrder:
    """An order of the actions under which a policy agrees with the logged actions,
    unlike the stated one.

    ``order``: in words. ``names``: the actions in it. ``agreement``,
    ``stated_agreement``: sums of covariances over the actions that move, under both
    orders. ``p_value``: of the difference between them.
    """

    order: str
    names: tuple[str, ...]
    agreement: float
    stated_agreement: float
    p_value: float

    def __str__(self) -> str:
        return (
            "the policy resembles the logged actions if its columns are in"
            f" {self.order} ({listed(self.names, 4)}; its agreement with them is then"
            f" {self.agreement:.2g}, in the stated order {self.stated_agreement:.2g},"
            f" {chance(self.p_value)}); if they are, list that order as action_names, or"
            " return a table with named columns"
        )


def find_other_order(
    probabilities: Float[np.ndarray, "row action"],
    actions: Int[np.ndarray, " row"],
    units: Int[np.ndarray, " row"],
    names: Sequence[str],
) -> OtherOrder | None:
    """The usual order in which the policy's columns seem to be instead of that of
    ``names``; None if none.

    probabilities: of the policy, its column j read as action ``names[j]``. units:
    numbers of the rows' independent units.
    """
    orders = [*usual_orders(actions, names)]
    varying = probabilities - probabilities.mean(axis=0)
    rows = np.arange(len(actions))
    candidates = list[OtherOrder]()
    covariances = np.zeros((len(names), len(names)))  # of column and logged action
    np.add.at(covariances.T, actions, varying / len(actions))
    for order, places in orders:
        # the column that holds each action, if the columns are in this order
        column_of = np.argsort(places)
        is_moved = column_of[actions] != actions
        stated = np.where(is_moved, varying[rows, actions], 0.0)
        other = np.where(is_moved, varying[rows, column_of[actions]], 0.0)
        p_value = min(1.0, len(orders) * _p_value_of_mean(other - stated, units))
        agreement = float(other.mean())
        stated_agreement = float(stated.mean())
        moved = np.flatnonzero(column_of != np.arange(len(names)))
        of_moved = covariances[np.ix_(moved, moved)]
        is_best = (
            agreement
            > _BEST * of_moved[linear_sum_assignment(of_moved, maximize=True)].sum()
        )
        is_far = _distance_from_chance(of_moved, agreement) > _FAR
        is_no_shift = covariances[
            column_of, np.arange(len(names))
        ].sum() > _agreement_of_shifts(covariances)
        if (
            p_value < _CLEAR
            and is_best
            and is_far
            and is_no_shift
            and stated_agreement < _NONE * agreement
        ):
            in_order = tuple(names[place] for place in places)
            candidates.append(
                OtherOrder(order, in_order, agreement, stated_agreement, p_value)
            )
    return max(candidates, key=lambda candidate: candidate.agreement, default=None)


def _agreement_of_shifts(covariances: Float[np.ndarray, "column action"]) -> float:
    """Largest agreement of a policy that means other actions: some doses more or less,
    or the reverse.
    """
    count = len(covariances)
    actions = np.arange(count)
    shifts = [
        covariances[(actions + shift) % count, actions].sum()
        for shift in range(1, count)
    ]
    shifts.append(covariances[::-1].trace())
    return float(max(shifts))


def _distance_from_chance(
    covariances: Float[np.ndarray, "column action"], agreement: float
) -> float:
    """Distance of an agreement from that of random orders, in their standard deviations
    (exact).
    """
    count = len(covariances)
    doubly_centred = (
        covariances - covariances.mean(axis=0) - covariances.mean(axis=1)[:, None]
    )
    doubly_centred += covariances.mean()
    variance = float(np.square(doubly_centred).sum()) / (count - 1)  # Hoeffding 1951
    return (agreement - float(covariances.sum()) / count) / max(
        math.sqrt(variance), 1e-300
    )


def usual_orders(
    actions: Int[np.ndarray, " row"], names: Sequence[str]
) -> Iterator[tuple[str, Int[np.ndarray, " action"]]]:
    """Orders that programs make, each with the places of its actions in ``names``."""
    place = {name: number for number, name in enumerate(names)}
    seen, first = np.unique(actions, return_index=True)
    by_appearance: list[int] = []
    if len(seen) == len(names):
        by_appearance = seen[np.argsort(first)].tolist()
    orders = {
        "natural order": [place[name] for name in in_natural_order(names)],
        "the order of letters": [place[name] for name in sorted(names)],
        "the order of letters, whatever their case": [
            place[n] for n in sorted(names, key=str.casefold)
        ],
        "the order of first appearance": by_appearance,
    }
    for order, places in orders.items():
        is_new = list(orders.values()).index(places) == list(orders).index(order)
        moved = sum(number != position for position, number in enumerate(places))
        if moved >= _FEWEST_MOVED and is_new:
            yield order, np.array(places)


def _p_value_of_mean(
    values: Float[np.ndarray, " row"], units: Int[np.ndarray, " row"]
) -> float:
    """One-sided p-value for a mean of at most zero, by Student's t over units; 1 for
    few units.
    """
    _, unit = np.unique(units, return_inverse=True)
    count = int(unit.max()) + 1
    if count < _FEWEST_UNITS:
        return 1.0
    sums = np.bincount(unit, weights=values)
    deviation = float(sums.std(ddof=1))
    if deviation == 0.0:
        return 1.0
    return float(
        special.stdtr(count - 1, -float(sums.mean()) * math.sqrt(count) / deviation)
    )
