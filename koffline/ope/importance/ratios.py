"""Ratios π(a|s) / β(a|s) of every logged action, in logarithms."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Float

from koffline.data.transitions import Continuous, Transitions
from koffline.errors import DataError, PolicyError
from koffline.ope.importance.behavior import estimate_behavior, share_at_bounds
from koffline.policies import ContinuousPolicy, DiscretePolicy

FROM_LOG, ESTIMATED, AUTO = "log", "estimate", "auto"
_STANDS_FOR_ZERO = -18.0  # a taken action with probability below 1.5e-8: more likely a stand-in for zero
_DEVIATIONS = 5.0
_AT_BOUNDS = 0.01  # share of actions on the bounds from which densities need masses there


@dataclass(frozen=True, eq=False)
class Ratios:
    """``logs`` (N,): log π(a|s) − log β(a|s), −inf where the policy never takes the logged action."""

    logs: Float[np.ndarray, " row"]
    behavior: str
    warnings: tuple[str, ...] = ()
    diagnostics: dict[str, Any] = field(default_factory=dict)

    @property
    def is_estimated(self) -> bool:
        """Whether β was estimated from the log: bounds that need exact probabilities do not hold."""
        return self.behavior == ESTIMATED


def importance_ratios(
    transitions: Transitions,
    policy: DiscretePolicy | ContinuousPolicy,
    behavior: str = AUTO,
    seed: int = 0,
    target: Float[np.ndarray, " row"] | None = None,
) -> Ratios:
    """Ratios of the log's actions; β from the log (``"log"``), estimated from it (``"estimate"``), or from
    the log where it has probabilities (``"auto"``). target: log π(a|s), where it is known.

    Raises DataError when the log's are asked for and missing, PolicyError for a policy without probabilities
    of given actions.
    """
    if target is None:
        target = action_log_probabilities(transitions, policy)
    logged = transitions.behavior_log_probabilities
    if logged is None and behavior == FROM_LOG:
        raise DataError(
            "the log has no behavior_log_probabilities; store them, or estimate them with behavior='estimate'"
        )
    at_bounds = _warnings_at_bounds(transitions, policy)
    if logged is not None and behavior != ESTIMATED:
        logs = target - np.asarray(logged, dtype=np.float64)
        warnings = (*_warnings_of_logged(transitions, logs), *at_bounds)
        return Ratios(logs, FROM_LOG, warnings, {"behavior": FROM_LOG})
    cut_to = policy.cut_to if isinstance(policy, ContinuousPolicy) else None
    found = estimate_behavior(transitions, seed=seed, cut_to=cut_to)
    diagnostics = {"behavior": ESTIMATED, **found.diagnostics}
    return Ratios(target - found.log_probabilities, ESTIMATED, (*found.warnings, *at_bounds), diagnostics)


def action_log_probabilities(
    transitions: Transitions, policy: DiscretePolicy | ContinuousPolicy
) -> Float[np.ndarray, " row"]:
    """(N,) log π(a|s) of the logged actions, a density for continuous ones. Raises PolicyError."""
    if isinstance(policy, DiscretePolicy):
        probabilities = policy.probabilities(transitions.observations)
        taken = probabilities[np.arange(len(transitions)), np.asarray(transitions.actions)]
        with np.errstate(divide="ignore"):
            return np.log(taken)
    if not policy.has_density:
        raise PolicyError(
            f"{policy.name}: {policy.why_no_density}; importance ratios need the density of logged actions: "
            "use an estimator that asks the policy for actions (kloss, fqe, mwl)"
        )
    return policy.log_density(transitions.observations, np.asarray(transitions.actions))


def _warnings_of_logged(transitions: Transitions, logs: Float[np.ndarray, " row"]) -> tuple[str, ...]:
    """What is odd about the log's own probabilities."""
    logged = np.asarray(transitions.behavior_log_probabilities, dtype=np.float64)
    found = []
    if not isinstance(transitions.action_space, Continuous):
        tiny = np.flatnonzero(logged < _STANDS_FOR_ZERO)
        if len(tiny):
            found.append(
                f"{len(tiny)} logged actions have a behavior probability below "
                f"{np.exp(_STANDS_FOR_ZERO):.1g} (row {int(tiny[0])}: {np.exp(logged[tiny[0]]):.1g}): "
                "impossible actions, or zeros stored as small numbers; their weights are meaningless."
            )
    ratios = np.exp(np.minimum(logs, 300.0))  # squares stay finite
    error = float(ratios.std(ddof=1) / np.sqrt(len(ratios))) if len(ratios) > 1 else np.inf
    if abs(float(ratios.mean()) - 1.0) > _DEVIATIONS * error + 1e-3:
        found.append(
            f"Ratios of policy to behavior average {ratios.mean():.4g} over rows (standard error "
            f"{error:.2g}) where 1 is expected: the logged probabilities are not those of the logged "
            "actions, or the policy takes actions that the behavior never takes."
        )
    return tuple(found)


def _warnings_at_bounds(
    transitions: Transitions, policy: DiscretePolicy | ContinuousPolicy
) -> tuple[str, ...]:
    """Probability that collects on the bounds has no density: both sides must count it alike."""
    space = transitions.action_space
    if not isinstance(space, Continuous) or not isinstance(policy, ContinuousPolicy):
        return ()
    share = share_at_bounds(transitions, (np.asarray(space.low), np.asarray(space.high)))
    if share <= _AT_BOUNDS:
        return ()
    there = f"{share:.1%} of the actions lie on the bounds"
    if policy.cut_to is None:
        return (f"{there}, where the policy's draws do not collect: their weights are not to be trusted.",)
    if transitions.behavior_log_probabilities is None:
        return ()
    return (
        f"{there}: logged densities must count the probability of being cut off there, as the policy's do.",
    )
