"""The two kinds of policies: functions of observations, called in chunks, with checked
outputs.

Discrete functions return probabilities (N, n) or greedy action indices (N,) or (N, 1);
continuous ones return actions (N, k), or (N,) if k = 1. NumPy arrays, torch tensors and
nested lists are accepted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
from jaxtyping import Bool, Float, Int, Shaped, UInt64

from koffline.data.transitions import ActionSpace, Discrete
from koffline.errors import KofflineError, PolicyError
from koffline.untrusted.limits import one_line, one_line_errors
from koffline.untrusted.user_code import user_code

CHUNK_ROWS = 4096
# Wide observations (images) go in smaller chunks: about 64 MB of float32 at a time.
CHUNK_NUMBERS = 1 << 24
SUM_TOLERANCE = 1e-4
# Half-precision types round each probability by up to half of
# this spacing at 1, and a sum likewise.
HALF_SPACINGS = {"float16": 2.0**-10, "bfloat16": 2.0**-7}
# A sum this near 1, of numbers in [0, 1], belongs to
# rounded probabilities and not to logits.
_NEARLY_ONE = 0.05
# A probability computed as 1 - sum of the others in
# float32 may come out this far below zero.
NEGATIVE_TOLERANCE = 1e-6
# what to do if a function fails
CHECK_BATCH = "check that it accepts such a batch"
reading = partial(one_line_errors, kind=PolicyError)
# What `koffline.policy_specs.as_policy` takes: a spec or path, a Policy, a callable, a
# torch module, an algorithm of d3rlpy, an estimator of scikit-learn. It refuses others.
PolicySource: TypeAlias = object
Observations = Shaped[np.ndarray, "row *observation"]
# a function's output and its number of rows N to (N, …) of a result
Check = Callable[[np.ndarray, int], np.ndarray]
Spaces = tuple[ActionSpace, Sequence[int] | None]
_WORDS = "the policy has", "give a policy trained for this log"
# which of n actions are available
ActionMasks = Bool[np.ndarray, "row action"]
# actions of k numbers, or probabilities of n actions
Actions = Float[np.ndarray, "row action"]


@dataclass(frozen=True, eq=False)
class TrainingRows:
    """The rows a policy was trained on: part or all of the log whose rows have the
    digest ``sha256``.

    ``fingerprints (M,)``: the smallest fingerprints of these rows; empty if unknown.
    """

    sha256: str
    fingerprints: UInt64[np.ndarray, " row"]


@dataclass(frozen=True, eq=False)
class DiscretePolicy:
    """A distribution over n actions for each observation.

    function: observations (N, ...) -> probabilities (N, n), or action indices (N,) for
    a greedy policy. takes_mask: whether it is called with (observations, masks (N, n)),
    all true where every action is available. observation_shape: shape of one
    observation; None accepts any. copies: how often the function copies each row; it
    then gets fewer rows at a time.
    notes: readable sentences on how the policy is read. trained_on: None if unknown.
    remedy: what to do if the function fails, for the message.
    """

    n: int
    function: Callable[..., object] = field(repr=False)
    name: str = "policy"
    observation_shape: tuple[int, ...] | None = None
    copies: int = 1
    notes: tuple[str, ...] = ()
    trained_on: TrainingRows | None = None
    remedy: str = CHECK_BATCH
    takes_mask: bool = False
    # for the messages of `call_in_chunks`
    noun = "policy"
    error = PolicyError

    def probabilities(
        self, observations: Observations, action_mask: ActionMasks | None = None
    ) -> Actions:
        """Action probabilities (N, n), float64, rows sum to one.

        action_mask: available actions of each observation, to which the policy is
        restricted (`among_available`). Raises PolicyError, also where the policy takes
        no available action.
        """
        probabilities = self.unmasked_probabilities(observations, action_mask)
        if action_mask is None:
            return probabilities
        return among_available(probabilities, action_mask, self.name)

    def unmasked_probabilities(
        self, observations: Observations, action_mask: ActionMasks | None = None
    ) -> Actions:
        """What the function returns as probabilities (N, n), also of unavailable
        actions; it gets ``action_mask`` if it takes masks. Raises PolicyError.
        """
        beside = None
        if self.takes_mask and action_mask is None:
            beside = np.ones((len(observations), self.n), dtype=np.bool_)
        elif self.takes_mask:
            beside = np.asarray(action_mask)
        return call_in_chunks(
            self,
            self.function,
            partial(_probabilities, n=self.n),
            (self.n,),
            observations,
            beside,
        )

    def share_on_unavailable(
        self, observations: Observations, action_mask: ActionMasks
    ) -> float:
        """Mean probability that the function gives to unavailable actions, which
        `probabilities` removes. Raises PolicyError.
        """
        probabilities = self.unmasked_probabilities(observations, action_mask)
        return float(np.where(action_mask, 0.0, probabilities).sum(axis=1).mean())

    def sample(
        self, observations: Observations, generator: np.random.Generator
    ) -> Int[np.ndarray, " row"]:
        """One action index per observation, drawn from `probabilities`.

        Raises PolicyError.
        """
        return pick_actions(
            self.probabilities(observations), generator.random(len(observations))
        )


def among_available(
    probabilities: Actions, action_mask: ActionMasks, name: str
) -> Actions:
    """π(a|s, A(s)) = π(a|s) 1[a ∈ A(s)] / Σ_{b ∈ A(s)} π(b|s): probabilities (N, n)
    among the available actions of each row. Rows without probability elsewhere stay as they
    are.

    name: of the policy. Raises PolicyError if some row has no probability of an
    available action.
    """
    kept = np.where(action_mask, probabilities, 0.0)
    mass = kept.sum(axis=1)
    has_none = ~(mass > 0.0)
    if has_none.any():
        raise PolicyError(
            f"{name} takes no available action in {int(has_none.sum())} of"
            f" {len(kept)} states (first: number {int(has_none.argmax())}); give it a"
            " parameter action_mask (N, n), or action values or logits by"
            " koffline.greedy_policy or koffline.softmax_policy"
        )
    has_others = (kept != probabilities).any(axis=1)
    kept[has_others] /= mass[has_others, None]
    return kept


def pick_actions(
    probabilities: Actions, numbers: Float[np.ndarray, " row"]
) -> Int[np.ndarray, " row"]:
    """Action indices (N,) from probabilities (N, n) and uniform numbers (N,) in [0, 1),
    by inversion.
    """
    cumulative = probabilities.cumsum(axis=1)
    # exactly one at the end: an action of probability 0 is never drawn
    cumulative /= cumulative[:, -1:]
    return (numbers[:, None] >= cumulative).sum(axis=1)


@dataclass(frozen=True, eq=False)
class ContinuousPolicy:
    """Actions of k numbers: one for each observation, or drawn at random.

    mean_function: observations (N, ...) -> actions (N, k) of a deterministic policy, or
    means of the draws; None if unknown. sample_function: (observations, generator) ->
    actions (N, k); None for a deterministic policy. observation_shape, copies, notes,
    trained_on: as in `DiscretePolicy`. density_function: (observations, actions) -> log
    density (N,) of the draws of `sample_function`; None if unknown. cut_to: bounds
    (low, high) at which draws are cut off, so that they have positive probability (see
    `koffline.policies.builtin`); None without such bounds.
    """

    k: int
    mean_function: Callable[..., object] | None = field(repr=False)
    sample_function: Callable[..., object] | None = field(default=None, repr=False)
    name: str = "policy"
    observation_shape: tuple[int, ...] | None = None
    density_function: Callable[..., object] | None = field(default=None, repr=False)
    cut_to: tuple[np.ndarray, np.ndarray] | None = field(default=None, repr=False)
    copies: int = 1
    notes: tuple[str, ...] = ()
    trained_on: TrainingRows | None = None
    remedy: str = CHECK_BATCH
    # for the messages of `call_in_chunks`
    noun = "policy"
    error = PolicyError

    @property
    def deterministic(self) -> bool:
        """Whether `sample` returns the mean action."""
        return self.sample_function is None

    def mean(self, observations: Observations) -> Actions:
        """Actions (N, k), float64, or the means of a random policy if known.

        Raises PolicyError.
        """
        if self.mean_function is None:
            raise PolicyError(
                f"{self.name}: the mean of its draws is unknown; draw actions by sample"
            )
        return call_in_chunks(
            self,
            self.mean_function,
            partial(_actions, k=self.k),
            (self.k,),
            observations,
        )

    def sample(
        self, observations: Observations, generator: np.random.Generator
    ) -> Actions:
        """One draw (N, k), float64, per observation; the same generator state gives the
        same draws.
        """
        if self.sample_function is None:
            return self.mean(observations)
        return call_in_chunks(
            self,
            self.sample_function,
            partial(_actions, k=self.k),
            (self.k,),
            observations,
            generator,
        )

    @property
    def why_no_density(self) -> str:
        """Reason why `log_density` would raise; empty if it would not."""
        if self.deterministic:
            return "it is deterministic: its actions have no density"
        if self.density_function is None:
            return (
                "the density of its actions is unknown (a function may have an"
                " attribute log_density)"
            )
        return ""

    def log_density(
        self, observations: Observations, actions: Actions
    ) -> Float[np.ndarray, " row"]:
        """Log density (N,) of the given actions (N, k); −inf for impossible ones.

        Raises PolicyError.
        """
        if self.density_function is None or self.deterministic:
            raise PolicyError(
                f"{self.name}: {self.why_no_density}; use a method that only draws"
                " actions"
            )
        return call_in_chunks(
            self,
            self.density_function,
            _log_densities,
            (),
            observations,
            actions.astype(np.float64),
        )


Policy = DiscretePolicy | ContinuousPolicy


def check_spaces(
    name: str,
    expected: Spaces,
    log: Spaces,
    words: tuple[str, str] = _WORDS,
    kind: type[KofflineError] = PolicyError,
) -> None:
    """Raise an error unless actions and observations of a policy, model or world have
    the log's spaces.

    name: of the policy, begins the message; may be empty. expected, log: action space
    and observation shape of the policy, and of the log; None as a shape fits any.
    words: the subject of the message, and the remedy. kind: of the error.
    """
    subject, remedy = words
    if name:
        subject = f"{name}: {subject}"
    actions = describe_actions(expected[0])
    logged_actions = describe_actions(log[0])
    if actions != logged_actions:
        raise kind(f"{subject} {actions}, the log {logged_actions}; {remedy}")
    shape = expected[1] and tuple(expected[1])
    logged_shape = log[1] and tuple(log[1])
    if shape not in (None, logged_shape):
        raise kind(
            f"{subject} observations of shape {shape}, the log {logged_shape}; {remedy}"
        )


def describe_actions(space: ActionSpace) -> str:
    """`4 discrete actions` or `2 continuous action dimensions`."""
    if isinstance(space, Discrete):
        return f"{space.n} discrete actions"
    return f"{space.k} continuous action dimensions"


@runtime_checkable
class CalledInChunks(Protocol):
    """A policy or value function, whose function `call_in_chunks` calls."""

    @property
    def name(self) -> str:
        """Begins the messages."""

    @property
    def copies(self) -> int:
        """How often the function copies each row."""

    @property
    def noun(self) -> str:
        """What it is, for the messages."""

    @property
    def remedy(self) -> str:
        """What to do if the function fails."""

    @property
    def error(self) -> type[KofflineError]:
        """What is raised then."""


def call_in_chunks(
    owner: CalledInChunks,
    function: Callable[..., object],
    check: Check,
    columns: tuple[int, ...],
    observations: np.ndarray,
    beside: np.ndarray | np.random.Generator | None = None,
) -> np.ndarray:
    """Results (N, *columns), float64, of an owner's function, called on chunks of the
    observations (N, …).

    function: takes observations, and ``beside`` if there is something beside them.
    check: takes the function's output and its number of rows; returns the rows of the
    result. columns: the shape of a row of the result. beside: actions (N, …) or masks
    (N, n), which are chunked, too, or a generator.

    Raises ``owner.error`` if the function fails or its output is wrong.
    """
    result = np.empty((len(observations), *columns))
    # numbers in a row and its copies: bounds the memory of a chunk
    numbers = max(1, math.prod(observations.shape[1:])) * owner.copies
    size = max(1, min(CHUNK_ROWS // owner.copies, CHUNK_NUMBERS // numbers))
    for start in range(0, len(result), size):
        rows = slice(start, start + size)
        # A copy: a function may write into its input, which torch does even to
        # read-only arrays.
        chunk = observations[rows].copy()
        call = partial(function, chunk)
        failed = f"the {owner.noun} failed on observations of shape {chunk.shape}"
        if isinstance(beside, np.ndarray):
            beside_chunk = beside[rows].copy()
            call = partial(function, chunk, beside_chunk)
            kind = "actions"
            if beside.dtype == np.bool_:
                kind = "masks"
            failed += f" and {kind} {beside_chunk.shape}"
        elif beside is not None:
            call = partial(function, chunk, beside)
        with user_code(owner.name, failed, owner.remedy, owner.error):
            result[rows] = check(as_numbers(call()), len(chunk))
    return result


def as_numbers(raw: Any) -> np.ndarray:
    """Convert a function's output to a float64 or bool array. Raises PolicyError."""
    if hasattr(raw, "detach"):
        raw = raw.detach().cpu()
        is_float = hasattr(raw, "is_floating_point") and raw.is_floating_point()
        if is_float:
            raw = raw.double()  # numpy has no bfloat16
    if np.ma.is_masked(raw):
        missing = int(np.ma.getmaskarray(raw).sum())
        raise PolicyError(
            f"the output is a masked array without {missing} of its {np.size(raw)}"
            " values; return numbers in all places"
        )
    try:
        if np.iscomplexobj(raw):
            raise ValueError("complex numbers")
        array = np.asarray(raw)
        if array.dtype.kind == "b":
            return array
        return array.astype(np.float64)
    except (TypeError, ValueError) as error:
        raise PolicyError(
            f"the output is no array of numbers ({one_line(error)}); return a row per"
            " observation"
        ) from error


