"""The worlds' names in Gymnasium's registry.

import gymnasium, koffline.envs
gymnasium.make("koffline/PuddleWorld-v0", render_mode="rgb_array")
"""

from __future__ import annotations

import gymnasium
from gymnasium.envs.registration import registry

from koffline.envs.noisy_gymnasium import NOISY_MUJOCO

GYMNASIUM_IDS = {
    "puddle_world": "koffline/PuddleWorld-v0",
    "cart_pole": "koffline/NoisyPole-v0",
    "mountain_car": "koffline/NoisyMountainCar-v0",
}
TIME_LIMITS = {"puddle_world": 300, "cart_pole": 500, "mountain_car": 300}  # steps


def register_envs() -> None:
    """Register every world, and MuJoCo with noise, once."""
    if NOISY_MUJOCO not in registry:
        gymnasium.register(NOISY_MUJOCO, entry_point="koffline.envs.noisy_gymnasium:noisy_mujoco")
    for name, identifier in GYMNASIUM_IDS.items():
        if identifier not in registry:
            gymnasium.register(
                identifier,
                entry_point="koffline.envs.gymnasium_worlds:BoxWorldEnv",
                max_episode_steps=TIME_LIMITS[name],
                kwargs={"world": name},
            )
