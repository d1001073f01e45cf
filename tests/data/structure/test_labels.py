"""Whole numbers that look like labels, and quantities that do not."""

import json

import numpy as np
import pytest

from koffline.data.sources import open_transitions
from koffline.data.structure.label_columns import label_symptoms
from koffline.data.structure.labels import MOST_VALUES, NAME, find_labels
from koffline.data.transitions import Discrete, Transitions
from scripts.bench.label_columns import effect, is_found, labels, quantity
from tests.ope.problems import AS_OPTIONS
from tests.refusals import succeed

SIDE = 5


def grid(seed: int = 0, rows: int = 6000, scrambled: bool = True):
    """Moves on a grid: the numbers of its cells now and later, rewards, actions."""
    generator = np.random.default_rng(seed)
    names = generator.permutation(SIDE * SIDE) if scrambled else np.arange(SIDE * SIDE)
    place = np.array([2, 2])
    cells = []
    actions = generator.integers(4, size=rows)
    for action in actions:
        cells.append(place[0] * SIDE + place[1])
        place = np.clip(place + [(0, 1), (1, 0), (0, -1), (-1, 0)][action], 0, SIDE - 1)
    cells.append(place[0] * SIDE + place[1])
    numbers = names[np.array(cells)]
    return numbers[:-1], numbers[1:], generator.normal(size=rows), actions


def found_in(now, later, rewards, actions, **names):
    states, following = (
        np.asarray(numbers, dtype=float)[:, None] for numbers in (now, later)
    )
    return find_labels(
        states, following, np.ones(len(now), bool), rewards, actions, **names
    )


@pytest.mark.parametrize("kind", [np.int64, np.float32, np.float64])
def test_scrambled_cells_are_labels_with_their_remedy(kind) -> None:
    now, later, rewards, actions = grid()
    (symptom,) = found_in(
        now.astype(kind), later.astype(kind), rewards, actions, names=["cell"]
    )
    assert (symptom.name, symptom.column, symptom.label, symptom.values) == (
        NAME,
        0,
        "cell",
        SIDE * SIDE,
    )
    assert symptom.effect > 0.5
    assert symptom.p_value > 0.05
    assert symptom.structure_p_value < 1e-8
    assert (
        symptom.remedy
        == "if they are labels, say so (--encode 'cell=one-hot'); if quantities,"
        " leave it"
    )
    assert symptom.remedy in str(symptom)


def test_names_are_those_of_encode_for_arrays() -> None:
    now, later, rewards, actions = grid()
    (alone,) = found_in(now, later, rewards, actions)
    assert alone.label == "observations"
    noise = np.random.default_rng(1).normal(size=len(now))
    states = np.column_stack([noise, now])
    following = np.column_stack([noise, later])
    (second,) = find_labels(
        states, following, np.ones(len(now), bool), rewards, actions
    )
    assert (second.column, second.label) == (1, "observations[1]")


def test_the_order_of_numbers_is_what_is_tested() -> None:
    now, later, rewards, actions = grid(scrambled=False)
    assert found_in(now, later, rewards, actions) == ()


@pytest.mark.parametrize(
    "change",
    [
        lambda now, later: (now + 0.5, later + 0.5),  # fractions
        lambda now, later: (now % 4, later % 4),  # too few values
        lambda now, later: (now * 0, later * 0),
        lambda now, later: (np.arange(len(now)), np.arange(len(now)) + 1),  # too many
        lambda now, later: (np.where(np.arange(len(now)) == 7, np.nan, now), later),
        lambda now, later: (now[:40], later[:40]),  # too few rows
    ],
)
def test_nothing_is_said_of_other_columns(change) -> None:
    now, later, rewards, actions = grid()
    now, later = change(now, later)
    assert found_in(now, later, rewards[: len(now)], actions[: len(now)]) == ()
    assert MOST_VALUES == 1000


def test_nothing_is_said_of_images_and_of_values_without_influence() -> None:
    now, _, rewards, actions = grid()
    images = np.zeros((len(now), 4, 4), dtype=np.uint8)
    assert find_labels(images, images, np.ones(len(now), bool), rewards, actions) == ()
    drawn = np.random.default_rng(2).integers(20, size=len(now) + 1)
    assert found_in(drawn[:-1], drawn[1:], rewards, actions) == ()


