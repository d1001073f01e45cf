"""One gradient step of K Trust-PCL runs at once: policy and critic in closed form,
exploration bonus.

There is no autograd: with few outputs, the networks' hand-written pullback is enough.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from koffline.kernels import Gaussian, random_fourier_features
from koffline.online import critics
from koffline.online.config import OnlineConfig
from koffline.online.critics import CriticGradient, RememberedLoss
from koffline.online.networks import Networks
from koffline.online.paths import Minibatch, Rows, WindowCutter
from koffline.replicas import StackedAdam

Kind = TypeVar("Kind", bound=Hashable)  # such as the name of a critic
_FEATURES = 128  # of the kernel that measures which states are unknown
# of that kernel, times the root mean squared distance of standardised states
_BANDWIDTH = 0.5
_EVERY = 20  # iterations between two inversions


class Learner:
    """Networks, slow copies, optimiser and per-run numbers of K runs of equal shape."""

    kept = ("online", "target", "_adam", "_remembered", "_rates", "diverged")

    def __init__(self, configs: Sequence[OnlineConfig], networks: Networks) -> None:
        self.networks = networks
        self.online, self.target = networks
        self._dtype = self.online.flat.dtype
        self.windows = WindowCutter(configs, self._dtype)
        self._rates = self._column([c.learning_rate for c in configs])
        self._decay = self._column([c.target_decay for c in configs])
        self._largest_norm = self._column([c.max_grad_norm for c in configs])
        epsilon = self._column([c.adam_epsilon for c in configs])
        self._bandwidth_scale = self._column([c.bandwidth_scale for c in configs])
        # NaN where it is unset
        self._diag_weight = self._column([c.diag_weight for c in configs])
        memory = self._column([c.memory for c in configs])
        self._clip = self._column([c.clip_adv or np.inf for c in configs])
        self._actions_in_kernel = self._column(
            [c.kernel_inputs == "state_action" for c in configs]
        )
        self._rows_of = _rows_by([c.critic.removesuffix("_slow") for c in configs])
        # The runs whose windows end in values of the slow copies; None without any.
        has_slow_end = [c.critic in ("fvi", "kloss_slow") for c in configs]
        self._slow = _rows_by(has_slow_end).get(True)
        self._through_end = self._column(
            [c.critic in ("rg", "kloss", "memory") for c in configs]
        )
        self._remembered: RememberedLoss | None = None
        rows = self._rows_of.get("memory")
        if rows is not None:
            self._remembered = RememberedLoss(
                share=memory[rows],
                diag_weight=self._diag_weight[rows],
                bandwidth_scale=self._bandwidth_scale[rows],
                has_actions=self._actions_in_kernel[rows],
                now=networks.of(rows),
            )
        self._adam = StackedAdam(self.online.flat, epsilon=epsilon)
        # reused: allocation costs more than the sum
        self.gradient = torch.empty_like(self.online.flat)
        self.diverged = np.zeros(len(configs), dtype=bool)

    @torch.no_grad()
    def move_targets(self) -> None:
        """Move the slow copies towards the networks by 1 − target_decay."""
        self.target.flat.lerp_(self.online.flat, 1.0 - self._decay)

    @torch.no_grad()
    def update(self, batch: Minibatch, coefficients: Tensor) -> dict[str, Tensor]:
        """Take one Adam step in all runs; return diagnostics (K,). Runs with a
        non-finite gradient stop.

        coefficients (2, K, 1): τ and λ.
        """
        diagnostics = self.compute_gradient(batch, coefficients)
        gradient = self.gradient
        policy, deviations, value = self.online.shape.parts
        norms = {
            "grad_norm_policy": gradient[:, policy.start : deviations.stop].norm(dim=1),
            "grad_norm_value": gradient[:, value].norm(dim=1),
        }
        whole = torch.hypot(*norms.values()).unsqueeze(1)
        broken = ~torch.isfinite(whole)
        if bool(broken.any()):
            gradient = torch.where(broken, 0.0, gradient)
            self.diverged |= broken.squeeze(1).numpy()
            # permanently, because Adam's momentum would go on
            self._rates.masked_fill_(broken, 0.0)
        # Gradients longer than the largest norm are shortened to it.
        factor = (self._largest_norm / whole.clamp(min=1e-30)).clamp_(max=1.0)
        gradient.mul_(factor.nan_to_num_(nan=1.0))
        self._adam.update(self.online.flat, gradient, self._rates)
        return {name: part.double() for name, part in {**diagnostics, **norms}.items()}

    def compute_gradient(
        self, batch: Minibatch, coefficients: Tensor
    ) -> dict[str, Tensor]:
        """Compute ``gradient`` (K, P) of both networks, before clipping; return
        diagnostics (K,).
        """
        evaluated = critics.Residual(self.networks, self._slow, batch, coefficients)
        residual = evaluated.windows
        density = evaluated.density
        values = evaluated.values
        bounded = residual.clamp(-self._clip, self._clip) * values.valid
        of_windows = bounded.view_as(batch.discounts).unsqueeze(3)  # (K, B, W, 1)
        share = (of_windows * batch.weights).sum(dim=2)  # (K, B, T)
        # mean over paths with a window
        share = share / batch.valid.amax(dim=2).sum(dim=1)[:, None, None]
        slope = share.flatten(1).gather(1, batch.rows) * -batch.covered
        policy = density.gradients(slope, evaluated.pull_policy)
        critic = self._critic(evaluated, batch, coefficients)
        parts = (*policy, values.pull(critic.slope, self._through_end))
        for place, part in zip(self.online.shape.parts, parts, strict=True):
            self.gradient[:, place] = part
        count = values.valid.sum(dim=1)
        mean = (residual * values.valid).sum(dim=1) / count
        squares = (residual - mean.unsqueeze(1)).square() * values.valid
        spread = squares.sum(dim=1) / count
        return {
            "residual_mean": mean,
            "residual_std": spread.sqrt(),
            "clip_fraction": (
                ((bounded != residual) & (values.valid > 0)).sum(dim=1) / count
            ),
            "loss": critic.loss,
            "policy_std": density.mean_std,
        }

    def _critic(
        self, evaluated: critics.Residual, batch: Minibatch, coefficients: Tensor
    ) -> CriticGradient:
        """Loss (K,) and slope (K, M) in the residuals of M windows, of each run by its
        own critic: the kernel loss, the remembered kernel loss, else the squared error.

        coefficients (2, K, 1): τ and λ.
        """
        by_kernel: list[tuple[Rows, CriticGradient]] = []
        rows = self._rows_of.get("kloss")
        if rows is not None:
            by_kernel.append((rows, self._kernel_gradient(evaluated, batch, rows)))
        rows = self._rows_of.get("memory")
        if rows is not None and self._remembered is not None:
            remembered = self._remembered.gradient(
                evaluated.windows[rows],
                batch.of(rows),
                self._kernel_inputs(batch, rows),
                now=self.networks.of(rows),
                coefficients=coefficients[:, rows],
            )
            by_kernel.append((rows, remembered))
        if len(by_kernel) == 1:
            _, gradient = by_kernel[0]
            if len(gradient.loss) == len(evaluated.windows):  # of all runs
                return gradient
        of_all_runs = critics.squared_error_gradient(
            evaluated.windows, evaluated.values.valid
        )
        for rows, gradient in by_kernel:
            of_all_runs.loss[rows] = gradient.loss
            of_all_runs.slope[rows] = gradient.slope
        return of_all_runs

    def _kernel_gradient(
        self, evaluated: critics.Residual, batch: Minibatch, rows: Rows
    ) -> CriticGradient:
        """Loss (R,) and slope (R, M) of the kernel loss of the runs ``rows``."""
        valid = evaluated.values.valid[rows]
        gram = critics.gaussian_gram(
            self._kernel_inputs(batch, rows), valid, self._bandwidth_scale[rows]
        )
        return critics.kernel_gradient(
            evaluated.windows[rows], valid, gram, self._diag_weight[rows]
        )

    def _kernel_inputs(self, batch: Minibatch, rows: Rows) -> Tensor:
        """[s, a] of each window's first step, (R, M, ·); actions as drawn, discrete
        ones as unit vectors.
        """
        starts = batch.starts.clamp(max=batch.rewards.shape[2] - 1)[rows]
        states = torch.take_along_dim(batch.inputs[rows], starts.unsqueeze(3), dim=2)
        if not bool(self._actions_in_kernel[rows].any()):
            return states.flatten(1, 2)
        shape = self.online.shape
        if shape.continuous:
            actions = torch.take_along_dim(
                batch.actions[rows], starts.unsqueeze(3), dim=2
            )
        else:
            chosen = batch.actions[rows].gather(2, starts)
            actions = torch.nn.functional.one_hot(chosen, shape.outputs).to(self._dtype)
        actions = actions * self._actions_in_kernel[rows][..., None, None]
        return torch.cat((states, actions), dim=3).flatten(1, 2)

    def _column(self, numbers: Sequence[float | bool | None]) -> Tensor:
        """A number of each run (K, 1); NaN for None."""
        return torch.as_tensor(
            np.asarray(numbers, dtype=float), dtype=self._dtype
        ).reshape(-1, 1)


class Exploration:
    """Exploration bonuses of K runs: the uncertainty of kernel regressions on each
    run's own states.

    An ensemble of ridge regressions on random features ψ of a Gaussian kernel, each
    with its own noise, spreads at s by √(ψ(s)ᵀ (I + Σ ψψᵀ)⁻¹ ψ(s)), with the sum over
    the states seen so far (standardised as they were when seen): from 1 far from all of
    them down to 0. This is the spread of infinitely many replicas, in closed form.
    ``scales``: of each run, in scaled reward. (Rasmussen & Williams 2006, ch. 2)
    """

    kept = ("_seen", "_inverse", "_iterations")

    def __init__(
        self, scales: Sequence[float], dimension: int, dtype: torch.dtype
    ) -> None:
        bandwidth = _BANDWIDTH * (2.0 * dimension) ** 0.5
        generator = torch.Generator().manual_seed(0)
        self._features = random_fourier_features(
            Gaussian(bandwidth), dimension, _FEATURES, generator
        )
        self._scales = torch.tensor(scales, dtype=dtype).unsqueeze(1)
        self._seen = torch.eye(_FEATURES, dtype=dtype).repeat(len(scales), 1, 1)
        self._inverse = self._seen.clone()
        self._iterations = 0

    def update(self, states: Float[Tensor, "run state d"]) -> None:
        """Add standardised states to those seen."""
        psi = self._features(states)
        self._seen += psi.mT @ psi
        if self._iterations % _EVERY == 0:
            self._inverse = torch.linalg.inv(self._seen)
        self._iterations += 1

    def add(self, batch: Minibatch) -> Minibatch:
        """The mini-batch with the bonuses added to its rewards."""
        # rows of inputs, T + 1 a path
        reached = batch.rows + batch.rows // batch.rewards.shape[2] + 1
        states = torch.take_along_dim(
            batch.inputs.flatten(1, 2), reached.unsqueeze(2), dim=1
        )
        psi = self._features(states)
        spread = ((psi @ self._inverse) * psi).sum(dim=2).clamp(min=0.0).sqrt()
        bonus = self._scales * spread * batch.covered
        rewards = batch.rewards.flatten(1).scatter_add(1, batch.rows, bonus)
        return replace(batch, rewards=rewards.view_as(batch.rewards))


def _rows_by(kinds: Sequence[Kind]) -> dict[Kind, Rows]:
    """Rows of the runs of each kind; a slice if they are contiguous, which avoids
    copies.
    """
    rows_of: dict[Kind, Rows] = {}
    for kind in dict.fromkeys(kinds):
        rows = [k for k, other in enumerate(kinds) if other == kind]
        together = rows[-1] - rows[0] + 1 == len(rows)
        if together:
            rows_of[kind] = slice(rows[0], rows[-1] + 1)
        else:
            rows_of[kind] = torch.tensor(rows)
    return rows_of
