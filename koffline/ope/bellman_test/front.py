"""``koffline.bellman_test``: does Q solve the Bellman equation where the log has rows? Top to bottom."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from koffline.data.transitions import Transitions
from koffline.errors import ConfigError
from koffline.kernels import FourierFeatures, StationaryKernel, random_fourier_features
from koffline.ope.bellman_test.case import BellmanCase, make_case
from koffline.ope.bellman_test.forms import FeatureForm, GramForm, QuadraticForm, SumForm, gram_form
from koffline.ope.bellman_test.laws import detectable_shift, make_law
from koffline.ope.bellman_test.settings import STEP, BellmanSettings, make_settings
from koffline.ope.bellman_test.witness import Witness
from koffline.ope.cross_fit import CrossFitted, read_value_function
from koffline.ope.estimate import plain
from koffline.ope.provenance import Provenance, measure_freshness
from koffline.ope.value_functions import ACTION
from koffline.policies import Policy
from koffline.policy_specs import as_policy

_FEATURES = 1000
_EXACT_ROWS = 3000  # the Gram matrix of as many rows takes 72 MB and a second
_MOST_EXACT_ROWS = 20_000


@dataclass(frozen=True, eq=False)
class BellmanTest:
    """Test of H0: E[residual | state, action] = 0, that is of Q = Q^π where the log has rows.

    ``statistic`` is T = n·V̂ in squared units of the reward, ``p_value`` how often T is as large under H0.
    ``power`` is the chance of a rejection if values were off by ``alternative`` (everywhere, in units of the
    return; or once the function given); ``detectable`` the smallest such error found with 80 % power. ``n``
    rows count, ``units`` got a random sign of their own. ``kernel_loss`` is the U-statistic: free of bias for
    independent rows, may be negative. ``held_out``: no row was trained on; None: unknown. ``features``: 0 for
    the exact kernel. ``seconds``: wall clock. ``rows``: residuals, values and weights row by row.
    """

    statistic: float
    p_value: float
    method: str
    level: float
    power: float
    alternative: float
    alternative_name: str
    detectable: float | None
    n: int
    units: int
    held_out: bool | None
    value_function: str
    kind: str
    policy: str
    gamma: float
    window: int
    multipliers: str
    kernel_loss: float
    rms_residual: float
    mean_residual: float
    return_scale: float
    bandwidth: float | None
    features: int
    draws: int
    seed: int
    seconds: float
    warnings: tuple[str, ...]
    witness: Witness = field(repr=False)

    @property
    def rows(self) -> BellmanCase:
        """What was tested, row by row."""
        return self.witness.case

    @property
    def kernel_ratio(self) -> float:
        """The V-statistic over what noise alone leaves: 1 is perfect. NaN where all residuals are zero."""
        own = self.rows.own_products
        return self.statistic * self.n / own if own > 0.0 else math.nan

    @property
    def rejects(self) -> bool:
        """p ≤ level."""
        return self.p_value <= self.level

    @property
    def conclusion(self) -> str:
        """One or two sentences for a person."""
        numbers = f"p = {self.p_value:.3g}, level {self.level:g}"
        if self.rejects:
            return (
                f"rejected ({numbers}): {self.value_function} does not solve the Bellman equation of "
                f"{self.policy} where this log has rows"
            )
        smallest = (
            "no error of this kind can be found"
            if self.detectable is None
            else f"the smallest such error found with probability 0.8 is {self.detectable:.3g}"
        )
        return (
            f"not rejected ({numbers}): that is no proof; {self.alternative_name} would be found with "
            f"probability {self.power:.2f}, {smallest}, and nothing is said of states without rows"
        )

    def __str__(self) -> str:
        return "\n".join([self.conclusion, *(f"warning: {sentence}" for sentence in self.warnings)])

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types, without arrays; numbers that are not finite become None."""
        found = {name: plain(value) for name, value in vars(self).items() if name != "witness"}
        return {**found, "rejects": self.rejects, "conclusion": self.conclusion}


