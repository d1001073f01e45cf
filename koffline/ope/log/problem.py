"""A log and a policy prepared for value functions: standardised, with the policy's
actions attached.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from koffline.data.statistics import ColumnStatistics
from koffline.data.transitions import Discrete, Transitions
from koffline.errors import DataError
from koffline.ope.log.limits import value_bounds
from koffline.policies import DiscretePolicy, Policy
from koffline.untrusted.limits import check_fits

_FAR = 10.0  # bound of standardised numbers, so that no outlier dominates a network
_MOST_INPUTS = 4096
_START_DRAWS = 16_384  # draws of a continuous policy's actions over all start states
_LARGEST = 1e100  # largest number whose squares and discounted sums are finite
# outliers beyond `_FAR` with a larger share of a column's variance are left out of its
# scale
_HIDING = 0.25


@dataclass(frozen=True, eq=False, kw_only=True)
class Measures:
    """Location and scale of a log's columns; a part of the log uses those of the whole.

    ``input_location (d,)`` or (d + k,) is subtracted from states and continuous
    actions, which are then divided by ``input_scale``; rewards are divided by
    ``reward_scale``, weights by ``weight_scale``.
    ``value_bounds``: bounds of any discounted sum of scaled rewards. ``fixed_starts``:
    start states were given, and are not resampled with the log. ``n_actions``: None if
    continuous. ``history``: number of previous rows in the state; if positive, location
    and scale have one more entry, for rewards.
    """

    input_location: np.ndarray
    input_scale: np.ndarray
    weight_scale: float
    reward_scale: float
    value_bounds: tuple[float, float]
    fixed_starts: bool
    n_actions: int | None = None
    history: int = 0

    def standardise(
        self, observations: np.ndarray, actions: np.ndarray | None = None
    ) -> np.ndarray:
        """Standardise observations (M, ...), with continuous actions (M, k)
        appended.
        """
        columns = _flat(observations)
        if self.n_actions is None and actions is not None:
            columns = np.concatenate(
                [columns, np.asarray(actions, dtype=np.float64)], axis=1
            )
        count = columns.shape[1]
        return np.clip(
            (columns - self.input_location[:count]) / self.input_scale[:count],
            -_FAR,
            _FAR,
        )

    @property
    def measures(self) -> dict[str, Any]:
        """The fields of `Measures` by name, without any rows."""
        return {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(Measures)
        }


@dataclass(frozen=True, eq=False, kw_only=True)
class EvaluationProblem(Measures):
    """Arrays of N rows that estimators, kernels and diagnostics share.

    A value function is Q(s, a) = Σ_a' readout_a' · net(inputs)_a'; its expectation
    under the policy uses the policy's probabilities as readout. Discrete actions (n):
    ``inputs (N, d)`` are standardised observations, readouts are one-hot rows or
    probabilities. Continuous actions: ``inputs (N, d + k)`` include the action,
    ``next_inputs (N, m, d + k)`` and ``start_inputs (E, m', d + k)`` hold m and m'
    draws of the policy's actions, and readouts are None. ``episode_starts``: first row
    of each unit of resampling (an episode, or a row if there are no episodes);
    ``units``: their numbers in the log; ``clusters``: the numbers by which they are
    resampled, those of the log's clusters if any. ``row_weights (N,)``: the log's, of
    mean one. ``start_weights (E,)``: of the rows that hold the start states; ones for
    given ones. With a ``history``, inputs end with the previous rows (`remember`).
    """

    inputs: np.ndarray
    next_inputs: np.ndarray
    start_inputs: np.ndarray
    actions: np.ndarray
    rewards: np.ndarray
    discounts: np.ndarray
    episode_starts: np.ndarray
    units: np.ndarray
    clusters: np.ndarray
    row_weights: np.ndarray
    start_weights: np.ndarray
    readout: np.ndarray | None = None
    next_probabilities: np.ndarray | None = None
    start_probabilities: np.ndarray | None = None

    @property
    def n_rows(self) -> int:
        """Number N of rows."""
        return len(self.rewards)

    @cached_property
    def kernel_inputs(self) -> Float[np.ndarray, "row column"]:
        """Inputs of the kernel: states and actions, discrete actions one-hot."""
        if self.readout is None:
            return self.inputs
        return np.concatenate([self.inputs, self.readout], axis=1)

    @cached_property
    def lengths(self) -> Int[np.ndarray, " unit"]:
        """Number of rows of each unit."""
        return np.diff(np.append(self.episode_starts, self.n_rows))

    @cached_property
    def steps(self) -> Int[np.ndarray, " row"]:
        """Steps since the start of the row's unit."""
        return np.arange(self.n_rows) - np.repeat(self.episode_starts, self.lengths)

    @property
    def start_units(self) -> Int[np.ndarray, " start"]:
        """Number of each start state's unit, or of the start state itself if start
        states were given.
        """
        if self.fixed_starts:
            return np.arange(len(self.start_inputs))
        return self.units

    @property
    def kind(self) -> str:
        """What is resampled: clusters, episodes or rows."""
        if len(self.units) == self.n_rows:
            by_rows = "rows"
        else:
            by_rows = "episodes"
        if np.array_equal(self.clusters, self.units):
            return by_rows
        return "clusters"


def prepare_problem(  # noqa: PLR0913
    transitions: Transitions,
    policy: Policy,
    gamma: float,
    action_draws: int,
    generator: np.random.Generator,
    initial_observations: np.ndarray | None = None,
    like: Measures | None = None,
    history: int = 0,
    numbers: np.ndarray | None = None,
    draw: Callable[..., np.ndarray] | None = None,
) -> EvaluationProblem:
    """Standardise states and actions, scale rewards, and evaluate the policy at next
    and initial states.

    ``initial_observations`` (E, ...) replaces the log's own. Only ``terminated`` ends
    the future; time limits do not. A row of weight two counts as two rows, also as a
    start state. like: measures of the whole log if the rows are a part of it; if its
    start states were given, those of the part have no meaning. history: number of
    previous rows in the state, which the policy does not see. numbers: of the units in
    the log, by default 0, 1, 2, … draw: from states and a count to actions (N, count,
    k); by default, drawn from the policy with ``generator``.
    """
    log = transitions
    given = initial_observations
    history = history if like is None else like.history
    if history and not log.has_episodes:
        raise DataError(
            f"history is {history}, but rows stand alone in this log; leave it out"
        )
    for name in ("observations", "actions", "rewards", "next_observations"):
        column = getattr(log, name)
        if (
            column.dtype == np.float64
            and max(abs(float(column.min())), abs(float(column.max()))) > _LARGEST
        ):
            row = int(np.argmax(np.abs(column).reshape(len(column), -1).max(axis=1)))
            raise DataError(
                f"{name} reaches {np.abs(column[row]).max():.3g} in row {row}; rescale"
                " below 1e100"
            )
    own = log.row_weights
    units = log.unit_starts
    if like is None and given is None and not own[units].any():
        raise DataError(
            "weights are zero in the first row of every episode; give start states"
            " (initial_observations) or a first row a positive weight"
        )
    rewards = np.asarray(log.rewards, dtype=np.float64)
    known = like or _measure(log, policy, gamma, own, given is not None, history)
    weights = own / known.weight_scale
    if given is None:
        starts = log.initial_observations()
    else:
        starts = given
    if isinstance(policy, DiscretePolicy):  # the action reads out one of n outputs
        asked: dict[str, Any] = {
            "inputs": known.standardise(log.observations),
            "next_inputs": known.standardise(log.next_observations)[:, None],
            "start_inputs": known.standardise(starts)[:, None],
            "readout": np.eye(policy.n)[np.asarray(log.actions)],
            "next_probabilities": policy.probabilities(log.next_observations),
            "start_probabilities": policy.probabilities(starts),
        }
    else:
        # the action is among the inputs; a deterministic policy is asked once, any
        # other for several draws
        draws = 1 if policy.deterministic else action_draws
        draw = draw or partial(_draw, policy, generator)
        numbers_of_a_row = math.prod(log.observation_shape) + policy.k
        what = (
            f"action_draws is {draws}, and the log has {len(log)} rows of"
            f" {numbers_of_a_row} numbers"
        )
        check_fits(
            8.0 * draws * len(log) * numbers_of_a_row, what, "lower action_draws"
        )
        # few start states get more draws each, but not in a part of a log
        if policy.deterministic or like is not None:
            several = 1
        else:
            several = math.ceil(_START_DRAWS / len(starts))
        following = draw(log.next_observations, draws)
        first = draw(starts, max(several, draws), several > draws)
        asked = {
            "inputs": known.standardise(log.observations, log.actions),
            "next_inputs": _with_actions(known, log.next_observations, following),
            "start_inputs": _with_actions(known, starts, first),
        }
    if history:
        reward = np.clip(
            (rewards - known.input_location[-1]) / known.input_scale[-1], -_FAR, _FAR
        )
        remember(asked, reward[:, None], units, history)
    if numbers is None:
        numbers = np.arange(len(units))
    return EvaluationProblem(
        **known.measures,
        **asked,
        actions=np.asarray(log.actions),
        rewards=rewards / known.reward_scale,
        discounts=gamma * (1.0 - log.terminated),
        episode_starts=units,
        units=numbers,
        clusters=numbers if log.clusters is None else log.clusters[units],
        row_weights=weights,
        start_weights=weights[units] if given is None else np.ones(len(starts)),
    )


def _draw(
    policy: Policy,
    generator: np.random.Generator,
    states: np.ndarray,
    count: int,
    at_once: bool = False,
) -> np.ndarray:
    if at_once:
        return policy.sample(np.repeat(states, count, axis=0), generator).reshape(
            len(states), count, -1
        )
    return np.stack([policy.sample(states, generator) for _ in range(count)], axis=1)


def _with_actions(
    known: Measures, states: np.ndarray, actions: np.ndarray
) -> np.ndarray:
    """Standardised (N, m, d + k): each state (N, d) with each of its actions (N, m, k)
    appended.
    """
    every = np.repeat(states, actions.shape[1], axis=0)
    return known.standardise(every, actions.reshape(len(every), -1)).reshape(
        *actions.shape[:2], -1
    )


def remember(
    asked: dict[str, Any], reward: np.ndarray, starts: np.ndarray, count: int
) -> None:
    """Append the ``count`` previous rows to the inputs of rows and next states; start
    states get zeros.

    Each gives a one, its state and action, and reward (N, 1); zeros if there is none.
    starts: first rows of units.
    """
    rows = [asked[name] for name in ("inputs", "readout") if name in asked]
    left = [np.concatenate([np.ones_like(reward), *rows, reward], axis=1)]
    for _ in range(count):
        left.append(np.roll(left[-1], 1, axis=0))
        left[-1][starts] = 0.0
    before = np.concatenate(left[1:], axis=1)
    after = np.concatenate(left[:-1], axis=1)
    asked["inputs"] = np.concatenate([asked["inputs"], before], axis=1)
    for name, known in (
        ("next_inputs", after),
        ("start_inputs", np.zeros_like(before[:1])),
    ):
        every = np.broadcast_to(
            known[:, None], (*asked[name].shape[:2], known.shape[1])
        )
        asked[name] = np.concatenate([asked[name], every], axis=2)


def _measure(
    log: Transitions,
    policy: Policy,
    gamma: float,
    own: np.ndarray,
    fixed_starts: bool,
    history: int,
) -> Measures:
    """Measures by which inputs have mean 0 and deviation 1, weights mean 1, and returns
    root mean square 1.

    A column that is constant up to rounding keeps scale 1. Raises DataError if all
    weights are zero.
    """
    if not own.any():
        raise DataError(
            "weights are all zero; give at least one row a positive weight or leave"
            " them out"
        )
    # divided first: no sum overflows
    weight_scale = float(own.max()) * float((own / own.max()).mean())
    weights = own / weight_scale
    rewards = np.asarray(log.rewards, dtype=np.float64)
    share = weights / weights.sum()
    parts = [_flat(log.observations)]
    if not isinstance(log.action_space, Discrete):
        parts.append(np.asarray(log.actions, dtype=np.float64))
    if history:
        parts.append(rewards[:, None])
    mean, spread = (
        np.concatenate(each)
        for each in zip(*map(partial(_spread, share), parts), strict=True)
    )
    alone = np.where(log.terminated, rewards, rewards / (1.0 - gamma))
    if log.has_episodes:
        values = log.returns_to_go(gamma)
    else:
        values = alone
    largest = float(np.abs(values).max())
    scale = 1.0
    if largest > 0.0:
        scale = (
            largest
            * math.sqrt(float(np.average(np.square(values / largest), weights=weights)))
            or 1.0
        )
    counted = weights > 0.0
    scaled = rewards / scale
    kinds = (~log.terminated, log.terminated)
    going_on, final = (
        ColumnStatistics.of(scaled[counted & rows]).range for rows in kinds
    )
    return Measures(
        input_location=mean,
        input_scale=np.where(spread <= 1e-8 * np.abs(mean), 1.0, spread),
        weight_scale=weight_scale,
        reward_scale=scale,
        value_bounds=value_bounds(going_on, final, gamma),
        fixed_starts=fixed_starts,
        n_actions=policy.n if isinstance(policy, DiscretePolicy) else None,
        history=history,
    )


def _spread(share: np.ndarray, part: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation (d,) of columns (N, d), without outliers that would
    hide all other values.

    Values beyond `_FAR` deviations are left out if they make up a large share of the
    variance.
    """
    mean = share @ part  # (N,) @ (N, d) = (d,)
    gaps = part - mean
    spread = np.sqrt(share @ np.square(gaps))
    for column in np.flatnonzero((np.abs(gaps) > _FAR * spread).any(axis=0)):
        own = share.copy()
        values = part[:, column]
        gap = gaps[:, column]
        while own[far := np.abs(gap) > _FAR * spread[column]] @ gap[
            far
        ] ** 2 > _HIDING * (own @ gap**2):
            own[far] = 0.0
            own /= own.sum()
            mean[column] = own @ values
            gap = values - mean[column]
            spread[column] = np.sqrt(own @ gap**2)
    return mean, spread


def _flat(observations: np.ndarray) -> np.ndarray:
    """(N, ...) as float64 (N, d); DataError where a kernel over raw inputs has no
    meaning.
    """
    shape = observations.shape[1:]
    if math.prod(shape) > _MOST_INPUTS:
        raise DataError(
            f"observations have {math.prod(shape)} numbers each (shape {shape}), more"
            f" than {_MOST_INPUTS}; embed images first and store the embedding as the"
            " observation"
        )
    return np.asarray(observations, dtype=np.float64).reshape(len(observations), -1)
