"""The candidates: which algorithms and settings are tried, by the kind of actions, and
how each becomes a network of a mixture.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from koffline.config import make_settings
from koffline.data.disk.log import AnyLog
from koffline.data.transitions import Discrete, Transitions
from koffline.improvement.clone import Clone
from koffline.improvement.scaling import LogScaling
from koffline.policies import MixturePart

MODE = "clone_mode"  # the clone's likeliest action
ITERATION = "kernel_policy_iteration"
_FEWEST_STEPS = 1000
_MOST_STEPS = 4000
_PASSES = 60  # of the rows, with mini-batches of 256
_BATCH = 256
_HIDDEN = {"type": "vector", "params": {"hidden_units": [64, 64]}}


@dataclass(frozen=True)
class CandidateSpec:
    """One candidate: an algorithm with its settings.

    ``kind``: an algorithm of d3rlpy or koffline, or one of this file. ``work``: steps
    that take about as long, relative to the fastest algorithm. ``label``: the settings
    that tell candidates of one kind apart.
    """

    kind: str
    label: str = ""
    params: Mapping[str, Any] = field(default_factory=dict)
    work: float = 1.0

    @property
    def name(self) -> str:
        """The name in tables and files."""
        if not self.label:
            return self.kind
        return f"{self.kind}-{self.label}"


def _discrete(kind: str, label: str, work: float, **params: Any) -> CandidateSpec:
    common = {"encoder_factory": _HIDDEN, "batch_size": _BATCH}
    return CandidateSpec(kind, label, {**common, **params}, work)


_DQN = {"learning_rate": 1e-3, "target_update_interval": 100}
# the most promising first: a small budget leaves out the last ones
DISCRETE = (
    CandidateSpec(MODE, work=0.0),
    CandidateSpec(ITERATION, "1_round", {"rounds": 1, "temperature": 0.5}, work=2.0),
    CandidateSpec(ITERATION, "3_rounds", {"rounds": 3, "temperature": 0.25}, work=6.0),
    _discrete("discrete_cql", "alpha_0.5", 1.5, alpha=0.5, **_DQN),
    _discrete("kloss_dqn", "temperature_0.1", 3.0, temperature=0.1),
    _discrete(
        "discrete_bcq",
        "flexibility_0.3",
        2.0,
        action_flexibility=0.3,
        share_encoder=False,
        beta=0.01,
        **_DQN,
    ),
    _discrete("kloss_discrete_cql", "alpha_0.1", 3.0, alpha=0.1),
    _discrete("discrete_cql", "alpha_4", 1.5, alpha=4.0, **_DQN),
    _discrete("kloss_discrete_cql", "alpha_1", 3.0, alpha=1.0),
    _discrete("kloss_dqn", "temperature_1", 3.0, temperature=1.0),
)


def _continuous(kind: str, label: str, work: float, **params: Any) -> CandidateSpec:
    common = {
        "actor_encoder_factory": _HIDDEN,
        "critic_encoder_factory": _HIDDEN,
        "batch_size": _BATCH,
        "actor_learning_rate": 1e-3,
    }
    return CandidateSpec(kind, label, {**common, **params}, work)


_CRITIC = {"critic_learning_rate": 1e-3, "tau": 0.01}
CONTINUOUS = (
    CandidateSpec(MODE, work=0.0),
    _continuous("iql", "expectile_0.7", 2.0, value_encoder_factory=_HIDDEN, **_CRITIC),
    _continuous("td3_plus_bc", "alpha_2.5", 1.5, alpha=2.5, **_CRITIC),
    _continuous("kloss_iql", "expectile_0.7", 4.0, value_encoder_factory=_HIDDEN),
    _continuous("kloss_td3_plus_bc", "alpha_2.5", 4.0, alpha=2.5),
    _continuous(
        "iql",
        "expectile_0.9",
        2.0,
        expectile=0.9,
        value_encoder_factory=_HIDDEN,
        **_CRITIC,
    ),
    _continuous("awac", "lam_1", 3.0, **_CRITIC),
    _continuous("td3_plus_bc", "alpha_0.5", 1.5, alpha=0.5, **_CRITIC),
    _continuous("kloss_cql", "weight_0.1", 8.0),
)


@dataclass(frozen=True, eq=False)
class TrainingPart:
    """What candidates learn from: ``rows`` as logged, ``scaled`` in the units of
    training.
    """

    rows: Transitions
    scaled: Transitions
    scaling: LogScaling
    clone: Clone
    gamma: float


def specs_for(log: AnyLog) -> tuple[CandidateSpec, ...]:
    """The candidates for a log's kind of actions."""
    if isinstance(log.action_space, Discrete):
        return DISCRETE
    return CONTINUOUS


def steps_for(rows: int) -> int:
    """Gradient steps of a candidate, by the rows that it learns from."""
    return int(np.clip(_PASSES * rows / _BATCH, _FEWEST_STEPS, _MOST_STEPS))


def train_candidate(
    spec: CandidateSpec, part: TrainingPart, steps: int, seed: int
) -> MixturePart:
    """Train a candidate. Raises KofflineError, for instance if it diverges."""
    if spec.kind == MODE:
        return part.clone.mode
    if spec.kind == ITERATION:
        from koffline.improvement.kernel_iteration import kernel_policy_iteration

        settings = make_settings({"gamma": part.gamma, "seed": seed, "steps": steps})
        return kernel_policy_iteration(
            part.scaled, part.clone, part.scaling, settings, **spec.params
        )
    from koffline.algos.short_runs import train_layers

    params = {**spec.params, "gamma": part.gamma}
    trained = train_layers(spec.kind, params, part.scaled, steps, seed)
    network = part.scaling.mlp(trained.layers, trained.output, trained.temperature)
    if trained.gate is None:
        return MixturePart(network)
    gate = part.scaling.mlp(trained.gate, "softmax")
    return MixturePart(network, gate, trained.gate_ratio)
