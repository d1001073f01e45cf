"""Uniform policies, mixtures with them, small networks, and densities of Gaussian
actions; in float64.

If draws are cut off at a bound, the bound has positive probability. The density is then
taken with respect to volume inside the bounds plus a unit point mass at each bound.
Ratios of two such densities are importance ratios if both have the same bounds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from koffline.data.transitions import ActionSpace, Continuous, Discrete
from koffline.errors import PolicyError
from koffline.policies.base import (
    Actions,
    ContinuousPolicy,
    DiscretePolicy,
    Policy,
    check_spaces,
)

CHOICES = {
    "output": ("softmax", "argmax", "tanh", "identity", "gaussian"),
    "activation": ("relu", "tanh"),
}
VECTORS = ("observation_mean", "observation_std", "std", "action_low", "action_high")
_NEAR = 1e-6  # tolerance relative to the box: actions were stored as float32
_LARGEST_SQUASHED = 1.0 - 1e-6  # tanh of anything beyond 7.25 is stored as ±1
_HALF_LOG_TAU = 0.5 * float(np.log(2.0 * np.pi))
_ZERO = np.float64(0.0)
_ONE = np.float64(1.0)


def uniform_policy(
    action_space: ActionSpace, observation_shape: Sequence[int]
) -> Policy:
    """Equal probabilities, or the uniform distribution within the bounds of a
    continuous space.

    Raises PolicyError if a bound is infinite.
    """
    shape = tuple(observation_shape)
    if isinstance(action_space, Discrete):
        n = action_space.n
        return DiscretePolicy(
            n, lambda rows: np.full((len(rows), n), 1.0 / n), "uniform", shape
        )
    low, high = finite_box(action_space, "uniform")

    def sample(observations: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        return generator.uniform(low, high, (len(observations), action_space.k))

    def log_density(observations: np.ndarray, actions: np.ndarray) -> np.ndarray:
        return _uniform_log_density(actions, low, high)

    return ContinuousPolicy(action_space.k, None, sample, "uniform", shape, log_density)


def epsilon_policy(epsilon: float, base: Policy, action_space: ActionSpace) -> Policy:
    """Mixture: with probability epsilon a uniform action, otherwise the base policy's.

    Raises PolicyError if a bound of continuous actions is infinite.
    """
    name = f"epsilon:{epsilon:g}:{base.name}"
    if isinstance(base, DiscretePolicy):
        n = base.n

        def probabilities(
            observations: np.ndarray, action_mask: np.ndarray | None = None
        ) -> np.ndarray:
            of_base = base.unmasked_probabilities(observations, action_mask)
            return epsilon / n + (1.0 - epsilon) * of_base

        return DiscretePolicy(
            n,
            probabilities,
            name,
            base.observation_shape,
            takes_mask=base.takes_mask,
        )
    assert isinstance(action_space, Continuous), (
        "the base policy was checked against the space"
    )
    if epsilon == 0.0:
        return base
    low, high = finite_box(action_space, name)

    def sample(observations: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        actions = base.sample(observations, generator)
        explore = generator.random((len(actions), 1)) < epsilon
        return np.where(explore, generator.uniform(low, high, actions.shape), actions)

    def log_density(observations: np.ndarray, actions: np.ndarray) -> np.ndarray:
        uniform = math.log(epsilon) + _uniform_log_density(actions, low, high)
        if base.cut_to is not None:
            # A uniform draw never equals a bound, where the base
            # policy may have positive probability.
            below, above = at_bounds(actions, *base.cut_to)
            uniform = np.where((below | above).any(axis=1), -np.inf, uniform)
        if epsilon == 1.0:
            return uniform
        return np.logaddexp(
            uniform, math.log1p(-epsilon) + base.log_density(observations, actions)
        )

    density = None if base.why_no_density else log_density
    return ContinuousPolicy(
        base.k, None, sample, name, base.observation_shape, density, base.cut_to
    )


def finite_box(action_space: Continuous, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Lower and upper action bounds, (k,) each.

    Raises PolicyError if one is infinite.
    """
    low = np.array(action_space.low)
    high = np.array(action_space.high)
    if not (np.isfinite(low).all() and np.isfinite(high).all()):
        raise PolicyError(
            f"{name}: a uniform action needs finite bounds, the log declares"
            f" low={action_space.low} and high={action_space.high}; declare them"
            " (--continuous LOW HIGH)"
        )
    return low, high


def _uniform_log_density(
    actions: np.ndarray, low: np.ndarray, high: np.ndarray
) -> np.ndarray:
    """Log density (N,) of actions (N, k) under the uniform distribution within bounds
    (k,); −inf outside, up to float32 rounding.
    """
    slack = _NEAR * (high - low)
    inside = ((actions >= low - slack) & (actions <= high + slack)).all(axis=1)
    return np.where(inside, -float(np.log(high - low).sum()), -np.inf)


