"""A small network as plain arrays: the policy inside koffline's own .npz policy file (policy_file.py)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from koffline.data.transitions import ActionSpace, Continuous, Discrete
from koffline.errors import PolicyError
from koffline.policies.base import (
    Actions,
    ContinuousPolicy,
    DiscretePolicy,
    Observations,
    Policy,
    check_spaces,
    chunk_rows_for,
)  # fmt: skip
from koffline.policies.distributions import gaussian_log_density

DISCRETE_OUTPUTS = ("softmax", "argmax")
_CHOICES = {"output": (*DISCRETE_OUTPUTS, "tanh", "identity", "gaussian"), "activation": ("relu", "tanh")}


@dataclass(frozen=True, eq=False)
class Mlp:
    """Layers and what is done with the last one; checked when constructed, raising PolicyError.

    weights: one (in, out) array per layer; biases: one (out,) array per layer; `activation` between layers.
    One layer is a linear policy; on one-hot observations it is a table.
    output: "softmax" (probabilities of last layer / temperature), "argmax" (its first maximum), "tanh"
    (scaled to the action box when one is given), "identity", or "gaussian" (mean = last layer, standard
    deviation `std`; mean and draws are clipped to the action box when one is given).
    observation_mean, observation_std: scalar or (in,); observations are flattened, centred and divided first.
    std, action_low, action_high: scalar or (k,).
    """

    weights: tuple[np.ndarray, ...]
    biases: tuple[np.ndarray, ...]
    output: str
    activation: str = "relu"
    temperature: float = 1.0
    observation_mean: np.ndarray | None = None
    observation_std: np.ndarray | None = None
    std: np.ndarray | None = None
    action_low: np.ndarray | None = None
    action_high: np.ndarray | None = None

    def __post_init__(self) -> None:
        for what, choices in _CHOICES.items():
            if getattr(self, what) not in choices:
                raise PolicyError(f"{what} is {getattr(self, what)!r}; give one of {', '.join(choices)}")
        self._check_layers()
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise PolicyError(f"temperature is {self.temperature}; give a positive number")
        if (self.std is not None) != (self.output == "gaussian"):
            raise PolicyError(
                f'std with output "{self.output}"; give it with output "gaussian", and only there'
            )
        for what in ("observation_mean", "observation_std", "std", "action_low", "action_high"):
            self._check_vector(what, self.inputs if what.startswith("observation") else self.outputs)
        low, high = self.action_low, self.action_high
        if low is None and high is None:
            return
        if low is None or high is None or self.output not in ("tanh", "gaussian"):
            raise PolicyError(
                f'action_low and action_high with output "{self.output}"; '
                'give both, with output "tanh" or "gaussian", or neither'
            )
        if not (low < high).all():
            raise PolicyError(
                f"action_low is {low}, action_high {high}; give lower bounds below upper bounds"
            )

    def _check_layers(self) -> None:
        width = len(self.weights[0]) if self.weights[0].ndim else 0
        for layer, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            fits = weight.ndim == 2 and weight.size > 0 and weight.shape[0] == width
            if not fits or bias.shape != (weight.shape[1],):
                raise PolicyError(
                    f"layer {layer} has W{layer} of shape {weight.shape} and b{layer} of shape {bias.shape}; "
                    "give (in, out) and (out,), with `in` the layer before's `out`"
                )
            if not (np.isfinite(weight).all() and np.isfinite(bias).all()):
                raise PolicyError(f"layer {layer} holds a value that is not finite; give finite weights")
            width = weight.shape[1]

    def _check_vector(self, what: str, size: int) -> None:
        value = getattr(self, what)
        if value is None:
            return
        if value.shape not in ((), (size,)):
            raise PolicyError(f"{what} has shape {value.shape}; give a scalar or shape ({size},)")
        if not np.isfinite(value).all() or (what.endswith("std") and not (value > 0).all()):
            kind = "positive, finite" if what.endswith("std") else "finite"
            raise PolicyError(f"{what} is {value}; give {kind} numbers")

    @property
    def inputs(self) -> int:
        """Numbers in one flattened observation."""
        return int(self.weights[0].shape[0])

    @property
    def outputs(self) -> int:
        """Actions, or action dimensions."""
        return int(self.weights[-1].shape[1])

    def last_layer(self, observations: Observations) -> Actions:
        """Values (N, out) of the last layer, float64."""
        x = observations.reshape(len(observations), self.inputs).astype(np.float64)
        if self.observation_mean is not None:
            x = x - self.observation_mean
        if self.observation_std is not None:
            x = x / self.observation_std
        for layer, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            if layer:
                x = np.maximum(x, 0.0) if self.activation == "relu" else np.tanh(x)
            x = x @ weight + bias  # (N, in) @ (in, out) + (out,)
        return x

    def discrete(self, observations: np.ndarray) -> np.ndarray:
        """Probabilities (N, n) for "softmax", first best actions (N,) for "argmax"."""
        values = self.last_layer(observations)
        if self.output == "argmax":
            return values.argmax(axis=1)
        values = (values - values.max(axis=1, keepdims=True)) / self.temperature
        weights = np.exp(values)
        return weights / weights.sum(axis=1, keepdims=True)

    def mean(self, observations: np.ndarray) -> np.ndarray:
        """Mean actions (N, k)."""
        values = self.last_layer(observations)
        if self.output != "tanh":
            return self._clipped(values)
        values = np.tanh(values)
        if self.action_low is None or self.action_high is None:
            return values
        return self.action_low + (values + 1.0) / 2.0 * (self.action_high - self.action_low)

    def sample(self, observations: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        """Draws (N, k) of the "gaussian" output; the noise is added before clipping."""
        assert self.std is not None, "checked with the output when constructed"
        values = self.last_layer(observations)
        return self._clipped(values + self.std * generator.standard_normal(values.shape))

    def log_density(self, observations: np.ndarray, actions: np.ndarray) -> np.ndarray:
        """Log density (N,) of the "gaussian" output; with an action box its bounds hold what was cut off."""
        assert self.std is not None, "checked with the output when constructed"
        return gaussian_log_density(
            actions, self.last_layer(observations), self.std, self.action_low, self.action_high
        )

    def _clipped(self, actions: np.ndarray) -> np.ndarray:
        return actions if self.action_low is None else np.clip(actions, self.action_low, self.action_high)


def mlp_policy(mlp: Mlp, name: str, action_space: ActionSpace, observation_shape: Sequence[int]) -> Policy:
    """The network as a policy on a log's spaces; PolicyError when its sizes or its output do not fit."""
    shape, rows, size = tuple(observation_shape), chunk_rows_for(observation_shape), mlp.outputs
    is_discrete = mlp.output in DISCRETE_OUTPUTS
    check_spaces(name, Discrete(size) if is_discrete else Continuous(size), None, action_space, shape)
    if math.prod(shape) != mlp.inputs:
        raise PolicyError(
            f"{name}: the policy takes {mlp.inputs} numbers per observation, the log has shape {shape}; "
            "give a policy made for this log"
        )
    if is_discrete:
        return DiscretePolicy(size, mlp.discrete, name, shape, rows)
    if mlp.output != "gaussian":
        return ContinuousPolicy(size, mlp.mean, None, name, shape, rows)
    box = None
    if mlp.action_low is not None and mlp.action_high is not None:
        box = np.broadcast_to(mlp.action_low, size), np.broadcast_to(mlp.action_high, size)
    return ContinuousPolicy(size, mlp.mean, mlp.sample, name, shape, rows, mlp.log_density, box)
