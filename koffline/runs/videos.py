"""Episodes as videos: GIF or numbered PNGs with Pillow alone, MP4 with imageio-ffmpeg."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from koffline.errors import ConfigError
from koffline.store.files import atomic_file, atomic_folder, check_target

FORMATS = ("gif", "mp4", "png")
_GIF_RATE = 25.0  # frames per second; viewers slow down what is faster than 50
_LAST_FRAME = 1000  # milliseconds, before a GIF begins again

AddFrame = Callable[[Any], None]


def check_format(format_: str) -> None:
    """Raise ConfigError for a format whose package is missing."""
    if format_ == "mp4":
        _ffmpeg()


def video_target(folder: Path, episode: int, format_: str) -> Path:
    """Where an episode goes; named as Gymnasium's RecordVideo names them. PNGs have a folder of their own."""
    name = f"rl-video-episode-{episode}"
    return folder / (name if format_ == "png" else f"{name}.{format_}")


def check_targets(targets: list[Path], force: bool) -> None:
    """Raise DataError where one exists already and may not be replaced."""
    for target in targets:
        check_target(target, force)


@contextlib.contextmanager
def video(target: Path, format_: str, fps: float, force: bool) -> Iterator[AddFrame]:
    """Give a function that adds a frame (height, width, 3), uint8; the video appears when the block ends.

    Raises ConfigError for frames that are no pictures and DataError where the video cannot be written.
    """
    if format_ == "png":
        with atomic_folder(target, force, _is_folder_of_frames) as folder:
            folder.mkdir(exist_ok=True)
            yield _png_writer(folder)
        return
    with atomic_file(target, force) as path, (_gif if format_ == "gif" else _mp4)(path, fps) as add:
        yield add


def as_picture(frame: Any) -> np.ndarray:
    """What an environment rendered as (height, width, 3), uint8. Raises ConfigError."""
    if frame is None or isinstance(frame, (list, str)):
        raise ConfigError(
            f"the environment rendered a {type(frame).__name__}, not a picture; "
            "make it with render_mode='rgb_array'"
        )
    picture = np.asarray(frame)
    if picture.ndim == 2:
        picture = np.repeat(picture[:, :, None], 3, axis=2)
    if picture.dtype != np.uint8 or picture.ndim != 3 or picture.shape[2] < 3:
        raise ConfigError(
            f"the environment rendered {picture.dtype} of shape {picture.shape}; "
            "its pictures must be uint8 of shape (height, width, 3)"
        )
    return np.ascontiguousarray(picture[:, :, :3])


@contextlib.contextmanager
def _gif(path: Path, fps: float) -> Iterator[AddFrame]:
    from PIL import Image

    every = max(1, round(fps / _GIF_RATE))
    pictures: list[Any] = []  # with a palette: a third of the memory
    count, last = 0, None

    def add(frame: Any) -> None:
        nonlocal count, last
        last = as_picture(frame)
        if count % every == 0:
            pictures.append(_with_palette(Image.fromarray(last)))
            last = None
        count += 1

    yield add
    if last is not None:
        pictures.append(_with_palette(Image.fromarray(last)))
    if not pictures:
        raise ConfigError("the episode has no frame; check that the environment renders")
    delay = 1000.0 * every / fps
    delays = [round(delay)] * (len(pictures) - 1) + [round(delay) + _LAST_FRAME]
    pictures[0].save(
        path, format="GIF", save_all=True, append_images=pictures[1:], duration=delays, loop=0, optimize=False
    )


def _with_palette(picture: Any) -> Any:
    from PIL import Image

    return picture.quantize(256, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)


@contextlib.contextmanager
def _mp4(path: Path, fps: float) -> Iterator[AddFrame]:
    ffmpeg = _ffmpeg()
    writer: Any = None

    def add(frame: Any) -> None:
        nonlocal writer
        picture = as_picture(frame)
        # The usual colour format has half the resolution, so both sides must be even.
        picture = np.ascontiguousarray(picture[: picture.shape[0] // 2 * 2, : picture.shape[1] // 2 * 2])
        if writer is None:
            size = (picture.shape[1], picture.shape[0])
            writer = ffmpeg.write_frames(
                str(path),
                size,
                fps=fps,
                macro_block_size=2,
                output_params=["-f", "mp4"],
                ffmpeg_log_level="error",
            )
            writer.send(None)
        writer.send(picture)

    try:
        yield add
    finally:
        if writer is not None:
            writer.close()
    if writer is None:
        raise ConfigError("the episode has no frame; check that the environment renders")


def _ffmpeg() -> Any:
    try:
        import imageio_ffmpeg
    except ImportError:
        raise ConfigError(
            "MP4 needs the package imageio-ffmpeg; pip install imageio-ffmpeg, or use --format gif"
        ) from None
    return imageio_ffmpeg


def _png_writer(folder: Path) -> AddFrame:
    from PIL import Image

    count = 0

    def add(frame: Any) -> None:
        nonlocal count
        Image.fromarray(as_picture(frame)).save(folder / f"frame-{count:05d}.png")
        count += 1

    return add


def _is_folder_of_frames(folder: Path) -> bool:
    return folder.is_dir() and all(path.match("frame-*.png") for path in folder.iterdir())
