"""``koffline.evaluate`` for a log on disk: a sample, networks, one pass, and what its sums say."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from koffline.config import EvaluationSettings
from koffline.errors import ConfigError, DataError
from koffline.fitting import threads
from koffline.jobs.status import JobStatus
from koffline.ope.closed_form.moments import DEFAULT_CRITICS
from koffline.ope.estimate import Estimate, Evidence
from koffline.ope.fitted_function import NetworkValues
from koffline.ope.interval import Interval
from koffline.ope.limits import Limits, contradiction
from koffline.ope.names import DEFAULT, check_estimator
from koffline.ope.point_estimate import PointEstimate
from koffline.ope.problem import check_observation_shape
from koffline.ope.streaming.evidence import (
    head_diagnostics,
    log_diagnostics,
    log_warnings,
    make_evidence,
    network_warnings,
    weight_diagnostics,
)
from koffline.ope.streaming.frame import NetworkFeatures
from koffline.ope.streaming.importance import NAMES as OVER_EPISODES
from koffline.ope.streaming.importance import estimate_by_episodes
from koffline.ope.streaming.jackknife import GroupSpread, coverage_text, jackknife
from koffline.ope.streaming.memory import MemoryPlan, plan_memory, release_memory, shapes_of
from koffline.ope.streaming.moments import StreamingMoments
from koffline.ope.streaming.sampling import Request, Sampled, make_frame, sample_and_train
from koffline.ope.streaming.solving import CLOSED_FORMS, HEADS, Reader, choose_closed_form, head_layer
from koffline.ope.streaming.starts import drawing_variance, mean_start_features
from koffline.ope.streaming.sums import PassPlan, PassSums, sum_over_log
from koffline.ope.value_functions import ACTION, ValueFunction
from koffline.solvers.last_layer import with_last_layer
from koffline.store.run_record import versions

ESTIMATORS = (*HEADS, *CLOSED_FORMS, *OVER_EPISODES)
_NO_INTERVAL = (
    "Sums say nothing of how networks vary with the rows that they were trained on: no interval for fqe; use "
    "kloss."
)
_LOAD = "needs all rows in memory; load the log: without --lazy, or koffline.open_transitions(path)"


def evaluate_lazy(request: Request) -> Estimate:
    """What the policy is worth, from a log on disk within the memory of ``request.stream``.

    Raises KofflineError in one line.
    """
    started = time.perf_counter()
    check_request(request)
    settings, log = request.settings, request.log
    with torch.no_grad(), threads(settings.threads), request.stream.passes.kept():
        plan = _plan(request)
        sampled = sample_and_train(request, plan, _is_learned(settings))
        release_memory()
        reader, sums = _pass(request, plan, sampled)
        release_memory()
        limits = sums.facts.limits(request, sampled.copies)
        answer = _answer(request, sampled, reader, sums, limits)
        diagnostics = {"lazy": _reading(request, sampled), **log_diagnostics(request, sums.facts, sampled)}
        diagnostics |= answer.point.diagnostics
        warnings = [*log_warnings(request, limits, diagnostics), *answer.point.warnings]
    warnings += [f"Left out: {reason}" for reason in sums.skipped]
    return Estimate(
        value=answer.point.value,
        interval=answer.point.interval,
        estimator=settings.estimator,
        gamma=settings.gamma,
        n_transitions=sums.facts.rows,
        n_episodes=int(sums.facts.returns.count),
        policy=request.policy.name,
        source=log.metadata.source,
        seed=settings.seed,
        seconds=time.perf_counter() - started,
        data_sha256="" if sums.skipped else log.sha256,
        diagnostics=diagnostics,
        settings={**settings.model_dump(exclude={"gamma", "estimator", "seed"}), **_streamed(request, plan)},
        versions=versions(),
        warnings=tuple(warnings),
        evidence=answer.evidence,
        value_function=answer.value_function,
    )


@dataclass(frozen=True, eq=False)
class _Answer:
    """An estimate, and for trained networks what a report shows of them."""

    point: PointEstimate
    evidence: Evidence | None = None
    value_function: ValueFunction | None = None


def check_request(request: Request) -> None:
    """ConfigError or DataError for what sums cannot answer, with the remedy."""
    settings, log = request.settings, request.log
    check_estimator(settings.estimator)
    check_observation_shape(log.observation_shape)
    if settings.estimator not in ESTIMATORS:
        raise ConfigError(f"{settings.estimator} {_LOAD}; or choose one of {', '.join(ESTIMATORS)}")
    if settings.interval != DEFAULT:
        raise ConfigError(f"an interval of kind '{settings.interval}' {_LOAD}; or leave it out")
    if len(log) < 2:
        raise DataError("the log has 1 row; an estimate needs at least 2, an honest one hundreds")
    if settings.estimator not in OVER_EPISODES:
        return
    name = settings.estimator
    if request.initial_observations is not None:
        raise DataError(f"{name}: it estimates the return of the logged episodes; leave other starts out")
    if not log.has_episodes:
        raise DataError(
            f"{name}: importance weights are products along episodes, this log's rows stand alone; use an "
            "estimator that needs none (kloss, fqe, mwl)"
        )
    if settings.behavior == "estimate" or not log.has_log_probabilities:
        raise DataError(
            f"{name}: to estimate the behavior {_LOAD}; or store behavior_log_probabilities with the log"
        )


def _is_learned(settings: EvaluationSettings) -> bool:
    """Whether networks are trained; importance sampling asks for none."""
    if settings.estimator in OVER_EPISODES:
        return False
    return settings.feature_source == "learned" or settings.estimator in HEADS


def _plan(request: Request) -> MemoryPlan:
    settings = request.settings
    draws = settings.action_draws if request.draws_actions else 1
    given = None if request.initial_observations is None else len(request.initial_observations)
    shapes = shapes_of(request.log, settings, draws, _is_learned(settings), given)
    if settings.estimator in OVER_EPISODES:  # sums by step of episodes alone
        shapes = dataclasses.replace(shapes, hidden=(1,), instruments=2)
    return plan_memory(request.stream, shapes, request.log)


def _pass(request: Request, plan: MemoryPlan, sampled: Sampled) -> tuple[Reader, PassSums]:
    settings = request.settings
    critics = min(DEFAULT_CRITICS, settings.instruments) if settings.estimator == "dualdice" else 0
    frame = make_frame(request, plan, sampled, critics, ratios=settings.estimator in OVER_EPISODES)
    given = None if frame.own_starts else mean_start_features(frame.features, sampled.problem)
    here = request.stream.workers == 1 and request.stream.ray is None
    passed = PassPlan(request.log, frame, plan.block_rows, settings.threads if here else 1)
    bar = None if request.progress is None else _Bar(request)
    return Reader(frame, given), sum_over_log(passed, request.stream.passes, bar)


def _answer(request: Request, sampled: Sampled, reader: Reader, sums: PassSums, limits: Limits) -> _Answer:
    settings = request.settings
    if settings.estimator in OVER_EPISODES:
        assert sums.episodes is not None
        found = estimate_by_episodes(
            settings.estimator, sums.episodes, settings.gamma, settings.level, settings.weight_clip
        )
        return _Answer(limits.of_logged_returns().settle(found, limits.reasons_for_no_interval()))
    assert sums.moments is not None
    if settings.estimator in CLOSED_FORMS:
        found = _by_closed_form(request, sampled, reader, sums.moments)
        return _Answer(limits.settle(found, limits.reasons_for_no_interval()))
    return _by_networks(request, sampled, reader, sums.moments, limits)


def _by_networks(
    request: Request, sampled: Sampled, reader: Reader, moments: StreamingMoments, limits: Limits
) -> _Answer:
    """One of the heads: mean over the networks, interval from the groups and from the networks' spread."""
    settings = request.settings
    read = {name: head_layer(reader.frame, name, settings.ridge) for name in HEADS}
    total = moments.total()
    layers = {name: layer(total) for name, layer in read.items()}
    theta = layers[settings.estimator]
    values = reader.value(total, theta)
    if not np.isfinite(values).all():
        raise DataError("the sums give no finite value; look for outliers with 'koffline data validate'")
    diagnostics = head_diagnostics(reader, moments, sampled, layers, settings.estimator, settings.ridge)
    spreads = {
        name: jackknife(moments, _reading_of(reader, layer)) for name, layer in read.items() if name != "fqe"
    }
    warnings = [_NO_INTERVAL] if settings.estimator == "fqe" else []
    noise = (
        0.0 if reader.frame.own_starts else drawing_variance(reader.frame.features, sampled.problem, theta)
    )
    noise *= reader.frame.units.reward_scale**2
    points = {
        name: _point(request, reader.value(total, layers[name]), found, noise)
        for name, found in spreads.items()
    }
    point = points.get(settings.estimator) or _point(request, values, None, noise)
    reasons = limits.reasons_for_no_interval()
    clash = contradiction(
        {name: each.interval for name, each in points.items()}, reader.frame.units.reward_scale
    )
    point = limits.settle(point, [*reasons, clash] if clash else reasons)
    width = 0.0 if point.interval is None else point.interval.width
    scaled = {**diagnostics, "reward_scale": reader.frame.units.reward_scale}
    warnings += network_warnings(sampled, scaled, width, int(moments.rows.sum()))
    assert isinstance(reader.frame.features, NetworkFeatures)
    network = with_last_layer(reader.frame.features.network, theta)
    function = ValueFunction(
        name=settings.estimator,
        kind=ACTION,
        function=NetworkValues(network, reader.frame.units),
        action_space=request.log.action_space,
        observation_shape=request.log.observation_shape,
        trained_on=sampled.provenance,
    )
    point = dataclasses.replace(
        point, warnings=(*point.warnings, *warnings), diagnostics={**point.diagnostics, **diagnostics}
    )
    return _Answer(point, make_evidence(sampled, network, values), function)


