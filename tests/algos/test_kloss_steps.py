"""One update equals a gradient step written out by hand with autograd, in float64, per family of algorithms.

The hand-written steps share nothing with the package but the networks: kernels, residuals and losses are
spelled out here, with plain SGD.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tests.algos.makers import ACTIONS, COLUMNS, d3rlpy, make, make_target

ROWS, GAMMA, RATE = 7, 0.9, 0.05
SGD = d3rlpy.optimizers.SGDFactory
WEIGHTS = (None, 0.0, 0.3, 1.0)


def batch_of(discrete: bool, seed: int = 0, intervals: bool = True):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    actions = (
        torch.randint(0, ACTIONS, (ROWS, 1), generator=generator).double()
        if discrete
        else torch.rand(ROWS, ACTIONS, generator=generator, dtype=torch.float64) * 2 - 1
    )
    lengths = torch.randint(1, 4, (ROWS, 1), generator=generator).double()
    return d3rlpy.torch_utility.TorchMiniBatch(
        observations=normal(ROWS, COLUMNS),
        actions=actions,
        rewards=normal(ROWS, 1),
        next_observations=normal(ROWS, COLUMNS),
        next_actions=actions,
        returns_to_go=torch.zeros(ROWS, 1, dtype=torch.float64),
        terminals=(torch.rand(ROWS, 1, generator=generator) < 0.3).double(),
        intervals=lengths if intervals else torch.ones(ROWS, 1, dtype=torch.float64),
        device="cpu:0",
    )


def in_float64(name: str, target=None, diag_weight=None, **settings):
    settings["diag_weight"] = diag_weight
    factories = {"critic_optim_factory": SGD(), "actor_optim_factory": SGD(), "critic_learning_rate": RATE}
    if name in ("KLossDQN", "KLossDiscreteCQL", "KLossFQE", "DiscreteKLossFQE"):
        factories = {"optim_factory": SGD(), "learning_rate": RATE}
    algo = make(
        name, target, build=True, gamma=GAMMA, bandwidth=0.8, normalise=False, **factories, **settings
    )
    for module in algo.impl.modules.get_torch_modules().values():
        module.double()
    if hasattr(algo.impl.modules, "log_temp"):  # was rounded to float32
        with torch.no_grad():
            next(algo.impl.modules.log_temp.parameters()).fill_(math.log(algo.config.initial_temperature))
    return algo


def hand_gram(batch, kernel: str, bandwidth: float, discrete: bool, action_kernel: str = "joint"):
    """Two loops over rows."""
    rows = batch.observations.numpy()
    actions = batch.actions.numpy()
    acted = np.eye(ACTIONS)[actions[:, 0].astype(int)] if discrete else actions
    if action_kernel == "joint":
        rows = np.concatenate([rows, acted], axis=1)
    gram = np.zeros((ROWS, ROWS))
    for i in range(ROWS):
        for j in range(ROWS):
            difference = rows[i] - rows[j]
            if kernel == "gaussian":
                gram[i, j] = math.exp(-(difference @ difference) / bandwidth**2)
            else:
                gram[i, j] = math.exp(-np.abs(difference).sum() / bandwidth)
            if action_kernel == "indicator" and actions[i, 0] != actions[j, 0]:
                gram[i, j] = 0.0
    return torch.as_tensor(gram)


def hand_loss(residual: torch.Tensor, gram: torch.Tensor, weight: float | None) -> torch.Tensor:
    """The two sums of the loss, one term at a time."""
    weight = 1.0 / ROWS if weight is None else weight
    total = torch.zeros((), dtype=torch.float64)
    for i in range(ROWS):
        for j in range(ROWS):
            share = weight / ROWS if i == j else (1.0 - weight) / (ROWS * (ROWS - 1))
            total = total + share * gram[i, j] * residual[i] * residual[j]
    return total


def hand_discount(batch) -> torch.Tensor:
    return (GAMMA ** batch.intervals[:, 0]) * (1.0 - batch.terminals[:, 0])


def stepped(module, loss: torch.Tensor) -> list[torch.Tensor]:
    """What plain SGD makes of the module's parameters."""
    held = list(module.parameters())
    gradients = torch.autograd.grad(loss, held, retain_graph=True, allow_unused=True)
    return [
        (p - RATE * g).detach() if g is not None else p.detach().clone()
        for p, g in zip(held, gradients, strict=True)
    ]


