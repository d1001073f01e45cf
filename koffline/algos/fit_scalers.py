"""d3rlpy's scalers fitted on columns, hundreds of times faster than by one transition after the other."""

from __future__ import annotations

from typing import Any

import numpy as np

from koffline.data.d3rlpy_import import import_d3rlpy
from koffline.data.disk.replay import LazyReplayBuffer
from koffline.data.replay import ColumnarReplayBuffer
from koffline.data.statistics import ColumnStatistics
from koffline.data.transitions import Transitions
from koffline.errors import ConfigError

import_d3rlpy()

from d3rlpy.algos.utility import build_scalers_with_transition_picker  # noqa: E402
from d3rlpy.preprocessing import (  # noqa: E402
    MinMaxActionScaler,
    MinMaxObservationScaler,
    MinMaxRewardScaler,
    ReturnBasedRewardScaler,
    StandardObservationScaler,
    StandardRewardScaler,
)

_ROWS_CHECKED = 1000


def fit_scalers(algo: Any, buffer: ColumnarReplayBuffer) -> None:
    """Fit the scalers of an algorithm that have not been, on the log, in place.

    The numbers are those of d3rlpy's own way. Raises ConfigError where a scaler divides by nothing or needs
    episodes that the log does not have.
    """
    log = buffer.transitions
    columns = {"observation": log.observations, "action": log.actions, "reward": log.rewards}
    for name, column in columns.items():
        scaler = getattr(algo, f"{name}_scaler")
        if scaler is not None and not scaler.built:
            lazy = buffer.statistics if isinstance(buffer, LazyReplayBuffer) else None
            statistics = ColumnStatistics.of(column) if lazy is None else getattr(lazy, f"{name}s")
            _fit(scaler, statistics, log, None if lazy is None else lazy.returns)
    build_scalers_with_transition_picker(algo, buffer)  # scalers of other kinds
    for name, column in columns.items():
        _check(getattr(algo, f"{name}_scaler"), name, column)


def _fit(
    scaler: Any, column: ColumnStatistics, log: Transitions, returns: tuple[float, float] | None
) -> None:
    """The kinds that are known here. returns: the extremes of a log on disk."""
    kind = type(scaler)
    if kind is StandardObservationScaler:
        scaler.mean, scaler.std = column.mean, column.deviation
    elif kind is StandardRewardScaler:
        scaler.mean, scaler.std = float(column.mean), float(column.deviation)
    elif kind in (MinMaxObservationScaler, MinMaxActionScaler):
        scaler.minimum, scaler.maximum = column.minimum, column.maximum
    elif kind is MinMaxRewardScaler:
        scaler.minimum, scaler.maximum = float(column.minimum), float(column.maximum)
    elif kind is ReturnBasedRewardScaler:
        if not log.has_episodes:
            raise ConfigError(
                "algo.params.reward_scaler 'return' needs episodes, the log has none; choose another"
            )
        if returns is None:
            found = log.returns()
            returns = float(found.min()), float(found.max())
        scaler.return_min, scaler.return_max = returns


def _check(scaler: Any, name: str, column: np.ndarray) -> None:
    """Columns that never change have no extent to divide by."""
    if scaler is None:
        return
    with np.errstate(all="ignore"):
        try:
            scaled = scaler.transform_numpy(np.asarray(column[:_ROWS_CHECKED], dtype=np.float32))
        except ZeroDivisionError:
            scaled = np.full(1, np.nan)
    if not np.isfinite(scaled).all():
        raise ConfigError(
            f"algo.params.{name}_scaler '{scaler.get_type()}' gives {name}s that are not finite (does a "
            "column never change?); leave it out or choose another"
        )
