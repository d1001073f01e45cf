"""Logs on disk and how they are seen, for the tests of estimates from sums."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

import koffline
from koffline.data.disk.log import LazyTransitions
from koffline.data.disk.writer import ShardWriter
from koffline.data.transitions import Transitions
from koffline.jobs.mapping import PassSettings
from koffline.ope.features import FeatureSystem, make_feature_system
from koffline.ope.fitted_function import units_of
from koffline.ope.problem import EvaluationProblem, prepare_problem
from koffline.ope.streaming.frame import Frame, NetworkFeatures
from koffline.policies import ContinuousPolicy, Policy
from koffline.replicas import StackedMLP
from tests.ope.problems import NOISY, SOFT, continuous_log, discrete_log

GAMMA = 0.9
HERE = PassSettings()
CLOSE = {"rtol": 0.0, "atol": 1e-10}
STEADY = ContinuousPolicy(1, lambda s: np.tanh(s[:, :1]))


def on_disk(folder: Path, log: Transitions, shard_rows: int = 25) -> LazyTransitions:
    """The log cut into shards."""
    target = folder / f"shards-{shard_rows}"
    with ShardWriter(target, shard_rows) as writer:
        writer.append(log)
    return koffline.open_transitions(target, lazy=True)


def example(kind: str, rows: int = 120) -> tuple[Transitions, Policy]:
    """``episodes``: discrete, some terminated, weighted. ``tuples``: continuous, a deterministic policy."""
    if kind == "tuples":
        return continuous_log(rows), STEADY
    weights = np.repeat(np.random.default_rng(6).uniform(0.2, 2.0, rows // 10), 10)
    return discrete_log(rows, weights=weights), SOFT


def seen(
    log: Transitions, policy: Policy, replicas: int = 2, draws: int = 3, **changes: Any
) -> tuple[Frame, EvaluationProblem]:
    """A frame with untrained float64 networks, and the whole log as a problem in the same units."""
    problem = prepare_problem(log, policy, GAMMA, draws, np.random.default_rng(0))
    outputs = problem.n_actions or 1
    network = StackedMLP.initialise(
        (problem.inputs.shape[1], 7, 5, outputs), range(replicas), dtype=torch.float64
    )
    system = system_of(problem, network, 0)
    options: dict[str, Any] = {
        "next_draws": problem.next_inputs.shape[1],
        "start_draws": problem.start_inputs.shape[1],
        "own_starts": True,
        "seed": 3,
        "groups": 6,
        "weight_scale": 1.0 if log.weights is None else float(log.weights.mean()),
        "critics": 20,
        "dtype": torch.float64,
        **changes,
    }
    return (
        Frame(policy, GAMMA, units_of(problem), NetworkFeatures.of(network), system.instruments, **options),
        problem,
    )


def system_of(problem: EvaluationProblem, network: StackedMLP, replica: int) -> FeatureSystem:
    """The whole log in memory, in the features of one network."""
    one = network.select([replica])
    return make_feature_system(problem, lambda x: one.features(x)[0], gamma=GAMMA, instruments=40, seed=2)


__all__ = ["CLOSE", "GAMMA", "HERE", "NOISY", "SOFT", "STEADY", "example", "on_disk", "seen", "system_of"]
