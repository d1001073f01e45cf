"""Growing-buffer mode: Trust-PCL in a Gymnasium environment with four interchangeable critics.

``train(config, out=…, seed_count=6)`` runs seeds in lock-step and leaves a run directory; ``LockStep`` is the
engine under it.
"""

from __future__ import annotations

from typing import Any

_WHERE = {
    "LockStep": "koffline.online.lockstep",
    "OnlineConfig": "koffline.online.config",
    "OnlineResult": "koffline.online.run",
    "OnlineRun": "koffline.online.config",
    "train": "koffline.online.run",
}
__all__ = sorted(_WHERE)


def __getattr__(name: str) -> Any:
    """Public names, imported when they are asked for."""
    if name not in _WHERE:
        raise AttributeError(f"module 'koffline.online' has no attribute '{name}'")
    from importlib import import_module

    return getattr(import_module(_WHERE[name]), name)