def at_bounds(
    actions: Actions, low: np.ndarray, high: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Masks of actions on the lower and the upper bound, up to rounding; infinite
    bounds have no actions.
    """
    low = np.broadcast_to(low, actions.shape[1:])
    high = np.broadcast_to(high, actions.shape[1:])
    slack = _NEAR * np.where(np.isfinite(high - low), high - low, 0.0)
    return actions <= low + slack, actions >= high - slack


def gaussian_log_density(
    actions: Actions,
    mean: np.ndarray,
    deviation: np.ndarray,
    low: np.ndarray | float | None = None,
    high: np.ndarray | float | None = None,
) -> Float[np.ndarray, " row"]:
    """log N(a; mean, deviation²) summed over dimensions; at a bound, the log of the
    probability beyond it.

    ``mean``, ``deviation``, ``low``, ``high``: scalar, (k,) or (N, k). −inf for actions
    outside the bounds.
    """
    scaled = (actions - mean) / deviation
    logs = -0.5 * np.square(scaled) - np.log(deviation) - _HALF_LOG_TAU
    if low is not None and high is not None:
        from scipy.special import log_ndtr  # takes as long as all of koffline to import

        below, above = at_bounds(actions, np.asarray(low), np.asarray(high))
        logs = np.where(below, log_ndtr((low - mean) / deviation), logs)
        logs = np.where(above, log_ndtr((mean - high) / deviation), logs)
        slack = _NEAR * (np.asarray(high) - np.asarray(low))
        logs = np.where(
            (actions < low - slack) | (actions > high + slack), -np.inf, logs
        )
    return logs.sum(axis=1)


def squashed_gaussian_log_density(
    actions: Actions, mean: Actions, deviation: np.ndarray
) -> Float[np.ndarray, " row"]:
    """Log density of tanh(z), z ~ N(mean, deviation²), summed over dimensions; −inf
    outside [−1, 1].
    """
    inside = np.clip(actions, -_LARGEST_SQUASHED, _LARGEST_SQUASHED)
    logs = gaussian_log_density(np.arctanh(inside), mean, deviation)
    logs = logs - np.log1p(-np.square(inside)).sum(axis=1)
    return np.where((np.abs(actions) > 1.0 + _NEAR).any(axis=1), -np.inf, logs)


@dataclass(frozen=True, eq=False)
class Mlp:
    """A small network: layers and an output function. Raises PolicyError if they do not
    fit.

    weights: one (in, out) array per layer; biases: one (out,) array per layer;
    `activation` between layers. One layer is a linear policy, or a table for one-hot
    observations. output: "softmax" (probabilities of last layer / temperature),
    "argmax" (its first maximum), "tanh" (scaled to the action bounds, if given),
    "identity" (clipped to the action bounds, if given), or "gaussian" (mean = last
    layer, standard deviation `std`; mean and draws are clipped like it). observation_mean,
    observation_std: scalar or (in,); observations are flattened, centred and divided
    first. std, action_low, action_high: scalar or (k,).
    """

    weights: tuple[np.ndarray, ...]
    biases: tuple[np.ndarray, ...]
    output: str
    activation: str = "relu"
    temperature: float = 1.0
    observation_mean: np.ndarray | np.float64 = _ZERO
    observation_std: np.ndarray | np.float64 = _ONE
    std: np.ndarray | None = None
    action_low: np.ndarray | None = None
    action_high: np.ndarray | None = None

    def __post_init__(self) -> None:
        for setting, choices in CHOICES.items():
            choice = getattr(self, setting)
            if choice not in choices:
                raise PolicyError(
                    f"{setting} is {choice!r}; give one of {', '.join(choices)}"
                )
        self._check_layers()
        for setting in VECTORS:
            if getattr(self, setting) is not None:
                self._check_vector(setting)
        if not 0 < self.temperature < math.inf:
            raise PolicyError(
                f"temperature is {self.temperature}; give a positive number"
            )
        if (self.std is None) == (self.output == "gaussian"):
            raise PolicyError('std; give it with output "gaussian", and only there')
        self._check_bounds()

    def _check_layers(self) -> None:
        """Raise PolicyError unless each layer fits the one before and is finite."""
        width = None  # outputs of the layer before
        for layer, (weight, bias) in enumerate(
            zip(self.weights, self.biases, strict=True)
        ):
            is_layer = (
                weight.ndim == 2 and weight.size > 0 and bias.shape == weight.shape[1:]
            )
            if not is_layer or width not in (None, len(weight)):
                raise PolicyError(
                    f"layer {layer}: W{layer} has shape {weight.shape}, b{layer}"
                    f" {bias.shape}; give (in, out) and (out,), `in` the layer before's"
                    " `out`"
                )
            if not (np.isfinite(weight).all() and np.isfinite(bias).all()):
                raise PolicyError(f"layer {layer}: give finite weights")
            width = weight.shape[1]

    def _check_vector(self, setting: str) -> None:
        """Raise PolicyError unless a setting is one number or one for each input or
        output, finite, and positive if it is a standard deviation.
        """
        value = getattr(self, setting)
        size = self.outputs
        if setting.startswith("observation"):
            size = self.inputs
        least = -math.inf
        kind = "finite"
        if setting.endswith("std"):
            least = 0.0
            kind = "positive"
        has_shape = value.shape in ((), (size,))
        if not has_shape or not ((value > least) & (value < math.inf)).all():
            raise PolicyError(
                f"{setting} is {value}; give {kind} numbers, one or {size}"
            )

    def _check_bounds(self) -> None:
        """Raise PolicyError for action bounds that are crossed, lack the other, or
        belong to an output that has none.
        """
        low = self.action_low
        high = self.action_high
        if low is None and high is None:
            return
        is_box = low is not None and high is not None and bool(np.all(low < high))
        if not is_box or self.output not in ("tanh", "identity", "gaussian"):
            raise PolicyError(
                "action_low and action_high: give both, lower bounds below upper ones,"
                ' and only for output "tanh", "identity" or "gaussian"'
            )

    @property
    def inputs(self) -> int:
        """Numbers in one flattened observation."""
        return int(self.weights[0].shape[0])

    @property
    def outputs(self) -> int:
        """Number of actions, or action dimensions."""
        return int(self.weights[-1].shape[1])

    def last_layer(self, observations: np.ndarray) -> Actions:
        """Values (N, out) of the last layer, float64."""
        x = observations.reshape(len(observations), self.inputs).astype(np.float64)
        x = (x - self.observation_mean) / self.observation_std
        for layer, (weight, bias) in enumerate(
            zip(self.weights, self.biases, strict=True)
        ):
            if layer:
                if self.activation == "relu":
                    x = np.maximum(x, 0.0)
                else:
                    x = np.tanh(x)
            x = x @ weight + bias  # (N, in) @ (in, out) + (out,)
        return x

    def discrete(self, observations: np.ndarray) -> np.ndarray:
        """Probabilities (N, n) for "softmax", actions (N,) of the first maximum for
        "argmax".
        """
        values = self.last_layer(observations)
        if self.output == "argmax":
            return values.argmax(axis=1)
        return softmax(values, self.temperature)

    def mean(self, observations: np.ndarray) -> np.ndarray:
        """Mean actions (N, k)."""
        values = self.last_layer(observations)
        if self.output != "tanh":
            return self._clipped(values)
        values = np.tanh(values)
        if self.action_low is None or self.action_high is None:
            return values
        return self.action_low + (values + 1.0) / 2.0 * (
            self.action_high - self.action_low
        )

    def sample(
        self, observations: np.ndarray, generator: np.random.Generator
    ) -> np.ndarray:
        """Draws (N, k) of the "gaussian" output; the noise is added before clipping."""
        assert self.std is not None, "checked with the output when constructed"
        values = self.last_layer(observations)
        return self._clipped(
            values + self.std * generator.standard_normal(values.shape)
        )

    def log_density(self, observations: np.ndarray, actions: np.ndarray) -> np.ndarray:
        """Log density (N,) of the "gaussian" output; bounds have the probability of
        what is cut off.
        """
        assert self.std is not None, "checked with the output when constructed"
        mean = self.last_layer(observations)
        return gaussian_log_density(
            actions, mean, self.std, self.action_low, self.action_high
        )

    def _clipped(self, actions: np.ndarray) -> np.ndarray:
        if self.action_low is None:
            return actions
        return np.clip(actions, self.action_low, self.action_high)


def mlp_policy(
    mlp: Mlp, name: str, action_space: ActionSpace, observation_shape: Sequence[int]
) -> Policy:
    """The network as a policy for a log's spaces.

    name: the policy's, for messages. observation_shape: of one observation. Raises
    PolicyError if the network's sizes or output do not fit.
    """
    shape = tuple(observation_shape)
    size = mlp.outputs
    is_discrete = mlp.output in ("softmax", "argmax")
    actions: ActionSpace
    if is_discrete:
        actions = Discrete(size)
    else:
        actions = Continuous(size)
    check_spaces(name, (actions, None), (action_space, shape))
    if math.prod(shape) != mlp.inputs:
        raise PolicyError(
            f"{name}: the policy takes {mlp.inputs} numbers per observation, the log"
            f" has shape {shape}; give a policy made for this log"
        )
    if is_discrete:
        return DiscretePolicy(size, mlp.discrete, name, shape)
    if mlp.output != "gaussian":
        return ContinuousPolicy(size, mlp.mean, None, name, shape)
    box = None
    if mlp.action_low is not None and mlp.action_high is not None:
        box = (
            np.broadcast_to(mlp.action_low, size),
            np.broadcast_to(mlp.action_high, size),
        )
    return ContinuousPolicy(
        size, mlp.mean, mlp.sample, name, shape, mlp.log_density, box
    )


def softmax(values: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """Softmax (N, n) of values / temperature, stable for large values."""
    raised = np.exp((values - values.max(axis=1, keepdims=True)) / temperature)
    return raised / raised.sum(axis=1, keepdims=True)
