"""Logs of vectorised worlds with time limits, and values by Monte Carlo without
them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Bool, Int, Shaped

from koffline.builders.uniform import discounted_returns
from koffline.data.transitions import Continuous, Discrete, Metadata, Transitions
from koffline.envs.boxes import (
    Actions,
    Flags,
    Observations,
    Rewards,
    States,
    draw_actions,
)


@dataclass(frozen=True, eq=False)
class EpisodeLog:
    """Rows of whole episodes, contiguous and in time order; the last episode may be cut
    by the log's end.
    """

    observations: Shaped[np.ndarray, " row *observation"]
    actions: Shaped[np.ndarray, " row *action"]
    rewards: Shaped[np.ndarray, " row"]
    next_observations: Shaped[np.ndarray, " row *observation"]
    terminated: Bool[np.ndarray, " row"]
    truncated: Bool[np.ndarray, " row"]
    episode_ids: Int[np.ndarray, " row"]
    steps: Int[np.ndarray, " row"]
    # the world's own start state of each episode, for Monte Carlo from there
    start_states: Shaped[np.ndarray, " episode *state"]

    def __len__(self) -> int:
        return len(self.rewards)


@dataclass(frozen=True)
class MonteCarloValue:
    """Discounted value of a policy from a set of start states.

    ``standard_error`` takes the starts as draws from a population,
    ``error_given_starts`` as fixed. ``start_deviation`` is the standard deviation of V
    over starts: a log with E episodes cannot place the population value better than
    about start_deviation / √E. ``horizon`` is where returns were cut.
    """

    value: float
    standard_error: float
    error_given_starts: float
    start_deviation: float
    horizon: int
    n_rollouts: int


def log_episodes(
    world: Any,
    policy: Any,
    n_rows: int,
    time_limit: int,
    generator: np.random.Generator,
) -> EpisodeLog:
    """Record exactly ``n_rows`` rows of independent episodes, cut (not ended) at
    ``time_limit`` steps.
    """
    parts: list[EpisodeLog] = []
    rows = episodes = 0
    while rows < n_rows:
        count = max(8, math.ceil((n_rows - rows) / time_limit))
        part = _log_batch(world, policy, count, time_limit, generator)
        parts.append(replace(part, episode_ids=part.episode_ids + episodes))
        rows = rows + len(part)
        episodes = episodes + count
    columns = {
        name: np.concatenate([getattr(part, name) for part in parts])[:n_rows]
        for name in vars(parts[0])
    }
    columns["truncated"][-1] = not columns["terminated"][-1]
    columns["start_states"] = columns["start_states"][: columns["episode_ids"][-1] + 1]
    return EpisodeLog(**columns)


def as_transitions(
    log: EpisodeLog,
    world: Any,
    with_episodes: bool = True,
    metadata: Metadata | None = None,
) -> Transitions:
    """The log as a validated record; without episodes its rows stand alone and none is
    truncated.
    """
    if world.bounds is None:
        assert world.n_actions is not None, (
            "a world has either bounds or a number of actions"
        )
        space: Discrete | Continuous = Discrete(world.n_actions)
    else:
        space = Continuous(len(world.bounds[0]), *world.bounds)
    episode_ids = None
    steps = None
    if with_episodes:
        episode_ids = log.episode_ids
        steps = log.steps
    return Transitions(
        observations=log.observations,
        actions=log.actions,
        rewards=log.rewards,
        next_observations=log.next_observations,
        terminated=log.terminated,
        truncated=log.truncated & with_episodes,
        action_space=space,
        episode_ids=episode_ids,
        steps=steps,
        metadata=metadata or Metadata(),
    )


def monte_carlo_value(
    world: Any,
    policy: Any,
    gamma: float,
    start: States,
    generator: np.random.Generator,
    repeats: int = 2,
    horizon: int | None = None,
) -> MonteCarloValue:
    """Value by ``repeats`` ≥ 2 rollouts from each start state (n, d), without a time
    limit.

    Returns are cut where gamma^t < 1e-5 (or at ``horizon``): 0.001 % of a constant
    reward stream. Rollouts from one start share V(start) alone: what varies beyond
    their own noise is V over the starts.
    """
    horizon = horizon or math.ceil(math.log(1e-5) / math.log(gamma))
    n = len(start)
    table = discounted_returns(world, policy, start, gamma, generator, repeats, horizon)
    means = table.mean(axis=0)
    # mean variance of one rollout given its start
    noise = float(table.var(axis=0, ddof=1).mean())
    spread = 0.0
    if n > 1:
        spread = float(means.var(ddof=1))
    return MonteCarloValue(
        value=float(means.mean()),
        standard_error=math.sqrt(spread / n),
        error_given_starts=math.sqrt(noise / (repeats * n)),
        start_deviation=math.sqrt(max(spread - noise / repeats, 0.0)),
        horizon=horizon,
        n_rollouts=repeats * n,
    )


@dataclass(frozen=True, eq=False)
class Step:
    """One step of every copy still running; ``index`` (n,) says which copies these
    are.
    """

    index: Int[np.ndarray, " copy"]
    observation: Observations
    action: Actions
    reward: Rewards
    next_observation: Observations
    terminated: Flags


def play(
    world: Any, policy: Any, state: States, limit: int, generator: np.random.Generator
) -> Iterator[Step]:
    """Yield step after step of every copy that still runs, for at most ``limit``
    steps.
    """
    index = np.arange(len(state))
    observation = world.observe(state)
    for _ in range(limit):
        action = draw_actions(policy, observation, generator)
        state, reward, terminated = world.step(state, action, generator)
        next_observation = world.observe(state)
        yield Step(index, observation, action, reward, next_observation, terminated)
        running = ~terminated
        if not running.any():
            return
        index = index[running]
        state = state[running]
        observation = next_observation[running]


def _log_batch(
    world: Any, policy: Any, count: int, limit: int, generator: np.random.Generator
) -> EpisodeLog:
    """``count`` episodes side by side, then sorted by episode and step."""
    start = world.reset(count, generator)
    steps = list(play(world, policy, start, limit, generator))
    time = np.concatenate([np.full(len(step.index), t) for t, step in enumerate(steps)])
    columns = {
        name: np.concatenate([getattr(step, name) for step in steps])
        for name in vars(steps[0])
    }
    order = np.lexsort((time, columns["index"]))
    columns = {name: column[order] for name, column in columns.items()}
    return EpisodeLog(
        observations=columns["observation"],
        actions=columns["action"],
        rewards=columns["reward"],
        next_observations=columns["next_observation"],
        terminated=columns["terminated"],
        truncated=(time[order] == limit - 1) & ~columns["terminated"],
        episode_ids=columns["index"],
        steps=time[order],
        start_states=start,
    )
