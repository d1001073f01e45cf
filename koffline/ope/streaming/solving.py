"""Values from sums: the heads of trained networks and the closed forms, for all rows or without a group."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from koffline.ope.closed_form.dualdice import CRITIC_RIDGES, whitened_path
from koffline.ope.closed_form.fitting import (
    CURVATURE_POWER,
    FOLDS,
    TEMPORAL_POWER,
    MakePath,
    kernel_path,
    temporal_path,
)
from koffline.ope.closed_form.moments import FoldedMoments, Moments
from koffline.ope.closed_form.ridges import Path, best_ridge, candidate_ridges, held_out_losses, usual_ridge
from koffline.ope.fitted import LSTD_RIDGE
from koffline.ope.last_layer import kernel_loss_layer, temporal_layer
from koffline.ope.problem import EvaluationProblem
from koffline.ope.streaming.frame import Frame, NetworkFeatures
from koffline.ope.streaming.moments import StreamingMoments
from koffline.ope.streaming.starts import drawing_variance
from koffline.solvers.linear import free_parameters

HEADS = ("kloss", "lstd", "fqe")
CLOSED_FORMS = ("mql", "lstdq", "mwl", "dualdice")
Layer = Callable[[StreamingMoments], Float[Tensor, "replica parameter"]]


@dataclass(frozen=True, eq=False)
class StreamedSystem:
    """What closed forms read besides `Moments`: c (p,) of one replica, in units of the return."""

    start_mean: Float[Tensor, " parameter"]
    free: Tensor


@dataclass(frozen=True, eq=False)
class Reader:
    """Turns sums into values. ``fixed_starts (R, p)``: mean of φ over given start states, None for the
    log's own.
    """

    frame: Frame
    fixed_starts: np.ndarray | None = None

    def start_mean(self, sums: StreamingMoments) -> np.ndarray:
        """c (R, p)."""
        return sums.start_mean() if self.fixed_starts is None else self.fixed_starts

    def value(self, sums: StreamingMoments, theta: Float[Tensor, "replica parameter"]) -> np.ndarray:
        """J (R,) of last layers θ in units of the return."""
        means = torch.from_numpy(self.start_mean(sums))
        return np.asarray((means * theta).sum(dim=1).numpy() * self.frame.units.reward_scale)

    def system(self, sums: StreamingMoments, replica: int) -> StreamedSystem:
        """Of one replica."""
        free = free_parameters(self.frame.parameters, self.frame.outputs)
        return StreamedSystem(torch.from_numpy(self.start_mean(sums)[replica]), free)

    def moments(self, sums: StreamingMoments, replica: int) -> Moments:
        """Sums of one replica with rewards in the user's units."""
        return sums.moments(replica, self.frame.units.reward_scale)


def head_layer(frame: Frame, head: str, ridge: float) -> Layer:
    """θ (R, p) from sums, by head; only for trained networks. Rewards in units of the problem."""
    assert isinstance(frame.features, NetworkFeatures)
    trained = frame.features.last_layers
    return {
        "kloss": lambda sums: kernel_loss_layer(trained, sums.systems(), ridge),
        "lstd": lambda sums: temporal_layer(trained, sums.systems(), LSTD_RIDGE),
        "fqe": lambda sums: trained,
    }[head]


