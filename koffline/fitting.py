"""The one offline loop: R replicas of a value network, one objective, mini-batches of one table.

Fitted Q evaluation of a discrete policy, five seeds at once:

    table = Table(
        inputs=observations,                    # (N, d) float32, standardised by the caller
        next_inputs=next_observations,          # (N, d)
        rewards=rewards,                        # (N,)
        discounts=kernel_loss.discount(0.99, terminated).float(),
        readout=one_hot_actions,                # (N, n)
        next_readout=policy_probabilities,      # (N, n), π(·|s')
    )
    seeds = range(5)
    network = StackedMLP.initialise((d, 64, 64, n), seeds)
    record = fit(table, network, fitted_q(0.01), ReplicaPlan.of_seeds(seeds), FitSettings(steps=6000))
    q = record.network.forward(initial_observations)   # (5, M, n); NaN for a replica that diverged

A replica whose loss is NaN or infinite is reported with its step in ``record.diverged_at`` and its
parameters become NaN: nothing computed from it can pass for a value. The others go on.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Generic, Literal, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from koffline.batches import BatchSchedule, ReplicaPlan, Table
from koffline.dual_objectives import DualObjective, make_step
from koffline.errors import ConfigError
from koffline.objectives import CopyTarget, FollowTarget, Objective
from koffline.replicas import StackedNetwork
from koffline.steps import BatchSource, StackedAdam

Network = TypeVar("Network", bound=StackedNetwork)
Probe = Callable[[int, Network], Tensor]
_WATCHED_STEPS = {"cpu": 10, "cuda": 25}  # steps between checks of the losses; a check waits for the device


@runtime_checkable
class Progress(Protocol):
    """Receiver of progress reports, for example a progress bar of the caller."""

    def update(self, step: int, steps: int, loss: float) -> None:
        """Report `step` of `steps` done; `loss` is the median over replicas that have not diverged."""


@dataclass(frozen=True)
class FitSettings:
    """Settings of the training loop; learning rates and seeds are in the plan.

    schedule: "cosine" lets the learning rates fall to zero, "constant" keeps them.
    record_every: steps averaged into one row of the loss history. threads: of this process while fitting.
    """

    steps: int
    batch_size: int = 256
    schedule: Literal["constant", "cosine"] = "constant"
    record_every: int = 50
    threads: int = 1


@dataclass(frozen=True, eq=False)
class FitRecord(Generic[Network]):
    """Result of a run: K rows of history, R replicas.

    network: the last parameters; diverged replicas are NaN.
    losses (K, R): mean mini-batch loss over the steps up to `loss_steps` (K,).
    probes (Q, …): what the probe returned after `probe_steps`. diverged_at: per replica the step, or None.
    """

    network: Network
    losses: Tensor
    loss_steps: tuple[int, ...]
    probes: tuple[Tensor, ...]
    probe_steps: tuple[int, ...]
    diverged_at: tuple[int | None, ...]
    steps: int
    seconds: float


def fit(
    table: Table,
    network: Network,
    objective: Objective | DualObjective,
    plan: ReplicaPlan,
    settings: FitSettings,
    *,
    probe: Probe[Network] | None = None,
    probe_every: int = 0,
    progress: Progress | None = None,
) -> FitRecord[Network]:
    """Train copies of `network`'s replicas on `table`; `network` itself is left as it is.

    Everything runs on the table's device. probe(step, network) is called every `probe_every` steps, without
    gradients, and must not change what it is given; its tensors are kept.
    Raises ConfigError when plan, network, objective and table do not fit each other.
    """
    with threads(settings.threads), torch.no_grad():
        run, started = _Run(table, network, objective, plan, settings), time.perf_counter()
        while run.step < settings.steps:
            has_recorded = run.update()
            if probe is not None and probe_every and run.step % probe_every == 0:
                run.probes.append(torch.as_tensor(probe(run.step, run.network)).detach().cpu().clone())
                run.probe_steps.append(run.step)
            if has_recorded and progress is not None:
                progress.update(run.step, settings.steps, float(run.losses[-1].nanmedian()))
        return run.record(time.perf_counter() - started)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Run with `count` threads per process and the faster float32 products; restore both afterwards.

    One is the default everywhere: small products gain nothing from more, and two beside a busy core collapse.
    """
    before, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    torch.set_num_threads(count)
    try:
        if _onednn_is_exact():
            torch.set_float32_matmul_precision("medium")
        yield
    finally:
        torch.set_num_threads(before)
        torch.set_float32_matmul_precision(precision)


