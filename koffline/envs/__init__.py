"""Worlds with known answers, as Gymnasium environments and as many copies in one array;
MuJoCo's with noise.

Importing this package makes them known to Gymnasium by name:

import gymnasium, koffline.envs
gymnasium.make("koffline/PuddleWorld-v0")
gymnasium.make("koffline/NoisyMujoco-v0", environment="InvertedPendulum-v5",
transition_noise=0.05)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, SupportsFloat, TypeAlias

import gymnasium
import numpy as np

from koffline.data.transitions import ActionSpace, Discrete
from koffline.envs.boxes import GYMNASIUM_IDS, NAMES, TIME_LIMITS, make_world
from koffline.envs.make import Copies, CopiesStep, Env, make_env
from koffline.errors import ConfigError

NOISY_MUJOCO = "koffline/NoisyMujoco-v0"
BLOCK = 64  # numbers that are read from each stream in one block
# keeps the noise apart from the environment's own draws of the same seed
_STREAM = 0x6E6F6973


Info: TypeAlias = dict[str, Any]  # gymnasium's
Step: TypeAlias = tuple[np.ndarray, SupportsFloat, bool, bool, Info]


class BoxWorldEnv(gymnasium.Env[np.ndarray, np.int64]):
    """One copy of a world; observations are its states in native units, float32,
    clipped to its bounds.

    world: its name, see `boxes.WORLDS`. Further keywords replace its fields, for
    example noise=0.0.
    """

    def __init__(self, world: str, **overrides: Any) -> None:
        self.world = replace(make_world(world), **overrides)
        low = np.asarray(self.world.low, dtype=np.float32)
        high = np.asarray(self.world.high, dtype=np.float32)
        self.observation_space = gymnasium.spaces.Box(low, high, dtype=np.float32)
        self.action_space = gymnasium.spaces.Discrete(self.world.n_actions)

    def reset(
        self, *, seed: int | None = None, options: Info | None = None
    ) -> tuple[np.ndarray, Info]:
        """Start an episode; the same seed gives the same one."""
        super().reset(seed=seed)
        self._state = self.world.reset(1, self.np_random)
        return self._observation(), {}

    def step(self, action: np.int64 | int) -> Step:
        """One step of the world, without a time limit, which the registration adds.

        Raises ConfigError.
        """
        if not self.action_space.contains(action):
            raise ConfigError(f"action is {action!r}; give one of {self.action_space}")
        outcome = self.world.step(self._state, np.array([int(action)]), self.np_random)
        self._state = outcome.state
        return (
            self._observation(),
            float(outcome.reward[0]),
            bool(outcome.terminated[0]),
            False,
            {},
        )

    def _observation(self) -> np.ndarray:
        space = self.observation_space
        return np.clip(self.world.observe(self._state)[0], space.low, space.high)  # type: ignore[attr-defined]


class VelocityNoise(gymnasium.Wrapper[np.ndarray, np.ndarray, np.ndarray, np.ndarray]):
    """Adds N(0, transition_noise²) to every velocity (in its unit) before each step.

    The agent sees s; the world steps from s + noise, and the reported s', reward and
    end of the episode follow from that. The process is Markov, with random next states
    given s and a. This makes the residual gradient biased, unlike in MuJoCo without
    noise.

    A reset with a seed also seeds the noise. Raises ConfigError for an environment
    without MuJoCo's state.
    """

    def __init__(self, env: Env, transition_noise: float) -> None:
        super().__init__(env)
        velocities = getattr(getattr(env.unwrapped, "data", None), "qvel", None)
        if not isinstance(velocities, np.ndarray):
            raise ConfigError(
                "transition_noise needs an environment of MuJoCo; leave it away for"
                " others"
            )
        if not (np.isfinite(transition_noise) and transition_noise >= 0.0):
            raise ConfigError(
                f"transition_noise is {transition_noise}; give a number that is not"
                " negative"
            )
        self._scale = transition_noise
        self._generator = np.random.default_rng()

    def reset(
        self, *, seed: int | None = None, options: Info | None = None
    ) -> tuple[np.ndarray, Info]:
        """Reset the environment; a seed also seeds the noise."""
        if seed is not None:
            self._generator = np.random.default_rng((_STREAM, seed))
        return self.env.reset(seed=seed, options=options)

    def step(self, action: np.ndarray) -> Step:
        """Add noise to the velocities, then step the environment."""
        # MuJoCo derives all else from positions and
        # velocities at the start of its step.
        velocities = self.env.unwrapped.data.qvel  # type: ignore[attr-defined]
        velocities += self._scale * self._generator.standard_normal(velocities.shape)
        return self.env.step(action)


def noisy_mujoco(
    environment: str, transition_noise: float = 0.0, **options: Any
) -> VelocityNoise:
    """Make `environment`, with its own time limit, wrapped in velocity noise."""
    return VelocityNoise(
        make_env(environment, disable_env_checker=True, **options), transition_noise
    )


class WorldCopies(Copies):
    """Copies of one of our worlds, stepped together; rows equal those of the Gymnasium
    environment.
    """

    usual_number = 256

    def __init__(self, name: str, time_limit: int | None) -> None:
        self._world = make_world(name)
        self._envs = []
        self.name = GYMNASIUM_IDS[name]
        self.notes = ()
        self.time_limit = time_limit or TIME_LIMITS[name]
        self.action_space: ActionSpace = Discrete(self._world.n_actions)
        self.action_dtype = np.dtype(np.int64)
        self.observation_shape = (len(self._world.low),)

    def reset(
        self, seeds: Sequence[int], copies: Sequence[int] | None = None
    ) -> np.ndarray:
        """Start one copy per seed, all at once."""
        self._generators = [np.random.default_rng(seed) for seed in seeds]
        self._steps = 0
        self._states = np.concatenate(
            [self._world.reset(1, generator) for generator in self._generators]
        )
        return self._world.observe(self._states)

    def step(self, running: Sequence[int], actions: np.ndarray) -> CopiesStep:
        """One step of the running copies; each has its own stream of noise, read in
        blocks.
        """
        assert self.time_limit is not None
        place = self._steps % BLOCK
        if place == 0:
            self._noise = np.stack(
                [self._world.draw_noise(BLOCK, stream) for stream in self._generators]
            )
        self._steps += 1
        state, reward, ended = self._world.move(
            self._states[running], actions, self._noise[running, place]
        )
        self._states[running] = state
        cut = ~ended & (self._steps >= self.time_limit)
        return CopiesStep(self._world.observe(state), reward, ended, cut)


def make_copies(identifier: str, time_limit: int | None = None) -> Copies:
    """Copies of an environment; our worlds, by id or name, are one array.

    Raises ConfigError.
    """
    if identifier in NAMES:
        return WorldCopies(NAMES[identifier], time_limit)
    if time_limit is None:
        return Copies(identifier)
    return Copies(identifier, max_episode_steps=time_limit)


def closed_copies(identifier: str) -> Copies:
    """Closed copies of an environment, only for its spaces, time limit and notes."""
    copies = make_copies(identifier)
    copies.close()
    return copies


gymnasium.register(NOISY_MUJOCO, entry_point=f"{__name__}:noisy_mujoco")
for _name, _identifier in GYMNASIUM_IDS.items():
    _entry = f"{__name__}:BoxWorldEnv"
    _limit = TIME_LIMITS[_name]
    gymnasium.register(
        _identifier, _entry, max_episode_steps=_limit, kwargs={"world": _name}
    )
