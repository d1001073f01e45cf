"""KLossFQE: off-policy evaluation of a d3rlpy algorithm; the policy it evaluates is saved inside it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Optional

import numpy as np
import torch
from dataclasses_json import config as json_options
from jaxtyping import Float
from torch import Tensor, nn

from koffline.algos.acting import TargetPolicy
from koffline.algos.kernel_algo import KernelCriticAlgo
from koffline.algos.kernel_impl import (
    KernelCriticImpl,
    KernelCriticModules,
    continuous_values,
    discrete_values,
    taken,
)
from koffline.algos.kernel_options import KernelCriticConfig
from koffline.bellman import state_value_residual
from koffline.data.d3rlpy_import import import_d3rlpy
from koffline.errors import ConfigError

import_d3rlpy()

from d3rlpy.algos.qlearning.base import QLearningAlgoBase  # noqa: E402
from d3rlpy.algos.qlearning.torch.utility import (  # noqa: E402
    ContinuousQFunctionMixin,
    DiscreteQFunctionMixin,
)
from d3rlpy.base import LearnableConfig, register_learnable  # noqa: E402
from d3rlpy.constants import ActionSpace  # noqa: E402
from d3rlpy.models.encoders import EncoderFactory, make_encoder_field  # noqa: E402
from d3rlpy.models.q_functions import QFunctionFactory, make_q_func_field  # noqa: E402
from d3rlpy.optimizers.optimizers import OptimizerFactory, make_optimizer_field  # noqa: E402
from d3rlpy.serializable_config import CONFIG_STORAGE  # noqa: E402
from d3rlpy.torch_utility import TorchMiniBatch, convert_to_torch  # noqa: E402


def _encode(policy: Any) -> Any:
    return None if policy is None else CONFIG_STORAGE[LearnableConfig].encoder(policy)


def _decode(stored: Any) -> Any:
    return None if stored is None else CONFIG_STORAGE[LearnableConfig].decoder(stored)


@dataclasses.dataclass(frozen=True)
class KLossFQEModules(KernelCriticModules):
    """The evaluator's modules and the networks of the policy it evaluates."""

    target: nn.ModuleDict


class _FQEImpl(KernelCriticImpl):
    """What both action spaces share."""

    def __init__(self, q_func_forwarder: Any, policy: TargetPolicy, **common: Any) -> None:
        super().__init__(**common)
        self._q_func_forwarder = q_func_forwarder
        self._policy = policy

    def next_observations(self, batch: TorchMiniBatch) -> Tensor:
        """s' in the units of the log, which the target policy scales in its own way."""
        if batch.numpy_batch is not None:
            raw = np.asarray(batch.numpy_batch.next_observations)
            return convert_to_torch(raw, self._device).to(batch.next_observations)
        return self._policy.unscaled(batch.next_observations)

    def inner_predict_best_action(self, x: Tensor) -> Tensor:
        """The target policy's greedy actions, for observations as the evaluator scales them."""
        return self._policy.scaled_actions(self._policy.greedy(self._policy.unscaled(x)))

    def inner_sample_action(self, x: Tensor) -> Tensor:
        """Actions drawn from the target policy, for observations as the evaluator scales them."""
        return self._policy.scaled_actions(self._policy.sample(self._policy.unscaled(x)))


class KLossFQEImpl(ContinuousQFunctionMixin, _FQEImpl):
    """δ = r + discount · Q(s', a') − Q(s, a), a' what the policy does at s' (drawn if it is stochastic)."""

    def compute_residual(self, batch: TorchMiniBatch) -> Float[Tensor, "critic row"]:
        """Gradient through Q(s, a) and Q(s', a').

        Every row has its own draw a', so that products of residuals of different rows stay unbiased.
        (Feng et al. 2019, equ:ourloss)
        """
        with torch.no_grad():
            drawn = self._policy.sample(self.next_observations(batch))
            next_actions = self._policy.scaled_actions(drawn).to(batch.actions)
        value, next_value = continuous_values(
            self._modules.q_funcs, batch.observations, batch.actions, batch.next_observations, next_actions
        )
        next_value = self.backed_up(next_value).expand_as(value)
        return state_value_residual(batch.rewards.squeeze(1), self.discount(batch), value, next_value)


