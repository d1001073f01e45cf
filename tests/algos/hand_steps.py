"""Steps of plain SGD by autograd, in float64: nothing but the networks is the
package's.
"""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from koffline.kernels import Gaussian, Laplacian
from tests import reference
from tests.algos.makers import ACTIONS, COLUMNS, d3rlpy, make

ROWS = 7
GAMMA = 0.9
RATE = 0.05
SGD = d3rlpy.optimizers.SGDFactory
WEIGHTS = (None, 0.0, 0.3, 1.0)


def batch_of(discrete: bool, seed: int = 0, length: int | None = None):
    """Rows, or paths of at most `length` steps, which is 3."""
    lead = (ROWS,)
    if length is not None:
        lead = (ROWS, length)
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    if discrete:
        actions = torch.randint(0, ACTIONS, (*lead, 1), generator=generator).double()
    else:
        uniform = torch.rand(*lead, ACTIONS, generator=generator, dtype=torch.float64)
        actions = uniform * 2 - 1
    next_actions = actions
    if length is not None:
        next_actions = actions[:, 0]
    following = normal(ROWS, COLUMNS)
    lengths = torch.randint(1, 4, (ROWS, 1), generator=generator).double()
    return d3rlpy.torch_utility.TorchMiniBatch(
        observations=normal(*lead, COLUMNS),
        actions=actions,
        rewards=normal(ROWS, length or 1),
        next_observations=following,
        next_actions=next_actions,
        returns_to_go=torch.zeros(ROWS, 1, dtype=torch.float64),
        terminals=(torch.rand(ROWS, 1, generator=generator) < 0.3).double(),
        intervals=lengths,
        device="cpu:0",
        numpy_batch=SimpleNamespace(next_observations=following.numpy()),
    )


def in_float64(name: str, target=None, diag_weight=None, **settings):
    settings["diag_weight"] = diag_weight
    factories = {
        "critic_optim_factory": SGD(),
        "actor_optim_factory": SGD(),
        "critic_learning_rate": RATE,
    }
    if name in ("KLossDQN", "KLossDiscreteCQL", "KLossFQE", "DiscreteKLossFQE"):
        factories = {"optim_factory": SGD(), "learning_rate": RATE}
    algo = make(
        name,
        target,
        build=True,
        gamma=GAMMA,
        bandwidth=0.8,
        normalise=False,
        **factories,
        **settings,
    )
    for module in algo.impl.modules.get_torch_modules().values():
        module.double()
    if hasattr(algo.impl.modules, "log_temp"):  # was rounded to float32
        with torch.no_grad():
            next(algo.impl.modules.log_temp.parameters()).fill_(
                math.log(algo.config.initial_temperature)
            )
    return algo


def hand_gram(
    batch, kernel: str, bandwidth: float, discrete: bool, action_kernel: str = "joint"
):
    """Two loops over rows."""
    rows = batch.observations.numpy()
    actions = batch.actions.numpy()
    if action_kernel == "joint":
        acted = actions
        if discrete:
            acted = np.eye(ACTIONS)[actions[:, 0].astype(int)]
        rows = np.concatenate([rows, acted], axis=1)
    function = {"gaussian": reference.gaussian, "laplacian": reference.laplacian}[
        kernel
    ]
    gram = reference.gram(lambda x, y: function(x, y, bandwidth), rows, rows)
    if action_kernel == "indicator":
        gram = np.where(actions == actions.T, gram, 0.0)
    return torch.as_tensor(gram)


def hand_loss(
    residual: torch.Tensor, gram: torch.Tensor, weight: float | None
) -> torch.Tensor:
    """The two sums of the loss, one term at a time."""
    if weight is None:
        weight = 1.0 / ROWS
    off = reference.u_statistic(residual, gram)
    diagonal = reference.diagonal_mean(residual, gram)
    return (1.0 - weight) * off + weight * diagonal


def assert_actor_step(algo, batch, loss: torch.Tensor) -> None:
    """One update of the actor is a step on the hand-written loss."""
    expected = stepped(algo.impl.policy, loss)
    torch.manual_seed(9)
    algo.impl.update_actor(batch)
    assert_stepped(algo.impl.policy, expected)