@cache
def _onednn_is_exact() -> bool:
    """Whether "medium" precision, which lets torch use oneDNN for float32, changes nothing but the time.

    On AMD's processors oneDNN takes a third of MKL's time. With matrix units it rounds to bfloat16; on CUDA
    the setting allows TF32.
    """
    if torch.cuda.is_available():
        return False
    before, x = torch.get_float32_matmul_precision(), torch.linspace(0.5, 1.5, 64 * 64).view(1, 64, 64)
    try:
        torch.set_float32_matmul_precision("medium")
        return torch.allclose((x @ x).double(), x.double() @ x.double(), rtol=1e-5, atol=0.0)
    finally:
        torch.set_float32_matmul_precision(before)


class _Run(Generic[Network]):
    """State of one call of `fit`."""

    def __init__(
        self,
        table: Table,
        network: Network,
        objective: Objective | DualObjective,
        plan: ReplicaPlan,
        settings: FitSettings,
    ) -> None:
        flat, rows = network.flat, table.inputs
        if len(flat) != len(plan):
            raise ConfigError(f"network has {len(flat)} replicas, the plan {len(plan)}; make them equal")
        self._settings = settings
        self.network = network.with_flat(flat.detach().clone())
        self._target_rule = getattr(objective, "target", None) if objective.next_from == "target" else None
        if objective.next_from == "target" and not isinstance(self._target_rule, CopyTarget | FollowTarget):
            raise ConfigError(f"{objective} uses a target network; give it a CopyTarget or FollowTarget")
        self._target = None if self._target_rule is None else network.with_flat(flat.detach().clone())
        schedule = BatchSchedule(plan, len(table), settings.batch_size, rows.device)
        self._copied_every = getattr(self._target_rule, "every", None) or schedule.steps_per_epoch
        source = BatchSource(table, objective.kernel, plan, schedule)
        self._step = make_step(objective, source, self.network, plan)
        self._adam = StackedAdam(self.network.flat)
        self._rates = torch.tensor(plan.learning_rates, dtype=rows.dtype, device=rows.device)[:, None]
        self._watched = min(_WATCHED_STEPS.get(rows.device.type, 1), settings.record_every)
        self._window = rows.new_zeros(self._watched, len(plan))
        self._sums = rows.new_zeros(len(plan), dtype=torch.float64)
        self.summed = self.step = 0
        self.diverged_at: list[int | None] = [None] * len(plan)
        self.losses: list[Tensor] = []
        self.loss_steps: list[int] = []
        self.probes: list[Tensor] = []
        self.probe_steps: list[int] = []

    def update(self) -> bool:
        """Take one gradient step of every replica; return whether a row of the loss history was written."""
        rates = self._rates
        if self._settings.schedule == "cosine":
            rates = rates * (0.5 * (1.0 + math.cos(math.pi * self.step / self._settings.steps)))
        loss, gradient = self._step.compute(self.step, self.network, self._target, rates)
        self._adam.update(self.network.flat, gradient, rates)
        self._window[self.step % self._watched] = loss
        self.step += 1
        if self._target is not None and isinstance(self._target_rule, FollowTarget):
            self._target.flat.lerp_(self.network.flat, self._target_rule.rate)
        elif self._target is not None and self.step % self._copied_every == 0:
            self._target.flat.copy_(self.network.flat)
        is_last = self.step == self._settings.steps
        return self._watch(is_last) if self.step % self._watched == 0 or is_last else False

    def record(self, seconds: float) -> FitRecord[Network]:
        """Record of the run, which took `seconds`."""
        finite = torch.isfinite(self.network.flat).all(dim=1).tolist()
        for replica, good in enumerate(finite):
            if not good:  # the last step may have diverged after the last loss was computed
                self._mark_diverged(replica, self.step)
        return FitRecord(
            network=self.network,
            losses=torch.stack(self.losses) if self.losses else torch.zeros(0, len(finite)),
            loss_steps=tuple(self.loss_steps),
            probes=tuple(self.probes),
            probe_steps=tuple(self.probe_steps),
            diverged_at=tuple(self.diverged_at),
            steps=self.step,
            seconds=seconds,
        )

    def _watch(self, is_last: bool) -> bool:
        """Check the losses since the last check for divergence; add them to the history."""
        window = self._window[: (seen := (self.step - 1) % self._watched + 1)]
        if (bad := ~torch.isfinite(window)).any():
            for replica in bad.any(dim=0).nonzero().flatten().tolist():
                self._mark_diverged(replica, self.step - seen + int(bad[:, replica].nonzero()[0]))
        self._sums += window.double().sum(dim=0)
        self.summed += seen
        if self.summed < self._settings.record_every and not is_last:
            return False
        self.losses.append((self._sums / self.summed).cpu())
        self.loss_steps.append(self.step)
        self._sums.zero_()
        self.summed = 0
        return True

    def _mark_diverged(self, replica: int, step: int) -> None:
        """Note the first bad step of a replica and make its parameters NaN for good."""
        if self.diverged_at[replica] is None:
            self.diverged_at[replica] = step
            self.network.flat[replica] = math.nan