class DiscreteKLossFQEImpl(DiscreteQFunctionMixin, _FQEImpl):
    """δ = r + discount · Σ_a' π(a'|s') Q(s', a') − Q(s, a), the expectation exact."""

    def compute_residual(self, batch: TorchMiniBatch) -> Float[Tensor, "critic row"]:
        """Gradient through Q(s, a) and Q(s', ·).

        (Feng et al. 2019, equ:ourloss)
        """
        with torch.no_grad():
            probabilities = self._policy.probabilities(self.next_observations(batch))
        values, next_values = discrete_values(
            self._modules.q_funcs, batch.observations, batch.next_observations
        )
        value = taken(values, batch.actions)
        expected = (probabilities.to(next_values) * self.backed_up(next_values)).sum(dim=2)
        next_value = expected.expand_as(value)
        return state_value_residual(batch.rewards.squeeze(1), self.discount(batch), value, next_value)


@dataclasses.dataclass()
class KLossFQEConfig(KernelCriticConfig):
    """Config of KLossFQE and DiscreteKLossFQE; fields as in d3rlpy's FQEConfig without the target network's.

    policy: the config of the algorithm to evaluate; set by the constructor, saved with the evaluator.
    backup is "own" by default: each critic solves its own Bellman equation.
    """

    learning_rate: float = 1e-3
    optim_factory: OptimizerFactory = make_optimizer_field()
    encoder_factory: EncoderFactory = make_encoder_field()
    q_func_factory: QFunctionFactory = make_q_func_field()
    n_critics: int = 1
    backup: str = "own"
    policy: Optional[LearnableConfig] = dataclasses.field(  # noqa: UP045
        default=None, metadata=json_options(encoder=_encode, decoder=_decode)
    )

    def create(self, device: Any = False, enable_ddp: bool = False) -> _FQE:
        """The evaluator of the policy in the config. Raises ConfigError where there is none."""
        if self.policy is None:
            raise ConfigError(
                "kloss_fqe has no policy to evaluate; use KLossFQE(algo, config) or DiscreteKLossFQE"
            )
        algo = self.policy.create(device)
        is_discrete = algo.get_action_type() == ActionSpace.DISCRETE
        return (DiscreteKLossFQE if is_discrete else KLossFQE)(algo, self, device, enable_ddp)

    @staticmethod
    def get_type() -> str:
        """Name in files."""
        return "kloss_fqe"


