"""Importing d3rlpy without what it does on the side."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator
from types import ModuleType


def import_d3rlpy() -> ModuleType:
    """d3rlpy, without gym's notice on stderr and without its change of torch's matrix precision on CUDA."""
    if "d3rlpy" in sys.modules:
        return sys.modules["d3rlpy"]
    import torch

    precision = torch.get_float32_matmul_precision()
    with _without_gym_notice(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations inside gym are not the user's
        import d3rlpy
    torch.set_float32_matmul_precision(precision)
    return d3rlpy


@contextlib.contextmanager
def _without_gym_notice() -> Iterator[None]:
    """On import gym prints whatever this table holds for its version."""
    try:
        from gym_notices.notices import notices
    except ImportError:
        notices = {}
    kept = dict(notices)
    notices.clear()
    try:
        yield
    finally:
        notices.update(kept)
