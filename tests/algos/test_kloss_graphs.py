"""Nothing in a critic's loss branches on the host, so that a CUDA graph can hold it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.algos.makers import ALL, d3rlpy, make, make_buffer, parameters

ROOT = Path(__file__).parents[2]

TRACE = """
import warnings, torch
from tests.algos.makers import is_discrete, make, make_buffer
from tests.algos.test_kloss_steps import batch_of

warnings.simplefilter("ignore")  # the compiler's own
for name in ("KLossDQN", "KLossSAC"):
    for action_kernel in ("joint", "none"):
        for diag_weight in (None, 0.3):
            algo = make(name, build=True, diag_weight=diag_weight, action_kernel=action_kernel)
            algo.fix_kernel_before(make_buffer(name).sample_transition_batch(32))
            kernel, batch = algo.impl.modules.kernel, batch_of(is_discrete(name))
            inputs = torch.randn(2, len(batch.rewards)), batch.observations.float(), batch.actions.float()
            traced = torch.compile(kernel, backend="eager", fullgraph=True)
            torch.testing.assert_close(traced(*inputs), kernel(*inputs))
print("one graph")
"""


def test_the_loss_traces_as_one_graph() -> None:
    """In a process of its own, without the checks of shapes that tests turn on."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", TRACE], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "one graph", done.stderr


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("name", [name for name in ALL if "TrustPCL" not in name and "FQE" not in name])
def test_a_cuda_graph_trains_as_the_plain_loop(name: str) -> None:
    d3rlpy.seed(0)
    made = [make(name, compile_graph=compiled).config.create("cuda:0") for compiled in (False, True)]
    for algo in made:
        algo.create_impl((4,), 3)
    made[1].impl.modules.q_funcs.load_state_dict(made[0].impl.modules.q_funcs.state_dict())
    batch = make_buffer(name).sample_transition_batch(16)
    for algo in made:
        for _ in range(8):  # three warm up, the fourth is recorded, the rest replay
            metrics = algo.update(batch)
        assert all(torch.isfinite(torch.tensor(value)) for value in metrics.values())
    if name == "KLossDQN":  # no draws: the same numbers
        left, right = (parameters(algo) for algo in made)
        for key in left:
            if key.startswith("q_funcs"):
                torch.testing.assert_close(left[key], right[key], rtol=1e-3, atol=1e-5)
