"""Windows of d steps on sampled paths: where they start and end, their weights and discounts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from koffline.data.paths import Paths


@dataclass(frozen=True, eq=False)
class WindowRules:
    """Per-run numbers (K,): γ, d and the oddities of the original; the paths' length T is common."""

    gamma: np.ndarray
    window_length: np.ndarray
    legacy_timeouts: np.ndarray
    legacy_discount: np.ndarray
    path_length: int

    @property
    def powers(self) -> Float[np.ndarray, "run power"]:
        """γ^0 … γ^T."""
        return self.gamma[:, None] ** np.arange(self.path_length + 1)


@dataclass(frozen=True, eq=False)
class Windows:
    """W windows on each of B paths of K runs; a window that would start past its path's end is not valid.

    starts, ends (K, B, W): steps; valid (K, B, W). weights (K, B, W, T): γ^(t − start) within the window,
    else 0. discounts (K, B, W): γ^length of what follows, 0 after a terminal step.
    """

    starts: Int[np.ndarray, "run path window"]
    ends: Int[np.ndarray, "run path window"]
    valid: np.ndarray
    weights: Float[np.ndarray, "run path window step"]
    discounts: Float[np.ndarray, "run path window"]


@dataclass(frozen=True, eq=False)
class PackedSteps:
    """The steps that some window covers, (K, R) numbers b · T + t; filler where a run has fewer.

    covered (K, R): 1 for a step, 0 for filler, which repeats step 0.
    """

    index: Int[np.ndarray, "run row"]
    covered: Float[np.ndarray, "run row"]


def pack_steps(windows: Windows) -> PackedSteps:
    """Steps outside every window need no policy: with one window of ten a path, nearly half of all."""
    inside = (windows.weights != 0.0).any(axis=2).reshape(len(windows.starts), -1)
    run, step = np.nonzero(inside)
    counts = np.bincount(run, minlength=len(inside))
    place = np.arange(len(run)) - np.repeat(np.cumsum(counts) - counts, counts)
    index = np.zeros((len(inside), int(counts.max(initial=1))), dtype=np.int64)
    index[run, place] = step
    return PackedSteps(index, (np.arange(index.shape[1]) < counts[:, None]).astype(float))


def draw_starts(
    generators: Sequence[np.random.Generator], lengths: Int[np.ndarray, "run path"], windows: int
) -> Int[np.ndarray, "run path window"]:
    """Uniform starts within each path, each run's from its own generator."""
    uniform = np.stack([generator.random((lengths.shape[1], windows)) for generator in generators])
    return (uniform * lengths[..., None]).astype(np.int64)


def all_starts(lengths: Int[np.ndarray, "run path"], path_length: int) -> Int[np.ndarray, "run path window"]:
    """Every step of every path, also those past its end."""
    return np.broadcast_to(np.arange(path_length), (*lengths.shape, path_length))


def cut_windows(paths: Paths, starts: Int[np.ndarray, "run path window"], rules: WindowRules) -> Windows:
    """Windows of min(d, what is left of the path) steps from the given starts.

    legacy_timeouts: a time limit ends the value as a terminal state does. legacy_discount: what follows a
    window that ends with its path is discounted by one γ too few. Both as in the code the paper modified.
    """
    lengths = paths.lengths[..., None]  # (K, B, 1)
    size = np.clip(np.minimum(rules.window_length[:, None, None], lengths - starts), 0, None)
    ends = starts + size
    at_end = ends == lengths
    offsets = np.arange(rules.path_length) - starts[..., None]  # (K, B, W, T)
    inside = (offsets >= 0) & (offsets < size[..., None])
    powers, run = rules.powers, np.arange(len(starts))[:, None, None]
    weights = np.where(inside, powers[run[..., None], np.clip(offsets, 0, None)], 0.0)
    final = paths.terminated | (paths.truncated & rules.legacy_timeouts[:, None])
    exponent = np.clip(size - (at_end & rules.legacy_discount[:, None, None]), 0, None)
    discounts = np.where(at_end & final[..., None], 0.0, powers[run, exponent])
    valid = size > 0
    return Windows(starts, ends, valid, weights, discounts * valid)
