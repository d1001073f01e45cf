"""Behavior probabilities estimated from the log, for logs that do not store them.

Discrete actions: multinomial logistic regression; continuous: a Gaussian whose mean and log deviation are
linear. Both on standardised observations and random Fourier features of them, with the penalty of the
highest held-out likelihood, and cross-fitted: no episode's probabilities come from a model that saw it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from scipy.optimize import minimize
from torch import Tensor

from koffline.data.transitions import Discrete, Transitions
from koffline.errors import DataError
from koffline.policies.distributions import at_bounds

_FREQUENCIES = 40
_PENALTIES = (math.inf, 1.0, 1e-1, 1e-2, 1e-3, 1e-4)  # infinite: the observation is ignored
_DEFAULT_PENALTY = 1e-1  # where nothing can be held out
_PATIENCE = 2  # penalties in a row that do not help
_FIT_ROWS = 10_000  # rows of one fit
_STEPS = {"maxiter": 60, "ftol": 1e-6}  # a warm start for the next penalty needs no more
_MOST_INPUTS = 4096
_FAR = 5.0  # standardised observations are cut here
_LOG_DEVIATIONS = (-6.0, 3.0)  # of standardised actions: a log with repeated actions has no density
_WARNING = (
    "Behavior probabilities were estimated from the log ({model}, {folds}; held-out log-likelihood "
    "{held_out:.3g} a row against {constant:.3g} without the observation): intervals leave that error out."
)

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
Box = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True, eq=False)
class Behavior:
    """Estimated log probabilities (N,) of the logged actions, with what a reader must know."""

    log_probabilities: Float[np.ndarray, " row"]
    warnings: tuple[str, ...]
    diagnostics: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class _Model:
    """``log_likelihood(parameters (p, q), features (n, p), actions)`` -> (n,)."""

    name: str
    outputs: int
    log_likelihood: Loss
    actions: Tensor
    log_unit: Float[np.ndarray, " row"]  # turns densities of standardised actions into those of the log's


def estimate_behavior(
    transitions: Transitions, folds: int = 2, seed: int = 0, cut_to: Box | None = None
) -> Behavior:
    """Cross-fitted log probabilities of the logged actions, densities of continuous ones.

    ``cut_to``: bounds at which actions count as cut off (see `koffline.policies.distributions`), as those of
    the policy they are to be compared with. Raises DataError for logs without episodes and for images.
    """
    if not transitions.has_episodes:
        raise DataError("estimating behavior probabilities needs episodes to hold out; add episode_ids")
    generator = np.random.default_rng([seed, 11])
    features = _features(transitions, generator)
    model = _model(transitions, cut_to)
    units = np.repeat(np.arange(transitions.n_episodes), transitions.episode_lengths)
    count = min(folds, transitions.n_episodes)
    fold_of_unit = generator.permutation(transitions.n_episodes) % max(count, 1)
    fold = fold_of_unit[units]
    if count < 2:
        penalty = _DEFAULT_PENALTY
        fitted = _fit(model, features, np.arange(len(features)), penalty, generator)
        logs = constant = _evaluate(model, fitted, features)
    else:
        logs, constant, penalty = _cross_fitted(model, features, fold, generator)
    description = f"{count}-fold cross-fitted by episode" if count > 1 else "on its only episode"
    warning = _WARNING.format(
        model=model.name, folds=description, held_out=float(logs.mean()), constant=float(constant.mean())
    )
    found = {
        "behavior_model": model.name,
        "behavior_penalty": penalty if math.isfinite(penalty) else None,
        "behavior_log_likelihood": float(logs.mean()),
        "behavior_log_likelihood_constant": float(constant.mean()),
    }
    return Behavior(logs, (warning,), found)


def share_at_bounds(transitions: Transitions, box: Box) -> float:
    """Share of rows with an action number on a bound of the box."""
    below, above = at_bounds(np.asarray(transitions.actions, np.float64), *box)
    return float((below | above).any(axis=1).mean())


def _cross_fitted(
    model: _Model,
    features: Float[np.ndarray, "row feature"],
    fold: Int[np.ndarray, " row"],
    generator: np.random.Generator,
) -> tuple[np.ndarray, np.ndarray, float]:
    """(N,) held-out log likelihoods of the best penalty, (N,) those of the constant model, the best penalty.

    From the strongest penalty down, each fit starting from the one before; it stops once two in a row get
    worse.
    """
    best = constant = np.full(len(features), -np.inf)
    best_penalty, failures = math.inf, 0
    parameters: dict[int, np.ndarray] = {}
    for penalty in _PENALTIES:
        logs = np.empty(len(features))
        for held_out in np.unique(fold).tolist():
            inside = np.flatnonzero(fold != held_out)
            start = parameters.get(held_out)
            parameters[held_out] = _fit(model, features, inside, penalty, generator, start)
            rows = fold == held_out
            logs[rows] = _evaluate(model, parameters[held_out], features)[rows]
        if math.isinf(penalty):
            constant = logs
        if logs.mean() > best.mean():
            best, best_penalty, failures = logs, penalty, 0
        else:
            failures += 1
        if failures == _PATIENCE:
            break
    return best, constant, best_penalty


def _fit(
    model: _Model,
    features: Float[np.ndarray, "row feature"],
    rows: Int[np.ndarray, " chosen"],
    penalty: float,
    generator: np.random.Generator,
    start: np.ndarray | None = None,
) -> np.ndarray:
    """Parameters (p, q) of the highest mean log likelihood minus penalty·Σw²; the constant is free."""
    used = 1 if math.isinf(penalty) else features.shape[1]
    if len(rows) > _FIT_ROWS:
        rows = generator.choice(rows, _FIT_ROWS, replace=False)
    inputs, actions = torch.from_numpy(features[rows, :used]), model.actions[torch.from_numpy(rows)]
    shape = (used, model.outputs)

    def objective(flat: np.ndarray) -> tuple[float, np.ndarray]:
        parameters = torch.from_numpy(flat.reshape(shape)).requires_grad_(True)
        with torch.enable_grad():
            loss = -model.log_likelihood(parameters, inputs, actions).mean()
            if used > 1:
                loss = loss + penalty * parameters[1:].square().sum()
            (gradient,) = torch.autograd.grad(loss, parameters)
        return float(loss.detach()), gradient.numpy().ravel()

    first = np.zeros(shape).ravel() if start is None else start[:used].ravel()
    found = minimize(objective, first, jac=True, method="L-BFGS-B", options=_STEPS)
    parameters = np.zeros((features.shape[1], model.outputs))
    parameters[:used] = found.x.reshape(shape)
    return parameters


def _evaluate(
    model: _Model, parameters: np.ndarray, features: Float[np.ndarray, "row feature"]
) -> Float[np.ndarray, " row"]:
    with torch.no_grad():
        logs = model.log_likelihood(torch.from_numpy(parameters), torch.from_numpy(features), model.actions)
    return logs.numpy() + model.log_unit


def _features(transitions: Transitions, generator: np.random.Generator) -> Float[np.ndarray, "row feature"]:
    """(N, 1 + d + 2m): one, standardised observations, cosines and sines at the scale of median distances."""
    raw = np.asarray(transitions.observations, dtype=np.float64).reshape(len(transitions), -1)
    if raw.shape[1] > _MOST_INPUTS:
        raise DataError(
            f"observations have {raw.shape[1]} numbers each, more than {_MOST_INPUTS}: behavior "
            "probabilities cannot be estimated from them; store behavior_log_probabilities in the log"
        )
    spread = raw.std(axis=0)
    standard = (raw - raw.mean(axis=0)) / np.where(spread > 1e-8 * np.abs(raw).max(axis=0), spread, 1.0)
    standard = np.clip(standard, -_FAR, _FAR)
    pairs = generator.integers(len(raw), size=(2, 2000))
    distances = np.linalg.norm(standard[pairs[0]] - standard[pairs[1]], axis=1)
    scale = float(np.median(distances[distances > 0.0])) if (distances > 0.0).any() else 1.0
    # Half of the frequencies at the median distance, half at a third of it: smooth and sharp changes.
    widths = np.where(np.arange(_FREQUENCIES) % 2 == 0, scale, scale / 3.0)
    waves = generator.standard_normal((raw.shape[1], _FREQUENCIES)) / widths
    angles = standard @ waves  # (N, d) @ (d, m) = (N, m)
    return np.concatenate([np.ones((len(raw), 1)), standard, np.cos(angles), np.sin(angles)], axis=1)


def _model(transitions: Transitions, cut_to: Box | None) -> _Model:
    space = transitions.action_space
    if isinstance(space, Discrete):
        actions = torch.from_numpy(np.array(transitions.actions, dtype=np.int64))
        unit = np.zeros(len(transitions))
        return _Model("multinomial logistic", space.n, _categorical_log_likelihood, actions, unit)
    raw = np.asarray(transitions.actions, dtype=np.float64)
    spread = np.maximum(raw.std(axis=0), 1e-8 * np.maximum(np.abs(raw).max(axis=0), 1.0))
    centre = raw.mean(axis=0)
    place = np.zeros(raw.shape)
    name, bounds = "conditional Gaussian", (np.full(space.k, -np.inf), np.full(space.k, np.inf))
    if cut_to is not None:
        below, above = at_bounds(raw, *cut_to)
        place = above.astype(np.float64) - below
        name, bounds = "conditional Gaussian cut off at the bounds", cut_to
    low, high = (torch.from_numpy((side - centre) / spread) for side in bounds)
    columns = torch.from_numpy(np.stack([(raw - centre) / spread, place], axis=2))
    unit = -np.where(place == 0.0, np.log(spread), 0.0).sum(axis=1)
    return _Model(name, 2 * space.k, partial(_gaussian_log_likelihood, low=low, high=high), columns, unit)


def _categorical_log_likelihood(parameters: Tensor, features: Tensor, actions: Tensor) -> Tensor:
    logits = features @ parameters  # (n, p) @ (p, a) = (n, a)
    return torch.log_softmax(logits, dim=1).gather(1, actions[:, None]).squeeze(1)


def _gaussian_log_likelihood(
    parameters: Tensor, features: Tensor, actions: Tensor, low: Tensor, high: Tensor
) -> Tensor:
    """(n,) of actions (n, k, 2): the number, and −1, 0 or 1 for below, between or above the bounds."""
    mean, log_deviation = (features @ parameters).chunk(2, dim=1)
    log_deviation = log_deviation.clamp(*_LOG_DEVIATIONS)
    deviation = log_deviation.exp()
    numbers, place = actions.unbind(dim=2)
    scaled = (numbers - mean) / deviation
    inside = -0.5 * scaled.square() - log_deviation - 0.5 * math.log(2.0 * math.pi)
    if not place.any():
        return inside.sum(dim=1)
    beyond = torch.where(place < 0.0, low - mean, mean - high) / deviation
    return torch.where(place == 0.0, inside, torch.special.log_ndtr(beyond)).sum(dim=1)
