"""Paths of a log, and one step of Trust-PCL written out by hand in float64."""

import copy
import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from koffline.algos.paths import PathReplayBuffer
from koffline.data.replay import ColumnarReplayBuffer
from koffline.errors import DataError
from tests.algos import hand_steps as by_hand
from tests.algos.hand_steps import (
    GAMMA,
    RATE,
    ROWS,
    assert_stepped,
    batch_of,
    in_float64,
    stepped,
)
from tests.algos.makers import ACTIONS, d3rlpy, fit, make, make_log
from tests.online.reference_trust_pcl import log_density as density

LENGTH = 3
ENTROPY = 0.2
KL = 0.5
CLIP = 0.4
DECAY = 0.9


def test_paths_are_consecutive_rows_of_one_episode() -> None:
    log = make_log(discrete=False)
    buffer = PathReplayBuffer(log, length=5, seed=0)
    batch = buffer.sample_transition_batch(300)
    where = {tuple(row): i for i, row in enumerate(log.observations)}
    seen = set()
    for i in range(300):
        start = where[tuple(batch.observations[i, 0])]
        length = int(batch.intervals[i, 0])
        left = 12 - start % 12
        assert length == min(5, left)
        seen.add(length)
        for t in range(length):
            np.testing.assert_array_equal(
                batch.observations[i, t], log.observations[start + t]
            )
            np.testing.assert_allclose(
                batch.actions[i, t], log.actions[start + t], rtol=1e-6
            )
            np.testing.assert_allclose(
                batch.rewards[i, t], log.rewards[start + t], rtol=1e-6
            )
        last = start + length - 1
        np.testing.assert_allclose(
            batch.next_observations[i], log.next_observations[last], rtol=1e-6
        )
        assert batch.terminals[i, 0] == log.terminated[last], (
            "a time limit is no termination"
        )
    assert seen == {1, 2, 3, 4, 5}


def test_paths_need_episodes() -> None:
    log = make_log(discrete=False)
    columns = (
        "observations",
        "actions",
        "rewards",
        "next_observations",
        "terminated",
        "truncated",
    )
    loose = type(log)(
        **{c: getattr(log, c) for c in columns}, action_space=log.action_space
    )
    with pytest.raises(DataError, match="set path_length to 1"):
        fit(make("TrustPCL", path_length=4), ColumnarReplayBuffer(loose))
    assert len(fit(make("TrustPCL", path_length=1), ColumnarReplayBuffer(loose))) == 1


def test_values_start_at_that_of_a_constant_reward_whatever_the_length_of_paths() -> (
    None
):
    """A reward of one for ever is worth 1 / (1 − γ)."""
    log = make_log(discrete=False)
    for length in (1, 4):
        algo = make("TrustPCL", path_length=length, initial_value="mean")
        batch = PathReplayBuffer(log, length, seed=0).sample_transition_batch(50)
        batch = dataclasses.replace(
            batch,
            rewards=np.ones_like(batch.rewards),
            terminals=np.zeros_like(batch.terminals),
        )
        assert algo._initial_value(batch) == pytest.approx(
            1.0 / (1.0 - algo.config.gamma), rel=1e-5
        )


def with_slow_copies(name: str, critic: str):
    networks = {
        "path_length": LENGTH,
        "entropy_coef": ENTROPY,
        "kl_coef": KL,
        "clip_adv": CLIP,
    }
    rate = {"target_decay": DECAY, "actor_learning_rate": RATE}
    algo = in_float64(name, critic=critic, kernel="gaussian", **networks, **rate)
    with torch.no_grad():  # slow copies that differ from the networks
        for slow in (algo.impl.modules.targ_policy, algo.impl.modules.targ_q_funcs):
            for parameter in slow.parameters():
                parameter.add_(0.1)
    algo.impl.modules.kernel.inverse_scale.fill_(1.0 / 0.8)
    return algo


def log_density(
    policy, state: torch.Tensor, action: torch.Tensor, discrete: bool
) -> torch.Tensor:
    """log π(a|s) of one state, by the definition of the density."""
    if discrete:
        return density(policy._fc(policy._encoder(state[None]))[0], None, action[0])
    output = policy(state[None])
    return density(torch.tanh(output.mu[0]), output.logstd[0], action)


