"""Value functions under test: one record for Q(s, a) from any source."""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Shaped

from koffline.data.transitions import ActionSpace, Continuous, Discrete
from koffline.errors import DataError, KofflineError
from koffline.ope.provenance import Provenance
from koffline.policies import DiscretePolicy, Policy
from koffline.policies.base import chunk_rows_for, describe_actions, one_line
from koffline.policy_specs import ModuleFunction, import_object, is_instance_of_loaded

_ACCEPTED = (
    "a d3rlpy model or its .d3 file, a TorchScript file, 'package.module:name', a function "
    "(observations, actions) -> (N,), or one of observations that gives a column per action"
)
_ENTROPY = ("SAC", "DiscreteSAC", "KLossSAC", "KLossDiscreteSAC", "TrustPCL", "DiscreteTrustPCL")
_CAUTIOUS = ("CQL", "CalQL", "DiscreteCQL", "KLossCQL", "KLossDiscreteCQL")


@dataclass(frozen=True, eq=False)
class ValueFunction:
    """Q(s, a) in units of the discounted return.

    function: (observations (N, ...), actions (N,) or (N, k)) -> (N,). It is called in chunks. trained_on: the
    rows it was fitted to, None where unknown. notes: sentences for a person about what these values are.
    """

    name: str
    function: Callable[..., Any] = field(repr=False)
    action_space: ActionSpace
    observation_shape: tuple[int, ...]
    trained_on: Provenance | None = field(default=None, repr=False)
    notes: tuple[str, ...] = ()

    def values(
        self, observations: Shaped[np.ndarray, "row *observation"], actions: np.ndarray
    ) -> Float[np.ndarray, " row"]:
        """Values (N,) float64. Raises DataError."""
        observations = np.asarray(observations)
        if observations.shape[1:] != self.observation_shape:
            raise DataError(
                f"{self.name}: observations have shape {observations.shape}, the value function takes "
                f"(N, {', '.join(map(str, self.observation_shape))}); pass one row per observation"
            )
        columns = [observations, self._checked_actions(actions, len(observations))]
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

        Otherwise the mean over ``draws`` draws per row from ``generator`` (seed 0 when None).
        Raises DataError, PolicyError.
        """
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
        generator = np.random.default_rng(0) if generator is None else generator
        for _ in range(count):
            total += self.values(observations, policy.sample(observations, generator))
        return total / count

    def _checked_actions(self, actions: np.ndarray, rows: int) -> np.ndarray:
        space = self.action_space
        expected = (rows,) if isinstance(space, Discrete) else (rows, space.k)
        if np.shape(actions) != expected:
            raise DataError(f"{self.name}: give one action per observation, {expected} of {space}")
        return np.asarray(actions, dtype=np.int64 if isinstance(space, Discrete) else np.float64)

    def _checked_values(self, columns: list[np.ndarray], first: int) -> np.ndarray:
        """Check values: (N,) or (N, 1) from an array, tensor or list, as float64. Raises DataError."""
        rows = len(columns[0])
        try:
            raw = self.function(*columns)
            raw = raw.detach().cpu() if hasattr(raw, "detach") else raw
            array = np.asarray(raw, dtype=np.float64)
        except KofflineError:
            raise
        except (Exception, SystemExit) as error:
            raise _failed(self.name, columns, error) from error
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


def as_value_function(
    q: Any,
    action_space: ActionSpace,
    observation_shape: Sequence[int],
    *,
    name: str | None = None,
    trained_on: Provenance | None = None,
) -> ValueFunction:
    """Make a value function from any object that holds one.

    q: a `ValueFunction`; a d3rlpy model with networks, d3rlpy's own or ours; the path of a .d3 or TorchScript
    file; ``package.module:name``; the result of `koffline.evaluate`; a torch module or a function of
    (observations, actions), or of observations alone that gives Q(s, ·) (N, n) for n discrete actions.
    trained_on: wins over what q itself knows. Raises DataError and PolicyError (files) in one line.
    """
    shape = tuple(int(side) for side in observation_shape)
    made = _read(q, action_space, shape, name)
    for own, log in (
        (describe_actions(made.action_space), describe_actions(action_space)),
        (f"observations of shape {made.observation_shape}", f"observations of shape {shape}"),
    ):
        if own != log:
            raise DataError(
                f"{made.name}: the model is for {own}, the log has {log}; give a model of logs like this one"
            )
    return made if trained_on is None else dataclasses.replace(made, trained_on=trained_on)


def _read(q: Any, space: ActionSpace, shape: tuple[int, ...], name: str | None) -> ValueFunction:
    """Read the value function that q is, holds or names, for a log of these spaces. Raises KofflineError."""
    if isinstance(q, (str, Path)):
        return _read_named(q, space, shape, str(name or q))
    inner = getattr(q, "value_function", q)
    if isinstance(inner, ValueFunction):
        return inner
    name = str(name or getattr(q, "__name__", type(q).__name__))
    if is_instance_of_loaded("d3rlpy.base", "LearnableBase", q):
        return _of_model(q, space, name)
    if isinstance(q, type) or not callable(q):
        what = f"the class {name}" if isinstance(q, type) else f"a {type(q).__name__}"
        raise DataError(f"{what} is no value function; give {_ACCEPTED}")
    if not is_instance_of_loaded("torch.nn", "Module", q):
        return _of_function(q, space, shape, name, _positions(q))
    is_script = is_instance_of_loaded("torch.jit", "ScriptModule", q)
    positions = len(q.forward.schema.arguments) - 1 if is_script else _positions(q.forward)
    return _of_function(ModuleFunction(q), space, shape, name, positions)


def _read_named(spec: str | Path, space: ActionSpace, shape: tuple[int, ...], name: str) -> ValueFunction:
    """A file, told by its content, or ``package.module:name``."""
    path = Path(os.path.expanduser(spec))
    if path.is_file():
        from koffline.policies.files import detect, read_torchscript

        found = detect(path)
        if found == "d3":
            from koffline.algos.model_files import load

            return _of_model(load(path), space, name)
        if found == "torchscript":
            return _read(read_torchscript(path), space, shape, name)
        raise DataError(f"{name}: a {found} file holds a policy, no value function; give {_ACCEPTED}")
    if isinstance(spec, str) and ":" in spec and not spec.endswith(":"):
        return _read(import_object(spec), space, shape, name)
    what = "this is a folder" if path.is_dir() and str(spec) else "there is no such file"
    raise DataError(f"{str(spec)!r}: {what}; a value function is {_ACCEPTED}")


def _of_model(algo: Any, space: ActionSpace, name: str) -> ValueFunction:
    """A d3rlpy model: its scalers are applied, and rewards that it scaled are scaled back.

    `predict_value` of d3rlpy stays in the units of scaled rewards.
    """
    algorithm, size = type(algo).__name__, int(algo.action_size)
    if not hasattr(algo, "predict_value"):
        raise DataError(f"{name}: {algorithm} has no action values; give a Q-learning algorithm or FQE")
    if algo.impl is None:
        raise DataError(f"{name}: the {algorithm} has no networks yet; fit it or load its weights")
    discrete = algo.get_action_type().name == "DISCRETE"
    own: ActionSpace = Discrete(size) if discrete else Continuous(size)
    if describe_actions(own) == describe_actions(space):
        own = space  # with its bounds
    slope, shift, notes = _reward_units(algo)

    def function(observations: np.ndarray, actions: np.ndarray) -> np.ndarray:
        return slope * np.asarray(algo.predict_value(observations, actions), dtype=np.float64) + shift

    if algorithm in _ENTROPY:
        notes += (f"{name} is a {algorithm}: its values hold a bonus for entropy beside the rewards.",)
    if algorithm in _CAUTIOUS:
        where = "where the log has no actions"
        notes += (f"{name} is a {algorithm}: its values are pushed down on purpose {where}.",)
    shape = tuple(int(side) for side in np.atleast_1d(algo.observation_shape))
    return ValueFunction(name, function, own, shape, notes=notes)


def _of_function(
    function: Callable[..., Any], space: ActionSpace, shape: tuple[int, ...], name: str, positions: int | None
) -> ValueFunction:
    """A function of (observations, actions), or of observations: a table Q(s, ·) (N, n)."""
    if positions != 1:
        return ValueFunction(name, function, space, shape)
    probe = np.zeros((2, *shape), np.float32)
    try:
        found = np.shape(function(probe))
    except (Exception, SystemExit) as error:
        raise _failed(name, [probe], error) from error
    if not isinstance(space, Discrete) or found != (2, space.n):
        raise DataError(
            f"{name}: the values of 2 observations have shape {tuple(found)}, the log has {space}; give a "
            "function of observations and actions, or a column per action"
        )

    def taken(observations: np.ndarray, actions: np.ndarray) -> np.ndarray:
        table = function(observations)
        table = np.asarray(table.detach().cpu() if hasattr(table, "detach") else table, dtype=np.float64)
        return np.take_along_axis(table, actions[:, None], axis=1)[:, 0]

    return ValueFunction(name, taken, space, shape)


def _failed(name: str, columns: Sequence[np.ndarray], error: BaseException) -> DataError:
    shapes = " and actions ".join(str(column.shape) for column in columns)
    return DataError(
        f"{name}: the value function failed on observations {shapes} with {one_line(error)}; check that it "
        "accepts such a batch and returns numbers (N,)"
    )


def _reward_units(algo: Any) -> tuple[float, float, tuple[str, ...]]:
    """Slope and shift that bring values of scaled rewards back to the log's units, and a caution."""
    scaler = algo.config.reward_scaler
    if scaler is None:
        return 1.0, 0.0, ()
    kind = type(scaler).__name__
    zero, one = scaler.reverse_transform_numpy(np.array([0.0, 1.0]))
    notes: tuple[str, ...] = ()
    if kind == "ClipRewardScaler":
        notes = ("The model was fitted to clipped rewards: its values are those of them.",)
    elif zero != 0.0:
        notes = (
            f"The model subtracted {float(zero):.4g} from every reward ({kind}): its values are right only "
            "where episodes go on for ever.",
        )
    return float(one - zero), float(zero) / (1.0 - float(algo.config.gamma)), notes


def _positions(function: Callable[..., Any]) -> int | None:
    """Number of required positional arguments; None if the signature is unknown."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some callables in C have no signature
        return None
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return None
    by_position = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return sum(p.default is p.empty for p in by_position) or len(by_position)