@dataclass(frozen=True, eq=False)
class ClosedForm:
    """One closed form with its ridges chosen: by replica the fits for any sums.

    ``considered``: of every replica the ridges tried and their held-out losses.
    """

    name: str
    reader: Reader
    ridges: tuple[float, ...]
    critic_ridges: tuple[float, ...] = ()

    def path(self, sums: StreamingMoments, replica: int) -> Path:
        """Fits for any ridge from these sums."""
        system = self.reader.system(sums, replica)
        critic_ridge = self.critic_ridges[replica] if self.critic_ridges else 0.0
        make_path = _make_path(self.name, system, self.reader.frame.critics, critic_ridge)
        return make_path(self.reader.moments(sums, replica))

    def values(self, sums: StreamingMoments) -> np.ndarray:
        """J (R,) in units of the return."""
        return np.array([self._value(sums, replica) for replica in range(sums.replicas)])

    def _value(self, sums: StreamingMoments, replica: int) -> float:
        path, ridge = self.path(sums, replica), self.ridges[replica]
        if self.name != "mwl":
            return float(self.reader.system(sums, replica).start_mean @ path.solve_value(ridge))
        moments = self.reader.moments(sums, replica)
        alpha = path.solve(ridge).alpha
        mass = float(alpha @ moments.projected @ self._mass_column(moments)) / moments.weight
        value = float(alpha @ moments.projected[:, -1]) / moments.weight
        return value / mass if mass > 0.0 else value

    def drawing_variance(self, problem: EvaluationProblem, sums: StreamingMoments) -> float:
        """What drawing the policy's actions at given start states leaves open, in units of the return²."""
        theta = torch.stack(
            [self.path(sums, replica).solve_value(ridge) for replica, ridge in enumerate(self.ridges)]
        )
        return drawing_variance(self.reader.frame.features, problem, theta)

    def _mass_column(self, moments: Moments) -> Float[Tensor, " column"]:
        """Picks 1 − discount from [Z, r]: what the constants among the features leave."""
        picks = torch.zeros(moments.projected.shape[1], dtype=torch.float64)
        picks[-1 - self.reader.frame.outputs : -1] = 1.0
        return picks


def choose_closed_form(name: str, reader: Reader, sums: StreamingMoments) -> ClosedForm:
    """Ridges by the held-out kernel loss over folds of groups, for each replica as in memory."""
    rows = int(sums.rows.sum())
    if name == "mwl":  # not even its ridge sees a reward
        return ClosedForm(name, reader, (usual_ridge(rows, CURVATURE_POWER),) * sums.replicas)
    power = TEMPORAL_POWER if name == "lstdq" else CURVATURE_POWER
    candidates = candidate_ridges(rows, power)
    ridges, critic_ridges = [], []
    for replica in range(sums.replicas):
        system, folded = reader.system(sums, replica), folded_sums(reader, sums, replica)
        losses = {
            epsilon: held_out_losses(
                folded, _make_path(name, system, reader.frame.critics, epsilon), candidates
            )
            for epsilon in (CRITIC_RIDGES if name == "dualdice" else (0.0,))
        }
        best = min(losses, key=lambda epsilon: float(losses[epsilon].min()))
        ridges.append(best_ridge(losses[best], candidates))
        critic_ridges.append(best)
    return ClosedForm(name, reader, tuple(ridges), tuple(critic_ridges))


def folded_sums(reader: Reader, sums: StreamingMoments, replica: int, folds: int = FOLDS) -> FoldedMoments:
    """Sums of one replica by fold, each of every ``folds``-th group; folds without rows are left out."""
    numbers = np.arange(sums.groups) % folds
    parts = []
    for fold in range(folds):
        chosen = np.flatnonzero((numbers == fold) & (sums.weight > 0.0)).tolist()
        if chosen:
            parts.append(reader.moments(sums.part(chosen), replica))
    return FoldedMoments(tuple(parts), np.zeros(0, dtype=np.int64))


def _make_path(name: str, system: StreamedSystem, critics: int, epsilon: float) -> MakePath:
    if name == "dualdice":
        return whitened_path(system, critics, epsilon)
    return temporal_path(system) if name == "lstdq" else kernel_path(system)


@dataclass(frozen=True, eq=False)
class TowardPath:
    """Kernel-loss fits of one network's last layer, ridged toward the trained one: what ``kloss`` solves."""

    moments: Moments
    trained: Float[Tensor, " parameter"]

    def solve_value(self, ridge: float) -> Float[Tensor, " parameter"]:
        """θ for one ridge, relative to the mean curvature."""
        projected = self.moments.projected / self.moments.weight
        matrix, vector = projected[:, :-1], projected[:, -1]
        curvature = matrix.mT @ matrix
        scale = ridge * curvature.diagonal().abs().mean()
        pull = matrix.mT @ (vector - matrix @ self.trained)
        eye = torch.eye(len(curvature), dtype=curvature.dtype)
        solution, info = torch.linalg.solve_ex(curvature + scale * eye, pull)
        return self.trained + (solution if int(info) == 0 else math.nan)
