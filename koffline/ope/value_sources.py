"""Where value functions come from: models of d3rlpy, files, Python, and koffline's own results."""

from __future__ import annotations

import dataclasses
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from koffline.data.transitions import ActionSpace, Continuous, Discrete
from koffline.errors import ConfigError, DataError
from koffline.ope.provenance import Provenance, rows_of_run
from koffline.ope.value_functions import ACTION, STATE, ValueFunction
from koffline.policies.base import describe_actions, one_line

_ACCEPTED = (
    "a d3rlpy model or its .d3 file, a TorchScript file, 'package.module:name', a function "
    "(observations, actions) -> (N,), or one of observations alone"
)
_ENTROPY = ("SAC", "DiscreteSAC", "KLossSAC", "KLossDiscreteSAC", "TrustPCL", "DiscreteTrustPCL")
_CAUTIOUS = ("CQL", "CalQL", "DiscreteCQL", "KLossCQL", "KLossDiscreteCQL")


def as_value_function(
    q: Any,
    action_space: ActionSpace,
    observation_shape: Sequence[int],
    *,
    kind: str | None = None,
    name: str | None = None,
    trained_on: Provenance | None = None,
) -> ValueFunction:
    """A value function from whatever holds one.

    q: a `ValueFunction`; a d3rlpy model with networks, d3rlpy's own or ours; the path of a .d3 or TorchScript
    file; ``package.module:name``; a `koffline.solvers.LinearValue`; the result of `koffline.evaluate`; a
    torch module or a function of (observations, actions), or of observations alone: then it is V(s) where it
    gives (N,), and Q(s, ·) where it gives (N, n) for n discrete actions.
    kind: ``"action"`` or ``"state"`` where that cannot be seen. trained_on: wins over what q itself knows.
    Raises DataError, PolicyError (files) and ConfigError in one line.
    """
    if kind not in (None, ACTION, STATE):
        raise ConfigError(f"kind is {kind!r}; give '{ACTION}' for Q(s, a) or '{STATE}' for V(s)")
    shape = tuple(int(side) for side in observation_shape)
    made = _Reader(action_space, shape, kind).read(q, name)
    for own, log in (
        (describe_actions(made.action_space), describe_actions(action_space)),
        (f"observations of shape {made.observation_shape}", f"observations of shape {shape}"),
    ):
        if own != log:
            raise DataError(
                f"{made.name}: the model is for {own}, the log has {log}; give a model of logs like this one"
            )
    if kind not in (None, made.kind):
        raise ConfigError(f"{made.name} is a value function of kind '{made.kind}', not '{kind}'")
    return made if trained_on is None else dataclasses.replace(made, trained_on=trained_on)


def _is_a(module: str, attribute: str, value: Any) -> bool:
    """isinstance against a class of a heavy module, without importing it: no import, no instance."""
    loaded = sys.modules.get(module)
    return loaded is not None and isinstance(value, getattr(loaded, attribute))


