"""The kernel loss in processes that pair their own rows (docs/many_machines.md), and in CUDA graphs."""

from __future__ import annotations

import dataclasses
import itertools
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.multiprocessing as processes
from torch import Tensor

from koffline.kernel_loss import kernel_loss, u_statistic, v_statistic
from koffline.kernels import Gaussian
from tests.algos.makers import ALL, COLUMNS, d3rlpy, make, make_buffer, parameters, same, seeded

WORLD, ROWS = 2, 16
TRAINED = ("KLossDQN", "KLossSAC")


def rank_rows(batch: Any, rank: int) -> Any:
    """Every WORLD-th row of a mini-batch."""
    names = [field.name for field in dataclasses.fields(batch)]
    columns = {name: getattr(batch, name) for name in names if name not in ("device", "numpy_batch")}
    return dataclasses.replace(batch, **{name: column[rank::WORLD] for name, column in columns.items()})


def built(name: str, ddp: bool) -> tuple[Any, Any]:
    """An algorithm whose kernel is fixed, and one mini-batch, the same in every process."""
    from d3rlpy.torch_utility import TorchMiniBatch

    with seeded(0):
        algo = make(name).config.create(device="cpu:0", enable_ddp=ddp)
        algo.create_impl((COLUMNS,), 3)
    batch = make_buffer(name, seed=1).sample_transition_batch(ROWS)
    algo.fix_kernel_before(batch)
    return algo, TorchMiniBatch.from_batch(batch, algo.config.gamma, False, "cpu:0")


def gradients(algo: Any) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in algo.impl.q_function.parameters()]


def _work(rank: int, port: int, folder: str) -> None:
    """In each process: gradients of its rows, and whole models after a few steps on draws of its own."""
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    torch.distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=WORLD)
    try:
        algo, batch = built("KLossDQN", ddp=True)
        algo.impl.compute_critic_grad(rank_rows(batch, rank))
        torch.save(gradients(algo), Path(folder) / f"gradients_{rank}.pt")
        for name in TRAINED:
            algo = make(name).config.create(device="cpu:0", enable_ddp=True)
            torch.manual_seed(0)
            algo.create_impl((COLUMNS,), 3)
            own = make_buffer(name, seed=rank + 1)  # other rows in every process, also to fix the kernel
            torch.manual_seed(rank)
            for _ in range(3):
                algo.update(own.sample_transition_batch(ROWS))
            algo.save(str(Path(folder) / f"{name}_{rank}.d3"))
            torch.save(parameters(algo), Path(folder) / f"{name}_{rank}.pt")
    finally:
        torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the processes have left behind."""
    folder = tmp_path_factory.mktemp("ranks")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes.spawn(_work, (port, str(folder)), nprocs=WORLD)
    return folder


def of_ranks(folder: Path, name: str) -> list[Any]:
    return [torch.load(folder / f"{name}_{rank}.pt", weights_only=True) for rank in range(WORLD)]


def test_ranks_step_on_the_mean_of_their_own_losses(ranks: Path) -> None:
    first, second = of_ranks(ranks, "gradients")
    algo, batch = built("KLossDQN", ddp=False)
    losses = [algo.impl.compute_critic_loss(rank_rows(batch, rank))["critic_loss"] for rank in range(WORLD)]
    parameters = list(algo.impl.q_function.parameters())
    by_hand = torch.autograd.grad(sum(losses) / WORLD, parameters)
    whole = torch.autograd.grad(algo.impl.compute_critic_loss(batch)["critic_loss"], parameters)
    for one, other, hand in zip(first, second, by_hand, strict=True):
        assert torch.equal(one, other)
        torch.testing.assert_close(one, hand, rtol=1e-5, atol=1e-6)
    # Pairs across ranks are missing: it is not the gradient of the whole batch.
    assert max(float((one - all_).abs().max()) for one, all_ in zip(first, whole, strict=True)) > 1e-3


@pytest.mark.parametrize("name", TRAINED)
def test_processes_stay_together(name: str, ranks: Path) -> None:
    first, second = of_ranks(ranks, name)
    assert same(first, second)
    loaded = d3rlpy.load_learnable(str(ranks / f"{name}_0.d3"))
    assert same(parameters(loaded), {key.replace("module.", ""): value for key, value in first.items()})


@pytest.fixture
def problem() -> tuple[Tensor, Tensor, Tensor]:
    """(6, 6) Gram matrix, features (6, 3) of a linear residual, its parameters (3,)."""
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(6, 2, generator=generator, dtype=torch.float64)
    features = torch.randn(6, 3, generator=generator, dtype=torch.float64)
    parameters = torch.randn(3, generator=generator, dtype=torch.float64).requires_grad_()
    return Gaussian(1.0).gram(rows), features, parameters


def splits(rows: int, ranks: int) -> Iterator[list[list[int]]]:
    """Every way to deal rows to ranks of equal size."""
    for order in itertools.permutations(range(rows)):
        parts = [list(order[rank::ranks]) for rank in range(ranks)]
        if all(part == sorted(part) for part in parts):
            yield parts


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_mean_over_splits_is_the_loss_of_the_whole_batch(
    problem: tuple[Tensor, Tensor, Tensor], ranks: int
) -> None:
    gram, features, parameters = problem
    residual = features @ parameters - 1.0

    def mean_over_splits(loss: Any) -> Tensor:
        every = [
            torch.stack([loss(residual[part], gram[part][:, part]) for part in parts]).mean()
            for parts in splits(6, ranks)
        ]
        assert len(every) == (20 if ranks == 2 else 90)
        return torch.stack(every).mean()

    def gradient(value: Tensor) -> np.ndarray:
        return torch.autograd.grad(value, parameters, retain_graph=True)[0].numpy()

    unbiased = mean_over_splits(u_statistic)
    np.testing.assert_allclose(gradient(unbiased), gradient(u_statistic(residual, gram)), rtol=1e-12)
    for weight in (0.1, 0.5):
        mixed = mean_over_splits(lambda part, block, weight=weight: kernel_loss(part, block, weight))
        whole = kernel_loss(residual, gram, weight)
        np.testing.assert_allclose(gradient(mixed), gradient(whole), rtol=1e-12)
    # The V-statistic's diagonal has weight 1 / (rows of a rank), not 1 / (rows of the batch).
    biased = mean_over_splits(v_statistic)
    np.testing.assert_allclose(gradient(biased), gradient(kernel_loss(residual, gram, ranks / 6)), rtol=1e-12)
    assert abs(float((biased - v_statistic(residual, gram)).detach())) > 1e-3


@pytest.mark.parametrize("ranks", [2, 3])
def test_fewer_pairs_cost_variance_where_pairs_are_all_there_is(
    problem: tuple[Tensor, Tensor, Tensor], ranks: int
) -> None:
    """Residuals of random sign: the U-statistic's variance grows by (B − 1) / (B / ranks − 1)."""
    gram, per_rank = problem[0], 6 // ranks
    signs = torch.tensor(list(itertools.product((-1.0, 1.0), repeat=6)), dtype=torch.float64)
    whole = u_statistic(signs, gram)
    means = torch.stack(
        [
            torch.stack([u_statistic(signs[:, part], gram[part][:, part]) for part in parts]).mean(dim=0)
            for parts in splits(6, ranks)
        ]
    )
    assert abs(float(means.mean())) < 1e-12
    ratio = float(means.square().mean() / whole.square().mean())
    np.testing.assert_allclose(ratio, (6 - 1) / (per_rank - 1), rtol=1e-12)


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
