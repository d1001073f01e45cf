import numpy as np
import pytest
import torch
from torch import nn

from koffline.errors import ConfigError, DataError
from koffline.replicas import StackedMLP
from koffline.stacked_adam import StackedAdam
from koffline.stacked_module import StackedModule
from tests.refusals import refused

MODULES = {"relu": nn.ReLU, "tanh": nn.Tanh, "silu": nn.SiLU}
SHAPES = [(2, 80, 1), (2, 1), (3, 7, 4), (3, 8, 6, 1), (3, 5, 20, 6, 18), (4, 2)]


def stack(sizes, seeds=(0, 1, 2), activation="relu", dtype=torch.float64, **options):
    return StackedMLP.initialise(sizes, seeds, activation, dtype=dtype, **options)


def module_of(network, replica):
    """The replica as an ordinary module, written down layer by layer."""
    parts = []
    for weight, bias in network.layers(network.flat):
        linear = nn.Linear(*weight.shape[1:]).to(weight.dtype)
        with torch.no_grad():
            linear.weight.copy_(weight[replica].T)
            linear.bias.copy_(bias[replica, 0])
        parts += [linear, MODULES[network.activation]()]
    return nn.Sequential(*parts[:-1])


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize("activation", list(MODULES))
@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_forward_is_the_ordinary_network(sizes, activation):
    network = stack(sizes, activation=activation)
    own, shared = draw(3, 11, sizes[0]), draw(11, sizes[0])
    with torch.no_grad():
        for replica in range(3):
            module = module_of(network, replica)
            torch.testing.assert_close(network.forward(own)[replica], module(own[replica]))
            torch.testing.assert_close(network.forward(shared)[replica], module(shared))
            torch.testing.assert_close(network.features(shared)[replica], module[:-1](shared))


