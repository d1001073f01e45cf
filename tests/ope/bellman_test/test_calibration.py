"""Size and power over many logs with exact Q^π; the evidence at length is scripts/bench/bellman_size.py."""

import numpy as np
import pytest

from koffline.ope.bellman_test import bellman_test
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
    assert rejections(20, 60, "iid", draws=99) <= 5
    assert rejections(20, 50, "trajectory", draws=99) <= 5


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["iid", "trajectory", "episodes"])
def test_size(kind: str) -> None:
    """200 repetitions: outside 2 … 21 with probability 0.002 where the rate is 5 %."""
    assert 2 <= rejections(200, 200, kind, draws=299) <= 21


@pytest.mark.slow
def test_power_against_wrong_values() -> None:
    assert rejections(10, 150, "iid", error=1.5) >= 8
