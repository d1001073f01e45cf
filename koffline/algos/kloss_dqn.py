"""KLossDQN: the Bellman optimality equation solved by gradient descent on the kernel loss."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Optional

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from koffline.algos.kernel_algo import KernelCriticAlgo
from koffline.algos.kernel_impl import KernelCriticImpl, KernelCriticModules, discrete_values, taken
from koffline.algos.kernel_options import KernelCriticConfig
from koffline.bellman import state_value_residual
from koffline.data.d3rlpy_import import import_d3rlpy
from koffline.errors import ConfigError

import_d3rlpy()

from d3rlpy.algos.qlearning.torch.utility import DiscreteQFunctionMixin  # noqa: E402
from d3rlpy.base import register_learnable  # noqa: E402
from d3rlpy.constants import ActionSpace  # noqa: E402
from d3rlpy.models.encoders import EncoderFactory, make_encoder_field  # noqa: E402
from d3rlpy.models.q_functions import QFunctionFactory, make_q_func_field  # noqa: E402
from d3rlpy.optimizers.optimizers import OptimizerFactory, make_optimizer_field  # noqa: E402
from d3rlpy.torch_utility import TorchMiniBatch  # noqa: E402


class KLossDQNImpl(DiscreteQFunctionMixin, KernelCriticImpl):
    """δ = r + discount · max_a' Q(s', a') − Q(s, a), or the soft maximum where temperature > 0."""

    def __init__(self, q_func_forwarder: Any, temperature: float, **common: Any) -> None:
        super().__init__(**common)
        self._q_func_forwarder = q_func_forwarder
        self._temperature = temperature

    def compute_residual(self, batch: TorchMiniBatch) -> Float[Tensor, "critic row"]:
        """Gradient through Q(s, a) and through the maximum at s'.

        (Feng et al. 2019, sec:background)
        """
        values, next_values = discrete_values(
            self._modules.q_funcs, batch.observations, batch.next_observations
        )
        return self.residual_of(batch, values, next_values)

    def residual_of(
        self,
        batch: TorchMiniBatch,
        values: Float[Tensor, "critic row action"],
        next_values: Float[Tensor, "critic row action"],
    ) -> Float[Tensor, "critic row"]:
        """The same for action values that are there already."""
        value = taken(values, batch.actions)
        next_value = self.greatest(self.backed_up(next_values)).expand_as(value)
        return state_value_residual(batch.rewards.squeeze(1), self.discount(batch), value, next_value)

    def greatest(self, values: Float[Tensor, "critic row action"]) -> Float[Tensor, "critic row"]:
        """max_a, or temperature · log Σ_a exp(Q / temperature)."""
        if self._temperature == 0.0:
            return values.amax(dim=2)
        return self._temperature * torch.logsumexp(values / self._temperature, dim=2)

    def inner_predict_best_action(self, x: Tensor) -> Tensor:
        """(N,) greedy actions."""
        return self._q_func_forwarder.compute_expected_q(x).argmax(dim=1)

    def inner_sample_action(self, x: Tensor) -> Tensor:
        """(N,) drawn from softmax(Q / temperature); greedy without a temperature."""
        if self._temperature == 0.0:
            return self.inner_predict_best_action(x)
        return torch.distributions.Categorical(self.action_probabilities(x)).sample()

    def action_probabilities(self, x: Tensor) -> Float[Tensor, "row action"]:
        """softmax(Q / temperature), or all on the greedy action."""
        values = self._q_func_forwarder.compute_expected_q(x)
        if self._temperature == 0.0:
            return F.one_hot(values.argmax(dim=1), self._action_size).to(values)
        return torch.softmax(values / self._temperature, dim=1)


@dataclasses.dataclass()
class KLossDQNConfig(KernelCriticConfig):
    """Config of KLossDQN: discrete control without a target network.

    temperature: 0 is the maximum, Bellman's own equation; above, the soft (entropy-regularised) one with that
        coefficient of the entropy, in units of reward as the critic sees it. With a hard maximum the gradient
        at s' falls on one action alone, which flattens the differences that a policy lives from; a little
        softness shares it out and makes training steadier. The policy that is sampled and evaluated is
        softmax(Q / temperature), `predict` is greedy.
    Other fields as in d3rlpy's DQNConfig; the kernel's in KernelCriticConfig.
    """

    batch_size: int = 256
    learning_rate: float = 3e-3
    diag_weight: Optional[float] = 0.1  # noqa: UP045
    optim_factory: OptimizerFactory = make_optimizer_field()
    encoder_factory: EncoderFactory = make_encoder_field()
    q_func_factory: QFunctionFactory = make_q_func_field()
    n_critics: int = 1
    temperature: float = 0.1

    def create(self, device: Any = False, enable_ddp: bool = False) -> KLossDQN:
        """The algorithm."""
        return KLossDQN(self, device, enable_ddp)

    @staticmethod
    def get_type() -> str:
        """Name in files."""
        return "kloss_dqn"


class KLossDQN(KernelCriticAlgo[Any, Any]):
    """Q-learning whose critic minimises the kernel loss of the optimality residual."""

    def __init__(self, config: Any, device: Any = False, enable_ddp: bool = False, impl: Any = None) -> None:
        if not config.temperature >= 0.0:
            raise ConfigError(f"temperature is {config.temperature!r}; give 0 or a positive number")
        super().__init__(config, device, enable_ddp, impl)

    def inner_create_impl(self, observation_shape: Sequence[int], action_size: int) -> None:
        """Networks, optimiser and kernel."""
        config = self._config
        q_funcs, forwarder, optim = self.make_discrete_critic(
            observation_shape,
            action_size,
            config.encoder_factory,
            config.optim_factory,
            config.learning_rate,
        )
        kernel = self.make_kernel(observation_shape, action_size)
        modules = KernelCriticModules(q_funcs=q_funcs, critic_optim=optim, kernel=kernel)
        options = self.impl_options(observation_shape, action_size)
        self._impl = self.make_impl(
            modules, q_func_forwarder=forwarder, temperature=config.temperature, **options
        )

    def make_impl(self, modules: KernelCriticModules, **options: Any) -> KLossDQNImpl:
        """The implementation over these modules."""
        return KLossDQNImpl(modules=modules, **options)

    def get_action_type(self) -> ActionSpace:
        """Discrete."""
        return ActionSpace.DISCRETE


register_learnable(KLossDQNConfig)
