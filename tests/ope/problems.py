"""Small logs and networks for the tests of the estimators."""

import numpy as np
import torch
from scipy.special import softmax

import koffline
from koffline.data.transitions import Metadata
from koffline.ope.log.facts import LogFacts, log_facts
from koffline.ope.log.problem import EvaluationProblem, prepare_problem
from koffline.ope.log.working_log import LogPart
from koffline.ope.networks.resampling import make_table
from koffline.policies import ContinuousPolicy, DiscretePolicy
from koffline.replicas import StackedMLP

QUICK = {"steps": 60, "full_replicas": 1, "resampled_replicas": 2}
AS_OPTIONS = [f"--set={name}={value}" for name, value in QUICK.items()]
# Of the tables user,day,x,act,gain,end that the tests of commands write.
COLUMNS = (
    "--observations=x",
    "--action=act",
    "--reward=gain",
    "--episode=user",
    "--time=day",
    "--terminal=end",
)


def discrete_log(
    n: int = 60, length: int = 10, **changes: object
) -> koffline.Transitions:
    """Episodes of `length` steps, every second one terminated, the others cut by a time
    limit.
    """
    generator = np.random.default_rng(3)
    steps = np.arange(n) % length
    last = steps == length - 1
    episode = np.arange(n) // length
    states = generator.normal(size=(n, 2))
    columns: dict[str, object] = {
        "observations": states,
        "actions": generator.integers(3, size=n),
        "rewards": generator.normal(size=n),
        "next_observations": states + generator.normal(size=(n, 2)) * 0.3,
        "terminated": last & (episode % 2 == 0),
        "truncated": last & (episode % 2 == 1),
        "action_space": koffline.Discrete(3),
        "episode_ids": episode,
        "steps": steps,
        **changes,
    }
    return koffline.Transitions(**columns)  # type: ignore[arg-type]


def continuous_log() -> koffline.Transitions:
    """Fifty rows without episodes."""
    actions = np.random.default_rng(4).uniform(-1.0, 1.0, (50, 1))
    space = koffline.Continuous(1, -1.0, 1.0)
    alone = {
        "terminated": np.zeros(50, bool),
        "truncated": np.zeros(50, bool),
        "episode_ids": None,
    }
    return discrete_log(50, actions=actions, action_space=space, steps=None, **alone)


def facts_of(log: koffline.Transitions, gamma: float) -> LogFacts:
    return log_facts(LogPart(log, np.arange(log.n_episodes)), gamma)


SOFT = DiscretePolicy(
    3, lambda s: softmax(np.stack([s[:, 0], s[:, 1], 0.0 * s[:, 0]], axis=1), axis=1)
)
NOISY = ContinuousPolicy(
    1,
    lambda s: np.tanh(s[:, :1]),
    lambda s, generator: np.clip(
        np.tanh(s[:, :1]) + 0.2 * generator.normal(size=(len(s), 1)), -1.0, 1.0
    ),
)


def prepared(kind: str, gamma: float = 0.9, draws: int = 3) -> EvaluationProblem:
    log = continuous_log()
    policy = NOISY
    if kind == "discrete":
        log = discrete_log()
        policy = SOFT
    return prepare_problem(log, policy, gamma, draws, np.random.default_rng(0))


def stack(problem: EvaluationProblem, replicas: int = 2) -> tuple[StackedMLP, object]:
    """Untrained float64 networks and the float64 table."""
    outputs = 1
    if problem.readout is not None:
        outputs = problem.readout.shape[1]
    sizes = (problem.inputs.shape[1], 7, 5, outputs)
    network = StackedMLP.initialise(sizes, range(replicas), dtype=torch.float64)
    return network, make_table(problem, "cpu").to("cpu", torch.float64)


def plain_hidden(network: StackedMLP, replica: int, inputs: np.ndarray) -> np.ndarray:
    """Last hidden units (B, h) of one network, layer by layer in numpy."""
    for weight, bias in network.layers(network.flat)[:-1]:
        inputs = np.maximum(
            inputs @ weight[replica].numpy() + bias[replica].numpy(), 0.0
        )
    return inputs


def plain_q(network: StackedMLP, replica: int, inputs: np.ndarray) -> np.ndarray:
    """Outputs (B, n) of one network."""
    weight, bias = network.layers(network.flat)[-1]
    return (
        plain_hidden(network, replica, inputs) @ weight[replica].numpy()
        + bias[replica].numpy()
    )


def uneven_log(kind: str, episodes: int = 60, seed: int = 8) -> koffline.Transitions:
    """Weighted episodes of 1 … 12 steps, ``discrete`` with the behaviour's chances; or
    ``rows`` alone.
    """
    generator = np.random.default_rng(seed)
    lengths = generator.integers(1, 13, episodes)
    n = int(lengths.sum())
    starts = np.cumsum(lengths) - lengths
    last = np.isin(np.arange(n), starts + lengths - 1)
    terminated = last & (generator.random(n) < 0.5)
    states = generator.normal(size=(n, 2))
    space = koffline.Continuous(1, -1.0, 1.0)
    behavior = None
    if kind == "discrete":
        space = koffline.Discrete(3)
        actions = generator.integers(3, size=n)
        behavior = np.full(n, np.log(1.0 / 3.0))
    else:
        actions = generator.uniform(-1, 1, (n, 1))
    steps = None
    if kind != "rows":
        steps = np.arange(n) - np.repeat(starts, lengths)
    return koffline.Transitions(
        observations=states,
        actions=actions,
        rewards=states[:, 0] + generator.normal(size=n),
        next_observations=0.8 * states + 0.3 * generator.normal(size=(n, 2)),
        terminated=terminated,
        truncated=last & ~terminated & (kind != "rows"),
        steps=steps,
        weights=np.repeat(generator.uniform(0.5, 2.0, episodes), lengths),
        behavior_log_probabilities=behavior,
        action_space=space,
    )


def mortal_log(
    rows_after: bool, episodes: int = 3000, most: int = 3
) -> koffline.Transitions:
    """One is paid a step and the world ends after any with probability 0.2, whatever is
    done: worth 1/0.28.

    Recording stops after ``most`` steps. Without ``rows_after`` the last row of a cut
    episode is lost, as to a reader that finds no next observation.
    """
    generator = np.random.default_rng(5)
    lengths = np.minimum(generator.geometric(0.2, episodes), most + 1)  # most + 1: cut
    ended = lengths <= most
    kept = np.minimum(lengths, most)
    rows_of_cut = most
    if not rows_after:
        rows_of_cut = most - 1
    kept = np.where(ended, kept, rows_of_cut)
    last = np.cumsum(kept) - 1
    flags = np.zeros((2, last[-1] + 1), dtype=bool)
    flags[0, last] = ended
    flags[1, last] = ~ended
    states = generator.normal(size=(2, len(flags[0]), 1))
    return koffline.Transitions(
        states[0],
        generator.integers(2, size=len(flags[0])),
        np.ones(len(flags[0])),
        states[1],
        *flags,
        episode_ids=np.repeat(np.arange(episodes), kept),
        action_space=koffline.Discrete(2),
        metadata=Metadata(lost_last_rows=not rows_after),
    )
