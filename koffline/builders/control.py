"""Logs to learn control from: random, medium, replay, expert and medium-expert, of policies learned here.

The kinds are those of D4RL (Fu et al. 2020): `random` plays uniform actions; `expert` the learner's best
policy; `medium` the one whose return is half-way between the two; `replay` is what the learner saw until it
was medium; `medium-expert` has as many episodes of the one as of the other. Policies play with some noise:
a share of uniform actions where those are discrete, else Gaussian noise in units of half the action range.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import koffline
from koffline.builders.control_learning import Learned, LearningSettings, Snapshot, network_policy
from koffline.builders.rollouts import Columns
from koffline.data.transitions import ActionSpace, Discrete, Metadata, Transitions
from koffline.errors import ConfigError
from koffline.policies.base import ContinuousPolicy, DiscretePolicy, Policy
from koffline.policies.builtin import epsilon_policy, finite_box
from koffline.policies.mlp import Mlp

KINDS = ("random", "replay", "medium", "medium-expert", "expert")
NOISE = {"medium": 0.2, "expert": 0.05}
EPSILON = {"medium": 0.1, "expert": 0.05}
POLICIES = Path(koffline.__file__).resolve().parents[1] / "datasets" / "policies"

_POLICIES_OF = {
    "random": (),
    "replay": (),
    "medium": ("medium",),
    "medium-expert": ("medium", "expert"),
    "expert": ("expert",),
}


@dataclass(frozen=True)
class Recipe:
    """A learner that succeeds in its environment, and the step at which it was medium (seed 0)."""

    learning: LearningSettings
    medium_step: int


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
    )
}


def policy_levels(kind: str) -> tuple[str, ...]:
    """Which learned policies a kind is played by. Raises ConfigError for an unknown kind."""
    if kind not in _POLICIES_OF:
        raise ConfigError(f"there is no kind '{kind}'; give one of {', '.join(KINDS)}")
    return _POLICIES_OF[kind]


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
    if recipe is None and steps is None:
        raise ConfigError(
            f"{env} has no recipe that says how long to learn (there are {', '.join(RECIPES)}); "
            "give --train-steps"
        )
    if recipe is None:
        assert steps is not None
        return LearningSettings(env, steps, seed, evaluate_every=max(1, min(1000, steps // 10)))
    return dataclasses.replace(recipe.learning, seed=seed, steps=steps or recipe.medium_step)


def medium_and_expert(learned: Learned, random_return: float) -> dict[str, Snapshot]:
    """The best snapshot, and the one before it that is nearest to half-way between random and best."""
    best = learned.best
    half = (random_return + best.mean_return) / 2
    return {"medium": learned.nearest(half), "expert": best}


def noisy(policy: Policy, noise: float, action_space: ActionSpace) -> Policy:
    """A policy with the noise of the module's docstring; the mean of a continuous one is unchanged.

    Raises ConfigError for a noise that is negative, or for discrete actions above one.
    """
    discrete = isinstance(policy, DiscretePolicy)
    if not (0.0 <= noise <= 1.0 or (noise > 0 and not discrete and np.isfinite(noise))):
        raise ConfigError(
            f"noise is {noise}; give a number that is not negative, at most 1 for discrete actions"
        )
    if noise == 0.0:
        return policy
    if isinstance(policy, DiscretePolicy):
        return epsilon_policy(noise, policy, action_space)
    assert not isinstance(action_space, Discrete), "the policy fits the space"
    low, high = finite_box(action_space, policy.name)
    scale, mean = noise * (high - low) / 2, policy.mean

    def sample(observations: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        actions = mean(observations)
        return np.clip(actions + scale * generator.standard_normal(actions.shape), low, high)

    name = f"noise:{noise:g}:{policy.name}"
    return ContinuousPolicy(policy.k, mean, sample, name, policy.observation_shape, policy.chunk_rows)


def level_noise(level: str, action_space: ActionSpace) -> float:
    """The usual noise of a level."""
    return (EPSILON if isinstance(action_space, Discrete) else NOISE)[level]


def actors(env: str, policies: Sequence[Any], levels: Sequence[str], noise: float | None) -> list[Policy]:
    """The policies of the levels, with their noise, as they play; networks, files or specs."""
    from koffline.builders.copies import make_copies
    from koffline.policies.loading import as_policy

    copies = make_copies(env, None)
    copies.close()
    playing = []
    for level, policy in zip(levels, policies, strict=True):
        given = network_policy(env, policy) if isinstance(policy, Mlp) else policy
        known = as_policy(given, copies.action_space, copies.observation_shape)
        level_of = level_noise(level, copies.action_space) if noise is None else noise
        playing.append(noisy(known, level_of, copies.action_space))
    return playing


def replay_log(learned: Learned, settings: LearningSettings, n: int | None) -> Transitions:
    """What a learner saw: all of it, or n rows of whole episodes drawn without replacement, in time order.

    Raises ConfigError for more rows than there are.
    """
    from koffline.builders.copies import make_copies

    columns = learned.rows
    total = len(columns["rewards"])
    if n is not None and n > total:
        raise ConfigError(f"--n is {n}, but the learner saw {total} rows; give fewer, or more --train-steps")
    if n is not None and n < total:
        columns = _drawn_episodes(columns, n, np.random.default_rng(settings.seed))
    copies = make_copies(settings.env, None)
    copies.close()
    columns = cut(columns, len(columns["rewards"]))
    extra = {"task": copies.name, "time_limit": copies.time_limit, "learner_steps": settings.steps}
    extra = {key: value for key, value in extra.items() if value is not None}
    metadata = Metadata(gamma=settings.gamma, extra=extra, notes=copies.notes)
    return Transitions(**columns, action_space=copies.action_space, metadata=metadata)


def cut(columns: Columns, rows: int) -> Columns:
    """The first rows; an episode that goes on after the last of them is truncated there."""
    kept = {name: column[:rows].copy() for name, column in columns.items()}
    kept["truncated"][-1] |= ~kept["terminated"][-1]
    return kept


def described(log: Transitions, kind: str, noises: Sequence[str], gamma: float | None) -> Transitions:
    """The log with kind and policies in its metadata; float64 observations become float32."""
    extra = {**log.metadata.extra, "kind": kind}
    if noises:
        extra["policies"] = list(noises)
    metadata = dataclasses.replace(log.metadata, extra=extra, gamma=gamma or log.metadata.gamma)
    columns = {
        name: getattr(log, name)
        for name in (
            *("observations", "actions", "rewards", "next_observations", "terminated", "truncated"),
            *("action_space", "episode_ids", "steps", "behavior_log_probabilities", "weights"),
        )
    }
    if log.observations.dtype == np.float64:
        columns |= {name: columns[name].astype(np.float32) for name in ("observations", "next_observations")}
    return Transitions(**columns, metadata=metadata)


def _drawn_episodes(columns: Columns, n: int, generator: np.random.Generator) -> Columns:
    ids = columns["episode_ids"]
    order = generator.permutation(np.unique(ids))
    lengths = np.bincount(ids)[order]
    taken = order[: int(np.searchsorted(np.cumsum(lengths), n)) + 1]
    rows = np.flatnonzero(np.isin(ids, taken))
    # the last drawn episode is cut, whichever place it has in time
    surplus = len(rows) - n
    last = rows[ids[rows] == taken[-1]]
    keep = np.setdiff1d(rows, last[len(last) - surplus :]) if surplus else rows
    drawn = {name: column[keep].copy() for name, column in columns.items()}
    ends = np.append(np.diff(drawn["episode_ids"]) != 0, True)
    drawn["truncated"] |= ends & ~drawn["terminated"]
    return drawn
