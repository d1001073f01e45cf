"""Finite processes seen through continuous observations: exact values for estimators
that know only numbers.

Each state has a point in R^d; an observation is that point plus optional jitter that
the dynamics ignore and that never brings two states closer than they can be told apart.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from koffline.envs.boxes import Actions, Observations, Outcome, States
from koffline.envs.finite import FiniteMDP, Probabilities
from koffline.errors import ConfigError
from scripts.bench.rollouts import EpisodeLog


@dataclass(frozen=True, eq=False)
class EmbeddedMDP:
    """A vectorised world (see :mod:`scripts.bench.classic`) around a finite process.

    Its states are rows (state number, jitter_1 … jitter_d), so that the next
    observation of one step is the observation of the following one. Raises ConfigError
    when jitter could make two states look alike.
    """

    mdp: FiniteMDP
    coordinates: np.ndarray  # (S, d)
    # observations lie within ± jitter of the state's point, per coordinate
    jitter: float = 0.0

    bounds: None = None

    def __post_init__(self) -> None:
        points = np.asarray(self.coordinates, dtype=np.float64)
        if points.ndim != 2 or len(points) != self.mdp.n_states:
            raise ConfigError(
                f"coordinates must have shape ({self.mdp.n_states}, d), got"
                f" {points.shape}: one per state"
            )
        object.__setattr__(self, "coordinates", points)
        gap = np.abs(points[:, None] - points[None]).max(axis=2)
        nearest = float(gap[~np.eye(len(points), dtype=bool)].min())
        if not 0.0 <= 2 * self.jitter < nearest:
            raise ConfigError(
                f"jitter {self.jitter} mixes states {nearest:.3g} apart; keep it below"
                " half of that"
            )

    @property
    def n_actions(self) -> int:
        """Number of actions of the finite process."""
        return self.mdp.n_actions

    def reset(self, n: int, generator: np.random.Generator) -> States:
        """Draw start states from the initial distribution."""
        index = generator.choice(self.mdp.n_states, size=n, p=self.mdp.initial)
        return self._place(index, generator)

    def step(
        self, state: States, action: Actions, generator: np.random.Generator
    ) -> Outcome:
        """Advance the finite process; jitter is drawn anew."""
        following, rewards, terminated = self.mdp.step(
            state[:, 0].astype(np.int64), action, generator
        )
        return Outcome(self._place(following, generator), rewards, terminated)

    def observe(self, state: States) -> Observations:
        """The state's point plus its jitter."""
        return (self.coordinates[state[:, 0].astype(np.int64)] + state[:, 1:]).astype(
            np.float32
        )

    def states_of(
        self, observations: Float[np.ndarray, "row d"]
    ) -> Int[np.ndarray, " row"]:
        """State numbers (N,) of observations (N, d): the point nearest in the maximum
        norm.
        """
        gap = np.abs(
            np.asarray(observations)[:, None].astype(np.float64)
            - self.coordinates[None]
        ).max(axis=2)
        return gap.argmin(axis=1)

    def policy(self, table: Probabilities) -> TablePolicy:
        """The policy with these probabilities (S, A), as a callable on observations."""
        return TablePolicy(self, np.asarray(table, dtype=np.float64))

    def log_tuples(
        self,
        table: Probabilities,
        n: int,
        generator: np.random.Generator,
        states: Float[np.ndarray, " state"] | None = None,
    ) -> EpisodeLog:
        """Draw n independent tuples, s from ``states`` (S,) (default: uniform); each is
        its own episode.
        """
        sample = self.mdp.sample_transitions(n, table, generator, states)
        start = self._place(sample.states, generator)
        return EpisodeLog(
            observations=self.observe(start),
            actions=sample.actions,
            rewards=sample.rewards,
            next_observations=self.observe(self._place(sample.next_states, generator)),
            terminated=sample.terminated,
            truncated=np.zeros(n, dtype=bool),
            episode_ids=np.arange(n),
            steps=np.zeros(n, dtype=np.int64),
            start_states=start,
        )

    def _place(
        self, index: Int[np.ndarray, " copy"], generator: np.random.Generator
    ) -> States:
        spread = generator.uniform(
            -self.jitter, self.jitter, size=(len(index), self.coordinates.shape[1])
        )
        return np.column_stack([index.astype(np.float64), spread])


@dataclass(frozen=True, eq=False)
class TablePolicy:
    """Probabilities (S, A) looked up by the state that an observation shows."""

    world: EmbeddedMDP
    table: Probabilities

    def __call__(
        self, observations: Float[np.ndarray, "row d"]
    ) -> Float[np.ndarray, "row action"]:
        """Probabilities (N, A) of observations (N, d)."""
        return self.table[self.world.states_of(observations)]
