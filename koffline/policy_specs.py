"""Policies from user input: `load_policy` reads specs, `as_policy` any object."""

from __future__ import annotations

import importlib
import inspect
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from koffline.data.labels import Layout
from koffline.data.objects import is_instance_of_loaded
from koffline.data.spaces import Features
from koffline.data.transitions import ActionSpace, Continuous, Discrete
from koffline.errors import PolicyError, listed, nearest_name
from koffline.policies import ContinuousPolicy, DiscretePolicy, Policy, load_policy_file
from koffline.policies.base import (
    CHECK_BATCH,
    PolicySource,
    TrainingRows,
    as_numbers,
    check_spaces,
)
from koffline.policies.builtin import epsilon_policy, uniform_policy
from koffline.policies.files import (
    ACCEPTED,
    detect,
    load_onnx,
    read_d3,
    read_torchscript,
    say_it_runs_code,
)
from koffline.policies.frames import Library, as_library, library_of
from koffline.policies.outputs import OutputPolicy
from koffline.policies.sklearn_models import EstimatorFunction, is_estimator
from koffline.untrusted.limits import Refused, parse_json, read_bytes
from koffline.untrusted.user_code import current_folder, user_code, user_modules

if TYPE_CHECKING:
    import torch

_MODULE_SPEC = re.compile(r"[A-Za-z_]\w*(\.\w+)*:[A-Za-z_]\w*(\.\w+)*")
_EPSILON = "epsilon:"
_MASK = "action_mask"  # a function's parameter
_LONGEST_RECORD = 1 << 24  # bytes
_AS_LOGGED = "as the file holds them, {}"
_MOST_COLUMNS = 8  # in a note
_FRAME_REMEDY = (
    "it gets an array (N, d); for a frame with the log's columns annotate its first"
    " parameter as polars.DataFrame or pandas.DataFrame, or give"
    " koffline.frame_policy(function)"
)
_MOST_LAYERS = 3  # nested epsilons: epsilon:0.1:epsilon:0.1:uniform has two


def load_policy(
    spec: str | Path,
    action_space: ActionSpace,
    observation_shape: Sequence[int],
    features: Features | None = None,
) -> Policy:
    """Load the policy that a spec names.

    action_space, observation_shape: of the log that the policy acts on. spec: a file
    (d3rlpy .d3, TorchScript, ONNX, koffline .npz, recognised by content),
    `package.module:name` (runs that module), `uniform`, or `epsilon:0.1:<spec>`. A file
    with one of these names is given as a path, `./uniform`. No code in a .d3, ONNX or
    .npz file can run; a TorchScript file runs no Python, but is a program. Loading one,
    or a Python module, logs a warning once (logger koffline.policies.files; stderr by
    default). features: the log's (``metadata.features``), for functions that take a
    table of named columns.

    Raises PolicyError if the policy is missing, corrupt or unsafe, or does not fit the
    log's actions and observations.
    """
    layers, base = check_spec(spec)
    path = Path(os.path.expanduser(base))
    if base == "uniform":
        policy = uniform_policy(action_space, observation_shape)
    else:
        if path.is_file():
            content = _read(path, action_space, observation_shape, _layout_of(features))
        else:
            content = import_object(str(path))
        policy = as_policy(
            content, action_space, observation_shape, str(path), features
        )
        trained_on = training_rows(path)
        is_known = trained_on is not None and len(trained_on.fingerprints) > 0
        if not is_known and path.is_file() and path.suffix != ".npz":
            note = (
                f"If {path.name} was trained on these rows, it looks better than it is"
                " (koffline data split)."
            )
            policy = replace(policy, notes=(*policy.notes, note))
        policy = replace(policy, trained_on=trained_on)
    for epsilon in reversed(layers):
        mixed = epsilon_policy(epsilon, policy, action_space)
        policy = replace(mixed, notes=policy.notes, trained_on=policy.trained_on)
    return policy


def _layout_of(features: Features | None) -> Layout | None:
    """Where labels stand among the log's observations; None if they hold none."""
    if features is None:
        return None
    return features.layout


