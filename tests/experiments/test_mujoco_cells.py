import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from koffline.errors import ConfigError
from koffline.experiments import mujoco_cells
from koffline.experiments.mujoco_cells import (
    MujocoCell,
    is_mujoco,
    mujoco_jobs,
    mujoco_path,
    read_mujoco,
    write_mujoco,
)
from koffline.jobs import run_jobs
from koffline.online.config import OnlineConfig, OnlineRun
from tests.experiments.fake_mujoco import FakeLockStep, fake_return


def make_cell(steps: int = 5_000, seeds: int = 2, interval: int = 1_000) -> MujocoCell:
    config = OnlineConfig(environment="InvertedPendulum-v5", steps=steps, evaluation_interval=interval)
    runs = [
        OnlineRun(config.with_changes(critic=critic), seed)
        for seed in range(seeds)
        for critic in ("kloss", "rg")
    ]
    return MujocoCell("final", "InvertedPendulum", 0.0, tuple(runs))


def test_a_result_comes_back_as_it_was_learned(fake_stack: type[FakeLockStep], tmp_path: Path) -> None:
    cell = make_cell()
    path = mujoco_path(cell, tmp_path)
    write_mujoco(path, cell)
    result = read_mujoco(path)
    np.testing.assert_array_equal(result.steps, [0, 1000, 2000, 3000, 4000, 5000])
    assert result.critics == ("kloss", "rg", "kloss", "rg")
    assert result.seeds == (0, 0, 1, 1)
    expected = np.array([[fake_return(run, int(step)) for step in result.steps] for run in cell.runs])
    np.testing.assert_allclose(result.returns, expected)
    np.testing.assert_allclose(result.lengths, expected + 1.0)
    np.testing.assert_allclose(result.sampled[:, 1:], expected[:, 1:] / 2.0)
    assert np.isnan(result.sampled[:, 0]).all()
    assert result.diverged_at == (-1, -1, -1, 2000)
    np.testing.assert_array_equal(result.metrics["loss"][2], result.steps)
    np.testing.assert_array_equal(np.isnan(result.metrics["kl_coef"][0]), result.steps == 0)
    assert result.configs[1]["critic"] == "rg"
    assert result.shares["learning"] == 0.25
    lines = path.with_suffix(".log").read_text().splitlines()
    assert len(lines) == 6
    assert "step 5000 of 5000" in lines[-1]
    assert "kloss" in lines[-1]


def test_a_last_short_stretch_is_evaluated_too(fake_stack: type[FakeLockStep], tmp_path: Path) -> None:
    cell = make_cell(steps=2_500)
    write_mujoco(mujoco_path(cell, tmp_path), cell)
    np.testing.assert_array_equal(read_mujoco(mujoco_path(cell, tmp_path)).steps, [0, 1000, 2000, 2500])


def test_a_killed_cell_goes_on_from_its_checkpoint(
    fake_stack: type[FakeLockStep], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, cell = tmp_path / "whole", make_cell(steps=500, interval=100)
    whole.mkdir()
    write_mujoco(mujoco_path(cell, whole), cell)
    monkeypatch.setattr(mujoco_cells, "_CHECKPOINT_SECONDS", 0.0)
    fake_stack.stop_at = 330
    path = mujoco_path(cell, tmp_path)
    with pytest.raises(KeyboardInterrupt):
        write_mujoco(path, cell)
    assert not path.exists()
    fake_stack.stop_at = None
    seen = []
    iterate = fake_stack.iterate
    monkeypatch.setattr(fake_stack, "iterate", lambda self: (seen.append(self.steps), iterate(self)))
    write_mujoco(path, cell)
    assert seen[0] == 330
    first, again = read_mujoco(mujoco_path(cell, whole)), read_mujoco(path)
    np.testing.assert_array_equal(again.returns, first.returns)
    np.testing.assert_array_equal(again.steps, first.steps)
    assert not path.with_suffix(".partial").exists()


def test_a_finished_cell_is_not_learned_again(fake_stack: type[FakeLockStep], tmp_path: Path) -> None:
    cells = [make_cell(), make_cell(steps=2_000), make_cell()]
    run_jobs(mujoco_jobs(cells, tmp_path))
    assert fake_stack.made == 2
    run_jobs(mujoco_jobs(cells, tmp_path))
    assert fake_stack.made == 2


def test_names_tell_cells_apart() -> None:
    cell = make_cell()
    others = [
        make_cell(steps=6_000),
        make_cell(seeds=1),
        replace(cell, part="paper"),
        replace(cell, noise=0.05),
        replace(cell, runs=cell.runs[::-1]),
        replace(cell, runs=tuple(OnlineRun(r.config.with_changes(gamma=0.9), r.seed) for r in cell.runs)),
        replace(
            cell,
            runs=tuple(OnlineRun(r.config.with_changes(environment="Swimmer-v5"), r.seed) for r in cell.runs),
        ),
    ]
    assert len({cell.name, *(other.name for other in others)}) == 8
    assert cell.name == make_cell().name
    logged = tuple(OnlineRun(r.config.with_changes(keep_checkpoints=7), r.seed) for r in cell.runs)
    assert replace(cell, runs=logged).name == cell.name


def test_a_changed_default_makes_a_cell_old_and_keeps_its_file(
    fake_stack: type[FakeLockStep], tmp_path: Path
) -> None:
    cell = make_cell(steps=1_000)
    path = mujoco_path(cell, tmp_path)
    write_mujoco(path, cell)
    assert is_mujoco(cell, tmp_path)
    with np.load(path) as archive:
        arrays = {name: archive[name] for name in archive.files}
    configs = json.loads(str(arrays["configs"]))
    for config in configs:
        del config["clip_adv"]  # a setting that came later
    np.savez(path, **{**arrays, "configs": np.asarray(json.dumps(configs))})
    assert is_mujoco(cell, tmp_path)
    for config in configs:
        config["target_decay"] = 0.5  # what the default was
    np.savez(path, **{**arrays, "configs": np.asarray(json.dumps(configs))})
    assert not is_mujoco(cell, tmp_path)
    run_jobs(mujoco_jobs([cell], tmp_path))
    assert is_mujoco(cell, tmp_path)
    assert path.with_suffix(".replaced.npz").exists()


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 half", b"no archive"])
def test_a_damaged_file_is_one_line_and_no_result(tmp_path: Path, content: bytes) -> None:
    cell = make_cell()
    path = mujoco_path(cell, tmp_path)
    path.write_bytes(content)
    assert not is_mujoco(cell, tmp_path)
    with pytest.raises(ConfigError, match="is damaged or of another version") as caught:
        read_mujoco(path)
    assert "\n" not in str(caught.value)
