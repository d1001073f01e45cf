"""The behavior policy learnt from the log: a network that predicts logged actions."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from koffline.data.hashing import unit_hash
from koffline.data.transitions import Discrete, Transitions
from koffline.improvement.scaling import LogScaling
from koffline.policies import MixturePart

_HIDDEN = (64, 64)
_BATCH = 256
_LEARNING_RATE = 2e-3
_HELD_OUT = 0.15  # share of the units that say when to stop
_MOST_STEPS = 3000
_PASSES = 60  # of the rows at most
_CHECKS = 30  # of the held-out loss
_PATIENCE = 6  # checks without improvement
_WARM_STEPS = 10  # which take longer
_STOP_STREAM = 0x636C6F6E
_LEAST_DEVIATION = 1e-2  # of an action, in half widths of its range


@dataclass(frozen=True, eq=False)
class Clone:
    """``part``: the clone, which draws its actions as the behavior policy does;
    ``mode``: its likeliest action; ``layers``: of the network. ``step_seconds``: a
    gradient step took, None if it was not trained here.
    """

    part: MixturePart
    mode: MixturePart
    layers: list[tuple[np.ndarray, np.ndarray]]
    step_seconds: float | None = None


def fit_clone(log: Transitions, scaling: LogScaling, seed: int) -> Clone:
    """Fit the clone by the likelihood of logged actions: a softmax of discrete ones, a
    Gaussian of constant deviation of continuous ones.

    log: the training part, as logged. Training stops when the likelihood on a seventh
    of its units, which it does not see, no longer rises.
    """
    inputs = torch.as_tensor(scaling.inputs(log.observations), dtype=torch.float32)
    weights = torch.tensor(np.array(log.row_weights), dtype=torch.float32)
    is_discrete = isinstance(log.action_space, Discrete)
    if isinstance(log.action_space, Discrete):
        outputs = log.action_space.n
        actions = torch.as_tensor(np.array(log.actions))
    else:
        outputs = log.action_space.k
        scaled = scaling.scaled_actions(log.actions)
        actions = torch.as_tensor(scaled, dtype=torch.float32)
    network = _network(inputs.shape[1], outputs, seed)

    def losses(rows: Tensor) -> Tensor:
        values = network(inputs[rows])
        if is_discrete:
            return nn.functional.cross_entropy(values, actions[rows], reduction="none")
        return (values - actions[rows]).square().sum(dim=1)

    step_seconds = _train(network, losses, weights, _stop_rows(log, seed), seed)
    layers = [
        (
            module.weight.detach().numpy().T.astype(np.float64),
            module.bias.detach().numpy().astype(np.float64),
        )
        for module in network
        if isinstance(module, nn.Linear)
    ]
    if is_discrete:
        return Clone(
            part=MixturePart(scaling.mlp(layers, "softmax")),
            mode=MixturePart(scaling.mlp(layers, "argmax")),
            layers=layers,
            step_seconds=step_seconds,
        )
    with torch.no_grad():
        gaps = (network(inputs) - actions).double().numpy()
    share = log.row_weights / log.row_weights.sum()
    deviation = np.sqrt(share @ np.square(gaps))
    deviation = np.maximum(deviation, _LEAST_DEVIATION)
    native = scaling.native_layers(layers)
    return Clone(
        part=MixturePart(scaling.gaussian(native, deviation)),
        mode=MixturePart(scaling.clipped(native)),
        layers=layers,
        step_seconds=step_seconds,
    )


def _network(inputs: int, outputs: int, seed: int) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = nn.Sequential()
        width = inputs
        for hidden in _HIDDEN:
            network.append(nn.Linear(width, hidden))
            network.append(nn.ReLU())
            width = hidden
        network.append(nn.Linear(width, outputs))
    return network


def _stop_rows(log: Transitions, seed: int) -> np.ndarray:
    """Mask (N,) of the rows that say when to stop, those of whole units."""
    units = log.units
    hashes = unit_hash(seed ^ _STOP_STREAM, 0, np.arange(int(units.max()) + 1))
    is_held_out = hashes < np.uint64(int(_HELD_OUT * 2.0**64))
    return is_held_out[units]


def _train(
    network: nn.Sequential,
    losses: Callable[[Tensor], Tensor],
    weights: Tensor,
    is_stop: np.ndarray,
    seed: int,
) -> float:
    """Train until the loss on the stop rows no longer falls, and keep the best
    network. Returns the seconds of a step, the first ones left out.
    """
    stop_rows = torch.as_tensor(np.flatnonzero(is_stop))
    rows = torch.as_tensor(np.flatnonzero(~is_stop))
    if not len(rows) or not len(stop_rows) or not bool(weights[rows].any()):
        rows = torch.arange(len(is_stop))
        stop_rows = rows
    steps = min(_MOST_STEPS, max(_CHECKS, math.ceil(_PASSES * len(rows) / _BATCH)))
    every = max(1, steps // _CHECKS)
    generator = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.Adam(network.parameters(), lr=_LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    best_loss = math.inf
    best = None
    failures = 0
    started = time.perf_counter()
    timed = 0
    with torch.enable_grad():
        for step in range(steps):
            timed += 1
            if step == _WARM_STEPS:
                started = time.perf_counter()
                timed = 1
            drawn = torch.randint(len(rows), (_BATCH,), generator=generator)
            batch = rows[drawn]
            loss = (losses(batch) * weights[batch]).mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
            if (step + 1) % every:
                continue
            with torch.no_grad():
                held_out = float((losses(stop_rows) * weights[stop_rows]).mean())
            failures += 1
            if held_out < best_loss:
                best_loss = held_out
                best = {
                    name: tensor.clone()
                    for name, tensor in network.state_dict().items()
                }
                failures = 0
            if failures == _PATIENCE:
                break
    step_seconds = (time.perf_counter() - started) / timed
    if best is not None:
        network.load_state_dict(best)
    return step_seconds