@pytest.mark.parametrize("activation", list(MODULES))
@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_pullback_is_autograd(sizes, activation):
    scale = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    network = stack(sizes, activation=activation, scale=scale, offset=3.0)
    x, gradient = draw(3, 11, sizes[0]), draw(3, 11, sizes[-1], seed=1)
    flat = network.flat.clone().requires_grad_()
    expected = torch.autograd.grad((network.with_flat(flat).forward(x) * gradient).sum(), flat)[0]
    with torch.no_grad():
        for _ in range(2):  # the second time every buffer holds something
            outputs, pullback = network.forward_with_pullback(x)
            torch.testing.assert_close(outputs, network.with_flat(network.flat).forward(x))
            torch.testing.assert_close(pullback(gradient), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("sizes", [(2, 80, 1), (3, 8, 6, 4)], ids=str)
def test_general_path_agrees_with_the_fast_one(sizes):
    fast = stack(sizes)
    general = StackedModule([module_of(fast, replica) for replica in range(3)])
    for x in (draw(3, 9, sizes[0]), draw(9, sizes[0])):
        gradient = draw(3, 9, sizes[-1], seed=1)
        with torch.no_grad():
            torch.testing.assert_close(general.forward(x), fast.forward(x))
            outputs, pullback = general.forward_with_pullback(x)
            torch.testing.assert_close(outputs, fast.forward(x))
            found = pullback(gradient)
            expected = fast.forward_with_pullback(x)[1](gradient)
            moved = general.with_flat(general.flat - 0.1 * found).forward(x)
            torch.testing.assert_close(moved, fast.with_flat(fast.flat - 0.1 * expected).forward(x))


def test_general_path_takes_any_module_with_buffers():
    class Odd(nn.Module):
        def __init__(self, shift):
            super().__init__()
            self.weight = nn.Parameter(torch.tensor([2.0, -1.0]))
            self.register_buffer("shift", torch.tensor(shift))

        def forward(self, x):
            return (torch.sin(x * self.weight) + self.shift).sum(dim=1, keepdim=True)

    network = StackedModule([Odd(0.0), Odd(5.0)])
    x = draw(4, 2, dtype=torch.float32)
    torch.testing.assert_close(network.forward(x)[1], network.forward(x)[0] + 10.0)
    gradient = network.forward_with_pullback(x)[1](torch.ones(2, 4, 1))
    torch.testing.assert_close(gradient[0], (x * torch.cos(x * torch.tensor([2.0, -1.0]))).sum(dim=0))


def test_a_replica_starts_the_same_whatever_its_company():
    alone, among = stack((3, 8, 2), seeds=[5]), stack((3, 8, 2), seeds=[4, 5, 6])
    assert torch.equal(alone.flat[0], among.flat[1])
    assert not torch.equal(among.flat[0], among.flat[1])
    assert torch.equal(stack((3, 8, 2), [5], dtype=torch.float32).flat, alone.flat.float())
    bounds = [part.abs().max().item() for layer in alone.layers(alone.flat) for part in layer]
    assert max(bounds[:2]) <= 1 / np.sqrt(3) < 1.5 * max(bounds[:2])
    assert max(bounds[2:]) <= 1 / np.sqrt(8) < 1.5 * max(bounds[2:])


def test_outputs_stay_when_the_network_is_used_again():
    network = stack((3, 8, 2))
    with torch.no_grad():
        first, features = network.forward(draw(5, 3)), network.features(draw(5, 3))
        before, features_before = first.clone(), features.clone()
        network.forward(draw(5, 3, seed=1))
        network.features(draw(5, 3, seed=1))
        network.forward_with_pullback(draw(5, 3, seed=2))
    assert torch.equal(first, before)
    assert torch.equal(features, features_before)


def test_scale_and_offset_place_the_outputs():
    plain = stack((3, 8, 2))
    offset = torch.tensor([10.0, 20.0, 30.0], dtype=torch.float64)
    placed = StackedMLP(plain.sizes, plain.flat, scale=3.0, offset=offset)
    x = draw(5, 3)
    torch.testing.assert_close(placed.forward(x), 3.0 * plain.forward(x) + offset[:, None, None])
    chosen = placed.select([2, 0])
    torch.testing.assert_close(chosen.forward(x), placed.forward(x)[[2, 0]])
    assert chosen.replicas == 2


def test_state_dict_round_trip(tmp_path):
    network = stack((3, 8, 2), activation="tanh", offset=torch.tensor([1.0, 2.0, 3.0]))
    torch.save(network.state_dict(), tmp_path / "network.pt")
    again = StackedMLP.from_state_dict(torch.load(tmp_path / "network.pt", weights_only=True))
    x = draw(5, 3)
    assert torch.equal(again.forward(x), network.forward(x))


def test_adam_is_adam_with_a_rate_for_each_replica():
    rates = torch.tensor([[1e-2], [1e-3]], dtype=torch.float64)
    flat = draw(2, 6)
    singles = [nn.Parameter(row.clone()) for row in flat]
    ordinary = [
        torch.optim.Adam([single], lr=rate, betas=(0.8, 0.99), eps=1e-5)
        for single, rate in zip(singles, rates.flatten().tolist(), strict=True)
    ]
    adam = StackedAdam(flat, betas=(0.8, 0.99), epsilon=1e-5)
    for step in range(20):
        gradient = draw(2, 6, seed=step) * 10.0 ** (step % 4 - 2)
        adam.update(flat, gradient, rates)
        if step == 9:  # continue from a saved state
            state = {
                name: value.clone() if torch.is_tensor(value) else value
                for name, value in adam.state_dict().items()
            }
            adam = StackedAdam(flat, betas=(0.8, 0.99), epsilon=1e-5)
            adam.load_state_dict(state)
        for single, optimiser, row in zip(singles, ordinary, gradient, strict=True):
            single.grad = row.clone()
            optimiser.step()
    torch.testing.assert_close(
        flat, torch.stack([single.detach() for single in singles]), rtol=1e-12, atol=0.0
    )


def test_misfits_are_refused():
    network = stack((3, 8, 2))
    with refused(DataError, "network inputs have shape"):
        network.forward(torch.zeros(5, 4, dtype=torch.float64))
    with refused(DataError, "have 2 replicas"):
        network.forward(torch.zeros(2, 5, 3, dtype=torch.float64))
    with pytest.raises(ConfigError, match="activation is 'gelu'"):
        stack((3, 8, 2), activation="gelu")
    with pytest.raises(ConfigError, match="need"):
        StackedMLP((3, 8, 2), torch.zeros(2, 5))
    with pytest.raises(ConfigError, match="sizes is"):
        StackedMLP((3,), torch.zeros(2, 5))
    with pytest.raises(ConfigError, match="seeds is empty"):
        stack((3, 8, 2), seeds=[])
    with pytest.raises(ConfigError, match="offset has 2 numbers"):
        stack((3, 8, 2), offset=torch.zeros(2))
    with pytest.raises(ConfigError, match="betas"):
        StackedAdam(torch.zeros(1, 1), betas=(1.0, 0.9))
    with pytest.raises(ConfigError, match="modules is empty"):
        StackedModule([])
