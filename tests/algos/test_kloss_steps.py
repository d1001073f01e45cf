"""One update equals a gradient step written out by hand, per family of algorithms."""

import math

import pytest
import torch

from tests.algos import hand_steps as by_hand
from tests.algos import makers
from tests.algos.hand_steps import (
    ROWS,
    batch_of,
    bellman_residual,
    critics,
    in_float64,
    row_values,
)
from tests.algos.makers import ACTIONS, COLUMNS, COMPOSED, d3rlpy, make, make_target

AT_03 = {
    "initial_temperature": 0.3,
    "temp_learning_rate": 0.0,
    "actor_learning_rate": by_hand.RATE,
}


@pytest.mark.parametrize("weight", by_hand.WEIGHTS)
@pytest.mark.parametrize("action_kernel", ["joint", "indicator", "none"])
def test_dqn(weight: float | None, action_kernel: str) -> None:
    kernels = {"kernel": "gaussian", "action_kernel": action_kernel}
    algo = in_float64("KLossDQN", diag_weight=weight, temperature=0.0, **kernels)
    batch = batch_of(discrete=True)
    value = row_values(critics(algo, batch.observations), batch)[0]
    next_value = critics(algo, batch.next_observations)[0].max(dim=1).values
    residual = bellman_residual(batch, next_value, value)
    by_hand.assert_critic_step(algo, batch, residual[None], **kernels)


@pytest.mark.parametrize("backup", ["own", "min", "mean"])
@pytest.mark.parametrize("alpha", [0.0, 0.7])
def test_soft_dqn_and_cql_with_an_ensemble(backup: str, alpha: float) -> None:
    options = {"temperature": 0.4, "n_critics": 3, "backup": backup}
    name, weights = (
        ("KLossDiscreteCQL", {"alpha": alpha}) if alpha else ("KLossDQN", {})
    )
    algo = in_float64(name, **weights, **options)
    batch = batch_of(discrete=True)
    values = critics(algo, batch.observations)
    there = critics(algo, batch.next_observations)
    shared = {
        "own": there,
        "min": there.min(dim=0).values[None],
        "mean": there.mean(0)[None],
    }[backup]
    soft = 0.4 * torch.log(torch.exp(shared / 0.4).sum(dim=2))
    value = row_values(values, batch)
    gap = torch.log(torch.exp(values).sum(dim=2)) - value
    residual = bellman_residual(batch, soft, value)
    by_hand.assert_critic_step(algo, batch, residual, alpha * gap.mean(dim=1).sum())


