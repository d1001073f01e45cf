"""``select_policies``: from a log and several policies to a ranking; the file reads
from top to bottom.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from koffline.config import EvaluationSettings
from koffline.data.disk.log import AnyLog
from koffline.errors import ConfigError, KofflineError
from koffline.fitting import Progress
from koffline.ope.comparisons import Comparison, compare_intervals, compare_replicas
from koffline.ope.evaluation import evaluate, may_look_back, merge_settings
from koffline.ope.names import AUTO, default_head
from koffline.ope.results import Estimate, Interval, LogResult, Record, Uplift, Verdict
from koffline.ope.stream_settings import StreamSettings
from koffline.policies.base import Policy
from koffline.policy_specs import as_policy

_PAIRED = (
    "Student t over networks retrained on the same resampled {units} and seeds for"
    " every policy"
)
_UNPAIRED = (
    "judged by the intervals, as if any two estimates erred in opposite directions"
    " (safe, weak)"
)
_NONE = "not judged, fewer than two estimates have intervals"
_ASSUMPTIONS = (
    "Differences: {}. P-values are corrected for all pairs (Holm). None of this knows"
    " about a bias that the estimator has for one policy and not for another. The first"
    " policy was chosen for its estimate, which therefore leans high: confirm it on"
    " rows that took no part in the choice."
)
_LOOKED_BACK = (
    "What happened earlier matters beyond the logged state (first seen for {name}), so"
    " that rows before are part of it for every policy here (history={rows})."
)
_UNANSWERED = "ranked last, whatever its value: {}"
_KEPT = ("value", "interval", "verdict", "uplift", "warnings")  # of an estimate


@dataclass(frozen=True, eq=False)
class RankedPolicy(Record):
    """One policy in a ranking. ``maybe_best``: it has an interval, and no policy is
    significantly better.

    ``verdict``, ``uplift``: as in `Estimate`. If no policy has an interval, all may be
    the best.
    """

    rank: int
    name: str
    value: float
    interval: Interval | None
    verdict: Verdict
    uplift: Uplift | None = None
    maybe_best: bool = True
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False, kw_only=True)
class PolicyRanking(LogResult):
    """Policies in order of their estimates, largest first, and pairwise comparisons.

    Policies without an interval come last and are not compared. ``unranked``: policies
    that could not be evaluated, in the given order, each with the keys ``name`` and
    ``reason``. ``assumptions``: assumptions of the comparisons.
    """

    policies: tuple[RankedPolicy, ...]
    comparisons: tuple[Comparison, ...]
    unranked: tuple[dict[str, str], ...] = ()
    estimator: str
    level: float
    assumptions: str
    warnings: tuple[str, ...] = ()

    @property
    def best(self) -> RankedPolicy:
        """The policy of rank 1: the largest estimate among the policies that have an
        interval.
        """
        return self.policies[0]

    @property
    def candidates(self) -> tuple[RankedPolicy, ...]:
        """The policies that may be the best, because none is significantly better."""
        return tuple(policy for policy in self.policies if policy.maybe_best)

    def __str__(self) -> str:
        lines = []
        for policy in self.policies:
            one = policy.interval
            if one is None:
                ends = ""
            else:
                ends = f"  [{one.low:.4g}, {one.high:.4g}]"
            if one is None:
                worse = "no interval: not compared"
            else:
                worse = "significantly worse than another"
            note = "" if policy.maybe_best else f"   {worse}"
            lines.append(
                f"{policy.rank}. {policy.name}  {policy.value:.4g}{ends}{note}"
            )
        return "\n".join(lines)


def select_policies(
    transitions: AnyLog,
    policies: Sequence[Any] | Mapping[str, Any],
    gamma: float | None = None,
    *,
    initial_observations: np.ndarray | None = None,
    settings: EvaluationSettings | None = None,
    stream: StreamSettings | None = None,
    progress: Callable[[str], Progress | None] | None = None,
    **options: Any,
) -> PolicyRanking:
    """Rank policies by their estimated values, with intervals, and say which differ
    significantly.

    policies: two or more, each as ``koffline.evaluate`` takes it; a mapping gives them
    names. progress: a function from a policy's name to the function that is called with
    its progress. All else as in ``koffline.evaluate``. Raises KofflineError (DataError,
    PolicyError, ConfigError) in one line. A policy that cannot be evaluated (diverged
    networks, an estimator that does not apply) is listed as unranked; fewer than two
    estimates raise KofflineError.
    """
    started = time.perf_counter()
    settings = merge_settings(transitions, settings, {"gamma": gamma, **options})
    looks_back = may_look_back(settings.estimator, settings.interval, settings.history)
    if settings.estimator == AUTO:  # differences are resampled with the networks
        settings = settings.model_copy(
            update={"estimator": default_head(settings.steps)}
        )
    named = _named_policies(policies, transitions)
    asked = {"initial_observations": initial_observations, "stream": stream}
    ask = partial(_estimate_each, transitions, named, progress, **asked)
    estimates, failed = ask(settings=settings)
    notes = []
    matters = [name for name, one in estimates.items() if one.verdict.because("state")]
    rows = max(
        (estimates[name].diagnostics["memory_rows"] for name in matters), default=0
    )
    if rows and looks_back:
        notes = [_LOOKED_BACK.format(name=matters[0], rows=rows)]
        estimates, failed = ask(settings=settings.model_copy(update={"history": rows}))
    return _ranked(estimates, failed, notes, started)


def _estimate_each(
    transitions: AnyLog,
    named: dict[str, Policy],
    progress: Callable[[str], Progress | None] | None,
    **options: Any,
) -> tuple[dict[str, Estimate], dict[str, str]]:
    """Estimates by policy name, and why others have none.

    Raises KofflineError for less than two.
    """
    estimates = dict[str, Estimate]()
    failed = dict[str, str]()
    for name, policy in named.items():
        watch = None if progress is None else progress(name)
        try:
            estimates[name] = evaluate(transitions, policy, progress=watch, **options)
        except ConfigError:
            raise
        except KofflineError as error:
            failed[name] = str(error)
            if (
                not estimates
                and len(failed) == len(named)
                and len(set(failed.values())) == 1
            ):
                raise  # a fault of the log, not of the policy
    if len(estimates) < 2:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in failed.items())
        raise KofflineError(f"fewer than two policies could be evaluated ({reasons})")
    return estimates, failed


def _ranked(
    estimates: dict[str, Estimate],
    failed: dict[str, str],
    notes: list[str],
    started: float,
) -> PolicyRanking:
    """The ranking of the policies that could be evaluated."""
    names = sorted(
        estimates,
        key=lambda name: (estimates[name].interval is None, -estimates[name].value),
    )
    answered = {
        name: estimates[name] for name in names if estimates[name].interval is not None
    }
    found = []
    for one in (estimates[name] for name in names):
        said = tuple(map(str, one.verdict.reasons))
        if one.interval is None and answered:
            said = (_UNANSWERED.format(one.verdict),)
        found.append(dataclasses.replace(one, warnings=(*said, *one.warnings)))
    first = found[0]
    level = found[0].settings["level"]
    comparisons, how = _compare(answered, level)
    beaten = {comparison.worse for comparison in comparisons if comparison.significant}
    about = {
        each.name: getattr(first, each.name) for each in dataclasses.fields(LogResult)
    }
    about["notes"] = tuple(dict.fromkeys(note for one in found for note in one.notes))
    return PolicyRanking(
        policies=tuple(
            RankedPolicy(
                rank=rank,
                name=name,
                **{kept: getattr(one, kept) for kept in _KEPT},
                maybe_best=name not in beaten and (name in answered or not answered),
            )
            for rank, (name, one) in enumerate(zip(names, found, strict=True), start=1)
        ),
        comparisons=comparisons,
        unranked=tuple({"name": name, "reason": why} for name, why in failed.items()),
        estimator=first.estimator,
        level=level,
        assumptions=_ASSUMPTIONS.format(how),
        warnings=(*notes, *_warnings(names, found, failed)),
        **about | {"seconds": round(time.perf_counter() - started, 3)},
    )


def _compare(
    answered: dict[str, Estimate], level: float
) -> tuple[tuple[Comparison, ...], str]:
    """Compare by paired replicas if possible, else by intervals; returns also a clause
    on the method.
    """
    if len(answered) < 2:
        return (), _NONE
    names = list(answered)
    found = list(answered.values())
    worth = [one.value for one in found]
    intervals = [one.interval for one in found if one.interval]
    evidence = [one.evidence for one in found if one.evidence is not None]
    if len(evidence) < len(found):
        return compare_intervals(names, worth, intervals, level), _UNPAIRED
    # (K, R), NaN where one diverged
    values = np.stack([each.replica_values for each in evidence])
    full = evidence[0].replica_roles.count("full")
    units = "episodes" if found[0].n_episodes else "rows"
    return compare_replicas(names, worth, values, full, level), _PAIRED.format(
        units=units
    )


def _warnings(
    names: list[str], found: list[Estimate], failed: dict[str, str]
) -> tuple[str, ...]:
    """Warnings: those shared by all policies once, the others with the policy's
    name.
    """
    shared = [
        text
        for text in found[0].warnings
        if all(text in other.warnings for other in found)
    ]
    pairs = zip(names, found, strict=True)
    own = [
        f"{name}: {text}"
        for name, one in pairs
        for text in one.warnings
        if text not in shared
    ]
    return (
        *(f"{name} is not ranked: {reason}" for name, reason in failed.items()),
        *shared,
        *own,
    )


def _named_policies(
    policies: Sequence[Any] | Mapping[str, Any], log: AnyLog
) -> dict[str, Policy]:
    """Policies by unique names, checked against the log before anything is fitted."""
    if isinstance(policies, (str, bytes)) or not isinstance(policies, Iterable):
        raise ConfigError(
            f"policies is {policies!r}; give a list of two or more policies"
        )
    given = policies.values() if isinstance(policies, Mapping) else policies
    about = log.action_space, log.observation_shape, None, log.metadata.features
    loaded = [as_policy(policy, *about) for policy in given]
    if len(loaded) < 2:
        raise ConfigError(
            f"{len(loaded)} policy was given; a ranking needs two or more"
        )
    if isinstance(policies, Mapping):
        names = list(map(str, policies))
    else:
        names = []
    for policy in loaded[len(names) :]:
        numbered = (f"{policy.name} ({number})" for number in itertools.count(2))
        names.append(
            next(
                name
                for name in itertools.chain([policy.name], numbered)
                if name not in names
            )
        )
    return dict(zip(names, loaded, strict=True))
