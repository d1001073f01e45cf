"""Episodes of a saved model in a Gymnasium environment, and films of them as GIFs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from koffline.data.transitions import ActionSpace, Continuous, Discrete
from koffline.envs.make import SpaceTranslator, playing
from koffline.errors import ConfigError, PolicyError
from koffline.policies.base import describe_actions
from koffline.store.files import atomic_file

_GIF_RATE = 25.0  # frames per second; viewers slow down what is faster than 50
AddFrame = Callable[[Any], None]


@dataclass(frozen=True)
class Episode:
    """How an episode went. is_cut: it was ended by the limit of steps that was asked for."""

    value: float  # undiscounted return
    steps: int
    is_cut: bool


class Player:
    """A model in an environment that fits it. Raises PolicyError where it does not.

    target_return: what a sequence model aims at.
    """

    def __init__(self, algo: Any, env: Any, name: str, target_return: float | None = None) -> None:
        self._algo, self._env, self._name, self._memory = algo, env, name, None
        self._spaces = SpaceTranslator(name, env.observation_space, env.action_space)
        kind, size = type(algo).__name__, algo.action_size
        own: ActionSpace = Discrete(size) if algo.get_action_type().name == "DISCRETE" else Continuous(size)
        ours = describe_actions(own), tuple(algo.observation_shape)
        theirs = describe_actions(self._spaces.action_space), self._spaces.observation_shape
        if ours != theirs:
            shapes = (
                f"{ours[0]} for observations of shape {ours[1]}, the environment {theirs[0]} and {theirs[1]}"
            )
            raise PolicyError(f"the {kind} has {shapes}; give the environment that it was trained for")
        if hasattr(algo, "as_stateful_wrapper"):
            if target_return is None:
                raise ConfigError(
                    f"a {kind} aims at a return of the environment; give it with --target-return"
                )
            self._memory = algo.as_stateful_wrapper(float(target_return))

    def play(self, seed: int, max_steps: int | None = None, on_frame: AddFrame | None = None) -> Episode:
        """One episode; `on_frame` is given what the environment renders, from the first state to the last.

        seed: of the environment and of all global generators, which are as before afterwards.
        """
        from koffline.algos.evaluators import own_randomness

        with own_randomness(seed):
            with playing(self._name, "reset"):
                raw, _ = self._env.reset(seed=seed)
            if self._memory is not None:
                self._memory.reset()
            self._show(on_frame)
            value, steps, reward, is_over = 0.0, 0, 0.0, False
            while not is_over and (max_steps is None or steps < max_steps):
                with playing(self._name, "step"):
                    action = self._action(self._spaces.observations([raw]), reward)
                    raw, reward, terminated, truncated, _ = self._env.step(action)
                reward, is_over = float(reward), bool(terminated or truncated)
                value, steps = value + reward, steps + 1
                self._show(on_frame)
        return Episode(value, steps, is_cut=not is_over)

    def _action(self, observations: np.ndarray, reward: float) -> Any:
        """What the environment's step takes; continuous actions are clipped to the space."""
        if self._memory is None:
            action = np.asarray(self._algo.predict(observations))
        else:
            action = np.asarray(self._memory.predict(observations[0], reward))[None]
        space = self._spaces.action_space
        if isinstance(space, Continuous):
            action = np.clip(action, space.low, space.high)
        return self._spaces.native_actions(action)[0]

    def _show(self, on_frame: AddFrame | None) -> None:
        if on_frame is not None:
            with playing(self._name, "render"):
                frame = self._env.render()
            on_frame(frame)


@contextlib.contextmanager
def film(target: Path, fps: float, force: bool) -> Iterator[AddFrame]:
    """Give a function that adds a frame (height, width, 3), uint8; the GIF appears when the block ends.

    Raises ConfigError for frames that are no pictures and DataError where the GIF cannot be written.
    """
    from PIL import Image

    every = max(1, round(fps / _GIF_RATE))
    pictures: list[Any] = []  # with a palette: a third of the memory
    count = 0

    def add(frame: Any) -> None:
        nonlocal count
        picture = as_picture(frame)
        if count % every == 0:
            pictures.append(Image.fromarray(picture).quantize(256, dither=Image.Dither.NONE))
        count += 1

    with atomic_file(target, force) as path:
        yield add
        if not pictures:
            raise ConfigError("the episode has no frame; check that the environment renders")
        delay = round(1000.0 * every / fps)
        pictures[0].save(path, "GIF", save_all=True, append_images=pictures[1:], duration=delay, loop=0)


def as_picture(frame: Any) -> np.ndarray:
    """What an environment rendered as (height, width, 3), uint8. Raises ConfigError."""
    picture = np.asarray(frame)
    if picture.ndim == 2:
        picture = np.repeat(picture[:, :, None], 3, axis=2)
    if isinstance(frame, list) or picture.dtype != np.uint8 or picture.ndim != 3 or picture.shape[2] < 3:
        what = f"a {type(frame).__name__} of {picture.dtype}, shape {picture.shape}, no picture of uint8"
        raise ConfigError(f"the environment rendered {what}; make it with render_mode='rgb_array'")
    return np.ascontiguousarray(picture[:, :, :3])
