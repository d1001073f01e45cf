"""Small environments with the oddities of other people's, registered under
koffline-tests/.
"""

from typing import ClassVar

import gymnasium
import numpy as np

Box = gymnasium.spaces.Box
Discrete = gymnasium.spaces.Discrete


class Odd(gymnasium.Env):
    """Five steps; hands out the same array every time, counts actions from 1."""

    observation_space = Box(-1, 1, (2,), np.float32)
    action_space = Discrete(2, start=1)

    def __init__(self, fault=None):
        self.fault = fault
        self.seen = np.zeros(2, np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if self.fault == "reset":
            raise RuntimeError("100% broken")
        self.time = 0
        self.seen[:] = np.inf if self.fault == "infinite" else 0
        return self.seen, {}

    def step(self, action):
        assert action in (1, 2)
        self.time += 1
        self.seen[:] = self.time / 10, action - 1.5
        if self.fault == "step" and self.time == 3:
            raise KeyError("lost\nconnection")
        if self.fault == "shape":
            return self.seen[:1], 1.0, False, False, {}
        reward = np.nan if self.fault == "nan" and self.time == 2 else float(action)
        return self.seen, reward, self.time == 5, False, {}


class Counted(gymnasium.Env):
    """Counts its steps from a start that is always the same."""

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return self.start, {}


class Shapes(Counted):
    """A Dict of a position and one of three colours; actions are a 2 × 2 box."""

    observation_space = gymnasium.spaces.Dict(
        {"place": Box(-9, 9, (2,), np.float32), "colour": Discrete(3)}
    )
    action_space = Box(-1.0, 1.0, (2, 2), np.float32)
    start = {"place": np.zeros(2, np.float32), "colour": 0}  # noqa: RUF012

    def step(self, action):
        assert action.shape == (2, 2)
        assert action.dtype == np.float32
        self.time += 1
        seen = {"place": action.sum(axis=1), "colour": self.time % 3}
        return seen, float(action[0, 1]), self.time == 4, False, {}


class Endless(Counted):
    """A number in 0 … 1000 that counts steps and never ends."""

    observation_space = Box(0, 1000, (), np.int64)
    action_space = Discrete(2)
    start = np.array(0)

    def step(self, action):
        self.time += 1
        return np.array(self.time), 1.0, False, False, {}


class TwoActions(Odd):
    """Actions of two parts, which koffline does not take."""

    action_space = gymnasium.spaces.MultiDiscrete([2, 3])


class Drawn(Counted):
    """Spaces of Puddle World; every step is drawn in another colour."""

    metadata: ClassVar = {
        "render_modes": ["rgb_array", "human"],
        "render_fps": 20,
    }
    observation_space = Box(0, 1, (2,), np.float32)
    action_space = Discrete(4)

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    start = np.zeros(2, np.float32)

    def step(self, action):
        self.time += 1
        return np.full(2, self.time / 100, np.float32), 1.0, False, self.time == 10, {}

    def render(self):
        return np.full((32, 48, 3), 20 * self.time, np.uint8)


for name, entry, options in (
    *((kind.__name__, kind, {}) for kind in (Odd, Shapes, Endless, TwoActions, Drawn)),
    *(
        (f"Fails-{fault}", Odd, {"fault": fault})
        for fault in ("step", "nan", "shape", "reset", "infinite")
    ),
):
    gymnasium.register(f"koffline-tests/{name}-v0", entry, kwargs=options)
