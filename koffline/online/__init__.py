"""Growing-buffer mode: Trust-PCL in a Gymnasium environment with six interchangeable critics.

``train(config, out=…, seed_count=6)`` runs seeds in lock-step and leaves a run directory; ``LockStep`` is the
engine under it. Names are imported when first used: a config is read without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from koffline.online.config import OnlineConfig, OnlineRun
    from koffline.online.lockstep import LockStep
    from koffline.online.run import OnlineResult, train

_HOMES = {"OnlineConfig": "config", "OnlineRun": "config", "LockStep": "lockstep"}
_HOMES |= {"OnlineResult": "run", "train": "run"}
__all__ = ["LockStep", "OnlineConfig", "OnlineResult", "OnlineRun", "train"]


def __getattr__(name: str) -> Any:
    """Import a public name on first use (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module 'koffline.online' has no attribute '{name}'")
    return getattr(import_module(f"koffline.online.{_HOMES[name]}"), name)
