import pytest
import torch

from koffline.batches import BatchSchedule, ReplicaPlan, Table
from koffline.errors import ConfigError
from koffline.kernels import Gaussian
from koffline.objectives import KernelLoss, ResidualGradient
from koffline.replicas import StackedMLP
from koffline.stacked_module import StackedModule
from koffline.steps import BatchSource, StepComputer
from tests.engine_problems import FORMS, OBJECTIVES, SIZES, draws_of, make_table
from tests.test_replicas import module_of

PLANS = {
    "own": ReplicaPlan((1e-3,) * 4, (1, 2, 3, 4)),
    "shared": ReplicaPlan((1e-3,) * 4, (1, 1, 2, 2)),
    "one_group": ReplicaPlan((1e-3,) * 4, (1, 1, 1, 1)),
    "uneven": ReplicaPlan((1e-3,) * 4, (1, 2, 2, 2)),
    "crossed": ReplicaPlan((1e-3,) * 4, (1, 2, 1, 2)),
}


def computer_of(table, objective, plan, schedule, draws="one"):
    return StepComputer(BatchSource(table, objective.kernel, plan, schedule, draws), objective)


def plain_step(table, objective, form, rows, picks, network, target, replica):
    """Loss and gradient of one replica by autograd, with nothing packed, stacked or shared."""
    flat = network.flat[replica : replica + 1].clone().requires_grad_()
    trained = network.with_flat(flat)
    following = trained if target is None else target.with_flat(target.flat[replica : replica + 1])

    def read(outputs, readout):
        return outputs.squeeze(-1) if readout is None else (outputs * readout[rows]).sum(dim=-1)

    value = read(trained.forward(table.inputs[rows]), table.readout)
    if not form.startswith("continuous"):
        next_value = read(following.forward(table.next_inputs[rows]), table.next_readout)
    elif form == "continuous_all":
        drawn = [following.forward(table.next_inputs[rows, draw])[..., 0] for draw in range(table.draws)]
        next_value = sum(drawn) / table.draws
    else:
        next_value = following.forward(table.next_inputs[rows, picks])[..., 0]
    gram = None if objective.kernel is None else objective.kernel.gram(table.kernel_inputs[rows])
    loss = objective.loss(table.rewards[rows], table.discounts[rows], value, next_value, gram)
    return loss.detach(), torch.autograd.grad(loss.sum(), flat)[0]


@pytest.mark.parametrize("plan", list(PLANS))
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["kloss", "kloss_u", "kloss_multiquadric", "rg", "td0", "fqe"])
def test_stacked_gradients_are_autograds(name, form, plan):
    table, objective, plan = make_table(form), OBJECTIVES[name], PLANS[plan]
    network = StackedMLP.initialise(SIZES[form], range(4), dtype=torch.float64, scale=2.0, offset=1.0)
    target = None
    if objective.next_from == "target":
        target = StackedMLP.initialise(SIZES[form], range(10, 14), dtype=torch.float64, offset=1.0)
    schedule = BatchSchedule(plan, len(table), 9)
    computer = computer_of(table, objective, plan, schedule, draws_of(form))
    for step in (0, 5):
        with torch.no_grad():
            loss, gradient = computer.compute(step, network, target)
        for replica, group in enumerate(plan.group_of):
            rows, picks = schedule.rows(step)[group], schedule.draws(step, table.draws)[group]
            expected = plain_step(table, objective, form, rows, picks, network, target, replica)
            torch.testing.assert_close(loss[replica : replica + 1], expected[0], rtol=1e-10, atol=1e-13)
            torch.testing.assert_close(gradient[replica : replica + 1], expected[1], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["kloss", "td0"])
def test_any_module_takes_the_same_step(name):
    table, objective, plan = make_table("state"), OBJECTIVES[name], PLANS["shared"]
    fast = StackedMLP.initialise(SIZES["state"], range(4), dtype=torch.float64)
    general = StackedModule([module_of(fast, replica) for replica in range(4)])
    computer = computer_of(table, objective, plan, BatchSchedule(plan, len(table), 9))
    with torch.no_grad():
        loss, gradient = computer.compute(0, fast, None)
        other_loss, other = computer.compute(0, general, None)
        torch.testing.assert_close(loss, other_loss)
        moved = fast.with_flat(fast.flat - 0.1 * gradient).forward(table.inputs)
        torch.testing.assert_close(general.with_flat(general.flat - 0.1 * other).forward(table.inputs), moved)


def test_single_precision_follows_double():
    plan = PLANS["shared"]
    results = []
    for dtype in (torch.float32, torch.float64):
        table = make_table("state", rows=400, dtype=dtype)
        network = StackedMLP.initialise((3, 12, 1), range(4), dtype=dtype)
        computer = computer_of(table, OBJECTIVES["kloss"], plan, BatchSchedule(plan, 400, 100))
        with torch.no_grad():
            results.append([part.double() for part in computer.compute(0, network, None)])
    for single, double in zip(*results, strict=True):
        torch.testing.assert_close(single, double, rtol=1e-4, atol=1e-6)


def test_a_kernel_far_narrower_than_the_data_is_the_residual_gradient():
    table = make_table("state", dtype=torch.float32)
    plan = PLANS["own"]
    schedule = BatchSchedule(plan, len(table), 9)
    network = StackedMLP.initialise((3, 12, 1), range(4))
    narrow = computer_of(table, KernelLoss(Gaussian(1e-3), 1.0 / 9.0), plan, schedule)
    plain = computer_of(table, ResidualGradient(), plan, schedule)
    with torch.no_grad():
        loss, gradient = (part.clone() for part in narrow.compute(0, network, None))
        expected_loss, expected = plain.compute(0, network, None)
    torch.testing.assert_close(9.0 * loss, expected_loss, rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(9.0 * gradient, expected, rtol=1e-3, atol=1e-5)


def test_a_kernel_needs_its_columns():
    table = make_table("state")
    bare = Table(table.inputs, table.next_inputs, table.rewards, table.discounts)
    plan = PLANS["own"]
    with pytest.raises(ConfigError, match="no kernel_inputs"):
        computer_of(bare, OBJECTIVES["kloss"], plan, BatchSchedule(plan, 40, 9))