def test_categories_of_one_step_logs_are_told_by_their_rewards() -> None:
    generator = np.random.default_rng(3)
    kinds = generator.integers(30, size=5000)
    rewards = generator.normal(size=5000)
    ended = np.zeros(5000, bool)
    states = kinds[:, None]
    of_kind = generator.normal(size=30)[kinds]
    by_size = np.sin(kinds / 5.0)
    actions = generator.integers(2, size=5000)
    assert find_labels(states, states, ended, rewards + of_kind, actions) != ()
    assert find_labels(states, states, ended, rewards + by_size, actions) == ()
    assert find_labels(states, states, ended, rewards, actions) == ()


def customers(seed: int, n_episodes: int = 200, length: int = 20):
    """Episodes of customers: numbers (E,) of the episodes, a walk with an effect of
    each customer (N,), and the rows' episodes (N,).
    """
    generator = np.random.default_rng(seed)
    episodes = np.repeat(np.arange(n_episodes), length)
    effect = generator.normal(size=n_episodes)
    walk = np.zeros((n_episodes, length + 1))
    for step in range(length):
        noise = generator.normal(size=n_episodes)
        walk[:, step + 1] = 0.8 * walk[:, step] + 0.4 * noise + 0.1 * effect
    return generator, episodes, walk, effect


CONSTANT = {
    "age": lambda g, n: g.integers(18, 80, n),
    "income": lambda g, n: g.integers(20, 60, n),
    "tenure": lambda g, n: g.poisson(20, n),
    "size": lambda g, n: g.choice([1, 2, 5, 10, 12, 20, 50, 100, 200], n),
    "number of the episode": lambda g, n: np.arange(n),
}


@pytest.mark.parametrize("kind", CONSTANT)
@pytest.mark.parametrize(("n_episodes", "length"), [(10, 100), (200, 20), (600, 8)])
def test_quantities_that_are_constant_in_episodes_are_not_doubted(
    kind: str, n_episodes: int, length: int
) -> None:
    """Rewards of a customer are alike for reasons of their own, not by the age."""
    for seed in range(4):
        generator, episodes, walk, effect = customers(seed, n_episodes, length)
        quantity = CONSTANT[kind](generator, n_episodes)[episodes]
        now = walk[:, :-1].ravel()
        following = walk[:, 1:].ravel()
        rewards = now + effect[episodes]
        if seed % 2:
            rewards = rewards + 0.01 * quantity
        label_columns = find_labels(
            observations=np.column_stack([now, quantity]),
            next_observations=np.column_stack([following, quantity]),
            goes_on=np.ones(len(now), bool),
            rewards=rewards,
            actions=generator.integers(3, size=len(now)),
            units=episodes,
        )
        assert label_columns == ()


@pytest.mark.parametrize(
    ("is_constant", "n_episodes", "length"),
    [(True, 200, 20), (False, 200, 20), (False, 4, 1000), (False, 1, 4000)],
)
def test_labels_are_told_by_several_episodes_or_several_visits(
    is_constant: bool, n_episodes: int, length: int
) -> None:
    n_found = 0
    for seed in range(6):
        generator, episodes, walk, _ = customers(seed, n_episodes, length)
        if is_constant:
            products = generator.integers(12, size=n_episodes)[episodes]
        else:
            products = generator.integers(12, size=len(episodes))
        now = walk[:, :-1].ravel()
        of_product = generator.normal(size=12)[products]
        label_columns = find_labels(
            observations=np.column_stack([now, products]),
            next_observations=np.column_stack([now, np.roll(products, -1)]),
            goes_on=np.ones(len(now), bool),
            rewards=now + 2.0 * of_product,
            actions=generator.integers(3, size=len(now)),
            units=episodes,
            names=["demand", "product"],
        )
        n_found += len(label_columns)
        for column in label_columns:
            assert column.label == "product"
            assert column.statement == (
                "product holds 12 whole numbers that look like labels read as"
                " quantities: the reward depends on them, but not on their order"
                " (neighbouring numbers are no more alike than any two)"
            )
    assert n_found >= 2  # by chance a numbering may show some order


