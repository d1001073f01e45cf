"""The three worlds one state at a time, in plain Python, written from the literature and not from koffline.

Without noise, so that a step is exact; what noise does is tested on its own.
"""

from __future__ import annotations

import math


def puddle_world(x: float, y: float, move: str) -> tuple[float, float, float, bool]:
    """Boyan & Moore 1995, with the costs of Sutton 1996: steps of 0.05, two puddles, goal in the corner."""
    dx, dy = {"up": (0.0, 0.05), "down": (0.0, -0.05), "right": (0.05, 0.0), "left": (-0.05, 0.0)}[move]
    x = min(max(x + dx, 0.0), 1.0)
    y = min(max(y + dy, 0.0), 1.0)
    # the horizontal puddle's centre line is y = 0.75, 0.10 <= x <= 0.45; the vertical one's x = 0.45
    horizontal = math.hypot(x - min(max(x, 0.10), 0.45), y - 0.75)
    vertical = math.hypot(x - 0.45, y - min(max(y, 0.40), 0.80))
    inside = max(0.0, 0.1 - min(horizontal, vertical))
    return x, y, -1.0 - 400.0 * inside, x + y >= 1.9


def inverted_pendulum(angle: float, velocity: float, force: float) -> tuple[float, float, float, bool]:
    """Lagoudakis & Parr 2003, section 9.2: Euler steps of 0.1 s; the fall is an angle beyond pi / 2.

    What is beyond the box (velocities of 4) is cut.
    """
    gravity, mass, cart, length = 9.8, 2.0, 8.0, 0.5
    alpha = 1.0 / (mass + cart)
    numerator = (
        gravity * math.sin(angle)
        - alpha * mass * length * velocity**2 * math.sin(2.0 * angle) / 2.0
        - alpha * math.cos(angle) * force
    )
    acceleration = numerator / (4.0 * length / 3.0 - alpha * mass * length * math.cos(angle) ** 2)
    angle, velocity = angle + 0.1 * velocity, velocity + 0.1 * acceleration
    fallen, upright = abs(angle) > math.pi / 2.0, math.pi / 2.0
    return min(max(angle, -upright), upright), min(max(velocity, -4.0), 4.0), -float(fallen), fallen


def mountain_car(x: float, v: float, throttle: int) -> tuple[float, float, float, bool]:
    """Sutton 1996; throttle -1, 0 or 1; the goal is the right hilltop."""
    v = min(max(v + 0.001 * throttle - 0.0025 * math.cos(3.0 * x), -0.07), 0.07)
    x = min(max(x + v, -1.2), 0.6)
    if x == -1.2:
        v = max(v, 0.0)
    return x, v, -1.0, x >= 0.5