class _FQE(KernelCriticAlgo[Any, Any]):
    """Evaluation of `algo` with a kernel-loss critic.

    algo: a d3rlpy algorithm whose networks are built; stochastic ones are evaluated as stochastic. `predict`
    and `sample_action` are the policy's, `predict_value` is its action value, `predict_state_value` the
    expectation over its actions. The config is copied and given the policy's config.
    """

    def __init__(
        self, algo: Any, config: Any = None, device: Any = False, enable_ddp: bool = False, impl: Any = None
    ) -> None:
        if isinstance(algo, _FQE):
            raise ConfigError(
                f"{type(self).__name__} evaluates a policy, received a {type(algo).__name__}, which is an "
                "evaluator itself; give the algorithm it evaluates, its `algo`"
            )
        if not isinstance(algo, QLearningAlgoBase):
            raise ConfigError(
                f"{type(self).__name__} evaluates a d3rlpy Q-learning algorithm, received a "
                f"{type(algo).__name__}; give the algorithm itself, koffline.load(path) for a file"
            )
        if algo.get_action_type() != self.get_action_type():
            raise ConfigError(
                f"{type(algo).__name__} is for {algo.get_action_type().name.lower()} actions; use "
                f"{'DiscreteKLossFQE' if algo.get_action_type() == ActionSpace.DISCRETE else 'KLossFQE'}"
            )
        config = dataclasses.replace(config or KLossFQEConfig(), policy=algo.config)
        self._algo = algo
        super().__init__(config, device, enable_ddp, impl)

    @property
    def algo(self) -> Any:
        """The algorithm that is evaluated."""
        return self._algo

    def inner_create_impl(self, observation_shape: Sequence[int], action_size: int) -> None:
        """Networks, optimiser, kernel, and the policy's networks where it has none. Raises ConfigError."""
        if self._algo.impl is None:
            self._algo.create_impl(observation_shape, action_size)
        if self._algo.impl is None:
            raise ConfigError(
                f"{type(self._algo).__name__} has no networks to save with its evaluator; evaluate it with "
                "koffline.evaluate(log, 'uniform', …)"
            )
        own_shape = tuple(np.atleast_1d(self._algo.observation_shape))
        if own_shape != tuple(observation_shape) or self._algo.action_size != action_size:
            raise ConfigError(
                f"the policy is for observations {own_shape} and {self._algo.action_size} actions, the log "
                f"has {tuple(observation_shape)} and {action_size}; give the log that it was trained for"
            )
        is_discrete = self.get_action_type() == ActionSpace.DISCRETE
        make_critic = self.make_discrete_critic if is_discrete else self.make_continuous_critic
        config = self._config
        q_funcs, forwarder, optim = make_critic(
            observation_shape,
            action_size,
            config.encoder_factory,
            config.optim_factory,
            config.learning_rate,
        )
        modules = KLossFQEModules(
            q_funcs=q_funcs,
            critic_optim=optim,
            kernel=self.make_kernel(observation_shape, action_size),
            target=nn.ModuleDict(self._algo.impl.modules.get_torch_modules()).to(self._device),
        )
        impl_class: Any = DiscreteKLossFQEImpl if is_discrete else KLossFQEImpl
        options = {**self.impl_options(observation_shape, action_size), "compiled": False}
        policy = TargetPolicy(self._algo, self._device, self.observation_scaler, self.action_scaler)
        self._impl = impl_class(q_func_forwarder=forwarder, policy=policy, modules=modules, **options)

    def predict(self, x: Any) -> Any:
        """The policy's greedy actions."""
        return self._algo.predict(x)

    def sample_action(self, x: Any) -> Any:
        """Actions drawn from the policy."""
        return self._algo.sample_action(x)

    def predict_state_value(self, x: np.ndarray, draws: int = 16) -> np.ndarray:
        """(N,) expected action value under the policy; by `draws` draws where it must be."""
        policy = TargetPolicy(self._algo, self._device, None, None)
        if self.get_action_type() == ActionSpace.DISCRETE:
            with torch.no_grad():
                probabilities = policy.probabilities(convert_to_torch(x, self._device)).cpu().numpy()
            actions = range(probabilities.shape[1])
            values = [self.predict_value(x, np.full(len(x), action)) for action in actions]
            return (probabilities * np.stack(values, axis=1)).sum(axis=1)
        count = 1 if policy.is_deterministic else draws
        values = [self.predict_value(x, self._algo.sample_action(x)) for _ in range(count)]
        return np.mean(values, axis=0)

    def save_policy(self, fname: str) -> None:
        """The policy that is evaluated."""
        from koffline.algos.export import export_policy

        export_policy(self._algo, fname)


class KLossFQE(_FQE):
    """Off-policy evaluation with the kernel loss, continuous actions (Le et al. 2019; Feng et al. 2019)."""

    def get_action_type(self) -> ActionSpace:
        """Continuous."""
        return ActionSpace.CONTINUOUS


class DiscreteKLossFQE(_FQE):
    """Off-policy evaluation with the kernel loss, discrete actions (Le et al. 2019; Feng et al. 2019)."""

    def get_action_type(self) -> ActionSpace:
        """Discrete."""
        return ActionSpace.DISCRETE


register_learnable(KLossFQEConfig)
