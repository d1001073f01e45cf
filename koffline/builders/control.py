"""Logs for learning control: random, medium, replay, expert and medium-expert, from
policies trained here.

`random` plays uniform actions; `expert` the learner's best policy; `medium` the policy
whose return is half-way between the two; `replay` is all that the learner saw until it
was medium; in `medium-expert` each episode is from one of the two. Policies play with
some noise: a share of uniform actions if actions are discrete, else Gaussian noise in
units of half the action range.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from koffline.builders import POLICY_LEVELS, control_learning
from koffline.builders.control_learning import RECIPES, Learned, LearningSettings
from koffline.builders.rollouts import (
    Columns,
    RolloutPlayer,
    RolloutSettings,
    world_metadata,
)
from koffline.data.transitions import ActionSpace, Discrete, Transitions
from koffline.envs import closed_copies
from koffline.errors import ConfigError
from koffline.json_types import JsonObject
from koffline.policies.base import (
    ContinuousPolicy,
    DiscretePolicy,
    Policy,
    PolicySource,
)
from koffline.policies.builtin import epsilon_policy, finite_box
from koffline.policy_specs import as_policy
from koffline.progress import progress_bar

# a link to datasets/policies; a wheel holds the files
POLICIES = Path(__file__).parent / "policies"
ROWS = 10_000
NOISE = {"medium": 0.2, "expert": 0.05}
EPSILON = {"medium": 0.1, "expert": 0.05}
_RANDOM_EPISODES = 50
_RANDOM_SEED = 20190534


@dataclass(frozen=True)
class ControlSettings:
    """Settings of a control log; together with the policies they determine its rows.

    n: rows; None: 10,000, or all of a replay. noise: None: the usual noise of the kind.
    train_steps: train new policies for that number of steps; None: use the bundled
    ones, or for a replay train by the recipe.
    """

    env: str
    kind: str
    n: int | None = None
    seed: int = 0
    noise: float | None = None
    train_steps: int | None = None


def build_control(
    settings: ControlSettings,
    policies: Sequence[PolicySource] = (),
    show_progress: bool = False,
) -> Transitions:
    """The log, with exactly n rows; an unfinished last episode is truncated.

    policies: replace the bundled policies, as many as the kind has; anything
    `koffline.load_policy` takes. Raises ConfigError, and PolicyError for a policy that
    does not fit.
    """
    env = settings.env
    kind = settings.kind
    levels = POLICY_LEVELS[kind]
    copies = closed_copies(env)
    anew = bool(levels) and settings.train_steps is not None
    if copies.time_limit is None:
        raise ConfigError(
            f"{env} has no time limit, a learned policy may play forever; register it"
            " with max_episode_steps"
        )
    if len(policies) not in (0, len(levels)) or (policies and anew):
        raise ConfigError(
            f"{len(policies)} policies were given for kind {kind}, which has"
            f" {len(levels)}; give as many without train_steps, or none"
        )
    if anew or kind == "replay":
        learning = control_learning.learning_settings(
            env, settings.seed, settings.train_steps
        )
        if kind == "replay":  # its snapshots are not used
            learning = dataclasses.replace(learning, evaluate_every=learning.steps)
        with progress_bar(f"learning in {env}", learning.steps, show_progress) as show:
            learned = control_learning.learn(learning, show)
        if kind == "replay":
            return _described(replay_log(learned, learning, settings.n), kind=kind)
        snapshots = control_learning.medium_and_expert(learned, random_return(env))
        playing = [snapshots[level].policy for level in levels]
        names = [f"learned in {snapshots[level].step} steps" for level in levels]
    else:
        specs = policies or [str(bundled_policy(env, level)) for level in levels]
        playing = [
            as_policy(spec, copies.action_space, copies.observation_shape)
            for spec in specs
        ]
        names = [policy.name.split("/")[-1] for policy in playing] or ["uniform"]
    who: JsonObject = {"policies": names}
    if levels:
        if isinstance(copies.action_space, Discrete):
            usual = EPSILON
        else:
            usual = NOISE
        recipe = RECIPES.get(env)
        if recipe and recipe.medium_noise is not None:
            usual = {**usual, "medium": recipe.medium_noise}
        who["noise"] = [usual[level] for level in levels]
        if settings.noise is not None:
            who["noise"] = [settings.noise] * len(levels)
        pairs = zip(playing, who["noise"], strict=True)
        playing = [noisy(policy, noise, copies.action_space) for policy, noise in pairs]
    return _described(
        _play(settings, playing or ["uniform"], show_progress), kind=kind, **who
    )


def stem(env: str) -> str:
    """An environment's name in file names: pendulum for Pendulum-v1."""
    return env.split("/")[-1].rsplit("-v", 1)[0].lower()


