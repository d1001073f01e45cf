"""Values of groups of start states, by the networks of one evaluation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped

from koffline.data.columns import natural_key
from koffline.data.spaces import Features
from koffline.data.transitions import Transitions
from koffline.data.units import cluster_sums
from koffline.errors import (
    ConfigError,
    DataError,
    counted,
    listed,
    nearest_name,
    printable,
)
from koffline.json_types import JsonObject
from koffline.ope import thresholds
from koffline.ope.assumptions.markov import group_shift
from koffline.ope.log.coverage import clause_on_holes, visited_holes
from koffline.ope.log.working_log import Columns, LogPart, WorkingLog
from koffline.ope.names import BOOTSTRAP, DEFAULT, FITTED
from koffline.ope.networks.last_layer import last_layer, mean_values, sum_starts
from koffline.ope.results import (
    Interval,
    PointEstimate,
    Record,
    as_frame,
    interval_cells,
    with_ends,
)
from koffline.ope.workspace import Workspace
from koffline.shown_results import views

if TYPE_CHECKING:
    from matplotlib.axes import Axes

By = str | int | Mapping[str, Any]  # a feature's name or number, or labels by a name
_MOST_GROUPS = 30
_MOST_NAMED = 6  # groups in one line
_BEYOND = (
    "groups differ beyond the observations; add {0} to these if it is known when an"
    " episode begins"
)


@dataclass(frozen=True)
class GroupValue(Record):
    """Value of a policy from the ``starts`` start states of a group.

    ``reason``: why there is no value, or why to take it with care. ``interval``: the
    intervals of all groups together have the stated level.
    """

    group: str
    starts: int
    value: float | None = None
    interval: Interval | None = None
    reason: str | None = None

    def __str__(self) -> str:
        about = f"{self.group} ({self.starts} start states)"
        if self.value is None:
            return f"{about}: no value, {self.reason}"
        text = f"{about}: {with_ends(self.value, self.interval)}"
        if self.reason is not None:
            text = f"{text}, {self.reason}"
        return text


class GroupValues(tuple[GroupValue, ...]):
    """The values of all groups of an estimate, in the order of the groups' names.

    A tuple, which also shows itself: ``str``, `to_frame`, `to_dict`, `plot`, and as a
    table in a notebook. The estimate's report holds them.
    """

    __slots__ = ()

    def __str__(self) -> str:
        return "\n".join(map(str, self))

    def __repr__(self) -> str:
        valued = sum(row.value is not None for row in self)
        names = listed([row.group for row in self], _MOST_NAMED)
        return printable(f"GroupValues({names}; {valued} of {len(self)} with a value)")

    def _repr_html_(self) -> str:
        return views().html(self)

    def to_dict(self) -> list[JsonObject]:
        """The groups as plain JSON types."""
        return [row.as_dict() for row in self]

    def to_frame(self, library: str = "polars") -> Any:
        """A row for each group, as a frame of polars, or with ``"pandas"`` of pandas."""
        rows = []
        for row in self:
            rows.append(
                {
                    "group": row.group,
                    "starts": row.starts,
                    "value": row.value,
                    **interval_cells(row.interval),
                    "reason": row.reason,
                }
            )
        return as_frame(rows, library)

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw the values with their intervals, and return the axes.

        ax: as in `koffline.ope.results.LogResult.plot`.
        """
        return views().plot(self, ax)


@dataclass(frozen=True)
class GroupSize:
    """``starts``: start states of positive weight; ``effective``: effective number of
    the clusters (episodes, rows) that they come from.
    """

    starts: int
    effective: float


