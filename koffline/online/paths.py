"""Replay of sub-episodes, and the windows that a path-consistency learner draws from
them.

A sub-episode (path) of at most T steps has T + 1 observations, so that the true final
one is never lost. All arrays have a leading run axis; a run's paths and draws do not
depend on other runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from koffline.data.transitions import Metadata, Transitions
from koffline.errors import DataError
from koffline.online.config import OnlineConfig
from koffline.online.networks import Floats, InputMoments, Shape

Rows = slice | Tensor
Generators = Sequence[np.random.Generator]  # one per run


@dataclass(frozen=True, eq=False)
class Paths:
    """Paths with any leading axes (…); rows beyond a path's length are padding.

    observations (…, T + 1, d) float; actions (…, T, k) float or (…, T) int64, as drawn
    from the policy; rewards (…, T); lengths, environments, episodes (numbers within an
    environment), first_steps (the path's place in its episode) (…,) int64; terminated,
    truncated (…,): flags of the last step, both False if the episode goes on.
    """

    observations: np.ndarray
    actions: np.ndarray
    rewards: np.ndarray
    lengths: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    environments: np.ndarray
    episodes: np.ndarray
    first_steps: np.ndarray

    def flat_rows(self, index: np.ndarray, leading: int) -> Paths:
        """Select rows after flattening the ``leading`` first axes; the result has the
        shape of ``index``.
        """
        flat = {
            name: array.reshape(-1, *array.shape[leading:])
            for name, array in vars(self).items()
        }
        return Paths(
            **{name: array.take(index, axis=0) for name, array in flat.items()}
        )


class PathReplay:
    """Replays of K runs, each a ring buffer of ``capacity`` paths."""

    kept = ("_inserted", "_columns")

    def __init__(
        self, runs: int, capacity: int, path_length: int, shape: Shape, dtype: Floats
    ) -> None:
        self.runs = runs
        self.capacity = capacity
        self.action_space = shape.action_space
        self._inserted = np.zeros(runs, dtype=np.int64)
        steps = path_length
        action_column: tuple[tuple[int, ...], type] = ((steps,), np.int64)
        if shape.continuous:
            action_column = ((steps, shape.outputs), dtype)
        shapes: dict[str, tuple[tuple[int, ...], type]] = {
            "observations": ((steps + 1, shape.observation_dim), dtype),
            "actions": action_column,
            "rewards": ((steps,), dtype),
            **dict.fromkeys(("terminated", "truncated"), ((), bool)),
            **dict.fromkeys(
                ("lengths", "environments", "episodes", "first_steps"), ((), np.int64)
            ),
        }
        self._columns: dict[str, np.ndarray] = {
            name: np.zeros((runs, capacity, *row), kind)
            for name, (row, kind) in shapes.items()
        }

    @property
    def sizes(self) -> Shaped[np.ndarray, " run"]:
        """Number of paths that each run holds."""
        return np.minimum(self._inserted, self.capacity)

    def append(self, runs: Shaped[np.ndarray, " path"], paths: Paths) -> None:
        """Insert paths (S, …), each into its run in ``runs``, in their order within a
        run.
        """
        counts = np.bincount(runs, minlength=self.runs)
        order = np.argsort(runs, kind="stable")
        rank = np.arange(len(runs)) - np.repeat(np.cumsum(counts) - counts, counts)
        slots = (self._inserted[runs[order]] + rank) % self.capacity
        # If paths of one call overwrite each other the
        # last must stay, which numpy does.
        for name, array in vars(paths).items():
            self._columns[name][runs[order], slots] = array[order]
        self._inserted += counts

    def sample(
        self, generators: Generators, batch_size: int, recency: Sequence[float]
    ) -> Paths:
        """Paths (K, B, …), drawn by each run's own generator without replacement, p ∝
        exp(−recency · age).

        Every run must hold at least B.
        """
        ages = draw_ages(generators, self.sizes, batch_size, recency)
        return self._rows(
            np.arange(self.runs)[:, None],
            (self._inserted[:, None] - 1 - ages) % self.capacity,
        )

    def held(self, run: int) -> Paths:
        """All paths of a run, oldest first."""
        first = max(self._inserted[run] - self.capacity, 0)
        return self._rows(run, np.arange(first, self._inserted[run]) % self.capacity)

    def _rows(self, run: int | np.ndarray, slots: np.ndarray) -> Paths:
        return Paths(**self._columns).flat_rows(run * self.capacity + slots, leading=2)


def _episodes_as_first_seen(paths: Paths) -> np.ndarray:
    """(P,) numbers 0, 1, … of the paths' episodes, in the order in which their first
    paths stand.
    """
    keys = np.stack((paths.environments, paths.episodes), axis=1)
    _, first, label = np.unique(keys, axis=0, return_index=True, return_inverse=True)
    rank = np.argsort(np.argsort(first))
    return rank[label.reshape(-1)]


def replay_transitions(
    replay: PathReplay, run: int, gamma: float | None = None
) -> Transitions:
    """Log of one run's replay; sub-episodes are joined to episodes in the order of
    their starts.

    Continuous actions are those that the environment received, clipped to the bounds.
    The last row of an unfinished episode is truncated. Episodes whose first steps were
    overwritten are left out, with a note. Raises DataError if no episode is held from
    its beginning.
    """
    paths = replay.held(run)
    episode = _episodes_as_first_seen(paths)
    begins = np.bincount(episode, weights=paths.first_steps == 0) > 0
    if not begins.any():
        raise DataError(
            f"the replay of run {run} holds no episode from its beginning"
            f" ({len(paths.lengths)} paths); play longer, or give the replay a larger"
            " capacity"
        )
    order = np.lexsort((paths.first_steps, episode))
    order = order[begins[episode][order]]
    paths = paths.flat_rows(order, leading=1)
    episode = episode[order]
    step = np.arange(paths.rewards.shape[1])
    lengths = paths.lengths[:, None]
    inside = step < lengths
    last = step == lengths - 1
    changes = np.diff(np.repeat(episode, paths.lengths)) != 0
    terminated = (paths.terminated[:, None] & last)[inside]
    dropped = int((~begins).sum())
    notes: tuple[str, ...] = ()
    if dropped:
        notes = (f"{dropped} episodes whose beginning was overwritten were left out",)
    return Transitions(
        observations=paths.observations[:, :-1][inside],
        actions=replay.action_space.clip(paths.actions[inside]),
        rewards=paths.rewards[inside],
        next_observations=paths.observations[:, 1:][inside],
        terminated=terminated,
        truncated=np.append(changes, True) & ~terminated,
        episode_ids=np.cumsum(np.append(False, changes)),
        steps=(paths.first_steps[:, None] + step)[inside],
        action_space=replay.action_space,
        metadata=Metadata(notes=notes, gamma=gamma),
    )


def draw_ages(
    generators: Generators,
    sizes: Shaped[np.ndarray, " run"],
    count: int,
    recency: Sequence[float],
) -> Shaped[np.ndarray, "run draw"]:
    """Distinct ages (K, B) in [0, size): successive draws with p ∝ exp(−recency · age),
    no replacement.

    If the weight is spread over many ages, draws by inversion are repeated until B
    differ, which has the same distribution; otherwise the B largest of log p + Gumbel
    noise are taken.
    """
    ages = np.empty((len(sizes), count), dtype=np.int64)
    for run, (generator, size, rate) in enumerate(
        zip(generators, sizes.tolist(), recency, strict=True)
    ):
        # sum over all ages
        if rate > 0.0:
            weight = -np.expm1(-rate * size) / rate
        else:
            weight = size
        if weight < 3.0 * count:
            keys = generator.gumbel(size=size) - rate * np.arange(size)
            ages[run] = np.argsort(-keys, kind="stable")[:count]
            continue
        distinct = np.zeros(0, dtype=np.int64)
        while len(distinct) < count:
            uniform = generator.random(2 * count)
            if rate > 0.0:
                drawn = np.log1p(-uniform * rate * weight) / -rate
            else:
                drawn = uniform * size
            distinct = np.append(distinct, np.minimum(drawn.astype(np.int64), size - 1))
            distinct = distinct[np.sort(np.unique(distinct, return_index=True)[1])]
        ages[run] = distinct[:count]
    return ages


@dataclass(frozen=True, eq=False)
class Minibatch:
    """B paths of K runs with W windows on each; a window that would start after its
    path's end is invalid.

    inputs (K, B, T + 1, d) standardised; actions; rewards (K, B, T) scaled. starts,
    ends (K, B, W): steps; valid (K, B, W). weights (K, B, W, T): γ^(t − start) within
    the window, else 0. discounts (K, B, W): γ^length for the value at the end, 0 after
    a terminal step. rows (K, R): the steps b · T + t that some window covers, padded
    with other steps if a run has fewer; covered (K, R): 1 for a covered step, 0 for
    padding.
    """

    inputs: Tensor
    actions: Tensor
    rewards: Tensor
    starts: Tensor
    ends: Tensor
    valid: Tensor
    weights: Tensor
    discounts: Tensor
    rows: Tensor
    covered: Tensor

    def of(self, runs: Rows) -> Minibatch:
        """Windows of the given runs."""
        return Minibatch(**{name: part[runs] for name, part in vars(self).items()})


class WindowCutter:
    """Cuts windows of min(d, rest of the path) steps; a time limit is no
    termination.
    """

    def __init__(self, configs: Sequence[OnlineConfig], dtype: torch.dtype) -> None:
        common = configs[0]
        self._dtype = dtype
        self._length = common.path_length
        if common.streaming:
            self._count = 0
        else:
            self._count = common.windows_per_path
        gamma = np.array([[config.gamma] for config in configs])  # (K, 1)
        scale = np.array([[[config.reward_scale]] for config in configs])
        self._window_length = np.array([[[config.window_length]] for config in configs])
        self._powers = gamma ** np.arange(self._length + 1)  # (K, T + 1)
        self._reward_scale = self._tensor(scale)

    def sample(
        self, paths: Paths, generators: Generators, moments: InputMoments
    ) -> Minibatch:
        """Windows drawn uniformly within each path by each run's own generator; or all
        windows.
        """
        lengths = paths.lengths
        if not self._count:
            every = np.broadcast_to(
                np.arange(self._length), (*lengths.shape, self._length)
            )
            return self.cut(paths, every, moments)
        uniform = np.stack(
            [
                generator.random((lengths.shape[1], self._count))
                for generator in generators
            ]
        )
        return self.cut(paths, (uniform * lengths[..., None]).astype(np.int64), moments)

    def cut(
        self,
        paths: Paths,
        starts: Int[np.ndarray, "run path window"],
        moments: InputMoments,
    ) -> Minibatch:
        """Windows from the given starts on sampled paths (K, B, …)."""
        lengths = paths.lengths[..., None]  # (K, B, 1)
        size = np.clip(np.minimum(self._window_length, lengths - starts), 0, None)
        ends = starts + size
        offsets = np.arange(self._length) - starts[..., None]  # (K, B, W, T)
        inside = (offsets >= 0) & (offsets < size[..., None])
        run = np.arange(len(starts))[:, None, None]
        weights = np.where(
            inside, self._powers[run[..., None], np.clip(offsets, 0, None)], 0.0
        )
        valid = size > 0
        is_final = (ends == lengths) & paths.terminated[..., None]
        discounts = np.where(is_final, 0.0, self._powers[run, size]) * valid
        # The steps that windows cover, packed: with one window of ten per path the
        # policy skips nearly half.
        is_covered = (weights != 0.0).any(axis=2).reshape(len(weights), -1)
        counts = is_covered.sum(axis=1, keepdims=True)
        rows = np.argsort(~is_covered, axis=1, kind="stable")[
            :, : counts.max(initial=1)
        ]
        mean = self._tensor(moments.mean)[:, None, None]
        inverse = self._tensor(1.0 / moments.std)[:, None, None]
        actions = torch.from_numpy(paths.actions)
        if actions.dtype != torch.int64:  # no indices of discrete actions
            actions = actions.to(self._dtype)
        return Minibatch(
            inputs=(self._tensor(paths.observations) - mean) * inverse,
            actions=actions,
            rewards=self._tensor(paths.rewards) * self._reward_scale,
            starts=torch.from_numpy(np.array(starts)),
            ends=torch.from_numpy(ends),
            valid=self._tensor(valid),
            weights=self._tensor(weights),
            discounts=self._tensor(discounts),
            rows=torch.from_numpy(rows),
            covered=self._tensor(np.arange(rows.shape[1]) < counts),
        )

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._dtype)
