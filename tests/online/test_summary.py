"""Seeds in a few numbers: interquartile means, intervals, the paper's best 5 of 6, and pictures of them."""

import json
import math

import numpy as np
import pytest

from koffline.errors import ConfigError
from koffline.online.config import OnlineConfig
from koffline.online.group import GroupResult, GroupTask
from koffline.online.summary import summarise, write_summary
from koffline.spread import spread_of

CONFIG = OnlineConfig("Swimmer-v5", critic="rg", steps=300)
FINAL = (10.0, 60.0, 30.0, 40.0, 50.0, 20.0)


def write_curves(out, finals, points=3):
    """Returns that rise evenly to their last value; sampled ones are half of them."""
    for seed, final in enumerate(finals):
        folder = out / f"seed_{seed}"
        folder.mkdir(parents=True)
        lines = ["step,return,length,sampled_return"]
        for k in range(1, points + 1):
            lines.append(f"{100 * k},{final * k / points!r},{7.0},{final * k / points / 2!r}")
        (folder / "evaluation.csv").write_text("\n".join(lines) + "\n")


def summary_of(out, finals=FINAL, diverged=None):
    task = GroupTask(CONFIG, tuple(range(len(finals))), out, "")
    return summarise([task], [GroupResult(steps=300, seconds=10.0, diverged=diverged or {})])


def written(summary, out):
    write_summary(summary, out)
    return json.loads((out / "summary.json").read_text())


def test_six_seeds_by_hand(tmp_path):
    write_curves(tmp_path, FINAL)
    summary = summary_of(tmp_path)
    assert summary.best_name == "best_5_of_6"
    final, sampled, length = summary.last
    assert final.per_seed == FINAL
    assert final.spread.iqm == 35.0  # (20 + 30 + 40 + 50) / 4
    assert final.best == 40.0  # without 10
    assert (sampled.spread.iqm, length.spread.iqm) == (17.5, 7.0)
    assert summary.average.spread.iqm == pytest.approx(35.0 * 2 / 3)
    assert final.spread == spread_of([np.asarray(FINAL)])
    assert summary.points == (100, 200, 300)
    assert summary.curves["return"][0].best == pytest.approx(40.0 / 3)
    assert summary.steps_per_second == 180.0  # 6 seeds × 300 steps in 10 s


def test_a_diverged_seed_is_infinitely_bad(tmp_path):
    write_curves(tmp_path, FINAL)
    path = tmp_path / "seed_1" / "evaluation.csv"
    path.write_text("\n".join(path.read_text().splitlines()[:2]) + "\n")
    with pytest.raises(ConfigError, match="lacks evaluations"):
        summary_of(tmp_path)
    summary = summary_of(tmp_path, diverged={1: 200})
    final = summary.last[0]
    assert final.per_seed[1] == -math.inf
    assert final.spread.iqm == 25.0  # (10 + 20 + 30 + 40) / 4
    assert final.best == 30.0
    assert summary.curves["return"][0].per_seed[1] == 20.0
    content = written(summary, tmp_path)
    assert (content["iqm"], content["best_5_of_6"], content["diverged"]) == (25.0, 30.0, {"1": 200})
    assert content["return"]["per_seed"]["1"] is None
    assert content["level"] == 0.95
    assert (tmp_path / "learning_curve.png").stat().st_size > 5000
