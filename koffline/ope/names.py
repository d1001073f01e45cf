"""The estimators and the kinds of intervals by name, and which of them go together.

This file imports nothing heavy, so that commands refuse a misspelt name at once.
"""

from __future__ import annotations

from collections.abc import Iterable

from koffline.errors import ConfigError, nearest_name

# Estimators over episodes.
WITHOUT_MODEL = ("is", "wis", "pdis", "wpdis")
WITH_MODEL = ("dr", "wdr", "magic")
OVER_EPISODES = WITHOUT_MODEL + WITH_MODEL
WHOLE_WEIGHT = ("is", "wis")  # use the weight of the whole episode, not of each step
# value: whether weights are those of each step
CERTIFIABLE = {
    "is": False,
    "pdis": True,
}

AVERAGED = "kloss+fqe"  # mean of the two
# heads of the trained networks, which share their hidden layers
FITTED = (
    AVERAGED,
    "kloss",
    "fqe",
    "lstd",
)
ESTIMATORS = {  # estimator: family, in the order of tables
    **dict.fromkeys((*FITTED, "mql", "lstdq"), "value function"),
    **dict.fromkeys(("mwl", "dualdice"), "marginal weights"),
    **dict.fromkeys(WITHOUT_MODEL, "importance sampling"),
    **dict.fromkeys((*WITH_MODEL, "drl"), "doubly robust"),
}

# Usual names of estimators for one-step (bandit) logs.
_WEIGHTED = {"is": "IPS", "pdis": "IPS", "wis": "SNIPS", "wpdis": "SNIPS"}
BANDIT = {**dict.fromkeys((AVERAGED, "kloss", "fqe"), "DM"), **_WEIGHTED}

# `default_head`, or dr for some one-step logs
# (`koffline.ope.estimators.registry.choose_estimator`)
AUTO = "auto"

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
    if name in OVER_EPISODES:
        return (
            DEFAULT,
            *(EPISODE_KINDS if name in CERTIFIABLE else CALIBRATED_EPISODE_KINDS),
        )
    return (DEFAULT, *((BOOTSTRAP,) if name != "drl" else ()), *SYSTEM_KINDS)


def check_estimator(name: str) -> None:
    """Raise ConfigError for an unknown estimator."""
    if name not in ESTIMATORS:
        raise ConfigError(
            f"there is no estimator '{name}'; {nearest_name(name, ESTIMATORS)}"
        )


def having(kind: str, wanted: Iterable[str] | None = None) -> tuple[str, ...]:
    """The estimators (None: all) that can have this kind of interval.

    Raises ConfigError if none can.
    """
    names = tuple(dict.fromkeys(wanted or ESTIMATORS))
    for name in names:
        check_estimator(name)
    found = tuple(name for name in names if kind in kinds_for(name))
    if not found:
        check_interval(names[0], kind)
    return found


def check_interval(name: str, kind: str) -> None:
    """Raise ConfigError for an unknown kind, or one that this estimator cannot have."""
    if name != AUTO:
        check_estimator(name)
    if kind not in KINDS:
        raise ConfigError(f"there is no interval '{kind}'; {nearest_name(kind, KINDS)}")
    if kind not in kinds_for(name):
        raise ConfigError(
            f"{name} has no interval of kind '{kind}'; give one of"
            f" {', '.join(kinds_for(name))}, or an estimator that has it"
            f" ({', '.join(having(kind))})"
        )
