"""Transitions from states uniform over a world's state space, and returns from given
states, as in the paper.

(Feng et al. 2019, sec:exp_eval)
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from jaxtyping import Float
from numpy.random import Generator

from koffline.data.transitions import Discrete, Metadata, Transitions
from koffline.envs.boxes import (
    BoxWorld,
    States,
    Tuples,
    WorldPolicy,
    draw_actions,
    make_world,
    uniform_states,
)
from koffline.envs.finite import (
    TSITSIKLIS_FEATURES,
    discretise,
    tsitsiklis_van_roy,
    value_iteration,
)
from koffline.errors import PolicyError
from koffline.policies import DiscretePolicy, GridPolicy
from koffline.policies.base import PolicySource
from koffline.policy_specs import as_policy

CHAIN = "chain"
SHAPE = (40, 40)
SAMPLES = 32
GAMMA = 0.98
# Good but stochastic: entropies of 0.42 to 0.62 of the
# largest, on average over the states.
TEMPERATURES = {
    "puddle_world": 0.3,
    "cart_pole": 0.003,
    "gymnasium_pole": 0.001,
    "mountain_car": 0.1,
}
_SEED = 20190533


def draw_tuples(
    world: BoxWorld, policy: WorldPolicy, n: int, generator: Generator
) -> Tuples:
    """Draw n transitions: s uniform over non-terminal states, a ~ policy(s), s' by one
    step.
    """
    states = uniform_states(world, n, generator)
    actions = draw_actions(policy, world.observe(states), generator)
    following, rewards, terminated = world.step(states, actions, generator)
    return Tuples(states, actions, rewards, following, terminated)


def build_uniform(
    env: str, policy: PolicySource, n: int, generator: Generator
) -> Transitions:
    """Log of n independent transitions with log-probabilities; observations are states
    in native units.

    env: the name of a world or its Gymnasium id. policy: anything
    `koffline.load_policy` takes, or a callable. Raises ConfigError, and PolicyError for
    a policy that does not fit.
    """
    world = make_world(env)
    space = Discrete(world.n_actions)
    fitting = as_policy(policy, space, (len(world.low),))
    assert isinstance(fitting, DiscretePolicy)
    grid = fitting.function
    if isinstance(grid, GridPolicy) and not np.allclose(
        [grid.low, grid.high], [world.low, world.high]
    ):
        raise PolicyError(
            f"{fitting.name}: its grid covers {grid.low} to {grid.high}, the states of"
            f" {type(world).__name__} {world.low} to {world.high}; give a policy of"
            " this world"
        )
    drawn = draw_tuples(world, fitting, n, generator)
    seen = replace(
        drawn,
        states=world.observe(drawn.states),
        next_states=world.observe(drawn.next_states),
    )
    taken = fitting.probabilities(seen.states)[np.arange(n), seen.actions]
    return _log(type(world).__name__, seen, space, np.log(taken), GAMMA)


def build_chain(n: int, generator: Generator) -> Transitions:
    """Log of n independent transitions of the modified Tsitsiklis–Van Roy chain,
    observed as features (3,).

    (Feng et al. 2019, fig:toy_diverge)
    """
    features = np.asarray(TSITSIKLIS_FEATURES, dtype=np.float32)
    drawn = tsitsiklis_van_roy().sample_transitions(n, np.ones((5, 1)), generator)
    seen = replace(
        drawn, states=features[drawn.states], next_states=features[drawn.next_states]
    )
    return _log("Tsitsiklis-Van Roy chain", seen, Discrete(1), np.zeros(n))


def _log(
    task: str,
    seen: Tuples,
    space: Discrete,
    log_probabilities: np.ndarray,
    gamma: float | None = None,
) -> Transitions:
    """Log of independent rows, whose states are observations.

    task: the world's name, for the metadata. log_probabilities (N,): of the drawn
    actions. gamma: the hint in the metadata.
    """
    return Transitions(
        observations=seen.states,
        actions=seen.actions,
        rewards=seen.rewards,
        next_observations=seen.next_states,
        terminated=seen.terminated,
        truncated=np.zeros_like(seen.terminated),
        action_space=space,
        behavior_log_probabilities=log_probabilities,
        metadata=Metadata(gamma=gamma, extra={"task": task, "states": "uniform"}),
    )


def learn_grid_policy(
    world_name: str, gamma: float = GAMMA, temperature: float | None = None
) -> GridPolicy:
    """The softmax policy of the world with this name; its usual temperature is in
    `TEMPERATURES`.
    """
    if temperature is None:
        chosen = TEMPERATURES[world_name]
    else:
        chosen = temperature
    return learn_softmax_policy(make_world(world_name), chosen, gamma)


def learn_softmax_policy(
    world: BoxWorld, temperature: float, gamma: float = GAMMA
) -> GridPolicy:
    """Learn π ∝ exp(Q / temperature) by interpolated value iteration on a 40×40 grid.

    No randomness.
    """
    grid = discretise(
        world, SHAPE, np.random.default_rng(_SEED), SAMPLES, interpolate=True
    )
    action_values = value_iteration(grid.mdp, gamma)[:-1].reshape((*SHAPE, -1))
    # Sums differ in their last bits with the processor and the number of threads;
    # rounded values do not.
    return GridPolicy(grid.low, grid.high, np.round(action_values, 6), temperature)


def random_policy(world: BoxWorld) -> GridPolicy:
    """The policy with equal probabilities for all actions: the limit of an infinite
    temperature.
    """
    return GridPolicy(world.low, world.high, np.zeros((1, 1, world.n_actions)))


def discounted_returns(
    world: Any,
    policy: Any,
    start: States,
    gamma: float,
    generator: Generator,
    repeats: int,
    horizon: int,
) -> Float[np.ndarray, "repeat start"]:
    """Returns of ``repeats`` rollouts from each start state (n, d), stopped after
    ``horizon`` steps.
    """
    returns = np.zeros(repeats * len(start))
    state = np.tile(start, (repeats, 1))
    running = np.arange(len(returns))
    for t in range(horizon):
        if not len(running):
            break
        action = draw_actions(policy, world.observe(state), generator)
        state, reward, terminated = world.step(state, action, generator)
        returns[running] += gamma**t * reward
        running = running[~terminated]
        state = state[~terminated]
    return returns.reshape(repeats, len(start))
