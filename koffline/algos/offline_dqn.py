"""A d3rlpy DQN as a second source of target policies, trained offline on tuples with uniform states."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from koffline.algos.quiet import quiet
from koffline.data.d3rlpy_import import import_d3rlpy
from koffline.data.transitions import Transitions
from koffline.fitting import threads

TUPLES = 20_000


def train_dqn(
    log: Transitions,
    gamma: float,
    steps: int,
    seed: int,
    path: Path,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Fit d3rlpy's double DQN on a log with discrete actions and save it as a .d3 file.

    Observations are standardised by the model's own scaler. Rewards are not centred, as a constant added to
    every step makes it worth more to go on or to end, but clipped at three times their usual size, as DQN's
    are (Mnih et al. 2015): a few large costs drown the small differences that lead to a goal. The same seed
    on the same machine gives the same weights.
    """
    d3rlpy = import_d3rlpy()
    from koffline.data.replay import ColumnarReplayBuffer

    d3rlpy.seed(seed)
    np.random.seed(seed)  # noqa: NPY002  (d3rlpy draws from numpy's global state)
    sizes = np.abs(log.rewards[log.rewards != 0.0])
    usual = float(np.median(sizes)) if len(sizes) else 1.0
    algo = d3rlpy.algos.DoubleDQNConfig(
        gamma=gamma,
        batch_size=128,
        learning_rate=1e-3,
        target_update_interval=200,
        observation_scaler=d3rlpy.preprocessing.StandardObservationScaler(),
        reward_scaler=d3rlpy.preprocessing.ClipRewardScaler(-3.0 * usual, 3.0 * usual, 0.3 / usual),
    ).create(device="cpu")
    with threads(1), quiet():
        algo.fit(
            ColumnarReplayBuffer(log),
            n_steps=steps,
            n_steps_per_epoch=steps,
            logger_adapter=d3rlpy.logging.NoopAdapterFactory(),
            show_progress=False,
            callback=None if progress is None else lambda _, __, step: progress(step),
        )
    algo.save(str(path))
