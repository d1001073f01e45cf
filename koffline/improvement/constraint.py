"""A second return that must not exceed a bound: ``"cost_column <= X"``."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from koffline.data.disk.log import AnyLog
from koffline.data.sources import LogMapping, LogSource, open_transitions
from koffline.data.spaces import SpaceRequest
from koffline.data.transitions import Transitions
from koffline.errors import ConfigError, DataError
from koffline.improvement.large_logs import check_held
from koffline.improvement.parts import LogParts

_FORM = re.compile(r"\s*(?P<name>.+?)\s*<=\s*(?P<bound>[-+0-9.eE]+)\s*")
# in messages on a column that was read in place of the reward
_WORDS = {
    "(reward)": "(constraint)",
    "(reward '": "(constraint '",
    "(a reward)": "(a constraint)",
}
_IMPUTED = "; replace them (--impute"
_HOW = "write it as \"COLUMN <= X\", as in --constraint 'cost <= 2.5'"


@dataclass(frozen=True, eq=False)
class Constraint:
    """The discounted sum of ``name`` is to be at most ``at_most``. ``costs (N,)``: of
    every row; None: a column of the table that the log comes from.
    """

    name: str
    at_most: float
    costs: np.ndarray | None = None

    @property
    def text(self) -> str:
        """The constraint as it is written."""
        return f"{self.name} <= {self.at_most:.10g}"

    def identity(self, costs: np.ndarray) -> str:
        """What tells it from another constraint, or from other costs (N,)."""
        digest = hashlib.sha256(costs.astype("<f8").tobytes()).hexdigest()
        return f"{self.name} <= {self.at_most!r} of costs {digest[:16]}"

    def costs_of(
        self,
        log: AnyLog,
        source: LogSource,
        action_space: SpaceRequest | None,
        mapping: LogMapping,
    ) -> np.ndarray:
        """Costs (N,) of the rows of the log.

        source, action_space, mapping: what the log was opened from. Raises ConfigError
        if there are none, and DataError for a column that the table has not.
        """
        costs = self.costs
        if costs is None:
            costs = self._column(log, source, action_space, mapping)
        check_held(log, f"the constraint {self.text}")
        if costs.shape != (len(log),) or not np.isfinite(costs).all():
            raise DataError(
                f"the costs {self.name} have shape {costs.shape} for {len(log)} rows,"
                " or are not all finite; give one number for each row"
            )
        return costs

    def _column(
        self,
        log: AnyLog,
        source: LogSource,
        action_space: SpaceRequest | None,
        mapping: LogMapping,
    ) -> np.ndarray:
        """The column, read in place of the reward. log: as the table was read."""
        from koffline.data.objects import is_of_arrays
        from koffline.data.table.mapping import as_mapping

        if mapping is None or is_of_arrays(mapping):
            raise ConfigError(
                f"the constraint {self.text} names a column, but the log is no table"
                " with a mapping; in Python give constraint={'name': …, 'costs': one"
                " for each row, 'at_most': X}"
            )
        assert isinstance(log, Transitions), "tables are read into memory"
        column = self.name
        if column in log.feature_names:
            # no reward may be an observation, but a formula of it may
            column = f"`{column}` + 0"
        roles = as_mapping(mapping).model_copy(update={"reward": column})
        try:
            rewards = open_transitions(source, action_space, mapping=roles).rewards
        except DataError as error:
            # the table was read before, so that it fails by this column
            raise DataError(self._as_of_cost(str(error))) from None
        return np.asarray(rewards, dtype=np.float64)

    def _as_of_cost(self, message: str) -> str:
        """A message on the column that was read as the reward, in words of costs."""
        for of_reward, of_cost in _WORDS.items():
            message = message.replace(of_reward, of_cost)
        missing, is_missing, _ = message.partition(_IMPUTED)
        if is_missing:  # only what a log holds can be replaced
            message = f"{missing}; give a number in every row"
        return f"constraint {self.text}: {message}"


def parse_constraint(
    constraint: str | Mapping[str, Any] | None,
) -> Constraint | None:
    """The constraint of a text or a mapping. Raises ConfigError."""
    if constraint is None:
        return None
    if isinstance(constraint, Mapping):
        if set(constraint) != {"name", "costs", "at_most"}:
            raise ConfigError(
                f"constraint has the keys {', '.join(map(str, constraint))}; give"
                " name, costs and at_most"
            )
        name = str(constraint["name"])
        bound = constraint["at_most"]
        costs = _numbers(name, constraint["costs"])
        shown = f"{name} <= {str(bound)[:40]}"
    elif not isinstance(constraint, str):
        raise ConfigError(f"constraint is a {type(constraint).__name__}; {_HOW}")
    else:
        match = _FORM.fullmatch(constraint)
        if match is None:
            raise ConfigError(f"constraint is {constraint!r}; {_HOW}")
        name = match["name"]
        bound = match["bound"]
        costs = None
        shown = constraint
    try:
        at_most = float(bound)
    except (TypeError, ValueError):
        at_most = math.nan
    if not math.isfinite(at_most):
        raise ConfigError(f"constraint is {shown!r}, without a finite bound; {_HOW}")
    return Constraint(name, at_most, costs)


def _numbers(name: str, costs: object) -> np.ndarray:
    """Costs as numbers. Raises DataError."""
    try:
        return np.asarray(costs, dtype=np.float64)
    except (TypeError, ValueError):
        raise DataError(
            f"the costs {name} are not all numbers; give one number for each row"
        ) from None


@dataclass(frozen=True, eq=False)
class CostLogs:
    """The parts to choose and to certify on, with costs in place of rewards."""

    choose: Transitions
    certify: Transitions

    @classmethod
    def of(cls, parts: LogParts, log: AnyLog, costs: np.ndarray) -> CostLogs:
        """costs (N,): of the rows of the whole log. A row that stands for copies gets
        their weighted mean, so that every weighted sum is that of all rows.
        """
        assert isinstance(log, Transitions)
        assert isinstance(parts.certify, Transitions)
        part_of_row = parts.part_of[log.units]
        if len(np.unique(parts.row_of)) < len(log):
            costs = _mean_of_copies(costs, log.row_weights, parts.row_of)
        return cls(
            choose=parts.choose.replace(rewards=costs[part_of_row == 1]),
            certify=parts.certify.replace(rewards=costs[part_of_row == 2]),
        )


def _mean_of_copies(
    costs: np.ndarray, weights: np.ndarray, row_of: np.ndarray
) -> np.ndarray:
    """Weighted means (N,) of the costs of equal rows; of all copies' costs alike where
    they have no weight.
    """
    # weights near zero decide where all are zero, and change no other mean
    counted = np.maximum(weights, 1e-12 * weights.max())
    sums = np.bincount(row_of, weights=counted * costs, minlength=len(costs))
    totals = np.bincount(row_of, weights=counted, minlength=len(costs))
    means = np.zeros(len(costs))
    np.divide(sums, totals, out=means, where=totals > 0.0)
    return means
