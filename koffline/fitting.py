"""The one offline loop: R replicas of a value network, one objective, mini-batches of one table.

Fitted Q evaluation of a discrete policy, five seeds at once:

    table = Table(
        inputs=observations,                    # (N, d) float32, standardised by the caller
        next_inputs=next_observations,          # (N, d)
        rewards=rewards,                        # (N,)
        discounts=bellman.discount(0.99, terminated).float(),
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
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from koffline.batches import BatchSchedule, ReplicaPlan, Table
from koffline.checkpoints import fingerprint_of, read_checkpoint, write_checkpoint
from koffline.errors import ConfigError
from koffline.objectives import CopyTarget, FollowTarget, Objective
from koffline.replicas import StackedAdam, StackedNetwork
from koffline.steps import StepComputer

Probe = Callable[[int, StackedNetwork], Tensor]
_WATCHED_STEPS = {
    "cpu": 10,
    "cuda": 25,
}  # steps between looks at the losses: a look costs, and waits for the device


class Progress(Protocol):
    """Anything that wants to be told; a progress bar lives with the caller."""

    def update(self, step: int, steps: int, loss: float) -> None:
        """`step` of `steps` are done; `loss` is the median over replicas that have not diverged."""
        ...


@dataclass(frozen=True)
class FitSettings:
    """How long and how fast; learning rates and seeds are the plan's.

    schedule: "cosine" lets the learning rates fall to zero, "constant" keeps them.
    with_replacement: independent mini-batches instead of epoch permutations.
    draws: with m continuations per row, use "one" drawn at random in each step, or "all".
    tail_average: average the parameters over this last fraction of the steps (0: not at all).
    record_every: steps averaged into one row of the loss history. threads: of this process while fitting.
    """

    steps: int
    batch_size: int = 256
    schedule: Literal["constant", "cosine"] = "constant"
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    with_replacement: bool = False
    draws: Literal["one", "all"] = "one"
    tail_average: float = 0.0
    record_every: int = 50
    threads: int = 1

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "record_every", "threads"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; give a positive whole number")
        if not 0.0 <= self.tail_average < 1.0:
            raise ConfigError(f"tail_average is {self.tail_average}; give a fraction in [0, 1)")
        if self.schedule not in ("constant", "cosine") or self.draws not in ("one", "all"):
            raise ConfigError(
                f"schedule is '{self.schedule}', draws '{self.draws}'; use constant or cosine, and one or all"
            )

    def rate_factor(self, step: int) -> float:
        """Share of the learning rates that step number `step` uses."""
        if self.schedule == "constant":
            return 1.0
        return 0.5 * (1.0 + math.cos(math.pi * step / self.steps))


@dataclass(frozen=True)
class Checkpointing:
    """Where and how often the whole state is written; an existing file of the same run is continued."""

    path: Path
    every: int = 1000

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ConfigError(f"checkpoint interval is {self.every}; give a positive number of steps")


@dataclass(frozen=True, eq=False)
class FitRecord:
    """What a run gives: K rows of history, R replicas.

    network: the last parameters; averaged: their tail average, or None. Diverged replicas are NaN in both.
    losses (K, R): mean mini-batch loss over the steps up to `loss_steps` (K,).
    probes (Q, …): what the probe returned after `probe_steps`. diverged_at: per replica the step, or None.
    """

    network: Any
    averaged: Any | None
    losses: Tensor
    loss_steps: tuple[int, ...]
    probes: tuple[Tensor, ...]
    probe_steps: tuple[int, ...]
    diverged_at: tuple[int | None, ...]
    steps: int
    seconds: float

    @property
    def best(self) -> Any:
        """The averaged network where there is one, else the last."""
        return self.network if self.averaged is None else self.averaged


def fit(
    table: Table,
    network: StackedNetwork,
    objective: Objective,
    plan: ReplicaPlan,
    settings: FitSettings,
    *,
    probe: Probe | None = None,
    probe_every: int = 0,
    progress: Progress | None = None,
    checkpoint: Checkpointing | None = None,
) -> FitRecord:
    """Train copies of `network`'s replicas on `table`; `network` itself is left as it is.

    Everything runs on the table's device. probe(step, network) is called every `probe_every` steps, without
    gradients, and must not change what it is given; its tensors are kept.
    Raises ConfigError when plan, network, objective and table do not fit each other.
    """
    with threads(settings.threads), torch.no_grad():
        run = _Run(table, network, objective, plan, settings)
        fingerprint = ""
        if checkpoint is not None:
            fingerprint = fingerprint_of(table, network.flat, plan, objective, settings)
            run.resume(read_checkpoint(checkpoint.path, fingerprint))
        started = time.perf_counter()
        while run.step < settings.steps:
            run.update()
            if probe is not None and probe_every and run.step % probe_every == 0:
                run.probe(probe)
            if run.flushed and progress is not None:
                progress.update(run.step, settings.steps, run.last_loss())
            if checkpoint is not None and run.step % checkpoint.every == 0:
                write_checkpoint(checkpoint.path, {"fingerprint": fingerprint, **run.state_dict()})
        return run.record(run.seconds + time.perf_counter() - started)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Run with `count` threads per process and restore the number afterwards.

    One is the default everywhere: small products gain nothing from more, and two beside a busy core collapse.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Run:
    """State of one call of `fit`; everything in it is restored by a checkpoint."""

    def __init__(
        self,
        table: Table,
        network: StackedNetwork,
        objective: Objective,
        plan: ReplicaPlan,
        settings: FitSettings,
    ) -> None:
        self._settings, self._plan = settings, plan
        device, replicas = table.inputs.device, len(plan)
        if len(network.flat) != replicas:
            raise ConfigError(
                f"network has {len(network.flat)} replicas, the plan {replicas}; make them equal"
            )
        if network.flat.dtype != table.inputs.dtype or network.flat.device != device:
            raise ConfigError(
                f"network is {network.flat.dtype} on {network.flat.device}, "
                f"the table {table.inputs.dtype} on {device}; make them equal"
            )
        self._network = network.with_flat(network.flat.detach().clone())
        self._target = _target_of(objective)
        self._target_network = (
            network.with_flat(self._network.flat.clone()) if self._target is not None else None
        )
        self._schedule = BatchSchedule(
            plan, len(table), settings.batch_size, settings.with_replacement, device
        )
        self._computer = StepComputer(table, objective, plan, self._schedule, settings.draws)
        self._adam = StackedAdam(self._network.flat, settings.betas, settings.epsilon)
        self._rates = torch.tensor(plan.learning_rates, dtype=table.inputs.dtype, device=device)[:, None]
        self._average_from = settings.steps - round(settings.tail_average * settings.steps)
        self._average = self._network.flat.clone() if settings.tail_average > 0.0 else None
        self._watched = _WATCHED_STEPS.get(device.type, 1)
        self._window = torch.zeros(self._watched, replicas, dtype=table.inputs.dtype, device=device)
        self._sums = torch.zeros(replicas, dtype=torch.float64, device=device)
        self._summed = 0
        self._diverged_at = [-1] * replicas
        self._losses: list[Tensor] = []
        self._loss_steps: list[int] = []
        self._probes: list[Tensor] = []
        self._probe_steps: list[int] = []
        self.step = 0
        self.seconds = 0.0
        self._started = time.perf_counter()
        self.flushed = False

    def update(self) -> None:
        """One gradient step of every replica."""
        loss, gradient = self._computer.compute(self.step, self._network, self._target_network)
        factor = self._settings.rate_factor(self.step)
        rates = self._rates if factor == 1.0 else self._rates * factor
        self._adam.update(self._network.flat, gradient, rates)
        self._window[self.step % self._watched] = loss
        self.step += 1
        self._update_target()
        if self._average is not None and self.step > self._average_from:
            self._average.lerp_(self._network.flat, 1.0 / (self.step - self._average_from))
        self.flushed = False
        if self.step % self._watched == 0 or self.step == self._settings.steps:
            self._watch()

    def probe(self, probe: Probe) -> None:
        """Keep what the probe sees now."""
        self._probes.append(torch.as_tensor(probe(self.step, self._network)).detach().cpu().clone())
        self._probe_steps.append(self.step)

    def last_loss(self) -> float:
        """Median of the last recorded losses of the replicas that have not diverged; NaN when all have."""
        return float(self._losses[-1].nanmedian()) if self._losses else math.nan

    def resume(self, state: dict[str, Any] | None) -> None:
        """Continue from what `state_dict` gave; None: from the start."""
        if state is None:
            return
        self._network.flat.copy_(state["flat"])
        if self._target_network is not None:
            self._target_network.flat.copy_(state["target"])
        if self._average is not None:
            self._average.copy_(state["average"])
        self._adam.load_state_dict(state["adam"])
        self._window.copy_(state["window"])
        self._sums.copy_(state["sums"])
        self._summed = state["summed"]
        self._diverged_at = list(state["diverged_at"])
        self._losses, self._loss_steps = list(state["losses"]), list(state["loss_steps"])
        self._probes, self._probe_steps = list(state["probes"]), list(state["probe_steps"])
        self.step, self.seconds = state["step"], state["seconds"]

    def state_dict(self) -> dict[str, Any]:
        """Everything `resume` needs: tensors and plain values."""
        return {
            "flat": self._network.flat,
            "target": None if self._target_network is None else self._target_network.flat,
            "average": self._average,
            "adam": self._adam.state_dict(),
            "window": self._window,
            "sums": self._sums,
            "summed": self._summed,
            "diverged_at": self._diverged_at,
            "losses": self._losses,
            "loss_steps": self._loss_steps,
            "probes": self._probes,
            "probe_steps": self._probe_steps,
            "step": self.step,
            "seconds": self.seconds + time.perf_counter() - self._started,
        }

    def record(self, seconds: float) -> FitRecord:
        """The frozen result."""
        replicas = len(self._plan)
        return FitRecord(
            network=self._network,
            averaged=None if self._average is None else self._network.with_flat(self._average),
            losses=torch.stack(self._losses) if self._losses else torch.zeros(0, replicas),
            loss_steps=tuple(self._loss_steps),
            probes=tuple(self._probes),
            probe_steps=tuple(self._probe_steps),
            diverged_at=tuple(None if step < 0 else step for step in self._diverged_at),
            steps=self.step,
            seconds=seconds,
        )

    def _update_target(self) -> None:
        if self._target_network is None:
            return
        if isinstance(self._target, FollowTarget):
            self._target_network.flat.lerp_(self._network.flat, self._target.rate)
            return
        every = self._target.every if self._target is not None else None
        if self.step % (every or self._schedule.steps_per_epoch) == 0:
            self._target_network.flat.copy_(self._network.flat)

    def _watch(self) -> None:
        """Look at the losses since the last look: divergence and history."""
        seen = (self.step - 1) % self._watched + 1
        window = self._window[:seen]
        if not math.isfinite(float(window.sum())):
            self._mark_diverged(window)
        self._sums += window.double().sum(dim=0)
        self._summed += seen
        if self._summed >= self._settings.record_every or self.step == self._settings.steps:
            self._losses.append((self._sums / self._summed).cpu())
            self._loss_steps.append(self.step)
            self._sums.zero_()
            self._summed = 0
            self.flushed = True

    def _mark_diverged(self, window: Tensor) -> None:
        """Note the first bad step of each replica and make its parameters NaN for good."""
        alive = torch.tensor([step < 0 for step in self._diverged_at], device=window.device)
        bad = ~torch.isfinite(window) & alive
        first = self.step - len(window)
        for replica in torch.nonzero(bad.any(dim=0)).flatten().tolist():
            self._diverged_at[replica] = first + int(bad[:, replica].nonzero()[0])
            self._network.flat[replica] = math.nan
            if self._average is not None:
                self._average[replica] = math.nan


def _target_of(objective: Objective) -> CopyTarget | FollowTarget | None:
    """The rule of the target network; None where the objective has none."""
    if objective.next_from != "target":
        return None
    rule = getattr(objective, "target", None)
    if not isinstance(rule, CopyTarget | FollowTarget):
        raise ConfigError(f"{objective} uses a target network; give it a CopyTarget or FollowTarget")
    return rule