def _reading_of(
    reader: Reader, layer: Callable[[StreamingMoments], torch.Tensor]
) -> Callable[[StreamingMoments], np.ndarray]:
    return lambda part: reader.value(part, layer(part))


def _by_closed_form(
    request: Request, sampled: Sampled, reader: Reader, moments: StreamingMoments
) -> PointEstimate:
    """One of the closed forms: mean over the feature maps."""
    form = choose_closed_form(request.settings.estimator, reader, moments)
    spread = jackknife(moments, form.values)
    noise = 0.0 if reader.frame.own_starts else form.drawing_variance(sampled.problem, moments)
    point = _point(request, form.values(moments.total()), spread, noise)
    diagnostics = weight_diagnostics(form, moments, sampled)
    warnings = diagnostics.pop("warnings")
    return dataclasses.replace(
        point, warnings=(*point.warnings, *warnings), diagnostics={**point.diagnostics, **diagnostics}
    )


def _point(request: Request, values: np.ndarray, spread: GroupSpread | None, noise: float) -> PointEstimate:
    """The mean of values (R,), with what its interval rests on.

    noise: variance that drawn actions at given start states leave.
    """
    settings, log = request.settings, request.log
    value, warnings = float(values.mean()), []
    interval: Interval | None = None
    if spread is not None:
        spread = dataclasses.replace(spread, between=spread.between + noise)
        units = "episodes" if log.has_episodes else "rows"
        covers = coverage_text(request.initial_observations is not None, _is_learned(settings))
        interval = spread.interval(value, settings.level, units, covers)
    elif settings.estimator != "fqe":
        warnings.append("one independent part has all the rows: no standard error and no interval")
    return PointEstimate(
        name=settings.estimator,
        value=value,
        standard_error=None if spread is None else spread.standard_error,
        interval=interval,
        warnings=tuple(warnings),
        diagnostics={
            "replica_standard_deviation": float(values.std(ddof=1)) if len(values) > 1 else None,
            "group_standard_error": None if spread is None else math.sqrt(spread.variance),
            "groups": None if spread is None else spread.groups,
        },
    )


def _streamed(request: Request, plan: MemoryPlan) -> dict[str, Any]:
    """What of the reading decides the numbers."""
    return {
        "sample_rows": plan.sample_rows,
        "groups": plan.groups,
        "precision": request.stream.precision,
        "block_rows": plan.block_rows,
    }


def _reading(request: Request, sampled: Sampled) -> str:
    """In words what saw all rows and what a sample."""
    if request.settings.estimator in OVER_EPISODES:
        return "one pass over all episodes"
    chosen = "networks" if _is_learned(request.settings) else "features"
    return f"one pass over all rows, {chosen} from {sampled.rows:,} sampled rows"


class _Bar:
    """Shows the pass on the bar that the training used."""

    def __init__(self, request: Request) -> None:
        self._progress = request.progress

    def __call__(self, status: JobStatus) -> None:
        if self._progress is not None:
            show = getattr(self._progress, "pass_over", None)
            if show is not None:
                show(status.done, status.total)
