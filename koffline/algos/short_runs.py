"""Short trainings in memory, whose policies are read out as plain layers."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from d3rlpy.logging import NoopAdapterFactory
from torch import nn

from koffline.algos.options import resolve_params
from koffline.algos.training import build_networks, make_algorithm, own_randomness
from koffline.data import quiet
from koffline.data.replay import ColumnarReplayBuffer
from koffline.data.transitions import Discrete, Transitions
from koffline.errors import ConfigError, KofflineError
from koffline.fitting import threads
from koffline.policies.builtin import Mlp

Layers = tuple[tuple[np.ndarray, np.ndarray], ...]
_COMPARED_ROWS = 64
_TOLERANCE = 1e-3
# largest weight: products with larger ones soon overflow
_HUGE = 1e12


@dataclass(frozen=True, eq=False)
class TrainedLayers:
    """A trained policy as layers: pairs of weights (in, out) and biases (out,), with
    ReLU between them.

    ``output``: "argmax" or "softmax" of the last layer with ``temperature``, or "tanh"
    for actions in [−1, 1]. ``gate``: layers of a classifier of actions, as of discrete
    BCQ, with ``gate_ratio``.
    """

    layers: Layers
    output: str
    temperature: float = 1.0
    gate: Layers | None = None
    gate_ratio: float = 0.0


def train_layers(
    kind: str, params: Mapping[str, Any], log: Transitions, n_steps: int, seed: int
) -> TrainedLayers:
    """Train an algorithm of d3rlpy or koffline for ``n_steps`` steps, and read out its
    policy; of a stochastic policy for continuous actions the mode.

    params: what differs from the algorithm's defaults. log: with flat observations (N,
    d) and continuous actions in [−1, 1]. The global random generators are left
    unchanged. Raises ConfigError if training diverges or the log does not fit.
    """
    with (
        quiet(),
        warnings.catch_warnings(),
        threads(1),
        own_randomness(seed),
        np.errstate(over="ignore", invalid="ignore"),
    ):
        warnings.simplefilter("ignore")
        buffer = ColumnarReplayBuffer(log, np.random.default_rng([seed, 1]))
        algo = make_algorithm(kind, resolve_params(kind, params))
        build_networks(algo, buffer, kind)
        try:
            with torch.enable_grad():
                algo.fit(
                    buffer,
                    n_steps=n_steps,
                    n_steps_per_epoch=n_steps,
                    logger_adapter=NoopAdapterFactory(),
                    show_progress=False,
                    save_interval=2,
                )
        except (KofflineError, ValueError, RuntimeError) as error:
            if re.search(r"\b(nan|inf)\b", str(error)) is None:
                raise
        trained = _read_out(algo, kind)
        _check_finite(trained, kind)
        _check_same(algo, trained, log, kind)
    return trained


def _read_out(algo: Any, kind: str) -> TrainedLayers:
    """The layers of an algorithm's policy."""
    modules = algo.impl.modules
    if hasattr(modules, "policy"):
        policy = modules.policy
        last = getattr(policy, "_fc", None)
        if last is None:
            last = policy._mu
        return TrainedLayers(_layers(policy._encoder, last), "tanh")
    q_function = modules.q_funcs[0]
    layers = _layers(q_function._encoder, q_function._fc)
    imitator = getattr(modules, "imitator", None)
    if imitator is not None:
        gate = _layers(imitator._encoder, imitator._fc)
        ratio = float(algo.config.action_flexibility)
        return TrainedLayers(layers, "argmax", gate=gate, gate_ratio=ratio)
    temperature = float(getattr(algo.config, "temperature", 0.0))
    if temperature > 0.0:
        return TrainedLayers(layers, "softmax", float(algo.impl.temperature))
    return TrainedLayers(layers, "argmax")


def _layers(encoder: Any, last: Any) -> Layers:
    """Weights and biases of an encoder's layers and of the last one."""
    linear = [module for module in encoder.modules() if isinstance(module, nn.Linear)]
    pairs = []
    assert isinstance(last, nn.Linear)
    for module in (*linear, last):
        weight = module.weight.detach().cpu().numpy().T.astype(np.float64)
        bias = module.bias.detach().cpu().numpy().astype(np.float64)
        pairs.append((weight, bias))
    return tuple(pairs)


def _check_finite(trained: TrainedLayers, kind: str) -> None:
    arrays = [
        array
        for layers in (trained.layers, trained.gate or ())
        for pair in layers
        for array in pair
    ]
    is_bounded = all(bool((np.abs(array) < _HUGE).all()) for array in arrays)
    if not is_bounded or not 0.0 < trained.temperature < math.inf:
        raise ConfigError(
            f"the training of {kind} diverged; scale the rewards, or look for outliers"
            " (koffline data validate)"
        )


def _check_same(algo: Any, trained: TrainedLayers, log: Transitions, kind: str) -> None:
    """Check that the layers act as the algorithm does, on some rows of the log."""
    rows = np.asarray(log.observations[:_COMPARED_ROWS], np.float32)
    values = _last_layer(trained.layers, rows)
    expected = algo.predict(rows)
    if not isinstance(log.action_space, Discrete):
        gap = np.abs(np.tanh(values) - expected).max()
        assert gap < _TOLERANCE, f"the layers of {kind} act otherwise"
        return
    if trained.gate is not None:
        logits = _last_layer(trained.gate, rows)
        ratios = np.exp(logits - logits.max(axis=1, keepdims=True))
        values = np.where(ratios >= trained.gate_ratio, values, -math.inf)
    agreement = np.mean(values.argmax(axis=1) == expected)
    assert agreement > 0.9, f"the layers of {kind} act otherwise"


def _last_layer(layers: Layers, rows: np.ndarray) -> np.ndarray:
    weights = tuple(weight for weight, _ in layers)
    biases = tuple(bias for _, bias in layers)
    return Mlp(weights, biases, "identity").last_layer(rows)
