"""Estimators by value functions: the heads of the trained networks, minimax Q-learning
and LSTD-Q.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float

from koffline.ope import names, thresholds
from koffline.ope.estimators.contract import ListedEstimator
from koffline.ope.estimators.of_networks import (
    ClosedForm,
    mean_of_networks,
    ridge_of_rows,
    solve_closed_form,
)
from koffline.ope.networks.fitted_values import FittedValues
from koffline.ope.results import Diagnostics, Interval, PointEstimate, plain

if TYPE_CHECKING:
    from koffline.ope.workspace import Workspace


@torch.no_grad()
def minimax_q(fitted: FittedValues) -> Float[np.ndarray, "replica 2"]:
    """``mql``: minimax Q-learning with critics in an RKHS, i.e. the kernel loss
    minimised over Q = φᵀθ with a ridge toward zero (Feng et al. 2019, equ:vstat).

    J of every network, in units of the return (`solve_closed_form`).
    """
    ridge = ridge_of_rows(fitted, power=1.5)
    return solve_closed_form(fitted, fitted.systems.system, ridge)


@torch.no_grad()
def lstdq(fitted: FittedValues) -> Float[np.ndarray, "replica 2"]:
    """``lstdq``: the critics are the features themselves (Feng et al. 2019,
    cor:same_as_td).

    J of every network, in units of the return (`solve_closed_form`).
    """
    return solve_closed_form(fitted, fitted.temporal, ridge_of_rows(fitted, power=2.0))


@dataclass(frozen=True)
class Head(ListedEstimator):
    """One head of the networks, which share their hidden layers: ``kloss``, ``fqe``,
    their mean, or ``lstd``.

    ``fqe`` is trained by fitted Q evaluation (`koffline.ope.networks.fitted_q`);
    ``kloss`` minimises the kernel loss over the last layer
    (`koffline.ope.networks.last_layer`).
    """

    name: str

    def estimate(self, workspace: Workspace) -> PointEstimate:
        """The estimate with its bootstrap interval. Raises KofflineError."""
        values = workspace.fitted.values_of(self.name)
        interval = workspace.fitted.interval(values)
        diagnostics = _diagnostics_of_networks(workspace, self.name)
        warnings = tuple(_doubts(workspace, diagnostics, interval))
        return mean_of_networks(
            self.name, workspace.fitted, values, diagnostics, warnings
        )


def _diagnostics_of_networks(workspace: Workspace, head: str) -> Diagnostics:
    """Diagnostics of the trained networks as plain numbers."""
    fitted = workspace.fitted
    by_head = fitted.estimate_by_head(head)
    memory = workspace.memory_shift
    drift = workspace.drift_shift
    diagnostics = {
        **workspace.held_pass.diagnostics(workspace.problem.reward_scale),
        "effective_bandwidth": fitted.bandwidth,
        "estimates_by_head": by_head,
        "head_disagreement": max(by_head.values()) - min(by_head.values()),
        "doubly_robust_value": workspace.held_sums.value,
        "replica_standard_deviation": (
            fitted.summarise(fitted.values_of(fitted.head)).deviation
        ),
        "training_steps": fitted.record.steps,
        "memory_rows": memory and memory.rows,
        "memory_shift": memory and memory.value,
        "memory_p_value": memory and memory.p_value,
        "drift_shift": drift and drift.value,
        "drift_p_value": drift and drift.p_value,
    }
    return {name: plain(value) for name, value in diagnostics.items()}


def _doubts(
    workspace: Workspace, diagnostics: Diagnostics, interval: Interval
) -> Iterator[str]:
    """Yield warnings about the trained networks."""
    fitted = workspace.fitted
    scale = workspace.problem.reward_scale
    rms = diagnostics["residual_rms"]
    notable = max(0.5 * interval.width, thresholds.NOTABLE * scale)
    if diagnostics["head_disagreement"] > notable:
        heads = ", ".join(
            f"{name} {value:.4g}"
            for name, value in diagnostics["estimates_by_head"].items()
        )
        yield (
            f"The heads of the same networks disagree ({heads}); train longer or"
            " collect more data."
        )
    if not fitted.alive.all():
        yield f"{fitted.describe_diverged()}, and were left out; lower learning_rate."
    if rms is None:  # not finite
        rms = math.inf
    if rms > thresholds.LARGE_RESIDUAL * scale:
        yield (
            f"Bellman residuals (rms {rms:.3g}) are larger"
            f" than the logged returns themselves (rms {scale:.3g}): the values mean"
            " nothing; look at coverage first, since what the log does not show cannot"
            " be learnt, then at outliers, then lower learning_rate."
        )


KLOSS_FQE = Head(names.AVERAGED)
KLOSS = Head("kloss")
FQE = Head("fqe")
LSTD = Head("lstd")
MQL = ClosedForm("mql", minimax_q)
LSTDQ = ClosedForm("lstdq", lstdq)
