"""``select_policies``: from a log and several policies to a ranking, reading top to bottom."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from koffline.data.disk.log import LazyTransitions
from koffline.data.transitions import Transitions
from koffline.errors import ConfigError, KofflineError
from koffline.fitting import Progress
from koffline.ope.estimate import Estimate
from koffline.ope.evaluation import evaluate
from koffline.ope.selection.comparisons import (
    Comparison,
    ReplicaValues,
    compare_intervals,
    compare_policies,
)
from koffline.ope.selection.metrics import SelectionMetrics, score_selection
from koffline.ope.selection.ranking import PolicyRanking, RankedPolicy
from koffline.policies import ContinuousPolicy
from koffline.policies.base import Policy
from koffline.policy_specs import as_policy

_DRAWS = 0x647261  # keeps the policies' own draws apart from those of episodes and seeds
_PAIRED = (
    "Differences: Student t over networks retrained on the same resampled {units} with the same seeds for "
    "every policy; p-values corrected for all pairs (Holm)."
)
_UNPAIRED = (
    "Differences: judged by the intervals, as if any two estimates erred in opposite directions (safe, "
    "weak); p-values corrected for all pairs (Holm)."
)
_NONE = "Differences: not judged, an estimate has no interval."
_CHOSEN = (
    " None of this knows about a bias that the estimator has for one policy and not for another. The first "
    "policy was chosen for its estimate, which therefore leans high: confirm it on rows that took no part in "
    "the choice."
)
Truths = Sequence[float] | np.ndarray | Mapping[str, float]


def select_policies(
    transitions: Transitions | LazyTransitions,
    policies: Sequence[Any] | Mapping[str, Any],
    gamma: float | None = None,
    *,
    truths: Truths | None = None,
    threshold: float | None = None,
    top_k: int = 5,
    seed: int = 0,
    progress: Callable[[str], Progress | None] | None = None,
    **options: Any,
) -> PolicyRanking:
    """Rank policies by what they are worth, with intervals, and say which differ significantly.

    policies: as ``koffline.evaluate`` takes them, two or more; a mapping gives them names. truths: true
    values in the same order (or by name), for regret@k (k ≤ top_k), rank correlations and errors.
    threshold: a value that a policy should exceed. progress: a policy's name to the object that hears of its
    gradient steps. Further options are those of ``koffline.evaluate``.
    Raises KofflineError (DataError, PolicyError, ConfigError) in one line; a policy that cannot be
    evaluated (diverged networks, an estimator that does not apply) is left out and named, if two remain.
    """
    started = time.perf_counter()
    named = _named_policies(policies, transitions)
    true = _truths_by_name(truths, list(named))
    _check_numbers(top_k, threshold)
    estimates: dict[str, Estimate] = {}
    failed: dict[str, KofflineError] = {}
    for name, policy in named.items():
        watch = None if progress is None else progress(name)
        try:
            estimates[name] = evaluate(
                transitions, _same_draws(policy, seed), gamma, seed=seed, progress=watch, **options
            )
        except ConfigError:
            raise
        except KofflineError as error:
            failed[name] = error
    _check_enough(estimates, failed)
    unranked = {name: str(error) for name, error in failed.items()}
    return _ranking(transitions, estimates, unranked, true, threshold, top_k, started)


def _check_numbers(top_k: int, threshold: float | None) -> None:
    if top_k < 1:
        raise ConfigError(f"top_k is {top_k}; give a whole number from 1 on")
    if threshold is not None and not math.isfinite(threshold):
        raise ConfigError(f"threshold is {threshold}; give a finite number")


def _check_enough(estimates: dict[str, Estimate], failed: dict[str, KofflineError]) -> None:
    """A ranking needs two; what every policy stumbled over is a matter of the log, and said once."""
    if len(estimates) >= 2:
        return
    if not estimates and len({str(error) for error in failed.values()}) == 1:
        raise next(iter(failed.values()))
    reasons = "; ".join(f"{name}: {error}" for name, error in failed.items())
    raise KofflineError(f"fewer than two policies could be evaluated ({reasons})")


def _ranking(
    transitions: Transitions | LazyTransitions,
    estimates: dict[str, Estimate],
    unranked: dict[str, str],
    truths: dict[str, float] | None,
    threshold: float | None,
    top_k: int,
    started: float,
) -> PolicyRanking:
    """Order, compare and judge."""
    names = sorted(estimates, key=lambda name: -estimates[name].value)
    first = estimates[names[0]]
    level = first.settings["level"]
    comparisons, assumptions = _compare(names, estimates, level)
    beaten = {comparison.worse for comparison in comparisons if comparison.significant}
    ranked = tuple(
        _ranked(rank, name, estimates[name], truths, name not in beaten, threshold)
        for rank, name in enumerate(names, start=1)
    )
    return PolicyRanking(
        policies=ranked,
        comparisons=comparisons,
        estimator=first.estimator,
        gamma=first.gamma,
        level=level,
        seed=first.seed,
        n_transitions=first.n_transitions,
        n_episodes=first.n_episodes,
        source=first.source,
        data_sha256=first.data_sha256,
        seconds=time.perf_counter() - started,
        assumptions=assumptions + _CHOSEN,
        metrics=None if truths is None else _metrics(ranked, threshold, top_k),
        threshold=threshold,
        unranked=tuple(unranked.items()),
        warnings=_warnings(ranked, unranked),
        settings=first.as_dict()["settings"],
        versions=first.versions,
    )


def _ranked(
    rank: int,
    name: str,
    estimate: Estimate,
    truths: dict[str, float] | None,
    maybe_best: bool,
    threshold: float | None,
) -> RankedPolicy:
    interval = estimate.interval
    above: bool | None = None
    if (
        threshold is not None
        and interval is not None
        and (interval.low > threshold or interval.high < threshold)
    ):
        above = interval.low > threshold
    return RankedPolicy(
        rank=rank,
        name=name,
        value=estimate.value,
        interval=interval,
        truth=None if truths is None else truths[name],
        maybe_best=maybe_best,
        above_threshold=above,
        warnings=estimate.warnings,
        estimate=estimate,
    )


def _metrics(ranked: tuple[RankedPolicy, ...], threshold: float | None, top_k: int) -> SelectionMetrics:
    """The ranking against the truths of its policies."""
    intervals = [policy.interval for policy in ranked if policy.interval is not None]
    return score_selection(
        [policy.value for policy in ranked],
        [policy.truth for policy in ranked if policy.truth is not None],
        [(interval.low, interval.high) for interval in intervals] if len(intervals) == len(ranked) else None,
        threshold,
        top_k,
    )


def _compare(
    names: list[str], estimates: dict[str, Estimate], level: float
) -> tuple[tuple[Comparison, ...], str]:
    """By paired replicas, else by intervals, else not at all; and the sentence that says which."""
    found = [estimates[name] for name in names]
    intervals = [estimate.interval for estimate in found if estimate.interval is not None]
    if len(intervals) < len(found):
        return (), _NONE
    evidence = [estimate.evidence for estimate in found if estimate.evidence is not None]
    if len(evidence) == len(found):
        values = np.stack([each.replica_values for each in evidence])  # (K, R), NaN where one diverged
        replicas = ReplicaValues(values, np.isfinite(values), evidence[0].replica_roles.count("full"))
        units = "episodes" if found[0].n_episodes else "rows"
        return compare_policies(names, replicas, level), _PAIRED.format(units=units)
    return compare_intervals(names, [e.value for e in found], intervals, level), _UNPAIRED


def _warnings(ranked: tuple[RankedPolicy, ...], unranked: dict[str, str]) -> tuple[str, ...]:
    """What all policies share is said once; the rest with the policy's name."""
    shared = [text for text in ranked[0].warnings if all(text in policy.warnings for policy in ranked[1:])]
    own = [f"{p.name}: {text}" for p in ranked for text in p.warnings if text not in shared]
    left_out = [f"{name} is not ranked: {reason}" for name, reason in unranked.items()]
    return (*left_out, *shared, *own)


