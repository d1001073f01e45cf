"""Values of a candidate on the part to choose on, at every share, by one stack of
networks.

The mixture (1 − a) β̂ + a π has the action probabilities, and so the Bellman equations
of the last layer, linear in a. Networks are trained for the candidate alone (a = 1);
the systems of the candidate and of the clone in the same features are interpolated, and
each share's last layer is solved exactly. So all shares of a candidate cost one
training, and their values are paired: the same features, the same resampled episodes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from koffline.config import EvaluationSettings
from koffline.data.transitions import Transitions
from koffline.improvement.settings import ImproveSettings
from koffline.ope import thresholds
from koffline.ope.log.coverage import among, measure_coverage, visited_holes
from koffline.ope.networks.last_layer import (
    last_layer,
    mean_values,
    minimise_kernel_loss,
)
from koffline.ope.networks.systems import LinearSystems, systems_of_part
from koffline.ope.workspace import (
    SharedByPolicies,
    Workspace,
    open_workspace,
)
from koffline.policies import DiscretePolicy, Policy

_REPLICAS = {"full_replicas": 2, "resampled_replicas": 12}
LEVEL = 0.9  # two-sided: its lower end holds with 95 %
_SCREEN_STREAM = 1


@dataclass(frozen=True)
class ShareScore:
    """A candidate at one share, on the part to choose on.

    ``uplift``, ``low``, ``high``: over the behavior policy, with the interval of
    `LEVEL`; ``refused``: why the log does not answer, or empty; ``cost``: the second
    return, None without a constraint.
    """

    share: float
    value: float
    uplift: float
    low: float
    high: float
    refused: str = ""
    cost: float | None = None

    @property
    def seems_better(self) -> bool:
        """Whether it seems better than the behavior policy, and the log answers."""
        return self.uplift > 0.0 and not self.refused

    def keeps(self, most_cost: float | None) -> bool:
        """Whether the second return seems to be at most that; True without a
        constraint.
        """
        return most_cost is None or self.cost is None or self.cost <= most_cost


@dataclass(frozen=True)
class SharedByCandidates:
    """What evaluations of several candidates on one log share: of its rewards, and of
    the costs in their place.
    """

    rewards: SharedByPolicies = field(default_factory=SharedByPolicies)
    costs: SharedByPolicies = field(default_factory=SharedByPolicies)


def screen(
    log: Transitions,
    candidate: Policy,
    clone: Policy,
    evaluation: EvaluationSettings,
    settings: ImproveSettings,
    cost_log: Transitions | None = None,
    shared: SharedByCandidates | None = None,
) -> tuple[ShareScore, ...]:
    """Score a candidate at every share of the settings, on the part to choose on.

    candidate, clone: the policies that are mixed. evaluation: gamma, seed and device.
    cost_log: the same rows with costs in place of rewards. shared: with the scores
    of other candidates on the same rows, to the digit. Raises KofflineError if the
    networks diverge.
    """
    screening = evaluation.model_copy(
        update={
            "steps": settings.choosing_steps,
            "history": 0,
            "estimator": "kloss",
            **_REPLICAS,
        }
    )
    if shared is None:
        shared = SharedByCandidates()
    with open_workspace(log, candidate, screening, shared=shared.rewards) as workspace:
        scores = _scores(workspace, clone, settings.shares)
    if cost_log is None:
        return tuple(scores)
    with open_workspace(
        cost_log, candidate, screening, shared=shared.costs
    ) as workspace:
        of_cost = _scores(workspace, clone, settings.shares)
    return tuple(
        dataclasses.replace(score, cost=cost.value)
        for score, cost in zip(scores, of_cost, strict=True)
    )


def _scores(
    workspace: Workspace, clone: Policy, shares: Sequence[float]
) -> list[ShareScore]:
    fitted = workspace.fitted
    settings = workspace.settings
    clone_policy = clone
    if workspace.known_actions is not None:
        assert isinstance(clone, DiscretePolicy), "only choices can be known or not"
        clone_policy = among(clone, workspace.known_actions)
    clone_problem = workspace.problem_of(clone_policy)
    of_clone = systems_of_part(
        fitted.record.network,
        fitted.instruments,
        fitted.resampling,
        settings.gamma,
        fitted.cuts_by_step,
        clone_problem,
    )
    behavior = fitted.behavior
    coverage = workspace.coverage
    generator = np.random.default_rng([settings.seed, _SCREEN_STREAM])
    clone_coverage = measure_coverage(clone_problem, generator, workspace.known_actions)
    holes = visited_holes(
        workspace.problem, workspace.held_values.weights, settings.seed
    )
    scores = []
    for share in shares:
        mixed = _interpolated(of_clone, fitted.systems, share)
        solved = minimise_kernel_loss(
            fitted.record.network, mixed.system, settings.ridge
        )
        values = mean_values(
            mixed.starts.means[:, :, 0],
            last_layer(solved),
            fitted.problem.reward_scale,
        )
        gains = values
        if behavior is not None:
            gains = values - behavior
        value = fitted.summarise(values).value
        interval = fitted.interval(gains, level=LEVEL)
        unlogged = share * coverage.unlogged + (1 - share) * clone_coverage.unlogged
        near = share * coverage.fraction + (1 - share) * clone_coverage.fraction
        refused = ""
        if max(unlogged, share * holes) > thresholds.MUCH_UNLOGGED:
            refused = "support"
        if near < thresholds.NO_COVERAGE:
            refused = "support"
        scores.append(
            ShareScore(
                share=share,
                value=value,
                uplift=fitted.summarise(gains).value,
                low=interval.low,
                high=interval.high,
                refused=refused,
            )
        )
    return scores


def _interpolated(
    clone: LinearSystems, candidate: LinearSystems, share: float
) -> LinearSystems:
    """The systems of the mixture, which are linear in the probabilities of actions."""

    def mixed(first: Any, second: Any) -> Any:
        return (1.0 - share) * first + share * second

    starts = dataclasses.replace(
        candidate.starts,
        features=mixed(clone.starts.features, candidate.starts.features),
    )
    return dataclasses.replace(
        candidate, system=mixed(clone.system, candidate.system), starts=starts
    )