@pytest.mark.parametrize("critic", ["kloss", "fvi", "td0", "rg", "kloss_slow"])
@pytest.mark.parametrize("name", ["TrustPCL", "DiscreteTrustPCL"])
def test_one_step_by_hand(name: str, critic: str) -> None:
    discrete = name.startswith("Discrete")
    algo = with_slow_copies(name, critic)
    paths = batch_of(discrete, length=LENGTH)
    names = ("policy", "targ_policy", "q_funcs", "targ_q_funcs")
    modules = SimpleNamespace(
        **{name: copy.deepcopy(getattr(algo.impl.modules, name)) for name in names}
    )
    with torch.no_grad():  # the slow copies move first
        for slow, fast in (
            (modules.targ_policy, modules.policy),
            (modules.targ_q_funcs, modules.q_funcs),
        ):
            for p, q in zip(slow.parameters(), fast.parameters(), strict=True):
                p.copy_(DECAY * p + (1 - DECAY) * q)
    value_of = modules.q_funcs[0]
    slow_value_of = modules.targ_q_funcs[0]
    states = paths.observations
    actions = paths.actions
    residuals = []
    surrogates = []
    for i in range(ROWS):
        length = int(paths.intervals[i, 0])
        residual = -value_of(states[i, :1])[0, 0]
        going_on = GAMMA**length * (1 - paths.terminals[i, 0])
        there = paths.next_observations[i : i + 1]
        if critic in ("fvi", "kloss_slow"):
            next_value = slow_value_of(there)[0, 0].detach()
        else:
            next_value = value_of(there)[0, 0]
            next_value = next_value.detach() if critic == "td0" else next_value
        residual = residual + going_on * next_value
        surrogate = torch.zeros((), dtype=torch.float64)
        for t in range(length):
            here = log_density(modules.policy, states[i, t], actions[i, t], discrete)
            slow = log_density(
                modules.targ_policy, states[i, t], actions[i, t], discrete
            ).detach()
            reward = paths.rewards[i, t] - (ENTROPY + KL) * here.detach() + KL * slow
            residual = residual + GAMMA**t * reward
            surrogate = surrogate + GAMMA**t * here
        residuals.append(residual)
        surrogates.append(surrogate)
    residual = torch.stack(residuals)
    if critic.startswith("kloss"):
        first = SimpleNamespace(observations=states[:, 0], actions=actions[:, 0])
        critic_loss = by_hand.hand_loss(
            residual, by_hand.hand_gram(first, "gaussian", 0.8, discrete), None
        )
    else:
        critic_loss = (residual**2).mean()
    advantage = residual.detach().clamp(-CLIP, CLIP)
    actor_loss = -(advantage * torch.stack(surrogates)).sum() / ROWS
    expected_value = stepped(modules.q_funcs, critic_loss)
    expected_policy = stepped(modules.policy, actor_loss)
    metrics = algo.impl.inner_update(paths, 0)
    assert metrics["critic_loss"] == pytest.approx(
        float(critic_loss.detach()), rel=1e-6
    )
    trained = algo.impl.modules
    assert_stepped(trained.q_funcs, expected_value, rtol=1e-6, atol=1e-9)
    assert_stepped(trained.policy, expected_policy, rtol=1e-6, atol=1e-9)


def test_implied_action_values_satisfy_path_consistency() -> None:
    """Q(s, a) = V(s) + (λ + τ) log π(a|s) − τ log π̃(a|s)."""
    algo = with_slow_copies("DiscreteTrustPCL", "kloss")
    paths = batch_of(discrete=True, length=LENGTH)
    modules = algo.impl.modules
    states = paths.observations[:, 0]
    actions = paths.actions[:, 0]
    with torch.no_grad():
        here, slow = (
            torch.stack(
                [
                    log_density(policy, s, a, True)
                    for s, a in zip(states, actions, strict=True)
                ]
            )
            for policy in (modules.policy, modules.targ_policy)
        )
        expected = modules.q_funcs[0](states)[:, 0] + (ENTROPY + KL) * here - KL * slow
        actual = algo.impl.inner_predict_value(states, actions)
    torch.testing.assert_close(actual, expected)


def test_scalers_reach_every_step_of_a_path(monkeypatch: pytest.MonkeyPatch) -> None:
    preprocessing = d3rlpy.preprocessing
    log = make_log(discrete=False)
    algo = make(
        "TrustPCL",
        observation_scaler=preprocessing.StandardObservationScaler(),
        action_scaler=preprocessing.MinMaxActionScaler(
            np.full(ACTIONS, -2.0), np.full(ACTIONS, 2.0)
        ),
        reward_scaler=preprocessing.MultiplyRewardScaler(0.5),
        path_length=4,
    )
    fit(algo, ColumnarReplayBuffer(log, seed=0), steps=1)
    seen: list[Any] = []
    monkeypatch.setattr(
        algo.impl, "update", lambda paths, step: seen.append(paths) or {}
    )
    batch = PathReplayBuffer(log, 4, seed=0).sample_transition_batch(6)
    algo.update(batch)
    mean = log.observations.mean(0)
    deviation = log.observations.std(0)
    scaled = (batch.observations - mean) / (deviation + 1e-3)
    np.testing.assert_allclose(seen[0].observations.numpy(), scaled, atol=0.05)
    np.testing.assert_allclose(seen[0].actions.numpy(), batch.actions / 2, atol=1e-6)
    np.testing.assert_allclose(seen[0].rewards.numpy(), batch.rewards / 2, rtol=1e-6)
