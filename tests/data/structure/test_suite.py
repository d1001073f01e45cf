"""Tests of a log's structure: hand cases, no false alarm in any world, and every fault
at its name.
"""

import numpy as np
import polars as pl
import pytest

from koffline.data.sources import write_transitions
from koffline.data.structure import Structure, Symptom, symptoms_of
from koffline.data.structure.chances import chance_of_count, coincidence_rate
from koffline.data.structure.logged_rows import LoggedRows, row_keys
from koffline.data.structure.sentinels import is_sentinel
from koffline.data.structure.surprise import PlacesOfEpisodes
from koffline.data.transitions import Discrete, Transitions
from scripts.bench.structure_worlds import (
    FAULTS,
    Episode,
    World,
    as_log,
    play,
    with_fault,
    worlds,
)
from tests.refusals import succeed


def world_named(
    name: str, seed: int = 0
) -> tuple[World, list[Episode], np.random.Generator]:
    """A world, some 3000 rows of it, and a generator for what is done to them."""
    generator = np.random.default_rng(seed)
    world = next(world for world in worlds(generator) if world.name == name)
    return (
        world,
        play(world, rows=3000, generator=np.random.default_rng([seed, 1])),
        generator,
    )


@pytest.mark.parametrize("number", range(28))
def test_right_logs_of_all_kinds_show_nothing(number: int) -> None:
    world = list(worlds(np.random.default_rng(3)))[number]
    log = as_log(world, play(world, rows=1500, generator=np.random.default_rng(4)))
    assert symptoms_of(log) == ()


