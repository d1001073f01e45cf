"""MuJoCo's environments with random transitions: noise on every velocity before each step.

gymnasium.make("koffline/NoisyMujoco-v0", environment="InvertedPendulum-v5", transition_noise=0.05)

What the agent has seen is s; the world goes on from s + noise, and everything it then reports (s', reward,
end of the episode) belongs to that: a Markov process whose next state is random given s and a. It is what
makes the residual gradient biased, which MuJoCo without noise does not.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np

from koffline.errors import ConfigError

NOISY_MUJOCO = "koffline/NoisyMujoco-v0"
_STREAM = 0x6E6F6973  # keeps the noise apart from the environment's own draws of the same seed


class VelocityNoise(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Adds N(0, transition_noise²) to every velocity (its own unit per second) before each step.

    A reset with a seed seeds the noise too. Raises ConfigError for an environment without MuJoCo's state.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], transition_noise: float) -> None:
        super().__init__(env)
        velocities = getattr(getattr(env.unwrapped, "data", None), "qvel", None)
        if not isinstance(velocities, np.ndarray):
            raise ConfigError("transition_noise needs an environment of MuJoCo; leave it away for others")
        if not (np.isfinite(transition_noise) and transition_noise >= 0.0):
            raise ConfigError(f"transition_noise is {transition_noise}; give a number that is not negative")
        self._scale = float(transition_noise)
        self._generator = np.random.default_rng()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """As the environment's."""
        if seed is not None:
            self._generator = np.random.default_rng((_STREAM, seed))
        return self.env.reset(seed=seed, options=options)

    def step(self, action: Any) -> Any:
        """As the environment's, from a state whose velocities were pushed."""
        # MuJoCo derives all else from positions and velocities at the start of its step.
        velocities = self.env.unwrapped.data.qvel  # type: ignore[attr-defined]
        velocities += self._scale * self._generator.standard_normal(velocities.shape)
        return self.env.step(action)


def noisy_mujoco(environment: str, transition_noise: float = 0.0, **options: Any) -> VelocityNoise:
    """The entry point: `environment` with its own time limit, and the noise around it."""
    try:
        env = gymnasium.make(environment, disable_env_checker=True, **options)
    except gymnasium.error.NameNotFound:  # would be taken for our own name's
        raise ConfigError(
            f"there is no environment '{environment}' to add noise to; check its name"
        ) from None
    return VelocityNoise(env, float(transition_noise))
