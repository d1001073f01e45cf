"""The offline training loop: R replicas of a value network, one objective, mini-batches
of one table.

Fitted Q evaluation of a discrete policy, five seeds at once:

    table = Table(
        inputs=observations,                    # (N, d) float32, standardised by the
        caller next_inputs=next_observations,          # (N, d)
        rewards=rewards,                        # (N,)
        discounts=kernel_loss.discount(0.99, terminated).float(),
        readout=one_hot_actions,                # (N, n)
        next_readout=policy_probabilities,      # (N, n), π(·|s')
    )
    seeds = range(5)
    network = StackedMLP.initialise((d, 64, 64, n), seeds)
    record = fit(table, network, fitted_q(0.01), ReplicaPlan.grid(seeds, [1e-3]),
    FitSettings(steps=6000)) q = record.network.forward(initial_observations)   # (5, M,
    n); NaN for a replica that diverged

If a replica's loss is NaN or infinite, its step is in ``record.diverged_at`` and its
parameters become NaN, so that nothing computed from it can be mistaken for a value. The
other replicas go on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

from koffline.batches import BatchSchedule, BatchSource, Table
from koffline.errors import ConfigError
from koffline.objectives import Objective
from koffline.replicas import ReplicaPlan, StackedAdam, StackedMLP
from koffline.steps import make_step

Probe = Callable[[int, StackedMLP], Tensor]
# receives the steps done, all of them, and a note
Progress = Callable[[int, int, str], None]
_SCHEDULES = ("constant", "cosine")
_WATCHED_STEPS = {"cpu": 10, "cuda": 25}  # steps between checks of the losses


@dataclass(frozen=True)
class FitSettings:
    """Settings of the training loop; learning rates and seeds are in the plan.

    schedule: "cosine" lets the learning rates decay to zero, "constant" keeps them.
    record_every: steps averaged into one row of the loss history; rounded up, because
    losses are checked every 10th step (25th on a GPU). threads: of this process while
    fitting.
    """

    steps: int
    batch_size: int = 256
    schedule: Literal["constant", "cosine"] = "constant"
    record_every: int = 50
    threads: int = 1

    def __post_init__(self) -> None:
        counts = {
            name: count for name, count in vars(self).items() if name != "schedule"
        }
        for name, count in counts.items():
            if count < 1:
                raise ConfigError(f"{name} is {count}; give at least 1")
        if self.schedule not in _SCHEDULES:
            raise ConfigError(f"schedule is '{self.schedule}'; give constant or cosine")


@dataclass(frozen=True, eq=False)
class FitRecord:
    """Result of training: K rows of history, R replicas.

    network: the last parameters; NaN for diverged replicas. losses (K, R): mean
    mini-batch loss over the steps up to `loss_steps` (K,). probes (Q, …): results of
    the probe after `probe_steps`. diverged_at: step per replica, or None.
    """

    network: StackedMLP
    losses: Tensor
    loss_steps: tuple[int, ...]
    probes: tuple[Tensor, ...]
    probe_steps: tuple[int, ...]
    diverged_at: tuple[int | None, ...]
    steps: int


def fit(
    table: Table,
    network: StackedMLP,
    objective: Objective,
    plan: ReplicaPlan,
    settings: FitSettings,
    *,
    probe: Probe | None = None,
    probe_every: int = 0,
    progress: Progress | None = None,
) -> FitRecord:
    """Train copies of `network`'s replicas on `table` by `objective`; `network` itself
    is not changed.

    Everything runs on the table's device. plan: the rows that each replica sees.
    settings: steps, sizes of mini-batches and learning rates. probe(step, network) is
    called every `probe_every` steps, without gradients, and must not change its
    argument; its results are kept. progress: called with the steps done, all steps and
    a note. Raises ConfigError if plan, network, objective and table do not fit each
    other.
    """
    if len(network.flat) != len(plan):
        raise ConfigError(
            f"network has {len(network.flat)} replicas, the plan {len(plan)}; make them"
            " equal"
        )
    with threads(settings.threads), torch.no_grad():
        trained = network.with_flat(network.flat.detach().clone())
        schedule = BatchSchedule(
            plan, len(table), settings.batch_size, table.inputs.device
        )
        # How the network that values next rows follows, if any.
        rule: Any = getattr(objective, "target", None)
        if rule is None:
            target = None
        else:
            target = trained.with_flat(trained.flat.clone())
        step = make_step(
            objective,
            BatchSource(table, objective.kernel, plan, schedule),
            trained,
            plan,
        )
        adam = StackedAdam(trained.flat)
        steps = settings.steps
        watched = min(
            _WATCHED_STEPS.get(trained.flat.device.type, 1), settings.record_every
        )
        recorded = watched * math.ceil(settings.record_every / watched)
        history = trained.flat.new_zeros(steps, len(plan))
        constant = table.inputs.new_tensor(plan.learning_rates)[:, None]
        probes: list[Tensor] = []
        for done in range(1, steps + 1):
            decay = 1.0
            if settings.schedule == "cosine":
                decay = 0.5 * (1.0 + math.cos(math.pi * (done - 1) / steps))
            rates = constant * decay
            history[done - 1], gradient = step.compute(done - 1, trained, target, rates)
            adam.update(trained.flat, gradient, rates)
            if target is not None:
                rule.update(target.flat, trained.flat, done, schedule.steps_per_epoch)
            # a replica that diverged has NaN ever after
            if done % watched == 0 or done == steps:
                is_finite = (
                    history[(done - 1) // watched * watched : done]
                    .isfinite()
                    .all(dim=0)
                )
                trained.flat.masked_fill_(~is_finite[:, None], math.nan)
            if probe is not None and probe_every and done % probe_every == 0:
                # own buffers: a recorded step keeps the others
                seen = trained.with_flat(trained.flat)
                probes.append(torch.as_tensor(probe(done, seen)).detach().cpu().clone())
            if progress is not None and (done % recorded == 0 or done == steps):
                means = history[(done - 1) // recorded * recorded : done].mean(dim=0)
                # over the replicas that have not diverged
                loss = float(means.nanmedian())
                progress(done, steps, f"objective {loss:.3g}")
        bad = ~torch.cat((history.isfinite(), trained.flat.isfinite().all(dim=1)[None]))
        first = bad.int().argmax(dim=0).tolist()
        trained.flat.masked_fill_(bad.any(dim=0)[:, None], math.nan)
        return FitRecord(
            network=trained,
            losses=torch.stack(
                [part.double().mean(dim=0) for part in history.split(recorded)]
            ).cpu(),
            loss_steps=(*range(recorded, steps, recorded), steps),
            probes=tuple(probes),
            probe_steps=tuple(
                probe_every * (place + 1) for place in range(len(probes))
            ),
            diverged_at=tuple(
                at if bad[at, replica] else None for replica, at in enumerate(first)
            ),
            steps=steps,
        )


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Run with `count` threads per process and faster float32 products; restore all
    settings afterwards.

    One thread is the default everywhere: small products are no faster with more, and
    two threads beside a busy core are much slower. Denormal numbers count as zero,
    because Adam's averages are full of them and a tenth of the time is spent on them.
    """
    before = torch.get_num_threads()
    precision = torch.get_float32_matmul_precision()
    # torch has no getter
    flushed = not torch.tensor(1e-310, dtype=torch.float64).mul(1.0).item()
    torch.set_num_threads(count)
    torch.set_flush_denormal(True)
    try:
        torch.set_float32_matmul_precision(
            "medium" if _onednn_is_exact() else precision
        )
        yield
    finally:
        torch.set_num_threads(before)
        torch.set_flush_denormal(flushed)
        torch.set_float32_matmul_precision(precision)


@cache
def _onednn_is_exact() -> bool:
    """Whether "medium" precision, which lets torch use oneDNN for float32, changes only
    the speed.

    On AMD's processors oneDNN takes a third of MKL's time. With matrix units it rounds
    to bfloat16; on CUDA the setting allows TF32.
    """
    if torch.cuda.is_available():
        return False
    before = torch.get_float32_matmul_precision()
    x = torch.linspace(0.5, 1.5, 64 * 64).view(1, 64, 64)
    try:
        torch.set_float32_matmul_precision("medium")
        return torch.allclose(
            (x @ x).double(), x.double() @ x.double(), rtol=1e-5, atol=0.0
        )
    finally:
        torch.set_float32_matmul_precision(before)
