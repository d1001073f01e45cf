"""Kernel matrices of batches in which states repeat."""

import pytest
import torch

from koffline.errors import ConfigError
from koffline.online.config import OnlineConfig
from koffline.online.critics import gaussian_gram


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_states_are_equal(dtype: torch.dtype) -> None:
    """Fifty of 64 rows are one state: the median is zero, and rounding must not take its place."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(1, 64, 3, generator=generator, dtype=dtype)
    rows[:, :50] = rows[:, :1]
    gram = gaussian_gram(rows, torch.ones(1, 64, dtype=dtype), torch.full((1, 1), 0.5, dtype=dtype))
    assert gram.median.item() == pytest.approx(1e-6)
    assert gram.matrix[0, :50, :50].min() == 1.0
    assert gram.matrix[0, 50:, :50].max() == 0.0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden": []}, "at least one layer"),
        ({"hidden": [10**9]}, "at most 65,536"),
        ({"capacity": 10**13}, "at most"),
        ({"steps_per_iteration": 10**10}, "at most"),
    ],
)
def test_a_slip_of_the_hand_is_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        OnlineConfig("Pendulum-v1", **changes)  # type: ignore[arg-type]
