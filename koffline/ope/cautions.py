"""Reasons for care: what rows show without a model, and tests of what every estimator assumes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from koffline.data.flat import rows_are_linked
from koffline.data.transitions import Transitions
from koffline.ope.cross_fit import share_seen
from koffline.ope.results import Interval, Reason
from koffline.ope.verdict import FEW_EPISODES
from koffline.ope.workspace import Workspace

_UNLINKED = 0.01  # share of the rows inside episodes
_FEW_ZEROS = 0.05  # share of the other rewards


def cautions(log: Transitions) -> Iterator[Reason]:
    """Yield reasons for care that the rows show.

    They are next observations that are not those of the rows below, and rewards that may stand a row too
    late, since the first ones alone are zero.
    """
    if not log.has_episodes:
        return
    inside = np.delete(rows_are_linked(log.observations, log.next_observations), log.episode_ends[:-1])
    if len(inside) and (share := 1.0 - float(inside.mean())) > _UNLINKED:
        told = f"{share:.0%} of next observations inside episodes are not those of the rows below"
        yield Reason("states", told)
    zero, starts = np.asarray(log.rewards) == 0.0, log.episode_starts
    is_enough = FEW_EPISODES <= log.n_episodes < len(log)
    if is_enough and zero[starts].all() and np.delete(zero, starts).mean() <= _FEW_ZEROS:
        told = "the first one of every episode is 0 and hardly any other is"
        remedy = "if each row holds that of the row before, move them up by one row"
        yield Reason("rewards", f"{told}; {remedy}")


def training_rows(workspace: Workspace) -> Iterator[Reason]:
    """Yield a reason for care if the policy was trained on these rows."""
    if (trained := workspace.policy.trained_on) is None:
        return
    share, _, is_more = share_seen(trained.fingerprints, workspace.transitions)
    if is_more or trained.sha256 == workspace.log.log.sha256:
        part = f"{share:.0%} of " if is_more and share < 0.995 else ""
        told = f"the policy was trained on {part}these rows, on which it looks better than it is"
        remedy = "train on one part of the log and evaluate on the other (koffline data split)"
        yield Reason("training", f"{told}; {remedy}")


def failed_assumptions(value: float, interval: Interval, workspace: Workspace) -> Iterator[Reason]:
    """Yield reasons for care if the logged state is no state, or the world changes along the log."""
    shift = workspace.memory_shift
    if shift is not None and shift.matters(interval):
        rows = shift.rows + (workspace.settings.history or 0)
        part, remedy = "the row before" if rows == 1 else f"{rows} rows before", f"try --set history={rows}"
        if shift.rows == 0:
            part, remedy = "sums over the rows before", "add to it what adds up (a sum, a count, the step)"
        if shift.of_step:
            part, remedy = "the step", "add the step to it, or flag ends truncated that are limits of time"
        told = f"what happened earlier matters beyond the logged state; with {part} as part of it the value"
        yield Reason("state", f"{told} would be about {value + shift.value:.4g}: {remedy}")
    shift = workspace.drift_shift
    if shift is not None and shift.matters(interval):
        told = "the world changes along the log; if evenly, the value where the log ends is about"
        remedy = "evaluate the later part of the log by itself"
        yield Reason("drift", f"{told} {value + shift.value:.4g}: {remedy}")