def bundled_policy(env: str, level: str) -> Path:
    """The file of a bundled policy for an environment.

    Raises ConfigError if there is none.
    """
    path = POLICIES / f"{stem(env)}_{level}.npz"
    if not path.is_file():
        raise ConfigError(
            f"no {level} policy of {env} is bundled; give one with --policy FILE, or"
            " learn it with --train-steps 20000"
        )
    return path


def random_return(env: str) -> float:
    """Mean undiscounted return of uniform actions."""
    return float(
        control_learning.policy_returns(
            env, "uniform", _RANDOM_EPISODES, _RANDOM_SEED
        ).mean()
    )


def noisy(policy: Policy, noise: float, action_space: ActionSpace) -> Policy:
    """A policy with noise, as in the module's docstring; actions are clipped to the
    bounds.

    Raises ConfigError if the noise is negative, or above one for discrete actions.
    """
    largest = math.inf
    if isinstance(policy, DiscretePolicy):
        largest = 1.0
    if not 0.0 <= noise <= largest:
        raise ConfigError(
            f"noise is {noise}; give a probability in [0, 1], or a deviation for box"
            " actions"
        )
    if noise == 0.0:
        return policy
    if isinstance(policy, DiscretePolicy):
        return epsilon_policy(noise, policy, action_space)
    assert not isinstance(action_space, Discrete), "the policy fits the space"
    low, high = finite_box(action_space, policy.name)
    scale = noise * (high - low) / 2
    base = policy.sample

    def sample(observations: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        actions = base(observations, generator)
        return np.clip(
            actions + scale * generator.standard_normal(actions.shape), low, high
        )

    name = f"noise:{noise:g}:{policy.name}"
    return ContinuousPolicy(
        policy.k, policy.mean, sample, name, policy.observation_shape
    )


def replay_log(
    learned: Learned, settings: LearningSettings, n: int | None
) -> Transitions:
    """Log of a learner's rows: all, or n rows of episodes drawn without replacement, in
    time order.

    Raises ConfigError for more rows than the learner saw.
    """
    columns = learned.rows
    total = len(learned.rows["rewards"])
    if n is not None and n > total:
        raise ConfigError(
            f"n is {n}, but the learner saw {total} rows; ask for fewer, or give"
            " --train-steps"
        )
    if n is not None and n < total:
        ids = columns["episode_ids"]
        order = np.random.default_rng(settings.seed).permutation(ids.max() + 1)
        ends = np.cumsum(np.bincount(ids)[order])
        taken = order[: int(np.searchsorted(ends, n)) + 1]
        surplus = int(ends[len(taken) - 1]) - n
        keep = np.isin(ids, taken)
        keep[np.flatnonzero(ids == taken[-1])[::-1][:surplus]] = (
            False  # the last drawn episode is cut
        )
        columns = {name: column[keep] for name, column in columns.items()}
    copies = closed_copies(settings.env)
    metadata = world_metadata(copies, settings.gamma, learner_steps=settings.steps)
    return Transitions(
        **_ended(columns), action_space=copies.action_space, metadata=metadata
    )


def _play(
    settings: ControlSettings, playing: Sequence[PolicySource], show_progress: bool
) -> Transitions:
    """The log of ``settings.n`` rows, by default `ROWS`; each episode is played by one
    of the policies ``playing``, drawn with equal weights.
    """
    n = settings.n or ROWS
    recipe = RECIPES.get(settings.env)
    gamma = 0.99
    if recipe is not None:
        gamma = recipe.learning.gamma
    rollouts = RolloutSettings(
        settings.env, n, (1.0,) * len(playing), seed=settings.seed, gamma=gamma
    )
    title = f"playing {settings.env}"
    played = []
    rows = 0
    with (
        RolloutPlayer(rollouts, playing) as player,
        progress_bar(title, n, show_progress) as show,
    ):
        for columns in player.play(range(player.batches)):
            played.append(columns)
            rows += len(columns["rewards"])
            show(min(rows, n))
            if rows >= n:  # an episode has at least one row, so n episodes are enough
                break
        left = len(played[-1]["rewards"]) - (rows - n)
        played[-1] = _ended(
            {name: column[:left] for name, column in played[-1].items()}
        )
        return player.join(played)


def _ended(columns: Columns) -> Columns:
    """Columns in which the last row of every episode is terminated or else
    truncated.
    """
    last = np.append(np.diff(columns["episode_ids"]) != 0, True)
    return {
        **columns,
        "truncated": columns["truncated"] | (last & ~columns["terminated"]),
    }


def _described(log: Transitions, **extra: object) -> Transitions:
    """Add to the log's metadata; float64 observations become float32."""
    columns: dict[str, Any] = {}
    if log.observations.dtype == np.float64:
        names = ("observations", "next_observations")
        columns = {name: getattr(log, name).astype(np.float32) for name in names}
    metadata = dataclasses.replace(log.metadata, extra={**log.metadata.extra, **extra})
    return dataclasses.replace(log, **columns, metadata=metadata)
