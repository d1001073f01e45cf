"""Ratios π(a|s) / β(a|s) of logged actions, as logarithms; β is estimated for logs that
do not store it.

The model is one of scikit-learn's (`koffline.ope.importance.classifiers`), or
multinomial logistic regression, or a Gaussian with linear mean and log
deviation, on standardised observations and their random Fourier features. The penalty
with the highest held-out likelihood is chosen. Models are cross-fitted: no episode's
probabilities come from a model that was fitted to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from scipy.optimize import minimize
from scipy.special import softmax
from torch import Tensor
from torch.nn.functional import cross_entropy

from koffline.data.transitions import Continuous, Discrete, Transitions
from koffline.errors import DataError, PolicyError
from koffline.ope import thresholds
from koffline.ope.importance.classifiers import (
    as_classifier,
    calibration,
    held_out_chances,
)
from koffline.policies import ContinuousPolicy, DiscretePolicy
from koffline.policies.builtin import at_bounds

FROM_LOG = "log"
ESTIMATED = "estimate"
AUTO = "auto"
_DEVIATIONS = 5.0
# share of actions on the bounds above which densities need point masses there
_AT_BOUNDS = 0.01
_FREQUENCIES = 40
# an infinite penalty ignores the observation
_PENALTIES = (
    math.inf,
    1.0,
    1e-1,
    1e-2,
    1e-3,
    1e-4,
)
_DEFAULT_PENALTY = 1e-1  # penalty if no fold can be held out
_PATIENCE = 2  # successive penalties without improvement
_FIT_ROWS = 10_000  # most rows of one fit
_STEPS = {"maxiter": 60, "ftol": 1e-6}  # enough for a warm start of the next penalty
_MOST_INPUTS = 4096
_FAR = 5.0  # bound of standardised observations
# range for standardised actions: repeated ones have no density
_LOG_DEVIATIONS = (
    -6.0,
    3.0,
)
_WARNING = (
    "Behavior probabilities were estimated from the log ({behavior_model}, {folds};"
    " held-out log-likelihood {behavior_log_likelihood:.3g} a row against"
    " {behavior_log_likelihood_constant:.3g} without the observation): intervals leave"
    " that error out."
)
_CALIBRATED = (
    " Chances of actions are off by {behavior_calibration_error:.1%} on average"
    " (calibration, {folds})."
)


@dataclass(frozen=True, eq=False)
class Ratios:
    """``logs`` (N,): log π(a|s) − log β(a|s), −inf where the policy never takes the
    logged action.
    ``is_estimated``: β was estimated from the log; bounds that need exact probabilities
    do not hold.
    """

    logs: Float[np.ndarray, " row"]
    is_estimated: bool
    warnings: tuple[str, ...] = ()
    diagnostics: dict[str, Any] = field(default_factory=dict)


def importance_ratios(
    transitions: Transitions,
    policy: DiscretePolicy | ContinuousPolicy,
    behavior: str = AUTO,
    seed: int = 0,
    target: Float[np.ndarray, " row"] | None = None,
    behavior_model: Any = None,
) -> Ratios:
    """Ratios of the log's actions, with β from the log (``"log"``) or estimated
    (``"estimate"``).

    ``"auto"`` uses the log's probabilities if it has them. target: log π(a|s), if
    known. behavior_model: a classifier that estimates chances of discrete actions
    (`koffline.ope.importance.classifiers.as_classifier`); None: our own. Raises
    DataError if the log's probabilities are missing, PolicyError for a
    policy without probabilities of actions.
    """
    if target is None:
        target = action_log_probabilities(transitions, policy)
    logged = transitions.behavior_log_probabilities
    if logged is None and behavior == FROM_LOG:
        raise DataError(
            "the log has no behavior_log_probabilities; store them, or set"
            " behavior='estimate'"
        )
    at_bounds = _warnings_at_bounds(transitions, policy)
    if logged is not None and behavior != ESTIMATED:
        logs = target - np.asarray(logged, dtype=np.float64)
        deviations = _warnings_of_logged(logs, transitions.row_weights)
        return Ratios(
            logs,
            False,
            (*deviations, *at_bounds),
            {"behavior": FROM_LOG, "probabilities": list(deviations)},
        )
    cut_to = None
    if isinstance(policy, ContinuousPolicy):
        cut_to = policy.cut_to
    logs, diagnostics = estimate_behavior(
        transitions, seed=seed, cut_to=cut_to, classifier=behavior_model
    )
    folds = "on its only episode"
    if transitions.n_episodes > 1:
        folds = "2-fold cross-fitted by episode"
    warning = _WARNING.format(folds=folds, **diagnostics)
    if "behavior_calibration_error" in diagnostics:
        warning += _CALIBRATED.format(folds=folds, **diagnostics)
    doubts = []
    if behavior_model is not None:
        error = diagnostics["behavior_calibration_error"]
        if error > thresholds.POOR_CALIBRATION:
            doubts.append(
                f"chances of actions by {diagnostics['behavior_model']} are off by"
                f" {error:.0%} on average: it does not fit the behavior policy"
            )
    return Ratios(
        target - logs,
        True,
        (warning, *at_bounds),
        {"behavior": ESTIMATED, "probabilities": doubts, **diagnostics},
    )


def action_log_probabilities(
    transitions: Transitions, policy: DiscretePolicy | ContinuousPolicy
) -> Float[np.ndarray, " row"]:
    """Log-probabilities (N,) of the logged actions, log densities if continuous.

    Raises PolicyError.
    """
    if isinstance(policy, DiscretePolicy):
        probabilities = policy.probabilities(
            transitions.observations, transitions.action_mask
        )
        taken = probabilities[
            np.arange(len(transitions)), np.asarray(transitions.actions)
        ]
        with np.errstate(divide="ignore"):
            return np.log(taken)
    if policy.why_no_density:
        raise PolicyError(
            f"{policy.name}: {policy.why_no_density}; importance ratios need the"
            " density of logged actions: use an estimator that asks the policy for"
            " actions (kloss, fqe, mwl)"
        )
    return policy.log_density(transitions.observations, np.asarray(transitions.actions))


def _warnings_of_logged(
    logs: Float[np.ndarray, " row"], weights: Float[np.ndarray, " row"]
) -> tuple[str, ...]:
    """Warning if the log's own probabilities do not give ratios of weighted mean
    one.
    """
    # squares stay finite
    ratios = np.exp(np.minimum(logs, 300.0))
    shares = weights / weights.sum()
    mean = float(shares @ ratios)
    if len(ratios) > 1:
        error = float(np.linalg.norm(shares * (ratios - mean)))
    else:
        error = np.inf
    if abs(mean - 1.0) <= _DEVIATIONS * error + 1e-3:
        return ()
    return (
        f"Ratios of policy to behavior average {mean:.4g} ± {error:.2g}, not 1: the"
        " logged probabilities are not those of the logged actions, or the policy takes"
        " unlogged ones.",
    )


def _warnings_at_bounds(
    transitions: Transitions, policy: DiscretePolicy | ContinuousPolicy
) -> tuple[str, ...]:
    """Warnings on actions at the bounds, where policy and behaviour must both have
    point masses.
    """
    space = transitions.action_space
    if not isinstance(space, Continuous) or not isinstance(policy, ContinuousPolicy):
        return ()
    actions = np.asarray(transitions.actions, np.float64)
    below, above = at_bounds(actions, np.asarray(space.low), np.asarray(space.high))
    share = float((below | above).any(axis=1).mean())
    if share <= _AT_BOUNDS:
        return ()
    if policy.cut_to and transitions.behavior_log_probabilities is None:
        return ()  # the behavior policy is estimated with the same bounds
    consequence = (
        "logged densities must count the probability of being cut off there, as the"
        " policy's do"
    )
    if policy.cut_to is None:
        consequence = (
            "the policy's draws do not collect there: their weights are not to be"
            " trusted"
        )
    return (f"{share:.1%} of the actions lie on the bounds: {consequence}.",)


def estimate_behavior(
    transitions: Transitions,
    seed: int = 0,
    cut_to: Any = None,
    classifier: Any = None,
) -> tuple[Float[np.ndarray, " row"], dict[str, Any]]:
    """Cross-fitted log-probabilities (log densities if continuous) of logged actions,
    and their diagnostics.

    ``cut_to``: bounds at which actions are cut off (see `koffline.policies.builtin`),
    as for the policy they are compared with. ``classifier``: as in
    `koffline.ope.importance.classifiers.as_classifier`, in place of our own model.
    Raises DataError for logs without episodes and, without a classifier, for images.
    """
    if not transitions.has_episodes:
        raise DataError(
            "estimating behavior probabilities needs episodes to hold out; add"
            " episode_ids"
        )
    generator = np.random.default_rng([seed, 11])
    if classifier is not None:
        return _estimated_by_classifier(transitions, classifier, seed, generator)
    model = _model(transitions, cut_to, _features(transitions, generator), generator)
    if transitions.n_episodes < 2:
        penalty = _DEFAULT_PENALTY
        parameters = model.fit(np.arange(len(transitions)), penalty)
        logs = model.evaluate(parameters)
        constant = logs
        fold = np.zeros(len(transitions), dtype=int)
        parameters_of = {0: parameters}
    else:
        fold = _halves(transitions, generator)
        logs, constant, penalty, parameters_of = _cross_fitted(model, fold)
    calibrated: dict[str, Any] = {}
    if isinstance(transitions.action_space, Discrete):
        chances = model.chances(parameters_of, fold)
        calibrated = calibration(chances, np.asarray(transitions.actions))
    finite_penalty = None
    if math.isfinite(penalty):  # an infinite one leaves the constant alone
        finite_penalty = penalty
    return logs, {
        "behavior_model": model.name,
        "behavior_penalty": finite_penalty,
        "behavior_log_likelihood": float(logs.mean()),
        "behavior_log_likelihood_constant": float(constant.mean()),
        **calibrated,
    }


def _halves(
    transitions: Transitions, generator: np.random.Generator
) -> Int[np.ndarray, " row"]:
    """The fold of each row, 0 or 1; the rows of an episode share it."""
    halves = generator.permutation(transitions.n_episodes) % 2
    return np.repeat(halves, transitions.episode_lengths)


def _estimated_by_classifier(
    transitions: Transitions,
    model: Any,
    seed: int,
    generator: np.random.Generator,
) -> tuple[Float[np.ndarray, " row"], dict[str, Any]]:
    """As `estimate_behavior`, by a classifier (`as_classifier`); the constant model
    has the actions' shares in the other fold, each action counted once more.
    """
    classifier = as_classifier(model, seed)
    fold = None
    if transitions.n_episodes > 1:
        fold = _halves(transitions, generator)
    chances = held_out_chances(classifier, transitions, fold)
    shares = held_out_chances(None, transitions, fold)
    actions = np.asarray(transitions.actions, dtype=np.int64)
    rows = np.arange(len(actions))
    logs = np.log(chances[rows, actions])
    constant = np.log(shares[rows, actions])
    return logs, {
        "behavior_model": " ".join(repr(classifier).split()),
        "behavior_log_likelihood": float(logs.mean()),
        "behavior_log_likelihood_constant": float(constant.mean()),
        **calibration(chances, actions),
    }


@dataclass(frozen=True, eq=False)
class _Model:
    """``log_likelihood(parameters (p, q), features (n, p), actions)`` -> (n,);
    ``features``: of all rows. ``available``: masks of actions, to which chances are
    restricted; None if all always are.
    """

    name: str
    outputs: int
    log_likelihood: Callable[[Tensor, Tensor, Tensor], Tensor]
    actions: Tensor
    # turns densities of standardised actions into those of the log's
    log_unit: Float[np.ndarray, " row"]
    features: Float[np.ndarray, "row feature"]
    generator: np.random.Generator
    available: Bool[np.ndarray, "row action"] | None = None

    def evaluate(self, parameters: np.ndarray) -> Float[np.ndarray, " row"]:
        """Log likelihoods of all rows."""
        features = torch.from_numpy(self.features)
        with torch.no_grad():
            logs = self.log_likelihood(
                torch.from_numpy(parameters), features, self.actions
            )
        return logs.numpy() + self.log_unit

    def chances(
        self, parameters: dict[int, np.ndarray], fold: Int[np.ndarray, " row"]
    ) -> Float[np.ndarray, "row action"]:
        """Chances of all discrete actions in each row, by the parameters of its
        fold.
        """
        chances = np.empty((len(fold), self.outputs))
        for held_out, of_fold in parameters.items():
            rows = fold == held_out
            logits = self.features[rows] @ of_fold
            if self.available is not None:
                logits = np.where(self.available[rows], logits, -np.inf)
            chances[rows] = softmax(logits, axis=1)
        return chances

    def fit(
        self,
        rows: Int[np.ndarray, " chosen"],
        penalty: float,
        start: np.ndarray | None = None,
    ) -> np.ndarray:
        """Parameters (p, q) that maximise mean log likelihood − penalty·Σw²; the
        constant has no penalty.
        """
        used = self.features.shape[1]
        if math.isinf(penalty):
            used = 1
        if len(rows) > _FIT_ROWS:
            rows = self.generator.choice(rows, _FIT_ROWS, replace=False)
        inputs = torch.from_numpy(self.features[rows, :used])
        actions = self.actions[torch.from_numpy(rows)]
        if start is None:
            parameters = np.zeros((self.features.shape[1], self.outputs))
        else:
            parameters = start.copy()

        def objective(flat: np.ndarray) -> tuple[float, np.ndarray]:
            moving = torch.from_numpy(flat.reshape(used, self.outputs)).requires_grad_(
                True
            )
            with torch.enable_grad():
                loss = -self.log_likelihood(moving, inputs, actions).mean()
                if used > 1:
                    loss = loss + penalty * moving[1:].square().sum()
                (gradient,) = torch.autograd.grad(loss, moving)
            return float(loss.detach()), gradient.numpy().ravel()

        fit = minimize(
            objective,
            parameters[:used].ravel(),
            jac=True,
            method="L-BFGS-B",
            options=_STEPS,
        )
        parameters[:used] = fit.x.reshape(used, self.outputs)
        return parameters


def _cross_fitted(
    model: _Model, fold: Int[np.ndarray, " row"]
) -> tuple[np.ndarray, np.ndarray, float, dict[int, np.ndarray]]:
    """Held-out log likelihoods (N,) of the best penalty and of the constant model, the
    best penalty, and its parameters by fold.

    Penalties are tried from the strongest down, each fit starting from the one before,
    until two in a row are worse.
    """
    best = constant = np.full(len(fold), -np.inf)
    best_penalty = math.inf
    failures = 0
    parameters: dict[int, np.ndarray] = {}
    best_parameters: dict[int, np.ndarray] = {}
    for penalty in _PENALTIES:
        logs = np.empty(len(fold))
        for held_out in np.unique(fold).tolist():
            rows = fold == held_out
            parameters[held_out] = model.fit(
                np.flatnonzero(~rows), penalty, parameters.get(held_out)
            )
            logs[rows] = model.evaluate(parameters[held_out])[rows]
        if math.isinf(penalty):
            constant = logs
        failures += 1
        if logs.mean() > best.mean():
            best = logs
            best_penalty = penalty
            best_parameters = dict(parameters)
            failures = 0
        if failures == _PATIENCE:
            break
    return best, constant, best_penalty, best_parameters


def _features(
    transitions: Transitions, generator: np.random.Generator
) -> Float[np.ndarray, "row feature"]:
    """(N, 1 + d + 2m): one, standardised observations, cosines and sines at the scale
    of median distances.
    """
    raw = np.asarray(transitions.observations, dtype=np.float64).reshape(
        len(transitions), -1
    )
    if raw.shape[1] > _MOST_INPUTS:
        raise DataError(
            f"observations have {raw.shape[1]} numbers each, more than {_MOST_INPUTS}:"
            " behavior probabilities cannot be estimated from them; store"
            " behavior_log_probabilities in the log"
        )
    spread = raw.std(axis=0)
    standard = (raw - raw.mean(axis=0)) / np.where(
        spread > 1e-8 * np.abs(raw).max(axis=0), spread, 1.0
    )
    standard = np.clip(standard, -_FAR, _FAR)
    pairs = generator.integers(len(raw), size=(2, 2000))
    distances = np.linalg.norm(standard[pairs[0]] - standard[pairs[1]], axis=1)
    if (distances > 0.0).any():
        scale = float(np.median(distances[distances > 0.0]))
    else:
        scale = 1.0
    # Half of the frequencies at the median distance, half at a third of it: smooth and
    # sharp changes.
    widths = np.where(np.arange(_FREQUENCIES) % 2 == 0, scale, scale / 3.0)
    waves = generator.standard_normal((raw.shape[1], _FREQUENCIES)) / widths
    angles = standard @ waves  # (N, d) @ (d, m) = (N, m)
    return np.concatenate(
        [np.ones((len(raw), 1)), standard, np.cos(angles), np.sin(angles)], axis=1
    )


def _model(
    transitions: Transitions,
    cut_to: Any,
    features: np.ndarray,
    generator: np.random.Generator,
) -> _Model:
    space = transitions.action_space
    if isinstance(space, Discrete):
        actions = np.array(transitions.actions, dtype=np.int64)
        available = transitions.action_mask
        if available is not None:
            # the likelihood of a row needs its mask: beside the action
            actions = np.column_stack([actions, available])
        return _Model(
            name="multinomial logistic",
            outputs=space.n,
            log_likelihood=_categorical_log_likelihood,
            actions=torch.from_numpy(actions),
            log_unit=np.zeros(len(features)),
            features=features,
            generator=generator,
            available=available,
        )
    raw = np.asarray(transitions.actions, dtype=np.float64)
    least = 1e-8 * np.maximum(np.abs(raw).max(axis=0), 1.0)
    spread = np.maximum(raw.std(axis=0), least)
    centre = raw.mean(axis=0)
    name = "conditional Gaussian"
    low = np.full(space.k, -np.inf)
    high = np.full(space.k, np.inf)
    if cut_to:
        name = "conditional Gaussian cut off at the bounds"
        low, high = cut_to
    below, above = at_bounds(raw, low, high)
    # −1, 0 or 1 for below, between or above the bounds
    place = above.astype(np.float64) - below
    numbers = (raw - centre) / spread
    return _Model(
        name=name,
        outputs=2 * space.k,
        log_likelihood=partial(
            _gaussian_log_likelihood,
            low=torch.from_numpy((low - centre) / spread),
            high=torch.from_numpy((high - centre) / spread),
        ),
        actions=torch.from_numpy(np.stack([numbers, place], axis=2)),
        log_unit=-np.where(place == 0.0, np.log(spread), 0.0).sum(axis=1),
        features=features,
        generator=generator,
    )


def _categorical_log_likelihood(
    parameters: Tensor, features: Tensor, actions: Tensor
) -> Tensor:
    """(n,) for actions (n,), or (n, 1 + a): the action, and which actions were
    available.
    """
    logits = features @ parameters  # (n, p) @ (p, a) = (n, a)
    if actions.ndim == 2:
        logits = logits.masked_fill(actions[:, 1:] == 0, -math.inf)
        actions = actions[:, 0]
    return -cross_entropy(logits, actions, reduction="none")


def _gaussian_log_likelihood(
    parameters: Tensor, features: Tensor, actions: Tensor, low: Tensor, high: Tensor
) -> Tensor:
    """(n,) for actions (n, k, 2): the number, and −1, 0 or 1 for below, between or
    above the bounds.
    """
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
