"""Options, the kernel before training, refusals, n-step intervals."""

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch

import koffline.algos as ours
from koffline import ColumnarReplayBuffer, Discrete
from koffline.data.replay import to_d3rlpy
from koffline.errors import ConfigError, DataError
from koffline.policy_specs import as_policy
from tests.algos import makers
from tests.algos.makers import (
    ACTIONS,
    ALL,
    d3rlpy,
    is_discrete,
    make,
    make_target,
    observations,
)


def fixed_kernel(name: str = "KLossDQN", **settings):
    algo = make(name, build=True, **settings)
    algo._kernel_rows = None
    algo.fix_kernel_before(makers.make_buffer(name).sample_transition_batch(100))
    return algo.impl.modules.kernel


@pytest.mark.parametrize(
    ("name", "settings", "says"),
    [
        ("KLossDQN", {"kernel": "gausian"}, "known are gaussian"),
        ("KLossDQN", {"kernel": "cosine"}, "koffline.kernels.KERNELS"),
        ("KLossDQN", {"bandwidth": -1.0}, "give a positive number or a multiple"),
        ("KLossDQN", {"bandwidth": "0.5 mean"}, "0.5 median"),
        ("KLossDQN", {"diag_weight": 1.5}, "less than or equal to 1"),
        ("KLossDQN", {"memory": 1.0}, "less than 1"),
        ("KLossDQN", {"memory": 0.9, "kernel": "linear"}, "use gaussian or laplacian"),
        ("KLossIQL", {"tau": 0.0}, "tau is 0"),
        ("KLossBCQ", {"tau": 0.0}, "tau is 0"),
        ("KLossAWAC", {"memory": 0.9}, "memory is set, which kloss_awac does not have"),
        ("KLossCalQL", {"backup": "mean"}, "backs up as d3rlpy's"),
        ("TrustPCL", {"tau": 0.1}, "use critic 'fvi' and target_decay"),
        ("KLossDQN", {"initial_value": "median"}, "a number or 'mean'"),
        ("KLossDQN", {"batch_size": 1}, "at least 2"),
        ("KLossDQN", {"gamma": 1.5}, "less than or equal to 1"),
        (
            "KLossDQN",
            {"q_func_factory": d3rlpy.models.QRQFunctionFactory()},
            "needs the mean",
        ),
        ("KLossSAC", {"action_kernel": "indicator"}, "discrete actions"),
        ("KLossSAC", {"initial_temperature": 0.0}, "greater than 0"),
        ("KLossIQL", {"expectile": 1.0}, "less than 1"),
        ("KLossCQL", {"conservative_weight": True}, "a yes or no"),
        ("TrustPCL", {"critic": "klos"}, "should be 'kloss'"),
        ("TrustPCL", {"entropy_coef": 0.0, "kl_coef": 0.0}, "both 0"),
    ],
)
def test_options_out_of_range_are_refused(name: str, settings: dict, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make(name, **settings)


@pytest.mark.parametrize(
    ("make_it", "says"),
    [
        (lambda: make("KLossDQN").create_impl((3, 84, 84), ACTIONS), "embedding"),
        (
            lambda: make("KLossDQN").create_impl(((4,), (5,)), ACTIONS),
            "one vector per observation",
        ),
        (
            lambda: make("KLossDQN").fit(makers.make_buffer("KLossDQN"), n_steps=5),
            "not one epoch",
        ),
        (
            lambda: makers.fit(make("KLossDQN"), makers.make_buffer("KLossDQN"), 4.5),
            "give whole numbers",
        ),
        (
            lambda: makers.fit(make("TrustPCL"), makers.make_log(False)),
            "a Transitions; koffline.Columnar",
        ),
        (
            lambda: ours.KLossFQE(make_target(True), d3rlpy.ope.FQEConfig()),
            "give a KLossFQEConfig, not",
        ),
        (lambda: ours.KLossFQE("model.d3"), r"not str; koffline\.load"),
        (
            lambda: ours.KLossFQE(d3rlpy.algos.DiscreteRandomPolicyConfig().create()),
            "evaluate.*'uniform'",
        ),
        (lambda: make("KLossDQN").config.create(enable_ddp=True), "enable_ddp"),
        (
            lambda: ours.KLossFQE(make_target(discrete=False)).create_impl(
                (5,), ACTIONS
            ),
            "the policy is for",
        ),
    ],
)
def test_what_cannot_be_made_is_refused(
    make_it: Callable[[], object], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        make_it()


def test_a_number_is_the_bandwidth_and_a_rule_a_multiple_of_the_median() -> None:
    assert float(fixed_kernel(bandwidth=0.37).bandwidth) == pytest.approx(0.37)
    batch = makers.make_buffer("KLossDQN").sample_transition_batch(100)
    one_hot = np.eye(ACTIONS)[batch.actions[:, 0].astype(int)]
    rows = np.concatenate([batch.observations, one_hot], axis=1).astype(np.float64)
    rows = (rows - rows.mean(axis=0)) / rows.std(axis=0, ddof=1)
    for kernel, order in (("laplacian", 1), ("gaussian", 2)):
        gaps = [
            np.linalg.norm(rows[i] - rows[j], ord=order)
            for i in range(100)
            for j in range(i + 1, 100)
        ]
        bandwidth = float(fixed_kernel(kernel=kernel, bandwidth="0.5 median").bandwidth)
        assert bandwidth == pytest.approx(0.5 * np.median(gaps), rel=1e-3)


def test_a_constant_residual_costs_its_square_when_normalised() -> None:
    kernel = fixed_kernel(bandwidth="1 median", batch_size=100)
    batch = makers.make_buffer("KLossDQN").sample_transition_batch(100)
    x = torch.as_tensor(batch.observations)
    actions = torch.as_tensor(batch.actions)
    loss = kernel(torch.full((1, 100), 3.0), x, actions)
    assert float(loss) == pytest.approx(9.0, rel=1e-4)


def test_scalers_of_target_and_evaluator_may_differ() -> None:
    """The policy's actions, seen through both scalers, are what the policy does on the
    raw observation.
    """
    log = makers.make_log(discrete=False)
    raw = log.observations * 7.0 + 3.0
    shifted = dataclasses.replace(
        log, observations=raw, next_observations=log.next_observations * 7.0 + 3.0
    )
    preprocessing = d3rlpy.preprocessing
    target = make_target(
        discrete=False,
        observation_scaler=preprocessing.MinMaxObservationScaler(
            minimum=raw.min(0), maximum=raw.max(0)
        ),
        action_scaler=preprocessing.MinMaxActionScaler(
            np.full(ACTIONS, -2.0), np.full(ACTIONS, 2.0)
        ),
    )
    algo = make(
        "KLossFQE",
        target,
        observation_scaler=preprocessing.StandardObservationScaler(),
        action_scaler=preprocessing.MinMaxActionScaler(
            np.full(ACTIONS, -4.0), np.full(ACTIONS, 4.0)
        ),
    )
    makers.fit(algo, ColumnarReplayBuffer(shifted, seed=0), steps=2)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        acted = algo.impl._actions(torch.as_tensor(raw[:10]))
        torch.manual_seed(0)
        np.testing.assert_allclose(
            4.0 * acted.numpy(), target.sample_action(raw[:10]), atol=1e-4
        )
    np.testing.assert_array_equal(algo.predict(raw[:10]), target.predict(raw[:10]))


def test_a_stochastic_policy_has_an_expected_state_value() -> None:
    target = make_target(discrete=True)
    algo = make("DiscreteKLossFQE", target, build=True)
    x = observations()
    with torch.no_grad():
        probabilities = target.impl.policy(torch.as_tensor(x)).probs.numpy()
    values = np.stack(
        [algo.predict_value(x, np.full(10, a)) for a in range(ACTIONS)], axis=1
    )
    np.testing.assert_allclose(
        algo.predict_state_value(x), (probabilities * values).sum(1), rtol=1e-5
    )
    policy = as_policy(algo, Discrete(ACTIONS), (x.shape[1],))
    np.testing.assert_allclose(policy.probabilities(x), probabilities, rtol=1e-5)


@pytest.mark.parametrize("name", ALL)
def test_values_start_at_a_constant_once(name: str, tmp_path) -> None:
    """The output of every value function is shifted before the first step, and never
    again.
    """
    x = torch.as_tensor(observations())
    actions = torch.zeros(10, ACTIONS)

    def outputs(algo) -> list[torch.Tensor]:
        values = []
        for part in ("q_funcs", "targ_q_funcs", "slow_q_funcs", "value_func"):
            functions = getattr(algo.impl.modules, part, None) or torch.nn.ModuleList()
            for function in (
                functions if isinstance(functions, torch.nn.ModuleList) else [functions]
            ):
                takes_actions = (
                    not is_discrete(name)
                    and "TrustPCL" not in name
                    and part != "value_func"
                )
                out = function(x, actions) if takes_actions else function(x)
                values.append(getattr(out, "q_value", out).detach())
        return values

    algo = make(name, build=True, initial_value=7.5)
    shifted = [old + 7.5 for old in outputs(algo)]
    batch = makers.make_buffer(name).sample_transition_batch(16)
    for _ in range(2):
        algo.fix_kernel_before(batch)
        torch.testing.assert_close(outputs(algo), shifted)
    algo.save(str(tmp_path / "model.d3"))
    loaded = d3rlpy.load_learnable(str(tmp_path / "model.d3"))
    loaded.fix_kernel_before(batch)
    torch.testing.assert_close(outputs(loaded), shifted)


def test_the_mean_start_is_what_the_logs_own_policy_is_worth() -> None:
    """Reward 2 a step, scaled by a half, gamma 0.9, one row in four ends: 1 / (1 − 0.9
    · 3/4).
    """
    batch = makers.make_buffer("KLossDQN").sample_transition_batch(16)
    rows = {
        **vars(batch),
        "rewards": np.full((16, 1), 2.0, np.float32),
        "terminals": (np.arange(16) % 4 == 0).astype(np.float32)[:, None],
        "intervals": np.ones((16, 1), np.float32),
    }
    scaler = d3rlpy.preprocessing.MultiplyRewardScaler(0.5)
    algo = make("KLossDQN", build=True, gamma=0.9, reward_scaler=scaler)
    before = algo.impl.q_function[0]._fc.bias.detach().clone()
    algo.fix_kernel_before(type(batch)(**rows))
    moved = algo.impl.q_function[0]._fc.bias.detach() - before
    torch.testing.assert_close(moved, torch.full((ACTIONS,), 1.0 / (1.0 - 0.9 * 0.75)))


@pytest.mark.parametrize("scale", [0.01, 1.0, 100.0])
def test_the_soft_maximum_follows_the_units_of_reward(scale: float, tmp_path) -> None:
    """Its temperature is a tenth of the log's mean absolute reward, saved, and the same
    for later logs.
    """
    log = makers.make_log(discrete=True)
    scaled = dataclasses.replace(log, rewards=log.rewards * scale)
    algo = make("KLossDQN", temperature=0.1)
    n_rows = len(log)
    if scale == 1.0:
        buffer = to_d3rlpy(scaled)
        n_rows += 5  # added steps
    else:
        buffer = ColumnarReplayBuffer(scaled, seed=0)
    makers.fit(algo, buffer)
    expected = 0.1 * scale * np.abs(log.rewards).sum() / n_rows
    assert float(algo.impl.temperature) == pytest.approx(expected, rel=1e-5)
    values = scale * torch.tensor([[[1.0, 1.3, 0.9]]])
    soft = expected * torch.logsumexp(values / expected, dim=2)
    torch.testing.assert_close(algo.impl.greatest(values), soft, rtol=1e-4, atol=0.0)
    algo.save(str(tmp_path / "model.d3"))
    loaded = d3rlpy.load_learnable(str(tmp_path / "model.d3"))
    makers.fit(loaded, ColumnarReplayBuffer(log, seed=0))
    assert float(loaded.impl.temperature) == pytest.approx(expected, rel=1e-5)
    kernel = loaded.impl.modules.kernel
    kernel.load_state_dict(
        {key: held for key, held in kernel.state_dict().items() if key != "reward_size"}
    )
    assert float(loaded.impl.temperature) == pytest.approx(0.1), (
        "files without it were in units of reward"
    )


def test_without_rewards_the_soft_maximum_waits_for_one() -> None:
    algo = make("KLossDQN", build=True)
    batch = makers.make_buffer("KLossDQN").sample_transition_batch(16)
    algo.update(dataclasses.replace(batch, rewards=np.zeros_like(batch.rewards)))
    assert float(algo.impl.temperature) == pytest.approx(0.1)
    with pytest.raises(DataError, match="rewards are not all finite"):
        algo.update(dataclasses.replace(batch, rewards=batch.rewards * np.nan))
    algo.update(batch)
    assert float(algo.impl.temperature) == pytest.approx(
        0.1 * np.abs(batch.rewards).mean(), rel=1e-5
    )
