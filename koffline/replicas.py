"""Stacked networks: R replicas with a leading axis, evaluated and differentiated by the
same tensor products.

Parameters of replica r are row r of one flat (R, P) tensor, so that an optimiser step,
a target copy or an average is one operation for all. A replica's numbers do not depend
on how many others are in the stack. The backward pass is written by hand.

    network = StackedMLP.initialise((4, 64, 64, 2), seeds=range(10))
    network.forward(observations)                 # (N, 4) -> (10, N, 2)
    network.features(observations)                # last hidden layer, (10, N, 64)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from koffline.errors import ConfigError, DataError

Pullback = Callable[[Tensor], Tensor]
Layers = list[tuple[Tensor, Tensor]]
_LARGEST_BUFFER = 1 << 24  # largest buffer, in numbers
_NARROW = 16  # with fewer outputs a batched product is computed as its transpose


class StackedMLP:
    """R multilayer perceptrons.

    sizes: (inputs, hidden…, outputs). activation: "relu" or "tanh" between layers, else
    ConfigError. flat: parameters (R, P), modified in place by training.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        flat: Float[Tensor, "replica parameter"],
        activation: str = "relu",
    ) -> None:
        if activation not in ("relu", "tanh"):
            raise ConfigError(f"activation is '{activation}'; use one of relu, tanh")
        self.sizes = tuple(int(size) for size in sizes)
        self.flat = flat
        self.activation = activation
        self._views = self.layers(flat)
        self._workspace = StepBuffers()
        self._gradient_buffer: tuple[Tensor, Layers] | None = None

    @classmethod
    def initialise(
        cls,
        sizes: Sequence[int],
        seeds: Sequence[int],
        activation: str = "relu",
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> StackedMLP:
        """One replica per seed; weights and biases uniform in ±1/√fan_in, drawn in
        float64 on the CPU.
        """
        rows = []
        for seed in seeds:
            generator = torch.Generator().manual_seed(int(seed))
            parts = []
            for fan_in, fan_out in itertools.pairwise(sizes):
                uniform = torch.rand(
                    (fan_in + 1) * fan_out, generator=generator, dtype=torch.float64
                )
                parts.append((2.0 * uniform - 1.0) / math.sqrt(fan_in))
            rows.append(torch.cat(parts))
        return cls(sizes, torch.stack(rows).to(device, dtype), activation)

    def __reduce__(
        self,
    ) -> tuple[type[StackedMLP], tuple[tuple[int, ...], Tensor, str]]:
        # without buffers and views, which are made again
        return StackedMLP, (self.sizes, self.flat, self.activation)

    @property
    def replicas(self) -> int:
        """Number R of replicas."""
        return self.flat.shape[0]

    def with_flat(self, flat: Float[Tensor, "replica parameter"]) -> StackedMLP:
        """Networks of the same shape with other parameters; `flat` is not copied."""
        return StackedMLP(self.sizes, flat, self.activation)

    def select(self, replicas: Sequence[int] | Tensor) -> StackedMLP:
        """The stack of the given replicas, copied."""
        return self.with_flat(
            self.flat[torch.as_tensor(replicas, device=self.flat.device)]
        )

    def layers(self, flat: Tensor) -> Layers:
        """Views of parameters, or of a gradient: weights (R, in, out), biases (R, 1,
        out) per layer.
        """
        shapes = list(itertools.pairwise(self.sizes))
        parts = iter(
            flat.split([part for a, b in shapes for part in (a * b, b)], dim=1)
        )
        return [
            (next(parts).unflatten(1, shape), next(parts).unsqueeze(1))
            for shape in shapes
        ]

    def forward(
        self, x: Float[Tensor, "*replica row input"]
    ) -> Float[Tensor, "replica row output"]:
        """Outputs (R, N, n) for rows (N, d) shared by all replicas or (R, N, d) of
        their own.
        """
        return affine(self._hidden_layers(x)[-1], *self._views[-1])

    def features(
        self, x: Float[Tensor, "*replica row input"]
    ) -> Float[Tensor, "replica row hidden"]:
        """Last hidden layer, (R, N, H), in which the output is linear."""
        return self._hidden_layers(x, in_buffers=False)[-1]

    def feature_columns(
        self, x: Float[Tensor, "row input"]
    ) -> Float[Tensor, "replica feature row"]:
        """Last hidden layer with a one appended, (R, H + 1, N): a column for each of
        the rows (N, d) that all replicas share.

        Products of narrow layers take two thirds of the time of `features`.
        """
        columns = x.mT.expand(self.replicas, *x.mT.shape)
        result = x.new_empty(self.replicas, self.sizes[-2] + 1, len(x))
        result[:, -1] = 1.0
        hidden_layers = self._views[:-1]
        if not hidden_layers:
            result[:, :-1] = columns
        for number, (weight, bias) in enumerate(hidden_layers, start=1):
            out = None
            if number == len(hidden_layers):
                out = result[:, :-1]
            columns = torch.baddbmm(bias.mT, weight.mT, columns, out=out)
            if self.activation == "relu":
                columns.relu_()
            else:
                columns = _tanh(columns)
        return result

    def forward_with_pullback(self, x: Tensor) -> tuple[Tensor, Pullback]:
        """Outputs, and the map from their gradient (R, N, n) to the gradient in `flat`
        (R, P).

        Call the map at most once and before the next forward pass: both write into the
        same buffers.
        """
        inputs = self._hidden_layers(x)
        outputs = affine(inputs[-1], *self._views[-1])
        single = len(inputs) == 2 and self.activation == "relu" and self.sizes[-1] == 1
        pull = self._pull
        if single:
            pull = self._pull_single_output
        return outputs, lambda gradient: pull(gradient, inputs)

    def _hidden_layers(self, x: Tensor, in_buffers: bool = True) -> list[Tensor]:
        """The inputs of each layer."""
        if x.ndim not in (2, 3) or x.shape[-1] != self.sizes[0]:
            raise DataError(
                f"network inputs have shape {tuple(x.shape)}; give ([R,] N,"
                f" {self.sizes[0]})"
            )
        inputs = [x.expand(self.replicas, *x.shape[-2:])]
        for index, (weight, bias) in enumerate(self._views[:-1]):
            if in_buffers:
                buffer = self._buffer(index, inputs[-1], weight)
            else:
                buffer = None
            linear = affine(inputs[-1], weight, bias, buffer)
            if self.activation == "relu":
                inputs.append(linear.relu_())
            else:
                inputs.append(_tanh(linear))
        return inputs

    def _pull(self, gradient: Tensor, inputs: list[Tensor]) -> Tensor:
        """Pull a gradient back layer by layer; slopes follow from the outputs of the
        activation.
        """
        aten = torch.ops.aten
        result, slots = self._gradient()
        for index in reversed(range(len(slots))):
            weight_slot, bias_slot = slots[index]
            weight_slot.copy_(outer_sum(inputs[index], gradient))
            torch.sum(gradient, dim=1, keepdim=True, out=bias_slot)
            if index:
                weight = self._views[index][0]
                buffer = self._buffer(("gradient", index), gradient, weight.mT)
                if weight.shape[-1] == 1:  # elementwise, which is faster
                    gradient = torch.mul(gradient, weight.mT, out=buffer)
                else:
                    gradient = torch.bmm(gradient, weight.mT, out=buffer)
                if self.activation == "relu":
                    aten.threshold_backward.grad_input(
                        gradient, inputs[index], 0.0, grad_input=gradient
                    )
                else:
                    aten.tanh_backward.grad_input(
                        gradient, inputs[index], grad_input=gradient
                    )
        return result

    def _pull_single_output(self, gradient: Tensor, inputs: list[Tensor]) -> Tensor:
        """Pullback of one ReLU layer and one output, without forming the hidden
        gradient (R, N, H).

        It is g m w with m the 0/1 mask of active units, so its product with the inputs
        is T w where T = (x g)ᵀ m; and as the hidden layer is m (x W), the last layer's
        gradient gᵀ m (x W) is Σ_d W T.
        """
        result, (_, (top_slot, top_bias_slot)) = self._gradient()
        rows = gradient.squeeze(2).unsqueeze(1)  # (R, 1, N)
        torch.sum(rows, dim=2, keepdim=True, out=top_bias_slot)
        fan_in = self.sizes[0]
        hidden = self.sizes[1]
        top = self._views[1][0]
        weighted = self._workspace.take(
            "weighted", (len(rows), fan_in + 1, rows.shape[2]), rows
        )
        torch.mul(inputs[0].mT, rows, out=weighted[:, :fan_in])
        weighted[:, fan_in:] = rows  # the bias is one more input, always one
        both = (
            fan_in + 1
        ) * hidden  # weights and biases of the first layer follow each other
        slot = result[:, :both].unflatten(1, (fan_in + 1, hidden))
        product = torch.bmm(weighted, inputs[1].sign_())  # (R, d + 1, N) @ (R, N, H)
        torch.mul(product, top.mT, out=slot)
        product.mul_(self.flat[:, :both].unflatten(1, (fan_in + 1, hidden)))
        torch.sum(product, dim=1, keepdim=True, out=top_slot.mT)
        return result

    def _gradient(self) -> tuple[Tensor, Layers]:
        """The buffer of the parameter gradient, and its views."""
        if self._gradient_buffer is None:
            result = torch.empty_like(self.flat)
            self._gradient_buffer = result, self.layers(result)
        return self._gradient_buffer

    def _buffer(self, name: object, x: Tensor, weight: Tensor) -> Tensor | None:
        """Buffer (R, N, out) for x W; None if gradients are recorded or it would be too
        large.
        """
        shape = (*x.shape[:2], weight.shape[2])
        if torch.is_grad_enabled() or math.prod(shape) > _LARGEST_BUFFER:
            return None
        return self._workspace.take(name, shape, self.flat)


@dataclass(frozen=True, eq=False)
class ReplicaPlan:
    """Settings in which the replicas of one run differ.

    learning_rates: one per replica. batch_seeds: seeds of the replicas' mini-batches;
    replicas with equal seeds (and equal row sets) share mini-batches, and the kernel is
    computed once for all of them. row_sets: index tensors into the table, such as
    bootstrap samples (a row that occurs twice counts twice);
    row_set_of: the row set of each replica; None: all replicas use the whole table.
    """

    learning_rates: tuple[float, ...]
    batch_seeds: tuple[int, ...]
    row_sets: tuple[Tensor, ...] = ()
    row_set_of: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        count = len(self.learning_rates)
        sets = self.row_sets
        chosen = self.row_set_of
        if len(self.batch_seeds) != count or len(chosen) != (count if sets else 0):
            raise ConfigError(
                f"plan has {count} learning rates, {len(self.batch_seeds)} batch seeds"
                f" and {len(chosen)} numbers of its {len(sets)} row sets; give one of"
                " each per replica"
            )

    @classmethod
    def grid(cls, seeds: Sequence[int], learning_rates: Sequence[float]) -> ReplicaPlan:
        """Every learning rate with every seed, seed by seed; the rates of one seed
        share mini-batches.

        Initialise the networks with each seed repeated ``len(learning_rates)`` times.
        """
        batch_seeds = tuple(int(seed) for seed in seeds for _ in learning_rates)
        return cls(tuple(learning_rates) * len(seeds), batch_seeds)

    def __len__(self) -> int:
        return len(self.learning_rates)

    def select(self, replicas: slice) -> ReplicaPlan:
        """The plan of some of the replicas, whose numbers stay what they were."""
        return ReplicaPlan(
            learning_rates=self.learning_rates[replicas],
            batch_seeds=self.batch_seeds[replicas],
            row_sets=self.row_sets,
            row_set_of=self.row_set_of[replicas],
        )

    @property
    def groups(self) -> tuple[tuple[int, int], ...]:
        """(batch seed, row set) of each group of replicas that share mini-batches, in
        order of appearance.
        """
        return tuple(dict.fromkeys(self._keys()))

    @property
    def group_of(self) -> tuple[int, ...]:
        """Number of each replica's group."""
        return tuple(map(self.groups.index, self._keys()))

    def _keys(self) -> list[tuple[int, int]]:
        return list(
            zip(self.batch_seeds, self.row_set_of or (-1,) * len(self), strict=True)
        )


class StepBuffers:
    """Buffers reused in every step, because first access to new memory costs more than
    the arithmetic.
    """

    def __init__(self) -> None:
        self._buffers: dict[object, Tensor] = {}

    def take(self, name: object, shape: Sequence[int], like: Tensor) -> Tensor:
        """The named buffer, with arbitrary content; a new one if the shape has
        changed.
        """
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != tuple(shape):
            buffer = self._buffers[name] = torch.empty(
                *shape, dtype=like.dtype, device=like.device
            )
        return buffer


class StackedAdam:
    """Adam on flat (R, P) parameters: a few operations for all replicas, one learning
    rate per replica.

    Decay rates are 0.9 and 0.999. epsilon: one number, or one per replica, (R, 1).
    """

    kept = ("_mean", "_square", "_steps")

    def __init__(self, flat: Tensor, epsilon: float | Tensor = 1e-8) -> None:
        self._epsilon = epsilon
        self._mean = torch.zeros_like(flat)
        self._square = torch.zeros_like(flat)
        self._scratch = torch.empty_like(flat)
        self._steps = 0

    def update(
        self, flat: Tensor, gradient: Tensor, rates: Float[Tensor, "replica 1"]
    ) -> None:
        """Take one step of Adam: move `flat` (R, P) in place against `gradient` (R, P).

        rates: learning rates. Bias corrections are folded into the step's scalars.
        (Kingma & Ba 2015, algorithm 1)
        """
        self._steps += 1
        first = 0.9
        second = 0.999
        root = math.sqrt(1.0 - second**self._steps)
        self._mean.lerp_(gradient, 1.0 - first)
        self._square.mul_(second).addcmul_(gradient, gradient, value=1.0 - second)
        torch.sqrt(self._square, out=self._scratch).add_(self._epsilon * root)
        torch.div(self._mean, self._scratch, out=self._scratch)
        flat.addcmul_(self._scratch, rates, value=-root / (1.0 - first**self._steps))


def affine(
    x: Tensor, weight: Tensor, bias: Tensor, out: Tensor | None = None
) -> Tensor:
    """x W + b, (R, N, out); with few outputs as its transpose, because narrow batched
    products are slow.
    """
    if out is None and weight.shape[-1] < _NARROW:
        rows = _as_rows(
            weight
        ).contiguous()  # (R, out, in): this small copy saves two thirds of the time
        return torch.baddbmm(bias.mT, rows, x.mT).mT
    return torch.baddbmm(bias, x, weight, out=out)


def outer_sum(x: Tensor, gradient: Tensor) -> Tensor:
    """Product xᵀ g, (R, in, out); with few outputs computed as its transpose."""
    if gradient.shape[-1] < _NARROW:
        return torch.bmm(_as_rows(gradient), x).mT
    return torch.bmm(x.mT, gradient)


def _as_rows(columns: Tensor) -> Tensor:
    """The transpose; a single column is reshaped instead, because stride 1 in both axes
    is slow.
    """
    if columns.shape[-1] > 1:
        return columns.mT
    return columns.squeeze(2).unsqueeze(1)


def _tanh(x: Tensor) -> Tensor:
    """Apply x.tanh_(); on the CPU without gradients by NumPy, which is ten times
    faster.
    """
    plain = x.device.type == "cpu" and not torch.is_grad_enabled() and type(x) is Tensor
    if not plain or torch._C._functorch.is_functorch_wrapped_tensor(x):
        return x.tanh_()
    array = x.numpy()
    np.tanh(array, out=array)
    return x
