"""Growing-buffer mode: Trust-PCL in a Gymnasium environment with four interchangeable critics.

``train(config, out=…, seed_count=6)`` runs seeds in lock-step and leaves a run directory; ``LockStep`` is the
engine under it.
"""

from koffline.online.config import OnlineConfig, OnlineRun
from koffline.online.lockstep import LockStep
from koffline.online.run import OnlineResult, train

__all__ = ["LockStep", "OnlineConfig", "OnlineResult", "OnlineRun", "train"]
