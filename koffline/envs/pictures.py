"""Pictures of the worlds as arrays, drawn with numpy: every shape is a distance field with soft edges."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, UInt8

from koffline.envs.boxes import (
    FORCES,
    PUDDLE_GOAL,
    RADIUS,
    BoxWorld,
    NoisyMountainCar,
    NoisyPole,
    PuddleWorld,
    puddle_depth,
)

Picture = UInt8[np.ndarray, "height width 3"]
Canvas = Float[np.ndarray, "height width 3"]
Mask = Float[np.ndarray, "height width"]
Color = tuple[int, int, int]

SIZE = 320  # pixels
_PAPER, _INK, _GREY = (250, 249, 246), (40, 44, 52), (190, 190, 186)
_WATER, _GOAL, _AGENT, _WOOD = (58, 110, 165), (96, 168, 92), (214, 84, 54), (183, 140, 92)
_EDGE = 1.3  # pixels from within a shape to without


class View(NamedTuple):
    """World coordinates of the pixels' centres, the first row at the top, and the width of a pixel."""

    x: Mask
    y: Mask
    pixel: float


def draw_world(world: BoxWorld, state: Float[np.ndarray, " 2"], action: int | None = None) -> Picture:
    """A picture of a state (2,); the last action shows where the world has something to push."""
    if isinstance(world, PuddleWorld):
        canvas = _puddles(state)
    elif isinstance(world, NoisyPole):
        canvas = _pole(state, action)
    elif isinstance(world, NoisyMountainCar):
        canvas = _valley(state, action)
    else:
        raise NotImplementedError(f"{type(world).__name__} has no picture")
    return np.clip(np.rint(canvas), 0, 255).astype(np.uint8)


def _puddles(state: np.ndarray) -> Canvas:
    view, canvas = _square(), _empty_puddles().copy()
    _paint(canvas, _INK, _inside(_distance(view, state, state) - 0.026, view))
    _paint(canvas, _AGENT, _inside(_distance(view, state, state) - 0.02, view))
    return canvas


@lru_cache(maxsize=1)
def _square() -> View:
    return _view(0.0, 0.0, 1.0)


@lru_cache(maxsize=1)
def _empty_puddles() -> Canvas:
    view, canvas = _square(), _blank()
    depth = puddle_depth(np.stack([view.x.ravel(), view.y.ravel()], axis=1)).reshape(view.x.shape)
    _paint(canvas, _WATER, 0.85 * depth / RADIUS + 0.15 * (depth > 0))
    _paint(canvas, _GOAL, _inside((PUDDLE_GOAL - view.x - view.y) / np.sqrt(2.0), view))
    return canvas


def _pole(state: np.ndarray, action: int | None) -> Canvas:
    view, canvas = _stage(), _empty_stage().copy()
    foot, tip = np.zeros(2), np.array([np.sin(state[0]), np.cos(state[0])])
    _paint(canvas, _WOOD, _inside(_distance(view, foot, tip) - 0.035, view))
    _paint(canvas, _AGENT, _inside(_distance(view, foot, foot) - 0.04, view))
    push = 0.0 if action is None else float(np.sign(FORCES[action]))
    if push:
        _arrow(canvas, view, np.array([-0.56 * push, -0.08]), np.array([-0.31 * push, -0.08]), _AGENT)
    return canvas


@lru_cache(maxsize=1)
def _stage() -> View:
    return _view(-1.1, -0.5, 2.2)


@lru_cache(maxsize=1)
def _empty_stage() -> Canvas:
    view, canvas = _stage(), _blank()
    _paint(canvas, _GREY, _inside(np.abs(view.y + 0.17) - 0.008, view))
    _paint(canvas, _INK, _inside(np.maximum(np.abs(view.x) - 0.28, np.abs(view.y + 0.08) - 0.08), view))
    return canvas


