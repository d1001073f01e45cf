"""Mixtures as files that need neither koffline nor d3rlpy: TorchScript and ONNX."""

from __future__ import annotations

import importlib.util
import math
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from koffline.algos.model_files import traced
from koffline.data import quiet
from koffline.policies import Mixture, MixturePart
from koffline.policies.builtin import Mlp
from koffline.store.files import atomic_file

_EXAMPLE_ROWS = 2
_ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "tanh": nn.Tanh}


class MixtureModule(nn.Module):
    """A mixture as a module: of discrete actions the probabilities (N, n), of
    continuous ones actions (N, k).

    Actions are drawn anew in every call, unless one deterministic network acts alone.
    Observations (N, …) are floats in the units of the log.
    """

    def __init__(self, mixture: Mixture) -> None:
        super().__init__()
        self.shares = [share for share, _ in mixture.acting]
        self.parts = nn.ModuleList(_PartModule(part) for _, part in mixture.acting)
        self.is_discrete = mixture.is_discrete

    def forward(self, observations: Tensor) -> Tensor:
        """Probabilities or actions."""
        rows = observations.to(torch.float32).flatten(1)
        if self.is_discrete:
            total = self.shares[0] * self.parts[0](rows)
            for share, part in zip(self.shares[1:], self.parts[1:], strict=True):
                total = total + share * part(rows)
            return total
        actions = self.parts[0](rows)
        if len(self.shares) == 1:
            return actions
        uniform = torch.rand_like(rows[:, :1])
        below = self.shares[0]
        for share, part in zip(self.shares[1:], self.parts[1:], strict=True):
            actions = torch.where(uniform >= below, part(rows), actions)
            below = below + share
        return actions


class _Network(nn.Module):
    """The last layer of a network, of flat observations in the units of the log."""

    mean: Tensor
    scale: Tensor

    def __init__(self, mlp: Mlp) -> None:
        super().__init__()
        self.register_buffer("mean", torch.as_tensor(mlp.observation_mean).float())
        self.register_buffer("scale", torch.as_tensor(mlp.observation_std).float())
        layers = nn.Sequential()
        for weight, bias in zip(mlp.weights, mlp.biases, strict=True):
            if len(layers):
                layers.append(_ACTIVATIONS[mlp.activation]())
            linear = nn.Linear(weight.shape[0], weight.shape[1])
            linear.weight.data = torch.as_tensor(weight.T).float()
            linear.bias.data = torch.as_tensor(bias).float()
            layers.append(linear)
        self.layers = layers.requires_grad_(False)

    def forward(self, rows: Tensor) -> Tensor:
        values: Tensor = self.layers((rows - self.mean) / self.scale)
        return values


class _PartModule(nn.Module):
    """One network of a mixture: probabilities, or actions."""

    def __init__(self, part: MixturePart) -> None:
        super().__init__()
        mlp = part.network
        self.network = _Network(mlp)
        self.gate = None
        if part.gate is not None:
            self.gate = _Network(part.gate)
        self.log_ratio = math.log(max(part.gate_ratio, 1e-30))
        self.output = mlp.output
        self.temperature = mlp.temperature
        self.outputs = mlp.outputs
        self.low: Tensor | None = None
        self.high: Tensor | None = None
        if mlp.action_low is not None and mlp.action_high is not None:
            self.low = torch.as_tensor(mlp.action_low).float().expand(mlp.outputs)
            self.high = torch.as_tensor(mlp.action_high).float().expand(mlp.outputs)
        self.std = None
        if mlp.std is not None:
            self.std = torch.as_tensor(mlp.std).float().expand(mlp.outputs)

    def forward(self, rows: Tensor) -> Tensor:
        values = self.network(rows)
        if self.output in ("softmax", "argmax"):
            return self._probabilities(rows, values)
        if self.output == "tanh":
            values = torch.tanh(values)
            if self.low is None or self.high is None:
                return values
            return self.low + (values + 1.0) / 2.0 * (self.high - self.low)
        if self.std is not None:
            values = values + self.std * torch.randn_like(values)
        if self.low is None or self.high is None:
            return values
        return torch.minimum(torch.maximum(values, self.low), self.high)

    def _probabilities(self, rows: Tensor, values: Tensor) -> Tensor:
        if self.gate is not None:
            logits = self.gate(rows)
            ratios = logits - logits.amax(dim=1, keepdim=True)
            values = torch.where(ratios >= self.log_ratio, values, -1e30)
        if self.output == "softmax":
            return torch.softmax(values / self.temperature, dim=1)
        best = values.argmax(dim=1)
        return nn.functional.one_hot(best, self.outputs).to(values)


def export_mixture(
    mixture: Mixture, folder: Path, observation_shape: Sequence[int] | None = None
) -> list[Path]:
    """Write ``policy.pt`` (TorchScript), and ``policy.onnx`` if the package onnx is
    installed, to a folder; return their paths.

    observation_shape: of one observation, which ONNX fixes; by default it is flat.
    """
    shape: tuple[int, ...] = (mixture.inputs,)
    if observation_shape is not None:
        shape = tuple(observation_shape)
    suffixes = [".pt"]
    if importlib.util.find_spec("onnx") is not None:
        suffixes.append(".onnx")
    module = MixtureModule(mixture).eval()
    paths = []
    for suffix in suffixes:
        path = folder / f"policy{suffix}"
        with (
            atomic_file(path, force=True) as temporary,
            quiet(),
            warnings.catch_warnings(),
            torch.random.fork_rng(devices=[]),
            torch.no_grad(),
        ):
            # torch warns of tracing, and that both formats are deprecated
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            examples = (torch.rand((_EXAMPLE_ROWS, *shape)),)
            content = traced(module, examples, is_onnx=suffix == ".onnx")
            temporary.write_bytes(content)
        paths.append(path)
    return paths
