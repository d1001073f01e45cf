"""How each estimator is run: a function of a `Workspace`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from koffline.ope.estimators.direct import estimate_by_networks
from koffline.ope.estimators.weighting import (
    estimate_by_importance,
    estimate_doubly_robust_marginal,
    estimate_in_features,
)
from koffline.ope.importance.unavailable import Unavailable
from koffline.ope.names import FITTED, OVER_EPISODES
from koffline.ope.point_estimate import PointEstimate
from koffline.ope.workspace import Workspace

RUN: dict[str, Callable[[Workspace], PointEstimate | Unavailable]] = {
    **{name: partial(estimate_by_networks, head=name) for name in FITTED},
    **{name: partial(estimate_in_features, name=name) for name in ("mql", "lstdq", "mwl", "dualdice")},
    **{name: partial(estimate_by_importance, name=name) for name in OVER_EPISODES},
    "drl": estimate_doubly_robust_marginal,
}
