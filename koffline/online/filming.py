"""Videos of what a run learned: the first episode of the evaluation, one per seed."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

import koffline.envs  # noqa: F401  (registers our worlds)
from koffline.builders.make_env import make_env
from koffline.online.config import OnlineConfig

_SLOWEST = 30.0  # frames per second of an environment that does not say


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
        options = {**config.environment_options, "render_mode": "rgb_array"}
        env = make_env(config.environment, **options)
        try:
            player = Player(load_model(str(model)), env, config.environment)
            target = model.parent / "videos" / f"step_{steps:09d}.{format_}"
            target.parent.mkdir(exist_ok=True)
            rate = float(env.metadata.get("render_fps") or _SLOWEST)
            with video(target, format_, rate, force=True) as add:
                player.play(config.evaluation_seed, on_frame=add)
        finally:
            env.close()
        made.append(target)
    return made
