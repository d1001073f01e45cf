"""One gradient step of K Trust-PCL runs at once: residuals of windows, policy and critic in closed form.

R_i = −V(s_i) + γ^{d_i} V(s_{i+d_i})
      + Σ_t γ^t [r_{i+t} − (λ + τ) log π(a_{i+t}|s_{i+t}) + τ log π̃(a_{i+t}|s_{i+t})]
(Feng et al. 2019, alg:kloss_pcl; Nachum et al. 2018)

No autograd: with few outputs the networks' hand-written pullback does all the work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from koffline.data.paths import Paths
from koffline.online.config import OnlineConfig
from koffline.online.critics import CriticGradients, gaussian_gram, kernel_gradients, squared_error_gradients
from koffline.online.networks import LOG_TWO_PI, AgentStack, InputMoments
from koffline.online.windows import WindowRules, Windows, all_starts, cut_windows, draw_starts, pack_steps
from koffline.stacked_adam import StackedAdam

Rows = slice | Tensor


@dataclass(frozen=True, eq=False)
class Minibatch:
    """Sampled paths as tensors: inputs (K, B, T + 1, d) standardised, rewards scaled, windows cut.

    rows, covered (K, R): the steps the policy is asked about, see PackedSteps.
    """

    inputs: Tensor
    actions: Tensor
    rewards: Tensor
    windows: Windows
    weights: Tensor
    discounts: Tensor
    valid: Tensor
    rows: Tensor
    covered: Tensor


@dataclass(frozen=True, eq=False)
class Step:
    """What one step computed: gradient (K, P) before clipping, residual (K, M) and diagnostics (K,).

    The gradient's memory is used again by the next step.
    """

    gradient: Tensor
    residual: Tensor
    diagnostics: dict[str, Tensor]


class Learner:
    """Networks, slow copies, optimiser and per-run numbers of K runs of equal shape."""

    def __init__(self, configs: Sequence[OnlineConfig], online: AgentStack, target: AgentStack) -> None:
        self.online, self.target = online, target
        self._dtype = online.flat.dtype
        self._windows_per_path = configs[0].windows_per_path
        self._path_length = configs[0].path_length
        self.rules = WindowRules(
            gamma=np.array([c.gamma for c in configs]),
            window_length=np.array([c.window_length for c in configs]),
            legacy_timeouts=np.array([c.legacy_timeouts for c in configs]),
            legacy_discount=np.array([c.legacy_discount for c in configs]),
            path_length=self._path_length,
        )
        self._rates = self._column([c.learning_rate for c in configs])
        self._decay = self._column([c.target_decay for c in configs])
        clip = [c.clip_adv or np.inf for c in configs]
        self._clip = self._column(clip)[..., None]
        self._largest_norm = self._column([c.max_grad_norm for c in configs])
        self._reward_scale = self._column([c.reward_scale for c in configs])[..., None]
        self._diag_weight = self._column(
            [np.nan if c.diag_weight is None else c.diag_weight for c in configs]
        )
        self._bandwidth_scale = self._column([c.bandwidth_scale for c in configs])
        self._actions_in_kernel = self._column([c.kernel_inputs == "state_action" for c in configs])[
            ..., None
        ]
        self._rows_of = _rows_by_critic([c.critic for c in configs])
        self._through_end = self._column([c.critic == "rg" for c in configs])
        self._adam = StackedAdam(online.flat, epsilon=self._column([c.adam_epsilon for c in configs]))
        self._gradient = torch.empty_like(online.flat)  # fresh memory would cost more than the sum
        self.diverged = np.zeros(len(configs), dtype=bool)

    @torch.no_grad()
    def move_targets(self) -> None:
        """The slow copies move by 1 − target_decay."""
        self.target.flat.lerp_(self.online.flat, 1.0 - self._decay)

    @torch.no_grad()
    def update(
        self, batch: Minibatch, entropy_coef: np.ndarray, kl_coef: np.ndarray
    ) -> dict[str, np.ndarray]:
        """One Adam step of all runs; diagnostics (K,). A run whose gradient is not finite stands still."""
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
            self.diverged |= broken.squeeze(1).numpy()
        gradient.mul_((self._largest_norm / whole.clamp(min=1e-30)).clamp_(max=1.0).nan_to_num_(nan=1.0))
        self._adam.update(self.online.flat, gradient, self._rates)
        return {name: part.double().numpy() for name, part in {**step.diagnostics, **norms}.items()}

    def minibatch(
        self, paths: Paths, generators: Sequence[np.random.Generator], moments: InputMoments
    ) -> Minibatch:
        """Tensors of sampled paths (K, B, …), with windows drawn by each run's generator."""
        count = self._windows_per_path
        starts = (
            draw_starts(generators, paths.lengths, count)
            if count
            else all_starts(paths.lengths, self._path_length)
        )
        return self.minibatch_of(paths, starts, moments)

    def minibatch_of(self, paths: Paths, starts: np.ndarray, moments: InputMoments) -> Minibatch:
        """The same with given starts (K, B, W)."""
        windows = cut_windows(paths, starts, self.rules)
        packed = pack_steps(windows)
        mean, inverse = (self._tensor(part)[:, None, None] for part in (moments.mean, 1.0 / moments.std))
        actions = torch.from_numpy(paths.actions)
        return Minibatch(
            inputs=(self._tensor(paths.observations) - mean) * inverse,
            actions=actions if actions.dtype == torch.int64 else actions.to(self._dtype),
            rewards=self._tensor(paths.rewards) * self._reward_scale,
            windows=windows,
            weights=self._tensor(windows.weights),
            discounts=self._tensor(windows.discounts),
            valid=self._tensor(windows.valid),
            rows=torch.from_numpy(packed.index),
            covered=self._tensor(packed.covered),
        )

    def compute_step(self, batch: Minibatch, entropy_coef: Tensor, kl_coef: Tensor) -> Step:
        """Gradients of both networks in one row per run; nothing moves. Coefficients are (K, 1)."""
        runs, paths, steps = batch.rewards.shape
        inputs = batch.inputs.flatten(1, 2).gather(1, _wide(batch.rows + batch.rows // steps, batch.inputs))
        actions = batch.actions.flatten(1, 2)
        actions = actions.gather(1, _wide(batch.rows, actions) if actions.ndim == 3 else batch.rows)
        outputs, pull_policy = self.online.policy.forward_with_pullback(inputs)
        density = _Density(outputs, self.online.log_std, actions)
        slow = _Density(self.target.policy.forward(inputs), self.target.log_std, actions).log_probability
        divergence = (entropy_coef + kl_coef) * density.log_probability - kl_coef * slow
        reward = batch.rewards.flatten(1).scatter_add(1, batch.rows, -divergence * batch.covered)
        # (K, B, W, T) over T
        gained = (batch.weights * reward.view(runs, paths, 1, steps)).sum(dim=3)
        values = _ValueEnds(self, batch)
        residual = gained.flatten(1) + values.discount * values.end - values.start

        bounded = residual.clamp(-self._clip.squeeze(2), self._clip.squeeze(2)) * values.valid
        share = (bounded.view_as(batch.discounts).unsqueeze(3) * batch.weights).sum(dim=2) / paths
        slope = share.flatten(1).gather(1, batch.rows) * -batch.covered
        policy_gradient, deviation_gradient = density.gradients(slope, pull_policy)
        critic, diagnostics = self._critic(residual, values, batch)
        gradient = self._gradient
        for place, part in zip(
            self.online.shape.parts,
            (policy_gradient, deviation_gradient, values.pull(critic)),
            strict=True,
        ):
            gradient[:, place] = part
        count = values.valid.sum(dim=1)
        mean = (residual * values.valid).sum(dim=1) / count
        spread = ((residual - mean.unsqueeze(1)).square() * values.valid).sum(dim=1) / count
        clipped = ((bounded != residual) & (values.valid > 0)).sum(dim=1) / count
        diagnostics |= {
            "residual_mean": mean,
            "residual_std": spread.sqrt(),
            "clip_fraction": clipped,
            "loss": critic.loss,
            "policy_std": density.mean_std,
        }
        return Step(gradient, residual, diagnostics)

    def rows_of(self, kind: str) -> Rows | None:
        """Rows of the runs with that critic; None where there are none."""
        return self._rows_of.get(kind)

    def state_dict(self) -> dict[str, Any]:
        """Parameters, slow copies, Adam's moments."""
        return {
            "online": self.online.flat.clone(),
            "target": self.target.flat.clone(),
            "adam": {
                k: v.clone() if isinstance(v, Tensor) else v for k, v in self._adam.state_dict().items()
            },
            "diverged": torch.from_numpy(self.diverged.copy()),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from ``state_dict``; tensors are written in place, so that whatever reads them sees it."""
        self.online.flat.copy_(state["online"])
        self.target.flat.copy_(state["target"])
        self._adam.load_state_dict(state["adam"])
        self.diverged[:] = state["diverged"].numpy()

    def _critic(
        self, residual: Tensor, values: _ValueEnds, batch: Minibatch
    ) -> tuple[CriticGradients, dict[str, Tensor]]:
        """Each run's gradients by its own critic."""
        ends = residual, values.discount, values.valid
        nothing = torch.full_like(residual[:, 0], torch.nan)
        diagnostics = {"off_diagonal_kernel": nothing, "median_distance": nothing.clone()}
        rows = self._rows_of.get("kloss")
        if rows is None:
            return squared_error_gradients(*ends, self._through_end), diagnostics
        own = [part[rows] for part in ends]
        gram = gaussian_gram(self._kernel_inputs(batch, rows), own[2], self._bandwidth_scale[rows])
        kernel = kernel_gradients(own[0], own[1], own[2], gram.matrix, self._diag_weight[rows])
        diagnostics["off_diagonal_kernel"][rows] = gram.off_diagonal
        diagnostics["median_distance"][rows] = gram.median
        if len(kernel.loss) == len(residual):
            return kernel, diagnostics
        whole = squared_error_gradients(*ends, self._through_end)
        whole.loss[rows], whole.start[rows], whole.end[rows] = kernel.loss, kernel.start, kernel.end
        return whole, diagnostics

    def _kernel_inputs(self, batch: Minibatch, rows: Rows) -> Tensor:
        """[s, a] of each window's first step, (R, M, ·); actions as drawn, discrete ones as unit vectors."""
        starts = torch.from_numpy(np.minimum(batch.windows.starts, self._path_length - 1))[rows]
        index = starts.unsqueeze(3)
        states = _at(batch.inputs[rows], index)
        if not bool(self._actions_in_kernel[rows].any()):
            return states.flatten(1, 2)
        shape = self.online.shape
        if shape.continuous:
            actions = _at(batch.actions[rows], index)
        else:
            chosen = batch.actions[rows].gather(2, starts)
            actions = torch.nn.functional.one_hot(chosen, shape.outputs).to(self._dtype)
        actions = actions * self._actions_in_kernel[rows].unsqueeze(3)
        return torch.cat((states, actions), dim=3).flatten(1, 2)

    def _column(self, numbers: Any) -> Tensor:
        return torch.as_tensor(np.asarray(numbers, dtype=float), dtype=self._dtype).reshape(-1, 1)

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._dtype)


class _ValueEnds:
    """V at both ends of every window, (K, M), and the way back: gradients in them to gradients in V's row.

    V is evaluated at the ends alone where windows are few, else at all T + 1 steps of a path.
    """

    def __init__(self, learner: Learner, batch: Minibatch) -> None:
        runs, paths, length, width = batch.inputs.shape
        starts, ends = (
            torch.from_numpy(np.array(part)) for part in (batch.windows.starts, batch.windows.ends)
        )
        count = starts.shape[2]
        if 2 * count < length:
            points = torch.cat((starts, ends), dim=2)
            inputs = _at(batch.inputs, points.unsqueeze(3))
            starts = torch.arange(count).expand(runs, paths, count)
            ends, length = starts + count, 2 * count
        else:
            inputs, starts = batch.inputs, starts.clamp(max=length - 1)
            ends = ends.clamp(max=length - 1)
        offset = (torch.arange(paths) * length)[None, :, None]
        self._starts, self._ends = (starts + offset).flatten(1), (ends + offset).flatten(1)
        inputs = inputs.reshape(runs, paths * length, width)
        outputs, self._pull_value = learner.online.value.forward_with_pullback(inputs)
        values = outputs.squeeze(2)
        self.start, self.end = values.gather(1, self._starts), values.gather(1, self._ends)
        slow = learner.rows_of("fvi")
        if slow is not None:
            flat = learner.target.flat[slow][:, learner.online.shape.parts[2]]
            target = learner.target.value.with_flat(flat).forward(inputs[slow]).squeeze(2)
            self.end[slow] = target.gather(1, self._ends[slow])
        self.discount, self.valid = batch.discounts.flatten(1), batch.valid.flatten(1)
        self._shape = values.shape

    def pull(self, gradients: CriticGradients) -> Tensor:
        """The gradient in V's parameters, (K, ·)."""
        inside = gradients.start.new_zeros(self._shape)
        inside.scatter_add_(1, self._starts, gradients.start)
        inside.scatter_add_(1, self._ends, gradients.end)
        return self._pull_value(inside.unsqueeze(2))


class _Density:
    """log π(a|s) of rows (K, N) from the policy network's outputs, and its gradients in closed form."""

    def __init__(self, outputs: Tensor, log_std: Tensor, actions: Tensor) -> None:
        self._continuous = actions.is_floating_point()
        if self._continuous:
            self._inverse = torch.exp(-log_std).unsqueeze(1)  # (K, 1, k)
            self._scaled = (actions - outputs).mul_(self._inverse)
            constant = log_std.sum(dim=1, keepdim=True) + 0.5 * LOG_TWO_PI * actions.shape[2]
            self.log_probability = self._scaled.square().sum(dim=2).mul_(-0.5) - constant
            self.mean_std = log_std.exp().mean(dim=1)
        else:
            self._log = outputs.log_softmax(dim=2)
            self._actions = actions.unsqueeze(2)
            self.log_probability = self._log.gather(2, self._actions).squeeze(2)
            self.mean_std = torch.full_like(outputs[:, 0, 0], torch.nan)

    def gradients(self, slope: Tensor, pull: Any) -> tuple[Tensor, Tensor]:
        """From the gradient in log π (K, N) to those in the policy's network and in the log deviations."""
        if not self._continuous:
            outwards = -self._log.exp() * slope.unsqueeze(2)
            outwards.scatter_add_(2, self._actions, slope.unsqueeze(2))
            return pull(outwards), slope[:, :0]
        weighted = self._scaled * slope.unsqueeze(2)
        deviations = (weighted * self._scaled).sum(dim=1) - slope.sum(dim=1, keepdim=True)
        return pull(weighted.mul_(self._inverse)), deviations


def _wide(index: Tensor, like: Tensor) -> Tensor:
    """(K, R) as (K, R, c), for gather."""
    return index.unsqueeze(2).expand(*index.shape, like.shape[-1])


def _at(steps: Tensor, index: Tensor) -> Tensor:
    """Rows of (R, B, T, c) at steps (R, B, W, 1): (R, B, W, c)."""
    return steps.gather(2, index.expand(*index.shape[:3], steps.shape[3]))


def _rows_by_critic(critics: Sequence[str]) -> dict[str, Rows]:
    """Rows of each critic's runs; as a slice where they lie together, which copies nothing."""
    found: dict[str, Rows] = {}
    for kind in dict.fromkeys(critics):
        rows = [k for k, critic in enumerate(critics) if critic == kind]
        together = rows[-1] - rows[0] + 1 == len(rows)
        found[kind] = slice(rows[0], rows[-1] + 1) if together else torch.tensor(rows)
    return found
