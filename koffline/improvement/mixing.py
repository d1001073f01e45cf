"""Mixtures of a candidate and the clone as policies."""

from __future__ import annotations

from koffline.data.transitions import Transitions
from koffline.improvement.clone import Clone
from koffline.improvement.settings import share_name
from koffline.policies import Mixture, MixturePart, Policy
from koffline.policies.mixtures import mixture_policy


def mixture_of(clone: Clone, candidate: MixturePart, share: float) -> Mixture:
    """(1 − share) · clone + share · candidate, in every step anew."""
    if share == 1.0:
        return Mixture((candidate,), (1.0,))
    return Mixture((clone.part, candidate), (1.0 - share, share))


def policy_of(mixture: Mixture, name: str, log: Transitions) -> Policy:
    """The mixture as a policy for the log."""
    return mixture_policy(mixture, name, log.action_space, log.observation_shape)


def name_of(candidate: str, share: float) -> str:
    """The name of a mixture: the candidate's, and the share if it is not 1."""
    if share == 1.0:
        return candidate
    return f"{candidate}@{share_name(share)}"
