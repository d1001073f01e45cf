"""Behavior policies estimated by classifiers of scikit-learn, for discrete actions; and
how well estimated chances of actions are calibrated.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from koffline.data.transitions import Discrete, Transitions
from koffline.errors import ConfigError, DataError
from koffline.policies.base import among_available
from koffline.policy_specs import import_object
from koffline.untrusted.limits import one_line

_METHODS = ("fit", "predict_proba", "get_params", "set_params")
_BINS = 10
_REMEDY = (
    "give a classifier of scikit-learn or its name, as in"
    " sklearn.ensemble:HistGradientBoostingClassifier"
)


def as_classifier(model: Any, seed: int) -> Any:
    """A fresh classifier, with ``seed`` where it draws at random and was given none.

    model: a classifier, fitted or not; its class; a function that makes one; or
    ``package.module:name`` of one of these. Raises ConfigError for anything else,
    PolicyError if a name cannot be imported.
    """
    if isinstance(model, str):
        model = import_object(model)
    is_object = not isinstance(model, type) and hasattr(model, "predict_proba")
    if callable(model) and not is_object:
        try:
            model = model()
        except TypeError as error:
            raise ConfigError(
                f"behavior_model cannot be made without arguments ({one_line(error)});"
                f" {_REMEDY}"
            ) from None
    if not all(callable(getattr(model, name, None)) for name in _METHODS):
        raise ConfigError(
            f"behavior_model is a {type(model).__name__}, which has no fit and"
            f" predict_proba; {_REMEDY}"
        )
    from sklearn.base import clone

    classifier = clone(model)
    seeds = {
        name: seed
        for name, value in classifier.get_params().items()
        if name.split("__")[-1] == "random_state" and value is None
    }
    return classifier.set_params(**seeds)


def held_out_chances(
    classifier: Any,
    transitions: Transitions,
    fold: Int[np.ndarray, " row"] | None,
) -> Float[np.ndarray, "row action"]:
    """Chances of all actions in each row, by a classifier fitted to the other folds.

    classifier: of `as_classifier`; it is cloned. None: chances are the actions' shares,
    whatever the state. fold: the fold of each row; None fits
    it to all rows, and the chances are not held out. A classifier may say that an
    action which was taken has no chance: a share 1 / (rows it was fitted to + 1) of
    each row's chances is therefore the actions' own share, in which every action counts
    once more than it was taken. Chances are restricted to the actions that were
    available, if the log has masks.

    Raises ConfigError for continuous actions, DataError where the classifier fails.
    """
    from sklearn.base import clone

    space = transitions.action_space
    if not isinstance(space, Discrete):
        raise ConfigError(
            "behavior_model estimates chances of discrete actions, and this log's are"
            " continuous; leave it out, and their density is estimated"
        )
    states = np.asarray(transitions.observations, dtype=np.float64)
    states = states.reshape(len(states), -1)
    actions = np.asarray(transitions.actions, dtype=np.int64)
    chances = np.empty((len(states), space.n))
    for fitted, held_out in _parts(fold, len(states)):
        counts = np.bincount(actions[fitted], minlength=space.n)
        rows = int(counts.sum())
        shares = (counts + 1.0) / (rows + space.n)
        if classifier is None:
            chances[held_out] = shares
            continue
        name = type(classifier).__name__
        try:
            with warnings.catch_warnings():
                # calibration shows what a fit that did not converge is worth
                warnings.simplefilter("ignore")
                model = clone(classifier).fit(states[fitted], actions[fitted])
                predicted = np.asarray(model.predict_proba(states[held_out]))
                classes = np.asarray(model.classes_, dtype=np.int64)
        except Exception as error:  # of the user's own model, too
            raise DataError(
                f"behavior_model {name} cannot be fitted to this log"
                f" ({one_line(error)}); mend it, or leave it out"
            ) from error
        of_actions = np.zeros((len(predicted), space.n))
        of_actions[:, classes] = predicted
        weight = 1.0 / (rows + 1.0)
        chances[held_out] = (1.0 - weight) * of_actions + weight * shares
    if transitions.action_mask is None:
        return chances
    # the actions' shares are positive, so every row has an available action
    return among_available(chances, transitions.action_mask, "behavior_model")


def _parts(
    fold: np.ndarray | None, rows: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Rows to fit to and rows to predict, as masks (N,), for each fold."""
    if fold is None:
        everything = np.ones(rows, dtype=bool)
        yield everything, everything
        return
    for number in np.unique(fold):
        yield fold != number, fold == number


def calibration(
    chances: Float[np.ndarray, "row action"], actions: Int[np.ndarray, " row"]
) -> dict[str, Any]:
    """How often actions were taken that had about the same estimated chance.

    chances: of all actions in each row. actions: those taken. All pairs of row and
    action are put into ten bins by their chance. ``behavior_calibration``: for each bin
    that is not empty {predicted: mean chance, taken: share of pairs whose action was
    taken, pairs}. ``behavior_calibration_error``: mean distance of the two, weighted by
    pairs (expected calibration error, Naeini et al. 2015, of all classes).
    """
    taken = np.zeros(chances.shape)
    taken[np.arange(len(actions)), actions] = 1.0
    place = np.minimum((chances * _BINS).astype(int), _BINS - 1)
    bins = []
    error = 0.0
    for number in range(_BINS):
        inside = place == number
        pairs = int(inside.sum())
        if not pairs:
            continue
        predicted = float(chances[inside].mean())
        share = float(taken[inside].mean())
        error += pairs / chances.size * abs(predicted - share)
        bins.append({"predicted": predicted, "taken": share, "pairs": pairs})
    return {"behavior_calibration_error": error, "behavior_calibration": bins}
