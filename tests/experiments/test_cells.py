from unittest import mock

import numpy as np
import pytest

from koffline.experiments.benchmark import Metrics, ProblemSettings
from koffline.experiments.cells import (
    Cell,
    CellResult,
    Run,
    Scale,
    TrainingSettings,
    write_cell,
)
from koffline.experiments.figure_methods import OBJECTIVES
from koffline.experiments.result_files import read_result

PROBLEM = ProblemSettings("cart_pole", rows=100, held_out_rows=30, truth_repeats=2)
TINY = TrainingSettings(
    learning_rates=(0.003, 0.001),
    seeds=2,
    epochs=12,
    batch_size=50,
    hidden=(6,),
    probe_every=3,
)
CELLS = {
    method: Cell(PROBLEM, method, OBJECTIVES[method], TINY) for method in ("td0", "rg")
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    run = Run("figure-bench", tmp_path_factory.mktemp("run"), Scale())
    run.cells_folder.mkdir()
    run.train(list(CELLS.values()))
    return run


@pytest.fixture
def beside(run, tmp_path):
    """A folder with the problem alone."""
    store = run.path(PROBLEM)
    (tmp_path / store.name).write_bytes(store.read_bytes())
    return tmp_path


def test_an_interrupted_cell_continues_and_ends_the_same(beside):
    cell = Cell(
        PROBLEM,
        "sbeed",
        OBJECTIVES["sbeed"],
        TrainingSettings((0.003,), 2, 20, 50, (6,), 5),
    )
    path = beside / f"{cell.name}.npz"
    whole = beside / "whole.npz"
    write_cell(whole, cell)
    stop = mock.patch.object(Metrics, "held_out_loss", side_effect=KeyboardInterrupt)
    with stop, pytest.raises(KeyboardInterrupt):
        write_cell(path, cell)
    assert not path.exists()
    write_cell(path, cell)
    uninterrupted, continued = (read_result(file, CellResult) for file in (whole, path))
    for name, curve in uninterrupted.curve.items():
        np.testing.assert_array_equal(curve, continued.curve[name])


def test_best_rates_and_divergence(run):
    """By hand, and for an objective that is to fall it falls."""
    rg = read_result(run.path(CELLS["rg"]), CellResult)
    assert (rg.curve["objective"][-1] < rg.curve["objective"][0]).all()
    result = read_result(run.path(CELLS["td0"]), CellResult)
    assert 0.0 < result.value_variance < 0.3
    finals = result.final("mse_paper")
    np.testing.assert_allclose(
        finals, result.curve["mse_paper"][-5:].mean(axis=0), rtol=1e-6
    )
    assert result.best_by_truth("paper") == finals.mean(axis=1).argmin()
    assert result.best_without_truth() == result.held_out.mean(axis=1).argmin()
    assert not result.diverged().any()
    result.curve["mse_paper"][-1, 0, 1] = np.nan
    result.diverged_at[0, 1] = 77
    result.curve["largest_value"][1, 1, 0] = 1e9
    assert result.best_by_truth("paper") == 1  # a rate with a diverged seed loses
    assert result.diverged().tolist() == [[False, True], [True, False]]


def test_divergence_is_a_result(beside):
    cell = Cell(
        PROBLEM,
        "td0",
        OBJECTIVES["td0"],
        TrainingSettings((1e30, 0.001), 2, 12, 50, (6,), 3),
    )
    write_cell(beside / "cell.npz", cell)
    result = read_result(beside / "cell.npz", CellResult)
    assert (result.diverged_at[0] >= 0).all()
    assert (result.diverged_at[1] == -1).all()
    assert np.isnan(result.curve["mse_paper"][-1, 0]).all()
    assert np.isfinite(result.curve["mse_paper"][-1, 1]).all()
