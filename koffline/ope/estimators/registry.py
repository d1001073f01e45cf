"""The estimators by name, each a function of a `Workspace`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from koffline.errors import ConfigError, nearest_name
from koffline.ope.estimators.direct import estimate_by_networks
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


ESTIMATORS: dict[str, Estimator] = {
    estimator.name: estimator
    for estimator in (
        _fitted("kloss", "kernel loss, exact over the last layer of trained networks"),
        _fitted("fqe", "fitted Q evaluation"),
        _fitted("lstd", "LSTD-Q over the last layer of trained networks"),
    )
}


def find_estimator(name: str) -> Estimator:
    """ConfigError for a name that is none."""
    if name not in ESTIMATORS:
        raise ConfigError(f"there is no estimator '{name}'; {nearest_name(name, ESTIMATORS)}")
    return ESTIMATORS[name]
