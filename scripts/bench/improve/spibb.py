"""The protocol of SPIBB: random finite processes and a stochastic grid, a behavior
policy of known performance, logs of 10 to 10,000 episodes.

Performance is normalised: 0 is the behavior policy, 1 the optimum. The CVaR at 10 % is
the mean of the worst tenth of the draws. Episodes are cut after 50 steps. (Laroche et
al. 2019, section 4; own code)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from koffline import Transitions
from koffline.data.transitions import Discrete, Metadata
from koffline.envs.finite import FiniteMDP
from koffline.errors import DataError
from scripts.bench.finite_worlds import sample_episodes
from scripts.bench.improve import tabular
from scripts.bench.improve.answers import Refusal, number_of, text_of
from scripts.bench.improve.tabular import Table

GAMMA = 0.95
STEPS = 50
SIZES = (10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000)
# how good the behavior policy is: 0 is uniform, 1 optimal
RATIOS = (0.1, 0.3, 0.5, 0.7, 0.9)
LEAST = 10
EPSILON = 2.0
FAMILIES = ("random", "grid")
METHODS = ("unsafe", "spibb", "soft_spibb", "hcpi")
_GRID_SEED = 7
_GRID_RATIO = 0.5
_FAR = GAMMA**50  # goals that are farther are not drawn
_COOLING = 0.9
_PERTURBATION = 0.9


@dataclass(frozen=True, eq=False)
class Problem:
    """A process with its start in state 0, who writes the log, and the values.

    ratio: (behavior − uniform) / (best − uniform), about.
    """

    mdp: FiniteMDP
    behavior: Table
    behavior_value: float
    best_value: float
    ratio: float

    def episodes(self, count: int, generator: np.random.Generator) -> SimpleNamespace:
        """Columns of ``count`` episodes of the behavior policy."""
        return sample_episodes(self.mdp, count, self.behavior, STEPS, generator)

    def normalised(self, policy: Table) -> float:
        """0 for the behavior policy, 1 for the optimum."""
        value = self.mdp.policy_value(policy, GAMMA)
        return (value - self.behavior_value) / (self.best_value - self.behavior_value)


def best_policy(mdp: FiniteMDP, gamma: float = GAMMA) -> Table:
    """An optimal policy (S, A)."""
    uniform = np.full((mdp.n_states, mdp.n_actions), 1.0 / mdp.n_actions)
    return tabular.unsafe(tabular.true_model(mdp), uniform, gamma)


def random_process(generator: np.random.Generator, states: int = 50) -> FiniteMDP:
    """Four actions, each with four random next states; entering the goal pays 1 and
    ends the episode.

    The goal is the state whose optimal value from the start is least, of those within
    about 50 steps.
    """
    transition = np.zeros((states, 4, states))
    for state in range(states):
        for action in range(4):
            cuts = np.sort(generator.random(3))
            chances = np.diff(np.concatenate([[0.0], cuts, [1.0]]))
            to = generator.choice(states, size=4, replace=False)
            transition[state, action, to] = chances
    farthest = None
    least = 1.0
    for goal in range(1, states):
        mdp = _with_goal(transition, goal)
        value = mdp.policy_value(best_policy(mdp), GAMMA)
        if _FAR < value < least:
            least = value
            farthest = mdp
    assert farthest is not None, "some goal is within 50 steps"
    return farthest


def _with_goal(transition: np.ndarray, goal: int) -> FiniteMDP:
    reward = np.zeros_like(transition)
    reward[:, :, goal] = 1.0
    terminal = np.arange(len(transition)) == goal
    return FiniteMDP(transition, reward, terminal, np.eye(len(transition))[0])


def stochastic_grid() -> FiniteMDP:
    """Five by five rooms with two walls: moves up, right, down, left succeed with 0.75,
    go to each side with 0.1 and back with 0.05; the far corner pays 1 and ends.

    state = x + 5 y, the start is (0, 0). A wall stands between x = 2 and 3 for y ≤ 2
    (entered from y = 3 on), another between x = 3 and 4 for y = 2 and 3.
    """
    walls = {(2, 0), (2, 1), (2, 2), (3, 2), (3, 3)}  # (x, y): shut towards x + 1
    steps = ((0, 1), (1, 0), (0, -1), (-1, 0))
    chances = (0.75, 0.10, 0.05, 0.10)  # by quarter turns from the intended move
    transition = np.zeros((25, 4, 25))
    for state in range(25):
        x = state % 5
        y = state // 5
        for move, (dx, dy) in enumerate(steps):
            to = state
            inside = 0 <= x + dx < 5 and 0 <= y + dy < 5
            shut = dx != 0 and (min(x, x + dx), y) in walls
            if inside and not shut:
                to = state + dx + 5 * dy
            for action in range(4):
                transition[state, action, to] += chances[(move - action) % 4]
    return _with_goal(transition, 24)


def with_behavior(
    mdp: FiniteMDP, ratio: float, generator: np.random.Generator
) -> Problem:
    """Add a behavior policy of about this ratio: a softmax of Q* half-way between it
    and the optimum, whose best actions are made rarer in random states.
    """
    uniform = np.full((mdp.n_states, mdp.n_actions), 1.0 / mdp.n_actions)
    best = best_policy(mdp)
    best_value = mdp.policy_value(best, GAMMA)
    uniform_value = mdp.policy_value(uniform, GAMMA)
    values = mdp.action_values(best, GAMMA)

    def target(share: float) -> float:
        return uniform_value + share * (best_value - uniform_value)

    sharpness = 1e6
    policy = best
    while mdp.policy_value(policy, GAMMA) > target((1.0 + ratio) / 2.0):
        sharpness *= _COOLING
        scores = np.exp(sharpness * (values - values.max(axis=1, keepdims=True)))
        policy = scores / scores.sum(axis=1, keepdims=True)
    inner = np.flatnonzero(~mdp.terminal)
    best_action = values.argmax(axis=1)
    policy = policy.copy()
    value = mdp.policy_value(policy, GAMMA)
    while value > target(ratio):
        state = generator.choice(inner)
        policy[state, best_action[state]] *= _PERTURBATION
        policy[state] /= policy[state].sum()
        value = mdp.policy_value(policy, GAMMA)
    return Problem(mdp, policy, value, best_value, ratio)


def draw(family: str, seed: int) -> Problem:
    """A problem of a family: every seed is another random process and ratio; the grid
    and its behavior policy are always the same.
    """
    if family == "grid":
        generator = np.random.default_rng(_GRID_SEED)
        return with_behavior(stochastic_grid(), _GRID_RATIO, generator)
    generator = np.random.default_rng([seed, 0])
    mdp = random_process(generator)
    return with_behavior(mdp, RATIOS[seed % len(RATIOS)], generator)


def log_generator(family: str, seed: int, size: int) -> np.random.Generator:
    """Random numbers of a log, the same for every method."""
    return np.random.default_rng([seed, FAMILIES.index(family), size])


def tabular_policies(
    problem: Problem, rows: SimpleNamespace, generator: np.random.Generator
) -> dict[str, Table]:
    """The policy of each method of `METHODS` from one log.

    generator: divides episodes for `hcpi`.
    """
    behavior = problem.behavior
    model = tabular.counted_model(rows, behavior.shape)
    return {
        "unsafe": tabular.unsafe(model, behavior, GAMMA),
        "spibb": tabular.spibb(model, behavior, GAMMA, LEAST),
        "soft_spibb": tabular.soft_spibb(model, behavior, GAMMA, EPSILON),
        "hcpi": _tested(problem, rows, generator),
    }


def _tested(
    problem: Problem, rows: SimpleNamespace, generator: np.random.Generator
) -> Table:
    """The optimum of half of the episodes' model, mixed with the behavior policy, if
    the other half agrees.
    """
    behavior = problem.behavior
    count = rows.episode_ids[-1] + 1
    is_train = np.zeros(count, dtype=bool)
    is_train[generator.permutation(count)[: count // 2]] = True
    in_train = is_train[rows.episode_ids]
    train = _select(rows, in_train)
    test = _select(rows, ~in_train)
    model = tabular.counted_model(train, behavior.shape)
    candidate = tabular.unsafe(model, behavior, GAMMA)
    answer = tabular.hcpi(
        weighted_episodes(train, behavior),
        weighted_episodes(test, behavior),
        candidate[train.states, train.actions],
        candidate[test.states, test.actions],
    )
    return answer.share * candidate + (1.0 - answer.share) * behavior


def _select(rows: SimpleNamespace, keep: np.ndarray) -> SimpleNamespace:
    return SimpleNamespace(**{name: rows_[keep] for name, rows_ in vars(rows).items()})


def weighted_episodes(
    rows: SimpleNamespace, behavior: Table
) -> tabular.WeightedEpisodes:
    """Returns of a log's episodes and the behavior policy's probabilities."""
    first = np.flatnonzero(rows.steps == 0)
    returns = np.add.reduceat(rows.rewards * GAMMA**rows.steps, first)
    return tabular.WeightedEpisodes(first, returns, behavior[rows.states, rows.actions])


def as_log(rows: SimpleNamespace, behavior: Table) -> Transitions:
    """The rows as koffline's record: states are one-hot vectors, the behavior policy's
    probabilities are logged.
    """
    eye = np.eye(len(behavior), dtype=np.float32)
    return Transitions(
        observations=eye[rows.states],
        actions=rows.actions,
        rewards=rows.rewards,
        next_observations=eye[rows.next_states],
        terminated=rows.terminated,
        truncated=rows.truncated,
        action_space=Discrete(behavior.shape[1]),
        episode_ids=rows.episode_ids,
        steps=rows.steps,
        behavior_log_probabilities=np.log(behavior[rows.states, rows.actions]),
        metadata=Metadata(gamma=GAMMA),
    )


def measure_tabular(
    family: str, seeds: range, sizes: tuple[int, ...] = SIZES
) -> list[dict[str, Any]]:
    """A record for each draw and size: normalised performance of every method."""
    records = []
    for seed in seeds:
        problem = draw(family, seed)
        for size in sizes:
            generator = log_generator(family, seed, size)
            rows = problem.episodes(size, generator)
            policies = tabular_policies(problem, rows, generator)
            scores = {
                name: problem.normalised(policy) for name, policy in policies.items()
            }
            records.append(
                {
                    "family": family,
                    "seed": seed,
                    "size": size,
                    "ratio": problem.ratio,
                    "rows": len(rows.rewards),
                    "scores": scores,
                }
            )
    return records


def measure_ours(
    family: str, seed: int, size: int, improve: Callable[..., Any]
) -> dict[str, Any]:
    """One log: the normalised performance of what `koffline.improve` would run.

    improve: `koffline.improve`, or what is tested in its place.
    """
    problem = draw(family, seed)
    rows = problem.episodes(size, log_generator(family, seed, size))
    log = as_log(rows, problem.behavior)
    result: Any
    try:
        result = improve(log, gamma=GAMMA, seed=seed, cores=1)
    except DataError as error:
        result = Refusal(str(error))
    policy = problem.behavior
    if result.recommended:
        eye = np.eye(problem.mdp.n_states, dtype=np.float32)
        policy = result.policy.probabilities(eye)
    return {
        "family": family,
        "seed": seed,
        "size": size,
        "ratio": problem.ratio,
        "rows": len(rows.rewards),
        "recommended": bool(result.recommended),
        "uplift": number_of(result.uplift),
        "true_uplift": problem.mdp.policy_value(policy, GAMMA) - problem.behavior_value,
        "scores": {"ours": problem.normalised(policy)},
        "reason": text_of(result.reason),
    }
