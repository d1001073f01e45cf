"""KLossFQE: off-policy evaluation of a d3rlpy algorithm; the policy it evaluates is saved inside it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Optional

import numpy as np
import torch
from d3rlpy.algos.qlearning.base import QLearningAlgoBase
from d3rlpy.base import LearnableConfig
from d3rlpy.constants import ActionSpace
from d3rlpy.serializable_config import CONFIG_STORAGE
from d3rlpy.torch_utility import TorchMiniBatch, convert_to_torch
from dataclasses_json import config as json_options
from torch import Tensor, nn

from koffline.algos.d3_policy import action_probabilities, acts_deterministically, scaled_observations
from koffline.algos.kernel_algo import KernelCriticAlgo
from koffline.algos.kernel_bellman_loss import CriticConfig, registered
from koffline.algos.kernel_critic import KernelImpl, Losses, modules_of, taken
from koffline.algos.model_files import export_policy
from koffline.errors import ConfigError

_ENCODE, _DECODE = CONFIG_STORAGE[LearnableConfig].encoder, CONFIG_STORAGE[LearnableConfig].decoder


class KLossFQEImpl(KernelImpl):
    """δ = r + discount · E Q(s', a') − Q(s, a), a' what the policy does at s'.

    The expectation is exact for discrete actions; for continuous ones it is a draw if the policy is
    stochastic, one of its own for every row, so that products of residuals of different rows stay unbiased.
    algo: the policy, which has its own scalers.
    (Feng et al. 2019, equ:ourloss)
    """

    is_captured = False

    def __init__(self, algo: Any, *common: Any) -> None:
        super().__init__(*common)
        self._algo = algo

    def compute_critic_loss(self, batch: TorchMiniBatch) -> Losses:
        """Gradient through Q(s, a) and Q(s', ·)."""
        raw = self._unscaled(batch.next_observations)
        if batch.numpy_batch is not None:
            logged = np.asarray(batch.numpy_batch.next_observations)
            raw = convert_to_torch(logged, self._device).to(batch.next_observations)
        if self._modules.kernel.n_actions:
            probabilities = self.policy_probabilities(raw)
            values, next_values = self.values_of_both(batch)
            value = taken(values, batch.actions)
            next_value = (probabilities.to(next_values) * self.backed_up(next_values)).sum(dim=2)
        else:
            next_actions = self._policy_actions(raw, is_drawn=True).to(batch.actions)
            value, next_value = self.values_of_both(batch, next_actions)
            next_value = self.backed_up(next_value)
        return self.kernel_losses(batch, self.residual(batch, value, next_value))

    @torch.no_grad()
    def policy_probabilities(self, observations: Tensor) -> Tensor:
        """Probabilities (N, n) of the target policy; observations are in the units of the log."""
        return action_probabilities(self._algo, observations.float())

    def action_probabilities(self, x: Tensor) -> Tensor:
        """Action probabilities of the target policy; observations are scaled by the evaluator."""
        return self.policy_probabilities(self._unscaled(x))

    def inner_predict_best_action(self, x: Tensor) -> Tensor:
        """Greedy actions of the target policy; observations are scaled by the evaluator."""
        return self._policy_actions(self._unscaled(x), is_drawn=False)

    def inner_sample_action(self, x: Tensor) -> Tensor:
        """Actions drawn from the target policy; observations are scaled by the evaluator."""
        return self._policy_actions(self._unscaled(x), is_drawn=True)

    @torch.no_grad()
    def _policy_actions(self, observations: Tensor, is_drawn: bool) -> Tensor:
        """Actions of the target policy, scaled for the evaluator; observations in the units of the log."""
        algo, own = self._algo, self._config.action_scaler
        if is_drawn and self._modules.kernel.n_actions:
            return torch.distributions.Categorical(self.policy_probabilities(observations)).sample()
        draws = is_drawn and not acts_deterministically(algo)
        act = algo.impl.sample_action if draws else algo.impl.predict_best_action
        actions = act(scaled_observations(algo, observations.float()))
        if algo.action_scaler is not None:
            actions = algo.action_scaler.reverse_transform(actions)
        return actions if own is None else own.transform(actions)

    def _unscaled(self, observations: Tensor) -> Tensor:
        scaler = self._config.observation_scaler
        return observations if scaler is None else scaler.reverse_transform(observations)


@dataclasses.dataclass()
class KLossFQEConfig(CriticConfig):
    """Config of KLossFQE and DiscreteKLossFQE; fields as in d3rlpy's FQEConfig without the target network's.

    policy: the config of the algorithm to evaluate; set by the constructor, saved with the evaluator.
    """

    policy: Optional[LearnableConfig] = dataclasses.field(  # noqa: UP045
        default=None,
        metadata=json_options(encoder=lambda x: x and _ENCODE(x), decoder=lambda x: x and _DECODE(x)),
    )


class _FQE(KernelCriticAlgo):
    """Evaluation of `algo` with a kernel-loss critic.

    algo: a d3rlpy algorithm whose networks are built; stochastic ones are evaluated as stochastic. `predict`
    and `sample_action` are the policy's, `predict_value` is its action value, `predict_state_value` the
    expectation over its actions. The config is copied and given the policy's config.
    """

    def __init__(self, algo: Any, config: Any = None, device: Any = False) -> None:
        is_algo = isinstance(algo, QLearningAlgoBase) and not isinstance(algo, _FQE)
        if not is_algo or algo.get_action_type() != self.get_action_type():
            what = f"{type(self).__name__} evaluates an algorithm for {self.action_type.name.lower()} actions"
            remedy = (
                "koffline.load(path) reads one; for discrete actions take DiscreteKLossFQE, else KLossFQE"
            )
            raise ConfigError(f"{what}, received a {type(algo).__name__}; {remedy}")
        self._algo = algo
        super().__init__(dataclasses.replace(config or KLossFQEConfig(), policy=algo.config), device)

    @property
    def algo(self) -> Any:
        """The algorithm that is evaluated."""
        return self._algo

    def inner_create_impl(self, shape: Sequence[int], size: int) -> None:
        """Create networks, optimiser, kernel and any missing networks of the policy. Raises ConfigError."""
        algo = self._algo
        if algo.impl is None:
            algo.create_impl(shape, size)
        own, log = (tuple(algo.observation_shape), algo.action_size), (tuple(shape), size)
        if own != log:
            what = f"the policy is for observations {own[0]} and {own[1]} actions, the log has {log[0]} and"
            raise ConfigError(f"{what} {log[1]}; give the log that it was trained for")
        target = nn.ModuleDict(algo.impl.modules.get_torch_modules()).to(self._device)
        modules = modules_of(**self.make_parts(shape, size), target=target)
        self._impl = KLossFQEImpl(algo, self._config, shape, size, modules, self._device)

    def predict(self, x: Any) -> Any:
        """The policy's greedy actions."""
        return self._algo.predict(x)

    def sample_action(self, x: Any) -> Any:
        """Actions drawn from the policy."""
        return self._algo.sample_action(x)

    def predict_state_value(self, x: np.ndarray, draws: int = 16) -> np.ndarray:
        """Expected action value (N,) under the policy; a mean over `draws` for continuous actions."""
        if self.is_discrete:
            assert self._impl is not None
            probabilities = self._impl.policy_probabilities(convert_to_torch(x, self._device)).cpu().numpy()
            actions = range(probabilities.shape[1])
            values = [self.predict_value(x, np.full(len(x), action)) for action in actions]
            return (probabilities * np.stack(values, axis=1)).sum(axis=1)
        count = 1 if acts_deterministically(self._algo) else draws
        return np.mean([self.predict_value(x, self._algo.sample_action(x)) for _ in range(count)], axis=0)

    def save_policy(self, fname: str) -> None:
        """Save the policy that is evaluated."""
        export_policy(self._algo, fname)


class KLossFQE(_FQE):
    """Off-policy evaluation with the kernel loss, continuous actions (Le et al. 2019; Feng et al. 2019)."""

    action_type = ActionSpace.CONTINUOUS


class DiscreteKLossFQE(_FQE):
    """Off-policy evaluation with the kernel loss, discrete actions (Le et al. 2019; Feng et al. 2019)."""

    action_type = ActionSpace.DISCRETE


@registered("kloss_fqe", KLossFQEConfig)
def evaluator_of(config: KLossFQEConfig, device: Any) -> _FQE:
    """The evaluator of the policy in a config. Raises ConfigError where there is none."""
    if config.policy is None:
        raise ConfigError(
            "kloss_fqe has no policy to evaluate; use KLossFQE(algo, config) or DiscreteKLossFQE"
        )
    algo = config.policy.create(device)
    is_discrete = algo.get_action_type() == ActionSpace.DISCRETE
    return (DiscreteKLossFQE if is_discrete else KLossFQE)(algo, config, device)
