"""Who acts in a batch of episodes, and with which random numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from koffline.builders.copies import BLOCK, Copies
from koffline.data.transitions import Discrete
from koffline.policies.base import ContinuousPolicy, DiscretePolicy, Policy, pick_actions


class Acted(NamedTuple):
    """Actions (n,) or (n, k) as the environment receives them; whether each was clipped to the space."""

    actions: np.ndarray
    log_probabilities: np.ndarray
    clipped: np.ndarray


class Actor:
    """The policies of a batch of episodes: one per episode, drawn by weight.

    Each episode has a stream of its own: one number chooses its policy, then come those of its actions.
    """

    def __init__(
        self,
        policies: Sequence[Policy],
        weights: Sequence[float],
        seed: int,
        episodes: Sequence[int],
        copies: Copies,
    ) -> None:
        keys = [np.random.SeedSequence(seed, spawn_key=(episode, 1)) for episode in episodes]
        generators = [np.random.default_rng(key) for key in keys]
        self._policies, self._generators, self._copies = policies, generators, copies
        ends = np.cumsum(weights) / sum(weights)
        drawn = np.array([generator.random() for generator in generators])
        # The last end may be rounded below one; a policy of weight zero ends where the one before it does.
        self._chosen = np.minimum(np.searchsorted(ends, drawn, side="right"), np.flatnonzero(weights)[-1])

    def act(self, step: int, running: np.ndarray, observations: np.ndarray) -> Acted:
        """Actions of all running copies, each by its own policy; log-probabilities of discrete ones."""
        space, log_probabilities = self._copies.action_space, np.zeros(len(running))
        drawn: np.ndarray
        if isinstance(space, Discrete):
            if step % BLOCK == 0:
                self._numbers = np.stack([generator.random(BLOCK) for generator in self._generators])
            drawn, numbers = np.zeros(len(running), dtype=np.int64), self._numbers[running, step % BLOCK]
        else:
            drawn, numbers = np.zeros((len(running), space.k)), log_probabilities
        for index in np.unique(self._chosen[running]):
            mine, policy = self._chosen[running] == index, self._policies[index]
            if isinstance(policy, DiscretePolicy):
                table = policy.probabilities(observations[mine])
                drawn[mine] = pick_actions(table, numbers[mine])
                log_probabilities[mine] = np.log(table[np.arange(len(table)), drawn[mine]])
            else:
                drawn[mine] = self._sample(policy, running[mine], observations[mine])
        return self._played(drawn, log_probabilities)

    def _sample(self, policy: ContinuousPolicy, copies: np.ndarray, observations: np.ndarray) -> np.ndarray:
        """(n, k); a stochastic policy is asked row by row, as each episode has its own generator.

        That costs a call of it for each row; a deterministic one is asked once for all copies.
        """
        if policy.deterministic:
            return policy.mean(observations)
        rows = zip(copies, observations, strict=True)
        return np.concatenate([policy.sample(row[None], self._generators[copy]) for copy, row in rows])

    def _played(self, drawn: np.ndarray, log_probabilities: np.ndarray) -> Acted:
        space = self._copies.action_space
        if isinstance(space, Discrete):
            return Acted(drawn, log_probabilities, np.zeros(len(drawn), dtype=bool))
        inside = np.clip(drawn, space.low, space.high)
        return Acted(
            inside.astype(self._copies.action_dtype), log_probabilities, (inside != drawn).any(axis=1)
        )