def stepped(module, loss: torch.Tensor) -> list[torch.Tensor]:
    """What plain SGD makes of the module's parameters."""
    held = list(module.parameters())
    gradients = torch.autograd.grad(loss, held, retain_graph=True, allow_unused=True)
    return [
        (p - RATE * g).detach() if g is not None else p.detach().clone()
        for p, g in zip(held, gradients, strict=True)
    ]


def assert_stepped(
    module, expected: list[torch.Tensor], rtol: float = 1e-9, atol: float = 1e-11
) -> None:
    for parameter, wanted in zip(module.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.detach(), wanted, rtol=rtol, atol=atol)


def critics(algo, observations, actions=None) -> torch.Tensor:
    q_funcs = algo.impl.q_function
    if actions is None:
        return torch.stack([q(observations).q_value for q in q_funcs])
    return torch.stack([q(observations, actions).q_value[:, 0] for q in q_funcs])


def row_values(values: torch.Tensor, batch) -> torch.Tensor:
    return values[:, torch.arange(ROWS), batch.actions[:, 0].long()]


def update(algo, batch, critic_only: bool = True):
    algo.impl.modules.kernel.bandwidth.fill_(0.8)
    algo.impl.modules.kernel.inverse_scale.fill_(1.0 / 0.8)
    torch.manual_seed(9)
    if critic_only:
        return algo.impl.update_critic(batch)
    return algo.impl.inner_update(batch, 0)


def bellman_residual(
    batch, next_value: torch.Tensor, value: torch.Tensor
) -> torch.Tensor:
    discounts = GAMMA ** batch.intervals[:, 0] * (1.0 - batch.terminals[:, 0])
    return batch.rewards[:, 0] + discounts * next_value - value


def squashed(output, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Actions of a squashed Gaussian and their log-density."""
    raw = output.mu + output.logstd.exp() * noise
    density = torch.distributions.Normal(output.mu, output.logstd.exp()).log_prob(raw)
    return torch.tanh(raw), (density - torch.log(1.0 - torch.tanh(raw).square())).sum(
        dim=-1
    )


def assert_critic_step(
    algo,
    batch,
    residual,
    extra=0.0,
    kernel="laplacian",
    action_kernel="joint",
    critic_only=True,
    **close,
) -> None:
    """One update of the critics is a step on the hand-written loss of each residual,
    plus `extra`.
    """
    discrete = bool(algo.impl.modules.kernel.n_actions)
    gram = hand_gram(batch, kernel, 0.8, discrete, action_kernel)
    loss = (
        sum(hand_loss(row, gram, algo.config.diag_weight) for row in residual) + extra
    )
    expected = stepped(algo.impl.q_function, loss)
    metrics = update(algo, batch, critic_only)
    assert metrics["critic_loss"] == pytest.approx(
        float(loss.detach()), rel=1e-5, abs=1e-9
    )
    # ReBRAC says no more than d3rlpy's does
    if not hasattr(algo.config, "critic_beta"):
        assert metrics["bellman_error"] == pytest.approx(
            float(residual.detach().square().mean()), rel=1e-5
        )
    assert_stepped(algo.impl.q_function, expected, **close)


def put(algo, values) -> None:
    with torch.no_grad():
        for parameter, value in zip(
            algo.impl.q_function.parameters(), values, strict=True
        ):
            parameter.copy_(value)


def features(batch, kernel: str, action_kernel: str) -> torch.Tensor:
    rows = batch.observations
    acted = torch.eye(ACTIONS, dtype=torch.float64)[batch.actions[:, 0].long()]
    if action_kernel == "joint":
        rows = torch.cat((rows, acted), dim=1)
    base = {"gaussian": Gaussian(1.0), "laplacian": Laplacian(1.0)}[kernel]
    phases = (
        rows
        @ base.draw_frequencies(rows.shape[1], 250, torch.Generator().manual_seed(0))
        / 0.8
    )
    psi = torch.cat((phases.cos(), phases.sin()), dim=1) / 250**0.5
    if action_kernel == "joint":
        return psi
    return torch.einsum("nf,na->naf", psi, acted).flatten(1)