def _probabilities(output: np.ndarray, rows: int, n: int) -> Actions:
    """Check probabilities (N, n); indices become one-hot.

    Rows are rescaled whose sums are within 1e-4 of 1, or of half-precision numbers
    within their rounding. Raises PolicyError.
    """
    if output.shape in ((rows,), (rows, 1)):
        return _one_hot(output, rows, n)
    wanted = f"return probabilities of shape ({rows}, {n}) or action indices ({rows},)"
    _check_shape(output, (rows, n), f"{n} actions; {wanted}")
    array = _finite(output, "probabilities")
    with np.errstate(over="ignore"):  # of 1e308: refused below
        sums = array.sum(axis=1)
        least = array.min(axis=1, initial=np.inf)
    errors = np.abs(sums - 1.0)
    is_off = errors > SUM_TOLERANCE
    if is_off.any():
        is_off = errors > max(SUM_TOLERANCE, 2.0 * _half_spacing(array))
    is_wrong = is_off | (least < -NEGATIVE_TOLERANCE)
    if is_wrong.any():
        row = int(is_wrong.argmax())
        if is_off[row]:
            fault = f"sums to {sums[row]:.6g}"
        else:
            fault = f"contains {least[row]:.6g}"
        remedy = (
            "for logits return softmax(logits), for action values return their argmax"
            " (koffline.softmax_policy and koffline.greedy_policy do that)"
        )
        # a rounded softmax needs other advice
        if errors[row] < _NEARLY_ONE and least[row] >= 0.0 and array[row].max() <= 1.0:
            remedy = (
                "these are probabilities that were rounded; divide them by their sum,"
                " in float32 or better"
            )
        raise PolicyError(f"row {row} of the probabilities {fault}; {remedy}")
    array = np.clip(array, 0.0, None)
    return array / array.sum(axis=1, keepdims=True)


