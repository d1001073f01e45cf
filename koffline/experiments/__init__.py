"""The paper's experiments: one file per figure, all run by the runner in `cells`."""

NAMES = (
    "figure-toy",
    "figure-puddle",
    "figure-bench",
    "ablation",
    "memory",
    "choices",
    "figure-mujoco",
    "claims",
)
# Of figure-mujoco, in the order of the paper's panels.
ENVIRONMENTS = (
    "Swimmer",
    "InvertedDoublePendulum",
    "Ant",
    "InvertedPendulum",
    "Walker2d",
    "HalfCheetah",
)
PARTS = ("search", "final", "noise", "paper-search", "paper")
# Of choices, in the order in which they are run.
WORLDS = ("puddle_world", "cart_pole", "gymnasium_pole", "mountain_car")
STAGES = ("temperature", "single", "factorial")
