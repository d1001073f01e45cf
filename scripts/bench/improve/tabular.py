"""Safe policy improvement in finite processes: what Laroche et al. (ICML 2019) compare,
written after the papers.

A log of a finite process is its counts. `unsafe` solves the most likely model;
`spibb` does so only where a pair was seen often enough and keeps the behavior policy
elsewhere; `soft_spibb` bounds how far it moves by the error of each pair; `hcpi` tests a
candidate on unseen episodes before it is believed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
from jaxtyping import Float
from scipy import stats

from koffline.envs.finite import FiniteMDP

Table = Float[np.ndarray, "state action"]
PerEpisode = Float[np.ndarray, " episode"]
SHARES = (0.25, 0.5, 0.75, 1.0)
_MOST_ITERATIONS = 1000
_SAME = 1e-9


@dataclass(frozen=True, eq=False)
class CountedModel:
    """The most likely model of a log; pairs that were not seen lead nowhere and pay 0.

    counts (S, A); transition (S, A, S), with rows that sum to less than one where
    episodes terminated; reward (S, A): mean logged reward.
    """

    counts: np.ndarray
    transition: np.ndarray
    reward: np.ndarray


def counted_model(rows: SimpleNamespace, shape: tuple[int, int]) -> CountedModel:
    """Count the rows of a log.

    rows: columns ``states``, ``actions``, ``rewards``, ``next_states``, ``terminated``,
    as `finite_worlds.sample_episodes` draws them. shape: numbers of states and actions.
    """
    counts = np.zeros(shape)
    np.add.at(counts, (rows.states, rows.actions), 1.0)
    reward = np.zeros(shape)
    np.add.at(reward, (rows.states, rows.actions), rows.rewards)
    moves = np.zeros((*shape, shape[0]))
    on = ~rows.terminated
    np.add.at(moves, (rows.states[on], rows.actions[on], rows.next_states[on]), 1.0)
    divisor = np.maximum(counts, 1.0)
    return CountedModel(counts, moves / divisor[:, :, None], reward / divisor)


def true_model(mdp: FiniteMDP) -> CountedModel:
    """The process itself in the form of a model: every pair counted infinitely often.

    Moves into terminal states are left out, because their value is zero.
    """
    transition = np.where(mdp.terminal, 0.0, mdp.transition)
    transition = np.where(mdp.terminal[:, None, None], 0.0, transition)
    reward = np.einsum("sat,sat->sa", mdp.transition, mdp.reward)
    reward = np.where(mdp.terminal[:, None], 0.0, reward)
    return CountedModel(np.full(reward.shape, np.inf), transition, reward)


def action_values(model: CountedModel, policy: Table, gamma: float) -> Table:
    """Q^π (S, A) in a model: solves (I − γ P_π) V = r_π, then one step of any
    action.
    """
    moves = np.einsum("sa,sat->st", policy, model.transition)
    gain = (policy * model.reward).sum(axis=1)
    values = np.linalg.solve(np.eye(len(gain)) - gamma * moves, gain)
    return model.reward + gamma * (model.transition @ values)


def iterate(
    model: CountedModel, start: Table, gamma: float, improve: Callable[[Table], Table]
) -> Table:
    """Policy iteration in a model until values settle.

    start: the first policy. improve: the next policy (S, A) from action values (S, A).
    """
    policy = start
    before = np.full(start.shape, np.inf)
    for _ in range(_MOST_ITERATIONS):
        values = action_values(model, policy, gamma)
        if np.abs(values - before).max() < _SAME:
            break
        before = values
        policy = improve(values)
    return policy


def greedy(values: Table) -> Table:
    """The first best action of each state, for certain."""
    return np.eye(values.shape[1])[values.argmax(axis=1)]


def unsafe(model: CountedModel, behavior: Table, gamma: float) -> Table:
    """Policy iteration on the model: Basic RL in the paper."""
    return iterate(model, behavior, gamma, greedy)


def spibb(model: CountedModel, behavior: Table, gamma: float, least: float) -> Table:
    """Π_b-SPIBB: pairs counted less than ``least`` times keep the behavior policy's
    probability, the rest goes to the best of the others.

    With ``least`` 0 this is `unsafe`, with infinity the behavior policy. (Laroche et
    al. 2019, algorithm 1)
    """
    counted = np.greater_equal(model.counts, least)
    kept = np.where(counted, 0.0, behavior)
    free = 1.0 - kept.sum(axis=1)
    can_move = counted.any(axis=1)

    def improve(values: Table) -> Table:
        best = greedy(np.where(counted, values, -np.inf))
        moved = kept + free[:, None] * best
        return np.where(can_move[:, None], moved, behavior)

    return iterate(model, behavior, gamma, improve)


def pair_errors(counts: Table, delta: float = 1.0) -> Table:
    """Errors e_Q (S, A) of the pairs: √(2 ln(2 S A / δ) / N), infinite where N = 0.

    (Nadjahi et al. 2019, section 3)
    """
    scale = 2.0 * np.log(2.0 * counts.size / delta)
    with np.errstate(divide="ignore"):
        return np.sqrt(scale / counts)


def soft_spibb(
    model: CountedModel, behavior: Table, gamma: float, epsilon: float
) -> Table:
    """Approx-Soft-SPIBB with one step: from the behavior policy's values, move
    probability from the worst actions to the best while Σ_a e |π − π_b| ≤ ε.

    With ``epsilon`` 0 this is the behavior policy. (Nadjahi et al. 2019, algorithm 1)
    """
    errors = pair_errors(model.counts)
    values = action_values(model, behavior, gamma)
    states = np.arange(len(values))
    policy = behavior.copy()
    left = np.full(len(values), float(epsilon))
    worst_first = values.argsort(axis=1, kind="stable")
    for giver in worst_first.T:
        gain = values - values[states, giver][:, None]
        best_first = (-gain / errors).argsort(axis=1, kind="stable")
        for taker in best_first.T:
            from_error = errors[states, giver]
            to_error = errors[states, taker]
            most = left / (2.0 * np.maximum(from_error, to_error))
            mass = np.minimum(policy[states, giver], most)
            mass = np.where(gain[states, taker] > 0.0, mass, 0.0)
            moves = mass > 0.0
            policy[states, giver] -= mass
            policy[states, taker] += mass
            spent = mass[moves] * (from_error[moves] + to_error[moves])
            left[moves] = np.maximum(left[moves] - spent, 0.0)
    return policy


@dataclass(frozen=True, eq=False)
class WeightedEpisodes:
    """Whole episodes, each with its discounted return and the chances of its actions.

    first (E,): the first row of each episode; returns (E,); behavior (N,): probability
    with which the logged action was drawn.
    """

    first: np.ndarray
    returns: np.ndarray
    behavior: np.ndarray

    def uplifts(self, chances: Float[np.ndarray, " row"]) -> PerEpisode:
        """(w − 1) G of each episode: unbiased for the uplift of the policy that takes
        the logged actions with these chances (N,).
        """
        with np.errstate(divide="ignore"):
            ratios = np.log(chances) - np.log(self.behavior)
        weights = np.exp(np.add.reduceat(ratios, self.first))
        return (weights - 1.0) * self.returns


def lower_bound(numbers: PerEpisode, level: float, count: int | None = None) -> float:
    """One-sided Student-t lower bound of a mean; −inf of fewer than two numbers.

    count: predict the bound for so many numbers instead of len(numbers).
    """
    if len(numbers) < 2 or (count is not None and count < 2):
        return -np.inf
    size = count or len(numbers)
    reach = stats.t.ppf(level, size - 1) * numbers.std(ddof=1) / np.sqrt(size)
    return float(numbers.mean() - reach)


@dataclass(frozen=True)
class SafetyTest:
    """What high-confidence policy improvement says.

    share: of the candidate in the mixture with the behavior policy; 0: keep the
    behavior policy. bound: lower bound of the uplift on the episodes of the test.
    """

    share: float
    bound: float


def hcpi(
    train: WeightedEpisodes,
    test: WeightedEpisodes,
    train_chances: np.ndarray,
    test_chances: np.ndarray,
    level: float = 0.95,
) -> SafetyTest:
    """High-confidence improvement with importance sampling: the share with the best
    predicted bound on training episodes is tested once on the others.

    train_chances, test_chances (N,): of the candidate, for the logged actions. (Thomas
    et al. 2015, High Confidence Policy Improvement)
    """
    predicted = {}
    for share in SHARES:
        chances = share * train_chances + (1.0 - share) * train.behavior
        uplifts = train.uplifts(chances)
        predicted[share] = lower_bound(uplifts, level, len(test.returns))
    share = max(SHARES, key=lambda choice: predicted[choice])
    chances = share * test_chances + (1.0 - share) * test.behavior
    bound = lower_bound(test.uplifts(chances), level)
    if bound > 0.0:
        return SafetyTest(share, bound)
    return SafetyTest(0.0, bound)


def tail_mean(numbers: np.ndarray, share: float) -> float:
    """CVaR: mean of the worst ``share`` of the numbers; a part of a number counts by
    that part.
    """
    ordered = np.sort(np.asarray(numbers, dtype=np.float64))
    size = share * len(ordered)
    whole = int(np.floor(size + 1e-9))
    part = max(size - whole, 0.0)
    total = ordered[:whole].sum()
    if part > 1e-9:
        total += part * ordered[whole]
    return float(total / size)
