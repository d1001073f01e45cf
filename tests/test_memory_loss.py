"""The remembered kernel loss: exact on full batches, unbiased on small ones, where the plain loss is not."""

import pytest
import torch

from koffline.batches import BatchSchedule, BatchSource, ReplicaPlan, Table
from koffline.errors import ConfigError
from koffline.fitting import FitSettings, fit
from koffline.kernels import Gaussian, Laplacian
from koffline.objectives import KernelLoss, MemoryLoss
from koffline.replicas import StackedMLP
from koffline.steps import make_step
from tests.engine_problems import FORMS, SIZES, make_table

PLAN = ReplicaPlan((0.01, 0.03), (1, 2))
RATES = torch.tensor(PLAN.learning_rates, dtype=torch.float64)[:, None]


def networks(form="state"):
    return StackedMLP.initialise(SIZES[form], (1, 2), dtype=torch.float64)


class FeatureKernel:
    """ψψᵀ of the objective's own features."""

    def __init__(self, objective):
        self._objective = objective

    def gram(self, x):
        psi = self._objective.kernel.gram(x)
        return psi @ psi.mT

    def diagonal(self, x):
        return self.gram(x).diagonal(dim1=-2, dim2=-1)


def as_diagonal(weight, n):
    """(1 − w) V + w mean δ² as (1 − u) U + u mean δ²: V itself has a share 1/n of its diagonal."""
    return weight + (1.0 - weight) / n


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("memory", "weight"), [(0.0, 0.0), (0.9, 0.1), (0.99, 0.003)])
def test_on_full_batches_every_step_is_that_of_the_v_statistic(form, memory, weight):
    """What is remembered follows the parameters exactly where each step sees all rows."""
    table, network = make_table(form), networks(form)
    objective = MemoryLoss(Gaussian(1.0), memory, weight, features=64)
    plain = KernelLoss(FeatureKernel(objective), as_diagonal(weight, 40))
    source, other = (
        BatchSource(table, each.kernel, PLAN, BatchSchedule(PLAN, len(table), len(table)))
        for each in (objective, plain)
    )
    if table.draws > 1:  # continuations are drawn afresh, so that rows are not the same at every step
        return
    steps = [make_step(each, part, network, PLAN) for each, part in ((objective, source), (plain, other))]
    with torch.no_grad():
        for number in range(6):
            found, expected = (step.compute(number, network, None, RATES) for step in steps)
            torch.testing.assert_close(found[0], expected[0])
            torch.testing.assert_close(found[1].clone(), expected[1].clone())
            network = network.with_flat(network.flat - 0.05 * expected[1].clone())


def test_the_loss_has_no_bias_of_its_diagonal():
    """‖E ψδ‖² of a fixed network from mini-batches of eight: the V-statistic adds E k(x, x) δ² / 8."""
    generator, n = torch.Generator().manual_seed(0), 40_000
    x = torch.randn(n, 3, generator=generator, dtype=torch.float64)
    noise = 3.0 * torch.randn(n, generator=generator, dtype=torch.float64)
    table = Table(x, x, noise, torch.zeros(n, dtype=torch.float64), kernel_inputs=x)
    objective, network = MemoryLoss(Gaussian(1.0), 0.9, 0.0, features=64), networks()
    with torch.no_grad():
        residual = table.rewards - network.forward(x[None]).squeeze(-1)  # (R, N)
        truth = (residual @ objective.kernel.gram(x) / n).square().sum(dim=1)
        source = BatchSource(table, objective.kernel, PLAN, BatchSchedule(PLAN, n, 8))
        step = make_step(objective, source, network, PLAN)
        losses = torch.stack([step.compute(number, network, None, RATES)[0] for number in range(4000)])
    error = losses[100:].std(dim=0) / 3900**0.5 * (1.9 / 0.1) ** 0.5  # neighbours share what is remembered
    bias = residual.square().mean(dim=1) / 8
    assert (bias > 20 * error).all()
    assert ((losses[100:].mean(dim=0) - truth).abs() < 4 * error).all()


def test_noise_does_not_pull_the_values_as_it_does_in_small_batches():
    """Rewards of a constant, next values noisy: the memory finds the value, batches of four shrink it."""
    generator, n = torch.Generator().manual_seed(1), 4000
    x = torch.rand(n, 1, generator=generator, dtype=torch.float64)
    following = torch.rand(n, 1, generator=generator, dtype=torch.float64)  # V(s') is noise around E V
    reward = torch.sin(6.0 * x[:, 0])
    table = Table(x, following, reward, torch.full((n,), 0.5, dtype=torch.float64), kernel_inputs=x)
    truth = reward - reward.mean() + reward.mean() / 0.5
    errors = {}
    for name, objective in {
        "memory": MemoryLoss(Gaussian(0.3), 0.95, 0.0),
        "batch": KernelLoss(Gaussian(0.3)),
    }.items():
        network = StackedMLP.initialise((1, 32, 1), (1, 2), "tanh", dtype=torch.float64)
        found = fit(
            table, network, objective, ReplicaPlan((0.005,) * 2, (1, 2)), FitSettings(4000, 4)
        ).network
        with torch.no_grad():
            errors[name] = (found.forward(x[None]).squeeze(-1) - truth).square().mean()
    assert errors["memory"] < 0.5 * errors["batch"]


def test_features_of_the_laplacian_agree_with_its_kernel():
    x = torch.randn(50, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    psi = MemoryLoss(Laplacian(2.0), features=20_000).kernel.gram(x)
    torch.testing.assert_close(psi @ psi.mT, Laplacian(2.0).gram(x), atol=0.05, rtol=0.0)


@pytest.mark.parametrize("memory", [1.0, -0.1, float("nan")])
def test_impossible_memories_are_refused(memory):
    with pytest.raises(ConfigError, match="memory is"):
        MemoryLoss(Gaussian(1.0), memory)
