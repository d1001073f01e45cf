"""Training any d3rlpy algorithm, stock or ours, over a log, from one config file."""

from koffline.train.config import TrainConfig, load_config
from koffline.train.run import TrainResult, train

__all__ = ["TrainConfig", "TrainResult", "load_config", "train"]
