"""The paper's experiments, one file per figure, and what they share."""

DESCRIPTIONS = {
    "figure-toy": "four methods on the modified Tsitsiklis–Van Roy chain",
    "figure-puddle": "six methods on Puddle World: errors, Bellman errors, what the losses tell",
    "figure-bench": "six methods on the noisy pole and the noisy Mountain Car",
    "ablation": "what the K-loss depends on: bandwidth, kernel, statistic, batch, scale, offset, noise",
    "figure-mujoco": "Trust-PCL with four critics on six MuJoCo environments, searches and noise (hours)",
    "claims": "the paper's empirical sentences beside our measurements (runs all but figure-mujoco)",
}
ENVIRONMENTS = ("Swimmer", "InvertedDoublePendulum", "Ant", "InvertedPendulum", "Walker2d", "HalfCheetah")
"""Of figure-mujoco, in the order of the paper's panels."""
PARTS = ("search", "final", "noise", "paper-search", "paper")
