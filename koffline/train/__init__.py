"""Training of d3rlpy's and koffline's algorithms on a log, from one config file."""

from importlib import import_module
from typing import Any

__all__ = ["load_config", "train"]
_HOMES = {"load_config": "config", "train": "run"}


def __getattr__(name: str) -> Any:  # on first use: what trains takes a second to import
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
