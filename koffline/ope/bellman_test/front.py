"""``koffline.bellman_test``: does Q solve the Bellman equation where the log has rows? Top to bottom."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

from koffline.data.transitions import Transitions
from koffline.errors import ConfigError
from koffline.kernels import FourierFeatures
from koffline.ope.bellman_test.case import BellmanCase, make_case
from koffline.ope.bellman_test.feature_form import FeatureForm
from koffline.ope.bellman_test.forms import GramForm, QuadraticForm, SumForm, gram_form
from koffline.ope.bellman_test.kernel_space import draw_features
from koffline.ope.bellman_test.laws import NullLaw, detectable_shift, make_law
from koffline.ope.bellman_test.result import BellmanTest, TestedRows
from koffline.ope.bellman_test.settings import (
    EXACT_ROWS,
    MOST_EXACT_ROWS,
    STEP,
    WILD,
    BellmanSettings,
    is_number,
    make_settings,
)
from koffline.ope.bellman_test.witness import Witness
from koffline.ope.cross_fit import CrossFitted, check_rows_are_fresh, read_value_function
from koffline.ope.provenance import Provenance, measure_overlap
from koffline.ope.value_functions import ACTION
from koffline.policy_specs import as_policy

_FEATURES = 1000


def bellman_test(
    q: Any,
    transitions: Transitions,
    policy: Any,
    gamma: float | None = None,
    *,
    seed: int = 0,
    trained_on: Transitions | Provenance | None = None,
    allow_training_rows: bool = False,
    settings: BellmanSettings | None = None,
    **options: Any,
) -> BellmanTest:
    """Test H0: E[r + discount · E_{a'~π} Q(s', a') − Q(s, a) | s, a] = 0 with T = n·V̂, the kernel loss.

    q: whatever `koffline.ope.value_sources.as_value_function` reads (a d3rlpy model or .d3 file, a function
    (observations, actions) -> (N,), one of observations alone for V(s) …), what
    `koffline.ope.cross_fit.cross_fit` made of these rows (every model is tested on its own rows, T is the sum
    over models), or values of the rows by one value function (``now``, ``later``, (N,) each).
    policy, gamma: as in `koffline.evaluate`.
    trained_on: the rows q was fitted to, where q does not know them; on those a test says nothing and is
    refused unless ``allow_training_rows``. options: fields of `BellmanSettings`, on top of ``settings``.
    Along trajectories one-step residuals are martingale differences, so rows need not be independent.
    ``power`` and ``detectable`` take what the alternative adds to a residual as given by (s, a); they are
    approximate where it depends on the transition, as with termination at random.
    Raises KofflineError (DataError, PolicyError, ConfigError) in one line.
    (Feng et al. 2019, equ:vstat)
    """
    started = time.perf_counter()
    _check_seed(seed)
    chosen = make_settings(settings, options)
    gamma = _checked_gamma(transitions, gamma)
    policy = as_policy(policy, transitions.action_space, transitions.observation_shape)
    function = _resolved(q, transitions)
    held_out, warnings = _freshness(function, transitions, trained_on, allow_training_rows)
    case = make_case(function, transitions, policy, gamma, chosen, seed)
    form, features = make_form(case)
    law = make_law(form, chosen, np.random.default_rng(seed + 1))
    return BellmanTest(
        **_of_law(case, form, law),
        **_of_rows(case, form),
        held_out=held_out,
        value_function=getattr(function, "name", "row values"),
        kind=getattr(function, "kind", ACTION),
        policy=policy.name,
        gamma=gamma,
        method=chosen.method,
        level=chosen.level,
        window=chosen.window,
        multipliers=STEP if chosen.window == 1 else chosen.multipliers,
        features=features,
        draws=chosen.draws,
        seed=seed,
        warnings=(*warnings, *case.warnings),
        witness=case.witness(),
        seconds=time.perf_counter() - started,
    )


def witness_function(
    q: Any,
    transitions: Transitions,
    policy: Any,
    gamma: float | None = None,
    *,
    seed: int = 0,
    settings: BellmanSettings | None = None,
    **options: Any,
) -> Witness:
    """The witness of the kernel loss alone, as `BellmanTest.witness`; training rows are not refused.

    (Feng et al. 2019, thm:rkhs)
    """
    _check_seed(seed)
    policy = as_policy(policy, transitions.action_space, transitions.observation_shape)
    gamma, chosen = _checked_gamma(transitions, gamma), make_settings(settings, options)
    return make_case(_resolved(q, transitions), transitions, policy, gamma, chosen, seed).witness()


def _of_law(case: BellmanCase, form: QuadraticForm, law: NullLaw) -> dict[str, Any]:
    """p-value and power; a constant error has the unit of the return, a function error counts itself."""
    given, scale = case.settings.alternative, case.problem.reward_scale
    shift = 1.0 if callable(given) else float(given) * scale
    hopeless = case.settings.method == WILD and case.smallest_p_value > case.settings.level
    named = "the error given as alternative" if callable(given) else f"an error of {shift:.3g} everywhere"
    return {
        "statistic": form.statistic,
        "p_value": law.p_value(form.statistic),
        "power": 0.0 if hopeless else law.power(shift),
        "alternative": shift,
        "alternative_name": named,
        "detectable": None if hopeless else detectable_shift(law, shift),
    }


def _of_rows(case: BellmanCase, form: QuadraticForm) -> dict[str, Any]:
    """Sizes and averages over rows."""
    weights, n, residuals = case.problem.row_weights, case.n, case.columns.residuals
    share = weights / weights.sum()
    diagonal = float(
        np.square(weights * case.window_residuals) @ case.space.kernel.diagonal(case.inputs).numpy()
    )
    return {
        "n": n,
        "units": case.units,
        "kernel_loss": (form.statistic * n - diagonal) / case.pairs if case.pairs > 0.0 else 0.0,
        "rms_residual": float(np.sqrt(share @ residuals**2)),
        "mean_residual": float(share @ residuals),
        "return_scale": case.problem.reward_scale,
        "bandwidth": case.space.bandwidth,
        "rows": TestedRows(residuals, case.window_residuals, case.columns.values, weights),
    }


def make_form(case: BellmanCase) -> tuple[QuadraticForm, int]:
    """The exact form for few rows, features for many; and how many features, 0 for the exact one."""
    count, rows = case.settings.features, len(case.transitions)
    if count is None:
        count = 0 if rows <= EXACT_ROWS else _FEATURES
    if count == 0 and rows > MOST_EXACT_ROWS:
        raise ConfigError(
            f"features=0 asks for the Gram matrix of {rows} rows, more than {MOST_EXACT_ROWS}; leave "
            "features out or give some thousand"
        )
    features = None
    if count:
        features = draw_features(case.space.kernel, case.inputs.shape[1], count, case.seed)
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
    few = 0 < len(used) <= min(2 * features.frequencies.shape[1], EXACT_ROWS)
    return form.condensed() if few else form


def _resolved(q: Any, transitions: Transitions) -> Any:
    """A `ValueFunction`, or values of the rows left as they are."""
    if hasattr(q, "now") and hasattr(q, "later"):
        return q
    return read_value_function(q, transitions.action_space, transitions.observation_shape)


def _freshness(
    function: Any, transitions: Transitions, trained_on: Transitions | Provenance | None, allow: bool
) -> tuple[bool | None, tuple[str, ...]]:
    """Whether the rows are known to be held out, and warnings; ConfigError on training rows."""
    if not hasattr(function, "notes"):  # values of rows
        unseen = getattr(function, "unseen", None)
        return None if unseen is None else bool(unseen == 1.0), ()
    warnings = (*function.notes, *check_rows_are_fresh(function, transitions, trained_on, allow))
    if isinstance(function, CrossFitted):
        return True, warnings
    known = trained_on if trained_on is not None else function.trained_on
    if known is None:
        return None, warnings
    overlap = measure_overlap(Provenance.of(known) if isinstance(known, Transitions) else known, transitions)
    return None if overlap.tells_nothing else not overlap.is_certain, warnings


def _checked_gamma(transitions: Transitions, gamma: float | None) -> float:
    """The discount given, or the log's hint. Raises ConfigError."""
    found = transitions.metadata.gamma if gamma is None else gamma
    if found is None:
        raise ConfigError("gamma is missing; give the discount factor, as in gamma=0.99")
    if not (is_number(found) and 0.0 < found < 1.0):
        raise ConfigError(f"gamma is {found!r}; give a discount factor between 0 and 1")
    return float(found)


def _check_seed(seed: Any) -> None:
    """ConfigError unless a whole number of at least 0."""
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or seed < 0:
        raise ConfigError(f"seed is {seed!r}; give a whole number of at least 0")
