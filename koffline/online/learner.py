"""One gradient step of K Trust-PCL runs at once: policy and critic in closed form.

No autograd: with few outputs the networks' hand-written pullback does all the work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from koffline.online import critics
from koffline.online.config import OnlineConfig
from koffline.online.critics import Coefficients, CriticGradients, RememberedLoss
from koffline.online.networks import AgentStack
from koffline.online.paths import Minibatch, Rows, WindowCutter
from koffline.steps import StackedAdam


@dataclass(frozen=True, eq=False)
class Step:
    """Result of one step: gradient (K, P) before clipping, residual (K, M) and diagnostics (K,).

    The next step overwrites the gradient.
    """

    gradient: Tensor
    residual: Tensor
    diagnostics: dict[str, Tensor]


class Learner:
    """Networks, slow copies, optimiser and per-run numbers of K runs of equal shape."""

    def __init__(self, configs: Sequence[OnlineConfig], online: AgentStack, target: AgentStack) -> None:
        self.online, self.target = online, target
        self._dtype = online.flat.dtype
        self.windows = WindowCutter(configs, self._dtype)
        self._rates, self._decay, self._largest_norm, self._bandwidth_scale, epsilon = (
            self._column([getattr(config, name) for config in configs])
            for name in ("learning_rate", "target_decay", "max_grad_norm", "bandwidth_scale", "adam_epsilon")
        )
        self._clip = self._column([c.clip_adv or np.inf for c in configs])
        self._diag_weight = self._column(
            [np.nan if c.diag_weight is None else c.diag_weight for c in configs]
        )
        self._actions_in_kernel = self._column([c.kernel_inputs == "state_action" for c in configs])
        self._rows_of = _rows_by([c.critic.removesuffix("_slow") for c in configs])
        self._slow = _rows_by([c.critic in ("fvi", "kloss_slow") for c in configs]).get(True)
        self._through_end = self._column([c.critic in ("rg", "kloss") for c in configs])
        self._remembered = self._remember(configs)
        self._adam = StackedAdam(online.flat, epsilon=epsilon)
        self._gradient = torch.empty_like(online.flat)  # reused, because allocation costs more than the sum
        self.diverged = np.zeros(len(configs), dtype=bool)

    @torch.no_grad()
    def move_targets(self) -> None:
        """Move the slow copies towards the networks by 1 − target_decay."""
        self.target.flat.lerp_(self.online.flat, 1.0 - self._decay)

    @torch.no_grad()
    def update(
        self, batch: Minibatch, entropy_coef: np.ndarray, kl_coef: np.ndarray
    ) -> dict[str, np.ndarray]:
        """Take one Adam step of all runs; return diagnostics (K,). Runs with a non-finite gradient stop."""
        step = self.compute_step(batch, self._column(entropy_coef), self._column(kl_coef))
        policy, deviations, value = self.online.shape.parts
        gradient = step.gradient
        norms = {
            "grad_norm_policy": gradient[:, policy.start : deviations.stop].norm(dim=1),
            "grad_norm_value": gradient[:, value].norm(dim=1),
        }
        whole = torch.hypot(*norms.values()).unsqueeze(1)
        broken = ~torch.isfinite(whole)
        if bool(broken.any()):
            gradient = torch.where(broken, 0.0, gradient)
            self._stop(broken)
        gradient.mul_((self._largest_norm / whole.clamp(min=1e-30)).clamp_(max=1.0).nan_to_num_(nan=1.0))
        self._adam.update(self.online.flat, gradient, self._rates)
        return {name: part.double().numpy() for name, part in {**step.diagnostics, **norms}.items()}

    def compute_step(self, batch: Minibatch, entropy_coef: Tensor, kl_coef: Tensor) -> Step:
        """Compute the gradients of both networks, one row per run; no update. Coefficients are (K, 1)."""
        coefficients = entropy_coef, kl_coef
        found = critics.compute_residual(self.online, self.target, self._slow, batch, coefficients)
        residual, density, values = found.windows, found.density, found.values
        bounded = residual.clamp(-self._clip, self._clip) * values.valid
        share = (bounded.view_as(batch.discounts).unsqueeze(3) * batch.weights).sum(dim=2)
        share = share / batch.valid.amax(dim=2).sum(dim=1)[:, None, None]  # mean over paths with a window
        slope = share.flatten(1).gather(1, batch.rows) * -batch.covered
        policy_gradient, deviation_gradient = density.gradients(slope, found.pull_policy)
        critic = self._critic(residual, values, batch, coefficients)
        gradient, parts = self._gradient, (policy_gradient, deviation_gradient, values.pull(critic))
        for place, part in zip(self.online.shape.parts, parts, strict=True):
            gradient[:, place] = part
        count = values.valid.sum(dim=1)
        mean = (residual * values.valid).sum(dim=1) / count
        spread = ((residual - mean.unsqueeze(1)).square() * values.valid).sum(dim=1) / count
        clipped = ((bounded != residual) & (values.valid > 0)).sum(dim=1) / count
        diagnostics = {
            "residual_mean": mean,
            "residual_std": spread.sqrt(),
            "clip_fraction": clipped,
            "loss": critic.loss,
            "policy_std": density.mean_std,
        }
        return Step(gradient, residual, diagnostics)

    def state_dict(self) -> dict[str, Any]:
        """Parameters, slow copies, Adam's moments."""
        return {
            "online": self.online.flat.clone(),
            "target": self.target.flat.clone(),
            "adam": {
                k: v.clone() if isinstance(v, Tensor) else v for k, v in self._adam.state_dict().items()
            },
            "diverged": torch.from_numpy(self.diverged.copy()),
            "remembered": self._remembered and self._remembered.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state_dict``; tensors are written in place because others hold views of them."""
        self.online.flat.copy_(state["online"])
        self.target.flat.copy_(state["target"])
        self._adam.load_state_dict(state["adam"])
        if self._remembered is not None:
            self._remembered.load_state_dict(state["remembered"])
        self._stop(state["diverged"].unsqueeze(1))

    def _stop(self, broken: Tensor) -> None:
        """Stop runs (K, 1) for good, Adam's momentum included."""
        self.diverged |= broken.squeeze(1).numpy()
        self._rates.masked_fill_(broken, 0.0)

    def _remember(self, configs: Sequence[OnlineConfig]) -> RememberedLoss | None:
        """Make the remembered loss; standardised rows have the root mean squared distance √(2 · columns)."""
        rows = self._rows_of.get("memory")
        if rows is None:
            return None
        shape = self.online.shape
        columns = shape.observation_dim + shape.outputs * self._actions_in_kernel[rows]
        bandwidth = self._bandwidth_scale[rows] * (2.0 * columns).sqrt()
        share = self._column([c.memory for c in configs])[rows]
        before = AgentStack(shape, self.online.flat[rows])
        width = int(columns.max())
        return RememberedLoss(share, self._diag_weight[rows], bandwidth, width, before)

    def _critic(
        self, residual: Tensor, values: critics.ValueEnds, batch: Minibatch, coefficients: Coefficients
    ) -> CriticGradients:
        """Gradients of each run by its own critic."""
        ends = residual, values.discount, values.valid
        parts: list[tuple[Rows, CriticGradients]] = []
        if (rows := self._rows_of.get("kloss")) is not None:
            own = [part[rows] for part in ends]
            gram = critics.gaussian_gram(
                self._kernel_inputs(batch, rows), own[2], self._bandwidth_scale[rows]
            )
            weight, through = self._diag_weight[rows], self._through_end[rows]
            parts.append((rows, critics.kernel_gradients(own[0], own[1], own[2], gram, weight, through)))
        if (rows := self._rows_of.get("memory")) is not None and self._remembered is not None:
            now = [AgentStack(stack.shape, stack.flat[rows]) for stack in (self.online, self.target)]
            inputs = self._kernel_inputs(batch, rows)
            here = now[0], now[1], (coefficients[0][rows], coefficients[1][rows])
            parts.append((rows, self._remembered.gradients(residual[rows], batch.of(rows), inputs, here)))
        if len(parts) == 1 and len(parts[0][1].loss) == len(residual):
            return parts[0][1]
        whole = critics.squared_error_gradients(*ends, self._through_end)
        for rows, part in parts:
            whole.loss[rows], whole.start[rows], whole.end[rows] = part.loss, part.start, part.end
        return whole

    def _kernel_inputs(self, batch: Minibatch, rows: Rows) -> Tensor:
        """[s, a] of each window's first step, (R, M, ·); actions as drawn, discrete ones as unit vectors."""
        starts = batch.starts.clamp(max=batch.rewards.shape[2] - 1)[rows]
        index = starts.unsqueeze(3)
        states = critics.rows_at(batch.inputs[rows], index)
        if not bool(self._actions_in_kernel[rows].any()):
            return states.flatten(1, 2)
        shape = self.online.shape
        if shape.continuous:
            actions = critics.rows_at(batch.actions[rows], index)
        else:
            chosen = batch.actions[rows].gather(2, starts)
            actions = torch.nn.functional.one_hot(chosen, shape.outputs).to(self._dtype)
        actions = actions * self._actions_in_kernel[rows][..., None, None]
        return torch.cat((states, actions), dim=3).flatten(1, 2)

    def _column(self, numbers: Any) -> Tensor:
        return torch.as_tensor(np.asarray(numbers, dtype=float), dtype=self._dtype).reshape(-1, 1)


def _rows_by(kinds: Sequence[Any]) -> dict[Any, Rows]:
    """Rows of the runs of each kind; a slice if they are contiguous, which avoids copies."""
    found: dict[Any, Rows] = {}
    for kind in dict.fromkeys(kinds):
        rows = [k for k, other in enumerate(kinds) if other == kind]
        together = rows[-1] - rows[0] + 1 == len(rows)
        found[kind] = slice(rows[0], rows[-1] + 1) if together else torch.tensor(rows)
    return found
