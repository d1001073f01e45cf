"""What goes into a fit and what comes out of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Literal, Protocol, TypeVar, runtime_checkable

from torch import Tensor

from koffline.errors import ConfigError
from koffline.replicas import StackedNetwork

Network = TypeVar("Network", bound=StackedNetwork)
Probe = Callable[[int, Network], Tensor]


@runtime_checkable
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
class FitRecord(Generic[Network]):
    """What a run gives: K rows of history, R replicas.

    network: the last parameters; averaged: their tail average, or None. Diverged replicas are NaN in both.
    losses (K, R): mean mini-batch loss over the steps up to `loss_steps` (K,).
    probes (Q, …): what the probe returned after `probe_steps`. diverged_at: per replica the step, or None.
    """

    network: Network
    averaged: Network | None
    losses: Tensor
    loss_steps: tuple[int, ...]
    probes: tuple[Tensor, ...]
    probe_steps: tuple[int, ...]
    diverged_at: tuple[int | None, ...]
    steps: int
    seconds: float

    @property
    def best(self) -> Network:
        """The averaged network where there is one, else the last."""
        return self.network if self.averaged is None else self.averaged
