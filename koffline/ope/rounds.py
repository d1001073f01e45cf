"""Length of training: in rounds, with last layers solved in between, until the estimate settles."""

from __future__ import annotations

import math

import numpy as np
import torch

from koffline.batches import Table
from koffline.config import EvaluationSettings
from koffline.kernels import FourierFeatures
from koffline.ope.last_layer import accumulate_systems, compute_residuals, minimise_kernel_loss
from koffline.ope.learning import Ensemble, row_blocks
from koffline.ope.problem import EvaluationProblem
from koffline.ope.replica_sums import StartSums
from koffline.replicas import StackedMLP

SHORTEST, MOST_STEPS = 1000, 16_000  # least in a round, most in total; coverage was tested at two rounds
_EPOCHS = 40  # epochs before training may stop
_BETTER = 0.9  # features still improve if the held-out loss falls below this share of the one before
_SHARP = 0.2  # width, in rms returns, below which better features would not help an interval
_SOLVED_ROWS, _SOLVED_BY = 4096, 300  # rows and instruments of the last layers between rounds
_LEAST = 0.01  # least difference, in rms returns


def rounds_of(steps: int | None, rows: int = 0, batch_size: int = 256) -> list[int]:
    """Steps of every round, each as long as all before it; the first two see every row forty times."""
    rounds = [MOST_STEPS if steps is None else steps]
    while rounds[0] / 2 >= max(SHORTEST, _EPOCHS * rows / batch_size / 2):
        rounds[:1] = [rounds[0] - rounds[0] // 2, rounds[0] // 2][::-1]
    return rounds


class Watch:
    """Solve last layers between rounds, on some rows, and decide whether to stop training.

    Training goes on if the mean estimate has moved since half as many steps, relative to the interval's
    width, or if the interval is wide and the kernel loss of rows that resampled networks have not seen still
    falls; it stops if that loss rises. Moves below a hundredth of the rms return do not count; diverged
    replicas are ignored.
    """

    def __init__(
        self,
        problem: EvaluationProblem,
        ensemble: Ensemble,
        settings: EvaluationSettings,
        table: Table,
        instruments: FourierFeatures,
    ) -> None:
        rows = torch.arange(0, len(table), math.ceil(len(table) / _SOLVED_ROWS))
        self._problem, self._ensemble, self._settings = problem, ensemble, settings
        self._table = table.select(rows.to(table.inputs.device))
        self._instruments = FourierFeatures(instruments.frequencies[:, : _SOLVED_BY // 2])
        self._weights = ensemble.row_weights[:, rows].to(table.inputs.device)
        unseen = (ensemble.row_counts == 0) & (ensemble.row_weights[0] > 0.0)  # with weight
        self._unseen = unseen[:, rows].to(self._weights)
        self._before: tuple[np.ndarray, float] | None = None

    def solve(self, network: StackedMLP) -> tuple[StackedMLP, bool]:
        """The networks with the last layer of the least kernel loss, and whether training can stop."""
        systems = accumulate_systems(network, self._table, self._instruments, self._weights)
        solved = minimise_kernel_loss(network, systems, self._settings.ridge)
        sums = StartSums.of({"kloss": solved}, self._problem, self._ensemble.start_weights)
        now, loss = sums.means[0, :, 0], self._held_out_loss(solved)
        before, self._before = self._before, (now, loss)
        if before is None:
            return solved, False
        values, old_loss = before
        moves, resampled = now - values, now[self._ensemble.full :]
        kept, resampled = moves[np.isfinite(moves)], resampled[np.isfinite(resampled)]
        width = 4.0 * float(resampled.std(ddof=1)) if len(resampled) > 1 else 0.0
        tolerance = max(self._settings.agreement * width, _LEAST * self._problem.reward_scale)
        is_quiet = len(kept) > 0 and abs(float(kept.mean())) <= tolerance
        is_learnt = loss >= _BETTER * old_loss or width <= _SHARP * self._problem.reward_scale
        return solved, (is_quiet and is_learnt) or _BETTER * loss > max(0.0, old_loss)

    def _held_out_loss(self, network: StackedMLP) -> float:
        """Σ over resampled networks of ‖ψᵀδ‖² − ‖δ‖², δ of unseen rows: 0 of a perfect one."""
        table, compared = self._table, self._table.compared
        projected, squares = self._weights.new_zeros(network.replicas, 1), self._weights.new_zeros(())
        for rows in row_blocks(network, len(table), table.draws):
            residual = (compute_residuals(network, table, rows) * self._unseen[:, rows]).nan_to_num()
            projected = projected + residual @ self._instruments(compared[rows].double())
            squares = squares + residual.square().sum()
        return float(projected.square().sum() - squares)