CASES = {
    "reset rows": (
        "linear, noisy",
        0.1,
        "rows of automatic resets",
        "leave out these first rows",
    ),
    "next observations of resets": (
        "Pendulum",
        0.5,
        "next observations of resets",
        "info['final_obs']",
    ),
    "terminals that end nothing": (
        "queue",
        0.1,
        "terminations that end nothing",
        "terminal flag",
    ),
    "limits flagged as ends": (
        "linear, noisy",
        0.9,
        "both end flags",
        "--terminal 'done > timeout'",
    ),
    "unmarked ends": ("CartPole", 0.3, "jumps inside episodes", "mark the ends"),
    "unmarked time limits": (
        "Pendulum",
        1.0,
        "unmarked time limits",
        "100 steps as truncated",
    ),
    "actions late": (
        "Pendulum",
        1.0,
        "alignment of actions",
        "move actions up by one row",
    ),
    "actions and rewards late": (
        "linear, noisy",
        1.0,
        "alignment of actions",
        "and rewards",
    ),
    "rewards late": ("Pendulum", 1.0, "first rewards", "move rewards up by one row"),
    "marks in rewards": ("CartPole", 0.01, "marks of missing values", "drop or mend"),
    "marks in observations": (
        "linear, noisy",
        0.01,
        "marks of missing values",
        "drop or mend",
    ),
    "labels as numbers": (
        "random tabular",
        1.0,
        "labels read as quantities",
        "--encode",
    ),
    "rows lost inside": ("CartPole", 0.1, "linked rows", "export them anew"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_found_and_named(fault: str) -> None:
    name, share, test, remedy = CASES[fault]
    world, episodes, generator = world_named(name)
    assert symptoms_of(as_log(world, episodes)) == ()
    wrong = with_fault(world, episodes, fault, share, generator)
    assert wrong is not None
    symptoms = {symptom.test: symptom for symptom in symptoms_of(wrong)}
    assert test in symptoms
    if test == "first rewards":
        assert symptoms[test].statement.startswith("the reward of the first row is 0")
    assert remedy in symptoms[test].remedy
    assert 0 < symptoms[test].rows <= symptoms[test].of


@pytest.mark.parametrize(
    "fault", ["actions late", "actions and rewards late", "rewards late"]
)
def test_after_the_remedy_of_late_columns_nothing_is_left(fault: str) -> None:
    world, episodes, generator = world_named("Pendulum")
    wrong = with_fault(world, episodes, fault, 1.0, generator)
    assert wrong is not None
    remedies = " ".join(symptom.remedy for symptom in symptoms_of(wrong))
    # rows with a row below in their episode
    inside = np.flatnonzero(np.diff(wrong.units) == 0)
    columns = {
        name: np.asarray(column)[inside]
        for name, column in wrong.columns.items()
        if name != "steps"
    }
    for name in ("actions", "rewards"):
        if name in fault:
            assert name in remedies.partition("move ")[2]
            columns[name] = np.asarray(getattr(wrong, name))[inside + 1]
    columns["truncated"] = np.append(np.diff(columns["episode_ids"]) != 0, True)
    assert symptoms_of(Transitions(**columns, action_space=wrong.action_space)) == ()


def test_reset_rows_are_left_out_as_the_remedy_says() -> None:
    world, episodes, generator = world_named("corridor with costs")
    wrong = with_fault(world, episodes, "reset rows", 1.0, generator)
    assert wrong is not None
    assert "leave out these" in " ".join(
        symptom.remedy for symptom in symptoms_of(wrong)
    )
    dummies = np.asarray(wrong.episode_starts)[1:]
    kept = np.delete(np.arange(len(wrong)), dummies)
    columns = {
        name: np.asarray(column)[kept]
        for name, column in wrong.columns.items()
        if name != "steps"
    }
    assert symptoms_of(Transitions(**columns, action_space=wrong.action_space)) == ()


def test_a_stream_cut_into_pieces_is_right() -> None:
    world, episodes, _ = world_named("one stream in pieces")
    assert symptoms_of(as_log(world, episodes)) == ()


@pytest.mark.parametrize("name", ["Pendulum", "machine and repairs"])
def test_next_observations_of_resets_are_named(name: str) -> None:
    # in the second world, of ten states, steps inside episodes reach starts as well
    world, episodes, generator = world_named(name)
    wrong = with_fault(world, episodes, "next observations of resets", 1.0, generator)
    assert wrong is not None
    assert [symptom.test for symptom in symptoms_of(wrong)] == [
        "next observations of resets"
    ]


def test_rows_without_episodes_that_follow_each_other_are_named() -> None:
    world, episodes, _ = world_named("linear, noisy")
    log = as_log(world, episodes)
    alone = {
        name: column
        for name, column in log.columns.items()
        if name not in ("episode_ids", "steps")
    }
    (symptom,) = symptoms_of(Transitions(**alone, action_space=log.action_space))
    assert symptom.kind == "order"
    shuffled = np.random.default_rng(0).permutation(len(log))
    mixed = {name: np.asarray(column)[shuffled] for name, column in alone.items()}
    assert symptoms_of(Transitions(**mixed, action_space=log.action_space)) == ()


def test_coincidences_are_counted_over_all_pairs() -> None:
    ends = np.array([1, 1, 2, 3])
    starts = np.array([1, 4, 2, 2, 5])
    pairs = sum(int(end == start) for end in ends for start in starts)
    assert coincidence_rate(ends=ends, starts=starts) == pytest.approx(
        (pairs + 1) / (4 * 5 + 1)
    )
    assert coincidence_rate(
        ends=np.array([9]), starts=np.array([1, 2])
    ) == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("count", "trials", "rate"), [(0, 5, 0.3), (1, 5, 0.3), (4, 5, 0.5), (5, 5, 0.9)]
)
def test_the_chance_of_a_count_is_a_binomial_tail(
    count: int, trials: int, rate: float
) -> None:
    from math import comb

    tail = sum(
        comb(trials, k) * rate**k * (1 - rate) ** (trials - k)
        for k in range(count, trials + 1)
    )
    assert chance_of_count(count=count, trials=trials, rate=rate) == pytest.approx(tail)


def test_equal_rows_have_equal_keys_and_others_do_not() -> None:
    rows = np.array(
        [[0.0, 1.0], [-0.0, 1.0], [1.0, 0.0], [0.0, 1.0 + 1e-6], [2.0, -1.0]],
        dtype=np.float32,
    )
    keys = row_keys(rows)
    assert keys[0] == keys[1]
    assert len(np.unique(keys)) == 4
    pictures = np.zeros((3, 4, 5), dtype=np.uint8)
    pictures[1, 0, 0] = 1
    pictures[2, 3, 4] = 1
    assert len(np.unique(row_keys(pictures))) == 3


def test_the_surprise_of_a_step_is_its_distance_to_the_nearest_like_it() -> None:
    # 40 episodes of two rows: 1 up, then 1 up again
    states = np.repeat(np.arange(40.0), 2)[:, None]
    following = states + 1.0
    steps = np.tile([0, 1], 40)
    states = states + steps[:, None]
    following = states + 1.0
    following[-1] = states[-1] + 5.0
    log = Transitions(
        observations=states,
        actions=np.zeros(80, dtype=np.int64),
        rewards=np.zeros(80),
        next_observations=following,
        terminated=np.zeros(80, dtype=np.bool_),
        truncated=steps == 1,
        steps=steps,
        action_space=Discrete(1),
    )
    places = PlacesOfEpisodes.of(LoggedRows.of(log))
    # of steps inside episodes: all are 1
    scale = np.sqrt(np.mean(1.0)) / np.asarray(states).std()
    assert places.scale == pytest.approx(scale, rel=1e-5)
    assert places.surprise(np.array([0, 78])) == pytest.approx([0.0, 0.0], abs=1e-4)
    assert places.surprise(np.array([79])) == pytest.approx([4.0], rel=1e-4)


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (-999.0, True),
        (9999.0, True),
        (99.0, True),
        (-32768.0, True),
        (1e30, True),
        (9.0, False),
        (100.0, False),
    ],
)
def test_numbers_that_stand_for_missing(number: float, expected: bool) -> None:
    assert is_sentinel(number) == expected


