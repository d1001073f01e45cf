"""Videos of what a run learned: the first episode of the evaluation, one per seed."""

from __future__ import annotations

import contextlib
import importlib.util
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import koffline.envs  # noqa: F401  (registers our worlds)
from koffline.envs.make import make_env, playing
from koffline.errors import ConfigError
from koffline.online.config import OnlineConfig

_SLOWEST = 30.0  # frames per second of an environment that does not say


def check_pictures(config: OnlineConfig) -> None:
    """Raise ConfigError, before any training, where the environment draws no pictures."""
    from koffline.runs.videos import as_picture

    try:
        with warnings.catch_warnings(), contextlib.closing(_open(config)) as env:
            warnings.simplefilter("ignore")  # glfw's about a screen that is not there
            with playing(config.environment, "render"):
                env.reset(seed=config.evaluation_seed)
                as_picture(env.render())
    except ConfigError as error:
        reason = str(error).rpartition(";")[0] or str(error)
        raise ConfigError(
            f"no videos: {reason}; without a screen set MUJOCO_GL=egl or osmesa, or leave out --videos"
        ) from error


def film(config: OnlineConfig, models: Sequence[Path | None], steps: int) -> list[Path]:
    """Write videos/step_<steps>.mp4 (GIF without imageio-ffmpeg) beside each model; their paths.

    Raises ConfigError where the environment draws no pictures.
    """
    from koffline.runs.playing import Player, load_model
    from koffline.runs.videos import video

    format_ = "gif" if importlib.util.find_spec("imageio_ffmpeg") is None else "mp4"
    made = []
    for model in models:
        if model is None:
            continue
        with contextlib.closing(_open(config)) as env:
            player = Player(load_model(str(model)), env, config.environment)
            target = model.parent / "videos" / f"step_{steps:09d}.{format_}"
            target.parent.mkdir(exist_ok=True)
            rate = float(env.metadata.get("render_fps") or _SLOWEST)
            with video(target, format_, rate, force=True) as add:
                player.play(config.evaluation_seed, on_frame=add)
        made.append(target)
    return made


def _open(config: OnlineConfig) -> Any:
    return make_env(config.environment, **{**config.environment_options, "render_mode": "rgb_array"})
