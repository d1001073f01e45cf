"""Where a new policy acts differently from the present one, and on how many rows of the
log that rests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from koffline.data.spaces import ACTIONS
from koffline.data.transitions import Transitions
from koffline.improvement.scaling import LogScaling
from koffline.ope.results import Record
from koffline.policies import ContinuousPolicy, DiscretePolicy, Policy

_ROWS = 5000  # on which policies are compared
_NEIGHBOURS = 100  # rows of the log whose actions are counted
_REFERENCE_ROWS = 20_000
_ROUNDED = 6  # significant digits of a shown observation
_BINS = 4
_EXAMPLES = 10
_ALIKE = 0.25  # of the half width of the range: continuous actions that are alike
_MOST_ACTIONS = 40  # in a table


@dataclass(frozen=True, eq=False)
class ActionShare(Record):
    """How often an action is taken: by the present policy, as it was logged (``rows``
    of the log, a share ``logged``), and by the new one in the same states.
    """

    action: str
    rows: int
    logged: float
    new: float


@dataclass(frozen=True, eq=False)
class FeatureRange(Record):
    """A range of a feature of the state, with ``rows`` of the log: how differently the
    policies act there (as `Differences`), and the share ``supported`` of the nearest
    rows whose logged action is one that the new policy takes.
    """

    feature: str
    low: float
    high: float
    rows: int
    difference: float
    supported: float


@dataclass(frozen=True, eq=False)
class Example(Record):
    """A state in which the policies differ much: both policies' actions, and how many
    of the ``near`` nearest logged rows took an action like the new policy's.
    """

    state: dict[str, float]
    present: str
    new: str
    difference: float
    like: int
    near: int


@dataclass(frozen=True, eq=False)
class Differences(Record):
    """The new policy beside the present one (the clone), in states of the log.

    ``mean``: the mean over states of the probability that both act differently at best
    (total variation), or for continuous actions the mean distance of their mean
    actions, in half widths of the range.
    """

    mean: float
    is_discrete: bool
    actions: tuple[ActionShare, ...] = ()
    regions: tuple[FeatureRange, ...] = ()
    examples: tuple[Example, ...] = ()


def differences(
    new: Policy, present: Policy, log: Transitions, scaling: LogScaling, seed: int
) -> Differences:
    """Compare policies in states of a log. log: in memory. seed: of the sample."""
    generator = np.random.default_rng([seed, 3])
    rows = np.sort(generator.permutation(len(log))[:_ROWS])
    states = log.observations[rows]
    compared = _compared(new, present, states, scaling)
    near = min(_NEIGHBOURS, len(log))
    support = _support(new, log, states, scaling, generator)
    return Differences(
        mean=float(compared.gaps.mean()),
        is_discrete=isinstance(new, DiscretePolicy),
        actions=_action_shares(compared, log, rows),
        regions=_regions(compared.gaps, support, near, log, rows),
        examples=_examples(compared, support, near, log, rows),
    )


@dataclass(frozen=True, eq=False)
class _Compared:
    """Answers of both policies in M states: probabilities (M, n) or mean actions (M,
    k); ``gaps (M,)``.
    """

    new: np.ndarray
    present: np.ndarray
    gaps: np.ndarray
    is_discrete: bool


def _compared(
    new: Policy, present: Policy, states: np.ndarray, scaling: LogScaling
) -> _Compared:
    if isinstance(new, DiscretePolicy) and isinstance(present, DiscretePolicy):
        first = new.probabilities(states)
        second = present.probabilities(states)
        gaps = 0.5 * np.abs(first - second).sum(axis=1)
        return _Compared(first, second, gaps, True)
    assert isinstance(new, ContinuousPolicy)
    assert isinstance(present, ContinuousPolicy)
    first = new.mean(states)
    second = present.mean(states)
    gaps = np.abs((first - second) / scaling.half).mean(axis=1)
    return _Compared(first, second, gaps, False)


def _support(
    new: Policy,
    log: Transitions,
    states: np.ndarray,
    scaling: LogScaling,
    generator: np.random.Generator,
) -> np.ndarray:
    """How many (M,) of the nearest logged rows took an action that the new policy draws
    in the state.
    """
    reference = generator.permutation(len(log))[:_REFERENCE_ROWS]
    from scipy.spatial import KDTree

    tree = KDTree(scaling.inputs(log.observations[reference]))
    near = min(_NEIGHBOURS, len(reference))
    _, nearest = tree.query(scaling.inputs(states), k=near)
    nearest = np.reshape(nearest, (len(states), near))
    drawn = np.asarray(new.sample(states, generator))
    logged = np.asarray(log.actions)[reference][nearest]
    if isinstance(new, DiscretePolicy):
        return (logged == drawn[:, None]).sum(axis=1)
    gaps = np.abs(logged - drawn[:, None]) / scaling.half
    return (gaps <= _ALIKE).all(axis=2).sum(axis=1)


def _action_shares(
    compared: _Compared, log: Transitions, rows: np.ndarray
) -> tuple[ActionShare, ...]:
    """A line for each discrete action, the largest change first; empty for continuous
    ones.
    """
    if not compared.is_discrete:
        return ()
    count = compared.new.shape[1]
    logged = np.bincount(np.asarray(log.actions), minlength=count)
    shares = logged / len(log)
    used = compared.new.mean(axis=0)
    names = _action_names(log, count)
    order = np.argsort(-np.abs(used - shares), kind="stable")[:_MOST_ACTIONS]
    return tuple(
        ActionShare(
            action=names[action],
            rows=int(logged[action]),
            logged=float(shares[action]),
            new=float(used[action]),
        )
        for action in order
    )


def _regions(
    gaps: np.ndarray,
    support: np.ndarray,
    near: int,
    log: Transitions,
    rows: np.ndarray,
) -> tuple[FeatureRange, ...]:
    """Quarters of the feature along which the difference varies most.

    support (M,): how many of the ``near`` nearest rows took the new policy's action.
    """
    flat = _flat(log.observations)[rows]
    best: tuple[FeatureRange, ...] = ()
    most = -1.0
    names = _feature_names(log, flat.shape[1])
    for column, name in enumerate(names):
        values = flat[:, column]
        edges = np.unique(np.quantile(values, np.linspace(0.0, 1.0, _BINS + 1)))
        if len(edges) < 3:
            continue
        bin_of = np.clip(np.searchsorted(edges, values, side="right") - 1, 0, None)
        bin_of = np.minimum(bin_of, len(edges) - 2)
        regions = []
        for number in range(len(edges) - 1):
            inside = bin_of == number
            if not inside.any():
                continue
            regions.append(
                FeatureRange(
                    feature=name,
                    low=float(edges[number]),
                    high=float(edges[number + 1]),
                    rows=round(float(inside.mean()) * len(log)),
                    difference=float(gaps[inside].mean()),
                    supported=float(support[inside].mean()) / near,
                )
            )
        spread = float(np.var([region.difference for region in regions]))
        if spread > most:
            most = spread
            best = tuple(regions)
    return best


def _examples(
    compared: _Compared,
    support: np.ndarray,
    near: int,
    log: Transitions,
    rows: np.ndarray,
) -> tuple[Example, ...]:
    """States of ten quantiles of the upper half of the differences, the largest
    first.
    """
    order = np.argsort(-compared.gaps, kind="stable")
    places = np.linspace(0, max(len(order) // 2 - 1, 0), _EXAMPLES).astype(np.int64)
    flat = _flat(log.observations)
    names = _feature_names(log, flat.shape[1])
    action_names = _action_names(log, compared.new.shape[1])
    examples = []
    for place in dict.fromkeys(places.tolist()):
        state = order[place]
        values = flat[rows[state]].tolist()
        examples.append(
            Example(
                state={
                    name: float(f"{value:.{_ROUNDED}g}")
                    for name, value in zip(names, values, strict=True)
                },
                present=_described(compared.present[state], compared, action_names),
                new=_described(compared.new[state], compared, action_names),
                difference=float(compared.gaps[state]),
                like=int(support[state]),
                near=near,
            )
        )
    return tuple(examples)


def _described(answer: np.ndarray, compared: _Compared, action_names: list[str]) -> str:
    """The likeliest action with its probability, or the mean action."""
    if not compared.is_discrete:
        return ", ".join(f"{number:.3g}" for number in answer)
    best = int(answer.argmax())
    return f"{action_names[best]} ({answer[best]:.0%})"


def _action_names(log: Transitions, count: int) -> list[str]:
    named: Any = log.metadata.extra.get(ACTIONS)
    names = list(map(str, named or ()))[:count]
    return [*names, *map(str, range(len(names), count))]


def _feature_names(log: Transitions, count: int) -> list[str]:
    if len(log.feature_names) == count:
        return list(log.feature_names)
    return [f"x_{number}" for number in range(count)]


def _flat(observations: np.ndarray) -> np.ndarray:
    return np.asarray(observations, np.float64).reshape(len(observations), -1)
