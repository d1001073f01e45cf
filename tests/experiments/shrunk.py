"""The experiments shrunk to seconds: the same code, less of everything."""

import math
from dataclasses import replace

import pytest

from koffline.experiments import ablation, choices, figure_methods, figure_toy
from koffline.experiments.benchmark import ProblemSettings
from koffline.experiments.cells import Scale, TrainingSettings

TINY = TrainingSettings(
    learning_rates=(0.003, 0.001, 0.0003),
    seeds=2,
    epochs=4,
    batch_size=50,
    hidden=(4,),
    probe_every=1,
)
WORLD = ("puddle_world",)
KEPT = ("U", "mixture 0.5", "L_KV", "V of 50 rows")


def blank_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are drawn and not rendered: that takes longer than all else, and has
    tests of its own.
    """

    images = dict.fromkeys(("png", "svg"), b" " * 600)
    monkeypatch.setattr(
        "koffline.experiments.reproduce.images_of", lambda figure: images
    )


def shrink_experiments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two seeds, four epochs, a hundred rows, one world, one group of the ablation."""
    monkeypatch.setattr(
        figure_methods, "WORLDS", dict.fromkeys(figure_methods.WORLDS, WORLD)
    )
    monkeypatch.setattr(ablation, "WORLDS", WORLD)
    monkeypatch.setattr(
        Scale,
        "problem",
        lambda self, world: ProblemSettings(world, None, (), 120, 40, 2, self.seed),
    )
    monkeypatch.setattr(Scale, "training", lambda self, world: TINY)
    monkeypatch.setattr(choices, "LOGS", 2)
    monkeypatch.setattr(choices, "CHAPTERS", choices.CHAPTERS[:1])
    monkeypatch.setattr(choices, "_TEMPERATURES", (1.0, math.inf))
    small = replace(figure_toy.ToySettings(), seeds=2, tuples=300, iterations=60)
    monkeypatch.setattr(
        figure_toy, "ToySettings", lambda **changes: replace(small, **changes)
    )
    whole = ablation.variants
    monkeypatch.setattr(
        ablation,
        "variants",
        lambda *of: [v for v in whole(*of) if v[0] == "statistic" and v[1] in KEPT],
    )