def assert_stepped(module, expected: list[torch.Tensor], rtol: float = 1e-9, atol: float = 1e-11) -> None:
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
    return algo.impl.update_critic(batch) if critic_only else algo.impl.inner_update(batch, 0)


@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("action_kernel", ["joint", "indicator", "none"])
def test_dqn(weight: float | None, action_kernel: str) -> None:
    algo = in_float64(
        "KLossDQN", diag_weight=weight, action_kernel=action_kernel, kernel="gaussian", temperature=0.0
    )
    batch = batch_of(discrete=True)
    value = row_values(critics(algo, batch.observations), batch)[0]
    next_value = critics(algo, batch.next_observations)[0].max(dim=1).values
    residual = batch.rewards[:, 0] + hand_discount(batch) * next_value - value
    loss = hand_loss(residual, hand_gram(batch, "gaussian", 0.8, True, action_kernel), weight)
    expected = stepped(algo.impl.q_function, loss)
    metrics = update(algo, batch)
    assert metrics["critic_loss"] == pytest.approx(float(loss.detach()), rel=1e-9, abs=1e-12)
    assert metrics["bellman_error"] == pytest.approx(float(residual.detach().square().mean()), rel=1e-9)
    assert_stepped(algo.impl.q_function, expected)


@pytest.mark.parametrize("backup", ["own", "min", "mean"])
def test_soft_dqn_with_an_ensemble(backup: str) -> None:
    algo = in_float64("KLossDQN", temperature=0.4, n_critics=3, backup=backup)
    batch = batch_of(discrete=True)
    next_values = critics(algo, batch.next_observations)
    shared = {
        "own": next_values,
        "min": next_values.min(dim=0).values[None],
        "mean": next_values.mean(0)[None],
    }
    soft = 0.4 * torch.log(torch.exp(shared[backup] / 0.4).sum(dim=2))
    value = row_values(critics(algo, batch.observations), batch)
    residual = batch.rewards[:, 0] + hand_discount(batch) * soft - value
    gram = hand_gram(batch, "laplacian", 0.8, True)
    loss = sum(hand_loss(row, gram, None) for row in residual)
    expected = stepped(algo.impl.q_function, loss)
    update(algo, batch)
    assert_stepped(algo.impl.q_function, expected)


def test_discrete_cql() -> None:
    algo = in_float64("KLossDiscreteCQL", alpha=0.7, n_critics=2, backup="own", temperature=0.0)
    batch = batch_of(discrete=True)
    values = critics(algo, batch.observations)
    value = row_values(values, batch)
    residual = (
        batch.rewards[:, 0]
        + hand_discount(batch) * critics(algo, batch.next_observations).max(dim=2).values
        - value
    )
    gram = hand_gram(batch, "laplacian", 0.8, True)
    gap = torch.log(torch.exp(values).sum(dim=2)) - value
    loss = sum(hand_loss(row, gram, None) for row in residual) + 0.7 * gap.mean(dim=1).sum()
    expected = stepped(algo.impl.q_function, loss)
    update(algo, batch)
    assert_stepped(algo.impl.q_function, expected)


def test_discrete_fqe_takes_the_expectation_over_a_stochastic_policy() -> None:
    target = make_target(discrete=True)
    algo = in_float64("DiscreteKLossFQE", target)
    batch = batch_of(discrete=True)
    target.impl.policy.float()
    with torch.no_grad():
        logits = target.impl.policy._fc(target.impl.policy._encoder(batch.next_observations.float()))
    probabilities = torch.softmax(logits, dim=1).double()
    assert float(probabilities.max()) < 0.99, "the policy is to be stochastic"
    next_value = (probabilities * critics(algo, batch.next_observations)[0]).sum(dim=1)
    value = row_values(critics(algo, batch.observations), batch)[0]
    residual = batch.rewards[:, 0] + hand_discount(batch) * next_value - value
    loss = hand_loss(residual, hand_gram(batch, "laplacian", 0.8, True), None)
    expected = stepped(algo.impl.q_function, loss)
    update(algo, batch)
    assert_stepped(algo.impl.q_function, expected, rtol=1e-5, atol=1e-7)  # the policy is float32


