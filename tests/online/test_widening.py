"""A policy that grows wider while its returns fall is named once, in the log and in the
summary; one that only explores, or only plays badly, is not.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import yaml

from koffline.online.config import load_config
from koffline.online.group import _remedy
from koffline.online.lockstep import LockStep
from koffline.online.run import train
from koffline.online.widening import find_widening
from tests.online.small_online import small

RISE_AND_FALL = [90.0, 200.0, 450.0, 560.0, 550.0, 400.0, 200.0, 140.0, 130.0, 120.0]
GROWING = [0.40, 0.38, 0.35, 0.34, 0.36, 0.50, 0.70, 0.90, 1.00, 1.09]
STEADY = [0.34] * 10


@pytest.mark.parametrize(
    ("returns", "deviations", "is_named"),
    [
        (RISE_AND_FALL, GROWING, True),
        (RISE_AND_FALL, STEADY, False),
        (RISE_AND_FALL, GROWING[::-1], False),
        (sorted(RISE_AND_FALL), GROWING, False),  # it explores and learns
        ([-1000.0, -500.0, -300.0, -310.0, -900.0, -950.0, -980.0], GROWING[3:], True),
        ([100.0, 90.0, 110.0, 50.0, 40.0, 30.0, 20.0], GROWING[3:], True),  # never rose
        ([100.0, 10.0, 100.0, 90.0, 10.0, 100.0, 95.0], GROWING[3:], False),  # noise
        (RISE_AND_FALL[-5:], GROWING[-5:], False),  # too few to say
        ([0.0] * 10, GROWING, False),  # nothing to lose
        ([math.nan] * 10, GROWING, False),
        (RISE_AND_FALL, [math.nan] * 10, False),  # discrete actions
        ([math.nan, *RISE_AND_FALL], [0.4, *GROWING], True),
        ([], [], False),
    ],
)
def test_growth_and_fall_together_are_named(
    returns: Sequence[float], deviations: Sequence[float], is_named: bool
) -> None:
    widening = find_widening(returns, deviations)
    assert (widening is not None) == is_named
    if widening is not None:
        assert widening.deviation_now > widening.deviation_then
        assert widening.return_now < widening.return_then


def test_a_run_warns_once_and_records_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Two seeds; the second one's policy is made to grow wider and fail."""
    whole_evaluate = LockStep.evaluate
    whole_metrics = LockStep.take_metrics

    def evaluate(self: LockStep) -> dict[str, np.ndarray]:
        place = self.steps // 40 - 1
        sampled = np.array([100.0 + place, RISE_AND_FALL[place]])
        return {**whole_evaluate(self), "sampled_return": sampled}

    def take_metrics(self: LockStep) -> dict[str, np.ndarray]:
        place = self.steps // 40 - 1
        deviations = np.array([0.3, GROWING[place]])
        return {**whole_metrics(self), "policy_std": deviations}

    monkeypatch.setattr(LockStep, "evaluate", evaluate)
    monkeypatch.setattr(LockStep, "take_metrics", take_metrics)
    result = train(small(evaluation_interval=40), tmp_path / "run", 2)
    assert list(result.widened) == [1]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["widened"] == {"1": result.widened[1]}
    lines = [
        record.getMessage()
        for record in caplog.records
        if "standard deviation grew" in record.getMessage()
    ]
    assert len(lines) == 1
    assert lines[0].startswith(f"seed 1 by step {result.widened[1]}: ")
    assert "--set recency=0.003, or --set critic=kloss_slow" in lines[0]
    # a finished run is reported again with what was recorded
    assert train(None, resume=tmp_path / "run").widened == result.widened


@pytest.mark.parametrize(
    "critic", ["kloss", "memory", "kloss_slow", "td0", "fvi", "rg"]
)
@pytest.mark.parametrize(
    "settings", [{}, {"recency": 0.0}, {"recency": 0.01}, {"streaming": True}]
)
def test_the_remedy_is_a_setting_that_is_accepted(critic: str, settings: dict) -> None:
    config = load_config({"env": "Pendulum-v1", "critic": critic, **settings})
    has_old_replay = not config.streaming and config.recency < 0.01
    assert ("recency" in _remedy(config)) == has_old_replay
    for remedy in _remedy(config).split(", or "):
        assignments = remedy.replace("--set ", "").split()
        settings = dict(part.split("=") for part in assignments)
        values = {name: yaml.safe_load(value) for name, value in settings.items()}
        changed = config.with_changes(**values)
        assert changed != config
