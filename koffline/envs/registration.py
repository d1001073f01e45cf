"""The worlds' names in Gymnasium's registry.

import gymnasium, koffline.envs
gymnasium.make("koffline/PuddleWorld-v0", render_mode="rgb_array")
"""

from __future__ import annotations

import gymnasium
from gymnasium.envs.registration import registry

GYMNASIUM_IDS = {
    "puddle_world": "koffline/PuddleWorld-v0",
    "cart_pole": "koffline/NoisyPole-v0",
    "mountain_car": "koffline/NoisyMountainCar-v0",
}
TIME_LIMITS = {"puddle_world": 300, "cart_pole": 500, "mountain_car": 300}  # steps


def register_envs() -> None:
    """Register every world, once."""
    for name, identifier in GYMNASIUM_IDS.items():
        if identifier not in registry:
            gymnasium.register(
                identifier,
                entry_point="koffline.envs.gymnasium_worlds:BoxWorldEnv",
                max_episode_steps=TIME_LIMITS[name],
                kwargs={"world": name},
            )
