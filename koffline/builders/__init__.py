"""Build datasets and target policies: uniform states, rollouts, mixtures."""

from koffline.builders.rollouts import RolloutSettings, build_rollouts
from koffline.builders.target_policy import learn_grid_policy
from koffline.builders.uniform import build_chain, build_uniform

__all__ = ["RolloutSettings", "build_chain", "build_rollouts", "build_uniform", "learn_grid_policy"]