@dataclass(frozen=True)
class _Reader:
    """Reads value functions for a log of these spaces; ``kind`` where that cannot be seen."""

    space: ActionSpace
    shape: tuple[int, ...]
    kind: str | None

    def read(self, q: Any, name: str | None) -> ValueFunction:
        """The value function that q is, holds or names. Raises KofflineError."""
        if isinstance(q, (str, Path)):
            return self._named(q, str(name or q))
        inner = getattr(q, "value_function", q)
        if isinstance(inner, ValueFunction):
            return inner
        name = str(name or getattr(q, "__name__", type(q).__name__))
        if _is_a("d3rlpy.base", "LearnableBase", q):
            return self._of_model(q, name)
        if _is_a("koffline.solvers.closed_form", "LinearValue", q):
            return self._of_linear_value(q, name)
        if isinstance(q, type) or not callable(q):
            what = f"the class {name}" if isinstance(q, type) else f"a {type(q).__name__}"
            raise DataError(f"{what} is no value function; give {_ACCEPTED}")
        if not _is_a("torch.nn", "Module", q):
            return self._of_function(q, name, _positions(q))
        from koffline.policy_specs import ModuleFunction

        is_script = _is_a("torch.jit", "ScriptModule", q)
        positions = len(q.forward.schema.arguments) - 1 if is_script else _positions(q.forward)
        return self._of_function(ModuleFunction(q), name, positions)

    def _named(self, spec: str | Path, name: str) -> ValueFunction:
        """A file, told by its content, or ``package.module:name``."""
        path = Path(os.path.expanduser(spec))
        if path.is_file():
            from koffline.policies.files import detect

            found = detect(path)
            if found == "d3":
                from koffline.algos.model_files import load

                return self._of_model(load(path), name, rows_of_run(path))
            if found == "torchscript":
                from koffline.policies.files import read_torchscript

                return self.read(read_torchscript(path), name)
            raise DataError(f"{name}: a {found} file holds a policy, no value function; give {_ACCEPTED}")
        if isinstance(spec, str) and ":" in spec and not spec.endswith(":"):
            from koffline.policy_specs import import_object

            return self.read(import_object(spec), name)
        what = "this is a folder" if path.is_dir() and str(spec) else "there is no such file"
        raise DataError(f"{str(spec)!r}: {what}; a value function is {_ACCEPTED}")

    def _of_model(self, algo: Any, name: str, trained_on: Provenance | None = None) -> ValueFunction:
        """A d3rlpy model: its scalers are applied, and rewards that it scaled are scaled back.

        `predict_value` of d3rlpy stays in the units of scaled rewards.
        """
        algorithm, size = type(algo).__name__, algo.action_size
        if not hasattr(algo, "predict_value"):
            raise DataError(f"{name}: {algorithm} has no action values; give a Q-learning algorithm or FQE")
        if algo.impl is None:
            raise DataError(f"{name}: the {algorithm} has no networks yet; fit it or load its weights")
        discrete = algo.get_action_type().name == "DISCRETE"
        own: ActionSpace = Discrete(int(size)) if discrete else Continuous(int(size))
        if describe_actions(own) == describe_actions(self.space):
            own = self.space  # with its bounds
        slope, shift, notes = _reward_units(algo)

        def function(observations: np.ndarray, actions: np.ndarray) -> np.ndarray:
            return slope * np.asarray(algo.predict_value(observations, actions), dtype=np.float64) + shift

        if algorithm in _ENTROPY:
            notes += (f"{name} is a {algorithm}: its values hold a bonus for entropy beside the rewards.",)
        if algorithm in _CAUTIOUS:
            where = "where the log has no actions"
            notes += (f"{name} is a {algorithm}: its values are pushed down on purpose {where}.",)
        shape = tuple(int(side) for side in np.atleast_1d(algo.observation_shape))
        return ValueFunction(name, ACTION, function, own, shape, trained_on, notes)

    def _of_linear_value(self, value: Any, name: str) -> ValueFunction:
        """A `koffline.solvers.LinearValue` of flat observations: of Q where it has outputs, else of V.

        With kind "action" and continuous actions its rows are (s, a) side by side.
        """
        count = value.outputs

        def of_rows(observations: np.ndarray, actions: np.ndarray | None = None) -> np.ndarray:
            flat = np.asarray(observations, dtype=np.float64).reshape(len(observations), -1)
            if count is not None:
                return value.values(flat, np.eye(count)[actions]).numpy()
            return value.values(flat if actions is None else np.concatenate([flat, actions], axis=1)).numpy()

        if count is not None and (not isinstance(self.space, Discrete) or count != self.space.n):
            raise DataError(
                f"{name}: the linear value has {count} outputs, one per action; the log has {self.space}"
            )
        kind = ACTION if count is not None or self.kind == ACTION else STATE
        return ValueFunction(name, kind, of_rows, self.space, self.shape)

    def _of_function(self, function: Callable[..., Any], name: str, positions: int | None) -> ValueFunction:
        """A function of (observations, actions), or of observations: V(s), or a table Q(s, ·) (N, n)."""
        if self.kind == STATE or positions != 1:
            return ValueFunction(name, self.kind or ACTION, function, self.space, self.shape)
        try:
            found = np.shape(function(np.zeros((2, *self.shape), np.float32)))
        except (Exception, SystemExit) as error:
            raise DataError(
                f"{name}: the value function failed on observations of shape {(2, *self.shape)} with "
                f"{one_line(error)}; give (observations, actions) -> (N,) or a function of observations"
            ) from error
        if len(found) < 2 or found[1] == 1:
            if self.kind == ACTION:
                raise ConfigError(f"{name} gives one value per observation: it is V(s); use kind='{STATE}'")
            return ValueFunction(name, STATE, function, self.space, self.shape)
        if not isinstance(self.space, Discrete) or found != (2, self.space.n):
            raise DataError(
                f"{name}: the values of 2 observations have shape {tuple(found)}, the log has {self.space}"
            )

        def taken(observations: np.ndarray, actions: np.ndarray) -> np.ndarray:
            table = function(observations)
            table = np.asarray(table.detach().cpu() if hasattr(table, "detach") else table, dtype=np.float64)
            return np.take_along_axis(table, actions[:, None], axis=1)[:, 0]

        return ValueFunction(name, ACTION, taken, self.space, self.shape)


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
    """How many arguments must be given by position, None where that cannot be seen."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some callables in C have no signature
        return None
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return None
    by_position = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return sum(p.default is p.empty for p in by_position) or len(by_position)
