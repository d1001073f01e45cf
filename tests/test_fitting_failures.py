"""Divergence, and runs that are interrupted and continued."""

import math

import pytest
import torch

from koffline.batches import ReplicaPlan
from koffline.dual_objectives import GradientTD2, SaddlePoint
from koffline.errors import ConfigError
from koffline.fitting import Checkpointing, FitSettings, fit
from koffline.objectives import ResidualGradient
from koffline.replicas import StackedMLP
from tests.engine_problems import OBJECTIVES, SIZES, make_table

SETTINGS = FitSettings(steps=45, batch_size=9, record_every=7, schedule="cosine")
ALL = OBJECTIVES | {"gtd2": GradientTD2(), "sbeed": SaddlePoint(ascent_steps=2)}


def network_of(form, seeds):
    return StackedMLP.initialise(SIZES[form], seeds, dtype=torch.float64)


@pytest.mark.parametrize(("name", "every"), [("rg", 1), ("rg", 10), ("rg", 50), ("gtd2", 10), ("sbeed", 10)])
def test_a_diverged_replica_is_named_and_never_a_number(name, every):
    """Adam moves every weight by about its rate: 1e200 overflows the squared residual in the second step."""
    table, plan = make_table("state"), ReplicaPlan((1e-3, 1e200, 1e-3), (0, 1, 2))
    settings = FitSettings(steps=30, batch_size=9, record_every=every)
    record = fit(table, network_of("state", range(3)), ALL[name], plan, settings)
    assert record.diverged_at == (None, 0 if name == "sbeed" else 1, None)  # SBEED's f moves before V
    assert record.network.flat[1].isnan().all()
    assert record.network.forward(table.inputs)[1].isnan().all()
    alone = fit(table, network_of("state", [2]), ALL[name], ReplicaPlan.of_seeds([2]), settings)
    torch.testing.assert_close(record.network.flat[2], alone.network.flat[0], rtol=0.0, atol=1e-10)
    assert record.losses[:, [0, 2]].isfinite().all()
    assert not record.losses[0, 1].isfinite() or every == 1


def test_a_last_step_that_breaks_a_replica_is_noticed():
    plan, settings = ReplicaPlan((1e-3, math.inf), (0, 1)), FitSettings(steps=1, batch_size=9)
    record = fit(make_table("state"), network_of("state", range(2)), ResidualGradient(), plan, settings)
    assert record.losses.isfinite().all()
    assert record.diverged_at == (None, 1)
    assert record.network.flat[1].isnan().all()


class Killed(Exception):
    pass


class KillAt:
    """A progress bar that stops the process, so to speak."""

    def __init__(self, step):
        self.step = step

    def update(self, step, steps, loss):
        if step >= self.step:
            raise Killed


def run(form, name, checkpoint=None, progress=None, settings=SETTINGS, rates=(1e-2, 1e-3, 1e-2)):
    return fit(
        make_table(form),
        network_of(form, range(3)),
        ALL[name],
        ReplicaPlan(rates, (0, 0, 1)),
        settings,
        probe=lambda step, network: network.forward(torch.ones(2, network.sizes[0], dtype=torch.float64)),
        probe_every=5,
        progress=progress,
        checkpoint=checkpoint,
    )


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("kloss", "state"),
        ("fvi", "discrete"),
        ("fqe", "continuous"),
        ("gtd2", "state"),
        ("sbeed", "discrete"),
    ],
)
def test_an_interrupted_run_ends_bit_for_bit_like_another(name, form, tmp_path):
    rates = (1e-2, 1e-3, 1e-2) if name != "kloss" else (1e-2, 1e200, 1e-2)  # divergence survives a restart
    whole = run(form, name, rates=rates)
    checkpoint = Checkpointing(tmp_path / "run" / "state.pt", every=13)
    with pytest.raises(Killed):
        run(form, name, checkpoint, KillAt(30), rates=rates)
    assert torch.load(checkpoint.path, weights_only=True)["step"] == 26
    record = run(form, name, checkpoint, rates=rates)
    torch.testing.assert_close(record.network.flat, whole.network.flat, rtol=0.0, atol=0.0, equal_nan=True)
    torch.testing.assert_close(record.losses, whole.losses, rtol=0.0, atol=0.0, equal_nan=True)
    torch.testing.assert_close(record.probes, whole.probes, rtol=0.0, atol=0.0, equal_nan=True)
    assert (record.loss_steps, record.probe_steps) == (whole.loss_steps, whole.probe_steps)
    assert record.diverged_at == whole.diverged_at == (None, 1 if name == "kloss" else None, None)
    assert record.seconds > 0.0
    assert [path.name for path in checkpoint.path.parent.iterdir()] == ["state.pt"]


def test_a_finished_run_is_read_back_and_no_other(tmp_path):
    checkpoint = Checkpointing(tmp_path / "state.pt", every=15)
    first = run("state", "kloss", checkpoint)
    again = run("state", "kloss", checkpoint, KillAt(0))  # no step is taken, so nothing is killed
    assert torch.equal(again.network.flat, first.network.flat)
    with pytest.raises(ConfigError, match="other data or settings"):
        run("state", "rg", checkpoint)
    with pytest.raises(ConfigError, match="other data or settings"):
        run("state", "kloss", checkpoint, settings=FitSettings(steps=45, batch_size=8))
