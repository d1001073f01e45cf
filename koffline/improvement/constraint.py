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
from koffline.improvement.parts import LogParts

_FORM = re.compile(r"\s*(?P<name>.+?)\s*<=\s*(?P<bound>[-+0-9.eE]+)\s*")
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
        if not isinstance(log, Transitions):
            raise ConfigError(
                "a constraint needs a log in memory; give the table, or fewer rows"
            )
        costs = self.costs
        if costs is None:
            costs = self._column(source, action_space, mapping)
        if costs.shape != (len(log),) or not np.isfinite(costs).all():
            raise DataError(
                f"the costs {self.name} have shape {costs.shape} for {len(log)} rows,"
                " or are not all finite; give one number for each row"
            )
        return costs

    def _column(
        self,
        source: LogSource,
        action_space: SpaceRequest | None,
        mapping: LogMapping,
    ) -> np.ndarray:
        """The column, read in place of the reward."""
        from koffline.data.objects import is_of_arrays
        from koffline.data.table.mapping import as_mapping

        if mapping is None or is_of_arrays(mapping):
            raise ConfigError(
                f"the constraint {self.text} names a column, but the log is no table"
                " with a mapping; in Python give constraint={'name': …, 'costs': one"
                " for each row, 'at_most': X}"
            )
        roles = as_mapping(mapping).model_copy(update={"reward": self.name})
        rewards = open_transitions(source, action_space, mapping=roles).rewards
        return np.asarray(rewards, dtype=np.float64)


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
        """costs (N,): of the rows of the whole log."""
        assert isinstance(log, Transitions)
        assert isinstance(parts.certify, Transitions)
        part_of_row = parts.part_of[log.units]
        return cls(
            choose=parts.choose.replace(rewards=costs[part_of_row == 1]),
            certify=parts.certify.replace(rewards=costs[part_of_row == 2]),
        )