def training_rows(model: Path) -> TrainingRows | None:
    """The rows a model file was trained on, from the record that `koffline train`
    writes beside it; None if there is no such record, or ``model`` is a Python name.
    """
    with suppress(OSError, Refused, KeyError, TypeError, ValueError):
        if model.is_file():
            record = parse_json(
                read_bytes(model.with_name("run.json"), _LONGEST_RECORD)
            )
            fingerprints = bytes.fromhex(record["data"]["fingerprints"])
            return TrainingRows(
                sha256=str(record["digests"]["data"]),
                fingerprints=np.frombuffer(fingerprints, dtype="<u8"),
            )
    return None


def check_spec(spec: str | Path) -> tuple[list[float], str | Path]:
    """Probabilities of the epsilon layers, outermost first, and the spec inside them.

    Raises PolicyError for specs that are invalid whatever the log; nothing is read or
    run.
    """
    layers: list[float] = []
    base = spec
    while isinstance(base, str) and base.startswith(_EPSILON):
        number, _, base = base.removeprefix(_EPSILON).partition(":")
        try:
            layers.append(float(number))
        except ValueError:
            layers.append(math.nan)
        if len(layers) > _MOST_LAYERS:
            raise PolicyError(
                f"{str(spec)[:80]}: names more than {_MOST_LAYERS} layers of epsilon;"
                " give one of the whole probability"
            )
        if not (base and 0.0 <= layers[-1] <= 1.0):
            raise PolicyError(
                f"{str(spec)[:80]}: write epsilon:<probability in [0, 1]>:<policy>, for"
                " instance epsilon:0.1:uniform"
            )
    # os.path: unlike Path.expanduser, it does not raise for an unknown user
    path = Path(os.path.expanduser(base))
    if base and base != "uniform" and path.is_dir():  # Path("") is the current folder
        raise PolicyError(f"{base}: this is a folder; a policy is {ACCEPTED}")
    if (
        base != "uniform"
        and not path.is_file()
        and not _MODULE_SPEC.fullmatch(str(base))
    ):
        raise PolicyError(
            f"{str(base)!r}: there is no such file; a policy is {ACCEPTED}"
        )
    return layers, base


def as_policy(
    policy: PolicySource,
    action_space: ActionSpace,
    observation_shape: Sequence[int],
    name: str | None = None,
    features: Features | None = None,
) -> Policy:
    """Make a policy from a spec, a Policy, a d3rlpy algorithm, a torch module or any
    callable.

    A callable maps a batch of observations (N, ...) to probabilities (N, n) or action
    indices (N,) or, for a continuous space, to actions (N, k). If a table had texts for
    actions, such texts (N,) are accepted, too. A callable with a parameter named
    `generator` is a stochastic continuous policy. If its first parameter is annotated
    as a polars or pandas DataFrame or named `table`, or by `koffline.frame_policy`, it
    gets a frame with the columns of the log's table (``features``), categories as
    texts, in place of the array. A torch module gets a float tensor, without gradients,
    in evaluation mode; it returns what a callable returns (for logits and action values
    see `koffline.softmax_policy` and `koffline.greedy_policy`). A fitted estimator of
    scikit-learn acts by ``predict_proba``, or by ``predict`` if it has none. If the log's observations hold
    labels (``features.layout``), the policy gets them as the file holds them; only a
    model that was made for their encoded columns gets those. A function with a parameter
    named `action_mask` gets the available actions (N, n) of a log with masks, else all
    true; every policy of discrete actions is restricted to available ones
    (`koffline.policies.base.among_available`).

    Raises PolicyError if the object is none of these or does not fit the log.
    """
    if isinstance(policy, (str, Path)):
        return load_policy(policy, action_space, observation_shape, features)
    return _ordered(
        _as_policy(policy, action_space, observation_shape, name, features), features
    )


def _ordered(policy: Policy, features: Features | None) -> Policy:
    """The policy with a note on which action each column of an array is, if the log's
    actions have names.
    """
    if features is None or not features.actions or isinstance(policy, ContinuousPolicy):
        return policy
    note = features.order_note
    if note in policy.notes:
        return policy
    return replace(policy, notes=(*policy.notes, note))


