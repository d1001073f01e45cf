"""Reasons for a verdict: why a log does not answer, and why to act on an answer with
care.

Every threshold is in `koffline.ope.thresholds`.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from koffline.data.raw import CAUTIONS
from koffline.data.spaces import ACTIONS
from koffline.data.transitions import Transitions
from koffline.errors import counted
from koffline.ope import thresholds
from koffline.ope.assumptions.action_order import find_other_order, usual_orders
from koffline.ope.assumptions.markov import Shift
from koffline.ope.cross_fit import share_seen
from koffline.ope.log.coverage import (
    Coverage,
    clause_on_holes,
    describe_coverage,
    doubts_of_weights,
)
from koffline.ope.log.facts import Limits, LogFacts
from koffline.ope.results import Interval, PointEstimate, Reason
from koffline.ope.workspace import Workspace
from koffline.policies import DiscretePolicy


def why_not_answerable(
    estimate: PointEstimate, coverage: Coverage, scale: float
) -> Reason | None:
    """Reason why the log does not answer; None if it does. scale: the rms return."""
    if coverage.reasons:
        return Reason("support", coverage.reasons[0])
    if estimate.interval is None:
        because = ""
        if estimate.why_no_interval:
            because = f", because {estimate.why_no_interval}"
        return Reason("interval", f"there is no interval{because}")
    if 0.5 * estimate.interval.width > thresholds.TOO_WIDE * scale:
        return Reason(
            "size",
            "the interval reaches more than the rms return either way; log more"
            " episodes",
        )
    return None


# --- Reasons from the estimate and the facts of the log ------------------------------


def doubts_of_estimate(
    estimate: PointEstimate,
    interval: Interval,
    limits: Limits,
    coverage: Coverage,
    scale: float,
    robust: PointEstimate | None,
) -> Iterator[Reason]:
    """Yield reasons to act on an answer with care, the most basic first.

    interval: the estimate's. scale: the rms return. robust: the doubly robust estimate
    by the same networks; None if the estimate has none.
    """
    yield from doubts_of_support(coverage)
    yield from doubts_of_size(limits.facts)
    yield from doubts_of_horizon(limits.facts)
    yield from doubts_of_width(interval, limits.facts, scale)
    if robust is None:
        yield from doubts_of_episode_weights(estimate)
    else:
        yield from doubts_of_robust(interval, robust)


def doubts_of_support(coverage: Coverage) -> Iterator[Reason]:
    """Yield reasons where the log hardly holds the policy's actions."""
    if coverage.fraction < thresholds.LOW_COVERAGE:
        yield Reason("support", describe_coverage(coverage.fraction))
    if coverage.of_starts < thresholds.LOW_COVERAGE_OF_STARTS:
        yield Reason("support", coverage.clause_on_starts)
    if coverage.holes:
        yield Reason("support", clause_on_holes(coverage.holes))
    if coverage.unlogged > thresholds.SOME_UNLOGGED:
        yield Reason(
            "support",
            f"{coverage.clause_on_unlogged}; it is valued as if it took its others"
            " there",
        )


def doubts_of_size(facts: LogFacts) -> Iterator[Reason]:
    """Yield reasons where few units, or few endings, tell policies apart."""
    if facts.units < thresholds.FEW_UNITS:
        units = counted(round(facts.units), "independent unit")
        yield Reason("size", f"{units} (episodes, rows or clusters) in the log")
    if facts.endings is not None and facts.endings < thresholds.FEW_WEIGHTED:
        endings = counted(
            facts.endings, "episode", "ends by itself", "end by themselves"
        )
        yield Reason("size", f"only {endings}, and no reward tells policies apart")


def doubts_of_horizon(facts: LogFacts) -> Iterator[Reason]:
    """Yield a reason where much of the value lies beyond the longest episode."""
    if facts.unseen >= thresholds.MUCH_UNSEEN:
        yield Reason(
            "horizon",
            f"{facts.unseen:.0%} of a constant reward lies beyond the longest episode",
        )


def doubts_of_width(
    interval: Interval, facts: LogFacts, scale: float
) -> Iterator[Reason]:
    """Yield a reason where the interval is wide. scale: the rms return."""
    half_width = 0.5 * interval.width
    usual_return = facts.sizes.mean if facts.episodes else None
    if half_width > thresholds.WIDE * scale:
        yield Reason(
            "size",
            f"the interval reaches {half_width / scale:.0%} of the rms return either"
            " way",
        )
    elif usual_return is not None and half_width > (
        thresholds.WIDE_OF_USUAL * usual_return
    ):
        yield Reason(
            "size",
            f"the interval reaches {half_width / usual_return:.0%} of the mean |return|"
            " either way: few returns make up the value",
        )


def doubts_of_episode_weights(estimate: PointEstimate) -> Iterator[Reason]:
    """Yield reasons against an estimate from importance weights of episodes."""
    size = estimate.effective_sample_size
    if size is not None and size < thresholds.FEW_WEIGHTED:
        yield Reason(
            "support",
            f"only {size:.1f} episodes (effective number) carry the weight",
        )
    for deviation in estimate.diagnostics.get("probabilities", ()):
        yield Reason("contradiction", deviation.rstrip("."))


