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

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from koffline.batches import ReplicaPlan, Table
from koffline.checkpoints import fingerprint_of, read_checkpoint, write_checkpoint
from koffline.dual_objectives import DualObjective
from koffline.fit_records import Checkpointing, FitRecord, FitSettings, Network, Probe, Progress
from koffline.objectives import Objective
from koffline.training import TrainingRun

__all__ = ["Checkpointing", "FitRecord", "FitSettings", "Progress", "fit", "threads"]


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
    checkpoint: Checkpointing | None = None,
) -> FitRecord[Network]:
    """Train copies of `network`'s replicas on `table`; `network` itself is left as it is.

    Everything runs on the table's device. probe(step, network) is called every `probe_every` steps, without
    gradients, and must not change what it is given; its tensors are kept.
    Raises ConfigError when plan, network, objective and table do not fit each other.
    """
    with threads(settings.threads), torch.no_grad():
        run = TrainingRun(table, network, objective, plan, settings)
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
