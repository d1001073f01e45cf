"""Estimators by name: koffline's own, and those that users add."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from koffline.errors import ConfigError
from koffline.ope import names
from koffline.ope.estimators.contract import Estimator
from koffline.policy_specs import import_object

_PARTS = "name, family, interval_kinds, needs and a method estimate(workspace)"


def find_estimator(name: str) -> Estimator:
    """The estimator of a name. Raises ConfigError for an unknown one."""
    code = names.find(name).code
    if not isinstance(code, str):
        estimator: Estimator = code
        return estimator
    module, _, attribute = code.partition(":")
    listed: Estimator = getattr(import_module(module), attribute)
    return listed


def name_of(estimator: str | Estimator) -> str:
    """The name of an estimator, after it was made known if it is a user's.

    estimator: a name, "package.module:name" of a user's, or the object itself. A class
    is called without arguments. Raises ConfigError if an object is no estimator, and
    PolicyError if a module cannot be imported.
    """
    if isinstance(estimator, str):
        if ":" not in estimator:
            return estimator
        return register_estimator(import_object(estimator), spec=estimator)
    return register_estimator(estimator)


def register_estimator(estimator: Any, spec: str = "estimator") -> str:
    """Make a user's estimator known by its name, which is returned.

    spec: what messages call it. A later one of the same name takes its place. Raises
    ConfigError if the object lacks a part of the contract
    (`koffline.ope.estimators.contract.Estimator`).
    """
    if isinstance(estimator, type):
        try:
            estimator = estimator()
        except TypeError as error:
            raise ConfigError(
                f"{spec}: the class {estimator.__name__} needs arguments ({error}); give"
                " an instance"
            ) from error
    _check_parts(estimator, spec)
    name: str = estimator.name
    names.add(
        name,
        names.Listed(
            family=estimator.family,
            interval_kinds=tuple(estimator.interval_kinds),
            needs=frozenset(estimator.needs),
            code=estimator,
        ),
    )
    return name


def _check_parts(estimator: Any, spec: str) -> None:
    """Raise ConfigError unless an object keeps the contract."""
    parts = ("name", "family", "interval_kinds", "needs", "estimate")
    missing = [part for part in parts if not hasattr(estimator, part)]
    if missing:
        raise ConfigError(
            f"{spec}: an object of type {type(estimator).__name__} has no"
            f" {', '.join(missing)}; an estimator has {_PARTS}"
        )
    for part in ("name", "family"):
        text = getattr(estimator, part)
        if not isinstance(text, str) or not text.strip():
            raise ConfigError(f"{spec}: its {part} is {text!r}; give a text")
    if any(sign in estimator.name for sign in ":, "):
        raise ConfigError(
            f"{spec}: its name is '{estimator.name}'; give a name without colons,"
            " commas and spaces"
        )
    if not callable(estimator.estimate):
        raise ConfigError(
            f"{spec}: its estimate is no method; give estimate(workspace)"
        )
    kinds = estimator.interval_kinds
    are_texts = isinstance(kinds, (tuple, list)) and all(
        isinstance(kind, str) for kind in kinds
    )
    if not are_texts or names.DEFAULT not in kinds:
        raise ConfigError(
            f"{spec}: its interval_kinds are {kinds!r}; give a tuple of kinds, with"
            f' "{names.DEFAULT}"'
        )
    needs = estimator.needs
    if isinstance(needs, str) or not set(needs) <= set(names.NEEDS):
        raise ConfigError(
            f"{spec}: its needs are {needs!r}; give a set out of"
            f" {', '.join(names.NEEDS)}"
        )
