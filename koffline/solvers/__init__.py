"""Exact solvers of the kernel Bellman loss, which is quadratic in the last layer: faster than a gradient."""

from koffline.solvers.closed_form import LinearValue, solve
from koffline.solvers.features import FeatureMap, RandomFourierFeatures, UnitBox

__all__ = ["FeatureMap", "LinearValue", "RandomFourierFeatures", "UnitBox", "solve"]
