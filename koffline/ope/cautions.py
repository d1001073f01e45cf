"""Reasons for care: what rows show without a model, and tests of what every estimator assumes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from koffline.data.flat import rows_are_linked
from koffline.data.transitions import Transitions
from koffline.ope import names
from koffline.ope.cross_fit import share_seen
from koffline.ope.results import Interval
from koffline.ope.verdict import FEW_EPISODES
from koffline.ope.workspace import Workspace

_UNLINKED = 0.01  # share of the rows inside episodes
_FEW_ZEROS = 0.05  # share of the other rewards
_ATOM = 0.2  # share of episodes of one length above which it is no chance


def cautions(log: Transitions) -> Iterator[str]:
    """Yield reasons for care that the rows show.

    They are next observations that are not those of the rows below; rewards that may stand a row too late,
    since the first ones alone are zero; ends after a fixed number of steps that no feature tells.
    """
    if not log.has_episodes:
        return
    starts, ends, length = log.episode_starts, log.episode_ends, int(log.episode_lengths.max())
    inside = np.delete(rows_are_linked(log.observations, log.next_observations), ends[:-1])
    if len(inside) and (share := 1.0 - float(inside.mean())) > _UNLINKED:
        yield f"states: {share:.0%} of next observations inside episodes are not those of the rows below"
    zero = np.asarray(log.rewards) == 0.0
    is_enough = FEW_EPISODES <= log.n_episodes < len(log)
    if is_enough and zero[starts].all() and np.delete(zero, starts).mean() <= _FEW_ZEROS:
        told = "rewards: the first one of every episode is 0 and hardly any other is; if each row holds that"
        yield f"{told} of the row before, move them up by one row"
    last = ends[log.episode_lengths == length]
    is_usual = length > 1 and len(last) >= max(FEW_EPISODES, _ATOM * log.n_episodes)
    if is_usual and log.terminated[last].all():
        rows = np.asarray(log.observations).reshape(len(log), -1)
        there, before = rows[last], np.delete(rows, last, axis=0)
        if not np.any((there.min(axis=0) > before.max(axis=0)) | (there.max(axis=0) < before.min(axis=0))):
            told = f"horizon: {len(last)} of {log.n_episodes} episodes end by themselves after step {length},"
            remedy = "flag it truncated if that is a limit of time, else add the step to the observation"
            yield f"{told} none is longer, and no feature tells that step; {remedy}"


def training_rows(workspace: Workspace) -> Iterator[str]:
    """Yield a reason for care if the policy was trained on these rows."""
    if (trained := workspace.policy.trained_on) is None:
        return
    share, _, is_more = share_seen(trained.fingerprints, workspace.transitions)
    if is_more or trained.sha256 == workspace.log.log.sha256:
        part = f"{share:.0%} of " if is_more and share < 0.995 else ""
        told = f"training: the policy was trained on {part}these rows, on which it looks better than it is"
        yield f"{told}; train on one part of the log and evaluate on the other (koffline data split)"


def failed_assumptions(value: float, interval: Interval, workspace: Workspace) -> Iterator[str]:
    """Yield reasons for care if the logged state is no state, or the world changes along the log."""
    shift = workspace.memory_shift
    if shift is not None and shift.matters(interval):
        rows = shift.rows + (workspace.settings.history or 0)
        part, remedy = "the row before" if rows == 1 else f"{rows} rows before", f"try --set history={rows}"
        if shift.rows == 0:
            part, remedy = "sums over the rows before", "add to it what adds up (a sum, a count, the step)"
        if shift.of_step:
            part, remedy = "the step", "add the step to it"
        told = f"{names.STATE}what happened earlier matters beyond the logged state; with {part} as part of"
        yield f"{told} it the value would be about {value + shift.value:.4g}: {remedy}"
    shift = workspace.drift_shift
    if shift is not None and shift.matters(interval):
        told = f"{names.DRIFT}the world changes along the log; if evenly, the value where the log ends is"
        yield f"{told} about {value + shift.value:.4g}: evaluate the later part of the log by itself"
