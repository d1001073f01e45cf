"""What columns mean, and tables on the command line, from a stranger's file to the
right number.
"""

import json
import sys

import numpy as np
import pytest
import yaml

from koffline.data.sources import open_transitions
from koffline.data.table.mapping import TableMapping
from koffline.data.table.problems import Problems
from koffline.data.table.roles import resolved
from koffline.envs.finite import FiniteMDP
from koffline.errors import DataError
from tests.data.table_rows import OPTIONS, shuffled, walk, write, write_text
from tests.refusals import assert_refused, one_line, run_cli, succeed

pytestmark = pytest.mark.usefixtures("few_features_of_memory")

LEAST = {"observations": "x_*", "action": "a", "reward": "r"}
NAMES = (
    "x_10",
    "x_2",
    "r",
    "a",
    "x_1",
    "obs[0]",
    "obs[1]",
    "t",
    "next_x_1",
    "next_x_2",
    "next_x_10",
)


def roles(names=NAMES, **changes):
    problems = Problems("log.csv")
    mapping, _ = resolved(TableMapping(**{**LEAST, **changes}), names, problems)
    problems.refuse()
    return mapping


@pytest.mark.parametrize(
    ("names", "observations", "expected"),
    [
        (NAMES, "x_*", ("x_1", "x_2", "x_10")),
        (NAMES, ["x_2", "x_*", "t"], ("x_2", "x_1", "x_10", "t")),
        (NAMES, "t, x_?", ("t", "x_1", "x_2")),
        (NAMES, "obs[*]", ("obs[0]", "obs[1]")),
        (("x*", "x1", "a", "r"), "x*", ("x*",)),
    ],
)
def test_patterns(names, observations, expected):
    """In natural order, each column once; a name is a name first."""
    assert roles(names, observations=observations).observations == expected


def test_a_pattern_takes_no_column_with_another_role():
    names = [name for name in NAMES if "obs" not in name]
    mapping = roles(
        names,
        observations="*",
        episode="t",
        next_observations="next_*",
        impute={"x_1": 1, "": 0},
    )
    assert mapping.observations == ("x_1", "x_2", "x_10")
    assert mapping.next_observations == ("next_x_1", "next_x_2", "next_x_10")
    assert dict(mapping.impute)["x_1"] == 1
    assert dict(mapping.impute)["next_x_10"] == 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"behavior_probability": "p", "behavior_log_probability": "q"}, "keep one"),
        ({"action_names": ["a", "a"]}, "each once"),
        ({"observations": "y_*"}, r"no column fits observations 'y_\*'"),
        (
            {"observations": "x_1", "next_observations": "next_*"},
            "3 columns are next_observations, 1 obs",
        ),
    ],
)
def test_mistakes(changes, words):
    with one_line(DataError, match=words):
        roles(**changes)


@pytest.fixture
def table(tmp_path):
    return write(shuffled(walk()), tmp_path / "log.parquet")


class TestOptions:
    def test_what_was_done_and_what_is_refused(self, table):
        shown = run_cli("data", "validate", table, *OPTIONS).stdout
        assert "2 rows were left out" in shown
        assert "6 rows, no errors" in shown
        assert_refused(
            run_cli("data", "validate", table, *OPTIONS, "--weight", "rr"),
            "did you mean 'r'?",
        )

    def test_the_line_wins_over_the_file(self, table, tmp_path):
        path = tmp_path / "columns.yaml"
        path.write_text(
            "{observations: [x_1], action: a, reward: none, episode: id, time: t}"
        )
        words = (
            "--mapping",
            path,
            "--reward",
            "r",
            "--terminal",
            "done",
            "--action-names",
            "right,left",
        )
        shown = json.loads(run_cli("data", "info", table, *words, "--json").stdout)
        assert (shown["rows"], shown["observation_shape"]) == (6, [1])
        assert shown["extra"]["action_names"] == ["right", "left"]

    @pytest.mark.parametrize(
        ("expected_text", "names"), [("20,10", [20, 10]), ("true,false", [True, False])]
    )
    def test_names_of_numbers_and_of_yes_and_no(self, tmp_path, expected_text, names):
        path = write(walk(a=names * 4), tmp_path / "log.parquet")
        shown = run_cli(
            "data", "info", path, *OPTIONS, "--action-names", expected_text, "--json"
        ).stdout
        assert json.loads(shown)["extra"]["action_names"] == names


