"""Late actions in some episodes of small worlds are found by the likelihood of whole
episodes, and nothing else is taken for them.
"""

import numpy as np
import pytest

from koffline.data.structure import symptoms_of
from koffline.data.structure.late_episodes import late_episode_symptoms
from koffline.data.structure.logged_rows import LoggedRows
from koffline.data.transitions import Discrete, Transitions

STATES = 9
ACTIONS = 3
ROWS = 4000


def small_log(
    hidden: str = "nothing", late: float = 0.0, length: int = 4, seed: int = 0
) -> Transitions:
    """Episodes of a random world. hidden: what differs in a fifth of them and is not
    logged (nothing, dynamics, effect of actions, policy), or what the policy remembers
    (its last action). late: share of episodes whose rows hold the action before.
    """
    generator = np.random.default_rng(seed)
    usual_world = generator.dirichlet(np.full(STATES, 0.3), size=(STATES, ACTIONS))
    unusual_world = {
        "dynamics": generator.dirichlet(np.full(STATES, 0.3), size=(STATES, ACTIONS)),
        "effect of actions": usual_world[:, ::-1],
    }.get(hidden, usual_world)
    usual_policy = generator.dirichlet(np.full(ACTIONS, 0.7), size=STATES)
    unusual_policy = usual_policy
    if hidden == "policy":
        unusual_policy = generator.dirichlet(np.full(ACTIONS, 0.3), size=STATES)
    columns: dict[str, list] = {"state": [], "following": [], "action": []}
    for _ in range(ROWS // length):
        world = usual_world
        policy = usual_policy
        if generator.random() < 0.2:
            world = unusual_world
            policy = unusual_policy
        state = int(generator.integers(3))
        actions: list[int] = []
        for _ in range(length):
            chances = policy[state]
            if hidden == "last action" and actions:
                chances = 0.3 * chances + 0.7 * np.eye(ACTIONS)[actions[-1]]
            actions.append(int(generator.choice(ACTIONS, p=chances)))
            columns["state"].append(state)
            state = int(generator.choice(STATES, p=world[state, actions[-1]]))
            columns["following"].append(state)
        if generator.random() < late:
            actions = [0, *actions[:-1]]
        columns["action"].extend(actions)
    rows = len(columns["state"])
    codes = np.eye(STATES, dtype=np.float32)
    episode = np.arange(rows) // length
    return Transitions(
        observations=codes[columns["state"]],
        actions=np.array(columns["action"]),
        rewards=generator.normal(size=rows),
        next_observations=codes[columns["following"]],
        terminated=np.zeros(rows, np.bool_),
        truncated=np.append(np.diff(episode) > 0, True),
        episode_ids=episode,
        action_space=Discrete(ACTIONS),
    )


@pytest.mark.parametrize("length", [3, 4, 20])
def test_late_actions_in_a_tenth_of_the_episodes_are_seen(length: int) -> None:
    log = small_log(late=0.1, length=length)
    (symptom,) = symptoms_of(log)
    assert symptom.test == "alignment of actions in some episodes"
    assert symptom.p_value < 1e-6
    assert symptom.of == ROWS // length
    assert 0.03 < symptom.share < 0.2
    assert "move their actions up by one row" in symptom.text


@pytest.mark.parametrize(
    "hidden", ["nothing", "dynamics", "effect of actions", "policy", "last action"]
)
def test_hidden_differences_between_episodes_are_no_late_actions(hidden: str) -> None:
    for seed, length in ((1, 3), (2, 5), (3, 16)):
        log = small_log(hidden, length=length, seed=seed)
        assert list(late_episode_symptoms(LoggedRows.of(log))) == []


@pytest.mark.parametrize("hidden", ["dynamics", "policy", "last action"])
def test_late_actions_are_seen_beside_hidden_differences(hidden: str) -> None:
    log = small_log(hidden, late=0.1, length=8, seed=4)
    assert len(list(late_episode_symptoms(LoggedRows.of(log)))) == 1


def test_actions_without_any_effect_show_nothing() -> None:
    log = small_log(late=0.3)
    generator = np.random.default_rng(0)
    following = generator.integers(STATES, size=ROWS)
    codes = np.eye(STATES, dtype=np.float32)
    aimless = log.replace(next_observations=codes[following])
    assert list(late_episode_symptoms(LoggedRows.of(aimless))) == []
