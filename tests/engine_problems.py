"""Small tables of every form the engine knows, and its objectives."""

import torch
from torch import Tensor, nn

from koffline import objectives
from koffline.batches import Table
from koffline.kernels import Gaussian, InverseMultiquadric
from koffline.replicas import ReplicaPlan

OBJECTIVES = {
    "kloss": objectives.KernelLoss(Gaussian(1.0)),
    "kloss_u": objectives.KernelLoss(Gaussian(1.0), 0.0),
    "kloss_multiquadric": objectives.KernelLoss(InverseMultiquadric(1.0), 0.1),
    "rg": objectives.ResidualGradient(),
    "td0": objectives.TemporalDifference(),
    "fvi": objectives.FittedIteration(),
    "fvi_steps": objectives.FittedIteration(objectives.CopyTarget(3)),
    "fqe": objectives.fitted_q(0.2),
    "fqe_bounded": objectives.fitted_q(0.2, (-0.05, 0.1)),
}
FORMS = ("state", "discrete", "continuous")
SIZES = {"state": (3, 12, 1), "discrete": (3, 8, 6, 4), "continuous": (5, 12, 1)}
PLANS = {
    "own": ReplicaPlan((1e-3,) * 4, (1, 2, 3, 4)),
    "shared": ReplicaPlan((1e-3,) * 4, (1, 1, 2, 2)),
    "one_group": ReplicaPlan((1e-3,) * 4, (1, 1, 1, 1)),
    "uneven": ReplicaPlan((1e-3,) * 4, (1, 2, 2, 2)),
    "crossed": ReplicaPlan((1e-3,) * 4, (1, 2, 1, 2)),
}


def make_table(form: str, rows: int = 40, dtype: torch.dtype = torch.float64) -> Table:
    """Random rows; four discrete actions, or two-dimensional ones with three
    continuations.
    """
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    readout = next_readout = None
    inputs = draw(rows, 3)
    following = draw(rows, 3)
    if form == "discrete":
        actions = torch.randint(4, (rows,), generator=generator)
        readout = torch.nn.functional.one_hot(actions, 4).to(dtype)
        next_readout = torch.softmax(draw(rows, 4), dim=1)
    elif form == "continuous":
        inputs = torch.cat((inputs, draw(rows, 2)), dim=1)
        following = torch.cat(
            (following[:, None].expand(rows, 3, 3), draw(rows, 3, 2)), dim=2
        ).contiguous()
    discounts = torch.full((rows,), 0.9, dtype=dtype)
    discounts[::7] = 0.0
    return Table(
        inputs, following, draw(rows), discounts, readout, next_readout, inputs.clone()
    )


def reference_loss(objective, reward, discount, value, next_value, gram=None) -> Tensor:
    """The loss as anyone would write it for autograd, (R,): every stopped gradient is
    visible.
    """
    if objective.next_from != "network":
        next_value = next_value.detach()
    if getattr(objective, "next_bounds", None) is not None:
        next_value = next_value.clamp(*objective.next_bounds)
    residual = reward + discount * next_value - value
    if gram is None:
        return residual.square().mean(dim=-1)
    rows = residual.shape[-1]
    weight = 1.0 / rows if objective.diag_weight is None else objective.diag_weight
    pairs = gram * residual.unsqueeze(-1) * residual.unsqueeze(-2)
    diagonal = pairs.diagonal(dim1=-2, dim2=-1).sum(dim=-1)
    off = pairs.sum(dim=(-2, -1)) - diagonal
    return (1.0 - weight) * off / (rows * (rows - 1)) + weight * diagonal / rows


def module_of(network, replica) -> nn.Sequential:
    """A replica as an ordinary module, written down layer by layer."""
    parts: list[nn.Module] = []
    for weight, bias in network.layers(network.flat):
        linear = nn.Linear(*weight.shape[1:]).to(weight.dtype)
        with torch.no_grad():
            linear.weight.copy_(weight[replica].T)
            linear.bias.copy_(bias[replica, 0])
        parts += [linear, nn.ReLU() if network.activation == "relu" else nn.Tanh()]
    return nn.Sequential(*parts[:-1])
