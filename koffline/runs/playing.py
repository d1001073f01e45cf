"""Episodes of a saved model in a Gymnasium environment, and films of them.

GIF and numbered PNGs need Pillow alone, MP4 imageio-ffmpeg.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from koffline.data.transitions import ActionSpace, Continuous, Discrete
from koffline.envs.make import SpaceTranslator, make_env, playing
from koffline.errors import ConfigError, PolicyError
from koffline.policies.base import describe_actions
from koffline.store.files import atomic_file, atomic_folder

_GIF_RATE = 25.0  # frames per second; viewers slow down what is faster than 50
_NO_FRAME = "the episode has no frame; check that the environment renders"
AddFrame = Callable[[Any], None]


@dataclass(frozen=True)
class Episode:
    """How an episode went. is_cut: it was ended by the limit of steps that was asked for."""

    value: float  # undiscounted return
    steps: int
    is_cut: bool


def open_environment(env_id: str | None, env_header: str | None, render_mode: str | None) -> Any:
    """The environment of --env-id, or of the user's own line of Python, --env-header. Raises ConfigError."""
    import gymnasium

    import koffline.envs  # noqa: F401  (registers our worlds)

    if (env_id is None) == (env_header is None):
        received = "neither" if env_id is None else "both"
        raise ConfigError(
            f"{received} of --env-id and --env-header given; give one, for instance --env-id CartPole-v1"
        )
    if env_id is not None:
        return make_env(env_id, render_mode=render_mode)
    names: dict[str, Any] = {"gymnasium": gymnasium, "gym": gymnasium, "np": np}
    try:
        exec(str(env_header), names)
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"--env-header failed ({reason}); try the line in Python") from error
    env = names.get("env")
    if not (hasattr(env, "reset") and hasattr(env, "step")):
        raise ConfigError(
            "--env-header defines no environment called env; give for instance "
            "\"env = gymnasium.make('CartPole-v1', render_mode='rgb_array')\""
        )
    return env


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
            raise PolicyError(
                f"the {kind} has {ours[0]} for observations of shape {ours[1]}, the environment {theirs[0]} "
                f"and {theirs[1]}; give the environment that it was trained for"
            )
        if hasattr(algo, "as_stateful_wrapper"):
            if target_return is None:
                raise ConfigError(
                    f"a {kind} aims at a return; give it with --target-return, in the units of the "
                    "environment's rewards"
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
        if not np.isfinite(action).all():
            raise PolicyError(
                f"the {type(self._algo).__name__} gives the action {action[0]}; its weights or the "
                "observations are not finite, give an earlier model of the run"
            )
        space = self._spaces.action_space
        if isinstance(space, Continuous):
            action = np.clip(action, space.low, space.high)
        return self._spaces.native_actions(action)[0]

    def _show(self, on_frame: AddFrame | None) -> None:
        if on_frame is not None:
            with playing(self._name, "render"):
                frame = self._env.render()
            on_frame(frame)


def video_target(folder: Path, episode: int, format_: str) -> Path:
    """Where an episode goes; named as Gymnasium's RecordVideo names them. PNGs have a folder of their own."""
    name = f"rl-video-episode-{episode}"
    return folder / (name if format_ == "png" else f"{name}.{format_}")


@contextlib.contextmanager
def video(target: Path, format_: str, fps: float, force: bool) -> Iterator[AddFrame]:
    """Give a function that adds a frame (height, width, 3), uint8; the video appears when the block ends.

    Raises ConfigError for frames that are no pictures and DataError where the video cannot be written.
    """
    if format_ == "png":
        from PIL import Image

        with atomic_folder(target, force, _is_folder_of_frames) as folder:
            folder.mkdir(exist_ok=True)
            numbers = iter(range(10**9))
            yield lambda frame: Image.fromarray(as_picture(frame)).save(
                folder / f"frame-{next(numbers):05d}.png"
            )
        return
    with atomic_file(target, force) as path, (_gif if format_ == "gif" else _mp4)(path, fps) as add:
        yield add


def as_picture(frame: Any) -> np.ndarray:
    """What an environment rendered as (height, width, 3), uint8. Raises ConfigError."""
    picture = np.asarray(frame)
    if picture.ndim == 2:
        picture = np.repeat(picture[:, :, None], 3, axis=2)
    if isinstance(frame, list) or picture.dtype != np.uint8 or picture.ndim != 3 or picture.shape[2] < 3:
        raise ConfigError(
            f"the environment rendered a {type(frame).__name__} of {picture.dtype}, shape {picture.shape}, "
            "no picture of uint8 (height, width, 3); make it with render_mode='rgb_array'"
        )
    return np.ascontiguousarray(picture[:, :, :3])


@contextlib.contextmanager
def _gif(path: Path, fps: float) -> Iterator[AddFrame]:
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

    yield add
    if not pictures:
        raise ConfigError(_NO_FRAME)
    delay = round(1000.0 * every / fps)
    pictures[0].save(path, "GIF", save_all=True, append_images=pictures[1:], duration=delay, loop=0)


@contextlib.contextmanager
def _mp4(path: Path, fps: float) -> Iterator[AddFrame]:
    write_frames, writer = mp4_writer(), None

    def add(frame: Any) -> None:
        nonlocal writer
        picture = as_picture(frame)
        # The usual colour format has half the resolution, so both sides must be even.
        picture = np.ascontiguousarray(picture[: len(picture) // 2 * 2, : picture.shape[1] // 2 * 2])
        if writer is None:
            options = {"macro_block_size": 2, "output_params": ["-f", "mp4"], "ffmpeg_log_level": "error"}
            writer = write_frames(str(path), (picture.shape[1], len(picture)), fps=fps, **options)
            writer.send(None)
        writer.send(picture)

    try:
        yield add
    finally:
        if writer is not None:
            writer.close()
    if writer is None:
        raise ConfigError(_NO_FRAME)


def mp4_writer() -> Any:
    """The function that writes MP4. Raises ConfigError where its package is missing."""
    try:
        from imageio_ffmpeg import write_frames
    except ImportError:
        raise ConfigError(
            "MP4 needs the package imageio-ffmpeg; pip install imageio-ffmpeg, or use --format gif"
        ) from None
    return write_frames


def _is_folder_of_frames(folder: Path) -> bool:
    return folder.is_dir() and all(path.match("frame-*.png") for path in folder.iterdir())
