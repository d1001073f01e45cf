"""A ranking made by hand."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from koffline.ope.comparisons import compare_replicas
from koffline.ope.results import Interval

NAMES = ("runs/a/model.d3", "runs/b/model.d3", "epsilon:0.1:runs/a/model.d3")


def ranking() -> SimpleNamespace:
    """Three policies at 5, 4.9 and 2; the first two cannot be told apart."""
    values, truths = (5.0, 4.9, 2.0), (4.5, 5.1, 2.2)
    noise = np.hstack([np.zeros((3, 2)), 0.3 * np.random.default_rng(0).normal(size=(3, 6))])
    policies = [
        SimpleNamespace(name=name, truth=truth, interval=Interval(value - 1.0, value + 1.0, 0.95, "", ""))
        for name, value, truth in zip(NAMES, values, truths, strict=True)
    ]
    comparisons = compare_replicas(NAMES, np.array(values)[:, None] + noise, full=2)
    return SimpleNamespace(policies=policies, comparisons=comparisons)
