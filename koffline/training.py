"""The state of one fit, step by step; ``fitting.fit`` is the loop around it."""

from __future__ import annotations

import math
import time
from typing import Any, Generic

import torch
from torch import Tensor

from koffline.batches import BatchSchedule, ReplicaPlan, Table
from koffline.dual_objectives import DualObjective, GradientTD2, SaddlePoint
from koffline.dual_steps import DualStep, dual_step
from koffline.errors import ConfigError
from koffline.fit_records import FitRecord, FitSettings, Network, Probe
from koffline.objectives import CopyTarget, FollowTarget, Objective
from koffline.replicas import StackedNetwork
from koffline.stacked_adam import StackedAdam
from koffline.steps import BatchSource, StepComputer

_WATCHED_STEPS = {"cpu": 10, "cuda": 25}  # steps between looks at the losses: a look waits for the device


class TrainingRun(Generic[Network]):
    """State of one call of `fit`; everything in it is restored by a checkpoint."""

    def __init__(
        self,
        table: Table,
        network: Network,
        objective: Objective | DualObjective,
        plan: ReplicaPlan,
        settings: FitSettings,
    ) -> None:
        _check_fit(table, network, plan)
        self._settings, self._plan = settings, plan
        device, replicas = table.inputs.device, len(plan)
        self._network = network.with_flat(network.flat.detach().clone())
        self._target = _target_of(objective)
        self._target_network = (
            network.with_flat(self._network.flat.clone()) if self._target is not None else None
        )
        self._schedule = BatchSchedule(
            plan, len(table), settings.batch_size, settings.with_replacement, device
        )
        source = BatchSource(table, objective.kernel, plan, self._schedule, settings.draws)
        self._computer: StepComputer | None = None
        self._dual: DualStep | None = None
        if isinstance(objective, GradientTD2 | SaddlePoint):
            adam = settings.betas, settings.epsilon
            self._dual = dual_step(objective, source, self._network, plan, *adam)
        else:
            self._computer = StepComputer(source, objective)
        self._adam = StackedAdam(self._network.flat, settings.betas, settings.epsilon)
        self._rates = torch.tensor(plan.learning_rates, dtype=table.inputs.dtype, device=device)[:, None]
        self._average_from = settings.steps - round(settings.tail_average * settings.steps)
        self._average = self._network.flat.clone() if settings.tail_average > 0.0 else None
        self._watched = min(_WATCHED_STEPS.get(device.type, 1), settings.record_every)
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
        factor = self._settings.rate_factor(self.step)
        rates = self._rates if factor == 1.0 else self._rates * factor
        if self._computer is not None:
            loss, gradient = self._computer.compute(self.step, self._network, self._target_network)
        elif self._dual is not None:
            self._dual.update_before(self.step, self._network, rates)
            loss, gradient = self._dual.compute(self.step, self._network)
        self._adam.update(self._network.flat, gradient, rates)
        if self._dual is not None:
            self._dual.update_after(rates)
        self._window[self.step % self._watched] = loss
        self.step += 1
        self._update_target()
        if self._average is not None and self.step > self._average_from:
            self._average.lerp_(self._network.flat, 1.0 / (self.step - self._average_from))
        self.flushed = False
        if self.step % self._watched == 0 or self.step == self._settings.steps:
            self._watch()

    def probe(self, probe: Probe[Network]) -> None:
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
        if self._dual is not None:
            self._dual.load_state_dict(state["dual"])
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
            "dual": None if self._dual is None else self._dual.state_dict(),
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

    def record(self, seconds: float) -> FitRecord[Network]:
        """The frozen result."""
        self._mark_broken_parameters()
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
            self._set_nan(replica, first + int(bad[:, replica].nonzero()[0]))

    def _set_nan(self, replica: int, step: int) -> None:
        self._diverged_at[replica] = step
        self._network.flat[replica] = math.nan
        if self._average is not None:
            self._average[replica] = math.nan

    def _mark_broken_parameters(self) -> None:
        """Catch what the losses did not show any more: the last step itself."""
        finite = torch.isfinite(self._network.flat).all(dim=1).tolist()
        for replica, good in enumerate(finite):
            if not good and self._diverged_at[replica] < 0:
                self._set_nan(replica, self.step)


def _check_fit(table: Table, network: StackedNetwork, plan: ReplicaPlan) -> None:
    """Raise ConfigError unless replicas, precision and device agree."""
    flat = network.flat
    if len(flat) != len(plan):
        raise ConfigError(f"network has {len(flat)} replicas, the plan {len(plan)}; make them equal")
    if flat.dtype != table.inputs.dtype or flat.device != table.inputs.device:
        raise ConfigError(
            f"network is {flat.dtype} on {flat.device}, the table {table.inputs.dtype} on "
            f"{table.inputs.device}; make them equal"
        )


def _target_of(objective: Objective | DualObjective) -> CopyTarget | FollowTarget | None:
    """The rule of the target network; None where the objective has none."""
    if objective.next_from != "target":
        return None
    rule = getattr(objective, "target", None)
    if not isinstance(rule, CopyTarget | FollowTarget):
        raise ConfigError(f"{objective} uses a target network; give it a CopyTarget or FollowTarget")
    return rule
