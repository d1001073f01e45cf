"""Pictures of the worlds as arrays, drawn with numpy: every shape is a distance field with soft edges."""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import Float, UInt8

from koffline.envs.boxes import BoxWorld
from koffline.envs.mountain_car import NoisyMountainCar
from koffline.envs.pole import FORCES, NoisyPole
from koffline.envs.puddle_world import GOAL, PuddleWorld, puddle_depth

Picture = UInt8[np.ndarray, "height width 3"]
Canvas = Float[np.ndarray, "height width 3"]
Mask = Float[np.ndarray, "height width"]

SIZE = 320  # pixels
_PAPER, _INK, _GREY = (250, 249, 246), (40, 44, 52), (190, 190, 186)
_WATER, _GOAL, _AGENT, _WOOD = (58, 110, 165), (96, 168, 92), (214, 84, 54), (183, 140, 92)


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
    x, y = _pixels(0.0, 1.0, 0.0, 1.0)
    canvas = _blank()
    points = np.stack([x.ravel(), y.ravel()], axis=1)
    depth = puddle_depth(points).reshape(x.shape)
    _paint(canvas, _WATER, np.clip(depth / 0.1, 0.0, 1.0) * 0.85 + 0.15 * (depth > 0))
    _paint(canvas, _GOAL, _inside(GOAL - x - y))
    _paint(canvas, _INK, _disc(x, y, state, 0.026))
    _paint(canvas, _AGENT, _disc(x, y, state, 0.02))
    return canvas


def _pole(state: np.ndarray, action: int | None) -> Canvas:
    x, y = _pixels(-1.0, 1.0, -0.6, 1.4)
    canvas = _blank()
    _paint(canvas, _GREY, _inside(np.abs(y + 0.17) - 0.006))
    _paint(canvas, _INK, _inside(np.maximum(np.abs(x) - 0.28, np.abs(y + 0.08) - 0.08)))
    tip = np.array([np.sin(state[0]), np.cos(state[0])])
    _paint(canvas, _WOOD, _inside(_segment(x, y, np.zeros(2), tip) - 0.035))
    _paint(canvas, _AGENT, _disc(x, y, np.zeros(2), 0.04))
    push = 0 if action is None else np.sign(FORCES[action])
    if push:
        start = np.array([-0.32 * push, -0.08])
        shaft = _segment(x, y, start - [0.22 * push, 0.0], start)
        _paint(canvas, _AGENT, _inside(shaft - 0.015))
        ahead = (x - start[0]) * push
        head = np.maximum(np.abs(y + 0.08) + 0.6 * ahead - 0.02, -0.06 - ahead)
        _paint(canvas, _AGENT, _inside(head))
    return canvas


def _valley(state: np.ndarray, action: int | None) -> Canvas:
    x, y = _pixels(-1.25, 0.65, -0.1, 1.8)
    canvas = _blank()
    ground = _height(x)
    _paint(canvas, _GREY, _inside(y - ground))
    slope = 1.35 * np.cos(3.0 * x)
    _paint(canvas, _INK, _inside(np.abs(y - ground) / np.sqrt(1.0 + slope**2) - 0.012))
    flag = np.array([0.5, _height(0.5)])
    _paint(canvas, _INK, _inside(_segment(x, y, flag, flag + np.array([0.0, 0.42])) - 0.008))
    pennant = np.maximum(np.abs(y - flag[1] - 0.34) - 0.08, np.abs(x - flag[0] - 0.065) - 0.055)
    _paint(canvas, _GOAL, _inside(pennant))
    steep = 1.35 * np.cos(3.0 * state[0])
    way = np.array([1.0, steep]) / np.hypot(1.0, steep)
    up = np.array([-way[1], way[0]])
    foot = np.array([state[0], _height(state[0])])
    centre = foot + 0.1 * up
    along = (x - centre[0]) * way[0] + (y - centre[1]) * way[1]
    across = (x - centre[0]) * up[0] + (y - centre[1]) * up[1]
    _paint(canvas, _AGENT, _inside(np.maximum(np.abs(along) - 0.1, np.abs(across) - 0.05)))
    for side in (-0.06, 0.06):
        _paint(canvas, _INK, _disc(x, y, foot + 0.045 * up + side * way, 0.035))
    if action is not None and action != 1:
        gone = centre + 0.12 * up
        _paint(canvas, _INK, _inside(_segment(x, y, gone, gone + (action - 1) * 0.14 * way) - 0.012))
    return canvas


def _height(position: Any) -> Any:
    """Of the hill, as Gymnasium draws it."""
    return 0.45 * np.sin(3.0 * position) + 0.55


def _pixels(left: float, right: float, bottom: float, top: float) -> tuple[Mask, Mask]:
    """World coordinates (x, y) of all pixels, the first row at the top."""
    columns = left + (np.arange(SIZE) + 0.5) * (right - left) / SIZE
    rows = top - (np.arange(SIZE) + 0.5) * (top - bottom) / SIZE
    x, y = np.meshgrid(columns, rows)
    return x, y


def _blank() -> Canvas:
    return np.tile(np.asarray(_PAPER, dtype=np.float64), (SIZE, SIZE, 1))


def _paint(canvas: Canvas, color: tuple[int, int, int], mask: Mask) -> None:
    canvas += mask[..., None] * (np.asarray(color) - canvas)


def _inside(distance: Mask, edge: float = 0.004) -> Mask:
    """1 where a signed distance is negative, 0 where it is positive, soft over an edge."""
    return np.clip(0.5 - distance / (2.0 * edge), 0.0, 1.0)


def _disc(x: Mask, y: Mask, centre: np.ndarray, radius: float) -> Mask:
    return _inside(np.hypot(x - centre[0], y - centre[1]) - radius)


def _segment(x: Mask, y: Mask, start: np.ndarray, end: np.ndarray) -> Mask:
    """Distance of all pixels from a segment."""
    along = np.asarray(end, dtype=np.float64) - start
    share = np.clip(((x - start[0]) * along[0] + (y - start[1]) * along[1]) / (along @ along), 0.0, 1.0)
    return np.hypot(x - start[0] - share * along[0], y - start[1] - share * along[1])
