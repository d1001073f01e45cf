"""Run an estimator by name, with its own interval or one of the requested kind.

A closed form determines the last layer θ by critics: minimise ‖v − Bθ‖² + λ‖θ‖², where
B is the mean of critics · Zᵀ and v that of critics · r. Its value cᵀθ, with c the mean
features of start states, is linear in the rewards: the mean of ω r with ω = criticsᵀ B
(BᵀB + λ)⁻¹ c. The same ω minimises ‖Bᵀα − c‖² + λ‖α‖² over ω = criticsᵀα: these are the
marginalised importance weights that balance Z against c. So one fit is both a value
function (minimax Q-learning) and a density ratio d^π/μ (minimax weight learning). Each
form is solved for every network, on its own units: one network's spread over rows does
not show what its features cannot express.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from koffline.config import EvaluationSettings
from koffline.errors import ConfigError, DataError, KofflineError, PolicyError
from koffline.ope import names
from koffline.ope.importance import estimate_one
from koffline.ope.importance.ratios import ESTIMATED
from koffline.ope.intervals import make_interval
from koffline.ope.intervals.base import IntervalResult
from koffline.ope.log.limits import NOTABLE, contradiction
from koffline.ope.networks.fitted_values import FittedValues, uplift_of
from koffline.ope.networks.last_layer import least_squares, mean_values
from koffline.ope.networks.out_of_bag import drl
from koffline.ope.networks.systems import critic_moments
from koffline.ope.results import BoundRow, Interval, PointEstimate, plain
from koffline.ope.workspace import Workspace

# effective numbers of episodes
_FEWEST_WEIGHTED = 2.0
_ENOUGH_WEIGHTED = 30.0
_CRITIC_RIDGE = 0.1  # of DualDICE
_REACH = (
    "Widened for the features, which are one network's: those of others move the value"
    " by {:.3g}."
)
# bound of the residuals in rms returns; those of a zero value function are below one
_LARGE_RESIDUAL = 3.0


def choose_estimator(workspace: Workspace) -> str:
    """Estimator of the settings; ``auto``: ``dr`` for one-step logs with known
    probabilities, else a head.

    In such logs ``dr`` is unbiased whatever the networks; it needs an effective sample
    size of at least 30.
    """
    settings = workspace.settings
    facts = workspace.facts
    log = workspace.transitions
    if settings.estimator != names.AUTO:
        return settings.estimator
    one_step = (
        log.has_episodes and facts.longest == 1 and facts.terminated == facts.rows
    )
    known = (
        log.behavior_log_probabilities is not None and settings.behavior != ESTIMATED
    )
    if one_step and known and settings.interval == names.DEFAULT:
        with contextlib.suppress(DataError, PolicyError):
            # has the weights of dr but needs no network
            found = estimate_by_importance(workspace, "wis")
            if (found.effective_sample_size or 0.0) >= _ENOUGH_WEIGHTED:
                return "dr"
    return names.default_head(settings.steps)


def estimate_by_importance(workspace: Workspace, name: str) -> PointEstimate:
    """Estimate over episodes; doubly robust estimators use out-of-bag values of
    kernel-loss networks.

    Raises DataError and PolicyError if the estimator does not apply.
    """
    if workspace.initial_observations is not None:
        raise DataError(
            f"{name} is of logged episodes, and other start states were given; leave"
            " them out"
        )
    settings = workspace.settings
    if settings.interval in names.EPISODE_KINDS:
        kind = settings.interval
    else:
        kind = names.EPISODES_T
    if name in names.WITH_MODEL:
        model = workspace.row_values_of_episodes
    else:
        model = None
    more: dict[str, Any] = {
        "reward_range": settings.reward_bounds,
        "seed": settings.seed,
    }
    return estimate_one(name, workspace.episodes, model, settings.level, kind, **more)


def estimate_by_networks(workspace: Workspace, name: str) -> PointEstimate:
    """Estimate by a head or a closed form: the mean over networks, with the spread of
    the resampled ones.
    """
    fitted = workspace.fitted
    if name in names.FITTED:
        values = fitted.values_of(name)
    else:
        values = closed_form(name, fitted)
    found = fitted.summarise(values)
    interval = fitted.interval(values)
    diagnostics = dict[str, Any]()
    warnings = tuple[str, ...]()
    if name in names.FITTED:
        diagnostics = _diagnostics_of_networks(workspace, name)
        warnings = tuple(_doubts(workspace, diagnostics, interval))
    elif name == "mwl":  # weights of rows are those of mql
        diagnostics = workspace.row_sums.diagnostics()
        warnings = workspace.row_sums.warnings()
    return PointEstimate(
        name=name,
        value=found.value,
        standard_error=found.deviation,
        interval=interval,
        uplift=uplift_of(fitted, values),
        effective_sample_size=diagnostics.get("effective_units"),
        warnings=warnings,
        diagnostics=diagnostics,
    )


def _diagnostics_of_networks(workspace: Workspace, head: str) -> dict[str, Any]:
    """Diagnostics of the trained networks as plain numbers."""
    fitted = workspace.fitted
    heads = workspace.fitted.estimate_by_head(*{head}.intersection(names.FITTED))
    shifts = {"memory": workspace.memory_shift, "drift": workspace.drift_shift}
    diagnostics = {
        **workspace.held_pass.diagnostics(workspace.problem.reward_scale),
        "effective_bandwidth": fitted.bandwidth,
        "estimates_by_head": heads,
        "head_disagreement": max(heads.values()) - min(heads.values()),
        "replica_standard_deviation": (
            fitted.summarise(fitted.values_of(fitted.head)).deviation
        ),
        "training_steps": fitted.record.steps,
        "memory_rows": shifts["memory"] and shifts["memory"].rows,
    }
    for name, shift in shifts.items():
        diagnostics |= {
            f"{name}_shift": shift and shift.value,
            f"{name}_p_value": shift and shift.p_value,
        }
    return {name: plain(value) for name, value in diagnostics.items()}


def _doubts(
    workspace: Workspace, diagnostics: dict[str, Any], interval: Interval
) -> Iterator[str]:
    """Yield warnings about the trained networks."""
    fitted = workspace.fitted
    scale = workspace.problem.reward_scale
    rms = diagnostics["residual_rms"]
    if diagnostics["head_disagreement"] > max(0.5 * interval.width, NOTABLE * scale):
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
    if rms is None or rms > _LARGE_RESIDUAL * scale:
        yield (
            f"Bellman residuals (rms {math.inf if rms is None else rms:.3g}) are larger"
            f" than the logged returns themselves (rms {scale:.3g}): the values mean"
            " nothing; look at coverage first, since what the log does not show cannot"
            " be learnt, then at outliers, then lower learning_rate."
        )


@torch.no_grad()
def closed_form(name: str, fitted: FittedValues) -> Float[np.ndarray, "replica 2"]:
    """J of a closed form by name in the features of each network, on its own rows;
    units of the return.

    Column 0 weighs start states as the replica's sample does, column 1 as the log does.
    ``mql``: minimax Q-learning with critics in an RKHS, i.e. the kernel loss minimised
    over Q = φᵀθ with a ridge toward zero (Feng et al. 2019, equ:vstat). ``lstdq``
    (cor:same_as_td): the critics are the features themselves.
    ``mwl``: the mean of ω r, with ω in the RKHS that balances Z against c; the dual of
    ``mql``, with the networks' own ridge (Uehara, Huang & Jiang 2020, Minimax Weight
    and Q-Function Learning). ``dualdice``: ω = ζ in min_ν max_ζ E ζ(x)(ν(x) − discount
    ν(x')) − ζ(x)²/2 − E ν(x0), both with a ridge. The inner maximum regresses ν(x) −
    discount ν(x') on x, then squares it (Nachum et al. 2019). This equals ``mql`` in
    units in which the critics' second moment is the identity.
    """
    starts = fitted.start_features
    outputs = fitted.record.network.sizes[-1]
    if name == "lstdq":
        system = fitted.temporal
    else:
        system = fitted.systems.system
    # found by measurement
    rows = float(fitted.systems.weight[0])
    power = 2.0 if name == "lstdq" else 1.5
    if name == "mwl":
        ridge = fitted.settings.ridge
    else:
        ridge = min(max(rows**-power, 1e-10), 0.1)
    if name == "dualdice":
        system = _whitened(fitted, system)
    theta = least_squares(system[..., :-1], system[..., -1], ridge, outputs)
    return mean_values(starts, theta, fitted.problem.reward_scale)


def _whitened(fitted: FittedValues, system: Tensor) -> Tensor:
    """The system after a change of units that makes the ridged second moment of its
    critics the identity.
    """
    second = fitted.fold(partial(critic_moments, fitted.instruments)).to(system)
    ridged = second + _CRITIC_RIDGE * second.diagonal().mean() * torch.eye(
        len(second)
    ).to(second)
    root, failed = torch.linalg.cholesky_ex(ridged)
    if bool(failed):
        raise DataError(
            "DualDICE's critics cannot be told apart on these rows; give more of like"
            " weight"
        )
    return torch.linalg.solve_triangular(root, system, upper=False)


def run_estimator(workspace: Workspace, name: str) -> PointEstimate:
    """Run an estimator with the requested interval, if the log allows one.

    Raises KofflineError if the estimator does not apply.
    """
    if name in names.OVER_EPISODES:
        found = estimate_by_importance(workspace, name)
    elif name == "drl":
        least = workspace.fitted.half_width
        kind = workspace.problem.kind
        found = drl(workspace.row_sums, least, workspace.settings.level, kind)
    else:
        found = estimate_by_networks(workspace, name)
    found = _with_interval(workspace, found)
    if name in names.OVER_EPISODES:
        limits = workspace.limits.of_logged_returns()
    else:
        limits = workspace.limits
    # drops intervals that the log does not support
    return limits.settle(found, _reasons(workspace, found))


def _reasons(workspace: Workspace, found: PointEstimate) -> list[str] | None:
    """Reasons against a calibrated interval; None for a certified one, to which they do
    not apply.
    """
    if found.interval is None:
        return []
    if found.interval.kind in names.CERTIFIED_KINDS:
        return None
    by_rows = (
        found.interval.kind in names.SYSTEM_KINDS
        and found.interval.kind != names.BOOTSTRAP_PIVOT
    )
    reasons = workspace.limits.reasons_for_no_interval(by_rows)
    size = found.effective_sample_size
    if (
        found.name in names.OVER_EPISODES
        and size is not None
        and size < _FEWEST_WEIGHTED
    ):
        reasons.append(f"{size:.1f} episodes carry all the weight")
    elif found.name not in names.OVER_EPISODES:
        reasons += workspace.coverage.reasons
    if found.name not in names.WITHOUT_MODEL:
        fitted = workspace.fitted
        heads = {
            head: fitted.interval(fitted.values_of(head))
            for head in fitted.estimate_by_head()
        }
        reasons += contradiction(
            heads, fitted.problem.reward_scale, fitted.record.steps
        )
    return reasons


def _with_interval(workspace: Workspace, found: PointEstimate) -> PointEstimate:
    """The estimate with the requested kind of interval, and a warning if the estimate
    lies outside.
    """
    settings = workspace.settings
    kind = workspace.settings.interval
    if kind in names.CERTIFIED_EPISODE_KINDS:
        interval, told = _say_guesses(settings, found.interval, with_norm=False)
        return dataclasses.replace(
            found, interval=interval, warnings=(*found.warnings, *told)
        )
    if kind not in names.SYSTEM_KINDS:
        return found
    result = system_interval(workspace, kind)
    warnings = [*found.warnings, *result.warnings]
    if result.interval is not None and not result.interval.as_measured.holds(
        found.value
    ):
        if result.value is None:
            own = ""
        else:
            own = f": fixed features say {result.value:.4g}"
        warnings.append(
            f"The {kind} interval does not hold the estimate {found.value:.4g}{own}."
        )
    details = {
        key: part
        for key, part in result.as_dict().items()
        if key not in ("interval", "warnings")
    }
    diagnostics = {**found.diagnostics, "interval": details}
    told = tuple(warnings)
    return dataclasses.replace(
        found, interval=result.interval, diagnostics=diagnostics, warnings=told
    )


def system_interval(workspace: Workspace, kind: str) -> IntervalResult:
    """An interval for the value from a feature system; it does not depend on the
    estimator.
    """
    settings = workspace.settings
    is_certified = kind == names.KERNEL_CERTIFIED
    if is_certified and settings.history:
        raise ConfigError(
            f"{kind} is for the logged state alone; leave"
            f" history={settings.history} out"
        )
    if kind != names.BOOTSTRAP_PIVOT and workspace.problem.kind == "clusters":
        raise ConfigError(
            f"{kind} takes rows for independent, and this log has clusters; use another"
            " kind"
        )
    if is_certified:
        system = workspace.fixed_system
    else:
        system = workspace.held_system
    asked = settings.model_dump(
        include={"level", "norm_bound", "reward_bounds", "seed"}
    )
    result = make_interval(kind, system, **asked)
    if not is_certified:
        if settings.feature_source == "random":
            return result
        return _widened(workspace, result)
    interval, told = _say_guesses(settings, result.interval, with_norm=True)
    return dataclasses.replace(
        result, interval=interval, warnings=(*result.warnings, *told)
    )


def _widened(workspace: Workspace, result: IntervalResult) -> IntervalResult:
    """Widen an interval from one network's features by the variation between networks'
    features.
    """
    value = result.value
    # without a value, it covers the whole class already
    if result.interval is None or value is None:
        return result
    interval = result.interval.as_measured
    reach = workspace.fitted.feature_reach
    low = value - math.hypot(value - interval.low, reach)
    high = value + math.hypot(interval.high - value, reach)
    text = f"{interval.assumptions} {_REACH.format(reach)}"
    wider = dataclasses.replace(interval, low=low, high=high, assumptions=text)
    return dataclasses.replace(result, interval=wider.within(workspace.limits.bounds))


def _say_guesses(
    settings: EvaluationSettings, interval: Interval | None, with_norm: bool
) -> tuple[Interval | None, tuple[str, ...]]:
    """The interval and a warning, both saying which bounds of a certificate were read
    off the log.
    """
    needed = ("reward_bounds", "norm_bound") if with_norm else ("reward_bounds",)
    missing = [name for name in needed if getattr(settings, name) is None]
    if not missing:
        return interval, ()
    given = " and ".join(missing)
    are = "them was" if len(missing) > 1 else "it was"
    told = (
        f"A certificate is one only with {given} given: what stands in for {are} read"
        " off the log."
    )
    if interval is not None:
        text = f"Bounds were read off the log. {interval.assumptions}"
        interval = dataclasses.replace(interval, assumptions=text, is_guess=True)
    return interval, (told,)


def bounds_of(
    workspace: Workspace, estimates: dict[str, PointEstimate]
) -> tuple[BoundRow, ...]:
    """Intervals that belong to no single estimator, and certified intervals from
    importance weights.

    Intervals that need a value function are left out if no estimator in the table has
    one.
    """
    kinds = [kind for kind in names.SYSTEM_KINDS if kind != names.BOOTSTRAP_PIVOT]
    rows = [
        _bound(workspace, kind)
        for kind in kinds
        if not set(estimates) <= set(names.OVER_EPISODES)
    ]
    for kind in names.CERTIFIED_EPISODE_KINDS:
        for name in ("is", "pdis"):
            if name in estimates:
                made = estimates[name].diagnostics["intervals"]
            else:
                made = {}
            if kind in made:
                interval, _ = _say_guesses(
                    workspace.settings, made[kind], with_norm=False
                )
                rows.append(BoundRow(f"{kind} ({name})", interval, None))
    return tuple(rows)


def _bound(workspace: Workspace, kind: str) -> BoundRow:
    """One interval from a feature system, or the reason why there is none."""
    try:
        result = system_interval(workspace, kind)
    except (KofflineError, torch.linalg.LinAlgError) as error:
        return BoundRow(kind, None, str(error))
    if result.interval is not None and kind not in names.CERTIFIED_KINDS:
        limits = workspace.limits
        if result.value is None:
            impossible = None
        else:
            impossible = limits.impossible(result.value)
        against = [
            *limits.reasons_for_no_interval(by_rows=True),
            *workspace.coverage.reasons,
            impossible,
        ]
        reasons = list(filter(None, against))
        if reasons:
            return BoundRow(kind, None, "; ".join(reasons))
    return BoundRow(kind, result.interval, " ".join(result.warnings) or None)
