"""Logged transitions: the record, its readers and writers, and the bridge to d3rlpy.

This file imports d3rlpy without its side effects.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import sys
import warnings
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def import_d3rlpy() -> ModuleType:
    """Import d3rlpy without gym's notice on stderr and without changing torch's matrix
    precision on CUDA.
    """
    if "d3rlpy" in sys.modules:
        return sys.modules["d3rlpy"]
    import torch

    with contextlib.suppress(ImportError):
        from gym_notices.notices import notices

        notices.clear()  # gym prints the notices in this table
    precision = torch.get_float32_matmul_precision()
    with warnings.catch_warnings(), _scikit_learn_later():
        warnings.simplefilter("ignore")  # hide deprecation warnings inside gym
        import d3rlpy
    torch.set_float32_matmul_precision(precision)
    return d3rlpy


@contextlib.contextmanager
def _scikit_learn_later() -> Iterator[None]:
    """Replace scikit-learn while d3rlpy is imported: only PRDC needs it, and its import
    is slow.
    """
    names = ("sklearn", "sklearn.neighbors")
    if names[0] in sys.modules:
        yield
        return

    def made_when_used(
        **options: Any,
    ) -> Any:  # PRDC has one as an attribute of its class
        return functools.cached_property(
            lambda _: importlib.import_module(names[1]).NearestNeighbors(**options)
        )

    for name in names:
        sys.modules[name] = ModuleType(name)
        # torch may ask whether it is installed
        sys.modules[name].__spec__ = ModuleSpec(name, None)
    vars(sys.modules[names[1]])["NearestNeighbors"] = made_when_used
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress d3rlpy's log lines on stdout, except critical ones.

    The context may be nested.
    """
    import structlog

    before = structlog.get_config()
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL)
    )
    try:
        yield
    finally:
        structlog.configure(**before)
