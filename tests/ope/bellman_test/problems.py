"""Small logs whose Q^π is exact."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

import koffline
from koffline.policies import DiscretePolicy
from scripts.bench.embedded import EmbeddedMDP
from scripts.bench.finite_worlds import random_mdp
from scripts.bench.rollouts import as_transitions, log_episodes


@dataclass(frozen=True, eq=False)
class Known:
    """A log, the world and policy it came from, and Q^π as a function of observations
    and actions.
    """

    transitions: koffline.Transitions
    policy: DiscretePolicy
    world: EmbeddedMDP
    target: np.ndarray
    q: Callable[[np.ndarray, np.ndarray], np.ndarray]


def known_problem(
    seed: int,
    n: int,
    kind: str = "iid",
    behavior: bool = False,
    states: int = 20,
    ending: float = 0.0,
) -> Known:
    """A random MDP in the plane, γ = 0.9; kind: ``iid``, ``trajectory`` or ``episodes``
    (50 steps).

    behavior: the log is another policy's, with its log probabilities.
    """
    generator = np.random.default_rng(seed)
    mdp = random_mdp(states, 2, generator, ending=ending)
    world = EmbeddedMDP(mdp, generator.uniform(-1.0, 1.0, size=(states, 2)))
    target, other = (
        generator.dirichlet(np.full(2, 2.0), size=states) for _ in range(2)
    )
    writer = other if behavior else target
    if kind == "iid":
        log = world.log_tuples(writer, n, generator)
    else:
        limit = n if kind == "trajectory" else 50
        log = log_episodes(world, world.policy(writer), n, limit, generator)
    rows = as_transitions(log, world, with_episodes=kind != "iid")
    if behavior:
        chances = writer[world.states_of(rows.observations), rows.actions]
        rows = rows.replace(behavior_log_probabilities=np.log(chances))
    q = mdp.action_values(target, 0.9)
    policy = DiscretePolicy(2, world.policy(target), name="target")
    return Known(rows, policy, world, target, lambda s, a: q[world.states_of(s), a])


ONLY_ACTION = DiscretePolicy(1, lambda s: np.ones((len(s), 1)), name="only action")


def simple_q(observations: np.ndarray, actions: np.ndarray) -> np.ndarray:
    return (
        np.sin(observations[:, 0])
        + 0.3 * np.asarray(actions).reshape(len(observations), -1)[:, 0]
    )