def test_rows_of_a_cluster_are_no_independent_witnesses_either() -> None:
    """Visits of one customer count once if the log names the customer."""
    generator, visits, walk, effect = customers(0, n_episodes=400, length=10)
    customer = np.arange(400) // 8
    ages = generator.integers(18, 60, 50)[customer]
    of_customer = 3.0 * generator.normal(size=50)[customer]
    now = walk[:, :-1].ravel()
    doubted = {}
    for name, clusters in {"unnamed": None, "named": customer[visits]}.items():
        log = Transitions(
            observations=np.column_stack([now, ages[visits]]),
            next_observations=np.column_stack([walk[:, 1:].ravel(), ages[visits]]),
            actions=generator.integers(2, size=len(now)),
            rewards=now + (of_customer + 0.1 * effect)[visits],
            terminated=np.zeros(len(now), bool),
            truncated=np.arange(len(now)) % 10 == 9,
            episode_ids=visits,
            clusters=clusters,
            action_space=Discrete(2),
        )
        doubted[name] = [symptom.kind for symptom in label_symptoms(log)]
    assert doubted == {"unnamed": ["labels"], "named": []}


def test_quantities_are_hardly_ever_and_labels_mostly_found() -> None:
    """At most 1 % of quantities; the benchmark measures it on thousands of logs."""
    taken = n_labels_found = 0
    for seed in range(200):
        generator = np.random.default_rng([9, seed])
        _, values = quantity(generator)
        taken += is_found(values, effect(values.now, generator), generator)
        if seed % 4 == 0:
            _, values = labels(generator)
            means = generator.normal(size=values.now.max() + 1)[values.now]
            n_labels_found += is_found(values, means, generator)
    assert taken <= 2
    assert n_labels_found >= 0.5 * 50


@pytest.mark.usefixtures("few_features_of_memory")
def test_the_warning_reaches_the_verdict_and_its_remedy_mends_it(
    tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    now, later, rewards, actions = grid()
    ids = np.arange(len(now)) // 50
    columns = {
        "observations": now[:, None],
        "next_observations": later[:, None],
        "actions": actions,
    }
    terminals = np.zeros(len(now), bool)
    np.savez(
        "cells.npz", **columns, rewards=rewards, terminals=terminals, episode_ids=ids
    )
    options = ("--policy", "uniform", "--gamma", 0.9, *AS_OPTIONS, "--json")
    verdict = json.loads(succeed("evaluate", "cells.npz", *options))["verdict"]
    (reason,) = (entry["text"] for entry in verdict["reasons"] if entry["kind"] == NAME)
    remedy = reason.split("(--encode '")[1].split("')")[0]
    assert remedy == "observations=one-hot"
    again = json.loads(succeed("evaluate", "cells.npz", "--encode", remedy, *options))[
        "verdict"
    ]
    assert NAME not in {entry["kind"] for entry in again["reasons"]}


def test_a_column_whose_order_the_user_declared_is_not_doubted(tmp_path) -> None:
    now, _, rewards, actions = grid()
    rows = zip(
        np.arange(len(now)) // 50,
        np.arange(len(now)) % 50,
        now,
        actions,
        rewards,
        strict=True,
    )
    lines = ["id,t,cell,a,r", *(",".join(map(str, row)) for row in rows)]
    (tmp_path / "cells.csv").write_text("\n".join(lines))
    mapping = {
        "observations": "cell",
        "action": "a",
        "reward": "r",
        "episode": "id",
        "time": "t",
    }
    mapping["last_row"] = "cut"
    order = list(map(str, range(SIDE * SIDE)))
    doubted = {}
    for how in (None, {"ordinal": order}, "one-hot"):
        encode = {} if how is None else {"encode": {"cell": how}}
        log = open_transitions(tmp_path / "cells.csv", mapping={**mapping, **encode})
        doubted[str(how)[:6]] = any(label_symptoms(log))
    assert doubted == {"None": True, "{'ordi": False, "one-ho": False}