GAMMA = 0.8


def shop(seed=7):
    """Nine states, a city and a size; two actions; it never ends."""
    generator = np.random.default_rng(seed)
    transition = generator.dirichlet(np.full(9, 0.7), size=(9, 2))
    reward = generator.normal(size=(9, 2)).round(1)
    return FiniteMDP(transition, reward, np.zeros(9, bool), np.full(9, 1 / 9))


def messy_csv(path, mdp, episodes=200, steps=20, seed=0):
    """As people export it: shuffled, with offsets, repeated rows, missing values,
    decimal commas, a mark.
    """
    generator = np.random.default_rng(seed)
    lines = []
    for episode in range(episodes):
        state = generator.integers(9)
        minute = generator.integers(600)
        for _ in range(steps):
            action = generator.integers(2)
            offset = generator.choice([0, 1, 2, -5])
            hours, minutes = divmod(int(minute) + 600 + 60 * int(offset), 60)
            when = f"2024-03-{1 + hours // 24:02d}T{hours % 24:02d}:{minutes:02d}:00{offset:+03d}:00"
            following = generator.choice(9, p=mdp.transition[state, action])
            gain = f"{mdp.reward[state, action, 0] + 0.1 * generator.normal():.4f}".replace(
                ".", ","
            )
            lines.append(
                [
                    f"cust {episode}",
                    when,
                    ["München", "Köln", "Zürich"][state // 3],
                    "sml"[state % 3],
                    ["wait", "offer"][action],
                    gain if generator.random() > 0.003 else "",
                    (
                        f"{generator.normal():.2f}".replace(".", ",")
                        if generator.random() > 0.01
                        else "NA"
                    ),
                ]
            )
            state = following
            minute = minute + generator.integers(1, 50)
    lines += [line for line in lines if generator.random() < 0.01]
    order = generator.permutation(len(lines))
    head = "customer id;when;city;size;action;spend;temperature"
    text = "\n".join([head, *(";".join(lines[i]) for i in order)])
    return write_text(("\ufeff" + text + "\n").encode(), path)


def write_policy(folder, monkeypatch, second):
    """``mine:target``: the probability of the second of two actions, by a table of the
    states.
    """
    text = f"import numpy as np\ndef target(table):\n    second = {second}\n"
    (folder / "mine.py").write_text(
        text + "    return np.stack([1 - second, second], axis=1)\n"
    )
    monkeypatch.chdir(folder)
    monkeypatch.delitem(sys.modules, "mine", raising=False)


def test_a_messy_csv_leads_to_the_right_number(tmp_path, monkeypatch):
    """inspect, then one command; the truth is a linear solve."""
    mdp = shop()
    mapping = tmp_path / "mapping.yaml"
    table = messy_csv(tmp_path / "shop.csv", mdp)
    shown = succeed("data", "inspect", table, "--out", mapping)
    for words in (
        "spend: ",
        "temperature: ",
        "another in all columns",
        "values are missing",
    ):
        assert words in shown
    written = yaml.safe_load(mapping.read_text())
    assert written["episode"] == "customer id"
    assert written["encode"] == {"city": "one-hot", "size": "one-hot"}
    assert written["last_row"].startswith("? last_row: cut")
    assert (written["drop_duplicates"], written["decimal_comma"]) == ("exact", True)
    write_policy(tmp_path, monkeypatch, "np.where(table['city'] == 'Köln', 0.1, 0.4)")
    options = (
        "--last-row",
        "cut",
        "--policy",
        "mine:target",
        "--gamma",
        GAMMA,
        "--estimator",
        "lstdq",
        "--json",
    )
    options += ("--set", "steps=100")
    offer = np.where(np.arange(9) // 3 == 1, 0.9, 0.6)
    truth = mdp.policy_value(np.stack([1 - offer, offer], axis=1), GAMMA)
    estimate = json.loads(succeed("evaluate", table, "--mapping", mapping, *options))
    assert estimate["interval"]["low"] < truth < estimate["interval"]["high"]
    assert estimate["interval"]["high"] - estimate["interval"]["low"] < 0.8
    # of another policy
    assert abs(estimate["value"] - mdp.policy_value(np.full((9, 2), 0.5), GAMMA)) > 0.1


def bandit_csv(path, rows=2000):
    generator = np.random.default_rng(0)
    city = generator.choice(["a", "b"], rows)
    x = generator.normal(size=rows)
    p = np.where(x > 0, 0.7, 0.3)
    shown = generator.random(rows) < p
    click = generator.random(rows) < np.where(
        city == "b", 0.2 + 0.5 * shown, 0.6 - 0.4 * shown
    )
    columns = {
        "user": [f"u{i}" for i in range(rows)],
        "when": [f"2024-01-01T00:{i % 60:02d}:00Z" for i in range(rows)],
        "city": city,
        "x": x,
        "arm": np.where(shown, "yes", "no"),
        "clicked": click.astype(int),
        "propensity": np.where(shown, p, 1 - p),
    }
    return write({name: list(values) for name, values in columns.items()}, path), city


def test_a_bandit_is_asked_about_and_then_right(tmp_path, monkeypatch):
    table, city = bandit_csv(tmp_path / "ads.csv")
    mapping = tmp_path / "ads.yaml"
    shown = run_cli("data", "inspect", table, "--out", mapping).stdout
    assert "no column says which rows belong together" in shown
    assert "one_step" not in yaml.safe_load(mapping.read_text())
    write_policy(tmp_path, monkeypatch, "np.where(table['city'] == 'b', 0.9, 0.1)")
    options = (
        "--mapping",
        mapping,
        "--policy",
        "mine:target",
        "--gamma",
        0.9,
        "--estimator",
        "dr",
    )
    assert_refused(run_cli("evaluate", table, *options), "--one-step", "--episode")
    options = (*options, "--one-step", "--set", "steps=200", "--json")
    estimate = json.loads(run_cli("evaluate", table, *options).stdout)
    truth = np.mean(np.where(city == "b", 0.2 + 0.5 * 0.9, 0.6 - 0.4 * 0.1))
    assert estimate["interval"]["low"] < truth < estimate["interval"]["high"]
    assert estimate["interval"]["high"] - estimate["interval"]["low"] < 0.2
    options = (*options, "--initial-states", table, "--estimator", "lstdq")
    assert (
        json.loads(succeed("evaluate", table, *options))["diagnostics"][
            "n_initial_states"
        ]
        == 2000
    )
    mapping.write_text(
        mapping.read_text().replace("# one_step: true ", "one_step: true ")
    )
    info = json.loads(
        run_cli("data", "info", table, "--mapping", mapping, "--json").stdout
    )
    assert (info["episodes"], info["terminated"]) == (2000, 2000)


@pytest.mark.parametrize("suffix", ["npz", "hdf5"])
def test_rows_of_other_logs_as_episodes_of_one_step(tmp_path, suffix):
    columns = {
        "observations": np.ones((6, 2)),
        "actions": np.arange(6) % 2,
        "rewards": np.arange(6.0),
    }
    path = tmp_path / "log.npz"
    np.savez(path, **columns)
    assert_refused(run_cli("data", "info", path), "lacks terminals")
    if suffix == "hdf5":
        succeed("data", "convert", path, tmp_path / "log.hdf5", "--one-step")
        path = tmp_path / "log.hdf5"
    shown = json.loads(run_cli("data", "info", path, "--one-step", "--json").stdout)
    assert (shown["rows"], shown["episodes"], shown["terminated"]) == (6, 6, 6)
    succeed(
        "data", "convert", path, tmp_path / "shards", "--one-step", "--shard-rows", 4
    )
    assert open_transitions(tmp_path / "shards").n_episodes == 6
    assert_refused(
        run_cli("data", "info", "minari:a/b-v0", "--one-step"), "holds episodes"
    )
