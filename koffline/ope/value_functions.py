"""Value functions to be examined: one record for Q(s, a) or V(s), whoever fitted it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Float, Shaped

from koffline.data.transitions import ActionSpace, Discrete
from koffline.errors import ConfigError, DataError, KofflineError
from koffline.ope.provenance import Provenance
from koffline.policies import DiscretePolicy, Policy
from koffline.policies.base import chunk_rows_for, describe_actions, one_line

ACTION, STATE = "action", "state"


@dataclass(frozen=True, eq=False)
class ValueFunction:
    """Q(s, a) (kind ``"action"``) or V(s) (kind ``"state"``) in units of the discounted return.

    function: (observations (N, ...), actions (N,) or (N, k)) -> (N,), of observations alone for kind
    ``"state"``. It is called in chunks. trained_on: the rows it was fitted to, None where unknown. notes:
    sentences for a person about what these values are.
    """

    name: str
    kind: str
    function: Callable[..., Any] = field(repr=False)
    action_space: ActionSpace
    observation_shape: tuple[int, ...]
    trained_on: Provenance | None = field(default=None, repr=False)
    notes: tuple[str, ...] = ()

    def values(
        self, observations: Shaped[np.ndarray, "row *observation"], actions: np.ndarray | None = None
    ) -> Float[np.ndarray, " row"]:
        """Values (N,) float64; a state function ignores the actions. Raises DataError."""
        observations = np.asarray(observations)
        if observations.shape[1:] != self.observation_shape:
            raise DataError(
                f"{self.name}: observations have shape {observations.shape}, the value function takes "
                f"(N, {', '.join(map(str, self.observation_shape))}); pass one row per observation"
            )
        columns = [observations]
        if self.kind == ACTION:
            columns.append(self._checked_actions(actions, len(observations)))
        size = chunk_rows_for(self.observation_shape)
        parts = [
            self._checked_values([column[start : start + size] for column in columns], start)
            for start in range(0, len(observations), size)
        ]
        return np.concatenate(parts) if parts else np.zeros(0)

    def expected(
        self,
        observations: Shaped[np.ndarray, "row *observation"],
        policy: Policy,
        draws: int = 8,
        generator: np.random.Generator | None = None,
    ) -> Float[np.ndarray, " row"]:
        """E_{a~π} Q(s, a) (N,) float64: exact for discrete actions and deterministic policies.

        Otherwise the mean over ``draws`` draws per row from ``generator`` (seed 0 when None). A state
        function ignores the policy. Raises DataError, PolicyError.
        """
        if self.kind == STATE:
            return self.values(observations)
        total = np.zeros(len(observations))
        if isinstance(policy, DiscretePolicy):
            probabilities = policy.probabilities(observations)
            for action in range(policy.n):
                rows = np.flatnonzero(probabilities[:, action])  # not asked for actions that are never taken
                if len(rows):
                    values = self.values(observations[rows], np.full(len(rows), action))
                    total[rows] += probabilities[rows, action] * values
            return total
        count = 1 if policy.deterministic else draws
        if count < 1:
            raise ConfigError(f"draws is {draws}; give at least 1 draw of the policy's action per row")
        generator = np.random.default_rng(0) if generator is None else generator
        for _ in range(count):
            total += self.values(observations, policy.sample(observations, generator))
        return total / count

    def _checked_actions(self, actions: np.ndarray | None, rows: int) -> np.ndarray:
        space, dtype = self.action_space, np.int64 if isinstance(self.action_space, Discrete) else np.float64
        expected = (rows,) if isinstance(space, Discrete) else (rows, space.k)
        found = None if actions is None else np.shape(actions)
        if found != expected:
            raise DataError(
                f"{self.name}: actions have shape {found}, {expected} is needed for {rows} observations and "
                f"{describe_actions(space)}; pass one action per observation"
            )
        return np.asarray(actions, dtype=dtype)

    def _checked_values(self, columns: list[np.ndarray], first: int) -> np.ndarray:
        """(N,) float64 from an array, tensor or list, (N, 1) allowed; DataError with shape or row."""
        rows = len(columns[0])
        try:
            raw = self.function(*columns)
            raw = raw.detach().cpu() if hasattr(raw, "detach") else raw
            array = np.asarray(raw, dtype=np.float64)
        except KofflineError:
            raise
        except (Exception, SystemExit) as error:
            shapes = " and actions ".join(str(column.shape) for column in columns)
            raise DataError(
                f"{self.name}: the value function failed on observations {shapes} with {one_line(error)}; "
                "check that it accepts such a batch and returns numbers (N,)"
            ) from error
        if array.shape not in ((rows,), (rows, 1)):
            raise DataError(
                f"{self.name}: the values have shape {array.shape} for {rows} rows; "
                f"return one value per row, ({rows},)"
            )
        array = array.reshape(rows)
        if not np.isfinite(array).all():
            row = int(np.argmin(np.isfinite(array)))
            raise DataError(
                f"{self.name}: the value of row {first + row} is {array[row]}; the model has diverged or the "
                "row is outside what it accepts"
            )
        return array


@dataclass(frozen=True, eq=False)
class RowValues:
    """A value function at the rows of a log, in units of the return.

    ``now (N,)``: Q(s, a). ``later (N,)``: E_{a'~π} Q(s', a'), not discounted, whatever ``terminated`` says.
    ``starts (E,)``: E_{a~π} Q(s0, a). ``unseen``: share of rows whose values come from models that were not
    trained on their episode. ``notes`` say what else a reader must know of the model. Raises DataError for
    numbers that are not finite.
    """

    now: np.ndarray
    later: np.ndarray
    starts: np.ndarray
    unseen: float = 1.0
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("now", "later", "starts"):
            array = np.asarray(getattr(self, name), dtype=np.float64)
            if array.ndim != 1 or not np.isfinite(array).all():
                raise DataError(
                    f"the model's values ({name}) have shape {array.shape} or are not finite; "
                    "give one number per row or episode"
                )
            object.__setattr__(self, name, array)

    def check_sizes(self, n_rows: int, n_starts: int) -> None:
        """DataError unless there is one value per row and per start state of the log."""
        found = len(self.now), len(self.later), len(self.starts)
        if found != (n_rows, n_rows, n_starts):
            raise DataError(
                f"the model's values have lengths {found}, the log {n_rows} rows and {n_starts} starts; "
                "ask the model at the log's own rows and first states"
            )
