"""One step of every replica: evaluate the rows, propagate the objective's gradients to
the parameters.

Objectives with a second function (w of GTD2, f of SBEED, a memory) have steps that also
update it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial, singledispatch

import torch
from jaxtyping import Float
from torch import Tensor

from koffline.batches import Batch, BatchSource
from koffline.errors import ConfigError
from koffline.objectives import (
    GradientTD2,
    MemoryLoss,
    Objective,
    ResidualObjective,
    SaddlePoint,
    ValueGradients,
    gram_product,
)
from koffline.replicas import ReplicaPlan, StackedAdam, StackedMLP, affine, outer_sum


class Step(ABC):
    """Loss and parameter gradient of an objective at each step of the training."""

    @abstractmethod
    def compute(
        self, step: int, network: StackedMLP, target: StackedMLP | None, rates: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Loss (R,) and its gradient in ``network.flat`` (R, P) on the mini-batches of
        `step`.

        target: None if the network itself gives the next values. rates: the learning
        rates (R, 1). The gradient may be in a buffer that the next call overwrites.
        """


class ResidualStep(Step):
    """Step of an objective without a second function; it has no state."""

    def __init__(self, objective: ResidualObjective, source: BatchSource) -> None:
        self._objective = objective
        self._source = source
        # of `FittedIteration`; an objective of a user need not have any
        self._next_bounds: tuple[float, float] | None = getattr(
            objective, "next_bounds", None
        )

    def compute(
        self, step: int, network: StackedMLP, target: StackedMLP | None, rates: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Loss and gradient, as `Step.compute`."""
        return self._at(self._source.numbers(step), network, target)

    def _at(
        self,
        numbers: tuple[Tensor, ...],
        network: StackedMLP,
        target: StackedMLP | None,
    ) -> tuple[Tensor, Tensor]:
        """`compute` on the rows with these numbers, from `BatchSource.numbers`."""
        batch, gram = self._source.read(*numbers)
        if self._objective.next_from == "network":
            compute_gradients = partial(
                self._objective.compute_gradients, discount=batch.discounts, gram=gram
            )
            return full_gradient(network, batch, compute_gradients)
        if self._objective.next_from == "nothing":
            outputs, pullback = network.forward_with_pullback(batch.inputs)
            residual = batch.rewards - read_values(outputs, batch.readout)
        else:
            # A semi-gradient: the next rows' values are held still.
            next_value = read_values(
                (target or network).forward(batch.next_inputs), batch.next_readout
            )
            if self._next_bounds is not None:
                next_value = next_value.clamp(*self._next_bounds)
            outputs, pullback = network.forward_with_pullback(batch.inputs)
            value = read_values(outputs, batch.readout)
            residual = residual_of(batch, value, next_value)
        gradients = self._objective.compute_gradients(residual, batch.discounts, gram)
        return gradients.loss, pullback(spread_gradient(gradients.value, batch.readout))


class RecordedStep(ResidualStep):
    """On a GPU: recorded once as a CUDA graph and replayed for each step's rows; one
    launch for dozens.
    """

    _graph: torch.cuda.CUDAGraph | None = None

    def compute(
        self, step: int, network: StackedMLP, target: StackedMLP | None, rates: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Loss and gradient, as in `ResidualStep`.

        The first call records the step as a graph; every call copies the numbers of its
        rows to where the graph reads them, and replays it. The networks must be those
        of the first call, modified in place.
        """
        numbers = self._source.numbers(step)
        if self._graph is None:
            self._numbers = tuple(rows.clone() for rows in numbers)
            self._graph = torch.cuda.CUDAGraph()
            # streams belong to the current device
            with torch.cuda.device(network.flat.device):
                warm = torch.cuda.Stream()
                warm.wait_stream(torch.cuda.current_stream())
                # buffers and libraries are made outside the recording
                with torch.cuda.stream(warm):
                    self._at(self._numbers, network, target)
                torch.cuda.current_stream().wait_stream(warm)
                with torch.cuda.graph(self._graph):
                    self._result = self._at(self._numbers, network, target)
        for kept, new in zip(self._numbers, numbers, strict=True):
            kept.copy_(new)
        self._graph.replay()
        return self._result


class Memory:
    """Moving average m (R, f) of mini-batches' mean ψδ. share: kept per step, a number
    or (R, 1).
    """

    kept = ("_sums", "count")

    def __init__(self, share: float | Tensor, sums: Tensor) -> None:
        self._share = share
        self._sums = sums
        self.count = 0

    def take(self, now: Float[Tensor, "run feature"], before: Tensor | None) -> Tensor:
        """Return the estimate of E ψδ from earlier mini-batches, then add this
        mini-batch to m.

        now: this mini-batch's mean ψδ. before: the same at the previous step's
        parameters; None at first.
        """
        if not self.count:
            remembered = now
        elif before is None:
            remembered = self._sums
        else:
            remembered = self._sums + now - before
        keep = torch.as_tensor(self._share, dtype=now.dtype).clamp(
            max=self.count / (self.count + 1.0)
        )
        self._sums = torch.lerp(now, remembered, keep.to(now.device))
        self.count += 1
        return remembered


class MemoryStep(Step):
    """Step that holds the memory and the previous step's parameters."""

    def __init__(
        self, objective: MemoryLoss, source: BatchSource, network: StackedMLP
    ) -> None:
        self._objective = objective
        self._source = source
        self._before = network.flat.clone()
        self._memory = Memory(
            objective.memory,
            network.flat.new_zeros(len(network.flat), objective.features),
        )

    def compute(
        self, step: int, network: StackedMLP, target: StackedMLP | None, rates: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Update the memory; return loss and gradient. Arguments as in `Step`."""
        batch, psi = self._source.batch(step)
        assert psi is not None
        before = None
        rows = batch.rewards.shape[1]
        if self._memory.count:
            old = _residual_from(
                network.with_flat(self._before).forward(_both(batch)), batch
            )
            before = gram_product(old, psi) / rows

        def gradients(residual: Tensor) -> ValueGradients:
            remembered = self._memory.take(gram_product(residual, psi) / rows, before)
            return self._objective.compute_gradients(
                residual, batch.discounts, remembered, psi
            )

        result = full_gradient(network, batch, gradients)
        self._before.copy_(network.flat)
        return result


class GradientTD2Step(Step):
    """Step of GTD2: w, (R, P), is `second`, and is updated at the same old parameters
    as the value.
    """

    def __init__(
        self, objective: GradientTD2, source: BatchSource, second: Tensor
    ) -> None:
        self._objective = objective
        self._source = source
        self.second = second
        self._adam = StackedAdam(second)

    def compute(
        self, step: int, network: StackedMLP, target: StackedMLP | None, rates: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Update w; return the loss and the value's gradient. Arguments as in
        `Step`."""
        batch, _ = self._source.batch(step)
        outputs, tangents, pull = forward_with_tangent(
            network, batch.inputs, self.second
        )
        next_outputs, pull_next = network.forward_with_pullback(batch.next_inputs)
        value = read_values(outputs, batch.readout)
        correction = read_values(tangents, batch.readout)
        next_value = read_values(next_outputs, batch.next_readout)
        residual = batch.rewards + batch.discounts * next_value - value
        parts = self._objective.compute_gradients(residual, batch.discounts, correction)
        regression = self._objective.compute_auxiliary_gradient(residual, correction)
        assert parts.next_value is not None
        gradient = pull_next(spread_gradient(parts.next_value, batch.next_readout))
        gradient = gradient + pull(
            spread_gradient(parts.value, batch.readout),
            spread_gradient(-regression, batch.readout),
        )
        self._adam.update(
            self.second,
            pull(spread_gradient(regression, batch.readout), None),
            rates * self._objective.auxiliary_rate,
        )
        return parts.loss, gradient


class SaddlePointStep(Step):
    """Step of SBEED: the test functions f (parameters `second`) ascend before the
    value's gradient.
    """

    def __init__(
        self, objective: SaddlePoint, source: BatchSource, test: StackedMLP
    ) -> None:
        self._objective = objective
        self._source = source
        self._test = test
        self.second = test.flat
        self._adam = StackedAdam(test.flat)

    def compute(
        self, step: int, network: StackedMLP, target: StackedMLP | None, rates: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Update f; return the loss and the value's gradient. Arguments as in
        `Step`."""
        batch, _ = self._source.batch(step)
        value = read_values(network.forward(batch.inputs), batch.readout).clone()
        next_value = read_values(network.forward(batch.next_inputs), batch.next_readout)
        residual = batch.rewards + batch.discounts * next_value - value
        scaled = rates * self._objective.auxiliary_rate
        for _ in range(self._objective.ascent_steps):
            outputs, pullback = self._test.forward_with_pullback(batch.inputs)
            slope = self._objective.compute_auxiliary_gradient(
                residual, read_values(outputs, batch.readout)
            )
            self._adam.update(
                self.second, pullback(spread_gradient(slope, batch.readout)), scaled
            )
        test = read_values(self._test.forward(batch.inputs), batch.readout)
        gradients = partial(
            self._objective.compute_gradients, discount=batch.discounts, test=test
        )
        return full_gradient(network, batch, gradients)


@singledispatch
def make_step(
    objective: Objective,
    source: BatchSource,
    network: StackedMLP,
    plan: ReplicaPlan,
) -> Step:
    """The step of an objective: by default that of its residuals.

    source: draws the mini-batches. network: the networks that are trained, updated in
    place. plan: the replicas' seeds and learning rates. An objective with a second
    function registers its own step: ``@make_step.register``. Raises ConfigError if an
    objective has neither.
    """
    del plan
    if not isinstance(objective, ResidualObjective):
        raise ConfigError(
            f"a {type(objective).__name__} is no objective; give it kernel, next_from"
            " and compute_gradients (koffline.objectives.ResidualObjective)"
        )
    if network.flat.is_cuda:
        return RecordedStep(objective, source)
    return ResidualStep(objective, source)


@make_step.register
def _(
    objective: MemoryLoss, source: BatchSource, network: StackedMLP, plan: ReplicaPlan
) -> Step:
    del plan
    return MemoryStep(objective, source, network)


@make_step.register
def _(
    objective: GradientTD2, source: BatchSource, network: StackedMLP, plan: ReplicaPlan
) -> Step:
    del plan
    return GradientTD2Step(objective, source, torch.zeros_like(network.flat))


@make_step.register
def _(
    objective: SaddlePoint, source: BatchSource, network: StackedMLP, plan: ReplicaPlan
) -> Step:
    # other initial weights than the value's
    seeds = [seed + 1_000_003 for seed in plan.batch_seeds]
    sizes = (network.sizes[0], *objective.hidden, network.sizes[-1])
    flat = network.flat
    test = StackedMLP.initialise(sizes, seeds, dtype=flat.dtype, device=flat.device)
    return SaddlePointStep(objective, source, test)


def full_gradient(
    network: StackedMLP,
    batch: Batch,
    compute_gradients: Callable[[Tensor], ValueGradients],
) -> tuple[Tensor, Tensor]:
    """Loss and gradient through the values of both rows and next rows, in one pass of
    the network.
    """
    outputs, pullback = network.forward_with_pullback(_both(batch))
    gradients = compute_gradients(_residual_from(outputs, batch))
    assert gradients.next_value is not None
    value_gradient = spread_gradient(gradients.value, batch.readout)
    next_gradient = spread_gradient(gradients.next_value, batch.next_readout)
    return gradients.loss, pullback(torch.cat((value_gradient, next_gradient), dim=1))


def _both(batch: Batch) -> Tensor:
    """Inputs of rows and next rows, (R, 2 B, d)."""
    return torch.cat((batch.inputs, batch.next_inputs), dim=1)


def _residual_from(outputs: Tensor, batch: Batch) -> Tensor:
    """Residuals (R, B) from the outputs for rows and next rows, (R, 2 B, n)."""
    rows = batch.rewards.shape[1]
    value = read_values(outputs[:, :rows], batch.readout)
    return residual_of(batch, value, read_values(outputs[:, rows:], batch.next_readout))


def residual_of(batch: Batch, value: Tensor, next_value: Tensor) -> Tensor:
    """Residuals δ = r + discount · V(s') − V(s), (R, B), from values (R, B)."""
    return torch.addcmul(batch.rewards, batch.discounts, next_value).sub_(value)


def read_values(outputs: Tensor, readout: Tensor | None) -> Tensor:
    """Values (R, B) from outputs (R, B, n)."""
    if readout is None:
        return outputs.squeeze(-1)
    # over the outer axis: summing a short inner one is slow
    return (outputs.mT * readout.mT).sum(dim=1)


def spread_gradient(gradient: Tensor, readout: Tensor | None) -> Tensor:
    """The transpose of `read_values`: gradients in values (R, B) as gradients in
    outputs (R, B, n).
    """
    if readout is None:
        return gradient.unsqueeze(-1)
    return gradient.unsqueeze(-1) * readout


def forward_with_tangent(
    network: StackedMLP, x: Tensor, direction: Tensor
) -> tuple[Tensor, Tensor, Callable[[Tensor, Tensor | None], Tensor]]:
    """Outputs o (R, N, n), ȯ (R, N, n) along `direction` (R, P), and (∂o, ∂ȯ or None) ↦
    gradient (R, P).

    The gradient of ȯ is a product of the Hessian with the direction. Dual numbers are
    written by hand, because a step of GTD2 takes three times as long with
    torch.func.jvp.
    """
    layers = network.layers(network.flat)
    ways = network.layers(direction)
    inputs = [x.expand(network.replicas, *x.shape[-2:])]  # h of each layer
    tangents: list[Tensor | None] = [None]  # ḣ
    slopes: list[Tensor] = []  # σ'(z) of each hidden layer
    bends: list[Tensor | None] = []  # σ''(z)·ż, None where it is zero
    for (weight, bias), (weight_way, bias_way) in zip(layers, ways, strict=True):
        linear = affine(inputs[-1], weight, bias)  # z = h W + b
        moved = affine(inputs[-1], weight_way, bias_way)  # ż = h Ẇ + ḃ + ḣ W
        if tangents[-1] is not None:
            moved = moved + affine(tangents[-1], weight, torch.zeros_like(bias))
        if len(inputs) == len(layers):
            break
        if network.activation == "relu":
            inputs.append(linear.relu())
            slopes.append((linear > 0).to(linear.dtype))
            bends.append(None)
        else:
            inputs.append(linear.tanh())
            slopes.append(1.0 - inputs[-1].square())
            bends.append(-2.0 * inputs[-1] * slopes[-1] * moved)
        tangents.append(moved.mul_(slopes[-1]))

    def pull(below: Tensor, beside: Tensor | None) -> Tensor:
        """Gradients in z and ż, layer by layer from the outputs down."""
        result = torch.empty_like(network.flat)
        for index, (weight_slot, bias_slot) in reversed(
            list(enumerate(network.layers(result)))
        ):
            weight_slot.copy_(outer_sum(inputs[index], below))
            tangent = tangents[index]
            if beside is not None and tangent is not None:
                weight_slot.add_(outer_sum(tangent, beside))
            torch.sum(below, dim=1, keepdim=True, out=bias_slot)
            if index:
                weight = layers[index][0]
                slope = slopes[index - 1]
                bend = bends[index - 1]
                below = _times(below, weight)
                if beside is None:
                    below.mul_(slope)
                    continue
                below.add_(_times(beside, ways[index][0])).mul_(slope)
                beside = _times(beside, weight)
                if bend is not None:
                    below.addcmul_(bend, beside)
                beside.mul_(slope)
        return result

    return linear, moved, pull


def _times(gradient: Tensor, weight: Tensor) -> Tensor:
    """Product g Wᵀ, (R, N, in); for a single output an elementwise product, which is
    faster.
    """
    if weight.shape[-1] == 1:
        return gradient * weight.mT
    return torch.bmm(gradient, weight.mT)
