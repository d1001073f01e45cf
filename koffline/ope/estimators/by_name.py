"""How each estimator is run by its name: a function of a `Workspace`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from koffline.ope.closed_form.estimates import CLOSED_FORMS
from koffline.ope.closed_form.estimates import drl as doubly_robust_closed_form
from koffline.ope.estimators.direct import estimate_by_networks
from koffline.ope.importance.episode_estimates import estimate_one
from koffline.ope.names import EPISODE_KINDS, EPISODES_T, FITTED, OVER_EPISODES, WITH_MODEL
from koffline.ope.out_of_bag import OutOfBag
from koffline.ope.point_estimate import PointEstimate, Unavailable
from koffline.ope.workspace import Workspace

_OTHER_STARTS = (
    "it estimates the return of the logged episodes, and other start states were given; leave them out"
)


def estimate_by_importance(workspace: Workspace, name: str) -> PointEstimate | Unavailable:
    """One of the estimators over episodes; doubly robust ones lean on out-of-bag kernel-loss networks."""
    if workspace.initial_observations is not None:
        return Unavailable(name, _OTHER_STARTS)
    episodes = workspace.episodes
    if isinstance(episodes, str):
        return Unavailable(name, episodes)
    settings = workspace.settings
    kind = settings.interval if settings.interval in EPISODE_KINDS else EPISODES_T
    model = workspace.row_values_of_episodes if name in WITH_MODEL else None
    return estimate_one(
        name, episodes, model, settings.level, kind, reward_range=settings.reward_bounds, seed=settings.seed
    )


def estimate_in_features(workspace: Workspace, name: str) -> PointEstimate:
    """One of the closed forms in the features of the settings."""
    settings = workspace.settings
    return CLOSED_FORMS[name](workspace.system, level=settings.level, seed=settings.seed)


def estimate_doubly_robust_marginal(workspace: Workspace) -> PointEstimate:
    """Marginalised weights in features beside the kernel-loss networks, the networks out of bag."""
    settings = workspace.settings
    values = workspace.row_values if workspace.log.is_whole else OutOfBag.of(workspace.fitted).in_features
    return doubly_robust_closed_form(workspace.system, values, level=settings.level, seed=settings.seed)


RUN: dict[str, Callable[[Workspace], PointEstimate | Unavailable]] = {
    **{name: partial(estimate_by_networks, head=name) for name in FITTED},
    **{name: partial(estimate_in_features, name=name) for name in ("mql", "lstdq", "mwl", "dualdice")},
    **{name: partial(estimate_by_importance, name=name) for name in OVER_EPISODES},
    "drl": estimate_doubly_robust_marginal,
}