def _valley(state: np.ndarray, action: int | None) -> Canvas:
    view, canvas = _hills(), _empty_hills().copy()
    way = np.array([1.0, 1.35 * np.cos(3.0 * state[0])])
    way /= np.linalg.norm(way)
    up = np.array([-way[1], way[0]])
    foot = np.array([state[0], _height(state[0])])
    centre = foot + 0.1 * up
    along = (view.x - centre[0]) * way[0] + (view.y - centre[1]) * way[1]
    across = (view.x - centre[0]) * up[0] + (view.y - centre[1]) * up[1]
    _paint(canvas, _AGENT, _inside(np.maximum(np.abs(along) - 0.1, np.abs(across) - 0.05), view))
    for side in (-0.06, 0.06):
        wheel = foot + 0.045 * up + side * way
        _paint(canvas, _INK, _inside(_distance(view, wheel, wheel) - 0.035, view))
    if action is not None and action != 1:
        over, push = centre + 0.13 * up, (action - 1) * way
        _arrow(canvas, view, over - 0.09 * push, over + 0.13 * push, _AGENT)
    return canvas


@lru_cache(maxsize=1)
def _hills() -> View:
    return _view(-1.25, -0.1, 1.9)


@lru_cache(maxsize=1)
def _empty_hills() -> Canvas:
    view, canvas = _hills(), _blank()
    above, steep = view.y - _height(view.x), 1.35 * np.cos(3.0 * view.x)
    distance = above / np.sqrt(1.0 + steep**2)  # to first order
    _paint(canvas, _GREY, _inside(distance, view))
    _paint(canvas, _INK, _inside(np.abs(distance) - 0.012, view))
    foot = np.array([0.5, _height(0.5)])
    _paint(canvas, _INK, _inside(_distance(view, foot, foot + np.array([0.0, 0.42])) - 0.008, view))
    pennant = np.maximum(np.abs(view.y - foot[1] - 0.34) - 0.08, np.abs(view.x - foot[0] - 0.065) - 0.055)
    _paint(canvas, _GOAL, _inside(pennant, view))
    return canvas


def _height(position: Any) -> Any:
    """Of the hill, as Gymnasium draws it."""
    return 0.45 * np.sin(3.0 * position) + 0.55


def _arrow(canvas: Canvas, view: View, start: np.ndarray, end: np.ndarray, color: Color) -> None:
    way = (end - start) / np.linalg.norm(end - start)
    _paint(canvas, color, _inside(_distance(view, start, end - 0.05 * way) - 0.014, view))
    back = (end[0] - view.x) * way[0] + (end[1] - view.y) * way[1]  # how far behind the point
    beside = np.abs((view.x - end[0]) * way[1] - (view.y - end[1]) * way[0])
    _paint(canvas, color, _inside(np.maximum(beside - 0.6 * back, back - 0.08), view))


def _view(left: float, bottom: float, side: float) -> View:
    """A square part of the world, its lower left corner and its side."""
    places = (np.arange(SIZE) + 0.5) * side / SIZE
    x, y = np.meshgrid(left + places, bottom + side - places)
    return View(x, y, side / SIZE)


def _blank() -> Canvas:
    return np.tile(np.asarray(_PAPER, dtype=np.float64), (SIZE, SIZE, 1))


def _paint(canvas: Canvas, color: Color, mask: Mask) -> None:
    """Blend a color in, only where the mask is not zero: most shapes are small."""
    rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
    if len(rows):
        part = np.s_[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
        canvas[part] += mask[part][..., None] * (np.asarray(color) - canvas[part])


def _inside(distance: Mask, view: View) -> Mask:
    """1 where a signed distance is negative, 0 where it is positive, soft over the edge."""
    return np.clip(0.5 - distance / (_EDGE * view.pixel), 0.0, 1.0)


def _distance(view: View, start: np.ndarray, end: np.ndarray) -> Mask:
    """Distance of all pixels from a segment, or from a point that is both its ends."""
    x, y, along = view.x - start[0], view.y - start[1], end - start
    if along.any():
        share = np.clip((x * along[0] + y * along[1]) / (along @ along), 0.0, 1.0)
        x, y = x - share * along[0], y - share * along[1]
    return np.sqrt(x**2 + y**2)