def _one_hot(output: np.ndarray, rows: int, n: int) -> Actions:
    """Probabilities (N, n) of a greedy policy from its action indices (N,) or (N, 1).

    Raises PolicyError for other numbers than 0..n − 1.
    """
    indices = _finite(output.reshape(rows), "probabilities").astype(np.float64)
    if n == 1:  # the single action is certain, given as a probability or an index
        return np.ones((rows, 1))
    if output.dtype == bool and n > 2:
        raise PolicyError(
            f"the output is yes or no, for {n} actions; return their indices"
        )
    is_wrong = (indices != np.floor(indices)) | (indices < 0) | (indices >= n)
    if is_wrong.any():
        row = int(is_wrong.argmax())
        raise PolicyError(
            f"row {row} of the output is {indices[row]:g}, not an action index in"
            f" 0..{n - 1}; return whole numbers in that range, or probabilities"
        )
    return np.eye(n)[indices.astype(np.int64)]


def _half_spacing(array: np.ndarray) -> float:
    """Spacing at 1 of the coarsest half-precision type that holds all numbers of an
    array exactly; else 0.

    The type is told from the numbers, since they may have been converted after the
    softmax.
    """
    with np.errstate(over="ignore", under="ignore"):
        half = array.astype(np.float16)
        single = array.astype(np.float32)
    # a bfloat16 is a float32 whose last 16 bits are zero
    if np.array_equal(array, single) and not (single.view(np.uint32) & 0xFFFF).any():
        return HALF_SPACINGS["bfloat16"]
    if np.array_equal(array, half):
        return HALF_SPACINGS["float16"]
    return 0.0


