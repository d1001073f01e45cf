import math

import pytest

from koffline.data.transitions import Continuous, Discrete, Metadata
from koffline.errors import DataError


@pytest.mark.parametrize("n", [0, -1, 2.0, True, "2", None])
def test_discrete_needs_a_count(n):
    with pytest.raises(DataError, match="at least 1"):
        Discrete(n)


@pytest.mark.parametrize("arguments", [(0,), (2, 1.0, 0.0), (2, [0.0, 0.0, 0.0]), (1, math.nan), (1, "a")])
def test_continuous_needs_proper_bounds(arguments):
    with pytest.raises(DataError):
        Continuous(*arguments)


@pytest.mark.parametrize("gamma", [0.0, 1.0, -0.5, math.nan])
def test_gamma_hint_is_a_discount(gamma):
    with pytest.raises(DataError, match="gamma"):
        Metadata(gamma=gamma)
