"""Policies of scikit-learn: a fitted classifier, or a regressor for continuous actions.

Everything with scikit-learn's methods counts, such as pipelines and the models of
LightGBM and XGBoost. scikit-learn is not imported here.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from koffline.errors import PolicyError, listed
from koffline.policies.frames import Library

_METHODS = ("fit", "predict", "get_params")
_NAMES_WARNING = ".*feature names.*"
_MOST_SHOWN = 8


def is_estimator(value: object) -> bool:
    """Whether an object has the methods of scikit-learn's estimators."""
    if isinstance(value, type):
        return False
    return all(callable(getattr(value, name, None)) for name in _METHODS)


class EstimatorFunction:
    """A fitted estimator as a function of a batch of observations, an array (N, …) or a
    frame with the columns it was fitted to.

    A classifier with ``predict_proba`` is a stochastic policy: its probabilities, each
    in the place of the action that its class names. Other estimators are deterministic:
    what ``predict`` says.

    n: number of discrete actions; None for continuous ones. actions: names of the log's
    discrete actions, empty if they are the numbers 0 … n − 1. Raises PolicyError.
    """

    def __init__(
        self, model: Any, name: str, n: int | None, actions: Sequence[str]
    ) -> None:
        self._model = model
        self._name = name
        self._n = n
        self.__name__ = name
        classes = getattr(model, "classes_", None)
        if n is None and classes is not None:
            raise PolicyError(
                f"{name}: this is a classifier, and the log's actions are continuous;"
                " give a regressor, or declare discrete actions"
            )
        self._places: list[int] | None = None
        if n is not None and callable(getattr(model, "predict_proba", None)):
            if classes is None:
                raise PolicyError(
                    f"{name}: it has no classes_, so that it was not fitted; fit it"
                    " first"
                )
            self._places = _places(np.asarray(classes).tolist(), name, n, actions)
        columns = getattr(model, "feature_names_in_", None)
        self.columns: tuple[str, ...] = ()
        if columns is not None:
            self.columns = tuple(map(str, columns))

    @property
    def library(self) -> Library:
        """The frames that it is given: pandas, which all estimators know."""
        return "pandas"

    def __call__(self, observations: object) -> object:
        """Probabilities (N, n), or what `predict` says."""
        with warnings.catch_warnings():
            # of a log whose columns have no names; a note says so
            warnings.filterwarnings("ignore", _NAMES_WARNING, UserWarning)
            if self._places is None:
                return self._model.predict(observations)
            of_classes = np.asarray(self._model.predict_proba(observations))
        probabilities = np.zeros((len(of_classes), int(self._n or 0)))
        probabilities[:, self._places] = of_classes
        return probabilities

    def chosen(self, frame: Any) -> Any:
        """The columns that it was fitted to, in their order, of a frame of the log's
        columns. Raises PolicyError.
        """
        missing = [name for name in self.columns if name not in frame.columns]
        if missing:
            raise PolicyError(
                f"{self._name}: it was fitted to {listed(self.columns, _MOST_SHOWN)},"
                f" and the log's observations lack {listed(missing, _MOST_SHOWN)}; name"
                " them among the observations, or fit it to"
                f" {listed(frame.columns, _MOST_SHOWN)}"
            )
        return frame[list(self.columns)]


def _places(
    classes: Sequence[object], name: str, n: int, actions: Sequence[str]
) -> list[int]:
    """The number of the action that each class names. Raises PolicyError for a class
    that is no action of the log.
    """
    known = list(actions) or list(map(str, range(n)))
    places = []
    for label in classes:
        text = _text(label)
        if isinstance(label, bool) and text not in known:
            text = text.lower()
        if text not in known:
            raise PolicyError(
                f"{name}: its class {label!r} is no action of this log; its actions are"
                f" {listed(known, _MOST_SHOWN)}: fit it to these, or give a function"
                " that returns probabilities in this order"
            )
        places.append(known.index(text))
    return places


def _text(label: object) -> str:
    """A class as the text of an action: a whole number without decimals."""
    if isinstance(label, float) and label.is_integer():
        return str(int(label))
    return str(label)