def _actions(output: np.ndarray, rows: int, k: int) -> Actions:
    """Check actions (N, k)."""
    if k == 1 and output.shape == (rows,):
        output = output.reshape(rows, 1)
    _check_shape(
        output,
        (rows, k),
        f"{k} action dimensions; return actions of shape ({rows}, {k})",
    )
    return _finite(output, "actions")


def _log_densities(output: np.ndarray, rows: int) -> Float[np.ndarray, " row"]:
    """Check log densities (N,); −inf is allowed."""
    has_shape = output.shape in ((rows,), (rows, 1))
    if not has_shape or np.any(np.isnan(output) | (output == np.inf)):
        raise PolicyError(
            f"the log density has shape {output.shape} for {rows} rows, or is nan or"
            " +inf; return one number per row, -inf for impossible actions"
        )
    return output.reshape(rows)


def _check_shape(output: np.ndarray, shape: tuple[int, int], wanted: str) -> None:
    """Raise PolicyError unless an output has this shape; ``wanted`` ends the
    message."""
    if output.shape != shape:
        raise PolicyError(
            f"the output has shape {output.shape} for {shape[0]} observations and"
            f" {wanted}"
        )


def _finite(array: np.ndarray, noun: str) -> np.ndarray:
    """The array, if all its numbers are finite; PolicyError names the first row that is
    not.
    """
    is_wrong = ~np.isfinite(array).reshape(len(array), -1).all(axis=1)
    if is_wrong.any():
        row = int(is_wrong.argmax())
        raise PolicyError(
            f"row {row} of the {noun} is not finite ({array[row]}); check the policy's"
            " weights and the range of the observations"
        )
    return array