@dataclass(frozen=True, eq=False)
class Groups:
    """Groups of start states by the column ``by``, with their ``names``.

    ``codes``: the group of each unit (or given start state), indexed by its number;
    ``weights`` and ``clusters`` (the numbers by which units are resampled) likewise.
    ``is_new``: observations do not contain the column.
    """

    by: str
    names: tuple[str, ...]
    codes: Int[np.ndarray, " unit"]
    weights: Float[np.ndarray, " unit"]
    clusters: Int[np.ndarray, " unit"]
    is_new: bool

    def sizes(self, group: int) -> GroupSize:
        """A group's number of start states with positive weight, and its effective
        number of clusters.
        """
        is_member = (self.codes == group) & (self.weights > 0.0)
        weights = cluster_sums(self.clusters[is_member], self.weights[is_member])
        effective = 0.0
        if len(weights):
            effective = float(weights.sum() ** 2 / np.square(weights).sum())
        return GroupSize(starts=int(is_member.sum()), effective=effective)

    def share_of(self, units: np.ndarray) -> Float[torch.Tensor, "unit group"]:
        """Indicator of each unit's group, (U, G)."""
        return torch.as_tensor(np.eye(len(self.names))[self.codes[units]])


def check_by(by: By, estimator: str, interval: str) -> None:
    """Raise ConfigError if the estimator or the interval has no values by group."""
    if estimator not in FITTED:
        raise ConfigError(
            f"values by group are those of {', '.join(FITTED)}, not of {estimator};"
            " name one"
        )
    if interval not in (DEFAULT, BOOTSTRAP):
        raise ConfigError(
            f"intervals of groups are of kind {BOOTSTRAP}, not {interval}; leave"
            " one out"
        )
    if isinstance(by, Mapping) and len(by) != 1:
        raise ConfigError(
            f"by has {counted(len(by), 'column')}; give one, as in {{'segment':"
            " labels}"
        )


def values_by_group(
    workspace: Workspace, groups: Groups, estimate: PointEstimate
) -> tuple[GroupValue, ...]:
    """The value of each group of start states, with simultaneous intervals.

    ``estimate`` is the evaluation's, by the same networks. Each interval is made like
    that of the whole, at level 1 − (1 − level) / groups: a dozen replicas are too few
    to estimate the largest of several |t|, and Bonferroni's inequality needs no
    assumption (Dunn 1961, Multiple comparisons among means).
    """
    sizes = [groups.sizes(group) for group in range(len(groups.names))]
    answerable = [size for size in sizes if size.effective >= thresholds.FEWEST_STARTS]
    count = len(answerable)
    by_group = _replica_values(workspace, groups, estimate.name)
    level = 1.0 - (1.0 - workspace.settings.level) / max(1, count)
    rows = []
    for group, name in enumerate(groups.names):
        size = sizes[group]
        reason = _why_no_value(size, estimate)
        holes = 0.0
        if reason is None:
            holes = _holes_of(workspace, groups, group)
            if holes > thresholds.MUCH_UNLOGGED:
                reason = f"not answerable: {clause_on_holes(holes)}"
        if reason is not None:
            rows.append(GroupValue(name, size.starts, reason=reason))
            continue
        values = by_group[:, :, group]
        interval, note = workspace.limits.cut(
            workspace.fitted.interval(values, level, size.effective)
        )
        if interval is not None and groups.is_new:
            members = groups.codes[workspace.problem.units] == group
            if _differs_beyond_state(workspace, members, count, interval):
                reason = _BEYOND.format(groups.by)
                return tuple(
                    GroupValue(name, size.starts, reason=reason)
                    for name, size in zip(groups.names, sizes, strict=True)
                )
        if interval is not None:
            interval = _stated_together(interval, workspace.settings.level, count)
            note = None
            if holes:
                note = f"with care: {clause_on_holes(holes)}"
        low, high = workspace.limits.bounds
        value = min(max(workspace.fitted.summarise(values).value, low), high)
        rows.append(GroupValue(name, size.starts, value, interval, note))
    return tuple(rows)


