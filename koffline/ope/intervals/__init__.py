"""Intervals for a policy's value, each labelled with what it promises: certified, or calibrated."""

from koffline.ope.intervals.making import make_interval
from koffline.ope.intervals.result import IntervalResult
from koffline.ope.intervals.settings import KernelIntervalSettings

__all__ = ["IntervalResult", "KernelIntervalSettings", "make_interval"]
