"""The control benchmark: cells, scores, pairs and verdicts."""

import argparse

from scripts.bench.control_report import collect

OPTIONS = argparse.Namespace(
    seeds=2,
    steps=4,
    steps_of=[],
    evaluate_every=2,
    episodes=1,
    hidden=[4],
    batch_size=8,
    set=[],
    logs="",
    algos="all",
    original_rates="3e-3",
    variants=True,
    by_rule=False,
)


def cell(log, algo, seed, returns):
    common = {"env": "E-v0", "steps": [2, 4], "seconds": 1.0, "assignments": {}}
    return {"log": log, "algo": algo, "seed": seed, "returns": returns, **common}


CELLS = [
    cell("a", "dqn", 0, [0.0, 20.0]),
    cell("a", "dqn", 1, [0.0, 30.0]),
    cell("a", "kloss_dqn", 0, [0.0, 110.0]),
    cell("a", "kloss_dqn", 1, [210.0, 90.0]),
    cell("b", "sac", 0, [50.0, 50.0]),
    cell("b", "kloss_sac", 0, [50.0, 51.0]),
    cell("c", "iql", 0, [50.0, 50.0]),
    cell("c", "kloss_iql", 0, [50.0, -10.0]),
    cell("c", "kloss_cql", 0, [50.0, -10.0]),
]
SCALES = {"E-v0": {"random": 10.0, "expert": 110.0, "name": "x"}}


def test_scores_pairs_and_verdicts():
    results = collect(CELLS, SCALES, OPTIONS)
    entry = next(e for e in results["entries"] if e["algo"] == "kloss_dqn")
    assert entry["scores_of_seeds"] == [100.0, 80.0]
    assert (entry["score"], entry["worst_late"], entry["best_ever"]) == (
        90.0,
        80.0,
        150.0,
    )
    assert entry["curves"] == [[-10.0, 100.0], [200.0, 80.0]]
    pairs = {pair["log"]: pair for pair in results["pairs"]}
    assert set(pairs) == {"a", "b", "c"}  # an algorithm without its original is no pair
    assert {log: pair["verdict"] for log, pair in pairs.items()} == {
        "a": "kernel loss",
        "b": "level",
        "c": "original",
    }
    assert (pairs["a"]["difference"], pairs["a"]["original_score"]) == (75.0, 15.0)
    low, high = pairs["a"]["interval"]
    assert 60.0 <= low < 75.0 < high <= 90.0
