"""Learners that succeed in their environments, and where the policies that they became are kept."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import koffline
from koffline.builders.control_learning import LearningSettings
from koffline.errors import ConfigError

POLICIES = Path(koffline.__file__).resolve().parents[1] / "datasets" / "policies"


@dataclass(frozen=True)
class Recipe:
    """A learner, and the step at which it was medium with seed 0 where the bundled policies were made.

    medium_noise: of the medium policy, where the usual noise would make much less of it.

    On another machine rounding may differ, and with it the learner at that step; policies.json says how good
    the bundled policies are.
    """

    learning: LearningSettings
    medium_step: int
    medium_noise: float | None = None


RECIPES = {
    recipe.learning.env: recipe
    for recipe in (
        Recipe(
            LearningSettings(
                "CartPole-v1",
                steps=12_000,
                hidden=(128, 128),
                target_interval=128,
                reward_factor=0.1,
                update_every=2,
                exploration=0.04,
                exploration_steps=10_000,
                evaluate_every=500,
            ),
            medium_step=5500,
        ),
        Recipe(
            LearningSettings(
                "Pendulum-v1",
                steps=15_000,
                batch_size=256,
                reward_factor=0.1,
                update_every=2,
                evaluate_every=500,
            ),
            medium_step=5500,
        ),
        Recipe(
            LearningSettings("InvertedPendulum-v5", steps=6000, reward_factor=0.1, evaluate_every=25),
            medium_step=5175,
            medium_noise=0.05,
        ),
        Recipe(
            LearningSettings(
                "HalfCheetah-v5",
                steps=50_000,
                hidden=(128, 128),
                reward_factor=0.1,
                random_steps=2000,
                evaluate_every=2500,
                episodes=5,
                keep_every=2000,
            ),
            medium_step=20_000,
            medium_noise=0.1,
        ),
    )
}


def stem(env: str) -> str:
    """The name of an environment in file names: Pendulum-v1 is pendulum."""
    return env.split("/")[-1].rsplit("-v", 1)[0].lower()


def bundled_policy(env: str, level: str) -> Path:
    """The file of a policy learned for an environment. Raises ConfigError where there is none."""
    path = POLICIES / f"{stem(env)}_{level}.npz"
    if not path.is_file():
        raise ConfigError(
            f"there is no {level} policy of {env} ({path} is missing); give one with --policy, or learn it "
            "with --train-steps"
        )
    return path


def learning_settings(env: str, seed: int, steps: int | None = None) -> LearningSettings:
    """The recipe of an environment with a seed; without ``steps`` up to where its learner is medium.

    Raises ConfigError for an environment without a recipe and without steps.
    """
    recipe = RECIPES.get(env)
    if recipe is not None:
        steps = recipe.medium_step if steps is None else steps
        return dataclasses.replace(recipe.learning, seed=seed, steps=steps)
    if steps is None:
        raise ConfigError(
            f"{env} has no recipe that says how long to learn ({', '.join(RECIPES)} have); give --train-steps"
        )
    return LearningSettings(env, steps, seed, evaluate_every=max(1, min(1000, steps // 10)))
