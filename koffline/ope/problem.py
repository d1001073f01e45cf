"""A log and a policy made ready for value functions: standardised, with the policy's actions attached."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from koffline.data.sources import open_transitions
from koffline.data.transitions import Discrete, Transitions
from koffline.errors import DataError
from koffline.ope.limits import reward_range, value_bounds
from koffline.policies import DiscretePolicy, Policy
from koffline.store.files import reading
from koffline.untrusted.arrays import array_names, read_array, read_arrays

# Bound of standardised next states and policy actions, so that one outlier does not dominate a network.
_FAR = 10.0
_MOST_INPUTS = 4096
_START_DRAWS = 16_384  # draws of a continuous policy's actions over all start states
_START_NAMES = ("initial_observations", "observations")
_LARGEST = 1e100  # largest number whose squares and discounted sums are finite


@dataclass(frozen=True, eq=False, kw_only=True)
class EvaluationProblem:
    """Evaluate a policy from N rows: arrays that the estimators, the kernel and the diagnostics share.

    A value function is Q(s, a) = Σ_a' readout_a' · net(inputs)_a'; its expectation under the policy is the
    same with the policy's readout. For n discrete actions: ``inputs (N, d)`` are standardised observations,
    readouts are one-hot rows and probabilities. For continuous actions ``inputs (N, d + k)`` hold the
    actions too, ``next_inputs (N, m, d + k)`` and ``start_inputs (E, m', d + k)`` m and m' draws of the
    policy's actions, and readouts are None. ``rewards`` are divided by ``reward_scale``. With a ``history``
    inputs end with `memories` of as many rows before.
    """

    inputs: np.ndarray
    next_inputs: np.ndarray
    start_inputs: np.ndarray
    actions: np.ndarray
    rewards: np.ndarray
    discounts: np.ndarray
    reward_scale: float
    value_bounds: tuple[float, float]
    kernel_inputs: np.ndarray
    episode_starts: np.ndarray  # first row of each unit of resampling: episodes, or rows where there are none
    row_weights: np.ndarray  # (N,) the log's own weights, scaled to mean one
    start_weights: np.ndarray  # (E,) the weight of the row a start state was logged in; ones from outside
    fixed_starts: bool  # start states were given from outside: resampling the log leaves them alone
    input_location: np.ndarray  # (d,) or (d + k,): what `inputs` subtracted from states and actions,
    input_scale: np.ndarray  # and divided by; with a history one more, of rewards
    weight_scale: float  # and row weights
    history: int = 0
    n_actions: int | None = None
    readout: np.ndarray | None = None
    next_probabilities: np.ndarray | None = None
    start_probabilities: np.ndarray | None = None

    def standardise(self, observations: np.ndarray, actions: np.ndarray | None = None) -> np.ndarray:
        """Standardise observations (M, ...), with continuous actions (M, k) appended, like ``inputs``."""
        columns = _flat(observations)
        if self.n_actions is None and actions is not None:
            columns = np.concatenate([columns, np.asarray(actions, dtype=np.float64)], axis=1)
        count = columns.shape[1]
        return _standardise(columns, self.input_location[:count], self.input_scale[:count])

    def without_rows(self) -> EvaluationProblem:
        """Copy without rows, only with units of measurement, which keeps no log in memory."""
        emptied: dict[str, Any] = {
            field.name: getattr(self, field.name)[:0]
            for field in dataclasses.fields(self)
            if isinstance(getattr(self, field.name), np.ndarray) and not field.name.startswith("input_")
        }
        return dataclasses.replace(self, **emptied)

    @property
    def n_rows(self) -> int:
        """Number N of rows."""
        return len(self.rewards)

    @property
    def effective_units(self) -> float:
        """(Σw)² / Σw² over episodes (rows, where there are none), w the mean weight of an episode's rows."""
        lengths = np.diff(np.append(self.episode_starts, self.n_rows))
        weights = np.add.reduceat(self.row_weights, self.episode_starts) / lengths
        return float(weights.sum() ** 2 / np.square(weights).sum())


def prepare_problem(
    transitions: Transitions,
    policy: Policy,
    gamma: float,
    action_draws: int,
    generator: np.random.Generator,
    initial_observations: np.ndarray | None = None,
    like: EvaluationProblem | None = None,
    history: int = 0,
) -> EvaluationProblem:
    """Standardise states and actions, scale rewards, and ask the policy at next and initial states.

    ``initial_observations`` (E, ...) replaces the log's own. Time limits do not cut the future:
    only ``terminated`` does. A row of weight two counts as two rows, as a start state too. like: the rows are
    a part of the log of this problem, and are measured in its units; where its start states were given, those
    of the part mean nothing. history: as many rows before belong to the state; the policy sees none of them.
    """
    log, history = transitions, history if like is None else like.history
    if history and not log.has_episodes:
        raise DataError(f"history is {history}, but rows stand alone in this log; leave it out")
    for name in ("observations", "actions", "rewards", "next_observations"):
        _check_magnitude(name, getattr(log, name))
    starts = log.initial_observations() if initial_observations is None else initial_observations
    units = log.episode_starts if log.has_episodes else np.arange(len(log))
    weights, weight_scale = _weights(log, like)
    start_weights = weights[units] if initial_observations is None else np.ones(len(starts))
    if like is None and not start_weights.any():
        raise DataError(
            "weights are zero in the first row of every episode; give start states (initial_observations) "
            "or a first row a positive weight"
        )
    known = None if like is None else (like.input_location, like.input_scale)
    location, scale = known or _input_units(log, weights, history > 0)

    def columns(observations: np.ndarray, *actions: np.ndarray) -> np.ndarray:
        """(M, d), with continuous actions (M, d + k)."""
        own = np.concatenate([_flat(observations), *actions], axis=1)
        return _standardise(own, location[: own.shape[1]], scale[: own.shape[1]])

    rewards, discounts = np.asarray(log.rewards, dtype=np.float64), gamma * (1.0 - log.terminated)
    if isinstance(policy, DiscretePolicy):  # the action reads out one of n outputs
        inputs, readout = columns(log.observations), np.eye(policy.n)[np.asarray(log.actions)]
        asked: dict[str, Any] = {
            "inputs": inputs,
            "next_inputs": columns(log.next_observations)[:, None],
            "start_inputs": columns(starts)[:, None],
            "n_actions": policy.n,
            "readout": readout,
            "next_probabilities": policy.probabilities(log.next_observations),
            "start_probabilities": policy.probabilities(starts),
            "kernel_inputs": np.concatenate([inputs, readout], axis=1),
        }
    else:  # the action is among the inputs; a deterministic policy is asked once, any other for several draws

        def drawn(observations: np.ndarray) -> np.ndarray:
            return columns(observations, policy.sample(observations, generator))

        draws = 1 if policy.deterministic else action_draws
        inputs = columns(log.observations, np.asarray(log.actions, dtype=np.float64))
        following = np.stack([drawn(log.next_observations) for _ in range(draws)], axis=1)
        # few start states have more draws each; a part of a log is one of many, and needs fewer
        several = 1 if policy.deterministic or like is not None else math.ceil(_START_DRAWS / len(starts))
        if several > draws:
            first = drawn(np.repeat(starts, several, axis=0)).reshape(len(starts), several, -1)
        else:
            first = np.stack([drawn(starts) for _ in range(draws)], axis=1)
        asked = {"inputs": inputs, "next_inputs": following, "start_inputs": first, "kernel_inputs": inputs}
    if history:
        reward = _standardise(rewards[:, None], location[-1:], scale[-1:])
        _remember(asked, *memories(asked["kernel_inputs"], reward, units, history))
    if like is None:
        reward_scale, counted = _reward_scale(log, gamma, discounts, weights), weights > 0.0
        going_on, final = counted & ~log.terminated, counted & log.terminated
        scaled = rewards / reward_scale
        bounds = value_bounds(reward_range(scaled[going_on]), reward_range(scaled[final]), gamma)
    else:
        reward_scale, bounds = like.reward_scale, like.value_bounds
    return EvaluationProblem(
        **asked,
        actions=np.asarray(log.actions),
        rewards=rewards / reward_scale,
        discounts=discounts,
        reward_scale=reward_scale,
        value_bounds=bounds,
        episode_starts=units,
        row_weights=weights,
        start_weights=start_weights,
        fixed_starts=initial_observations is not None or (like is not None and like.fixed_starts),
        input_location=location,
        input_scale=scale,
        weight_scale=weight_scale,
        history=history,
    )


def memories(
    rows: Float[np.ndarray, "row column"],
    reward: Float[np.ndarray, "row 1"],
    starts: Int[np.ndarray, " unit"],
    count: int,
) -> tuple[Float[np.ndarray, "row memory"], Float[np.ndarray, "row memory"]]:
    """Memory of the ``count`` rows before each row, and before the row that follows it.

    Of each a one, state and action, reward; zeros where there was none. starts: first row of each unit.
    """
    left = [np.concatenate([np.ones((len(rows), 1)), rows, reward], axis=1)]
    for _ in range(count):
        left.append(np.roll(left[-1], 1, axis=0))
        left[-1][starts] = 0.0
    return np.concatenate(left[1:], axis=1), np.concatenate(left[:-1], axis=1)


def _remember(asked: dict[str, Any], before: np.ndarray, after: np.ndarray) -> None:
    """Append memories to the inputs of rows, of next states and of start states, which have none."""
    asked["inputs"] = np.concatenate([asked["inputs"], before], axis=1)
    asked["kernel_inputs"] = asked["inputs"]
    if "readout" in asked:
        asked["kernel_inputs"] = np.concatenate([asked["inputs"], asked["readout"]], axis=1)
    for name, known in (("next_inputs", after), ("start_inputs", np.zeros_like(before[:1]))):
        every = np.broadcast_to(known[:, None], (*asked[name].shape[:2], known.shape[1]))
        asked[name] = np.concatenate([asked[name], every], axis=2)


def _check_magnitude(name: str, column: np.ndarray) -> None:
    """Raise DataError for numbers whose squares would overflow."""
    if column.dtype == np.float64 and max(abs(float(column.min())), abs(float(column.max()))) > _LARGEST:
        row = int(np.argmax(np.abs(column).reshape(len(column), -1).max(axis=1)))
        raise DataError(
            f"{name} reaches {np.abs(column[row]).max():.3g} in row {row}; rescale it below 1e100"
        )


def _flat(observations: np.ndarray) -> np.ndarray:
    """(N, ...) as float64 (N, d); DataError where a kernel over raw inputs has no meaning."""
    shape = observations.shape[1:]
    if math.prod(shape) > _MOST_INPUTS:
        raise DataError(
            f"observations have {math.prod(shape)} numbers each (shape {shape}), more than "
            f"{_MOST_INPUTS}; embed images first and store the embedding as the observation"
        )
    return np.asarray(observations, dtype=np.float64).reshape(len(observations), -1)


def _input_units(log: Transitions, weights: np.ndarray, with_reward: bool) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of observations, with those of continuous actions and rewards beside them.

    A constant column (no spread beyond rounding, relative to the numbers themselves) keeps the scale 1.
    """
    share = weights / weights.sum()
    parts = [_flat(log.observations)]
    if not isinstance(log.action_space, Discrete):
        parts.append(np.asarray(log.actions, dtype=np.float64))
    if with_reward:
        parts.append(np.asarray(log.rewards, dtype=np.float64)[:, None])
    means = [share @ part for part in parts]  # (N,) @ (N, d) = (d,)
    spreads = [np.sqrt(share @ np.square(part - mean)) for part, mean in zip(parts, means, strict=True)]
    mean, spread = np.concatenate(means), np.concatenate(spreads)
    return mean, np.where(spread <= 1e-8 * np.abs(mean), 1.0, spread)


def _standardise(columns: np.ndarray, mean: np.ndarray, spread: np.ndarray) -> np.ndarray:
    return np.clip((columns - mean) / spread, -_FAR, _FAR)


def _reward_scale(log: Transitions, gamma: float, discounts: np.ndarray, weights: np.ndarray) -> float:
    """Root mean square of the logged return-to-go; of r/(1−discount) without episodes. Never zero."""
    rewards = np.asarray(log.rewards, dtype=np.float64)
    values = log.returns_to_go(gamma) if log.has_episodes else rewards / (1.0 - discounts)
    largest = float(np.abs(values).max())
    if largest == 0.0:
        return 1.0
    return largest * math.sqrt(float(np.average(np.square(values / largest), weights=weights))) or 1.0


def _weights(log: Transitions, like: EvaluationProblem | None) -> tuple[np.ndarray, float]:
    """Weights of rows (N,) of mean one, and what they were divided by. DataError when all are zero."""
    weights = np.ones(len(log)) if log.weights is None else np.asarray(log.weights, dtype=np.float64)
    if like is not None:
        return weights / like.weight_scale, like.weight_scale
    if not weights.any():
        raise DataError("weights are all zero; give at least one row a positive weight or leave them out")
    largest = float(weights.max())  # divided first, so that no sum overflows
    scale = largest * float((weights / largest).mean())
    return weights / scale, scale


def read_initial_states(source: str) -> np.ndarray:
    """Start states (E, …): a .npy array, an .npz with ``initial_observations`` or ``observations``, or a log.

    A log (with ``rewards``) gives the first observations of its episodes. Raises DataError.
    """
    path, magic = Path(source), b""
    if not source.startswith("minari:") and not path.exists():
        raise DataError(f"initial states {source} do not exist; check the path")
    with reading(f"initial states {path}", "NumPy"):
        if path.is_file():
            with path.open("rb") as file:
                magic = file.read(8)
        if magic.startswith(b"\x93NUMPY"):
            return read_array(path)
        names = array_names(path) if magic.startswith(b"PK") else ["rewards"]
        if "rewards" not in names:
            name = next((name for name in _START_NAMES if name in names), None)
            if name is None:
                shown = ", ".join(names[:12])
                raise DataError(f"initial states {path} hold {shown}; name the array {_START_NAMES[0]}")
            return read_arrays(path, [name])[name]
    return open_transitions(source).initial_observations()
