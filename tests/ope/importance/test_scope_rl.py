"""Importance sampling and doubly robust estimators agree with scope-rl's."""

import contextlib
import io

import numpy as np
import pytest

from koffline.ope.log.row_values import RowValues
from tests.ope.importance.cases import log_of_steps, make_statistic, weighed

SCOPE_NAMES = {
    "is": "TrajectoryWiseImportanceSampling",
    "pdis": "PerDecisionImportanceSampling",
    "wpdis": "SelfNormalizedPDIS",
    "wis": "SelfNormalizedTIS",
    "dr": "DoublyRobust",
    "wdr": "SelfNormalizedDR",
}


@pytest.mark.parametrize("name", SCOPE_NAMES)
def test_agrees_with_scope_rl(name: str) -> None:
    """Episodes of one length that end there, the only ones it knows; its 1e-10 in a
    ratio allows 1e-8.
    """
    with contextlib.redirect_stderr(io.StringIO()):  # gym's notice
        scope_rl = pytest.importorskip("scope_rl.ope.discrete")
    generator = np.random.default_rng(7)
    steps = 4
    gamma = 0.9
    rows = 24
    behavior, target = (generator.dirichlet(np.ones(3), size=rows) for _ in range(2))
    actions = generator.integers(3, size=rows)
    rewards = generator.standard_normal(rows)
    log = log_of_steps(rewards, steps, n_actions=3)
    values = generator.standard_normal((rows, 3))
    chance = behavior[np.arange(rows), actions]
    theirs = getattr(scope_rl, SCOPE_NAMES[name])().estimate_policy_value(
        step_per_trajectory=steps,
        action=actions,
        reward=rewards,
        pscore=chance,
        evaluation_policy_action_dist=target,
        gamma=gamma,
        **({"state_action_value_prediction": values} if name in ("dr", "wdr") else {}),
    )
    v = np.sum(target * values, axis=1)
    model = RowValues(
        values[np.arange(rows), actions], np.append(v[1:], 0.0), v[::steps]
    )
    problem = weighed(
        log, np.log(target[np.arange(rows), actions]) - np.log(chance), gamma
    )
    ours = make_statistic(name, problem, model if name in ("dr", "wdr") else None).value
    assert ours == pytest.approx(theirs, rel=1e-8)