def _replica_values(
    workspace: Workspace, groups: Groups, head: str
) -> Float[np.ndarray, "replica 2 group"]:
    """J of every network from the start states of each group, by a head."""
    fitted = workspace.fitted
    of_part = partial(
        sum_starts, fitted.record.network, fitted.resampling, groups.share_of
    )
    if fitted.problem.fixed_starts:
        sums = of_part(fitted.problem)
    else:
        sums = fitted.fold(of_part)
    theta = last_layer(fitted.network_of(head))
    return mean_values(sums.means, theta, fitted.problem.reward_scale)


def _why_no_value(size: GroupSize, estimate: PointEstimate) -> str | None:
    """Reason why a group of this size has no value, whatever the log covers; None if it
    may have one.
    """
    if size.effective < thresholds.FEWEST_STARTS:
        of_effective = ""
        if size.starts != round(size.effective):
            of_effective = f", of an effective number of {size.effective:.0f}"
        return (
            f"too few start states to answer: {size.starts}{of_effective} (at least"
            f" {thresholds.FEWEST_STARTS:.0f})"
        )
    if estimate.interval is None:
        return "the log does not answer for all start states"
    return None


def _differs_beyond_state(
    workspace: Workspace, members: np.ndarray, count: int, interval: Interval
) -> bool:
    """Whether the members (U,) of a group differ from others in the same observations,
    by more than the group's interval allows. count: groups that are tested.
    """
    shift = group_shift(
        workspace.fitted.problem,
        workspace.held_values,
        workspace.settings.seed,
        members,
        tests=count,
    )
    return shift is not None and shift.matters(interval)


def _stated_together(interval: Interval, level: float, count: int) -> Interval:
    """A group's interval with the level of the intervals of all ``count`` groups."""
    assumptions = (
        f"{interval.assumptions} Level {level:.10g} for {count} groups together."
    )
    return replace(interval, level=level, assumptions=assumptions)


def _holes_of(workspace: Workspace, groups: Groups, group: int) -> float:
    """`visited_holes` of the visits from a group's start states, taken to be those in
    its own episodes.
    """
    problem = workspace.problem
    visits = workspace.held_values.weights
    members = groups.codes[problem.start_units] == group
    weights = problem.start_weights * members
    share = weights.sum() / problem.start_weights.sum()
    if not share:  # none among the rows in memory
        return 0.0
    if problem.fixed_starts:  # of given start states no episode is known
        visits = None
    elif visits is not None:
        visits = visits * np.repeat(members, problem.lengths) / share
    of_group = replace(problem, start_weights=weights)
    return visited_holes(of_group, visits, workspace.settings.seed)


def groups_of(workspace: Workspace, by: By) -> Groups:
    """Groups by an observed feature (name or number), or by labels of the log's units
    under a name.

    Raises ConfigError and DataError.
    """
    log = workspace.log.log
    starts = workspace.initial_observations
    column: str | int | None = None
    labels: list[object] | None = None
    if isinstance(by, Mapping):
        name, of_units = next(iter(by.items()))
        labels = list(of_units)
    else:
        column = by
        name = str(by)
    if labels is not None and starts is not None:
        raise ConfigError(
            "labels are of the log's episodes, and other start states were given;"
            " drop one"
        )
    if starts is not None:
        columns = _columns(
            np.arange(len(starts)),
            np.ones(len(starts)),
            starts,
            column,
            log.metadata.features,
        )
    else:
        of_part = partial(_starts_of_part, column, log.metadata.features)
        columns = workspace.log.fold(of_part).joined()
    units = columns["unit"]
    if labels is not None:
        columns["label"] = _labels_of_units(workspace.log, name, labels, units)
    of_units = columns["label"].tolist()
    distinct = sorted(set(of_units), key=_order)
    _check_count(name, len(distinct))
    count = int(units.max()) + 1
    codes = np.zeros(count, dtype=np.int64)
    codes[units] = list(map(distinct.index, of_units))
    weights = np.zeros(count)
    weights[units] = columns["weight"]
    clusters = np.zeros(count, dtype=np.int64)
    clusters[units] = columns.get("cluster", units)
    return Groups(
        by=name,
        names=tuple(distinct),
        codes=codes,
        weights=weights,
        clusters=clusters,
        is_new=labels is not None,
    )