def bellman_test(
    q: Any,
    transitions: Transitions,
    policy: Any,
    gamma: float | None = None,
    *,
    seed: int = 0,
    trained_on: Transitions | Provenance | None = None,
    allow_training_rows: bool = False,
    **options: Any,
) -> BellmanTest:
    """Test H0: E[r + discount · E_{a'~π} Q(s', a') − Q(s, a) | s, a] = 0 with T = n·V̂, the kernel loss.

    q: whatever `koffline.ope.value_sources.as_value_function` reads (a d3rlpy model or .d3 file, a function
    (observations, actions) -> (N,), one of observations alone for V(s) …), what
    `koffline.ope.cross_fit.cross_fit` made of these rows (every model is tested on its own rows, T is the sum
    over models), or values of the rows by one value function (``now``, ``later``, (N,) each).
    policy, gamma: as in `koffline.evaluate`.
    trained_on: the rows q was fitted to, where q does not know them; on those a test says nothing and is
    refused unless ``allow_training_rows``. options: fields of
    `koffline.ope.bellman_test.settings.BellmanSettings`.
    Along trajectories one-step residuals are martingale differences, so rows need not be independent.
    ``power`` and ``detectable`` take what the alternative adds to a residual as given by (s, a); they are
    approximate where it depends on the transition, as with termination at random.
    Raises KofflineError (DataError, PolicyError, ConfigError) in one line.
    (Feng et al. 2019, equ:vstat)
    """
    started = time.perf_counter()
    function, policy, settings = _read(q, transitions, policy, gamma, seed, options)
    held_out, warnings = _freshness(function, transitions, trained_on, allow_training_rows)
    case = make_case(function, transitions, policy, settings)
    form, features = make_form(case)
    law = make_law(form, settings, np.random.default_rng(seed + 1))
    given, weights, statistic = settings.alternative, case.weights, form.statistic
    shift = 1.0 if callable(given) else float(given) * case.reward_scale
    named = "the error given as alternative" if callable(given) else f"an error of {shift:.3g} everywhere"
    share = weights / weights.sum()
    return BellmanTest(
        statistic=statistic,
        p_value=law.p_value(statistic),
        method=settings.method,
        level=settings.level,
        power=0.0 if case.is_hopeless else law.power(shift),
        alternative=shift,
        alternative_name=named,
        detectable=None if case.is_hopeless else detectable_shift(law, shift),
        n=case.n,
        units=case.signs,
        held_out=held_out,
        value_function=getattr(function, "name", "row values"),
        kind=getattr(function, "kind", ACTION),
        policy=policy.name,
        gamma=settings.gamma,
        window=settings.window,
        multipliers=STEP if settings.signs_per_step else settings.multipliers,
        kernel_loss=(statistic * case.n - case.own_products) / case.pairs if case.pairs > 0.0 else 0.0,
        rms_residual=float(np.sqrt(share @ case.residuals**2)),
        mean_residual=float(share @ case.residuals),
        return_scale=case.reward_scale,
        bandwidth=case.space.bandwidth,
        features=features,
        draws=settings.draws,
        seed=settings.seed,
        seconds=time.perf_counter() - started,
        warnings=(*warnings, *case.warnings),
        witness=Witness(case),
    )


def witness_function(
    q: Any,
    transitions: Transitions,
    policy: Any,
    gamma: float | None = None,
    *,
    seed: int = 0,
    **options: Any,
) -> Witness:
    """The witness of the kernel loss alone, as `BellmanTest.witness`; training rows are not refused.

    (Feng et al. 2019, thm:rkhs)
    """
    function, policy, settings = _read(q, transitions, policy, gamma, seed, options)
    return Witness(make_case(function, transitions, policy, settings))


def _read(
    q: Any, transitions: Transitions, policy: Any, gamma: float | None, seed: int, options: dict[str, Any]
) -> tuple[Any, Policy, BellmanSettings]:
    """A `ValueFunction`, a `CrossFitted` or values of the rows as they are; the policy; the settings."""
    gamma = transitions.metadata.gamma if gamma is None else gamma
    settings = make_settings(gamma=gamma, seed=seed, **options)
    space, shape = transitions.action_space, transitions.observation_shape
    policy = as_policy(policy, space, shape)
    return (q if hasattr(q, "now") else read_value_function(q, space, shape)), policy, settings


def make_form(case: BellmanCase) -> tuple[QuadraticForm, int]:
    """The exact form for few rows, features for many; and how many features, 0 for the exact one."""
    count, rows, kernel = case.settings.features, len(case.transitions), case.space.kernel
    if count is None:
        count = 0 if rows <= _EXACT_ROWS else _FEATURES
    if count == 0 and rows > _MOST_EXACT_ROWS:
        raise ConfigError(
            f"features=0 asks for the Gram matrix of {rows} rows, more than {_MOST_EXACT_ROWS}; leave "
            "features out or give some thousand"
        )
    features = None
    if count:
        if not isinstance(kernel, StationaryKernel):
            raise ConfigError(
                f"{kernel} has no random Fourier features; give features=0 (exact) or a stationary kernel"
            )
        generator = torch.Generator().manual_seed(case.settings.seed)
        features = random_fourier_features(kernel, case.inputs.shape[1], count, generator)
    parts = tuple(_form_of_rows(case, rows, features) for rows in case.folds)
    return (parts[0] if len(parts) == 1 else SumForm(parts)), count


def _form_of_rows(
    case: BellmanCase, rows: np.ndarray, features: FourierFeatures | None
) -> GramForm | FeatureForm:
    """The form of the rows of one value function; whatever shares a random sign shares a value function."""
    inputs = case.inputs[torch.as_tensor(rows)]
    scores, shift_scores = case.scores[:, rows], case.shift_scores[:, rows]
    used = np.flatnonzero(np.diff(scores.indptr) + np.diff(shift_scores.indptr))
    scores, shift_scores = scores[used], shift_scores[used]
    if features is None:
        return gram_form(scores, shift_scores, inputs, case.space.kernel, case.n)
    form = FeatureForm(scores, shift_scores, inputs, features, case.n)
    few = 0 < len(used) <= min(2 * features.frequencies.shape[1], _EXACT_ROWS)
    return form.condensed() if few else form


def _freshness(
    function: Any, transitions: Transitions, trained_on: Transitions | Provenance | None, allow: bool
) -> tuple[bool | None, tuple[str, ...]]:
    """Whether the rows are known to be held out, and warnings; ConfigError on training rows."""
    if hasattr(function, "now"):
        unseen = getattr(function, "unseen", None)
        return None if unseen is None else bool(unseen == 1.0), ()
    if isinstance(function, CrossFitted):
        return True, function.notes
    held_out, warnings = measure_freshness(function, transitions, trained_on, allow)
    return held_out, (*function.notes, *warnings)