def doubts_of_robust(interval: Interval, robust: PointEstimate) -> Iterator[Reason]:
    """Yield reasons from the doubly robust estimate and its weights of rows."""
    # neither is cut at what the rewards allow
    if not interval.as_measured.holds(robust.value):
        yield Reason(
            "contradiction",
            f"the doubly robust estimate {robust.value:.4g} lies outside the interval",
        )
    yield from doubts_of_weights(robust.diagnostics)


# --- Reasons from the rows ------------------------------------------------------------


def doubts_of_rows(
    workspace: Workspace, interval: Interval | None, robust: PointEstimate | None
) -> Iterator[Reason]:
    """Yield reasons for care that come from the data, not from the estimate.

    interval: the estimate's. robust: the doubly robust estimate, whose value the tests
    of memory and drift shift; None if the estimate has none.
    """
    yield from cautions_of_reading(workspace)
    yield from training_rows(workspace)
    yield from structure_reasons(workspace)
    yield from order_of_actions(workspace)
    if robust is not None and interval is not None:
        yield from failed_assumptions(robust.value, interval, workspace)


def cautions_of_reading(workspace: Workspace) -> Iterator[Reason]:
    """Yield the cautions that reading the log noted, as "kind: text"."""
    for note in workspace.log.log.metadata.notes:
        kind, _, text = note.partition(": ")
        if kind in CAUTIONS:
            yield Reason(kind, text)


def training_rows(workspace: Workspace) -> Iterator[Reason]:
    """Yield a reason for care if the policy was trained on these rows."""
    trained = workspace.policy.trained_on
    if trained is None:
        return
    share, _, is_clear = share_seen(trained.fingerprints, workspace.transitions)
    # In a world that repeats itself equal rows are no evidence, but an equal file is.
    if not is_clear and trained.sha256 == workspace.log.log.sha256:
        share = 1.0
        is_clear = True
    if is_clear and share > thresholds.FEW_SEEN:
        yield Reason(
            "training",
            f"the policy was trained on {share:.0%} of these rows, on which it looks"
            " better than it is; train on one part of the log and evaluate on the"
            " other (koffline data split)",
        )


def structure_reasons(workspace: Workspace) -> list[Reason]:
    """Reasons for care that the rows show: signs that the log is not what it says it
    is.
    """
    return [Reason(symptom.kind, symptom.text) for symptom in workspace.symptoms]


def order_of_actions(workspace: Workspace) -> Iterator[Reason]:
    """Yield a reason for care if the policy's columns seem to be in another order than
    the log's actions.
    """
    log = workspace.transitions
    policy = workspace.policy
    names = workspace.log.log.metadata.extra.get(ACTIONS)
    if not isinstance(policy, DiscretePolicy) or not isinstance(names, list):
        return
    if len(names) != policy.n:
        return
    texts = list(map(str, names))
    if len(set(texts)) < len(texts) or not any(usual_orders(log.actions, texts)):
        return
    probabilities = policy.probabilities(log.observations, log.action_mask)
    other = find_other_order(probabilities, log.actions, log.units, texts)
    if other is not None:
        yield Reason("actions", str(other))


def failed_assumptions(
    value: float, interval: Interval, workspace: Workspace
) -> Iterator[Reason]:
    """Yield reasons for care if the logged state is not Markov, or the world changes
    along the log.

    value: the doubly robust estimate, which the shifts are added to.
    """
    memory = workspace.memory_shift
    if memory is not None and memory.matters(interval):
        yield _reason_of_memory(
            value, memory, workspace.settings.history or 0, workspace.transitions
        )
    drift = workspace.drift_shift
    if drift is not None and drift.matters(interval):
        yield Reason(
            "drift",
            "the world changes along the log; if evenly, the value where the log ends"
            f" is about {value + drift.value:.4g}: evaluate the later part of the log"
            " by itself",
        )


def _reason_of_memory(
    value: float, shift: Shift, history: int, log: Transitions
) -> Reason:
    """Reason that names what the state lacks (the step, sums over earlier rows, or
    those rows), the value with it as part of the state, and the remedy.

    value: the doubly robust estimate. history: number of previous rows that are part of
    the state already.
    """
    with_it = f"as part of it the value would be about {value + shift.value:.4g}"
    if shift.of_step and _share_cut_at_last_step(log) > thresholds.MANY_CUT:
        # A value with the step as part of the state would extrapolate to later steps,
        # which no episode reached.
        consequence = "the step does"
        remedy = "log what changes with it (a phase, the day of the week)"
    elif shift.of_step:
        consequence = f"with the step {with_it}"
        remedy = "add the step to it, or flag ends truncated that are limits of time"
    elif shift.rows == 0:
        consequence = f"with sums over the rows before {with_it}"
        remedy = "add to it what adds up (a sum, a count, the step)"
    else:
        n_rows = shift.rows + history
        rows = "the row before" if n_rows == 1 else f"{n_rows} rows before"
        consequence = f"with {rows} {with_it}"
        remedy = f"try --set history={n_rows}"
    return Reason(
        "state",
        "what happened earlier matters beyond the logged state;"
        f" {consequence}: {remedy}",
    )


def _share_cut_at_last_step(log: Transitions) -> float:
    """Share of the episodes that are as long as the longest one and were cut."""
    lengths = log.episode_lengths
    is_longest = lengths == lengths.max()
    return float(np.mean(is_longest & log.truncated[log.episode_ends]))
