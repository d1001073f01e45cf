"""Hashes of units are those of a plain implementation: parts and samples stay what they were."""

import numpy as np
import pytest

from koffline.data.units import unit_hash

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


@pytest.mark.parametrize("seed", [0, 7, 2**63 + 5])
@pytest.mark.parametrize("shard", [0, 1, 123_456])
def test_values_are_those_of_plain_integers(seed, shard):
    units = np.array([0, 1, 2, 1000, 2**40])
    expected = [hashed(seed, shard, unit) for unit in units.tolist()]
    found = unit_hash(seed, shard, units)
    assert found.dtype == np.uint64
    assert found.tolist() == expected
