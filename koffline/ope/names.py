"""The estimators and the kinds of intervals by name, and which of them go together.

This file imports nothing heavy, so that commands refuse a misspelt name at once. The
code of an estimator is imported when it runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from koffline.errors import ConfigError, nearest_name

# Kinds of intervals, as in `Interval.kind`.
DEFAULT = "default"  # the estimator's own kind
BOOTSTRAP = "bootstrap"  # spread of the resampled networks
BOOTSTRAP_PIVOT = "bootstrap-pivot"
KERNEL_CALIBRATED = "kernel-calibrated"
KERNEL_SIMULTANEOUS = "kernel-simultaneous"
KERNEL_CERTIFIED = "kernel-certified"
EPISODES_T = "episodes-t"
EPISODES_BOOTSTRAP = "episodes-bootstrap"
HOEFFDING = "hoeffding"
EMPIRICAL_BERNSTEIN = "empirical-bernstein"

# Kinds made on a feature system, for any estimator.
SYSTEM_KINDS = (
    BOOTSTRAP_PIVOT,
    KERNEL_CALIBRATED,
    KERNEL_SIMULTANEOUS,
    KERNEL_CERTIFIED,
)
CALIBRATED_EPISODE_KINDS = (EPISODES_T, EPISODES_BOOTSTRAP)
CERTIFIED_EPISODE_KINDS = (HOEFFDING, EMPIRICAL_BERNSTEIN)
EPISODE_KINDS = CALIBRATED_EPISODE_KINDS + CERTIFIED_EPISODE_KINDS
CERTIFIED_KINDS = (KERNEL_CERTIFIED, *CERTIFIED_EPISODE_KINDS)
KINDS = (DEFAULT, BOOTSTRAP, *SYSTEM_KINDS, *EPISODE_KINDS)

# What an estimator reads besides the rows (`Estimator.needs`).
EPISODES = "episodes"
PROBABILITIES = "probabilities"
NETWORKS = "networks"
NEEDS = (EPISODES, PROBABILITIES, NETWORKS)


@dataclass(frozen=True)
class Listed:
    """An estimator as tables list it, before its code is imported.

    code: "module:object" of a `koffline.ope.estimators.contract.Estimator`, or the
    object itself.
    """

    family: str
    interval_kinds: tuple[str, ...]
    needs: frozenset[str]
    code: Any


_OF_NETWORKS = frozenset({NETWORKS})
_OF_EPISODES = frozenset({EPISODES, PROBABILITIES})
_RESAMPLED = (DEFAULT, BOOTSTRAP, *SYSTEM_KINDS)
_CALIBRATED = (DEFAULT, *CALIBRATED_EPISODE_KINDS)
_CERTIFIABLE = (DEFAULT, *EPISODE_KINDS)


def _value(code: str) -> Listed:
    code = f"koffline.ope.estimators.value:{code}"
    return Listed("value function", _RESAMPLED, _OF_NETWORKS, code)


def _marginal(code: str) -> Listed:
    code = f"koffline.ope.estimators.marginal:{code}"
    return Listed("marginal weights", _RESAMPLED, _OF_NETWORKS, code)


def _importance(kinds: tuple[str, ...], code: str) -> Listed:
    code = f"koffline.ope.estimators.importance:{code}"
    return Listed("importance sampling", kinds, _OF_EPISODES, code)


def _doubly_robust(kinds: tuple[str, ...], needs: frozenset[str], code: str) -> Listed:
    code = f"koffline.ope.estimators.doubly_robust:{code}"
    return Listed("doubly robust", kinds, needs, code)


# koffline's own estimators, in the order of tables. One more is one line here, and one
# class (docs/extend.md).
_OWN = {
    "kloss+fqe": _value("KLOSS_FQE"),
    "kloss": _value("KLOSS"),
    "fqe": _value("FQE"),
    "lstd": _value("LSTD"),
    "mql": _value("MQL"),
    "lstdq": _value("LSTDQ"),
    "mwl": _marginal("MWL"),
    "dualdice": _marginal("DUALDICE"),
    "is": _importance(_CERTIFIABLE, "IS"),
    "wis": _importance(_CALIBRATED, "WIS"),
    "pdis": _importance(_CERTIFIABLE, "PDIS"),
    "wpdis": _importance(_CALIBRATED, "WPDIS"),
    "dr": _doubly_robust(_CALIBRATED, _OF_EPISODES | _OF_NETWORKS, "DR"),
    "wdr": _doubly_robust(_CALIBRATED, _OF_EPISODES | _OF_NETWORKS, "WDR"),
    "magic": _doubly_robust(_CALIBRATED, _OF_EPISODES | _OF_NETWORKS, "MAGIC"),
    "drl": _doubly_robust((DEFAULT, *SYSTEM_KINDS), _OF_NETWORKS, "DRL"),
}
_ADDED: dict[str, Listed] = {}  # by users

AVERAGED = "kloss+fqe"  # mean of the two
# heads of the trained networks, which share their hidden layers
FITTED = (AVERAGED, "kloss", "fqe", "lstd")
ESTIMATORS = {name: listed.family for name, listed in _OWN.items()}
OVER_EPISODES = tuple(name for name, listed in _OWN.items() if EPISODES in listed.needs)
WITH_MODEL = tuple(name for name in OVER_EPISODES if NETWORKS in _OWN[name].needs)
WITHOUT_MODEL = tuple(name for name in OVER_EPISODES if name not in WITH_MODEL)

# Usual names of estimators for one-step (bandit) logs.
_WEIGHTED = {"is": "IPS", "pdis": "IPS", "wis": "SNIPS", "wpdis": "SNIPS"}
BANDIT = {**dict.fromkeys((AVERAGED, "kloss", "fqe"), "DM"), **_WEIGHTED}

# `default_head`, or dr for some one-step logs
# (`koffline.ope.estimators.running.choose_estimator`)
AUTO = "auto"


def add(name: str, listed: Listed) -> None:
    """List a user's estimator, in place of an earlier one of the same name.

    Raises ConfigError for the name of one of koffline's.
    """
    if name in _OWN or name == AUTO:
        raise ConfigError(
            f"the name '{name}' is that of an estimator of koffline; give another name"
        )
    _ADDED[name] = listed


def find(name: str) -> Listed:
    """The listed estimator. Raises ConfigError for an unknown name."""
    listed = _OWN.get(name) or _ADDED.get(name)
    if listed is None:
        known = [*_OWN, *_ADDED]
        raise ConfigError(
            f"there is no estimator '{name}'; {nearest_name(name, known)}"
        )
    return listed


def needs_of(name: str) -> frozenset[str]:
    """What an estimator reads besides the rows; of one that is not listed here any
    more, nothing.
    """
    listed = _OWN.get(name) or _ADDED.get(name)
    if listed is None:
        return frozenset()
    return listed.needs


def default_head(steps: int | None) -> str:
    """The head of ``auto``: kloss+fqe if training goes on until values settle (no
    ``steps``), else kloss.

    In part, errors of the solved and of the trained last layer cancel; the solved one
    is right earlier.
    """
    if steps is None:
        return AVERAGED
    return "kloss"


def kinds_for(name: str) -> tuple[str, ...]:
    """The kinds of interval that an estimator can have, its own first; for ``auto``,
    those of networks.
    """
    if name == AUTO:
        return _RESAMPLED
    return find(name).interval_kinds


def check_estimator(name: str) -> None:
    """Raise ConfigError for an unknown estimator."""
    find(name)


def having(kind: str, wanted: Iterable[str] | None = None) -> tuple[str, ...]:
    """The estimators (None: all of koffline's) that can have this kind of interval.

    Raises ConfigError if none can.
    """
    names = tuple(dict.fromkeys(wanted or ())) or tuple(ESTIMATORS)
    able = tuple(name for name in names if kind in find(name).interval_kinds)
    if not able:
        check_interval(names[0], kind)
    return able


def check_interval(name: str, kind: str) -> None:
    """Raise ConfigError for an unknown kind, or one that this estimator cannot have."""
    kinds = kinds_for(name)
    if kind not in KINDS and kind not in kinds:
        raise ConfigError(f"there is no interval '{kind}'; {nearest_name(kind, KINDS)}")
    if kind not in kinds:
        raise ConfigError(
            f"{name} has no interval of kind '{kind}'; give one of"
            f" {', '.join(kinds)}, or an estimator that has it"
            f" ({', '.join(having(kind))})"
        )
