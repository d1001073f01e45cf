"""Networks from a sample of the rows, and how all rows are seen through them."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from koffline.config import EvaluationSettings
from koffline.data.copies import without_copies
from koffline.data.disk.log import LazyTransitions
from koffline.data.disk.samples import sample_starts, sample_transitions
from koffline.data.transitions import Transitions
from koffline.errors import KofflineError
from koffline.fitting import FitRecord, Progress
from koffline.kernels import FourierFeatures
from koffline.ope.coverage import Coverage, measure_coverage
from koffline.ope.diagnostics import logged_action_overlap
from koffline.ope.ensemble import draw_ensemble
from koffline.ope.features import default_features, make_instruments
from koffline.ope.fitted import start_value_probe
from koffline.ope.fitted_function import units_of
from koffline.ope.learning import fit_features, make_table
from koffline.ope.problem import START_DRAWS, EvaluationProblem, prepare_problem
from koffline.ope.provenance import Provenance
from koffline.ope.streaming.frame import FeatureStack, Frame, NetworkFeatures, OneFeatureMap
from koffline.ope.streaming.memory import MemoryPlan
from koffline.ope.streaming.settings import StreamSettings
from koffline.policies import ContinuousPolicy, DiscretePolicy

_KEPT_ROWS = 20_000
_ROW_ARRAYS = (
    "inputs",
    "next_inputs",
    "actions",
    "readout",
    "next_probabilities",
    "rewards",
    "discounts",
    "kernel_inputs",
    "episode_starts",
    "row_weights",
)


@dataclass(frozen=True, eq=False)
class Request:
    """What is asked of a log on disk; ``initial_observations`` (E, …) replace its own start states."""

    log: LazyTransitions
    policy: DiscretePolicy | ContinuousPolicy
    settings: EvaluationSettings
    stream: StreamSettings
    initial_observations: np.ndarray | None = None
    progress: Progress | None = None

    @property
    def draws_actions(self) -> bool:
        """Whether expectations over the policy's actions are means over draws."""
        return isinstance(self.policy, ContinuousPolicy) and not self.policy.deterministic


@dataclass(frozen=True, eq=False)
class Sampled:
    """What is known before the pass.

    ``problem``: (at most 20,000) rows of the sample and its start states, for what sums cannot say; the rest
    of the sample is gone by then. ``overlap``: how the policy's actions meet the logged ones. ``record``:
    None where nothing was trained. ``diverged``: networks that were left out. ``copies``: share of its rows
    that are copies of others.
    """

    rows: int
    problem: EvaluationProblem
    features: FeatureStack
    instruments: FourierFeatures
    bandwidth: float
    coverage: Coverage
    overlap: dict[str, Any]
    provenance: Provenance
    weight_scale: float
    record: FitRecord | None = None
    diverged: int = 0
    copies: float = 0.0


def sample_and_train(request: Request, plan: MemoryPlan, learned: bool) -> Sampled:
    """Draw the sample, and train networks on it where the features are learned. Raises KofflineError."""
    settings, passes = request.settings, request.stream.passes
    seed, starts = settings.seed, request.initial_observations
    sample = sample_transitions(request.log, plan.sample_rows, seed, settings=passes)
    if starts is None:
        starts = sample_starts(request.log, plan.starts, seed, settings=passes)
    generator = np.random.default_rng(seed)
    problem = prepare_problem(
        sample, request.policy, settings.gamma, settings.action_draws, generator, starts
    )
    instruments, bandwidth = make_instruments(problem, settings.bandwidth, settings.instruments, seed)
    features: FeatureStack
    record, diverged = None, 0
    if learned:
        record = _train(problem, settings, generator, request.progress)
        alive = [number for number, step in enumerate(record.diverged_at) if step is None]
        diverged = len(record.diverged_at) - len(alive)
        if not alive:
            raise KofflineError(
                "all networks diverged; lower learning_rate or look for outliers (koffline data validate)"
            )
        features = NetworkFeatures.of(record.network.select(alive))
    else:
        chosen = default_features(problem, settings.features, settings.feature_width, seed=seed)
        features = OneFeatureMap(chosen, settings.features)
    weights, merged = sample.weights, without_copies(sample)
    return Sampled(
        rows=len(sample),
        problem=_thinned(problem),
        features=features,
        instruments=instruments,
        bandwidth=bandwidth,
        coverage=measure_coverage(problem, np.random.default_rng([seed, 1])),
        overlap=_overlap(sample, request),
        provenance=Provenance.of(sample),
        weight_scale=1.0 if weights is None else float(np.asarray(weights, dtype=np.float64).mean()) or 1.0,
        record=record,
        diverged=diverged,
        copies=1.0 - merged.distinct / merged.units if merged.merged else 0.0,
    )


def _overlap(sample: Transitions, request: Request) -> dict[str, Any]:
    """As of the whole log: effective rows grow with it."""
    found = logged_action_overlap(sample, request.policy)
    if "effective_sample_size" in found:
        found["effective_sample_size"] *= len(request.log) / len(sample)
    return found


def _thinned(problem: EvaluationProblem) -> EvaluationProblem:
    """The first rows of a problem, which are in random order."""
    kept = {
        name: getattr(problem, name)[:_KEPT_ROWS].copy()
        for name in _ROW_ARRAYS
        if getattr(problem, name) is not None
    }
    return dataclasses.replace(problem, **kept)


def _train(
    problem: EvaluationProblem,
    settings: EvaluationSettings,
    generator: np.random.Generator,
    progress: Progress | None,
) -> FitRecord:
    ensemble = draw_ensemble(problem, settings.full_replicas, 0, settings.seed)
    table = make_table(problem, settings.device)
    return fit_features(table, problem, ensemble, settings, start_value_probe(problem), progress)


def make_frame(request: Request, plan: MemoryPlan, sampled: Sampled, critics: int, ratios: bool) -> Frame:
    """How all rows are seen. critics: instruments with second moments. ratios: weigh episodes."""
    settings, log = request.settings, request.log
    draws = settings.action_draws if request.draws_actions else 1
    start_draws = max(draws, math.ceil(START_DRAWS / (log.n_episodes or len(log))))
    return Frame(
        policy=request.policy,
        gamma=settings.gamma,
        units=units_of(sampled.problem),
        features=sampled.features,
        instruments=sampled.instruments,
        next_draws=draws,
        start_draws=start_draws if request.draws_actions else 1,
        own_starts=request.initial_observations is None,
        seed=settings.seed,
        groups=plan.groups,
        weight_scale=sampled.weight_scale,
        critics=critics,
        dtype=torch.float32 if request.stream.precision == "single" else torch.float64,
        ratios=ratios,
        clip=settings.weight_clip,
    )
