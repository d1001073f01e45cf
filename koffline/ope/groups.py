"""Values of groups of start states, by the networks of one evaluation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped

from koffline.data.columns import natural_key
from koffline.data.spaces import Features
from koffline.data.units import cluster_sums
from koffline.errors import ConfigError, DataError, counted, nearest_name
from koffline.ope import thresholds
from koffline.ope.diagnose.markov import group_shift
from koffline.ope.log.coverage import clause_on_holes, visited_holes
from koffline.ope.log.working_log import Columns, LogPart
from koffline.ope.names import BOOTSTRAP, DEFAULT, FITTED
from koffline.ope.networks.last_layer import last_layer, mean_values, sum_starts
from koffline.ope.results import Interval, PointEstimate, Record
from koffline.ope.workspace import Workspace

By = str | int | Mapping[str, Any]  # a feature's name or number, or labels by a name
_MOST_GROUPS = 30
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

    def sizes(self, group: int) -> tuple[int, float]:
        """A group's number of start states with positive weight, and its effective
        number of clusters.
        """
        taken = (self.codes == group) & (self.weights > 0.0)
        weights = cluster_sums(self.clusters[taken], self.weights[taken])
        return int(taken.sum()), (
            float(weights.sum() ** 2 / np.square(weights).sum())
            if len(weights)
            else 0.0
        )

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
    workspace: Workspace, groups: Groups, found: PointEstimate
) -> tuple[GroupValue, ...]:
    """The value of each group of start states, with simultaneous intervals.

    ``found`` is the evaluation's estimate, by the same networks. Each interval is made
    like that of the whole, at level 1 − (1 − level) / groups: a dozen replicas are too
    few to estimate the largest of several
    |t|, and Bonferroni's inequality needs no assumption (Dunn 1961, Multiple comparisons among means).
    """
    fitted = workspace.fitted
    settings = workspace.settings
    sizes = [groups.sizes(group) for group in range(len(groups.names))]
    count = sum(size >= thresholds.FEWEST_STARTS for _, size in sizes)
    asked = partial(
        sum_starts, fitted.record.network, fitted.resampling, groups.share_of
    )
    if fitted.problem.fixed_starts:
        sums = asked(fitted.problem)
    else:
        sums = fitted.fold(asked)
    theta = last_layer(fitted.network_of(found.name))
    by_group = mean_values(sums.means, theta, fitted.problem.reward_scale)  # (R, 2, G)
    level = 1.0 - (1.0 - settings.level) / max(1, count)
    rows = []
    for group, name in enumerate(groups.names):
        starts, size = sizes[group]
        if size < thresholds.FEWEST_STARTS:
            if starts == round(size):
                odd = ""
            else:
                odd = f", of an effective number of {size:.0f}"
            few = (
                f"too few start states to answer: {starts}{odd} (at least"
                f" {thresholds.FEWEST_STARTS:.0f})"
            )
            rows.append(GroupValue(name, starts, reason=few))
        elif found.interval is None:
            rows.append(
                GroupValue(
                    name, starts, reason="the log does not answer for all start states"
                )
            )
        elif (holes := _holes_of(workspace, groups, group)) > thresholds.MUCH_UNLOGGED:
            rows.append(
                GroupValue(
                    name, starts, reason=f"not answerable: {clause_on_holes(holes)}"
                )
            )
        else:
            values = by_group[:, :, group]
            interval, note = workspace.limits.cut(fitted.interval(values, level, size))
            if interval is not None and groups.is_new:
                members = groups.codes[fitted.problem.units] == group
                asked_of = (
                    fitted.problem,
                    workspace.held_values,
                    settings.seed,
                    members,
                    count,
                )
                shift = group_shift(*asked_of)
                # column matters: no valid value
                if shift is not None and shift.matters(interval):
                    told = _BEYOND.format(groups.by)
                    pairs = zip(groups.names, sizes, strict=True)
                    return tuple(
                        GroupValue(one, starts, reason=told)
                        for one, (starts, _) in pairs
                    )
            if interval is not None:
                said = (
                    f"{interval.assumptions} Level {settings.level:.10g} for {count}"
                    " groups together."
                )
                interval = replace(interval, level=settings.level, assumptions=said)
                note = f"with care: {clause_on_holes(holes)}" if holes else None
            low, high = workspace.limits.bounds
            value = min(max(fitted.summarise(values).value, low), high)
            rows.append(GroupValue(name, starts, value, interval, note))
    return tuple(rows)


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
    if visits is not None:  # of given start states no episode is known
        if problem.fixed_starts:
            visits = None
        else:
            visits = visits * np.repeat(members, problem.lengths) / share
    return visited_holes(
        replace(problem, start_weights=weights), visits, workspace.settings.seed
    )


def groups_of(workspace: Workspace, by: By) -> Groups:
    """Groups by an observed feature (name or number), or by labels of the log's units
    under a name.

    Raises ConfigError and DataError.
    """
    log = workspace.log.log
    given = workspace.initial_observations
    working = workspace.log
    column, labelled = (None, by) if isinstance(by, Mapping) else (by, {})
    name = str(by) if column is not None else next(iter(labelled))
    if labelled and given is not None:
        raise ConfigError(
            "labels are of the log's episodes, and other start states were given;"
            " drop one"
        )
    if given is not None:
        found = _columns(
            np.arange(len(given)),
            np.ones(len(given)),
            given,
            column,
            log.metadata.features,
        )
    else:
        found = working.fold(
            partial(_starts_of_part, column, log.metadata.features)
        ).joined()
    units = found["unit"]
    if labelled:
        labels = list(labelled[name])
        count = log.n_episodes if log.has_episodes else len(log)
        if len(labels) != count:
            kind = counted(count, "episode" if log.has_episodes else "row")
            raise DataError(
                f"{name} has {len(labels)} labels, the log {kind}; give one for each"
            )
        if working.is_whole:
            numbers = working.sample.units[working.merged.kept][units]
        else:
            numbers = units
        found["label"] = np.array([_text(labels[number]) for number in numbers])
    distinct = sorted(set(found["label"].tolist()), key=_order)
    if len(distinct) > _MOST_GROUPS:
        several = f"{len(distinct)} different values among the start states"
        raise DataError(
            f"{name} has {several}, more than {_MOST_GROUPS}; make fewer groups of them"
            " first"
        )
    codes, clusters = np.zeros((2, int(units.max()) + 1), dtype=np.int64)
    weights = np.zeros(len(codes))
    codes[units] = list(map(distinct.index, found["label"].tolist()))
    weights[units] = found["weight"]
    clusters[units] = found.get("cluster", units)
    return Groups(name, tuple(distinct), codes, weights, clusters, bool(labelled))


def _starts_of_part(
    column: str | int | None, features: Features | None, part: LogPart
) -> Columns:
    """Units of a part: number, weight and cluster of the first row, and the feature's
    value there.
    """
    log = part.transitions
    weight = log.row_weights[log.unit_starts]
    found = _columns(part.units, weight, log.initial_observations(), column, features)
    if log.clusters is None:
        clusters = part.units
    else:
        clusters = log.clusters[log.unit_starts]
    return Columns(({**found, "cluster": clusters},))


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
    found = {"unit": units, "weight": weight}
    if column is None:
        return found
    flat = starts.reshape(len(starts), -1)
    names = () if features is None else features.names
    names = names if len(names) == flat.shape[1] else ()
    if (
        features is not None
        and names
        and column in (table := features.table(flat)).columns
    ):
        values = table[str(column)].to_list()
    elif column in names or (str(column).isdecimal() and int(column) < flat.shape[1]):
        values = flat[
            :, names.index(str(column)) if column in names else int(column)
        ].tolist()
    else:
        remedy = f"give a number from 0 to {flat.shape[1] - 1}"
        remedy = nearest_name(str(column), names) if names else remedy
        raise DataError(f"the log's observations have no feature '{column}'; {remedy}")
    return {**found, "label": np.array([_text(value) for value in values])}


def _text(value: object) -> str:
    if value is None:
        return "missing"
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(value)


def _order(text: str) -> tuple[float, list[object]]:
    """Sort key: numbers first, by size."""
    try:
        return float(text), []
    except ValueError:
        return math.inf, natural_key(text)