@pytest.mark.parametrize(
    ("value", "rows", "test"),
    [
        (-999.0, 40, "marks of missing values"),
        (1e30, 1, "marks of missing values"),
        (7e9, 1, "one row outweighs all"),
    ],
)
def test_rewards_that_outweigh_all_others_are_named(
    value: float, rows: int, test: str
) -> None:
    world, episodes, generator = world_named("linear, noisy")
    log = as_log(world, episodes)
    rewards = np.asarray(log.rewards).copy()
    rewards[generator.choice(len(rewards), size=rows, replace=False)] = value
    (symptom,) = symptoms_of(log.replace(rewards=rewards))
    assert (symptom.test, symptom.rows) == (test, rows)


def test_a_prize_that_was_won_once_is_no_error() -> None:
    world, episodes, _ = world_named("corridor with a prize")
    log = as_log(world, episodes)
    rewards = np.zeros(len(log))
    for prize, tests in {1.0: [], 7e9: ["one row outweighs all"]}.items():
        rewards[1200] = prize
        symptoms = symptoms_of(log.replace(rewards=rewards))
        assert [symptom.test for symptom in symptoms] == tests


def first_rows_of_zero(kind: str, seed: int = 0) -> Transitions:
    """Walks on eight places from one of the first two, read without next columns.

    kind: ``late`` rewards, ``dummy`` rows before all episodes but the first, or
    ``home``: the first place is not met again and pays 0.
    """
    generator = np.random.default_rng(seed)
    pictures = generator.normal(size=(8, 3))
    episodes = []
    for number in range(200):
        places = [int(generator.integers(2))]
        if kind == "home":
            places = [0]
        actions = []
        rewards = []
        length = int(generator.geometric(0.08)) + 1
        for _ in range(min(length, 30)):
            action = int(generator.integers(3))
            lowest = int(kind == "home")
            place = int(np.clip(places[-1] + action - 1, lowest, 7))
            pay = 0.2 + 0.15 * places[-1] + 0.02 * generator.normal()
            if action != 1:
                pay -= 0.1
            if kind == "home" and places[-1] == 0:
                pay = 0.0
            actions.append(action)
            rewards.append(pay)
            places.append(place)
        if kind == "late":
            rewards = [0.0, *rewards[:-1]]
        if kind == "dummy" and number > 0:
            places = [int(generator.integers(8)), *places]
            actions = [int(generator.integers(3)), *actions]
            rewards = [0.0, *rewards]
        episodes.append((places, actions, rewards))
    states = [pictures[places] for places, _, _ in episodes]
    lengths = np.array([len(rewards) for _, _, rewards in episodes])
    is_last = np.zeros(lengths.sum(), dtype=np.bool_)
    is_last[np.cumsum(lengths) - 1] = True
    return Transitions(
        observations=np.concatenate([state[:-1] for state in states]),
        next_observations=np.concatenate([state[1:] for state in states]),
        actions=np.concatenate([actions for _, actions, _ in episodes]),
        rewards=np.concatenate([rewards for _, _, rewards in episodes]),
        terminated=is_last,
        truncated=np.zeros(len(is_last), dtype=np.bool_),
        episode_ids=np.repeat(np.arange(200), lengths),
        action_space=Discrete(3),
    )


