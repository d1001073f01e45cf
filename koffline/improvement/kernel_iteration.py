"""Policy iteration by the kernel loss, for discrete actions: values of a policy, and a
policy that tilts the clone toward their advantages.

π'(a|s) ∝ β(a|s) exp(Q^π(s, a) / T) maximises E Q^π − T KL(π' ‖ β): where the log knows
little of an action, β is small and so is π'. (Peters, Mülling & Altün 2010; one step
from β: Brandfonbrener et al. 2021)
"""

from __future__ import annotations

from functools import reduce

import numpy as np
import torch
from scipy.linalg import block_diag

from koffline.config import EvaluationSettings
from koffline.data.transitions import Transitions
from koffline.fitting import threads
from koffline.improvement.clone import Clone
from koffline.improvement.scaling import Layers, LogScaling
from koffline.jobs.cores import cores
from koffline.ope.log.problem import prepare_problem
from koffline.ope.networks.fitted_q import fit_value_functions
from koffline.ope.networks.resampling import Resampling
from koffline.policies import DiscretePolicy, MixturePart
from koffline.policies.builtin import Mlp
from koffline.replicas import StackedMLP

_NETWORKS = 2  # whose mean is the value function


def kernel_policy_iteration(
    log: Transitions,
    clone: Clone,
    scaling: LogScaling,
    settings: EvaluationSettings,
    temperature: float,
    rounds: int,
) -> MixturePart:
    """The policy after ``rounds`` of evaluation and improvement, the first evaluating
    the clone.

    log: the training part, in the units of `LogScaling.scaled_log`. temperature: T, in
    deviations of the advantage over states and actions of the log. settings: of the
    value networks. Raises KofflineError if they diverge.
    """
    part = clone.part
    policy = _on_scaled(clone.layers)
    for _ in range(rounds):
        layers, deviation = _value_layers(log, policy, settings)
        tilted = _tilted(clone.layers, layers, temperature * deviation)
        policy = _on_scaled(tilted)
        part = MixturePart(scaling.mlp(tilted, "softmax"))
    return part


def _on_scaled(layers: Layers) -> DiscretePolicy:
    """The softmax policy of layers, of scaled observations."""

    weights = tuple(weight for weight, _ in layers)
    biases = tuple(bias for _, bias in layers)
    network = Mlp(weights, biases, "softmax")
    return DiscretePolicy(network.outputs, network.discrete, "tilted clone")


def _value_layers(
    log: Transitions, policy: DiscretePolicy, settings: EvaluationSettings
) -> tuple[Layers, float]:
    """Layers of Q^π, and the deviation of its advantage over actions, as the policy
    takes them, in the states of the log.
    """
    with torch.no_grad(), threads(1), cores(1):
        problem = prepare_problem(
            log,
            policy,
            settings.gamma,
            action_draws=1,
            generator=np.random.default_rng(settings.seed),
        )
        resampling = Resampling.draw(problem, _NETWORKS, 0, settings.seed)
        fitted = fit_value_functions(problem, resampling, settings)
        network = fitted.network_of(fitted.head)
        alive = [step is None for step in fitted.record.diverged_at]
        network = network.select(np.flatnonzero(alive).tolist())
        values = network.forward(torch.as_tensor(problem.inputs).to(network.flat)).mean(
            dim=0
        )
    probabilities = policy.probabilities(log.observations)
    gaps = values.cpu().double().numpy()
    gaps = gaps - (probabilities * gaps).sum(axis=1, keepdims=True)
    uniform = np.square(gaps).mean(axis=1)
    share = log.row_weights / log.row_weights.sum()
    deviation = float(np.sqrt(share @ uniform))
    layers = _mean_layers(network)
    # of the problem's own standardised observations
    weight, bias = layers[0]
    location = problem.input_location[:, None]
    scale = problem.input_scale[:, None]
    first = (weight / scale, bias - (location / scale * weight).sum(axis=0))
    return [first, *layers[1:]], max(deviation, 1e-12)


def _mean_layers(network: StackedMLP) -> list[tuple[np.ndarray, np.ndarray]]:
    """Layers of one network whose output is the mean over a stack of networks: their
    hidden layers side by side.
    """
    stacked = [
        (weight.cpu().double().numpy(), bias.cpu().double().numpy()[:, 0])
        for weight, bias in network.layers(network.flat)
    ]
    count = len(stacked[0][0])
    layers = []
    for number, (weights, biases) in enumerate(stacked):
        if number == 0:
            layers.append((np.concatenate(list(weights), axis=1), biases.ravel()))
        elif number < len(stacked) - 1:
            layers.append((reduce(block_diag, weights), biases.ravel()))
        else:
            stacked_weights = np.concatenate(list(weights), axis=0) / count
            layers.append((stacked_weights, biases.mean(axis=0)))
    return layers


def _tilted(clone: Layers, values: Layers, temperature: float) -> Layers:
    """Layers of the logits log β + Q / T: both networks side by side, of equal depth.

    clone: whose outputs are log β up to a constant of the state. values: of Q.
    """
    assert len(clone) == len(values)
    layers = []
    last = len(clone) - 1
    for number in range(len(clone)):
        (clone_weight, clone_bias) = clone[number]
        (weight, bias) = values[number]
        if number == last:
            stacked = np.concatenate([clone_weight, weight / temperature], axis=0)
            layers.append((stacked, clone_bias + bias / temperature))
        elif number == 0:
            layers.append(
                (
                    np.concatenate([clone_weight, weight], axis=1),
                    np.concatenate([clone_bias, bias]),
                )
            )
        else:
            layers.append(
                (
                    block_diag(clone_weight, weight),
                    np.concatenate([clone_bias, bias]),
                )
            )
    return layers