def _labels_of_units(
    working: WorkingLog, name: str, labels: list[object], units: np.ndarray
) -> np.ndarray:
    """Texts of the labels of these units (U,), from labels of all of the log's.

    Raises DataError for another number of labels.
    """
    log = working.log
    kind = "row"
    count = len(log)
    if log.has_episodes:
        kind = "episode"
        count = log.n_episodes
    if len(labels) != count:
        raise DataError(
            f"{name} has {len(labels)} labels, the log {counted(count, kind)}; give one"
            " for each"
        )
    numbers = units
    if working.is_whole:  # units are numbered without the copies that were merged
        numbers = working.sample.units[working.merged.kept][units]
    return np.array([_text(labels[number]) for number in numbers])


def _starts_of_part(
    column: str | int | None, features: Features | None, part: LogPart
) -> Columns:
    """Units of a part: number, weight and cluster of the first row, and the feature's
    value there.
    """
    log = part.transitions
    weight = log.row_weights[log.unit_starts]
    columns = _columns(part.units, weight, log.initial_observations(), column, features)
    if log.clusters is None:
        columns["cluster"] = part.units
    else:
        columns["cluster"] = log.clusters[log.unit_starts]
    return Columns((columns,))


def _columns(
    units: np.ndarray,
    weight: np.ndarray,
    starts: Shaped[np.ndarray, " start *observation"],
    column: str | int | None,
    features: Features | None,
) -> dict[str, np.ndarray]:
    """Numbers of units, weights of their start states, and the feature's values as
    text. Raises DataError.
    """
    columns = {"unit": units, "weight": weight}
    if column is not None:
        flat = starts.reshape(len(starts), -1)
        values = _values_of_feature(flat, column, features)
        columns["label"] = np.array([_text(value) for value in values])
    return columns


def check_groups(log: Transitions, by: By) -> None:
    """Raise DataError if groups are to be made by a feature that the log has not, or
    ConfigError if there are more than are valued.
    """
    if isinstance(by, Mapping):
        name, values = next(iter(by.items()))
    else:
        name = str(by)
        starts = log.initial_observations()
        flat = np.reshape(starts, (len(starts), -1))
        values = _values_of_feature(flat, by, log.metadata.features)
    _check_count(name, len({_text(value) for value in values}))


def _check_count(name: str, groups: int) -> None:
    """Raise ConfigError for more groups than are valued. name: of the column."""
    if groups > _MOST_GROUPS:
        raise ConfigError(
            f"{name} has {groups} different values among the start states, more than"
            f" {_MOST_GROUPS}; make fewer groups of them first"
        )


def _values_of_feature(
    starts: Shaped[np.ndarray, "start number"],
    column: str | int,
    features: Features | None,
) -> list[object]:
    """Values of a feature in flat start states, by its name or number. Raises
    DataError.
    """
    width = starts.shape[1]
    names: tuple[str, ...] = ()
    if features is not None and len(features.names) == width:
        names = features.names
        table = features.table(starts)
        if column in table.columns:
            return list(table[str(column)].to_list())
    if column in names:
        return list(starts[:, names.index(str(column))].tolist())
    if str(column).isdecimal() and int(column) < width:
        return list(starts[:, int(column)].tolist())
    remedy = f"give a number from 0 to {width - 1}"
    if names:
        remedy = nearest_name(str(column), names)
    raise DataError(f"the log's observations have no feature '{column}'; {remedy}")


def _text(value: object) -> str:
    if value is None:
        return "missing"
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(value)


def _order(text: str) -> tuple[float, list[tuple[int, int, str]]]:
    """Sort key: numbers first, by size."""
    try:
        return float(text), []
    except ValueError:
        return math.inf, natural_key(text)
