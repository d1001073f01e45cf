"""Rankings made by hand, for tests of what is said and drawn about them."""

from __future__ import annotations

import numpy as np

from koffline.ope.comparisons import compare_replicas, score_selection
from koffline.ope.ranking import PolicyRanking, RankedPolicy
from koffline.ope.results import Interval

NAMES = ("runs/a/model.d3", "runs/b/model.d3", "epsilon:0.1:runs/a/model.d3")


def ranking(with_truths: bool = True) -> PolicyRanking:
    """Three policies at 5, 4.9 and 2; the first two cannot be told apart."""
    generator = np.random.default_rng(0)
    noise = np.hstack([np.zeros((3, 2)), 0.3 * generator.normal(size=(3, 6))])
    comparisons = compare_replicas(NAMES, np.array([[5.0], [4.9], [2.0]]) + noise, full=2)
    truths = (4.5, 5.1, 2.2) if with_truths else (None, None, None)
    policies = tuple(
        RankedPolicy(
            rank=rank,
            name=name,
            value=value,
            interval=Interval(value - 1.0, value + 1.0, 0.95, "bootstrap", "A spread of [networks]."),
            truth=truth,
            maybe_best=all(not (c.significant and c.worse == name) for c in comparisons),
        )
        for rank, (name, value, truth) in enumerate(zip(NAMES, (5.0, 4.9, 2.0), truths, strict=True), start=1)
    )
    metrics = score_selection(np.array([5.0, 4.9, 2.0]), np.array([4.5, 5.1, 2.2]))
    return PolicyRanking(
        policies=policies,
        comparisons=comparisons,
        estimator="kloss",
        gamma=0.9,
        level=0.95,
        seed=0,
        n_transitions=100,
        n_episodes=10,
        source="log.hdf5",
        data_sha256="0" * 64,
        seconds=1.0,
        assumptions="Compared on [the same] episodes.",
        metrics=metrics if with_truths else None,
        warnings=("Only <few> episodes.",),
    )