@pytest.mark.parametrize(
    ("kind", "test", "statement", "remedy"),
    [
        (
            "dummy",
            "rows of automatic resets",
            "the reward of the first row is 0 in 199 of 200 episodes",
            "leave out these first rows",
        ),
        (
            "late",
            "alignment of rewards",
            "of the reward of the row below than of its own",
            "move rewards up by one row",
        ),
    ],
)
def test_first_rows_without_reward_are_named_with_their_remedy(
    kind: str, test: str, statement: str, remedy: str
) -> None:
    log = first_rows_of_zero(kind)
    symptoms = {symptom.test: symptom for symptom in symptoms_of(log)}
    assert statement in symptoms[test].statement
    assert remedy in symptoms[test].remedy
    if kind == "late":
        return
    firsts = np.asarray(log.episode_starts)[1:]
    kept = np.delete(np.arange(len(log)), firsts)
    columns = {
        name: np.asarray(column)[kept]
        for name, column in log.columns.items()
        if name != "steps"
    }
    assert symptoms_of(Transitions(**columns, action_space=log.action_space)) == ()


def test_a_first_place_that_pays_nothing_is_no_late_reward() -> None:
    for seed in range(3):
        assert symptoms_of(first_rows_of_zero("home", seed)) == ()


def test_parts_of_a_log_add_up_and_rare_symptoms_are_left_out() -> None:
    symptom = Symptom(
        "some test",
        "ends",
        rows=10,
        of=10,
        p_value=1e-9,
        statement="seen",
        remedy="mend it",
    )
    rare = Structure(((1_000_000, ()), (1000, (symptom,))))
    assert rare.symptoms == ()
    often = Structure(((1000, (symptom,)),)) + Structure(((1000, ()),))
    assert [seen.test for seen in often.symptoms] == ["some test"]
    assert symptom.text == "seen; mend it"
    assert symptom.share == 1.0


def test_commands_say_what_the_rows_show(tmp_path) -> None:
    world, episodes, generator = world_named("Pendulum")
    wrong = with_fault(world, episodes, "next observations of resets", 1.0, generator)
    assert wrong is not None
    path = tmp_path / "log.hdf5"
    write_transitions(wrong, path)
    for command in (("validate",), ("info", "--json")):
        assert "as after an automatic reset" in succeed("data", *command, path)


def test_inspect_says_what_the_rows_of_a_table_show(tmp_path) -> None:
    world, episodes, generator = world_named("Pendulum")
    wrong = with_fault(world, episodes, "actions late", 1.0, generator)
    assert wrong is not None
    names = [f"x{number}" for number in range(3)]
    observations = {
        name: wrong.observations[:, number] for number, name in enumerate(names)
    }
    frame = pl.DataFrame(
        {
            "episode": wrong.units,
            "step": wrong.steps,
            **observations,
            "action": wrong.actions[:, 0],
            "reward": wrong.rewards,
            "truncated": wrong.truncated,
        }
    )
    path = tmp_path / "log.parquet"
    frame.write_parquet(path)
    shown = succeed("data", "inspect", path, "--json")
    assert "the action of the row below explains" in shown
    assert "move actions up by one row" in shown
