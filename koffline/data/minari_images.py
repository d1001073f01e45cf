"""Pictures inside Minari datasets, decoded here: JPEG and nothing else, in the size that the space declares.

Minari's own decoder asks the imaging library to guess the format, and some of the formats that it knows are
programs. Minari is therefore told that nothing is encoded, and hands over the bytes.
"""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from koffline.untrusted.limits import Refused, Tally

_JPEG = b"\xff\xd8\xff"


def without_images(space: Any) -> Any:
    """The space with text in the place of pictures: what Minari's Arrow reader hands over as it is."""
    from gymnasium import spaces
    from minari.dataset.minari_storage import is_image_space

    if isinstance(space, spaces.Dict):
        return spaces.Dict({name: without_images(part) for name, part in space.spaces.items()})
    if isinstance(space, spaces.Tuple):
        return spaces.Tuple([without_images(part) for part in space.spaces])
    return spaces.Text(1) if is_image_space(space) else space


def decoded(values: Any, space: Any, tally: Tally) -> Any:
    """Observations or actions of an episode, their pictures decoded and counted before.

    Raises Refused for what is no JPEG.
    """
    from gymnasium import spaces
    from minari.dataset.minari_storage import is_image_space

    if isinstance(space, spaces.Dict):
        return {name: decoded(values[name], part, tally) for name, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(decoded(value, part, tally) for value, part in zip(values, space.spaces, strict=True))
    return _pictures(values, space.shape, tally) if is_image_space(space) else values


def _pictures(rows: Sequence[Any], shape: tuple[int, ...], tally: Tally) -> np.ndarray:
    """(T, ...) bytes of pictures of one shape."""
    from PIL import Image

    tally.add(2 * len(rows) * math.prod(shape))  # there will be as many next observations
    pictures = np.empty((len(rows), *shape), dtype=np.uint8)
    for i, row in enumerate(rows):
        content = row if isinstance(row, bytes) else np.asarray(row, dtype=np.uint8).tobytes()
        if not content.startswith(_JPEG):
            raise Refused(f"picture {i} of an episode is no JPEG; record it again")
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            picture = Image.open(io.BytesIO(content), formats=("JPEG",))
        channels = len(picture.getbands())
        if (picture.height, picture.width, *([channels] if len(shape) == 3 else [])) != shape:
            raise Refused(
                f"picture {i} of an episode has {picture.width} × {picture.height} points of {channels} "
                f"colours, its space declares {shape}; record it again"
            )
        pictures[i] = np.asarray(picture)
    return pictures
