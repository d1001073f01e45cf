"""Value functions under test: one record for Q(s, a) from any source."""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from jaxtyping import Float, Shaped, UInt64

from koffline.data.disk.log import LazyTransitions
from koffline.data.hashing import hash_rows
from koffline.data.objects import is_instance_of_loaded
from koffline.data.sources import LogMapping, LogSource, open_transitions
from koffline.data.spaces import SpaceRequest
from koffline.data.transitions import (
    ActionSpace,
    Continuous,
    Discrete,
    Transitions,
    check_in_memory,
)
from koffline.errors import DataError, nearest_name
from koffline.policies import DiscretePolicy, Policy
from koffline.policies.base import (
    CHECK_BATCH,
    ActionMasks,
    as_numbers,
    call_in_chunks,
    check_spaces,
    describe_actions,
)
from koffline.policy_specs import ModuleFunction, import_object, training_rows

# What `as_value_function` takes: a model of d3rlpy or the path of one, a function, a
# torch module, a `ValueFunction` or what holds one. It refuses others.
ValueSource: TypeAlias = object
Fingerprints = UInt64[np.ndarray, " row"]
_ACCEPTED = (
    "a d3rlpy model or its .d3 file, a TorchScript file, 'package.module:name', a"
    " function (observations, actions) -> (N,), or one of observations that gives a"
    " column per action"
)
_ENTROPY = (
    "SAC",
    "DiscreteSAC",
    "KLossSAC",
    "KLossDiscreteSAC",
    "TrustPCL",
    "DiscreteTrustPCL",
)
_CAUTIOUS = ("CQL", "CalQL", "DiscreteCQL", "KLossCQL", "KLossDiscreteCQL")


@dataclass(frozen=True, eq=False)
class ValueFunction:
    """Q(s, a) in units of the discounted return.

    function: (observations (N, ...), actions (N,) or (N, k)) -> (N,), called in chunks.
    trained_on: `row_fingerprints` of the rows it was fitted to, all or the smallest;
    None if unknown. notes: sentences for a person on what these values mean.
    """

    name: str
    function: Callable[..., object] = field(repr=False)
    action_space: ActionSpace
    observation_shape: tuple[int, ...]
    trained_on: Fingerprints | None = field(default=None, repr=False)
    notes: tuple[str, ...] = ()
    # for `call_in_chunks`
    noun = "value function"
    error = DataError
    copies = 1
    remedy = CHECK_BATCH

    def values(
        self, observations: Shaped[np.ndarray, " row *observation"], actions: np.ndarray
    ) -> Float[np.ndarray, " row"]:
        """Values (N,) float64. Raises DataError."""
        dtype: type[np.generic] = np.float64
        if isinstance(self.action_space, Discrete):
            dtype = np.int64
        return call_in_chunks(
            self,
            self.function,
            _checked,
            (),
            np.asarray(observations),
            np.asarray(actions, dtype),
        )

    def expected(
        self,
        observations: Shaped[np.ndarray, " row *observation"],
        policy: Policy,
        draws: int = 8,
        generator: np.random.Generator | None = None,
        action_mask: ActionMasks | None = None,
    ) -> Float[np.ndarray, " row"]:
        """E_{a~π} Q(s, a) (N,) float64: exact for discrete actions and deterministic
        policies. action_mask: of the available ones, to which the policy is restricted.

        Otherwise the mean over ``draws`` draws per row from ``generator`` (seed 0 when
        None).
        Raises DataError, PolicyError.
        """
        total = np.zeros(len(observations))
        if isinstance(policy, DiscretePolicy):
            probabilities = policy.probabilities(observations, action_mask)
            for action in range(policy.n):
                # only where the policy takes the action
                rows = np.flatnonzero(probabilities[:, action])
                if len(rows):
                    values = self.values(observations[rows], np.full(len(rows), action))
                    total[rows] += probabilities[rows, action] * values
            return total
        count = 1 if policy.deterministic else draws
        generator = generator or np.random.default_rng(0)
        for _ in range(count):
            total += self.values(observations, policy.sample(observations, generator))
        return total / count

    def over(
        self, transitions: Transitions
    ) -> Iterator[tuple[np.ndarray, ValueFunction]]:
        """Yield all row numbers with this model; `koffline.ope.cross_fit` yields
        several models.
        """
        yield np.arange(len(transitions)), self


