"""Importing d3rlpy without what it does on the side."""

from __future__ import annotations

import contextlib
import sys
import warnings
from types import ModuleType


def import_d3rlpy() -> ModuleType:
    """d3rlpy, without gym's notice on stderr and without its change of torch's matrix precision on CUDA."""
    if "d3rlpy" in sys.modules:
        return sys.modules["d3rlpy"]
    import torch

    with contextlib.suppress(ImportError):
        from gym_notices.notices import notices

        notices.clear()  # gym prints whatever this table holds for its version
    precision = torch.get_float32_matmul_precision()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations inside gym are not the user's
        import d3rlpy
    torch.set_float32_matmul_precision(precision)
    return d3rlpy