def test_discrete_fqe_takes_the_expectation_over_a_stochastic_policy() -> None:
    target = make_target(discrete=True)
    algo = in_float64("DiscreteKLossFQE", target)
    batch = batch_of(discrete=True)
    target.impl.policy.float()
    with torch.no_grad():
        logits = target.impl.policy._fc(
            target.impl.policy._encoder(batch.next_observations.float())
        )
    probabilities = torch.softmax(logits, dim=1).double()
    assert float(probabilities.max()) < 0.99, "the policy is to be stochastic"
    next_value = (probabilities * critics(algo, batch.next_observations)[0]).sum(dim=1)
    value = row_values(critics(algo, batch.observations), batch)[0]
    residual = bellman_residual(batch, next_value, value)
    # the policy is float32
    by_hand.assert_critic_step(algo, batch, residual[None], rtol=1e-5, atol=1e-7)


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
    residual = bellman_residual(
        batch, critics(algo, batch.next_observations, drawn)[0], value
    )
    # the draw is float32
    by_hand.assert_critic_step(algo, batch, residual[None], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("weight", by_hand.WEIGHTS)
@pytest.mark.parametrize(
    ("kernel", "tau"), [("gaussian", 0.0), ("laplacian", 0.0), ("laplacian", 0.1)]
)
def test_sac(weight: float | None, kernel: str, tau: float) -> None:
    """The critic, also held back at the policy's own actions, and then the actor.

    At the first step a slow copy is the critic itself: the same value, without the
    gradient through s'.
    """
    algo = in_float64(
        "KLossSAC",
        diag_weight=weight,
        kernel=kernel,
        tau=tau,
        backup="min" if weight is None else "own",
        conservative_weight=0.0 if weight is None else 0.7,
        **AT_03,
    )
    batch = batch_of(discrete=False)
    torch.manual_seed(9)
    seen = ([] if weight is None else [batch.observations]) + [batch.next_observations]
    policy = algo.impl.policy(torch.cat(seen))
    drawn, log_probability = (
        part.detach() for part in by_hand.squashed(policy, torch.randn_like(policy.mu))
    )
    value = critics(algo, batch.observations, batch.actions)
    next_value = critics(algo, batch.next_observations, drawn[-ROWS:])
    next_value = next_value.detach() if tau else next_value
    if weight is None:
        next_value = next_value.min(dim=0).values
        gap = 0.0
    else:
        gap = (
            0.7
            * (critics(algo, batch.observations, drawn[:ROWS]) - value)
            .mean(dim=1)
            .sum()
        )
    residual = bellman_residual(
        batch, next_value - 0.3 * log_probability[-ROWS:], value
    )
    by_hand.assert_critic_step(algo, batch, residual, gap, kernel=kernel)

    torch.manual_seed(9)
    policy = algo.impl.policy(batch.observations)
    drawn, log_probability = by_hand.squashed(policy, torch.randn_like(policy.mu))
    lowest = critics(algo, batch.observations, drawn).min(dim=0).values
    by_hand.assert_actor_step(algo, batch, (0.3 * log_probability - lowest).mean())


def test_discrete_sac_critic_and_actor() -> None:
    algo = in_float64("KLossDiscreteSAC", backup="min", **AT_03)
    batch = batch_of(discrete=True)
    policy = algo.impl.policy

    def probabilities(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(policy._fc(policy._encoder(x)), dim=1)

    there = probabilities(batch.next_observations).detach()
    next_values = critics(algo, batch.next_observations).min(dim=0).values
    soft = (there * (next_values - 0.3 * torch.log(there))).sum(dim=1)
    value = row_values(critics(algo, batch.observations), batch)
    residual = bellman_residual(batch, soft, value)
    by_hand.assert_critic_step(algo, batch, residual)

    here = probabilities(batch.observations)
    lowest = critics(algo, batch.observations).min(dim=0).values.detach()
    by_hand.assert_actor_step(
        algo, batch, (here * (0.3 * torch.log(here) - lowest)).sum(dim=1).mean()
    )


def test_td3_plus_bc_critic_and_actor() -> None:
    algo = in_float64(
        "KLossTD3PlusBC", tau=0.0, backup="mean", actor_learning_rate=by_hand.RATE
    )
    batch = batch_of(discrete=False)
    torch.manual_seed(9)
    greedy = torch.tanh(algo.impl.policy(batch.next_observations).mu).detach()
    next_actions = (greedy + (0.2 * torch.randn_like(greedy)).clamp(-0.5, 0.5)).clamp(
        -1.0, 1.0
    )
    next_value = critics(algo, batch.next_observations, next_actions).mean(dim=0)
    value = critics(algo, batch.observations, batch.actions)
    residual = bellman_residual(batch, next_value, value)
    by_hand.assert_critic_step(algo, batch, residual)

    actions = torch.tanh(algo.impl.policy(batch.observations).mu)
    value = critics(algo, batch.observations, actions)[0]
    loss = (
        -2.5 * value.mean() / value.detach().abs().mean()
        + (batch.actions - actions).square().mean()
    )
    by_hand.assert_actor_step(algo, batch, loss)


def test_continuous_cql_critic() -> None:
    """log Σ exp over draws of three proposals, each divided by its density, against the
    logged actions.
    """
    draws = 4
    weight = 0.6
    algo = in_float64(
        "KLossCQL",
        conservative_weight=weight,
        n_action_samples=draws,
        initial_temperature=0.3,
    )
    batch = batch_of(discrete=False)

    here = algo.impl.policy(batch.observations)
    there = algo.impl.policy(batch.next_observations)
    torch.manual_seed(9)
    next_actions, next_log = (
        part.detach() for part in by_hand.squashed(there, torch.randn_like(there.mu))
    )
    uniform = torch.rand(ROWS, draws, ACTIONS).double() * 2.0 - 1.0
    (drawn_here, own_log), (next_drawn, others_log) = (
        [
            part.detach()
            for part in by_hand.squashed(
                output, torch.randn(draws, ROWS, ACTIONS, dtype=torch.float64)
            )
        ]
        for output in (here, there)
    )
    value = critics(algo, batch.observations, batch.actions)
    next_value = critics(algo, batch.next_observations, next_actions) - 0.3 * next_log
    residual = bellman_residual(batch, next_value, value)
    terms = []
    for k in range(draws):
        drawn = (
            (drawn_here[k], own_log[k]),
            (next_drawn[k], others_log[k]),
            (uniform[:, k], -ACTIONS * math.log(2.0)),
        )
        terms += [
            torch.exp(critics(algo, batch.observations, action) - density)
            for action, density in drawn
        ]
    soft_maximum = torch.log(sum(terms) / len(terms))
    gap = weight * (soft_maximum - value).mean(dim=1).sum()
    by_hand.assert_critic_step(algo, batch, residual, gap, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("kernel", ["gaussian", "laplacian"])
@pytest.mark.parametrize("action_kernel", ["joint", "indicator"])
def test_a_memory_follows_the_critics(kernel: str, action_kernel: str) -> None:
    """Three mini-batches: m by hand from the critics of each step, and the loss a
    product with it.
    """
    options = {
        "kernel": kernel,
        "action_kernel": action_kernel,
        "n_critics": 2,
        "temperature": 0.0,
    }
    algo = in_float64("KLossDQN", diag_weight=0.2, memory=0.6, **options)

    def residuals(batch) -> torch.Tensor:
        values = row_values(critics(algo, batch.observations), batch)
        return bellman_residual(
            batch, critics(algo, batch.next_observations).max(dim=2).values, values
        )

    remembered = None
    before = None
    for step in range(3):
        batch = batch_of(discrete=True, seed=step)
        psi = by_hand.features(batch, kernel, action_kernel)
        old = None
        if before is not None:
            present = [p.detach().clone() for p in algo.impl.q_function.parameters()]
            by_hand.put(algo, before)
            old = (residuals(batch) @ psi / ROWS).detach()
            by_hand.put(algo, present)
        residual = residuals(batch)
        now = residual @ psi / ROWS
        first = now.detach() if old is None else remembered + now.detach() - old
        keep = min(0.6, step / (step + 1))
        remembered = keep * first + (1.0 - keep) * now.detach()
        loss = (
            0.8 * 2.0 * (first * now).sum(dim=1) + 0.2 * residual.square().mean(dim=1)
        ).sum()
        before = [p.detach().clone() for p in algo.impl.q_function.parameters()]
        expected = by_hand.stepped(algo.impl.q_function, loss)
        by_hand.update(algo, batch)
        by_hand.assert_stepped(algo.impl.q_function, expected)


def test_a_memory_is_of_the_actions_that_were_drawn() -> None:
    """On one mini-batch, again and again, what is remembered is its V-statistic at
    every step.
    """
    fixed = {"diag_weight": 0.1, "temp_learning_rate": 0.0, "initial_temperature": 0.3}
    algo, plain = (
        in_float64("KLossSAC", memory=memory, **fixed) for memory in (0.9, 0.0)
    )
    by_hand.put(plain, list(algo.impl.q_function.parameters()))
    plain.impl.policy.load_state_dict(algo.impl.policy.state_dict())
    batch = batch_of(discrete=False)
    kernel = algo.impl.modules.kernel
    plain.impl.modules.kernel.forward = lambda residual, *rows: (
        0.9 * (residual @ kernel._features(*rows) / ROWS).square().sum(dim=1)
        + 0.1 * residual.square().mean(dim=1)
    )
    for _ in range(4):
        by_hand.update(algo, batch)
        by_hand.update(plain, batch)
        by_hand.assert_stepped(
            algo.impl.q_function, list(plain.impl.q_function.parameters())
        )


def test_a_slow_copy_values_what_follows() -> None:
    """Two steps: no gradient through s', and the copy moves by tau after each."""
    algo = in_float64(
        "KLossDQN", diag_weight=0.3, temperature=0.0, n_critics=2, tau=0.25
    )
    slow = [p.detach().clone() for p in algo.impl.q_function.parameters()]
    for seed in (0, 1):
        batch = batch_of(discrete=True, seed=seed)
        present = list(algo.impl.q_function.parameters())
        held = [p.detach().clone() for p in present]
        by_hand.put(algo, slow)
        next_value = critics(algo, batch.next_observations).max(dim=2).values.detach()
        by_hand.put(algo, held)
        residual = bellman_residual(
            batch, next_value, row_values(critics(algo, batch.observations), batch)
        )
        by_hand.assert_critic_step(algo, batch, residual, critic_only=False)
        slow = [
            0.75 * old + 0.25 * new.detach()
            for old, new in zip(slow, present, strict=True)
        ]
        by_hand.assert_stepped(algo.impl.modules.slow_q_funcs, slow)


def test_rebrac_critic() -> None:
    """d3rlpy's target, in which the slow copy values s' and the distance from the
    logged action counts.
    """
    algo = in_float64(
        "KLossReBRAC", diag_weight=0.3, target_smoothing_sigma=0.0, critic_beta=0.2
    )
    batch = batch_of(discrete=False)
    modules = algo.impl.modules
    with torch.no_grad():
        for parameter in (
            *modules.targ_policy.parameters(),
            *modules.targ_q_funcs.parameters(),
        ):
            parameter.add_(0.05)
        acted = torch.tanh(modules.targ_policy(batch.next_observations).mu)
        slow = [
            q(batch.next_observations, acted).q_value[:, 0]
            for q in modules.targ_q_funcs
        ]
        later = torch.stack(slow).min(dim=0).values - 0.2 * (
            acted - batch.next_actions
        ).square().sum(dim=1)
    residual = bellman_residual(
        batch, later, critics(algo, batch.observations, batch.actions)
    )
    by_hand.assert_critic_step(algo, batch, residual)


@pytest.mark.parametrize("name", COMPOSED)
def test_with_the_diagonal_alone_a_composed_critic_is_that_of_d3rlpy(name: str) -> None:
    """mean k_ii δ² = mean δ²: step for step d3rlpy's own algorithm, actor and
    conservative terms included.
    """
    settings = {"critic_learning_rate": 1e-3, "tau": 0.01}
    settings |= {"actor_beta": 0.1} if name == "KLossReBRAC" else {}
    params = makers.with_small_networks(
        getattr(d3rlpy.algos, f"{name.removeprefix('KLoss')}Config"), **settings
    )
    algos = [
        make(name, diag_weight=1.0, normalise=False, initial_value=0.0, **settings),
        params.create(),
    ]
    for algo in algos:
        algo.create_impl((COLUMNS,), ACTIONS)
    for part, module in algos[1].impl.modules.get_torch_modules().items():
        module.load_state_dict(getattr(algos[0].impl.modules, part).state_dict())
    for algo in algos:
        torch.manual_seed(3)
        buffer = makers.make_buffer(name)
        for _ in range(4):
            algo.update(buffer.sample_transition_batch(16))
    ours, theirs = (makers.parameters(algo) for algo in algos)
    assert set(ours) > set(theirs)
    for key, value in theirs.items():
        torch.testing.assert_close(ours[key], value, rtol=2e-4, atol=1e-6)
