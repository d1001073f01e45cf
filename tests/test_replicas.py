import pytest
import torch
from torch import nn

from koffline.checkpoints import restored, state_of
from koffline.errors import ConfigError, DataError
from koffline.replicas import StackedAdam, StackedMLP
from tests.engine_problems import module_of
from tests.refusals import refused

SHAPES = [(2, 80, 1), (2, 1), (3, 7, 4), (3, 8, 6, 1), (3, 5, 20, 6, 18), (4, 2)]


def stack(sizes, seeds=(0, 1, 2), activation="relu", dtype=torch.float64):
    return StackedMLP.initialise(sizes, seeds, activation, dtype=dtype)


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize("activation", ["relu", "tanh"])
@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_forward_is_the_ordinary_network_and_the_pullback_its_autograd(sizes, activation):
    network = stack(sizes, activation=activation)
    own, shared, gradient = draw(3, 11, sizes[0]), draw(11, sizes[0]), draw(3, 11, sizes[-1], seed=1)
    flat = network.flat.clone().requires_grad_()
    expected = torch.autograd.grad((network.with_flat(flat).forward(own) * gradient).sum(), flat)[0]
    with torch.no_grad():
        for replica in range(3):
            module = module_of(network, replica)
            torch.testing.assert_close(network.forward(own)[replica], module(own[replica]))
            torch.testing.assert_close(network.forward(shared)[replica], module(shared))
            torch.testing.assert_close(network.features(shared)[replica], module[:-1](shared))
        for _ in range(2):  # the second time every buffer holds something
            outputs, pullback = network.forward_with_pullback(own)
            torch.testing.assert_close(outputs, network.with_flat(network.flat).forward(own))
            torch.testing.assert_close(pullback(gradient), expected, rtol=1e-10, atol=1e-12)


def test_a_replica_starts_the_same_whatever_its_company():
    alone, among = stack((3, 8, 2), seeds=[5]), stack((3, 8, 2), seeds=[4, 5, 6])
    assert torch.equal(alone.flat[0], among.flat[1])
    assert not torch.equal(among.flat[0], among.flat[1])
    assert torch.equal(among.select([1]).flat, alone.flat)
    assert torch.equal(stack((3, 8, 2), [5], dtype=torch.float32).flat, alone.flat.float())


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


def test_adam_is_adam_with_a_rate_for_each_replica():
    rates = torch.tensor([[1e-2], [1e-3]], dtype=torch.float64)
    options = {"betas": (0.8, 0.99)}
    flat = draw(2, 6)
    singles = [nn.Parameter(row.clone()) for row in flat]
    ordinary = [
        torch.optim.Adam([single], lr=rate, eps=1e-5, **options)
        for single, rate in zip(singles, rates.flatten().tolist(), strict=True)
    ]
    adam = StackedAdam(flat, epsilon=1e-5, **options)
    for step in range(20):
        gradient = draw(2, 6, seed=step) * 10.0 ** (step % 4 - 2)
        adam.update(flat, gradient, rates)
        if step == 9:  # continue from a saved state
            adam = restored(StackedAdam(flat, epsilon=1e-5, **options), state_of(adam))
        for single, optimiser, row in zip(singles, ordinary, gradient, strict=True):
            single.grad = row.clone()
            optimiser.step()
    expected = torch.stack([single.detach() for single in singles])
    torch.testing.assert_close(flat, expected, rtol=1e-12, atol=0.0)


@pytest.mark.parametrize(
    ("kind", "call", "words"),
    [
        (DataError, lambda: stack((3, 8, 2)).forward(torch.zeros(5, 4, dtype=torch.float64)), "have shape"),
        (ConfigError, lambda: stack((3, 8, 2), activation="gelu"), "activation is 'gelu'"),
    ],
)
def test_misfits_are_refused(kind, call, words):
    with refused(kind, words):
        call()
