import numpy as np
import pytest

from koffline.experiments import cells as cells_module
from koffline.experiments.cells import (
    Cell,
    TrainingSettings,
    cell_jobs,
    cell_path,
    problem_path,
    read_cell,
    write_cell,
)
from koffline.experiments.evaluation import OBJECTIVES
from koffline.experiments.problem import ProblemSettings
from koffline.jobs import run_jobs
from koffline.objectives import TemporalDifference

PROBLEM = ProblemSettings("cart_pole", rows=100, held_out_rows=30, truth_repeats=2)
TINY = TrainingSettings(
    learning_rates=(0.003, 0.001), seeds=2, epochs=12, batch_size=50, hidden=(6,), probe_every=3
)


def cell_of(method: str = "kloss", training: TrainingSettings = TINY) -> Cell:
    return Cell(PROBLEM, method, OBJECTIVES[method], training)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cells")
    jobs = cell_jobs([cell_of(method) for method in OBJECTIVES], folder)
    for part in jobs:
        run_jobs(part, progress=False)
    return folder


@pytest.mark.parametrize("method", OBJECTIVES)
def test_curves_have_the_promised_shapes(folder, method):
    result = read_cell(cell_path(cell_of(method), folder))
    assert result.epochs.tolist() == [3, 6, 9, 12]
    for name in ("mse_monte_carlo", "mse_paper", "bellman_error", "objective", "kernel_loss", "l2_loss"):
        assert result.curves[name].shape == (4, 2, 2)
        assert np.isfinite(result.curves[name]).all()
    assert result.held_out.shape == result.diverged_at.shape == (2, 2)
    assert (result.diverged_at == -1).all()
    assert 0.0 < result.value_variance < 0.3


def test_learning_lowers_the_objective_and_seeds_differ(folder):
    result = read_cell(cell_path(cell_of("rg"), folder))
    assert (result.curves["objective"][-1] < result.curves["objective"][0]).all()
    assert np.ptp(result.curves["mse_paper"][-1], axis=1).min() > 0.0


def test_a_finished_cell_is_not_run_again_and_half_a_file_is(folder, monkeypatch):
    cell = cell_of("td0")
    path, calls = cell_path(cell, folder), []
    before = path.read_bytes()
    monkeypatch.setattr(cells_module, "_train", lambda *arguments: calls.append(1) or 1 / 0)
    run_jobs(cell_jobs([cell], folder)[1], progress=False)
    assert calls == []
    path.write_bytes(before[: len(before) // 2])
    with pytest.raises(Exception, match="td0 on cart_pole"):
        run_jobs(cell_jobs([cell], folder)[1], progress=False)
    assert calls == [1]
    monkeypatch.undo()
    run_jobs(cell_jobs([cell], folder)[1], progress=False)
    first, again = path.parent / "first.npz", read_cell(path)
    first.write_bytes(before)
    for name, curve in read_cell(first).curves.items():
        np.testing.assert_array_equal(curve, again.curves[name])


def test_an_interrupted_cell_continues_and_ends_the_same(folder, tmp_path):
    cell = cell_of("sbeed", TrainingSettings((0.003,), 2, 20, 50, (6,), 5))
    store = problem_path(PROBLEM, folder)
    (tmp_path / store.name).write_bytes(store.read_bytes())

    class Stop:
        def update(self, step, steps, loss):
            if step > 30:
                raise KeyboardInterrupt

    whole = tmp_path / "whole"
    whole.mkdir()
    write_cell(cell_path(cell, whole), cell)
    with pytest.raises(KeyboardInterrupt):
        write_cell(cell_path(cell, tmp_path), cell, Stop())
    assert not cell_path(cell, tmp_path).exists()
    write_cell(cell_path(cell, tmp_path), cell)
    one, two = read_cell(cell_path(cell, whole)), read_cell(cell_path(cell, tmp_path))
    for name, curve in one.curves.items():
        np.testing.assert_array_equal(curve, two.curves[name])
    assert not list(tmp_path.glob("*.partial"))


def test_best_rates_and_divergence(folder):
    result = read_cell(cell_path(cell_of("td0"), folder))
    finals = result.final("mse_paper")
    np.testing.assert_allclose(finals, result.curves["mse_paper"][-5:].mean(axis=0), rtol=1e-6)
    assert result.best_by_truth("paper") == finals.mean(axis=1).argmin()
    assert result.best_without_truth() == result.held_out.mean(axis=1).argmin()
    assert not result.diverged().any()
    result.curves["mse_paper"][-1, 0, 1] = np.nan
    result.diverged_at[0, 1] = 77
    result.curves["largest_value"][1, 1, 0] = 1e9
    assert result.best_by_truth("paper") == 1  # a rate with a diverged seed loses
    assert result.diverged().tolist() == [[False, True], [True, False]]


def test_divergence_is_a_result(tmp_path, folder):
    store = problem_path(PROBLEM, folder)
    (tmp_path / store.name).write_bytes(store.read_bytes())
    training = TrainingSettings((1e30, 0.001), 2, 12, 50, (6,), 3)
    cell = Cell(PROBLEM, "td0", TemporalDifference(), training)
    write_cell(cell_path(cell, tmp_path), cell)
    result = read_cell(cell_path(cell, tmp_path))
    assert (result.diverged_at[0] >= 0).all()
    assert (result.diverged_at[1] == -1).all()
    assert np.isnan(result.curves["mse_paper"][-1, 0]).all()
    assert np.isfinite(result.curves["mse_paper"][-1, 1]).all()