def test_continuous_fqe_draws_from_a_stochastic_policy() -> None:
    target = make_target(discrete=False)
    algo = in_float64("KLossFQE", target)
    target.impl.policy.float()
    batch = batch_of(discrete=False)
    with torch.no_grad():
        output = target.impl.policy(batch.next_observations.float())
        torch.manual_seed(9)
        noise = torch.randn_like(output.mu)
        drawn = torch.tanh(output.mu + output.logstd.exp() * noise).double()
    value = critics(algo, batch.observations, batch.actions)[0]
    residual = (
        batch.rewards[:, 0] + hand_discount(batch) * critics(algo, batch.next_observations, drawn)[0] - value
    )
    loss = hand_loss(residual, hand_gram(batch, "laplacian", 0.8, False), None)
    expected = stepped(algo.impl.q_function, loss)
    update(algo, batch)
    assert_stepped(algo.impl.q_function, expected, rtol=1e-5, atol=1e-7)  # the draw is float32


@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("kernel", ["gaussian", "laplacian"])
def test_sac_critic(weight: float | None, kernel: str) -> None:
    algo = in_float64(
        "KLossSAC",
        diag_weight=weight,
        kernel=kernel,
        backup="min",
        initial_temperature=0.3,
        conservative_weight=0.0,
    )
    batch = batch_of(discrete=False)
    policy = algo.impl.policy(batch.next_observations)
    torch.manual_seed(9)
    noise = torch.randn_like(policy.mu)
    raw = (policy.mu + policy.logstd.exp() * noise).detach()
    log_probability = (
        torch.distributions.Normal(policy.mu, policy.logstd.exp()).log_prob(raw)
        - torch.log(1.0 - torch.tanh(raw).square())
    ).sum(dim=1)
    next_value = critics(algo, batch.next_observations, torch.tanh(raw)).min(dim=0).values
    target = next_value - 0.3 * log_probability.detach()
    residual = (
        batch.rewards[:, 0] + hand_discount(batch) * target - critics(algo, batch.observations, batch.actions)
    )
    gram = hand_gram(batch, kernel, 0.8, False)
    loss = sum(hand_loss(row, gram, weight) for row in residual)
    expected = stepped(algo.impl.q_function, loss)
    update(algo, batch)
    assert_stepped(algo.impl.q_function, expected)


def test_sac_holds_back_the_values_of_its_own_actions() -> None:
    algo = in_float64("KLossSAC", initial_temperature=0.3, conservative_weight=0.7)
    batch = batch_of(discrete=False)
    both = torch.cat([batch.observations, batch.next_observations])
    policy = algo.impl.policy(both)
    torch.manual_seed(9)
    raw = (policy.mu + policy.logstd.exp() * torch.randn_like(policy.mu)).detach()
    density = torch.distributions.Normal(policy.mu, policy.logstd.exp()).log_prob(raw)
    log_probability = (density - torch.log(1.0 - torch.tanh(raw).square())).sum(dim=1).detach()
    drawn = torch.tanh(raw)
    value = critics(algo, batch.observations, batch.actions)
    next_value = critics(algo, batch.next_observations, drawn[ROWS:]) - 0.3 * log_probability[ROWS:]
    residual = batch.rewards[:, 0] + hand_discount(batch) * next_value - value
    gram = hand_gram(batch, "laplacian", 0.8, False)
    gap = (critics(algo, batch.observations, drawn[:ROWS]) - value).mean(dim=1).sum()
    loss = sum(hand_loss(row, gram, None) for row in residual) + 0.7 * gap
    expected = stepped(algo.impl.q_function, loss)
    update(algo, batch)
    assert_stepped(algo.impl.q_function, expected)


