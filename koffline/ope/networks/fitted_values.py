"""Estimates by the trained networks of one evaluation: J of the policy, of the behavior
policy, the uplift.

The behavior policy's value is the mean return of complete episodes. After a cut, LSTD
in the last layers with the log's next rows estimates the rest of the return. Both
values use the same features and resampled episodes, so their common sampling error
cancels in the difference.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from scipy import special
from torch import Tensor

from koffline.config import EvaluationSettings
from koffline.data.transitions import Transitions
from koffline.errors import KofflineError
from koffline.fitting import FitRecord
from koffline.kernels import FourierFeatures
from koffline.ope.log.problem import EvaluationProblem, Measures
from koffline.ope.log.working_log import S
from koffline.ope.names import AVERAGED, BOOTSTRAP, FITTED, default_head
from koffline.ope.networks.last_layer import (
    dual_of,
    last_layer,
    mean_values,
    minimise_kernel_loss,
)
from koffline.ope.networks.resampling import Resampling
from koffline.ope.networks.systems import (
    LinearSystems,
    critic_moments,
    groups_of,
    logged_of_part,
    systems_of_part,
)
from koffline.ope.results import Interval, Uplift
from koffline.ope.value_functions import ValueFunction, counted_rows
from koffline.replicas import StackedMLP

Summarise = Callable[[EvaluationProblem], S]  # summary of a part of a log
Fold = Callable[[Summarise[Any]], Any]  # sum of a summary over all parts of a log
_ASSUMPTIONS = (
    "How much the value varies when {units} are redrawn and networks retrained"
    " (standard deviation, Student's t). It shows no error from what the log lacks or"
    " the network cannot express."
)


@dataclass(frozen=True)
class ReplicaMean:
    """Summary of J over replicas with finite J: ``full`` trained on the whole log,
    ``resampled`` others.

    ``value``: the mean over all replicas, with the log's own start states.
    ``deviation``: standard deviation over the resampled replicas, each with start
    states weighted as in its sample.
    """

    value: float
    deviation: float
    full: int
    resampled: int


@dataclass(frozen=True, eq=False)
class FittedValues:
    """Stacked networks by head: ``kloss``, ``fqe`` and their mean; all, and ``lstd``,
    share hidden layers.

    ``problem``: the rows that networks were trained on. ``fold`` sums over the whole
    log, whose effective number of units is ``units``. ``systems``: such sums.
    ``cuts_by_step``: as by `cut_shares`; None: no cuts.
    """

    problem: EvaluationProblem
    resampling: Resampling
    settings: EvaluationSettings
    heads: dict[str, StackedMLP]
    systems: LinearSystems
    cuts_by_step: np.ndarray | None
    bandwidth: float
    instruments: FourierFeatures
    record: FitRecord
    fold: Fold
    units: float

    @property
    def head(self) -> str:
        """The requested estimator if it is a head, else the default one."""
        estimator = self.settings.estimator
        if estimator in FITTED:
            return estimator
        return default_head(self.settings.steps)

    @cached_property
    def temporal(self) -> Float[Tensor, "replica parameter column"]:
        """φᵀW [Z r] over the whole log; computed only for LSTD, since it has p² numbers
        for p parameters.
        """
        if self.systems.temporal is not None:
            return self.systems.temporal
        return self._systems_without_cuts(None, self.resampling).system

    @cached_property
    def critic_moments(self) -> Float[Tensor, "critic critic"]:
        """Σ w ψψᵀ over the whole log."""
        if self.systems.critic_moments is not None:
            return self.systems.critic_moments
        moments: Tensor = self.fold(partial(critic_moments, self.instruments))
        return moments

    def _systems_without_cuts(
        self, critics: FourierFeatures | None, resampling: Resampling
    ) -> LinearSystems:
        """`systems_of_part` summed over the whole log, without what concerns cuts.

        critics: None for the features themselves.
        """
        of_part = partial(
            systems_of_part,
            self.record.network,
            critics,
            resampling,
            self.settings.gamma,
            None,
        )
        systems: LinearSystems = self.fold(of_part)
        return systems

    def network_of(self, head: str) -> StackedMLP:
        """The networks with the last layer of a head."""
        if head == "lstd":
            return self._lstd
        return self.heads[head]

    @cached_property
    def _lstd(self) -> StackedMLP:
        return minimise_kernel_loss(
            self.record.network, self.temporal, self.settings.ridge
        )

    @property
    def start_features(self) -> Float[Tensor, "replica 2 parameter"]:
        """Mean φ of start states as each replica's sample weighs them, and as the log
        does.
        """
        return self.systems.starts.means[:, :, 0]

    @cached_property
    def behavior(self) -> Float[np.ndarray, "replica 2"] | None:
        """J of the behavior policy, with the same episode weights; None if start states
        were given.

        Logged returns plus values after cuts. NaN if no row has a next one.
        """
        returns = self.systems.returns
        if returns is None:
            return None
        if self.cuts_by_step is not None:
            groups = groups_of(self.record.network)
            after_cuts = [
                self._after_cuts(group, self.cuts_by_step) for group in groups
            ]
            returns = returns + torch.cat(after_cuts)
        values = returns / self.systems.starts.weights[..., 0]
        return np.asarray(values.numpy() * self.problem.reward_scale)

    def _after_cuts(
        self, group: slice, cuts_by_step: np.ndarray
    ) -> Float[Tensor, "replica 2"]:
        """Values after cuts by a group of replicas."""
        replicas = range(self.record.network.replicas)[group]
        network = self.record.network.select(replicas)
        logged = self.systems.logged
        if logged is None:
            resampling = self.resampling.select(replicas)
            gamma = self.settings.gamma
            logged = self.fold(
                partial(logged_of_part, network, resampling, gamma, cuts_by_step)
            )
        theta = last_layer(
            minimise_kernel_loss(network, logged.system, self.settings.ridge)
        )
        return (logged.cuts @ theta.unsqueeze(-1)).squeeze(-1).cpu()

    @property
    def alive(self) -> np.ndarray:
        """Mask (R,) of replicas that did not diverge and have a finite J."""
        trained = np.array([step is None for step in self.record.diverged_at])
        return trained & np.isfinite(self.values_of(self.head)).all(axis=1)

    @cached_property
    def duals(self) -> Float[Tensor, "replica instrument"]:
        """Coefficients α of weights ω = ψᵀα for which the kernel loss's value is Σ w ω
        r / Σ w.

        α = Σ w · B (BᵀB + ridge · P)⁻¹ c with B = ψᵀWZ and c the mean features of start
        states. ω estimates the ratio of the policy's discounted visits to the log's
        rows. (Uehara, Huang & Jiang 2020)
        """
        matrix = self.systems.system[..., :-1]
        starts = self.start_features[:, 1]
        outputs = self.record.network.sizes[-1]
        dual = dual_of(matrix, starts.to(matrix), self.settings.ridge, outputs)
        return dual * self.systems.weight[:, None]

    @cached_property
    def feature_reach(self) -> float:
        """How far the choice of a network's features moves a value from all rows, at
        the settings' level.

        Student t over the networks, each with the last layer of the least kernel loss
        on the whole log.
        """
        system = self.systems.of_every_row
        if system is None:
            every_row = Resampling(self.resampling.seed, len(self.resampling.roles), ())
            system = self._systems_without_cuts(self.instruments, every_row).system
        solved = minimise_kernel_loss(self.record.network, system, self.settings.ridge)
        values = mean_values(
            self.start_features[:, 1], last_layer(solved), self.problem.reward_scale
        )[self.alive]
        count = len(values)
        quantile = float(special.stdtrit(count - 1, 0.5 + self.settings.level / 2.0))
        return quantile * float(values.std(ddof=1)) * math.sqrt(1.0 + 1.0 / count)

    def values_of(self, head: str) -> Float[np.ndarray, "replica 2"]:
        """J of a head per replica, start states weighted as in its sample and as in the
        log; else NaN.
        """
        theta = last_layer(self.network_of(head))
        return mean_values(self.start_features, theta, self.problem.reward_scale)

    @property
    def half_width(self) -> float:
        """Half the width of the interval by the kernel-loss values of the networks."""
        return self.interval(self.values_of("kloss")).width / 2.0

    def summarise(self, values: Float[np.ndarray, "replica 2"]) -> ReplicaMean:
        """Summarise J over replicas. Raises KofflineError if too few are finite."""
        full = self.resampling.full
        kept = self.alive & np.isfinite(values).all(axis=1)
        if not kept[:full].any() or np.count_nonzero(kept[full:]) < 2:
            raise KofflineError(
                f"{np.count_nonzero(~kept)} of {len(kept)} networks diverged or give no"
                " number; lower learning_rate or look for outliers (koffline data"
                " validate)"
            )
        resampled = values[full:, 0][kept[full:]]
        return ReplicaMean(
            value=float(values[kept, 1].mean()),
            deviation=float(resampled.std(ddof=1)),
            full=int(kept[:full].sum()),
            resampled=len(resampled),
        )

    def interval(
        self,
        values: Float[np.ndarray, "replica 2"],
        level: float | None = None,
        units: float | None = None,
    ) -> Interval:
        """Student-t interval around J with the spread of the resampled replicas.

        Resampling U units shows (U − 1)/U of the variance of a mean, with at most U − 1
        degrees of freedom. The interval is as wide as one around the mean of the full
        replicas alone. level, units: replace those of the settings and the log.
        """
        mean = self.summarise(values)
        level = level or self.settings.level
        units = max(2.0, units or self.units)
        freedom = min(mean.resampled, units) - 1
        quantile = float(special.stdtrit(freedom, 0.5 + level / 2.0))
        widening = math.sqrt((1.0 + 1.0 / mean.full) * units / (units - 1.0))
        half_width = quantile * mean.deviation * widening
        return Interval(
            low=mean.value - half_width,
            high=mean.value + half_width,
            level=level,
            kind=BOOTSTRAP,
            assumptions=_ASSUMPTIONS.format(units=self.problem.kind),
        )

    def estimate_by_head(self, *further: str) -> dict[str, float]:
        """Mean of J over replicas that did not diverge, by head (the stacked ones and
        ``further``, but not their mean), where it is finite.
        """
        means = {}
        for head in dict.fromkeys((*self.heads, *further)):
            if head == AVERAGED:
                continue
            mean = float(self.values_of(head)[self.alive, 1].mean())
            if np.isfinite(mean):
                means[head] = mean
        return means

    def describe_diverged(self) -> str:
        """Text on how many networks diverged, and from which step on."""
        steps = [step for step in self.record.diverged_at if step is not None]
        since = f", the first at step {min(steps)}" if steps else ""
        return (
            f"{np.count_nonzero(~self.alive)} of {len(self.alive)} networks"
            f" diverged{since}"
        )

    def value_function(self, transitions: Transitions) -> ValueFunction:
        """Mean network of the chosen head, fitted to ``transitions``.

        KofflineError if all diverged.
        """
        if not self.alive.any():
            raise KofflineError(f"{self.describe_diverged()}; lower learning_rate")
        network = self.network_of(self.head).select(np.flatnonzero(self.alive).tolist())
        return ValueFunction(
            name=self.head,
            function=partial(_mean_values, network, Measures(**self.problem.measures)),
            action_space=transitions.action_space,
            observation_shape=transitions.observation_shape,
            trained_on=counted_rows(transitions),
        )


@torch.no_grad()
def _mean_values(
    network: StackedMLP,
    problem: Measures,
    observations: np.ndarray,
    actions: np.ndarray,
) -> np.ndarray:
    """Mean of Q(s, a) (M,) over networks, clipped to possible returns, in units of the
    return.
    """
    inputs = torch.as_tensor(problem.standardise(observations, actions)).to(
        network.flat
    )
    outputs = network.forward(inputs).mean(dim=0).cpu().double().numpy()  # (M, n)
    if problem.n_actions is None:
        taken = np.zeros(len(outputs), dtype=np.int64)
    else:
        taken = np.asarray(actions)
    values = np.take_along_axis(outputs, taken[:, None], axis=1)[:, 0]
    return np.clip(values, *problem.value_bounds) * problem.reward_scale


def uplift_of(fitted: FittedValues, values: np.ndarray) -> Uplift | None:
    """Uplift of the policy over the behavior policy, from J (R, 2) of every network;
    None if unknown.
    """
    behavior = fitted.behavior
    if behavior is None or not np.isfinite(behavior[fitted.alive]).all():
        return None
    gains = values - behavior
    return Uplift(
        value=fitted.summarise(gains).value,
        interval=fitted.interval(gains),
        behavior_value=fitted.summarise(behavior).value,
        behavior_interval=fitted.interval(behavior),
    )
