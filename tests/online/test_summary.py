"""Seeds in a few numbers: interquartile means, intervals, the paper's best 5 of 6, and pictures of them."""

import json
import math

import numpy as np
import pytest

from koffline.errors import ConfigError
from koffline.online.config import OnlineConfig
from koffline.online.folder import Plan, make_plan
from koffline.online.group import GroupResult
from koffline.online.logs import EVALUATION_HEADER
from koffline.online.summary import draw_curves, summarise, write_summary
from koffline.spread import spread_of

CONFIG = OnlineConfig("Swimmer-v5", critic="rg", steps=300)
PARTS = {"environment": 2.0, "acting": 1.0, "learning": 4.0, "evaluation": 1.0}
FINAL = (10.0, 60.0, 30.0, 40.0, 50.0, 20.0)


def write_curves(out, finals, points=3):
    """Returns that rise evenly to their last value; sampled ones are half of them."""
    for seed, final in enumerate(finals):
        folder = out / f"seed_{seed}"
        folder.mkdir(parents=True)
        lines = [EVALUATION_HEADER]
        for k in range(1, points + 1):
            lines.append(f"{100 * k},{final * k / points!r},{7.0},{final * k / points / 2!r}")
        (folder / "evaluation.csv").write_text("\n".join(lines) + "\n")


def summary_of(out, finals=FINAL, diverged=None):
    plan = make_plan(CONFIG, 0, len(finals), 1)
    return summarise(plan, out, [GroupResult(300, 10.0, PARTS, diverged or {})])


def test_six_seeds_by_hand(tmp_path):
    write_curves(tmp_path, FINAL)
    summary = summary_of(tmp_path)
    assert summary.best_name == "best_5_of_6"
    assert summary.final.per_seed == FINAL
    assert summary.final.spread.iqm == 35.0  # (20 + 30 + 40 + 50) / 4
    assert summary.final.best == 40.0  # without 10
    assert summary.sampled.spread.iqm == 17.5
    assert summary.length.spread.iqm == 7.0
    assert summary.average.spread.iqm == pytest.approx(35.0 * 2 / 3)
    assert summary.final.spread == spread_of([np.asarray(FINAL)])
    assert [point.step for point in summary.curve] == [100, 200, 300]
    assert summary.curve[0].mean_action.best == pytest.approx(40.0 / 3)
    assert summary.steps_per_second == 180.0  # 6 seeds × 300 steps in 10 s
    assert summary.shares == pytest.approx(
        {"environment": 0.2, "acting": 0.1, "learning": 0.4, "evaluation": 0.1, "other": 0.2}
    )


def test_several_processes(tmp_path):
    write_curves(tmp_path, FINAL)
    plan = make_plan(CONFIG, 0, 6, 4)
    assert plan.groups == ((0, 1), (2,), (3, 4), (5,)) or [len(group) for group in plan.groups].count(2) == 2
    assert plan.seeds == tuple(range(6))
    results = [GroupResult(300, 10.0 * (k + 1), PARTS, {}) for k in range(4)]
    summary = summarise(plan, tmp_path, results)
    assert summary.seconds == 40.0
    assert summary.steps_per_second == 1800 / 40.0
    assert summary.shares["learning"] == pytest.approx(16.0 / 100.0)
    assert make_plan(CONFIG, 3, 2, 9).groups == ((3,), (4,))


def test_a_diverged_seed_is_infinitely_bad(tmp_path):
    write_curves(tmp_path, FINAL)
    path = tmp_path / "seed_1" / "evaluation.csv"
    path.write_text("\n".join(path.read_text().splitlines()[:2]) + "\n")
    with pytest.raises(ConfigError, match="lacks evaluations"):
        summary_of(tmp_path)
    summary = summary_of(tmp_path, diverged={1: 200})
    assert summary.final.per_seed[1] == -math.inf
    assert summary.final.spread.iqm == 25.0  # (10 + 20 + 30 + 40) / 4
    assert summary.final.best == 30.0
    assert summary.curve[0].mean_action.per_seed[1] == 20.0
    content = json.loads(write_summary(summary, tmp_path).read_text())
    assert (content["iqm"], content["best_5_of_6"], content["diverged"]) == (25.0, 30.0, {"1": 200})
    assert content["return"]["per_seed"]["1"] is None
    assert content["level"] == 0.95
    draw_curves(summary, tmp_path / "curve.png")
    assert (tmp_path / "curve.png").stat().st_size > 5000


def test_a_seed_alone_has_no_interval(tmp_path):
    write_curves(tmp_path, (5.0,), points=1)
    summary = summary_of(tmp_path, (5.0,))
    content = json.loads(write_summary(summary, tmp_path).read_text())
    assert (content["iqm"], content["interval"], content["best_1_of_1"]) == (5.0, [None, None], 5.0)
    draw_curves(summary, tmp_path / "curve.png")


def test_a_return_that_is_not_known_yet(tmp_path):
    """No episode had ended before the first evaluation: nothing was sampled."""
    write_curves(tmp_path, FINAL)
    path = tmp_path / "seed_0" / "evaluation.csv"
    path.write_text(path.read_text().replace(f",{10.0 / 3 / 2!r}", ",nan"))
    summary = summary_of(tmp_path)
    assert summary.curve[0].sampled.per_seed[0] == -math.inf
    assert math.isfinite(summary.curve[0].sampled.best)
    draw_curves(summary, tmp_path / "curve.png")


def test_edited_logs(tmp_path):
    write_curves(tmp_path, FINAL)
    path = tmp_path / "seed_2" / "evaluation.csv"
    path.write_text(path.read_text().replace("200,", "250,"))
    with pytest.raises(ConfigError, match=r"seed_2/evaluation\.csv has other steps than its fellows"):
        summary_of(tmp_path)


def test_the_fingerprint_is_of_what_decides_a_run(tmp_path):
    log = tmp_path / "log.hdf5"
    log.write_bytes(b"rows")
    moved = tmp_path / "moved.hdf5"
    moved.write_bytes(b"rows")
    other = tmp_path / "other.hdf5"
    other.write_bytes(b"other rows")
    plans = [Plan(CONFIG.with_changes(initial_log=str(path)), ((0,),)) for path in (log, moved, other)]
    assert plans[0].fingerprint == plans[1].fingerprint != plans[2].fingerprint
    assert Plan(CONFIG.with_changes(gamma=0.9), ((0,),)).fingerprint != Plan(CONFIG, ((0,),)).fingerprint
