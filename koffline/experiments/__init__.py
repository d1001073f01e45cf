"""The paper's experiments: one file per figure, all run by the runner in `cells`."""

NAMES = ("figure-toy", "figure-puddle", "figure-bench", "ablation", "memory", "figure-mujoco", "claims")
# Of figure-mujoco, in the order of the paper's panels.
ENVIRONMENTS = ("Swimmer", "InvertedDoublePendulum", "Ant", "InvertedPendulum", "Walker2d", "HalfCheetah")
PARTS = ("search", "final", "noise", "paper-search", "paper")
