"""An online run: what its directory holds, seeds in stacks and processes and in a few
numbers, divergence.
"""

import json
import math
from pathlib import Path

import numpy as np
import pytest

import koffline
from koffline.checkpoints import checkpoints
from koffline.data.sources import open_transitions
from koffline.online.config import OnlineConfig, load_config
from koffline.online.group import COLUMNS, GroupResult
from koffline.online.lockstep import LockStep
from koffline.online.run import summarise, train, write_summary
from koffline.spread import spread_of
from tests.online.small_online import rows, small


def test_what_a_run_leaves(tmp_path):
    result = train(small(), tmp_path / "run", 2, seed=3)
    out = result.out
    assert result.seeds == (3, 4)
    for seed in result.seeds:
        folder = out / f"seed_{seed}"
        evaluations = rows(folder / "evaluation.csv")
        assert [row["step"] for row in evaluations] == ["100", "200", "300", "400"]
        # CartPole pays 1 per step.
        assert all(
            1.0 <= float(row["return"]) == float(row["length"]) for row in evaluations
        )
        metrics = rows(folder / "metrics.csv")
        unknown = [
            name
            for name, value in metrics[-1].items()
            if not math.isfinite(float(value))
        ]
        assert unknown in ([], ["policy_std"])  # discrete actions have none
        model = koffline.load(folder / "model.d3")
        assert model.predict(np.zeros((2, 4), dtype=np.float32)).shape == (2,)
        log = open_transitions(folder / "replay.hdf5")
        assert log.has_episodes
        assert log.metadata.gamma == 0.995
        assert np.all(log.rewards == 1.0)
    assert load_config(out / "config.yaml") == load_config(small())
    assert (out / "learning_curve.png").read_bytes()[:4] == b"\x89PNG"
    kept = [path.name for path in checkpoints(out / "checkpoints" / "seeds_3-4")]
    assert kept == ["step_000000300.pt", "step_000000400.pt"]
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["env"], summary["critic"]) == ("CartPole-v1", "kloss")
    assert (summary["seeds"], summary["steps"], summary["diverged"]) == (
        [3, 4],
        400,
        {},
    )
    last = [
        float(rows(out / f"seed_{seed}" / "evaluation.csv")[-1]["return"])
        for seed in (3, 4)
    ]
    assert (summary["best_1_of_2"], summary["interval"]) == (
        max(last),
        [min(last), max(last)],
    )
    assert summary["return"]["per_seed"] == {"3": last[0], "4": last[1]}
    # the same run, the same bytes
    assert not {"seconds", "steps_per_second"} & set(summary)
    assert json.loads((out / "run.json").read_text())["finished"]


@pytest.mark.slow
def test_seeds_may_be_trained_in_several_processes(tmp_path):
    config = small(steps=200)
    alone = [train(config, tmp_path / str(seed), 1, seed=seed) for seed in (0, 1)]
    both = train(config, tmp_path / "both", 2, workers=2)
    for seed, single in enumerate(alone):
        name = f"seed_{seed}"
        for file in ("evaluation.csv", "metrics.csv"):
            assert (both.out / name / file).read_bytes() == (
                single.out / name / file
            ).read_bytes()
    # with another number of workers: the same stacks
    again = train(None, resume=tmp_path / "both")
    assert again == both


def diverge(monkeypatch, runs, step):
    """These of a stack meet a gradient that is not finite."""
    iterate = LockStep.iterate

    def broken(self):
        iterate(self)
        if self.steps == step:
            self.learner.diverged[runs] = True

    monkeypatch.setattr(LockStep, "iterate", broken)


def test_divergence_of_one_seed(tmp_path, caplog, monkeypatch):
    diverge(monkeypatch, [1], 190)
    result = train(small(), tmp_path / "run", 3)
    assert result.diverged == {1: 200}
    assert "seed 1 diverged by step 200" in caplog.text
    folders = [tmp_path / "run" / f"seed_{k}" for k in range(3)]
    assert [len(rows(folder / "evaluation.csv")) for folder in folders] == [4, 1, 4]
    assert [(folder / "replay.hdf5").exists() for folder in folders] == [
        True,
        False,
        True,
    ]


def test_divergence_of_all_seeds_ends_the_run(tmp_path, monkeypatch):
    diverge(monkeypatch, [0, 1], 90)
    result = train(small(), tmp_path / "run", 2)
    assert (result.steps, result.diverged) == (100, {0: 100, 1: 100})
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["iqm"] is None


CONFIG = OnlineConfig("Swimmer-v5", critic="rg", steps=300)
FINAL = (10.0, 60.0, 30.0, 40.0, 50.0, 20.0)


def summary_of(diverged=None, out=Path("run"), **known):
    """Of returns that rise evenly to their last value in three evaluations; sampled
    ones are half of them.

    known: how many evaluations some seeds have.
    """
    logs = {
        f"seed_{seed}/evaluation.csv": [
            {
                "step": 100 * k,
                **dict(zip(COLUMNS, (final * k / 3, 7.0, final * k / 6), strict=True)),
            }
            for k in range(1, 1 + known.get(f"seed_{seed}", 3))
        ]
        for seed, final in enumerate(FINAL)
    }
    result = GroupResult(steps=300, seconds=10.0, diverged=diverged or {}, logs=logs)
    return summarise(out, CONFIG, {tuple(range(6)): result})


def test_six_seeds_by_hand():
    summary = summary_of()
    assert summary.best_name == "best_5_of_6"
    final, sampled, length = summary.last.values()
    assert final.per_seed == FINAL
    assert final.spread.iqm == 35.0  # (20 + 30 + 40 + 50) / 4
    assert final.best == 40.0  # without 10
    assert (sampled.spread.iqm, length.spread.iqm) == (17.5, 7.0)
    assert final.spread == spread_of(np.asarray(FINAL))
    assert summary.points == (100, 200, 300)
    assert summary.curves["return"][0].best == pytest.approx(40.0 / 3)
    assert summary.steps_per_second == 180.0  # 6 seeds × 300 steps in 10 s


def test_a_diverged_seed_is_infinitely_bad(tmp_path):
    summary = summary_of({1: 200}, tmp_path, seed_1=1)
    final = summary.last["return"]
    assert final.per_seed[1] == -math.inf
    assert final.spread.iqm == 25.0  # (10 + 20 + 30 + 40) / 4
    assert final.best == 30.0
    assert summary.curves["return"][0].per_seed[1] == FINAL[1] / 3
    write_summary(summary)
    content = json.loads((tmp_path / "summary.json").read_text())
    assert (content["iqm"], content["best_5_of_6"], content["diverged"]) == (
        25.0,
        30.0,
        {"1": 200},
    )
    assert content["return"]["per_seed"]["1"] is None


def test_where_all_seeds_diverged_none_has_a_last_return():
    summary = summary_of(
        dict.fromkeys(range(6), 200), **{f"seed_{seed}": 1 for seed in range(6)}
    )
    assert summary.points == (100, 200)
    assert summary.last["return"].per_seed == (-math.inf,) * 6
    assert summary.curves["return"][0].per_seed == tuple(final / 3 for final in FINAL)
