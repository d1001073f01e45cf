"""Size and power over many logs with exact Q^π; the evidence at length is scripts/bench/bellman_size.py."""

import numpy as np
import pytest

from koffline.ope.bellman_test.front import bellman_test
from koffline.policies import ContinuousPolicy
from scripts.bench.linear_quadratic import LinearGaussian, LinearQuadratic
from scripts.bench.rollouts import as_transitions, log_episodes
from tests.ope.bellman_test.problems import known_problem


def rejections(repetitions: int, n: int, kind: str, error: float = 0.0, **options: object) -> int:
    """Number of rejections at 5 % of Q^π + error · N(0, 1) per row's state and action."""
    count = 0
    for seed in range(repetitions):
        known = known_problem(seed, n, kind)
        table = error * np.random.default_rng(seed + 999).standard_normal(4096)

        def q(s, a, known=known, table=table):
            place = (np.abs(s[:, 0] * 1e5).astype(np.int64) + 7 * np.asarray(a)) % 4096
            return known.q(s, a) + table[place]

        count += bellman_test(q, known.transitions, known.policy, 0.9, seed=seed, **options).rejects
    return count


def test_size_is_near_the_level() -> None:
    """At 5 % more than 5 of 20 have probability below 1e-3."""
    assert rejections(20, 60, "iid", method="gamma") <= 5
    assert rejections(20, 50, "trajectory", draws=99) <= 5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "kind"),
    [("wild", "iid"), ("spectral", "trajectory"), ("gamma", "trajectory"), ("gamma", "episodes")],
)
def test_size(method: str, kind: str) -> None:
    """200 repetitions: outside 2 … 21 with probability 0.002 where the rate is 5 %."""
    assert 2 <= rejections(200, 200, kind, method=method, draws=299) <= 21


@pytest.mark.slow
@pytest.mark.parametrize("multipliers", ["step", "block"])
def test_size_of_windows_and_power_against_wrong_values(multipliers: str) -> None:
    """Blocks are fewer than rows and err on the safe side; steps keep the level."""
    options = {"window": 5, "on_policy": True, "multipliers": multipliers, "method": "gamma"}
    found = rejections(200, 500, "trajectory", **options)
    assert found <= 21
    assert found >= 2 or multipliers == "block"
    assert rejections(10, 150, "iid", error=1.5, method="gamma") >= 8


@pytest.mark.slow
@pytest.mark.parametrize("action_draws", [1, 8])
def test_size_with_drawn_actions(action_draws: int) -> None:
    """One draw of a' per row is as honest as many: it is noise of that row alone. 200 at 5 %: 2 … 21."""
    plane = LinearQuadratic(drift=((0.9, 0.2), (0.0, 0.9)), control=((0.0,), (0.3,)), noise=0.2)
    target, writer = LinearGaussian(((-0.5, -0.7),), 0.3), LinearGaussian(((-0.3, -0.4),), 0.6)
    spread = plane.state_values(np.zeros((1, 2)), target, 0.9) - plane.state_values(np.eye(2), target, 0.9)

    def q(s, a):
        """r + γ E V(A s + B a + w): V is quadratic, so that w adds noise² Σ_i (V(e_i) − V(0))."""
        following = s @ np.asarray(plane.drift).T + a @ np.asarray(plane.control).T
        reward = -np.sum(s**2, axis=1) - 0.1 * np.sum(a**2, axis=1)
        return reward + 0.9 * (plane.state_values(following, target, 0.9) - 0.2**2 * spread.sum())

    policy = ContinuousPolicy(1, target.mean, target.sample)
    found = 0
    for seed in range(200):
        log = log_episodes(plane, writer, 200, 1, np.random.default_rng(seed))
        rows = as_transitions(log, plane, with_episodes=False)
        options = {"method": "gamma", "action_draws": action_draws, "seed": seed}
        found += bellman_test(q, rows, policy, 0.9, **options).rejects
    assert 2 <= found <= 21


@pytest.mark.slow
def test_training_rows_tell_nothing() -> None:
    """Certainty equivalence (one-hot LSTD-Q) is never rejected on its own rows, often on fresh ones."""
    own = fresh = 0
    for seed in range(60):
        known = known_problem(seed, 600)
        first, second = (known.transitions.select(np.arange(a, a + 300)) for a in (0, 300))
        places = np.unique(known.transitions.observations, axis=0)

        def columns(s, a, places=places):
            return np.eye(2 * len(places))[
                2 * np.abs(s[:, None] - places[None]).sum(axis=2).argmin(axis=1) + np.asarray(a)
            ]

        chances = known.policy.probabilities(first.next_observations)
        later = sum(
            chances[:, [a]] * columns(first.next_observations, np.full(len(first), a)) for a in range(2)
        )
        now = columns(first.observations, first.actions)
        ridge = 1e-6 * np.eye(now.shape[1])
        theta = np.linalg.solve(now.T @ (now - 0.9 * later) + ridge, now.T @ first.rewards)
        q = lambda s, a, t=theta, c=columns: c(s, a) @ t  # noqa: E731
        own += bellman_test(q, first, known.policy, 0.9, method="gamma").rejects
        fresh += bellman_test(q, second, known.policy, 0.9, method="gamma").rejects
    assert own == 0
    assert fresh >= 12
