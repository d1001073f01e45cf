"""How long and how often an experiment runs: in full as the paper did, or quickly to see that it works."""

from __future__ import annotations

from dataclasses import dataclass, replace

from koffline.errors import ConfigError
from koffline.experiments.cells import TrainingSettings
from koffline.experiments.problem import ProblemSettings

EPOCHS = {"puddle_world": 2000, "cart_pole": 2000, "mountain_car": 3000}  # (Feng et al. 2019, sec:exp_eval)
_QUICK_SHARE = 20  # of the epochs
_QUICK_SEEDS = 3


@dataclass(frozen=True)
class Scale:
    """Full: the paper's epochs and ten seeds. Quick: a twentieth of the epochs, three seeds."""

    quick: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise ConfigError(f"seed is {self.seed}; give a number that is not negative")

    def problem(self, world: str) -> ProblemSettings:
        """The world's problem; fewer rollouts for the truth of a quick run."""
        return ProblemSettings(world, truth_repeats=20 if self.quick else 200, seed=self.seed)

    def training(self, world: str) -> TrainingSettings:
        """The paper's settings for the world."""
        whole = TrainingSettings(epochs=EPOCHS[world])
        if not self.quick:
            return whole
        return replace(whole, epochs=EPOCHS[world] // _QUICK_SHARE, seeds=_QUICK_SEEDS, probe_every=5)
