"""Hashes of units: those of a plain implementation, uniform, and independent of how rows are read."""

import numpy as np
import pytest

from koffline.data.unit_hash import unit_hash

_MASK = 2**64 - 1


def mixed(word):
    """SplitMix64's output function on Python integers."""
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK
    return word ^ (word >> 31)


def hashed(seed, shard, unit):
    gamma = 0x9E3779B97F4A7C15
    key = mixed(mixed((seed + gamma) & _MASK) ^ shard)
    return mixed(mixed((unit * gamma + key) & _MASK) ^ key)


def test_mixing_is_that_of_the_published_generator():
    # First outputs of SplitMix64 seeded with 1234567, as its authors' reference code gives them.
    state, found = 1234567, []
    for _ in range(3):
        state = (state + 0x9E3779B97F4A7C15) & _MASK
        found.append(mixed(state))
    assert found == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@pytest.mark.parametrize("seed", [0, 7, 2**63 + 5])
@pytest.mark.parametrize("shard", [0, 1, 123_456])
def test_values_are_those_of_plain_integers(seed, shard):
    units = np.array([0, 1, 2, 1000, 2**40])
    expected = [hashed(seed, shard, unit) for unit in units.tolist()]
    found = unit_hash(seed, shard, units)
    assert found.dtype == np.uint64
    assert found.tolist() == expected


@pytest.mark.parametrize(("seed", "shard"), [(0, 0), (0, 1), (1, 0), (12345, 999)])
def test_values_are_uniform(seed, shard):
    count = 200_000
    drawn = unit_hash(seed, shard, np.arange(count))
    uniform = drawn / 2.0**64
    # Five standard deviations of a mean, and of the counts of 40 groups.
    assert abs(uniform.mean() - 0.5) < 5 * (1 / 12 / count) ** 0.5
    groups = np.bincount((drawn % np.uint64(40)).astype(int), minlength=40)
    assert np.abs(groups - count / 40).max() < 5 * (count / 40) ** 0.5
    # Neighbours are uncorrelated, and so are other seeds and shards.
    others = [unit_hash(seed + i, shard + j, np.arange(count)) / 2.0**64 for i, j in ((1, 0), (0, 1), (1, 1))]
    for first, second in [(uniform[1:], uniform[:-1]), *((uniform, other) for other in others)]:
        assert abs(np.corrcoef(first, second)[0, 1]) < 5 / count**0.5
