"""Two processes train one model: every process pairs its own rows, gradients are averaged."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as processes

from tests.algos.makers import make, make_buffer, parameters, same

WORLD = 2


def _train(rank: int, port: int, name: str, folder: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD
    )
    try:
        small = make(name)
        algo = small.config.create(device="cpu:0", enable_ddp=True)
        torch.manual_seed(0)
        algo.create_impl((4,), 3)
        own = make_buffer(name, seed=rank + 1)  # other rows in every process, also to fix the kernel
        torch.manual_seed(rank)
        for _ in range(3):
            algo.update(own.sample_transition_batch(16))
        algo.save(str(Path(folder) / f"model_{rank}.d3"))
        torch.save(parameters(algo), Path(folder) / f"{rank}.pt")
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("name", ["KLossDQN", "KLossSAC"])
def test_processes_stay_together(name: str, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes.spawn(_train, (port, name, str(tmp_path)), nprocs=WORLD)
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(WORLD))
    assert same(first, second)
    from koffline.data.d3rlpy_import import import_d3rlpy

    loaded = import_d3rlpy().load_learnable(str(tmp_path / "model_0.d3"))
    ours = {key.replace("module.", ""): value for key, value in first.items()}
    assert same(parameters(loaded), ours)
