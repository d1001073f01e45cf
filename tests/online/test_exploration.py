"""The bonus for unknown states: against an ensemble of regressions, and over time."""

import torch

from koffline.online.learner import Exploration
from tests.online import stacks


def drawn_batch(seed=0):
    """A mini-batch of two runs and the windows' cutter behind it."""
    agents = stacks.make_agents(2)
    per_run = stacks.draw(2, seed=seed)
    _, batch = stacks.compute(
        agents, [stacks.reference.Settings(critic="td0")] * 2, per_run
    )
    return batch


def test_the_bonus_is_the_spread_of_an_ensemble_of_ridge_regressions():
    batch = drawn_batch()
    generator = torch.Generator().manual_seed(1)
    exploration = Exploration([2.0, 0.0], stacks.STATE, torch.float64)
    seen = torch.randn(2, 30, stacks.STATE, generator=generator, dtype=torch.float64)
    exploration.update(seen)
    bonus = exploration.add(batch).rewards - batch.rewards
    assert not bonus[1].any()
    # each member: its own prior weights and its own noise in every target
    psi = exploration._features(seen[0])
    count = 20_000
    normal = {"generator": generator, "dtype": torch.float64}
    noise, prior = (torch.randn(n, count, **normal) for n in (30, psi.shape[1]))
    weights = torch.linalg.solve(
        torch.eye(len(prior)) + psi.T @ psi, psi.T @ noise + prior
    )
    spread = (exploration._features(batch.inputs[0, :, 1:]) @ weights).std(dim=2)
    counts = torch.zeros_like(bonus[0]).flatten()
    covered = counts.index_put((batch.rows[0],), batch.covered[0], accumulate=True)
    inside = covered.view_as(bonus[0]) > 0
    # error 0.5 % each
    torch.testing.assert_close(
        bonus[0][inside], 2.0 * spread[inside], rtol=0.03, atol=0.0
    )


def test_known_states_lose_their_bonus_and_unknown_ones_keep_it():
    batch = drawn_batch()
    exploration = Exploration([1.0, 1.0], stacks.STATE, torch.float64)
    first = exploration.add(batch).rewards - batch.rewards
    torch.testing.assert_close(first[first != 0], torch.ones_like(first[first != 0]))
    for _ in range(21):  # inverted again
        exploration.update(batch.inputs.flatten(1, 2))
        exploration.update(batch.inputs.flatten(1, 2)[:, :1] + 1e3)
    known = exploration.add(batch).rewards - batch.rewards
    assert known.max() < 0.3