def _named_policies(
    policies: Sequence[Any] | Mapping[str, Any], log: Transitions | LazyTransitions
) -> dict[str, Policy]:
    """Every policy under a name of its own, checked against the log before anything is fitted."""
    if isinstance(policies, (str, bytes)) or not isinstance(policies, Iterable):
        raise ConfigError(f"policies is {policies!r}; give a list of two or more policies")
    given = policies.values() if isinstance(policies, Mapping) else policies
    loaded = [as_policy(policy, log.action_space, log.observation_shape) for policy in given]
    if len(loaded) < 2:
        raise ConfigError(f"{len(loaded)} policy was given; a ranking needs two or more")
    if isinstance(policies, Mapping):
        return dict(zip(map(str, policies), loaded, strict=True))
    named: dict[str, Policy] = {}
    for policy in loaded:
        count = sum(other.name == policy.name for other in named.values())
        named[policy.name if not count else f"{policy.name} ({count + 1})"] = policy
    return named


def _truths_by_name(truths: Truths | None, names: list[str]) -> dict[str, float] | None:
    """Finite numbers, one for each policy; ConfigError otherwise."""
    if truths is None:
        return None
    if isinstance(truths, Mapping):
        unknown = sorted(set(map(str, truths)) ^ set(names))
        if unknown:
            raise ConfigError(
                f"truths and policies differ in {', '.join(unknown)}; give one truth for each of "
                f"{', '.join(names)}"
            )
        found = {name: float(truths[name]) for name in names}
    else:
        if len(truths) != len(names):
            raise ConfigError(
                f"{len(truths)} truths for {len(names)} policies; give one for each, in the same order"
            )
        found = {name: float(truth) for name, truth in zip(names, truths, strict=True)}
    if not np.isfinite(list(found.values())).all():
        raise ConfigError("truths hold NaN or infinite numbers; give finite ones")
    return found


def _same_draws(policy: Policy, seed: int) -> Policy:
    """The policy with a stream of its own for its actions.

    Otherwise a stochastic policy would take draws from the stream that resamples episodes, and two policies
    would no longer be compared on the same ones.
    """
    if not isinstance(policy, ContinuousPolicy) or policy.sample_function is None:
        return policy
    own, sample = np.random.default_rng((_DRAWS, seed)), policy.sample_function
    return dataclasses.replace(
        policy, sample_function=lambda observations, generator: sample(observations, own)
    )