def _checked(output: np.ndarray, rows: int) -> Float[np.ndarray, " row"]:
    """Check values (N,) or (N, 1) and return them as (N,)."""
    if output.shape not in ((rows,), (rows, 1)):
        raise DataError(
            f"the values have shape {output.shape} for {rows} rows; return one value"
            f" per row, ({rows},)"
        )
    output = output.reshape(rows)
    if not np.isfinite(output).all():
        worst = output[np.argmin(np.isfinite(output))]
        raise DataError(
            f"a value is {worst}; the model has diverged or the row is outside what it"
            " accepts"
        )
    return output


def row_fingerprints(transitions: Transitions) -> Fingerprints:
    """Fingerprint (N,) of each row's (s, a, r, s'), rounded to float32; equal rows have
    equal fingerprints.

    Models and files store fingerprints, so that an overlap of two logs can be found
    after selecting, reordering or converting rows.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        return hash_rows(transitions, precision=np.float32)


def counted_rows(transitions: Transitions) -> Fingerprints:
    """Fingerprints (M,) of the rows with positive weight: those that a function is
    fitted to.
    """
    rows = row_fingerprints(transitions)
    if transitions.weights is None:
        return rows
    return rows[transitions.weights > 0.0]


def log_to_test(
    q: ValueSource,
    transitions: LogSource,
    action_space: SpaceRequest | None,
    mapping: LogMapping,
) -> Transitions:
    """The log in memory on which a value function is tested. Raises DataError if it
    stays on disk, or if the first argument is a log.
    """
    if isinstance(q, Transitions):
        raise DataError(
            "the first argument is a log; give the value function, the log, the policy"
        )
    if not isinstance(transitions, LazyTransitions):
        transitions = open_transitions(transitions, action_space, mapping=mapping)
    check_in_memory(transitions)
    return transitions


def as_value_function(
    q: ValueSource,
    action_space: ActionSpace,
    observation_shape: Sequence[int],
    *,
    name: str | None = None,
    trained_on: Fingerprints | None = None,
) -> ValueFunction:
    """Make a value function from any object that holds one.

    q: a `ValueFunction`; a d3rlpy model with networks, d3rlpy's own or ours; the path
    of a .d3 or TorchScript file; ``package.module:name``; the result of
    `koffline.evaluate`; a torch module or a function of (observations, actions), or of
    observations alone that returns Q(s, ·) (N, n) for n discrete actions.
    trained_on: replaces what q itself knows. Raises DataError and PolicyError (files)
    in one line.
    """
    shape = tuple(int(side) for side in observation_shape)
    function = _read(q, action_space, shape, name)
    check_spaces(
        function.name,
        (function.action_space, function.observation_shape),
        (action_space, shape),
        ("the model has", "give a model of logs like this one"),
        DataError,
    )
    if trained_on is None:
        return function
    return dataclasses.replace(function, trained_on=trained_on)


def _read(
    q: Any, space: ActionSpace, shape: tuple[int, ...], name: str | None
) -> ValueFunction:
    """Read the value function that q is, holds or names, for these spaces.

    Raises KofflineError.
    """
    if isinstance(q, (str, Path)):
        return _read_named(q, space, shape, str(name or q))
    inner = getattr(q, "value_function", q)
    if isinstance(inner, ValueFunction):
        return inner
    name = str(name or getattr(q, "__name__", type(q).__name__))
    if is_instance_of_loaded("d3rlpy.base", "LearnableBase", q):
        return _of_model(q, space, name)
    if isinstance(q, type):
        raise DataError(f"the class {name} is no value function; give {_ACCEPTED}")
    if not callable(q):
        raise DataError(f"a {type(q).__name__} is no value function; give {_ACCEPTED}")
    function: Callable[..., object] = q
    is_table = _is_table(q)
    if is_instance_of_loaded("torch.nn", "Module", q):
        function = ModuleFunction(q)
        is_table = _is_table(q.forward)
        if is_instance_of_loaded("torch.jit", "ScriptModule", q):
            is_table = len(q.forward.schema.arguments) == 2  # self and observations
    if is_table:
        function = partial(_taken, function, name, space)
    return ValueFunction(name, function, space, shape)


def _read_named(
    spec: str | Path, space: ActionSpace, shape: tuple[int, ...], name: str
) -> ValueFunction:
    """Read a file, whose type is detected from its content, or import
    ``package.module:name``.
    """
    path = check_named(spec)
    if path.is_file():
        from koffline.policies.files import detect, read_torchscript

        kind = detect(path)
        if kind == "d3":
            from koffline.algos.model_files import load

            rows = training_rows(path)
            function = _of_model(load(path), space, name)
            if rows is None:
                return function
            return dataclasses.replace(function, trained_on=rows.fingerprints)
        if kind == "torchscript":
            return _read(read_torchscript(path), space, shape, name)
        raise DataError(
            f"{name}: a {kind} file holds a policy, no value function; give {_ACCEPTED}"
        )
    return _read(import_object(str(spec)), space, shape, name)


def check_named(spec: str | Path, models: Sequence[str] = ()) -> Path:
    """The path that a spec names; nothing is read or run. models: other names that the
    user may have meant.

    Raises DataError if the spec is neither a file nor of the form
    ``package.module:name``.
    """
    path = Path(os.path.expanduser(spec))
    if not path.is_file() and ":" not in str(spec)[:-1]:
        if path.is_dir() and str(spec):
            problem = "this is a folder"
        else:
            problem = "there is no such file"
        remedy = f"a value function is {_ACCEPTED}"
        meant = nearest_name(str(spec), models)
        if meant.endswith("?"):
            remedy = meant
        if spec in ("kloss", "fqe"):
            remedy = (
                "to fit one: koffline.cross_fit(log, lambda rows:"
                " koffline.evaluate(rows, policy, …))"
            )
        raise DataError(f"{str(spec)!r}: {problem}; {remedy}")
    return path


def _of_model(algo: Any, space: ActionSpace, name: str) -> ValueFunction:
    """A d3rlpy model as a value function: its scalers are applied, and scaled rewards
    are scaled back.

    d3rlpy's own `predict_value` stays in the units of scaled rewards.
    """
    algorithm = type(algo).__name__
    size = int(algo.action_size)
    if not hasattr(algo, "predict_value"):
        raise DataError(
            f"{name}: {algorithm} has no action values; give a Q-learning algorithm"
            " or FQE"
        )
    if algo.impl is None:
        raise DataError(
            f"{name}: the {algorithm} has no networks yet; fit it or load its weights"
        )
    model_space: ActionSpace = Continuous(size)
    if algo.get_action_type().name == "DISCRETE":
        model_space = Discrete(size)
    if describe_actions(model_space) == describe_actions(space):
        model_space = space  # with the log's bounds
    slope = 1.0
    shift = 0.0
    scaler = algo.config.reward_scaler
    if scaler is not None:
        ends = scaler.reverse_transform_numpy(np.array([0.0, 1.0]))
        shift = float(ends[0])
        slope = float(ends[1]) - shift

    def function(observations: np.ndarray, actions: np.ndarray) -> np.ndarray:
        """Values (N,) in units of the unscaled rewards."""
        scaled = algo.predict_value(observations, actions)
        values = np.asarray(scaled, dtype=np.float64)
        return slope * values + shift / (1.0 - float(algo.config.gamma))

    about = f"{name} is a {algorithm}: its values"
    scaling = type(scaler).__name__
    is_clipped = scaling == "ClipRewardScaler"
    notes: list[str] = []
    if is_clipped:
        notes.append(
            "The model was fitted to clipped rewards: its values are those of them."
        )
    if shift != 0.0:
        notes.append(
            f"The model subtracted {shift:.4g} from every reward ({scaling}): its"
            " values are right only where episodes go on for ever."
        )
    if algorithm in _ENTROPY:
        notes.append(f"{about} hold a bonus for entropy beside the rewards.")
    if algorithm in _CAUTIOUS:
        notes.append(
            f"{about} are pushed down on purpose where the log has no actions."
        )
    shape = tuple(int(side) for side in np.atleast_1d(algo.observation_shape))
    return ValueFunction(name, function, model_space, shape, notes=tuple(notes))


def _taken(
    function: Callable[..., object],
    name: str,
    space: ActionSpace,
    observations: np.ndarray,
    actions: np.ndarray,
) -> np.ndarray:
    """Values of the given actions from a function of observations alone, which returns
    Q(s, ·) (N, n).
    """
    table = as_numbers(function(observations))
    if not isinstance(space, Discrete) or table.shape != (len(observations), space.n):
        raise DataError(
            f"{name}: the values of {len(observations)} observations have shape"
            f" {table.shape}, the log has {space}; give a function of observations and"
            " actions, or a column per action"
        )
    return np.take_along_axis(table, actions[:, None], axis=1)[:, 0]


def _is_table(function: Callable[..., object]) -> bool:
    """Whether a function can be called with observations alone."""
    try:
        inspect.signature(function).bind(None)
    except (TypeError, ValueError):
        # it needs actions too, or is a callable in C without a signature
        return False
    return True
