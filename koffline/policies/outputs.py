"""Models whose outputs are no probabilities: logits and action values, by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from numbers import Real
from typing import Any

import numpy as np
from jaxtyping import Float

from koffline.errors import PolicyError
from koffline.policies.base import as_numbers

Outputs = Float[np.ndarray, "row action"]


class OutputPolicy:
    """A model of observations whose outputs (N, n) are turned into probabilities (N,
    n) of the discrete actions, in their order.

    ``model``: a torch module or a function; `koffline.policy_specs` calls it.
    """

    def __init__(
        self, model: Callable[..., object], convert: Callable[[Outputs], Outputs]
    ) -> None:
        self.model = model
        self._convert = convert
        self.is_network = bool(getattr(model, "is_network", False))
        self.__name__ = str(getattr(model, "__name__", type(model).__name__))
        library = getattr(model, "frame_library", None)
        if library is not None:
            self.frame_library = library
        with suppress(TypeError, ValueError):  # a callable without a signature
            self.__signature__ = inspect.signature(model)

    def of(self, model: Callable[..., object]) -> OutputPolicy:
        """The same of another model."""
        return OutputPolicy(model, self._convert)

    def __call__(
        self, observations: object, action_mask: np.ndarray | None = None
    ) -> Outputs:
        """Probabilities (N, n); actions that ``action_mask`` (N, n) rules out count as
        outputs of −inf. Raises PolicyError for outputs of another shape.
        """
        raw = self.model(observations)
        if hasattr(raw, "columns") or isinstance(raw, Mapping):
            raise PolicyError(
                f"{self.__name__}: its output has named columns, whose order may be"
                " another one than that of the log's actions; return an array (N, n)"
            )
        outputs = as_numbers(raw).astype(np.float64)
        if outputs.ndim != 2:
            raise PolicyError(
                f"{self.__name__}: its output has shape {outputs.shape}; return one"
                " column per action, (N, n)"
            )
        if action_mask is not None and action_mask.shape == outputs.shape:
            outputs = np.where(action_mask, outputs, -np.inf)
        return self._convert(outputs)


def softmax_policy(logits: object, temperature: Any = 1.0) -> OutputPolicy:
    """The stochastic policy softmax(logits / temperature) of a model.

    logits: a torch module or a function, from observations (N, …) to (N, n), one column
    per discrete action in the order of the log's actions; −inf rules an action out.
    Raises PolicyError for what cannot be called, or a temperature that is not positive.
    """
    model = _callable(logits, "softmax_policy")
    is_number = isinstance(temperature, Real) and not isinstance(temperature, bool)
    if not is_number or not temperature > 0.0:
        raise PolicyError(
            f"softmax_policy has temperature {temperature!r}; give a positive number"
        )

    def convert(outputs: Outputs) -> Outputs:
        scaled = outputs / temperature
        with np.errstate(invalid="ignore"):  # not finite: refused by its row
            shifted = np.exp(scaled - scaled.max(axis=1, keepdims=True))
            return shifted / shifted.sum(axis=1, keepdims=True)

    return OutputPolicy(model, convert)


def greedy_policy(values: object) -> OutputPolicy:
    """The deterministic policy that takes the action of the largest output of a model,
    the first of several equal ones.

    values: as ``logits`` of `softmax_policy`: action values, logits or scores. Raises
    PolicyError for what cannot be called.
    """
    model = _callable(values, "greedy_policy")

    def convert(outputs: Outputs) -> Outputs:
        chosen = np.eye(outputs.shape[1])[outputs.argmax(axis=1)]
        has_number = np.isfinite(outputs.max(axis=1, keepdims=True))
        return np.where(has_number, chosen, np.nan)  # refused by its row

    return OutputPolicy(model, convert)


def _callable(model: object, name: str) -> Callable[..., object]:
    """The model, if it can be called. name: of the function that takes it. Raises
    PolicyError.
    """
    if not callable(model) or isinstance(model, type):
        raise PolicyError(
            f"{name} takes a torch module or a function of observations, and received"
            f" {model!r}"[:200]
        )
    return model