def _as_policy(
    policy: PolicySource,
    action_space: ActionSpace,
    observation_shape: Sequence[int],
    name: str | None,
    features: Features | None,
) -> Policy:
    """`as_policy` for anything but a spec, without the note on the order of actions.

    Raises PolicyError.
    """
    layout = _layout_of(features)
    if isinstance(policy, (DiscretePolicy, ContinuousPolicy)):
        return _of_policy(policy, action_space, observation_shape, layout)
    name = str(name or getattr(policy, "__name__", type(policy).__name__))
    if is_instance_of_loaded("d3rlpy.base", "LearnableBase", policy):
        return _of_algorithm(policy, name, action_space, observation_shape, layout)
    return _of_function(policy, name, action_space, observation_shape, features)


def _of_policy(
    policy: Policy,
    action_space: ActionSpace,
    observation_shape: Sequence[int],
    layout: Layout | None,
) -> Policy:
    """A policy of the log's encoded observations, checked against the log's spaces."""
    if layout is not None and policy.observation_shape in (None, layout.shape):
        policy = of_logged_observations(policy, layout)
    actions: ActionSpace
    if isinstance(policy, DiscretePolicy):
        actions = Discrete(policy.n)
    else:
        actions = Continuous(policy.k)
    check_spaces(
        policy.name,
        (actions, policy.observation_shape),
        (action_space, observation_shape),
    )
    return policy


def _of_algorithm(
    algorithm: Any,
    name: str,
    action_space: ActionSpace,
    observation_shape: Sequence[int],
    layout: Layout | None,
) -> Policy:
    """The policy of a d3rlpy algorithm, which may be made for observations as the file
    holds them.
    """
    from koffline.algos.policies import policy_from_algo

    trained_for = tuple(algorithm.observation_shape or ())
    if layout is None or trained_for != layout.shape:
        return policy_from_algo(algorithm, name, action_space, observation_shape)
    policy = policy_from_algo(algorithm, name, action_space, layout.shape)
    return of_logged_observations(policy, layout)


def _of_function(
    function: object,
    name: str,
    action_space: ActionSpace,
    observation_shape: Sequence[int],
    features: Features | None,
) -> Policy:
    """The policy of a torch module or a callable.

    Raises PolicyError for other objects, and for a function whose parameters do not fit
    the log.
    """
    wanted = "a function of a batch of observations"
    if isinstance(function, type):
        raise PolicyError(
            f"{name}: this is a class; give an instance of it or {wanted}"
        )
    if is_estimator(function):
        function = _of_estimator(function, name, action_space, features)
    if not callable(function):
        raise PolicyError(
            f"{name}: a {type(function).__name__} is not a policy; give {ACCEPTED}, or"
            f" {wanted}"
        )
    function = _of_network(function)
    parameters = _parameters(function)
    is_network = getattr(function, "is_network", False)
    is_of_outputs = isinstance(function, OutputPolicy)
    layout = _layout_of(features)
    library = _library_for(function, parameters, features)
    function, takes_mask = _of_mask(function, parameters)
    notes: list[str] = []
    remedy = CHECK_BATCH
    if library is not None:
        if not isinstance(function, EstimatorFunction):
            remedy = _frame_received(features, library)
        function = _of_frame(function, name, observation_shape, features, library)
    elif layout is not None:
        function, form = _of_labels(function, layout, action_space)
        notes.append(f"{name} gets observations {form}")
    elif isinstance(function, EstimatorFunction) and function.columns:
        notes.append(
            f"the log's columns have no names: {name}, which was fitted to"
            f" {listed(function.columns, _MOST_COLUMNS)}, gets them in their order"
        )
    elif _has_names(features, observation_shape) and not is_network:
        remedy = _FRAME_REMEDY
    if isinstance(action_space, Discrete):
        _check_no_generator(parameters, name)
        if features is not None and features.is_coded and not is_of_outputs:
            notes.append(_coding_note(name, features, is_network))
        if features is not None and not is_network and not is_of_outputs:
            function = partial(_numbered, function, name, features)
    policy = callable_policy(function, name, action_space, observation_shape)
    policy = replace(policy, notes=tuple(notes), remedy=remedy)
    return _told_of_mask(policy, takes_mask)


def _told_of_mask(policy: Policy, takes_mask: bool) -> Policy:
    """A policy that is given masks of available actions if its function takes them."""
    if isinstance(policy, DiscretePolicy):
        return replace(policy, takes_mask=takes_mask)
    return policy


