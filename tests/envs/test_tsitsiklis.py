"""The modified example of Tsitsiklis and Van Roy says what the paper's text says."""

from __future__ import annotations

import numpy as np

from koffline.envs.tsitsiklis import EXACT_WEIGHTS, FEATURES, GAMMA, tsitsiklis_van_roy

ONLY = np.ones((5, 1))
# state: (next state, probability, reward); 4 is the end
ARROWS = {
    0: [(1, 0.8, 0.0), (2, 0.2, 0.0)],
    1: [(4, 1.0, 1.0)],
    2: [(3, 1.0, 0.0)],
    3: [(3, 0.95, 0.0), (4, 0.05, 0.0)],
}


def test_the_arrows():
    mdp = tsitsiklis_van_roy()
    assert (mdp.n_states, mdp.n_actions, GAMMA) == (5, 1, 1.0)
    for state, arrows in ARROWS.items():
        row = np.zeros(5)
        for to, probability, reward in arrows:
            row[to] = probability
            assert mdp.reward[state, 0, to] == reward
        np.testing.assert_allclose(mdp.transition[state, 0], row)
    np.testing.assert_array_equal(mdp.terminal, [False, False, False, False, True])
    np.testing.assert_array_equal(mdp.initial, [0.25, 0.25, 0.25, 0.25, 0.0])


def test_values_are_linear_and_exact_at_the_known_weights():
    # the only reward is 1 on leaving the second state, which the first reaches with chance 0.8
    expected = [0.8, 1.0, 0.0, 0.0, 0.0]
    np.testing.assert_allclose(tsitsiklis_van_roy().state_values(ONLY, GAMMA), expected, atol=1e-14)
    np.testing.assert_allclose(np.asarray(FEATURES) @ EXACT_WEIGHTS, expected, atol=1e-14)
    assert np.linalg.matrix_rank(FEATURES) == 3  # so no other weights are


def test_least_squares_finds_the_weights_and_td_runs_away():
    sample = tsitsiklis_van_roy().sample_transitions(2000, ONLY, np.random.default_rng(0))
    assert set(sample.states) == {0, 1, 2, 3}
    features = np.asarray(FEATURES)
    now, step = features[sample.states], features[sample.states] - features[sample.next_states]
    found = np.linalg.solve(now.T @ step, now.T @ sample.rewards)
    # the chance of 0.8 is known to its standard error over some 500 rows, the reward exactly
    np.testing.assert_allclose(found, EXACT_WEIGHTS, atol=4 * np.sqrt(0.16 / 500))
    # the mean update of TD(0) along (0, 0, 1): 1 · (2 − 1) + 2 · (2 · 0.95 − 2) = 0.8 per four states, upward
    drift = -(now.T @ step)[2, 2] / 2000
    assert drift > 0.15
