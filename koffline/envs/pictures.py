"""Pictures of the worlds as arrays, drawn with numpy: every shape is a distance field with soft edges."""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import Float, UInt8

from koffline.envs.boxes import PUDDLE_GOAL, RADIUS, BoxWorld, NoisyMountainCar, NoisyPole, puddle_depth

Mask = Float[np.ndarray, "height width"]
Color = tuple[int, int, int]

SIZE = 320  # pixels
_PAPER, _INK, _GREY = (250, 249, 246), (40, 44, 52), (190, 190, 186)
_WATER, _GOAL, _AGENT, _WOOD = (58, 110, 165), (96, 168, 92), (214, 84, 54), (183, 140, 92)
_EDGE = 1.3  # pixels from within a shape to without


def draw_world(world: BoxWorld, state: Float[np.ndarray, " 2"]) -> UInt8[np.ndarray, "height width 3"]:
    """A picture of a state (2,)."""
    if isinstance(world, NoisyPole):
        canvas = _pole(state)
    else:
        canvas = _valley(state) if isinstance(world, NoisyMountainCar) else _puddles(state)
    return np.clip(np.rint(canvas.colors), 0, 255).astype(np.uint8)


class _Canvas:
    """A square part of the world: pixel centres, the first row at the top, and colors."""

    def __init__(self, left: float, bottom: float, side: float) -> None:
        places = (np.arange(SIZE) + 0.5) * side / SIZE
        self.x, self.y = np.meshgrid(left + places, bottom + side - places)
        self.colors = np.tile(np.asarray(_PAPER, dtype=np.float64), (SIZE, SIZE, 1))
        self._edge = _EDGE * side / SIZE

    def paint(self, color: Color, distance: Mask) -> None:
        """Blend a color in where a signed distance is negative, soft over the edge."""
        self.blend(color, np.clip(0.5 - distance / self._edge, 0.0, 1.0))

    def blend(self, color: Color, mask: Mask) -> None:
        """Blend a color in by a mask from 0 to 1."""
        self.colors += mask[..., None] * (np.asarray(color) - self.colors)

    def distance(self, start: Any, end: Any) -> Mask:
        """Distance of all pixels from a segment, or from a point that is both its ends."""
        along = np.subtract(end, start)
        x, y = self.x - start[0], self.y - start[1]
        share = np.clip((x * along[0] + y * along[1]) / max(along @ along, 1e-12), 0.0, 1.0)
        return np.hypot(x - share * along[0], y - share * along[1])


def _puddles(state: np.ndarray) -> _Canvas:
    canvas = _Canvas(0.0, 0.0, 1.0)
    depth = puddle_depth(np.stack([canvas.x.ravel(), canvas.y.ravel()], axis=1)).reshape(SIZE, SIZE)
    canvas.blend(_WATER, 0.85 * depth / RADIUS + 0.15 * (depth > 0))
    canvas.paint(_GOAL, (PUDDLE_GOAL - canvas.x - canvas.y) / np.sqrt(2.0))
    canvas.paint(_INK, canvas.distance(state, state) - 0.026)
    canvas.paint(_AGENT, canvas.distance(state, state) - 0.02)
    return canvas


def _pole(state: np.ndarray) -> _Canvas:
    canvas, foot = _Canvas(-1.1, -0.5, 2.2), (0.0, 0.0)
    canvas.paint(_GREY, np.abs(canvas.y + 0.17) - 0.008)
    canvas.paint(_INK, np.maximum(np.abs(canvas.x) - 0.28, np.abs(canvas.y + 0.08) - 0.08))
    canvas.paint(_WOOD, canvas.distance(foot, (np.sin(state[0]), np.cos(state[0]))) - 0.035)
    canvas.paint(_AGENT, canvas.distance(foot, foot) - 0.04)
    return canvas


def _valley(state: np.ndarray) -> _Canvas:
    canvas = _Canvas(-1.25, -0.1, 1.9)
    above = canvas.y - _height(canvas.x)
    distance = above / np.sqrt(1.0 + (1.35 * np.cos(3.0 * canvas.x)) ** 2)  # to first order
    canvas.paint(_GREY, distance)
    canvas.paint(_INK, np.abs(distance) - 0.012)
    canvas.paint(_GOAL, canvas.distance((0.5, _height(0.5)), (0.5, _height(0.5) + 0.42)) - 0.015)
    way = np.array([1.0, 1.35 * np.cos(3.0 * state[0])])
    way /= np.linalg.norm(way)
    centre = np.array([state[0], _height(state[0])]) + 0.06 * np.array([-way[1], way[0]])
    canvas.paint(_AGENT, canvas.distance(centre - 0.05 * way, centre + 0.05 * way) - 0.05)
    return canvas


def _height(position: Any) -> Any:
    """Of the hill, as Gymnasium draws it."""
    return 0.45 * np.sin(3.0 * position) + 0.55
