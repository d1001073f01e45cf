"""``koffline.bellman_test``: does Q solve the Bellman equation where the log has rows,
and where not?
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from koffline.config import make_bellman_settings
from koffline.data.sources import LogMapping, LogSource, open_transitions
from koffline.data.spaces import SpaceRequest
from koffline.errors import printable
from koffline.json_types import JsonObject
from koffline.ope.bellman_test.bandwidths import BandwidthDraws, draw_bandwidths
from koffline.ope.bellman_test.case import BellmanCase, make_case
from koffline.ope.bellman_test.forms import SignDraws, count_features, draw_signs
from koffline.ope.bellman_test.witness import Witness
from koffline.ope.cross_fit import CrossFitted, measure_freshness
from koffline.ope.log.facts import usual_gamma
from koffline.ope.results import Record
from koffline.ope.value_functions import (
    ValueFunction,
    ValueSource,
    as_value_function,
    log_to_test,
)
from koffline.policies.base import PolicySource
from koffline.policy_specs import as_policy

_SHOWN = {"level", "gamma", "draws", "seed"}


@dataclass(frozen=True, eq=False, repr=False)
class BellmanTest(Record):
    """Test of H0: E[residual | state, action] = 0, that is, Q = Q^π where the log has
    rows.

    ``statistic``: T = n·V̂ in squared units of the reward. ``p_value``: probability of
    so large a T under H0.
    ``power``: probability of a rejection if all values are off by ``alternative``, in
    units of the return;
    ``detectable``: the smallest such error found with 80 % power. ``n``: rows of
    positive weight; ``units``: rows whose random sign changes T. ``kernel_loss``: the
    U-statistic, unbiased for independent rows; may be negative. ``witness``: where
    residuals of one sign gather. ``held_out``: no row was trained on; None: unknown.
    ``features``: 0 for the exact kernel. ``rows``: residuals, values and weights by
    row. ``bandwidths``: where several are tested together, all of them; the p-value and
    the power are then those of the largest studentised statistic, ``statistic`` and
    ``kernel_loss`` still those of ``bandwidth``, and ``p_values`` those of each
    bandwidth alone, in the same order.
    """

    statistic: float
    p_value: float
    level: float
    power: float
    alternative: float
    detectable: float | None
    n: int
    units: int
    held_out: bool | None
    value_function: str
    policy: str
    gamma: float
    kernel_loss: float
    rms_residual: float
    mean_residual: float
    bandwidth: float
    features: int
    draws: int
    seed: int
    warnings: tuple[str, ...]
    witness: Witness = field(repr=False)
    bandwidths: tuple[float, ...] = ()
    p_values: tuple[float, ...] = ()

    @property
    def rows(self) -> BellmanCase:
        """Residuals, values and weights by row."""
        return self.witness.case

    @property
    def kernel_ratio(self) -> float:
        """The V-statistic divided by its expectation for the true Q: 1 is perfect.

        NaN without residuals.
        """
        of_noise = self.rows.own_products
        if of_noise > 0.0:
            return self.statistic * self.n / of_noise
        return math.nan

    @property
    def rejects(self) -> bool:
        """Whether the p-value is at most the level."""
        return self.p_value <= self.level

    @property
    def conclusion(self) -> str:
        """The result in one or two sentences."""
        numbers = f"p = {self.p_value:.3g}, level {self.level:g}"
        if self.bandwidths:
            numbers += f", {len(self.bandwidths)} bandwidths together"
        if self.rejects:
            return (
                f"rejected ({numbers}): {self.value_function} does not solve the"
                f" Bellman equation of {self.policy} where this log has rows"
            )
        smallest = "no error of this kind can be found"
        if self.detectable is not None:
            smallest = (
                "the smallest such error found with probability 0.8 is"
                f" {self.detectable:.3g}"
            )
        return (
            f"not rejected ({numbers}): that is no proof; an error of"
            f" {self.alternative:.3g} everywhere is found with probability"
            f" {self.power:.2f}, {smallest}, and nothing is said of states without rows"
        )

    def __str__(self) -> str:
        return "\n".join(
            [self.conclusion, *(f"warning: {sentence}" for sentence in self.warnings)]
        )

    def __repr__(self) -> str:
        answer = "not rejected"
        if self.rejects:
            answer = "rejected"
        return printable(
            f"BellmanTest({answer}, p = {self.p_value:.3g}, level {self.level:g};"
            f" {self.value_function} for {self.policy})"
        )

    def as_dict(self) -> JsonObject:
        """The record as plain JSON types, without arrays; numbers that are not finite
        become None.
        """
        return {
            **super().as_dict(),
            "rejects": self.rejects,
            "conclusion": self.conclusion,
        }


def bellman_test(  # noqa: PLR0913
    q: ValueSource,
    transitions: LogSource,
    policy: PolicySource,
    gamma: float | None = None,
    *,
    mapping: LogMapping = None,
    action_space: SpaceRequest | None = None,
    seed: int = 0,
    trained_on: LogSource | None = None,
    allow_training_rows: bool = False,
    **options: Any,
) -> BellmanTest:
    """Test H0: E[r + discount · E_{a'~π} Q(s', a') − Q(s, a) | s, a] = 0 with T = n·V̂,
    the kernel loss.

    q: anything `koffline.ope.value_functions.as_value_function` reads (a d3rlpy model
    or .d3 file, a function (observations, actions) -> (N,) …), or what
    `koffline.cross_fit` made of these rows; then every model is tested on the rows it
    has not seen, and T is the sum over models. transitions: the log that is tested;
    policy, gamma, mapping, action_space: as in `koffline.evaluate`. seed: of random
    signs, features and drawn actions. trained_on: a log of the rows q was fitted to, if
    q does not store them. A test on those rows says nothing and is refused unless
    ``allow_training_rows``. options: fields of `koffline.config.BellmanSettings`. Rows
    need not be independent: along trajectories, one-step residuals are martingale
    differences. ``power`` and ``detectable`` treat the alternative's effect on a
    residual as a function of (s, a); they are approximate where it depends on the
    transition, as with random termination.
    Raises KofflineError (DataError, PolicyError, ConfigError) in one line.
    (Feng et al. 2019, equ:vstat)
    """
    transitions = log_to_test(q, transitions, action_space, mapping)
    if trained_on is not None:
        trained_on = open_transitions(trained_on, action_space, mapping=mapping)
    settings = make_bellman_settings(
        gamma=usual_gamma(transitions, gamma), seed=seed, **options
    )
    space = transitions.action_space
    shape = transitions.observation_shape
    policy = as_policy(policy, space, shape, features=transitions.metadata.features)
    function: ValueFunction | CrossFitted
    held_out: bool | None = True
    warnings: list[str] = []
    if isinstance(q, CrossFitted):
        function = q
    else:
        function = as_value_function(q, space, shape)
        held_out, on_freshness = measure_freshness(
            function, transitions, trained_on, allow_training_rows
        )
        warnings += on_freshness
    if transitions.clusters is not None:
        warnings.append(
            "Rows of one cluster are taken as independent: the test rejects too often."
        )
    case = make_case(function, transitions, policy, settings)
    features = count_features(case)
    drawn = draw_signs(case, features, np.random.default_rng(seed + 1))
    statistic = drawn.statistic
    tested: SignDraws | BandwidthDraws = drawn
    p_value = drawn.p_value(statistic)
    bandwidths: tuple[float, ...] = ()
    p_values: tuple[float, ...] = ()
    if settings.bandwidths:
        tested = draw_bandwidths(case, settings.bandwidths, features, seed + 1)
        p_value = tested.p_value
        median = case.kernel.bandwidth / settings.bandwidth
        bandwidths = tuple(median * multiple for multiple in settings.bandwidths)
        p_values = tuple(
            of_bandwidth.p_value(of_bandwidth.statistic)
            for of_bandwidth in tested.of_bandwidths
        )
    scale = case.problem.reward_scale
    level = settings.level
    shift = settings.alternative * scale
    share = case.weights / case.weights.sum()
    power = 0.0
    detectable = None
    if not case.is_hopeless:
        power = tested.power(shift, level)
        detectable = tested.detectable_shift(shift, level)
    kernel_loss = 0.0
    if case.pairs > 0.0:
        kernel_loss = (statistic * case.n - case.own_products) / case.pairs
    return BellmanTest(
        **settings.model_dump(include=_SHOWN),
        statistic=statistic,
        p_value=p_value,
        power=power,
        alternative=shift,
        detectable=detectable,
        n=case.n,
        units=case.signs,
        held_out=held_out,
        value_function=function.name,
        policy=policy.name,
        kernel_loss=kernel_loss,
        rms_residual=float(np.sqrt(share @ case.residuals**2)),
        mean_residual=float(share @ case.residuals),
        bandwidth=case.kernel.bandwidth,
        features=features,
        warnings=(*function.notes, *warnings, *case.warnings),
        witness=Witness(case),
        bandwidths=bandwidths,
        p_values=p_values,
    )