def _of_network(function: Callable[..., object]) -> Callable[..., object]:
    """A torch module, also inside a policy of its outputs, as a function of arrays."""
    if isinstance(function, OutputPolicy):
        return function.of(_of_network(function.model))
    if is_instance_of_loaded("torch.nn", "Module", function):
        return ModuleFunction(function)
    return function


def _of_estimator(
    model: Any, name: str, action_space: ActionSpace, features: Features | None
) -> EstimatorFunction:
    """An estimator of scikit-learn as a function. Raises PolicyError."""
    if isinstance(action_space, Continuous):
        return EstimatorFunction(model, name, None, ())
    actions: tuple[str, ...] = ()
    if features is not None:
        actions = features.actions
    return EstimatorFunction(model, name, action_space.n, actions)


def _library_for(
    function: Callable[..., object],
    parameters: Mapping[str, inspect.Parameter],
    features: Features | None,
) -> Library | None:
    """Whose frame of named columns a function takes; None if it takes an array.

    An estimator that was fitted to named columns takes a frame if the log has names.
    """
    if isinstance(function, EstimatorFunction):
        if function.columns and features is not None and features.layout is None:
            return function.library
        return None
    return library_of(function, parameters)


def _has_names(features: Features | None, observation_shape: Sequence[int]) -> bool:
    """Whether the log's columns have names, so that a frame can be made of them."""
    return features is not None and tuple(observation_shape) == (len(features.names),)


def _frame_received(features: Features | None, library: Library) -> str:
    """What to do where a function of a frame fails: which frame it received, and how it
    receives one of the other library.
    """
    columns = ""
    if features is not None:
        columns = f" with the columns {listed(features.columns, _MOST_COLUMNS)}"
    other = "pandas"
    if library == "pandas":
        other = "polars"
    return (
        f"it received a {library} frame{columns}; for one of {other} annotate the"
        f" parameter as {other}.DataFrame, or give koffline.frame_policy(function,"
        f" '{other}')"
    )


def _of_frame(
    function: Callable[..., object],
    name: str,
    observation_shape: Sequence[int],
    features: Features | None,
    library: Library,
) -> ViewFunction:
    """A function of a frame of named columns as one of the array of observations.

    Raises PolicyError if the log's columns have no names.
    """
    if features is None or not _has_names(features, observation_shape):
        raise PolicyError(
            f"{name}: it asks for a table, but the columns of this log have no names"
            " (it comes from no table); take the array of observations instead"
        )
    table_of = features.table

    def view(observations: np.ndarray) -> object:
        frame = as_library(table_of(observations), library, name)
        if isinstance(function, EstimatorFunction):
            return function.chosen(frame)
        return frame

    return ViewFunction(function, view)


def _check_no_generator(parameters: Mapping[str, inspect.Parameter], name: str) -> None:
    """Raise PolicyError if a function for discrete actions needs a generator."""
    generator = parameters.get("generator")
    if generator is not None and generator.default is inspect.Parameter.empty:
        raise PolicyError(
            f"{name}: a generator is for continuous actions; return the probabilities"
            " of discrete ones"
        )


def _coding_note(name: str, features: Features, is_network: bool) -> str:
    """How whole numbers that a function returns are read where actions are coded."""
    if is_network:
        meaning = "positions, from 0, in"
    else:
        meaning = "values of"
    return (
        f"whole numbers that {name} returns were read as {meaning} action_names"
        f" ({listed(features.actions, 8)})"
    )


