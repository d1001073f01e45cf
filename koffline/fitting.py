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
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Literal

import torch
from threadpoolctl import threadpool_limits
from torch import Tensor

from koffline.batches import BatchSchedule, BatchSource, PackedRows, Table
from koffline.errors import ConfigError
from koffline.jobs.cores import Tell, on_cores
from koffline.objectives import Objective
from koffline.replicas import ReplicaPlan, StackedAdam, StackedMLP
from koffline.steps import make_step

Probe = Callable[[int, StackedMLP], Tensor]
# receives the steps done, all of them, and a note
Progress = Callable[[int, int, str], None]
# receives the steps done, and each replica's mean loss (R,) over the last of them
Report = Callable[[int, Tensor], None]
_SCHEDULES = ("constant", "cosine")
_WATCHED_STEPS = {"cpu": 10, "cuda": 25}  # steps between checks of the losses
# Rough time of a step: of its calls, and for each number of a replica and row of its
# mini-batch. They only tell whether further cores are worth their start.
_STEP_SECONDS = 3e-4
_NUMBER_SECONDS = 1e-10


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


def fit(  # noqa: PLR0913
    table: Table,
    network: StackedMLP,
    objective: Objective,
    plan: ReplicaPlan,
    settings: FitSettings,
    *,
    probe: Probe | None = None,
    probe_every: int = 0,
    progress: Progress | None = None,
    report: Report | None = None,
    packed: PackedRows | None = None,
) -> FitRecord:
    """Train copies of `network`'s replicas on `table` by `objective`; `network` itself
    is not changed.

    Everything runs on the table's device. plan: the rows that each replica sees.
    settings: steps, sizes of mini-batches and learning rates. probe(step, network) is
    called every `probe_every` steps, without gradients, and must not change its
    argument; its results are kept. progress: called with the steps done, all steps and
    a note. report: called with the steps done and each replica's mean loss. packed: the
    table's rows, if they have been packed before. Raises ConfigError if plan, network,
    objective and table do not fit each other.
    """
    _check_replicas(network, plan)
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
        if packed is None:
            packed = _pack(table, objective)
        step = make_step(
            objective,
            BatchSource(table, objective.kernel, plan, schedule, packed),
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
            if done % recorded == 0 or done == steps:
                means = history[(done - 1) // recorded * recorded : done].mean(dim=0)
                if progress is not None:
                    progress(done, steps, _loss_note(means))
                if report is not None:
                    report(done, means)
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


def fit_on_cores(
    table: Table,
    network: StackedMLP,
    objective: Objective,
    plan: ReplicaPlan,
    settings: FitSettings,
    progress: Progress | None = None,
) -> FitRecord:
    """`fit` with the replicas in groups, one for each core of `koffline.jobs.cores`.

    A replica's numbers do not depend on the other replicas of its stack, so the result
    is the same for any number of cores. Groups for which one step shows otherwise are
    not made.
    """
    _check_replicas(network, plan)
    # one copy of the rows serves all groups
    packed = _pack(table, objective)
    news = _GroupNews(len(plan), settings.steps, progress)

    def fit_group(replicas: slice, tell: Tell) -> FitRecord:
        report: Report | None = None
        if progress is not None:
            report = partial(_tell_means, tell)
        return fit(
            table=table,
            network=network.with_flat(network.flat[replicas]),
            objective=objective,
            plan=plan.select(replicas),
            settings=settings,
            report=report,
            packed=packed,
        )

    if network.flat.device.type != "cpu":
        return fit(table, network, objective, plan, settings, progress=progress)
    batch_numbers = settings.batch_size * network.flat.numel()
    seconds = settings.steps * (_STEP_SECONDS + _NUMBER_SECONDS * batch_numbers)
    agree = partial(_groups_agree, table, network, objective, plan, settings.batch_size)
    groups = on_cores(
        fit_group, len(plan), seconds=seconds, hear=news.hear, agree=agree
    )
    record = replace(
        groups[0],
        network=network.with_flat(torch.cat([group.network.flat for group in groups])),
        losses=torch.cat([group.losses for group in groups], dim=1),
        diverged_at=tuple(at for group in groups for at in group.diverged_at),
    )
    news.end(record)
    return record


def _pack(table: Table, objective: Objective) -> PackedRows:
    """The table's rows with what the objective reads of them."""
    reads_next = objective.next_from != "nothing"
    return PackedRows.of(table, objective.kernel, reads_next)


def _groups_agree(
    table: Table,
    network: StackedMLP,
    objective: Objective,
    plan: ReplicaPlan,
    batch_size: int,
    groups: list[slice],
) -> bool:
    """Whether one step of groups gives the gradients of a step of the whole stack, to
    the bit.

    By torch and oneDNN a product of fewer than 16³ numbers, counted over the whole
    batch of matrices, is rounded in another way than a larger one.
    """
    rows = torch.arange(batch_size) % len(table)
    few_rows = table.select(rows)
    packed = _pack(few_rows, objective)

    def gradients_of(replicas: slice) -> Tensor:
        """Losses and gradients (R', 1 + P) of some of the replicas."""
        some_networks = network.with_flat(network.flat[replicas].clone())
        # all rows are one mini-batch
        own_plan = replace(plan.select(replicas), row_sets=(), row_set_of=())
        schedule = BatchSchedule(own_plan, batch_size, batch_size)
        source = BatchSource(few_rows, objective.kernel, own_plan, schedule, packed)
        step = make_step(objective, source, some_networks, own_plan)
        rates = few_rows.inputs.new_tensor(own_plan.learning_rates)[:, None]
        loss, gradient = step.compute(0, some_networks, some_networks, rates)
        return torch.cat([loss[:, None], gradient], dim=1)

    with threads(1), torch.no_grad():
        of_groups = torch.cat([gradients_of(group) for group in groups])
        return torch.equal(of_groups, gradients_of(slice(0, len(plan))))


def _tell_means(tell: Tell, done: int, means: Tensor) -> None:
    """Pass on a group's mean losses as plain numbers."""
    tell((done, means.tolist()))


class _GroupNews:
    """Progress of groups of replicas: reported as of one stack, once all groups have
    come so far.
    """

    def __init__(self, replicas: int, steps: int, progress: Progress | None) -> None:
        self._replicas = replicas
        self._steps = steps
        self._progress = progress
        # by the steps done: means of each group, by its first replica
        self._means: dict[int, dict[int, list[float]]] = {}
        self._reported = 0

    def hear(self, first: int, news: tuple[int, list[float]]) -> None:
        """Take a group's steps and means. Those of a group that started anew come
        twice.
        """
        done, means = news
        if done > self._reported:
            self._means.setdefault(done, {})[first] = means
        for steps in sorted(self._means):
            groups = [means for _, means in sorted(self._means[steps].items())]
            of_replicas = torch.tensor([mean for means in groups for mean in means])
            if len(of_replicas) < self._replicas:
                break
            self._report(steps, of_replicas)
            del self._means[steps]

    def end(self, record: FitRecord) -> None:
        """Report the end, if groups on workers told nothing of it."""
        if self._reported < self._steps:
            self._report(self._steps, record.losses[-1])

    def _report(self, done: int, means: Tensor) -> None:
        self._reported = done
        if self._progress is not None:
            self._progress(done, self._steps, _loss_note(means))


def _loss_note(means: Tensor) -> str:
    """The note of a progress line: the median loss (R,) over the replicas that have not
    diverged.
    """
    return f"objective {float(means.nanmedian()):.3g}"


def _check_replicas(network: StackedMLP, plan: ReplicaPlan) -> None:
    """Raise ConfigError unless the plan has an entry for each replica."""
    if len(network.flat) != len(plan):
        raise ConfigError(
            f"network has {len(network.flat)} replicas, the plan {len(plan)}; make them"
            " equal"
        )


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Run with `count` threads per process, in torch and in NumPy's and SciPy's linear
    algebra, and with faster float32 products; restore all settings afterwards.

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
        with threadpool_limits(limits=count, user_api="blas"):
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
