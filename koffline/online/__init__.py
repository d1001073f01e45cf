"""Online mode: Trust-PCL in a Gymnasium environment, with a growing replay and six
alternative critics.

``train(config, out=…, seed_count=6)`` runs seeds in lock-step and writes a run folder;
``LockStep`` is its engine. Names are imported on first use, so that a config can be
read without torch.
"""

from importlib import import_module
from typing import Any

__all__ = ["LockStep", "OnlineConfig", "OnlineResult", "OnlineRun", "train"]
_HOMES = {"LockStep": "lockstep", "OnlineResult": "run", "train": "run"}


def __getattr__(name: str) -> Any:
    """Import a public name on first use (PEP 562)."""
    if name in __all__:
        return getattr(import_module(f"{__name__}.{_HOMES.get(name, 'config')}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