def _parameters(function: Callable[..., object]) -> Mapping[str, inspect.Parameter]:
    """A function's parameters by name; empty for a callable without a signature."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}


def _of_mask(
    function: Callable[..., object], parameters: Mapping[str, inspect.Parameter]
) -> tuple[Callable[..., object], bool]:
    """A function that may be called with masks beside the observations if it has a
    parameter for them, and whether it has.
    """
    if isinstance(function, OutputPolicy):
        return function, True
    if _MASK in parameters:
        return _MaskFunction(function), True
    return function, False


class _MaskFunction:
    """Calls a function that has a parameter ``action_mask`` (N, n), wherever it stands
    among the parameters.
    """

    def __init__(self, function: Callable[..., object]) -> None:
        self._function = function
        self.__signature__ = inspect.signature(function)

    def __call__(
        self, observations: object, action_mask: np.ndarray | None = None
    ) -> object:
        """Call the function; without a mask it must do without."""
        if action_mask is None:
            return self._function(observations)
        return self._function(observations, action_mask=action_mask)


class ViewFunction:
    """Calls a function on another form of the log's observations (N, d).

    view: makes the first argument from the observations, such as a table of named
    columns.
    """

    def __init__(
        self, function: Callable[..., object], view: Callable[[np.ndarray], object]
    ) -> None:
        self._function = function
        self._view = view
        with suppress(TypeError, ValueError):  # a callable without a signature
            self.__signature__ = inspect.signature(function)
        density = getattr(function, "log_density", None)
        if density is not None:
            self.log_density = ViewFunction(density, view)

    def __call__(
        self,
        observations: np.ndarray,
        beside: np.ndarray | np.random.Generator | None = None,
        **options: object,
    ) -> object:
        """Call the function with the view of the observations, and whatever stands
        beside them (actions, a generator) as it is.
        """
        view = self._view(observations)
        if beside is None:
            return self._function(view, **options)
        return self._function(view, beside, **options)


def of_logged_observations(policy: Policy, layout: Layout) -> Policy:
    """A policy of observations as the file holds them as one of the log's encoded
    observations.
    """
    names = ["function"]
    if isinstance(policy, ContinuousPolicy):
        names = ["mean_function", "sample_function", "density_function"]
    changed: dict[str, Any] = {}
    for name in names:
        function = getattr(policy, name)
        if function is not None:
            changed[name] = ViewFunction(function, layout.decode)
    note = f"{policy.name} gets observations {_AS_LOGGED.format(layout.shape_text)}"
    notes = (*policy.notes, note)
    return replace(policy, **changed, observation_shape=(layout.width,), notes=notes)


def _of_labels(
    function: Callable[..., object], layout: Layout, action_space: ActionSpace
) -> tuple[Callable[..., object], str]:
    """A function of the log's encoded observations, and in words what the given
    function gets.

    A Python function gets what the file holds. A network may be made for that, as
    numbers or as indices, or for encoded observations: it gets the first of these for
    which it gives an answer of the right shape.
    """
    form = _AS_LOGGED.format(layout.shape_text)
    of_logged = ViewFunction(function, layout.decode)
    if not getattr(function, "is_network", False):
        return of_logged, form
    of_floats = ViewFunction(function, partial(_decoded_floats, layout))
    for candidate in (of_floats, of_logged):
        if _answers(candidate, layout, action_space):
            return candidate, form
    if _answers(function, layout, action_space):
        return function, f"encoded, as the log has them: (N, {layout.width})"
    return of_floats, form


def _decoded_floats(layout: Layout, observations: np.ndarray) -> np.ndarray:
    return layout.decode(observations).astype(np.float32)


def _answers(
    function: Callable[..., object], layout: Layout, action_space: ActionSpace
) -> bool:
    """Whether a network gives an answer of the right shape for two observations."""
    logged = np.zeros((2, *layout.shape))
    logged.reshape(2, -1)[:] = layout.lowest
    if isinstance(action_space, Discrete):
        columns = action_space.n
    else:
        columns = action_space.k
    try:
        shape = np.shape(as_numbers(function(layout.encode(logged))))
    except Exception:
        # whatever a stranger's network raises for an input that it was not made for
        return False
    return shape in ((2,), (2, 1), (2, columns))


def _numbered(
    function: Callable[..., object],
    name: str,
    features: Features,
    observations: np.ndarray,
    masks: np.ndarray | None = None,
) -> object:
    """Call the function, with masks beside the observations if it takes them, and
    convert action texts to indices.
    """
    if masks is None:
        return features.numbers(function(observations), name)
    return features.numbers(function(observations, masks), name)


def _read(
    path: Path,
    action_space: ActionSpace,
    observation_shape: Sequence[int],
    layout: Layout | None = None,
) -> PolicySource:
    """The content of a file: an algorithm, a policy, or a function of a batch of
    observations.

    action_space, observation_shape: the log's. layout: where labels stand among its
    observations, for a policy that may be made for these as the file holds them.

    Raises PolicyError.
    """
    kind = detect(path)
    if kind == "d3":
        file = read_d3(path)
        # Imported only for .d3 files, because d3rlpy takes seconds to load.
        from koffline.algos.model_files import algo_of

        return algo_of(file)
    if kind == "npz":
        try:
            return load_policy_file(path, action_space, observation_shape)
        except PolicyError:
            if layout is None:
                raise
            # it may be made for observations as the file holds them
            with suppress(PolicyError):
                return load_policy_file(path, action_space, layout.shape)
            raise
    if kind == "onnx":
        return load_onnx(path)
    return read_torchscript(path)


def import_object(spec: str) -> Any:
    """Import the object named by `package.module:name`; this runs the module.

    The current folder is searched first, as with `python -m`, for this module and for
    what the modules of this folder import. Raises PolicyError if the module or the name
    is missing, or the module fails.
    """
    module_name, _, attribute = spec.partition(":")
    say_it_runs_code(spec, f"runs the Python module {module_name}")
    here = current_folder()  # ours: user code may have moved to another one
    searched = here or "the current folder, which was deleted,"
    importlib.invalidate_caches()  # the module may have been written a moment ago
    remedy = (
        f"install it or run from the folder that holds it ({searched} was searched); a"
        " module must be importable on its own, and named without .py"
    )
    importing = user_code(spec, f"importing {module_name} failed", remedy, PolicyError)
    with importing, user_modules.named(module_name, folder=here):
        target = importlib.import_module(module_name)
    getting = user_code(
        spec, f"getting {attribute} failed", "give a name in that module", PolicyError
    )
    with getting:  # a module may have code for this, too
        for part in attribute.split("."):
            if not hasattr(target, part):
                public = [
                    name
                    for name, value in vars(target).items()
                    if name[0] != "_" and callable(value)
                ]
                raise PolicyError(
                    f"{spec}: {module_name} has no '{part}';"
                    f" {nearest_name(part, public)}"
                )
            target = getattr(target, part)
    return target


def callable_policy(
    function: Callable[..., object],
    name: str,
    action_space: ActionSpace,
    observation_shape: Sequence[int],
) -> Policy:
    """A policy from a function of a batch of observations.

    Discrete: it returns probabilities (N, n) or greedy action indices (N,). Continuous:
    it returns actions (N, k). With a parameter named `generator` it is stochastic and
    gets a numpy Generator; an attribute `log_density` of such a function,
    (observations, actions) -> (N,), makes importance ratios possible.
    """
    shape = tuple(observation_shape)
    if isinstance(action_space, Discrete):
        return DiscretePolicy(action_space.n, function, name, shape)
    if "generator" not in _parameters(function):
        return ContinuousPolicy(action_space.k, function, None, name, shape)

    def sample(observations: np.ndarray, generator: np.random.Generator) -> object:
        return function(observations, generator=generator)

    density = getattr(function, "log_density", None)
    return ContinuousPolicy(action_space.k, None, sample, name, shape, density)


class ModuleFunction:
    """Calls a torch module without gradients, in evaluation mode, on its device, with
    its float type.

    Columns of int64 (discrete actions) keep their type.
    """

    is_network = True

    def __init__(self, module: Any) -> None:
        import torch

        sample = next(module.parameters(), None)
        self._module = module
        if sample is not None and sample.is_floating_point():
            self._dtype = sample.dtype
        else:
            self._dtype = torch.float32
        if sample is None:
            self._device = torch.device("cpu")
        else:
            self._device = sample.device

    def __call__(
        self, observations: np.ndarray, actions: np.ndarray | None = None
    ) -> object:
        """Call the module with rows of observations, and of actions if there are
        some.
        """
        import torch

        call = partial(self._module, self._tensor(observations))
        if actions is not None:
            call = partial(call, self._tensor(actions))
        was_training = self._module.training
        self._module.eval()
        try:
            with torch.no_grad():
                return call()
        finally:
            self._module.train(was_training)

    def _tensor(self, column: np.ndarray) -> torch.Tensor:
        """A copy: the log's arrays are read-only, and the module might write into its
        input.
        """
        import torch

        dtype = self._dtype
        if column.dtype == np.int64:
            dtype = torch.int64
        return torch.tensor(column, dtype=dtype, device=self._device)
