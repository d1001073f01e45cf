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
from koffline.data.sources import LogMapping, LogSource, open_log
from koffline.data.spaces import SpaceRequest
from koffline.errors import ConfigError, KofflineError, percent, printable
from koffline.fitting import Progress
from koffline.ope.comparisons import Comparison, compare_intervals, compare_replicas
from koffline.ope.evaluation import (
    evaluate_one_of_several,
    may_look_back,
    merge_settings,
)
from koffline.ope.names import AUTO, default_head
from koffline.ope.results import (
    NO_ANSWER_IN,
    Cells,
    Estimate,
    Interval,
    LogResult,
    Record,
    Uplift,
    Verdict,
    interval_cells,
    uplift_cells,
    with_ends,
)
from koffline.ope.stream_settings import StreamSettings
from koffline.ope.workspace import SharedByPolicies
from koffline.policies.base import Policy, PolicySource
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


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
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

    @property
    def sentences(self) -> tuple[str, ...]:
        """Which policies may be the best, and how many pairs differ."""
        if not self.comparisons:
            answered = sum(not policy.verdict.is_open for policy in self.policies)
            return (
                "Which policies differ was not judged: this log says of"
                f" {answered} of {len(self.policies)} policies what they are worth.",
            )
        names = [policy.name for policy in self.candidates]
        if len(names) == 1:
            who = f"only {names[0]}"
        else:
            who = f"{len(names)} policies: {', '.join(names)}"
        significant = sum(comparison.significant for comparison in self.comparisons)
        risk = percent(1.0 - self.level)
        return (
            f"May be the best (nothing is significantly better): {who}.",
            (
                f"{significant} of {len(self.comparisons)} pairs differ significantly"
                f" (any error: {risk})."
            ),
        )

    def __str__(self) -> str:
        lines = [" ".join(self.sentences)]
        for policy in self.policies:
            lines.append(f"{policy.rank}. {_described(policy)}")
        for entry in self.unranked:
            lines.append(f"not ranked: {entry['name']}: {entry['reason']}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        names = ", ".join(policy.name for policy in self.policies)
        return printable(
            f"PolicyRanking({names}; {len(self.candidates)} of {len(self.policies)} may"
            f" be the best; by {self.estimator})"
        )

    def frame_rows(self) -> list[Cells]:
        """A row for each policy, the best first; those that could not be evaluated
        follow without a rank.
        """
        rows: list[Cells] = []
        for policy in self.policies:
            rows.append(
                {
                    "rank": policy.rank,
                    "policy": policy.name,
                    "value": policy.value,
                    **interval_cells(policy.interval),
                    **uplift_cells(policy.uplift),
                    "maybe_best": policy.maybe_best,
                    "verdict": policy.verdict.answer,
                    "reason": None,
                }
            )
        for entry in self.unranked:
            cells: Cells = dict.fromkeys(rows[0])
            cells |= {"policy": entry["name"], "reason": entry["reason"]}
            rows.append(cells)
        return rows


def _described(policy: RankedPolicy) -> str:
    """A policy's value with its verdict, and why it is not the best."""
    if policy.verdict.is_open:
        return (
            f"{policy.name}  {policy.verdict.answer} ({NO_ANSWER_IN}:"
            f" {policy.value:.4g})"
        )
    text = f"{policy.name}  {with_ends(policy.value, policy.interval)}"
    text = f"{text}  {policy.verdict.answer}"
    if policy.maybe_best:
        return text
    if policy.interval is None:
        return f"{text}   no interval: not compared"
    return f"{text}   significantly worse than another"


def select_policies(  # noqa: PLR0913
    transitions: LogSource,
    policies: Sequence[PolicySource] | Mapping[str, PolicySource],
    gamma: float | None = None,
    *,
    mapping: LogMapping = None,
    action_space: SpaceRequest | None = None,
    initial_observations: np.ndarray | None = None,
    settings: EvaluationSettings | Mapping[str, Any] | None = None,
    stream: StreamSettings | None = None,
    progress: Callable[[str], Progress | None] | None = None,
    **options: Any,
) -> PolicyRanking:
    """Rank policies by their estimated values, with intervals, and say which differ
    significantly.

    policies: two or more, each as ``koffline.evaluate`` takes it; a mapping gives them
    names. progress: a function from a policy's name to the function that is called with
    its progress. transitions, gamma, mapping, action_space, initial_observations,
    settings, stream and options: as in ``koffline.evaluate``. Raises KofflineError (DataError, PolicyError,
    ConfigError) in one line. A policy that cannot be evaluated (diverged networks, an
    estimator that does not apply) is listed as unranked; fewer than two estimates raise
    KofflineError.
    """
    started = time.perf_counter()
    log = open_log(transitions, action_space, mapping)
    settings = merge_settings(log, settings, {"gamma": gamma, **options})
    looks_back = may_look_back(settings.estimator, settings.interval, settings.history)
    if settings.estimator == AUTO:  # differences are resampled with the networks
        settings = settings.model_copy(
            update={"estimator": default_head(settings.steps)}
        )
    named = _named_policies(policies, log)
    estimate_policies = partial(
        _estimate_policies,
        log,
        named,
        progress,
        shared=SharedByPolicies(),
        initial_observations=initial_observations,
        stream=stream,
    )
    estimates, failed = estimate_policies(settings=settings)
    notes = []
    if looks_back:
        with_memory = [
            name
            for name, estimate in estimates.items()
            if estimate.verdict.because("state")
        ]
        rows = max(
            (estimates[name].diagnostics["memory_rows"] for name in with_memory),
            default=0,
        )
        if rows:
            notes = [_LOOKED_BACK.format(name=with_memory[0], rows=rows)]
            settings = settings.model_copy(update={"history": rows})
            estimates, failed = estimate_policies(settings=settings)
    return _ranked(estimates, failed, notes, started)


def _estimate_policies(
    transitions: AnyLog,
    named: dict[str, Policy],
    progress: Callable[[str], Progress | None] | None,
    **options: Any,
) -> tuple[dict[str, Estimate], dict[str, str]]:
    """Estimates by policy name, and why others have none. options: of
    `evaluate_one_of_several`.

    Raises KofflineError for less than two.
    """
    estimates = dict[str, Estimate]()
    failed = dict[str, str]()
    for name, policy in named.items():
        progress_of_policy = None if progress is None else progress(name)
        try:
            estimates[name] = evaluate_one_of_several(
                transitions, policy, progress=progress_of_policy, **options
            )
        except ConfigError:
            raise
        except KofflineError as error:
            failed[name] = str(error)
            all_failed = len(failed) == len(named)
            if all_failed and len(set(failed.values())) == 1:
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
    explained = {
        name: _with_reasons(estimates[name], is_last=bool(answered)) for name in names
    }
    first = explained[names[0]]
    level = first.settings["level"]
    comparisons, method = _compare(answered, level)
    beaten = {comparison.worse for comparison in comparisons if comparison.significant}
    ranked = []
    for rank, (name, estimate) in enumerate(explained.items(), start=1):
        is_compared = name in answered or not answered
        ranked.append(
            RankedPolicy(
                rank=rank,
                name=name,
                value=estimate.value,
                interval=estimate.interval,
                verdict=estimate.verdict,
                uplift=estimate.uplift,
                maybe_best=is_compared and name not in beaten,
                warnings=estimate.warnings,
            )
        )
    about_log = {
        field.name: getattr(first, field.name)
        for field in dataclasses.fields(LogResult)
    }
    notes_of_all = [note for estimate in explained.values() for note in estimate.notes]
    about_log["notes"] = tuple(dict.fromkeys(notes_of_all))
    about_log["seconds"] = round(time.perf_counter() - started, 3)
    return PolicyRanking(
        policies=tuple(ranked),
        comparisons=comparisons,
        unranked=tuple({"name": name, "reason": why} for name, why in failed.items()),
        estimator=first.estimator,
        level=level,
        assumptions=_ASSUMPTIONS.format(method),
        warnings=(*notes, *_warnings(explained, failed)),
        **about_log,
    )


def _with_reasons(estimate: Estimate, is_last: bool) -> Estimate:
    """The estimate with its verdict's reasons among the warnings.

    is_last: whether an estimate without an interval is ranked behind others.
    """
    reasons = tuple(map(str, estimate.verdict.reasons))
    if estimate.interval is None and is_last:
        reasons = (_UNANSWERED.format(estimate.verdict),)
    return dataclasses.replace(estimate, warnings=(*reasons, *estimate.warnings))


def _compare(
    answered: dict[str, Estimate], level: float
) -> tuple[tuple[Comparison, ...], str]:
    """Compare by paired replicas if possible, else by intervals; returns also a clause
    on the method.
    """
    if len(answered) < 2:
        return (), _NONE
    names = list(answered)
    estimates = list(answered.values())
    values = [estimate.value for estimate in estimates]
    evidence = [
        estimate.evidence for estimate in estimates if estimate.evidence is not None
    ]
    if len(evidence) < len(estimates):
        intervals = [estimate.interval for estimate in estimates if estimate.interval]
        return compare_intervals(names, values, intervals, level), _UNPAIRED
    # (K, R), NaN where a replica diverged
    of_replicas = np.stack([arrays.replica_values for arrays in evidence])
    full = evidence[0].replica_roles.count("full")
    units = "episodes" if estimates[0].n_episodes else "rows"
    comparisons = compare_replicas(names, values, of_replicas, full, level)
    return comparisons, _PAIRED.format(units=units)


def _warnings(estimates: dict[str, Estimate], failed: dict[str, str]) -> list[str]:
    """Warnings: those shared by all policies once, the others with the policy's
    name.
    """
    first = next(iter(estimates.values()))
    shared = [
        text
        for text in first.warnings
        if all(text in estimate.warnings for estimate in estimates.values())
    ]
    warnings = [f"{name} is not ranked: {reason}" for name, reason in failed.items()]
    warnings += shared
    for name, estimate in estimates.items():
        warnings += [
            f"{name}: {text}" for text in estimate.warnings if text not in shared
        ]
    return warnings


def _named_policies(
    policies: Sequence[PolicySource] | Mapping[str, PolicySource], log: AnyLog
) -> dict[str, Policy]:
    """Policies by unique names, checked against the log before anything is fitted."""
    if isinstance(policies, (str, bytes)) or not isinstance(policies, Iterable):
        raise ConfigError(
            f"policies is {policies!r}; give a list of two or more policies"
        )
    names: list[str] = []
    specs = list(policies)
    if isinstance(policies, Mapping):
        names = list(map(str, policies))
        specs = list(policies.values())
    loaded = [
        as_policy(
            spec, log.action_space, log.observation_shape, None, log.metadata.features
        )
        for spec in specs
    ]
    if len(loaded) < 2:
        raise ConfigError(
            f"{len(loaded)} policy was given; a ranking needs two or more"
        )
    if not names:
        for policy in loaded:
            names.append(_unused_name(policy.name, names))
    return dict(zip(names, loaded, strict=True))


def _unused_name(name: str, names: list[str]) -> str:
    """The name, or ``name (2)``, ``name (3)`` … if it is among the names."""
    unused = name
    for number in itertools.count(2):
        if unused not in names:
            break
        unused = f"{name} ({number})"
    return unused