def test_sac_actor() -> None:
    algo = in_float64("KLossSAC", initial_temperature=0.3, actor_learning_rate=RATE, temp_learning_rate=0.0)
    batch = batch_of(discrete=False)
    torch.manual_seed(9)
    policy = algo.impl.policy(batch.observations)
    noise = torch.randn_like(policy.mu)
    raw = policy.mu + policy.logstd.exp() * noise
    density = torch.distributions.Normal(policy.mu, policy.logstd.exp()).log_prob(raw)
    log_probability = (density - torch.log(1.0 - torch.tanh(raw).square())).sum(dim=1)
    value = critics(algo, batch.observations, torch.tanh(raw)).min(dim=0).values
    expected = stepped(algo.impl.policy, (0.3 * log_probability - value).mean())
    torch.manual_seed(9)
    algo.impl.update_actor(batch)
    assert_stepped(algo.impl.policy, expected)


def test_discrete_sac_critic_and_actor() -> None:
    algo = in_float64(
        "KLossDiscreteSAC",
        backup="min",
        initial_temperature=0.3,
        actor_learning_rate=RATE,
        temp_learning_rate=0.0,
    )
    batch = batch_of(discrete=True)
    policy = algo.impl.policy

    def probabilities(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(policy._fc(policy._encoder(x)), dim=1)

    there = probabilities(batch.next_observations).detach()
    next_values = critics(algo, batch.next_observations).min(dim=0).values
    soft = (there * (next_values - 0.3 * torch.log(there))).sum(dim=1)
    value = row_values(critics(algo, batch.observations), batch)
    residual = batch.rewards[:, 0] + hand_discount(batch) * soft - value
    gram = hand_gram(batch, "laplacian", 0.8, True)
    expected = stepped(algo.impl.q_function, sum(hand_loss(row, gram, None) for row in residual))
    update(algo, batch)
    assert_stepped(algo.impl.q_function, expected)

    here = probabilities(batch.observations)
    lowest = critics(algo, batch.observations).min(dim=0).values.detach()
    actor_loss = (here * (0.3 * torch.log(here) - lowest)).sum(dim=1).mean()
    expected = stepped(policy, actor_loss)
    algo.impl.update_actor(batch)
    assert_stepped(policy, expected)


def test_td3_plus_bc_critic_and_actor() -> None:
    algo = in_float64("KLossTD3PlusBC", backup="mean", actor_learning_rate=RATE)
    batch = batch_of(discrete=False)
    torch.manual_seed(9)
    greedy = torch.tanh(algo.impl.policy(batch.next_observations).mu).detach()
    next_actions = (greedy + (0.2 * torch.randn_like(greedy)).clamp(-0.5, 0.5)).clamp(-1.0, 1.0)
    next_value = critics(algo, batch.next_observations, next_actions).mean(dim=0)
    value = critics(algo, batch.observations, batch.actions)
    residual = batch.rewards[:, 0] + hand_discount(batch) * next_value - value
    gram = hand_gram(batch, "laplacian", 0.8, False)
    expected = stepped(algo.impl.q_function, sum(hand_loss(row, gram, None) for row in residual))
    update(algo, batch)
    assert_stepped(algo.impl.q_function, expected)

    actions = torch.tanh(algo.impl.policy(batch.observations).mu)
    value = critics(algo, batch.observations, actions)[0]
    loss = -2.5 * value.mean() / value.detach().abs().mean() + (batch.actions - actions).square().mean()
    expected = stepped(algo.impl.policy, loss)
    algo.impl.update_actor(batch)
    assert_stepped(algo.impl.policy, expected)


def test_iql_critic_and_value() -> None:
    algo = in_float64("KLossIQL", expectile=0.8)
    batch = batch_of(discrete=False)
    value_func = algo.impl.modules.value_func
    values = critics(algo, batch.observations, batch.actions)
    next_value = value_func(batch.next_observations)[:, 0].detach()
    residual = batch.rewards[:, 0] + hand_discount(batch) * next_value - values
    gram = hand_gram(batch, "laplacian", 0.8, False)
    expected_q = stepped(algo.impl.q_function, sum(hand_loss(row, gram, None) for row in residual))
    with torch.no_grad():
        for parameter in algo.impl.modules.slow_q_funcs.parameters():
            parameter.add_(0.05)
        slow = torch.stack(
            [q(batch.observations, batch.actions).q_value[:, 0] for q in algo.impl.modules.slow_q_funcs]
        )
    gap = slow.min(dim=0).values - value_func(batch.observations)[:, 0]
    weights = torch.where(gap > 0, 0.8, 0.2)
    expected_v = stepped(value_func, (weights * gap.square()).mean())
    update(algo, batch)
    assert_stepped(algo.impl.q_function, expected_q)
    assert_stepped(value_func, expected_v)


def test_continuous_cql_adds_the_gap_between_drawn_and_logged_actions() -> None:
    plain = in_float64("KLossCQL", conservative_weight=0.0)
    heavy = in_float64("KLossCQL", conservative_weight=2.0)
    batch = batch_of(discrete=False)
    free, bound = update(plain, batch), update(heavy, batch)
    assert bound["conservative_loss"] == pytest.approx(bound["critic_loss"] - free["critic_loss"], rel=1e-6)
    for _ in range(60):
        update(plain, batch)
        update(heavy, batch)
    drawn = torch.rand(ROWS, ACTIONS, dtype=torch.float64) * 2 - 1
    with torch.no_grad():
        gaps = [
            critics(a, batch.observations, drawn).mean()
            - critics(a, batch.observations, batch.actions).mean()
            for a in (plain, heavy)
        ]
    assert gaps[1] < gaps[0], "the conservative loss is to lower the values of actions that were not logged"


def test_continuous_cql_critic() -> None:
    """log Σ exp over draws of three proposals, each divided by its density, against the logged actions."""
    draws, weight = 4, 0.6
    algo = in_float64("KLossCQL", conservative_weight=weight, n_action_samples=draws, initial_temperature=0.3)
    batch = batch_of(discrete=False)

    def squashed(output, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        raw = (output.mu + output.logstd.exp() * noise).detach()
        density = torch.distributions.Normal(output.mu, output.logstd.exp()).log_prob(raw)
        return torch.tanh(raw), (density - torch.log(1.0 - torch.tanh(raw).square())).sum(dim=-1).detach()

    here, there = algo.impl.policy(batch.observations), algo.impl.policy(batch.next_observations)
    torch.manual_seed(9)
    next_actions, next_log = squashed(there, torch.randn_like(there.mu))
    uniform = torch.rand(ROWS, draws, ACTIONS).double() * 2.0 - 1.0
    own, own_log = squashed(here, torch.randn(draws, ROWS, ACTIONS, dtype=torch.float64))
    others, others_log = squashed(there, torch.randn(draws, ROWS, ACTIONS, dtype=torch.float64))
    value = critics(algo, batch.observations, batch.actions)
    next_value = critics(algo, batch.next_observations, next_actions) - 0.3 * next_log
    residual = batch.rewards[:, 0] + hand_discount(batch) * next_value - value
    gram = hand_gram(batch, "laplacian", 0.8, False)
    loss = sum(hand_loss(row, gram, None) for row in residual)
    for critic in range(2):
        for i in range(ROWS):
            terms = []
            for k in range(draws):
                for action, log_density in (
                    (own[k, i], own_log[k, i]),
                    (others[k, i], others_log[k, i]),
                    (uniform[i, k], torch.tensor(-ACTIONS * math.log(2.0))),
                ):
                    drawn = critics(algo, batch.observations[i : i + 1], action[None])[critic, 0]
                    terms.append(torch.exp(drawn - log_density))
            soft_maximum = torch.log(sum(terms) / len(terms))
            loss = loss + weight * (soft_maximum - value[critic, i]) / ROWS
    expected = stepped(algo.impl.q_function, loss)
    update(algo, batch)
    assert_stepped(algo.impl.q_function, expected, rtol=1e-8, atol=1e-10)
