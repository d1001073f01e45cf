"""Training in rounds: it stops once the estimate has settled, and not before."""

import numpy as np
import pytest

import koffline
from koffline.ope import rounds
from tests.ope.problems import SOFT, discrete_log

QUICK = {"full_replicas": 2, "resampled_replicas": 3, "hidden_units": (8, 8), "instruments": 60}


@pytest.fixture(autouse=True)
def _short_rounds(monkeypatch):
    monkeypatch.setattr(rounds, "SHORTEST", 10)
    monkeypatch.setattr(rounds, "MOST_STEPS", 80)


def evaluated(**options) -> koffline.Estimate:
    return koffline.evaluate(discrete_log(), SOFT, 0.9, **QUICK, **options)


@pytest.mark.parametrize(
    ("options", "steps"), [({"agreement": 1e9}, 20), ({"agreement": 1e-9}, 80), ({"steps": 25}, 25)]
)
def test_it_trains_as_long_as_the_estimate_moves(monkeypatch, options, steps) -> None:
    monkeypatch.setattr(rounds, "_LEAST", 0.0)
    monkeypatch.setattr(rounds, "_BETTER", 0.0)
    found = evaluated(**options)
    assert found.diagnostics["training_steps"] == steps
    assert found.evidence.steps[-1] == steps
    assert (np.diff(found.evidence.steps) > 0).all()
    assert found.evidence.values.shape == found.evidence.objective.shape == (5, len(found.evidence.steps))


def test_rounds_are_so_many_steps_and_more_go_on_from_them() -> None:
    one, same = evaluated(agreement=1e9), evaluated(steps=20)
    assert (one.value, one.interval.low) == (same.value, same.interval.low)
    both = evaluated(agreement=1e-9)
    np.testing.assert_array_equal(both.evidence.values[:, : len(one.evidence.steps)], one.evidence.values)


@pytest.mark.parametrize(("losses", "steps"), [((8.0, 4.0, 2.0), 80), ((8.0, 7.9), 20), ((8.0, 9.9), 20)])
def test_features_are_learnt_while_the_held_out_loss_falls(monkeypatch, losses, steps) -> None:
    told = iter(losses)
    monkeypatch.setattr(rounds, "_SHARP", 0.0)
    monkeypatch.setattr(rounds.Training, "_held_out_loss", lambda self, network: next(told))
    assert evaluated(agreement=1e9).diagnostics["training_steps"] == steps
