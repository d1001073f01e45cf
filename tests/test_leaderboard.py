"""The leaderboard: problems, adapters of other libraries, scores by hand, one quick
run, the page.
"""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from koffline.policies import DiscretePolicy
from scripts.bench import leaderboard, leaderboard_d3rlpy, leaderboard_scope_rl
from scripts.bench.leaderboard_methods import Answer
from scripts.bench.leaderboard_problems import BOARD
from scripts.bench.leaderboard_scores import score_methods
from tests.ope.problems import discrete_log


def answer(method, value=None, low=None, high=None, reason=None):
    return Answer(method, value, low, high, None, 1.0, reason).as_dict()


def cell(policy, truth, answers, seed=0):
    run = {
        "problem": "p",
        "greedy": False,
        "seed": seed,
        "n_rows": 100,
        "n_episodes": 10,
        "seconds": 1.0,
    }
    return {
        **run,
        "policy": policy,
        "truth": truth,
        "truth_se": 0.0,
        "answers": answers,
    }


CELLS = [
    cell(
        "a",
        1.0,
        [
            answer("wdr", 1.1, 0.9, 1.3),
            answer("bad", 3.0),
            answer("bound", None, 0.0, 4.0),
        ],
    ),
    cell(
        "b",
        2.0,
        [
            answer("wdr", 2.0, 2.1, 2.3),
            answer("bad", 2.0),
            answer("bound", None, 0.0, 4.0),
        ],
    ),
    cell(
        "c",
        3.0,
        [
            answer("wdr", 3.0, 2.0, 3.5),
            answer("bad", None, reason="no"),
            answer("bound", None),
        ],
    ),
]


def test_scores_by_hand():
    good, bad, bound = score_methods(CELLS)  # the mean true value is 2
    assert [good.method, bad.method, bound.method] == ["wdr", "bad", "bound"]
    assert (good.answered, good.asked) == (3, 3)
    assert good.median_error == 0.0
    assert good.mean_error == pytest.approx(0.05 / 3)
    assert (good.rank_correlation, good.regret) == (1.0, 0.0)
    assert (good.covered, good.intervals) == (2, 3)
    assert good.width == pytest.approx(0.2)
    assert (bad.answered, bad.median_error) == (2, 0.5)
    assert bad.rank_correlation is None  # two policies are no ranking
    assert (bound.covered, bound.intervals, bound.median_error) == (2, 2, None)


@pytest.mark.parametrize("name", BOARD)
def test_every_problem_says_how_its_actions_were_drawn(name):
    problem = BOARD[name]()
    log = problem.log(seed=1, n_rows=300)
    assert set(problem.greedy) < set(problem.targets)
    assert np.isfinite(log.behavior_log_probabilities).all()
    for target in problem.targets:
        policy = problem.policy(target)
        assert leaderboard_d3rlpy.is_greedy(policy, log.observations) == (
            target in problem.greedy
        )


def test_padded_episodes_change_no_importance_sum():
    log = discrete_log(
        60, 10, behavior_log_probabilities=np.log(np.linspace(0.2, 0.6, 60))
    )
    uneven = log.select(np.flatnonzero((log.episode_ids != 1) | (log.steps < 4)))
    policy = DiscretePolicy(3, lambda s: np.tile([0.2, 0.5, 0.3], (len(s), 1)))
    inputs = leaderboard_scope_rl.pad_episodes(
        uneven, policy, 0.9, q_values=lambda s: np.ones((len(s), 3))
    )
    assert inputs["step_per_trajectory"] == 10
    assert len(inputs["action"]) == 60
    ratios = (
        inputs["evaluation_policy_action_dist"][np.arange(60), inputs["action"]]
        / inputs["pscore"]
    )
    plain = policy.probabilities(uneven.observations)[np.arange(54), uneven.actions]
    plain = plain / np.exp(uneven.behavior_log_probabilities)
    ends = np.append(uneven.episode_starts[1:], 54)
    for episode, (start, end) in enumerate(
        zip(uneven.episode_starts, ends, strict=True)
    ):
        padded = slice(10 * episode, 10 * episode + 10)
        assert np.prod(ratios[padded]) == pytest.approx(np.prod(plain[start:end]))
        assert inputs["reward"][padded].sum() == pytest.approx(
            uneven.rewards[start:end].sum()
        )
    assert inputs["state_action_value_prediction"][14:20].sum() == 0.0


def test_a_quick_run_is_kept_and_continued(tmp_path: Path, monkeypatch, capsys):
    problem = BOARD["graph short"]()
    few = {name: problem.targets[name] for name in ("first 0.8", "first 1")}
    monkeypatch.setitem(
        BOARD, "graph short", lambda: dataclasses.replace(problem, targets=few)
    )
    out = tmp_path / "rows.json"
    arguments = [BOARD["graph short"]()], range(1), leaderboard.QUICK, 20, 200, out
    content = leaderboard.run(*arguments)
    assert json.loads(out.read_text()) == content
    stochastic, greedy = (
        {a["method"]: a for a in cell["answers"]} for cell in content["cells"]
    )
    for methods in (stochastic, greedy):
        assert np.isfinite(methods["kloss"]["value"])
        assert (
            methods["pdis"]["low"]
            <= methods["pdis"]["value"]
            <= methods["pdis"]["high"]
        )
    assert stochastic["d3rlpy FQE"]["reason"] == "it evaluates greedy policies only"
    assert np.isfinite(greedy["d3rlpy FQE"]["value"])
    monkeypatch.setattr(
        leaderboard, "run_cell", lambda *_: pytest.fail("was done before")
    )
    assert leaderboard.run(*arguments) == content
