"""d3rlpy algorithms as policies of koffline, and their evaluation with a kernel-loss
critic (KLossFQE).

The policy, by algorithm (observation and action scalers are applied as in the model's
`predict`):

- DiscreteSAC, KLossDiscreteSAC, DiscreteTrustPCL: the probabilities of their policy;
  KLossDQN with a temperature: softmax of its values; any other discrete algorithm:
  greedy, as `predict`;
- those of _DETERMINISTIC: `predict`, for BC whatever its policy_type;
- any other continuous algorithm: draws from `sample_action`, mean `predict` with a
  fixed seed.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Optional, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from d3rlpy.algos.qlearning.base import QLearningAlgoBase
from d3rlpy.base import DeviceArg, LearnableBase, LearnableConfig
from d3rlpy.constants import ActionSpace
from d3rlpy.serializable_config import CONFIG_STORAGE
from d3rlpy.torch_utility import (
    Modules,
    TorchMiniBatch,
    convert_to_torch,
    unwrap_ddp_model,
)
from d3rlpy.types import Observation
from dataclasses_json import config as json_options
from torch import Tensor, nn

from koffline.algos.kernel_algo import KernelCriticAlgo
from koffline.algos.kernel_bellman_loss import CriticConfig, registered
from koffline.algos.kernel_critic import KernelImpl, Losses, modules_of, taken
from koffline.algos.model_files import check_acts, export_policy
from koffline.data.transitions import Continuous, Discrete
from koffline.errors import ConfigError, PolicyError
from koffline.policies import base
from koffline.policies.builtin import (
    gaussian_log_density,
    squashed_gaussian_log_density,
)

# Algorithm types as in config files; the density of other
# continuous algorithms is unknown here.
_DETERMINISTIC = (
    "bc",
    "ddpg",
    "td3",
    "td3_plus_bc",
    "kloss_td3_plus_bc",
    "rebrac",
    "kloss_rebrac",
    "prdc",
    "plas",
    "plas_with_perturbation",
)
_SQUASHED = ("sac", "cql", "cal_ql", "bear", "kloss_sac", "kloss_cql", "kloss_cal_ql")
_CUT = ("awac", "kloss_awac", "crr", "iql", "kloss_iql", "trust_pcl")
_ENCODE = CONFIG_STORAGE[LearnableConfig].encoder
_DECODE = CONFIG_STORAGE[LearnableConfig].decoder
# observations; standard deviations, or half ranges
_MANY = 100
_FAR = 20.0
_SCALED = (
    "as the model scales them; give the columns in the order and units that it was"
    " trained with"
)
_BEST_ONE = (
    "its predict and its exported file take the best one instead, and may be worth"
    " another amount"
)
Density = Callable[[np.ndarray, np.ndarray], np.ndarray]
Box = tuple[np.ndarray, np.ndarray]
# observations (N, …) to actions, or to probabilities (N, n)
Act = Callable[[np.ndarray], np.ndarray | Tensor]
Output = TypeVar("Output", bound=np.ndarray | Tensor)


def policy_from_algo(
    algo: LearnableBase,
    name: str,
    action_space: base.ActionSpace,
    observation_shape: Sequence[int],
) -> base.Policy:
    """The policy of a built or trained d3rlpy algorithm; for an evaluator, the policy
    that it evaluates.

    Raises PolicyError.
    """
    if isinstance(algo, KLossFQE):
        algo = algo.algo
    check_acts(algo, name)
    actions: base.ActionSpace
    if algo.get_action_type() == ActionSpace.DISCRETE:
        actions = Discrete(algo.action_size)
    else:
        actions = Continuous(algo.action_size)
    base.check_spaces(
        name, (actions, algo.observation_shape), (action_space, observation_shape)
    )
    shape = tuple(observation_shape)
    copies = max(1, int(getattr(algo.config, "n_action_samples", 1)))
    drawn_so = (f"{name} draws its actions and is valued so; {_BEST_ONE}",)

    def probabilities(observations: np.ndarray) -> Tensor:
        tensor = convert_to_torch(observations, algo.impl.device)
        return action_probabilities(algo, tensor)

    def familiar(
        method: Callable[[np.ndarray], Output], observations: np.ndarray
    ) -> Output:
        """Call a method, unless its observations are nothing like the training
        log's."""
        _check_familiar(algo, name, observations)
        return method(observations)

    if isinstance(action_space, Discrete):
        act: Act = algo.predict
        notes: tuple[str, ...] = ()
        if _has_probabilities(algo):
            act = probabilities
            notes = drawn_so
        return base.DiscretePolicy(
            action_space.n, partial(familiar, act), name, shape, copies, notes
        )
    if _is_deterministic(algo):
        act = partial(familiar, algo.predict)
        return base.ContinuousPolicy(
            action_space.k, act, None, name, shape, copies=copies
        )

    def drawn(
        seed: int, method: Callable[[np.ndarray], np.ndarray], observations: np.ndarray
    ) -> np.ndarray:
        with _seeded(seed, torch.device(algo.impl.device)):
            return familiar(method, observations)

    def sample(observations: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        return drawn(int(generator.integers(2**63)), algo.sample_action, observations)

    density, cut_to = _action_density(algo)
    return base.ContinuousPolicy(
        action_space.k,
        mean_function=partial(drawn, 0, algo.predict),
        sample_function=sample,
        name=name,
        observation_shape=shape,
        density_function=density,
        cut_to=cut_to,
        copies=copies,
        notes=drawn_so,
    )


def _check_familiar(
    algo: QLearningAlgoBase, name: str, observations: np.ndarray
) -> None:
    """Raise PolicyError if, by the algorithm's own scaler, most of many observations
    are far from all that it was trained on.
    """
    if algo.observation_scaler is None or len(observations) < _MANY:
        return
    scaled = _scaled(algo, convert_to_torch(observations, algo.impl.device))
    medians = scaled.abs().flatten(1).median(dim=0).values
    far, column = medians.max(dim=0)
    if far > _FAR:
        raise PolicyError(
            f"{name}: most observations are {far:.3g} in column {column} {_SCALED}"
        )


@contextlib.contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Context with torch's global generators seeded; they are restored afterwards."""
    devices = []
    if device.type == "cuda":
        devices = [device]
    with torch.random.fork_rng(devices=devices):
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            torch.cuda.manual_seed(seed)
        yield


@torch.no_grad()
def action_probabilities(algo: QLearningAlgoBase, observations: Tensor) -> Tensor:
    """Probabilities (N, n) of the policy; one for the greedy action if it has none.

    observations: in the units of the log.
    """
    scaled = _scaled(algo, observations)
    if _has_probabilities(algo):
        algo.impl.modules.set_eval()
        ours = getattr(algo.impl, "action_probabilities", None)
        if ours is None:
            return algo.impl.policy(scaled).probs
        return ours(scaled)
    greedy = algo.impl.predict_best_action(scaled).reshape(-1).long()
    return F.one_hot(greedy, algo.action_size).float()


def _is_deterministic(algo: QLearningAlgoBase) -> bool:
    return algo.config.get_type() in _DETERMINISTIC


def _has_probabilities(algo: QLearningAlgoBase) -> bool:
    is_ours = (
        hasattr(algo.impl, "action_probabilities")
        and getattr(algo.config, "temperature", 1.0) > 0.0
    )
    return is_ours or algo.config.get_type() == "discrete_sac"


def _scaled(algo: QLearningAlgoBase, observations: Tensor) -> Tensor:
    scaler = algo.observation_scaler
    if scaler is None:
        return observations
    return scaler.transform(observations)


def _action_density(algo: QLearningAlgoBase) -> tuple[Density | None, Box | None]:
    """Log density of the draws of `sample_action`, and the bounds at which draws are
    cut off.

    Draws of a Gaussian are cut off (_CUT) or squashed (_SQUASHED); None, None for all
    other algorithms (BCQ picks among candidates).
    """
    is_cut = algo.config.get_type() in _CUT
    if not is_cut and algo.config.get_type() not in _SQUASHED:
        return None, None
    policy = unwrap_ddp_model(algo.impl.policy)
    size = algo.action_size
    # action = centre + half · (the networks' action)
    centre = np.zeros(size)
    half = np.ones(size)
    if algo.action_scaler is not None:  # scalers are affine
        ends = torch.stack([torch.zeros(size), torch.ones(size)]).to(algo.impl.device)
        centre, end = _array(algo.action_scaler.reverse_transform(ends))
        half = end - centre
    box = (centre - half, centre + half)
    if hasattr(policy, "low"):  # Trust-PCL's policy has its own limits
        box = (
            centre + half * _array(policy.low)[0],
            centre + half * _array(policy.high)[0],
        )

    @torch.no_grad()
    def log_density(observations: np.ndarray, actions: np.ndarray) -> np.ndarray:
        algo.impl.modules.set_eval()
        output = policy(_scaled(algo, convert_to_torch(observations, algo.impl.device)))
        deviation = _array(output.logstd.exp())
        if is_cut:  # in the log's units, where the bounds are
            mean = centre + half * _array(output.squashed_mu)
            return gaussian_log_density(
                actions, mean, half * deviation, low=box[0], high=box[1]
            )
        inside = squashed_gaussian_log_density(
            (actions - centre) / half, _array(output.mu), deviation
        )
        return inside - float(np.log(half).sum())

    if not is_cut:
        return log_density, None
    return log_density, box


def _array(tensor: Tensor) -> np.ndarray:
    return tensor.detach().cpu().numpy().astype(np.float64)


class KLossFQEImpl(KernelImpl):
    """δ = r + discount · E Q(s', a') − Q(s, a), with a' from the policy at s'.

    The expectation is exact for discrete actions. For continuous actions of a
    stochastic policy it is replaced by one draw per row, independent between rows, so
    that products of residuals of different rows stay unbiased. algo: the policy, which
    has its own scalers. (Feng et al. 2019, equ:ourloss)
    """

    is_captured = False
    logs_loss = True

    def __init__(
        self,
        algo: QLearningAlgoBase,
        config: KLossFQEConfig,
        observation_shape: Sequence[int],
        action_size: int,
        modules: Modules,
        device: str,
    ) -> None:
        super().__init__(config, observation_shape, action_size, modules, device)
        self._algo = algo

    def compute_critic_loss(self, batch: TorchMiniBatch) -> Losses:
        """Gradient through Q(s, a) and Q(s', ·)."""
        # in the units of the log, as the policy takes observations
        logged = np.asarray(batch.numpy_batch.next_observations)
        raw = convert_to_torch(logged, self._device)
        if self._modules.kernel.n_actions:
            probabilities = action_probabilities(self._algo, raw)
            values, next_values = self.values_of_both(batch)
            value = taken(values, batch.actions)
            next_value = (
                probabilities.to(next_values) * self.backed_up(next_values)
            ).sum(dim=2)
        else:
            value, next_value = self.values_of_both(
                batch, self._actions(raw).to(batch.actions)
            )
            next_value = self.backed_up(next_value)
        return self.kernel_losses(batch, self.residual(batch, value, next_value))

    @torch.no_grad()
    def _actions(self, observations: Tensor) -> Tensor:
        """Actions of the target policy, scaled for the evaluator; observations in the
        units of the log.
        """
        algo = self._algo
        scaler = self._config.action_scaler
        if _is_deterministic(algo):
            act = algo.impl.predict_best_action
        else:
            act = algo.impl.sample_action
        actions = act(_scaled(algo, observations))
        if algo.action_scaler is not None:
            actions = algo.action_scaler.reverse_transform(actions)
        if scaler is None:
            return actions
        return scaler.transform(actions)


@dataclasses.dataclass()
class KLossFQEConfig(CriticConfig):
    """Config of KLossFQE; fields as in d3rlpy's FQEConfig, without those of the target
    network.

    policy: the config of the algorithm to evaluate; set by the constructor, saved with
    the evaluator.
    """

    policy: Optional[LearnableConfig] = dataclasses.field(  # noqa: UP045
        default=None,
        metadata=json_options(
            encoder=lambda x: x and _ENCODE(x), decoder=lambda x: x and _DECODE(x)
        ),
    )


class KLossFQE(KernelCriticAlgo):
    """Evaluation of `algo` with a kernel-loss critic (Le et al. 2019; Feng et al.
    2019).

    algo: a d3rlpy algorithm with networks; stochastic policies are evaluated as
    stochastic. `predict` and `sample_action` are those of the policy, `predict_value`
    is its action value, `predict_state_value` the expectation over its actions. The
    config is copied, and the policy's config added.
    """

    def __init__(
        self,
        algo: QLearningAlgoBase,
        config: KLossFQEConfig | None = None,
        device: DeviceArg = False,
    ) -> None:
        if not isinstance(algo, QLearningAlgoBase) or isinstance(algo, KLossFQE):
            raise ConfigError(
                f"give an algorithm, not {type(algo).__name__}; koffline.load(path)"
                " reads one"
            )
        config = config or KLossFQEConfig()
        is_random = algo.config.get_type().endswith("random_policy")
        if is_random:
            raise ConfigError(
                "a random policy has no networks; evaluate uniform actions by the"
                " policy 'uniform'"
            )
        if not isinstance(config, KLossFQEConfig):
            raise ConfigError(f"give a KLossFQEConfig, not {type(config).__name__}")
        self.algo = algo
        self.action_type = algo.get_action_type()
        super().__init__(dataclasses.replace(config, policy=algo.config), device)

    def inner_create_impl(self, shape: Sequence[int], size: int) -> None:
        """Create networks, optimiser, kernel and any missing networks of the policy.

        Raises ConfigError.
        """
        algo = self.algo
        if algo.impl is None:
            algo.create_impl(shape, size)
        policy_shape = tuple(algo.observation_shape)
        if policy_shape != tuple(shape) or algo.action_size != size:
            raise ConfigError(
                f"the policy is for observations {policy_shape} and {algo.action_size}"
                f" actions, the log has {tuple(shape)} and {size}; give the log that it"
                " was trained for"
            )
        target = nn.ModuleDict(algo.impl.modules.get_torch_modules()).to(self._device)
        modules = modules_of({**self.make_parts(shape, size), "target": target})
        self._impl = KLossFQEImpl(
            algo, self._config, shape, size, modules, self._device
        )

    def predict(self, x: Observation) -> np.ndarray:
        """The policy's greedy actions."""
        return self.algo.predict(x)

    def sample_action(self, x: Observation) -> np.ndarray:
        """Actions drawn from the policy."""
        return self.algo.sample_action(x)

    def predict_state_value(self, x: np.ndarray, draws: int = 16) -> np.ndarray:
        """Expected action value (N,) under the policy; a mean over `draws` for
        continuous actions.
        """
        if self.is_discrete:
            shares = (
                action_probabilities(self.algo, convert_to_torch(x, self._device))
                .cpu()
                .numpy()
            )
            values = [
                self.predict_value(x, np.full(len(x), action))
                for action in range(shares.shape[1])
            ]
            return (shares * np.stack(values, axis=1)).sum(axis=1)
        if _is_deterministic(self.algo):
            draws = 1
        return np.mean(
            [self.predict_value(x, self.algo.sample_action(x)) for _ in range(draws)],
            axis=0,
        )

    def save_policy(self, fname: str) -> None:
        """Save the evaluated policy."""
        export_policy(self.algo, fname)


DiscreteKLossFQE = KLossFQE  # d3rlpy has a class for each kind of actions


@registered("kloss_fqe", KLossFQEConfig)
def _from_config(config: KLossFQEConfig, device: DeviceArg) -> KLossFQE:
    """The evaluator for the policy in a config. Raises ConfigError if there is none."""
    if config.policy is None:
        raise ConfigError(
            "kloss_fqe has no policy to evaluate; use KLossFQE(algo, config)"
        )
    return KLossFQE(config.policy.create(device), config, device)
