"""The estimators by name, each a function of a `Workspace`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from koffline.errors import ConfigError, nearest_name
from koffline.ope.estimators.direct import estimate_by_networks
from koffline.ope.estimators.weighting import (
    estimate_by_importance,
    estimate_doubly_robust_marginal,
    estimate_in_features,
)
from koffline.ope.importance.unavailable import Unavailable
from koffline.ope.point_estimate import PointEstimate
from koffline.ope.workspace import Workspace

FITTED = ("kloss", "fqe", "lstd")  # heads of the trained networks, which share their hidden layers


@dataclass(frozen=True)
class Estimator:
    """One line of the table. ``run`` gives the estimate, or the reason why there is none."""

    name: str
    family: str
    title: str
    run: Callable[[Workspace], PointEstimate | Unavailable]


def _fitted(name: str, title: str) -> Estimator:
    return Estimator(name, "value function", title, partial(estimate_by_networks, head=name))


def _closed_form(name: str, family: str, title: str) -> Estimator:
    return Estimator(name, family, title, partial(estimate_in_features, name=name))


def _importance(name: str, family: str, title: str) -> Estimator:
    return Estimator(name, family, title, partial(estimate_by_importance, name=name))


ESTIMATORS: dict[str, Estimator] = {
    estimator.name: estimator
    for estimator in (
        _fitted("kloss", "kernel loss, exact over the last layer of trained networks"),
        _fitted("fqe", "fitted Q evaluation"),
        _fitted("lstd", "LSTD-Q over the last layer of trained networks"),
        _closed_form("mql", "value function", "kernel loss in closed form over random features"),
        _closed_form("lstdq", "value function", "LSTD-Q over random features"),
        _closed_form("mwl", "marginal weights", "minimax weights, the dual of the kernel loss"),
        _closed_form("dualdice", "marginal weights", "DualDICE in closed form"),
        _importance("is", "importance sampling", "whole trajectories"),
        _importance("wis", "importance sampling", "whole trajectories, self-normalised"),
        _importance("pdis", "importance sampling", "per decision"),
        _importance("wpdis", "importance sampling", "per decision, self-normalised"),
        _importance("dr", "doubly robust", "per decision, with kernel-loss values"),
        _importance("wdr", "doubly robust", "the same, self-normalised"),
        _importance("magic", "doubly robust", "blend of wdr and the values by their errors"),
        Estimator(
            "drl",
            "doubly robust",
            "marginal weights with kernel-loss values",
            estimate_doubly_robust_marginal,
        ),
    )
}


def find_estimator(name: str) -> Estimator:
    """ConfigError for a name that is none."""
    if name not in ESTIMATORS:
        raise ConfigError(f"there is no estimator '{name}'; {nearest_name(name, ESTIMATORS)}")
    return ESTIMATORS[name]
