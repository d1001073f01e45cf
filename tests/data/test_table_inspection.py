"""A stranger's table: a mapping is guessed, all that is wrong is listed, and it leads to the right number."""

from __future__ import annotations

import json
import sys

import h5py
import numpy as np
import polars as pl
import pytest
import yaml

from koffline.data.flat import write_npz
from koffline.data.sources import open_transitions, write_transitions
from koffline.data.table.inspection import inspect_table
from koffline.envs.finite import FiniteMDP
from koffline.errors import DataError, PolicyError
from koffline.policy_specs import as_policy
from tests.data.table_rows import MAPPING, walk, write, write_text
from tests.refusals import assert_refused, run_cli

GAMMA = 0.8


def shop(seed=7):
    """Nine states, a city and a size; two actions; it never ends."""
    generator = np.random.default_rng(seed)
    transition = generator.dirichlet(np.full(9, 0.7), size=(9, 2))
    reward = generator.normal(size=(9, 2)).round(1)
    return FiniteMDP(transition, reward, np.zeros(9, bool), np.full(9, 1 / 9))


def messy_csv(path, mdp, episodes=200, steps=20, seed=0):
    """As people export it: shuffled, with offsets, repeated rows, missing values, decimal commas, a mark."""
    generator = np.random.default_rng(seed)
    lines = []
    for episode in range(episodes):
        state, minute = generator.integers(9), generator.integers(600)
        for _ in range(steps):
            action, offset = generator.integers(2), generator.choice([0, 1, 2, -5])
            hours, minutes = divmod(int(minute) + 600 + 60 * int(offset), 60)
            when = f"2024-03-{1 + hours // 24:02d}T{hours % 24:02d}:{minutes:02d}:00{offset:+03d}:00"
            following = generator.choice(9, p=mdp.transition[state, action])
            gain = f"{mdp.reward[state, action, 0] + 0.1 * generator.normal():.4f}".replace(".", ",")
            lines.append([
                f"cust {episode}", when, ["München", "Köln", "Zürich"][state // 3], "sml"[state % 3],
                ["wait", "offer"][action], gain if generator.random() > 0.003 else "",
                f"{generator.normal():.2f}".replace(".", ",") if generator.random() > 0.01 else "NA",
            ])  # fmt: skip
            state, minute = following, minute + generator.integers(1, 50)
    lines += [line for line in lines if generator.random() < 0.01]
    order = generator.permutation(len(lines))
    head = "customer id;when;city;size;action;spend;temperature"
    text = "\n".join([head, *(";".join(lines[i]) for i in order)])
    return write_text(("\ufeff" + text + "\n").encode(), path)


def write_policy(folder, monkeypatch, second):
    """``mine:target``: the probability of the second of two actions, by a table of the states."""
    text = f"import numpy as np\ndef target(table):\n    second = {second}\n"
    (folder / "mine.py").write_text(text + "    return np.stack([1 - second, second], axis=1)\n")
    monkeypatch.chdir(folder)
    monkeypatch.delitem(sys.modules, "mine", raising=False)


def test_a_messy_csv_leads_to_the_right_number(tmp_path, monkeypatch):
    """inspect, then one command; the truth is a linear solve."""
    mdp, mapping = shop(), tmp_path / "mapping.yaml"
    table = messy_csv(tmp_path / "shop.csv", mdp)
    shown = run_cli("data", "inspect", table, "--out", mapping)
    assert shown.exit_code == 0
    for words in ("spend: ", "temperature: ", "another in all columns", "values are missing"):
        assert words in shown.stdout
    found = yaml.safe_load(mapping.read_text())
    assert found["episode"] == "customer id"
    assert found["encode"] == {"city": "one-hot", "size": "one-hot"}
    assert (found["last_row"], found["drop_duplicates"], found["decimal_comma"]) == ("cut", "exact", True)
    write_policy(tmp_path, monkeypatch, "np.where(table['city'] == 'Köln', 0.1, 0.4)")
    options = ("--policy", "mine:target", "--gamma", GAMMA, "--estimator", "lstdq", "--json")
    options += ("--set", "steps=100")
    result = run_cli("evaluate", table, "--mapping", mapping, *options)
    assert result.exit_code == 0, result.stderr
    offer = np.where(np.arange(9) // 3 == 1, 0.9, 0.6)
    truth = mdp.policy_value(np.stack([1 - offer, offer], axis=1), GAMMA)
    said = json.loads(result.stdout)
    assert said["interval"]["low"] < truth < said["interval"]["high"]
    assert said["interval"]["high"] - said["interval"]["low"] < 0.5
    assert abs(said["value"] - mdp.policy_value(np.full((9, 2), 0.5), GAMMA)) > 0.1  # of another policy


def bandit_csv(path, rows=2000):
    generator = np.random.default_rng(0)
    city, x = generator.choice(["a", "b"], rows), generator.normal(size=rows)
    p = np.where(x > 0, 0.7, 0.3)
    shown = generator.random(rows) < p
    click = generator.random(rows) < np.where(city == "b", 0.2 + 0.5 * shown, 0.6 - 0.4 * shown)
    columns = {
        "user": [f"u{i}" for i in range(rows)],
        "when": [f"2024-01-01T00:{i % 60:02d}:00Z" for i in range(rows)],
        "city": city, "x": x, "arm": np.where(shown, "yes", "no"), "clicked": click.astype(int),
        "propensity": np.where(shown, p, 1 - p),
    }  # fmt: skip
    return write({name: list(values) for name, values in columns.items()}, path), city


def test_a_bandit_is_asked_about_and_then_right(tmp_path, monkeypatch):
    table, city = bandit_csv(tmp_path / "ads.csv")
    mapping = tmp_path / "ads.yaml"
    shown = run_cli("data", "inspect", table, "--out", mapping).stdout
    assert "no column says which rows belong together" in shown
    assert "one_step" not in yaml.safe_load(mapping.read_text())
    write_policy(tmp_path, monkeypatch, "np.where(table['city'] == 'b', 0.9, 0.1)")
    options = ("--mapping", mapping, "--policy", "mine:target", "--gamma", 0.9, "--estimator", "dr")
    assert_refused(run_cli("evaluate", table, *options), "--one-step", "--episode")
    options = (*options, "--one-step", "--set", "steps=200", "--json")
    said = json.loads(run_cli("evaluate", table, *options).stdout)
    truth = np.mean(np.where(city == "b", 0.2 + 0.5 * 0.9, 0.6 - 0.4 * 0.1))
    assert said["interval"]["low"] < truth < said["interval"]["high"]
    assert said["interval"]["high"] - said["interval"]["low"] < 0.2
    mapping.write_text(mapping.read_text().replace("# one_step: true ", "one_step: true "))
    info = json.loads(run_cli("data", "info", table, "--mapping", mapping, "--json").stdout)
    assert (info["episodes"], info["terminated"]) == (2000, 2000)


@pytest.mark.parametrize("suffix", ["npz", "hdf5"])
def test_rows_of_other_logs_as_episodes_of_one_step(tmp_path, suffix):
    columns = {"observations": np.ones((6, 2)), "actions": np.arange(6) % 2, "rewards": np.arange(6.0)}
    path = tmp_path / "log.npz"
    np.savez(path, **columns)
    assert_refused(run_cli("data", "info", path), "lacks terminals")
    if suffix == "hdf5":
        assert run_cli("data", "convert", path, tmp_path / "log.hdf5", "--one-step").exit_code == 0
        path = tmp_path / "log.hdf5"
    shown = json.loads(run_cli("data", "info", path, "--one-step", "--json").stdout)
    assert (shown["rows"], shown["episodes"], shown["terminated"]) == (6, 6, 6)
    shards = run_cli("data", "convert", path, tmp_path / "shards", "--one-step", "--shard-rows", 4)
    assert shards.exit_code == 0
    assert open_transitions(tmp_path / "shards").n_episodes == 6
    assert_refused(run_cli("data", "info", "minari:a/b-v0", "--one-step"), "holds episodes")


@pytest.mark.parametrize("suffix", ["npz", "h5"])
def test_arrays_of_foreign_names_are_columns_of_a_table(tmp_path, suffix):
    """Shuffled rows of whole episodes, one array of vectors; the log is that of a table of the same rows."""
    generator = np.random.default_rng(0)
    columns = {
        "obs": generator.normal(size=(60, 3)).astype(np.float32), "act": np.arange(60) % 3,
        "rew": generator.normal(size=(60, 1)).astype(">f8"), "ep_id": np.repeat(np.arange(12), 5),
        "t": np.tile(np.arange(5), 12), "done": np.tile(np.arange(5) == 4, 12),
    }  # fmt: skip
    order = generator.permutation(60)
    path, mapping = tmp_path / f"log.{suffix}", tmp_path / "m.yaml"
    mixed = {name: column[order] for name, column in columns.items()} | {"version": np.arange(2)}
    if suffix == "npz":
        mixed["act"] = np.array(["go", "stay", "turn"])[mixed["act"]]
        np.savez(path, **mixed)
    else:
        with h5py.File(path, "w") as file:
            for name, column in mixed.items():
                file[f"data/{name}" if name == "rew" else name] = column
    assert_refused(run_cli("data", "info", path), "lacks observations", f"koffline data inspect {path}")
    assert inspect_table(path).problems == []
    assert run_cli("data", "inspect", path, "--out", mapping).exit_code == 0
    log = open_transitions(path, mapping=mapping)
    first = np.unique(columns["ep_id"][order], return_index=True)[1]  # episodes by first appearance
    rows = np.concatenate([np.arange(5) + 5 * columns["ep_id"][order][i] for i in np.sort(first)])
    np.testing.assert_array_equal(log.observations, columns["obs"][rows])
    np.testing.assert_array_equal(log.actions, columns["act"][rows])
    np.testing.assert_array_equal(log.rewards, columns["rew"][rows, 0])
    assert (len(log), log.n_episodes, int(log.terminated.sum())) == (60, 12, 12)
    shards = run_cli("data", "convert", path, tmp_path / "shards", "--mapping", mapping, "--shard-rows", 20)
    assert shards.exit_code == 0
    np.testing.assert_array_equal(open_transitions(tmp_path / "shards").rewards, log.rewards)


class TestTimes:
    """inspect says how each time is read, with examples."""

    @pytest.mark.parametrize(
        ("texts", "said"),
        [
            (["2024-10-27T02:10:00+01:00", "2024-10-27T02:30:00+02:00", "2024-10-27T05:30:00Z"],
             "times with a UTC offset, in the order of instants, 2024-10-27 00:30:00 UTC to 2024-10-27 "
             "05:30:00 UTC: '2024-10-27T02:10:00+01:00' is 2024-10-27 01:10:00 UTC"),
            (["2024-10-27 02:10", "2024-10-27 02:30", "2024-10-27 02:40"],
             "times without a UTC offset, in the order of instants, 2024-10-27 02:10:00 UTC to 2024-10-27 "
             "02:40:00 UTC: '2024-10-27 02:10' is 2024-10-27 02:10:00 UTC"),
            (["2024-10-27", "2024-10-28", "2024-10-29"], "dates, in the order of instants, 2024-10-27 00:00"),
            (["09:30", "10:45:00", "23:59:59"], "times of day, in the order of instants, 09:30:00 to 23:"),
            ([7, 8, 9], "numbers, in the order of their size"),
        ],
    )  # fmt: skip
    def test_rule_and_examples(self, tmp_path, texts, said):
        table = walk([3] * 4, [True] * 4, t=None, when=texts * 4)
        for path in (tmp_path / "log.csv", tmp_path / "log.parquet"):
            note = inspect_table(write(table, path)).notes[0]
            assert note.startswith("times in when: ")
            assert said in note

    @pytest.mark.parametrize(
        "form", ["202410{d}T0930", "2024-W{d}-1", "Sat, {d} Oct 2024 21:39:31 GMT", "10/{d}/2024", "9:{d} AM"]
    )
    def test_times_in_other_forms_are_a_problem_and_no_feature(self, tmp_path, form):
        table = walk([5] * 12, [True] * 12, t=None, when=[form.format(d=10 + i % 20) for i in range(60)])
        found = inspect_table(write(table, tmp_path / "log.csv"))
        assert found.mapping["time"] == "when"
        assert [said for said in found.problems if "in row 1, no number or time that is read" in said]

    def test_mixed_episodes_without_a_time_are_a_problem_and_reach_the_notes(self, tmp_path):
        """Sorted rows need no time: the table's order is theirs."""
        rows, order = walk([5] * 12, [True] * 12, t=None), np.argsort(np.arange(60) % 5, kind="stable")
        assert inspect_table(write(rows, tmp_path / "sorted.parquet")).problems == []
        mixed = {name: [column[i] for i in order] for name, column in rows.items()}
        (problem,) = inspect_table(write(mixed, tmp_path / "mixed.parquet")).problems
        assert problem.startswith("order: rows of several episodes are mixed; without a time column")
        mapping = {name: column for name, column in MAPPING.items() if name != "time"}
        assert problem in open_transitions(tmp_path / "mixed.parquet", mapping=mapping).metadata.notes


class TestGuesses:
    def test_roles_of_a_plain_table(self, tmp_path):
        lengths, n = [5] * 12, 60
        table = write(
            walk(lengths, [True] * 12, p=[0.5] * n, row=range(n), constant=[1] * n,
                 note=[f"n{i}" for i in range(n)], next_x_1=range(n), next_x_2=range(n)),
            tmp_path / "log.parquet",
        )  # fmt: skip
        found = inspect_table(table)
        assert found.problems == []
        roles = {each.name: each.role for each in found.columns}
        assert roles == {
            "id": "episode", "t": "time", "x_1": "observations", "x_2": "observations", "a": "action",
            "r": "reward", "done": "terminal", "p": "behavior_probability", "row": "ignored",
            "constant": "ignored", "note": "ignored",
            "next_x_1": "next_observations", "next_x_2": "next_observations",
        }  # fmt: skip
        assert all(each.reason for each in found.columns)
        mapping = tmp_path / "mapping.yaml"
        mapping.write_text(found.to_yaml())
        assert len(open_transitions(table, mapping=mapping)) == n

    def test_every_problem_is_listed(self, tmp_path):
        rows = "id,t,x,y,a,r,done\n" + "\n".join(
            f"{i // 5},{i % 5},{'' if i == 3 else i * 0.5},{'oops' if i == 7 else i},{i % 2},"
            f"{'' if i == 4 else i},{'maybe' if i == 9 else int(i % 5 == 4)}"
            for i in range(40)
        )
        found = inspect_table(write_text(rows + "\n", tmp_path / "log.csv"))
        said = " | ".join(found.problems)
        for words in (
            "x: 1 value is missing", "r: 1 value is missing", "done: 1 of 40", "its name says terminal",
            "y: 1 of 40 values is no number ('oops'); write a number there, or leave it empty",
        ):  # fmt: skip
            assert words in said
        assert "y" in found.mapping["observations"]
        assert "y" not in found.mapping.get("encode", {})
        with pytest.raises(DataError, match=r"y.*'oops'"):
            open_transitions(tmp_path / "log.csv", mapping={**found.mapping, "last_row": "cut"})

    def test_a_feature_that_tells_the_action_is_a_problem(self, tmp_path):
        acts, prices = ["mail", "none", "voucher"] * 20, [0.2, 0.0, 0.9] * 20
        table = walk([5] * 12, [True] * 12, a=acts, price=prices, size=[0, 1, 0, 2] * 15)
        found = inspect_table(write(table, tmp_path / "log.parquet"))
        (problem,) = found.problems
        assert problem == "price: each value goes with one a only; leave it out if it is what the a led to"
        assert f"# problem: {problem}\n" in found.to_yaml()

    def test_gaps_in_regular_irregular_and_jittered_times(self, tmp_path):
        generator, even = np.random.default_rng(0), np.arange(2000.0)
        jittered = even + generator.uniform(-0.2, 0.2, 2000)
        irregular = np.cumsum(generator.exponential(size=2000))
        for t, head in (
            (even, ""), (irregular, ""), (jittered, ""),
            (np.cumsum(generator.lognormal(0.0, 0.5, 2000)), ""),
            (even + 7.0 * (even > 999), "few gaps: 1 step is longer than others"),
            (irregular + 5000.0 * (even > 999), "few gaps: 1 step is longer than others"),
            (jittered[generator.random(2000) > 0.05], "gaps: "),
        ):  # fmt: skip
            n = len(t)
            table = {"id": [0] * n, "t": t, "x": even[:n] % 7, "a": np.arange(n) % 2, "r": even[:n] % 3}
            notes = inspect_table(write(table, tmp_path / "log.parquet")).notes
            gaps = [note for note in notes if "longer than others" in note]
            assert len(gaps) == bool(head)
            assert all(note.startswith(head) for note in gaps)
        assert 4.0 < float(gaps[0].split("about ")[1].split("%")[0]) < 6.0  # of rows that were dropped, 5 %

    @pytest.mark.parametrize("suffix", ["parquet", "csv"])
    def test_whole_numbers_that_are_dates(self, tmp_path, suffix):
        days = pl.date_range(pl.date(2024, 1, 1), pl.date(2024, 4, 9), eager=True).dt.strftime("%Y%m%d")
        table = {"id": [0] * 100, "t": days.cast(pl.Int64), "x": np.arange(100.0) % 7, "a": [0, 1] * 50}
        notes = inspect_table(write(table | {"r": [1.0, 2.0] * 50}, tmp_path / f"log.{suffix}")).notes
        assert not any("gaps" in note for note in notes)  # 20240131 and 20240201 follow each other

    def test_values_of_last_rows_alone_may_be_ends(self, tmp_path):
        table = walk([5] * 12, [True] * 12, done=None)
        table["how it is"] = ["ok", "ok", "ok", "ok", "gone"] * 6 + ["ok"] * 30
        repeated = {name: [*column, column[4]] for name, column in table.items()}
        found = inspect_table(write(repeated, tmp_path / "log.csv"))
        (asked,) = (each for each in found.problems if "last rows" in each)
        assert asked.endswith("if the world ended there, say terminal: \"`how it is` == 'gone'\"")
        assert "how it is" not in found.mapping["observations"]
        told = {**found.mapping, "terminal": "`how it is` == 'gone'"}
        assert open_transitions(tmp_path / "log.csv", mapping=told).terminated.sum() == 6

    def test_a_comma_before_three_digits_is_asked_about(self, tmp_path):
        table = walk([5] * 12, [True] * 12)
        rewards = [f"{1 + row // 30},{row:03d}" for row in range(60)]
        path = write(table | {"r": rewards}, tmp_path / "log.parquet")
        found = inspect_table(path)
        assert any(p.startswith("r: '1,000' may be a thousand") for p in found.problems)
        assert "decimal_comma" not in found.mapping
        told = {**inspect_table(write(table, tmp_path / "plain.parquet")).mapping}
        with pytest.raises(DataError, match="no comma if that marks thousands"):
            open_transitions(path, mapping=told)

    def test_texts_that_count_steps_are_no_state_and_a_clock_needs_its_date(self, tmp_path):
        table = walk([5] * 12, [True] * 12)
        texts = {"t": [f"step {step}" for step in table["t"]]}
        found = inspect_table(write(table | texts, tmp_path / "log.csv"))
        assert any(p.startswith("t: its name says time, its values do not") for p in found.problems)
        assert "t" not in found.mapping["observations"]
        halves = {"t": None, "day": ["2024-01-02"] * 60, "time": ["09:30", "10:00"] * 30}
        found = inspect_table(write(walk([5] * 12, [True] * 12, **halves), tmp_path / "log.csv"))
        assert found.problems[0] == "time: times of day beside dates; write both into one column"

    def test_actions_keep_their_numbers_where_a_category_is_missing(self, tmp_path):
        """A policy's "stop" is no other action in a log that has no "pass"; texts say it without numbers."""
        acts = ["go", "pass", "stop", "go", "stop"] * 12
        table = walk([5] * 12, [True] * 12, a=acts)
        mapping = tmp_path / "mapping.yaml"
        mapping.write_text(inspect_table(write(table, tmp_path / "all.parquet")).to_yaml())
        fewer = {name: np.array(column)[np.array(acts) != "pass"] for name, column in table.items()}
        log = open_transitions(write(fewer, tmp_path / "fewer.parquet"), mapping=mapping)
        assert log.action_space.n == 3
        assert sorted(np.unique(log.actions)) == [0, 2]
        write_transitions(log, tmp_path / "log.hdf5")
        for each in (log, open_transitions(tmp_path / "log.hdf5")):
            features = each.metadata.features
            asked = (each.action_space, each.observation_shape, "mine", features)
            policy = as_policy(lambda table: np.where(table["x_1"] > 0, "stop", "pass"), *asked)
            expected = np.eye(3)[np.where(each.observations[:, 0] > 0, 2, 1)]
            np.testing.assert_array_equal(policy.probabilities(each.observations), expected)
            named = {"stop": 0.2, "go": 0.7, "pass": 0.1}  # in any order
            for kind in (pl.DataFrame, dict):
                shares = {name: np.full(len(each), share) for name, share in named.items()}
                policy = as_policy(lambda states, shares=shares, kind=kind: kind(shares), *asked)
                np.testing.assert_allclose(policy.probabilities(each.observations)[0], [0.7, 0.1, 0.2])
            for output, words in (
                ({"go": np.ones(len(each)), "leave": 0.0}, "columns of the output are go, leave; name them"),
                ({"go": np.ones(len(each))}, "columns of the output are go; name them as the log's"),
                (["stand"] * len(each), "is 'stand', no action of this log; its actions are go, pass, stop"),
            ):
                with pytest.raises(PolicyError, match=words):
                    as_policy(lambda states, output=output: output, *asked).probabilities(each.observations)

    @pytest.mark.parametrize(
        "names",
        [
            ['"a,b"', '"^.*$"', '"# x: y"', "*"],
            ["\u202eevil", "{k}", "- d", "&a"],
            ["class", "`q`", "été", "x?"],
        ],
    )
    def test_hostile_names_survive_the_file(self, tmp_path, names):
        head = f"id,t,action,reward,{','.join(names)}\n"
        body = "".join(
            f"{i // 5},{i % 5},{i % 2},{i * 0.5},{i * 0.1},{i % 3},{i % 7},{i * 2.5}\n" for i in range(40)
        )
        table, mapping = write_text(head + body, tmp_path / "log.csv"), tmp_path / "m.yaml"
        assert run_cli("data", "inspect", table, "--out", mapping).exit_code == 0
        log = open_transitions(table, mapping=mapping)
        assert log.feature_names == tuple(name.strip('"') for name in names if name not in ("*", '"^.*$"'))
        np.testing.assert_allclose(log.observations[:4, 0], [0, 0.1, 0.2, 0.3])

    @pytest.mark.parametrize("text", ["x,a,r\n1,0,1\n", "x,a,r\n,0,1\n,1,1\n", "user,city\n" + "1,z\n" * 50])
    def test_tables_that_say_little(self, tmp_path, text):
        found = run_cli("data", "inspect", write_text(text, tmp_path / "log.csv"))
        assert found.exit_code == 0
        assert "problem 1: no column" in found.stdout

    def test_what_cannot_be_looked_at_and_a_file_that_is_not_replaced(self, tmp_path):
        for text, words in (("id,t,x,a,r\n", "has no rows"), ('a,"new\nline"\n1,2\n', "a line break")):
            assert_refused(run_cli("data", "inspect", write_text(text, tmp_path / "log.csv")), words)
        table, out = write(walk(), tmp_path / "log.parquet"), tmp_path / "m.yaml"
        write_npz(open_transitions(table, mapping=MAPPING), tmp_path / "log.npz")
        assert_refused(run_cli("data", "inspect", tmp_path / "log.npz", "--out", out), "no mapping")
        out.write_text("mine")
        assert_refused(run_cli("data", "inspect", table, "--out", out), "exists already")
        assert out.read_text() == "mine"
        shown = run_cli("data", "inspect", table, "--out", out, "--force", "--json").stdout
        assert json.loads(shown)["rows"] == 8
