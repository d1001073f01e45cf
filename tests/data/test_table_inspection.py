"""A stranger's table: a mapping is guessed, and all that is wrong is listed."""

import json
from datetime import timedelta

import numpy as np
import polars as pl
import pytest
import yaml

import koffline
from koffline.data.flat import write_npz
from koffline.data.sources import open_transitions, write_transitions
from koffline.data.table.inspection import inspect_table
from koffline.errors import DataError, PolicyError
from koffline.policy_specs import as_policy
from tests.data.logs import write_arrays
from tests.data.table_rows import MAPPING, walk, write, write_text
from tests.refusals import assert_refused, one_line, refused, run_cli, succeed


def look(folder, name="log.csv", **columns):
    """What inspect finds in twelve whole episodes of five rows with these columns."""
    return inspect_table(write(walk([5] * 12, [True] * 12, **columns), folder / name))


@pytest.mark.parametrize("suffix", ["npz", "h5"])
def test_arrays_of_foreign_names_are_columns_of_a_table(tmp_path, suffix):
    """Shuffled rows of whole episodes, one array of vectors; the log is that of a table
    of the same rows.
    """
    generator = np.random.default_rng(0)
    columns = {
        "obs": generator.normal(size=(60, 3)).astype(np.float32),
        "act": np.arange(60) % 3,
        "rew": generator.normal(size=(60, 1)).astype(">f8"),
        "ep_id": np.repeat(np.arange(12), 5),
        "t": np.tile(np.arange(5), 12),
        "done": np.tile(np.arange(5) == 4, 12),
    }
    order = generator.permutation(60)
    path = tmp_path / f"log.{suffix}"
    mapping = tmp_path / "m.yaml"
    mixed = {name: column[order] for name, column in columns.items()} | {
        "version": np.arange(2)
    }
    if suffix == "npz":
        mixed["act"] = np.array(["go", "stay", "turn"])[mixed["act"]]
        np.savez(path, **mixed)
    else:
        mixed["data/rew"] = mixed.pop("rew")
        write_arrays(path, mixed)
    assert_refused(
        run_cli("data", "info", path),
        "lacks observations",
        f"koffline data inspect {path}",
    )
    assert inspect_table(path).problems == []
    assert run_cli("data", "inspect", path, "--out", mapping).exit_code == 0
    log = open_transitions(path, mapping=mapping)
    first = order[columns["t"][order] == 0]  # episodes by their first steps
    rows = np.concatenate([np.arange(5) + i for i in first])
    np.testing.assert_array_equal(log.observations, columns["obs"][rows])
    np.testing.assert_array_equal(log.actions, columns["act"][rows])
    np.testing.assert_array_equal(log.rewards, columns["rew"][rows, 0])
    assert (len(log), log.n_episodes, int(log.terminated.sum())) == (60, 12, 12)
    succeed(
        "data",
        "convert",
        path,
        tmp_path / "shards",
        "--mapping",
        mapping,
        "--shard-rows",
        20,
    )
    np.testing.assert_array_equal(
        open_transitions(tmp_path / "shards").rewards, log.rewards
    )


class TestTimes:
    """inspect says how each time is read, with examples."""

    @pytest.mark.parametrize(
        ("texts", "words"),
        [
            (
                [
                    "2024-10-27T02:10:00+01:00",
                    "2024-10-27T02:30:00+02:00",
                    "2024-10-27T05:30:00Z",
                ],
                (
                    "times with a UTC offset, in the order of instants, 2024-10-27"
                    " 00:30:00 UTC to 2024-10-27 05:30:00 UTC:"
                    " '2024-10-27T02:10:00+01:00' is 2024-10-27 01:10:00 UTC"
                ),
            ),
            (
                ["2024-10-27 02:10", "2024-10-27 02:30", "2024-10-27 02:40"],
                (
                    "times without a UTC offset, in the order of instants, 2024-10-27"
                    " 02:10:00 UTC to 2024-10-27 02:40:00 UTC: '2024-10-27 02:10' is"
                    " 2024-10-27 02:10:00 UTC"
                ),
            ),
            (
                ["2024-10-27", "2024-10-28", "2024-10-29"],
                "dates, in the order of instants, 2024-10-27 00:00",
            ),
            ([7, 8, 9], "numbers, in the order of their size"),
        ],
    )
    def test_rule_and_examples(self, tmp_path, texts, words):
        table = walk([3] * 4, [True] * 4, t=None, when=texts * 4)
        for path in (tmp_path / "log.csv", tmp_path / "log.parquet"):
            note = inspect_table(write(table, path)).notes[0]
            assert note.startswith("times in when: ")
            assert words in note

    def test_mixed_episodes_without_a_time_are_a_problem_and_reach_the_notes(
        self, tmp_path
    ):
        """Sorted rows need no time: the table's order is theirs."""
        rows = walk([5] * 12, [True] * 12, t=None)
        order = np.argsort(np.arange(60) % 5, kind="stable")
        assert inspect_table(write(rows, tmp_path / "sorted.parquet")).problems == []
        mixed = {name: [column[i] for i in order] for name, column in rows.items()}
        (problem,) = inspect_table(write(mixed, tmp_path / "mixed.parquet")).problems
        assert problem.startswith(
            "order: rows of several episodes are mixed; without a time column"
        )
        mapping = {name: column for name, column in MAPPING.items() if name != "time"}
        assert (
            problem
            in open_transitions(
                tmp_path / "mixed.parquet", mapping=mapping
            ).metadata.notes
        )


class TestGuesses:
    def test_roles_of_a_plain_table(self, tmp_path):
        lengths = [5] * 12
        n = 60
        table = write(
            walk(
                lengths,
                [True] * 12,
                p=[0.5] * n,
                row=range(n),
                constant=[1] * n,
                note=[f"n{i}" for i in range(n)],
                next_x_1=range(n),
                next_x_2=range(n),
            ),
            tmp_path / "log.parquet",
        )
        inspection = inspect_table(table)
        (unlinked,) = inspection.problems  # next_x are made up
        assert "not those of the row below" in unlinked
        roles = {profile.name: profile.role for profile in inspection.columns}
        assert roles == {
            "id": "episode",
            "t": "time",
            "x_1": "observations",
            "x_2": "observations",
            "a": "action",
            "r": "reward",
            "done": "terminal",
            "p": "behavior_probability",
            "row": "ignored",
            "constant": "ignored",
            "note": "ignored",
            "next_x_1": "next_observations",
            "next_x_2": "next_observations",
        }
        assert all(profile.reason for profile in inspection.columns)
        mapping = tmp_path / "mapping.yaml"
        mapping.write_text(inspection.to_yaml())
        assert len(open_transitions(table, mapping=mapping)) == n

    def test_ids_inside_a_user_whose_rows_share_times_or_end_often_are_episodes(
        self, tmp_path
    ):
        row = np.arange(60)
        ids = {"id": row // 5, "user_id": row // 15, "order_id": row % 6 // 2}
        for left_out in ("t", "done"):
            roles = look(tmp_path, **ids, **{left_out: None}).mapping
            assert (roles["episode"], roles["cluster"]) == ("id", "user_id")
        rows = {
            **ids,
            "id": row,
            "t": [timedelta(int(days)) for days in row],
            "done": None,
        }
        assert look(tmp_path, "rows.parquet", **rows).mapping["episode"] == "user_id"

    def test_every_problem_is_listed(self, tmp_path):
        rows = "id,t,x,y,a,r,done\n" + "\n".join(
            f"{i // 5},{i % 5},{'' if i == 3 else i * 0.5},{'oops' if i == 7 else i},{i % 2},"
            f"{'' if i == 4 else i},{'maybe' if i == 9 else int(i % 5 == 4)}"
            for i in range(40)
        )
        inspection = inspect_table(write_text(rows + "\n", tmp_path / "log.csv"))
        all_problems = " | ".join(inspection.problems)
        for words in (
            "x: 1 value is missing",
            "r: 1 value is missing",
            "done: 1 of 40",
            "its name says terminal",
            (
                "y: 1 of 40 values is no number ('oops'); write a number there, or"
                " leave it empty"
            ),
        ):
            assert words in all_problems
        assert "y" in inspection.mapping["observations"]
        assert "y" not in inspection.mapping.get("encode", {})
        with pytest.raises(DataError, match=r"y.*'oops'"):
            open_transitions(
                tmp_path / "log.csv", mapping={**inspection.mapping, "last_row": "cut"}
            )

    @pytest.mark.parametrize(
        ("columns", "problems", "mapping"),
        [
            *(
                (
                    {
                        "t": None,
                        "when": [form.format(d=10 + i % 20) for i in range(60)],
                    },
                    [
                        f"column when holds {form.format(d=10)!r} in row 1, no number"
                        " or time that is read"
                    ],
                    {"time": "when"},
                )
                for form in (
                    "202410{d}T0930",
                    "2024-W{d}-1",
                    "Sat, {d} Oct 2024 21:39:31 GMT",
                    "10/{d}/2024 noon",
                    "9:{d} AM",
                )
            ),
            (
                {"t": [f"step {row % 5}" for row in range(60)]},
                ["t: its name says time, its values do not"],
                {"time": None},
            ),
            (
                {"a": ["mail", "none", "voucher"] * 20, "x_1": [0.2, 0.0, 0.9] * 20},
                ["x_1: each value goes with one a only: left out, as if it came of it"],
                {},
            ),
            (
                {"r": [f"{1 + row // 30},{row:03d}" for row in range(60)]},
                ["r: '1,000' may be a thousand", "no column looks like reward"],
                {"decimal_comma": None},
            ),
        ],
    )
    def test_what_may_be_meant_in_two_ways_is_a_problem(
        self, tmp_path, columns, problems, mapping
    ):
        inspection = look(tmp_path, "log.parquet", **columns)
        for problem, words in zip(inspection.problems, problems, strict=True):
            assert problem.startswith(words)
            assert f"# problem: {problem}\n" in inspection.to_yaml()
        assert {name: inspection.mapping.get(name) for name in mapping} == mapping
        # texts of times are no state
        assert set(inspection.mapping["observations"]) <= {
            "x_1",
            "x_2",
        }
        if "r" in columns:
            guessed = look(tmp_path, "plain.parquet").mapping
            with pytest.raises(DataError, match="no comma if that marks thousands"):
                open_transitions(tmp_path / "log.parquet", mapping=guessed)

    @pytest.mark.parametrize("suffix", ["parquet", "csv"])
    def test_gaps_in_regular_irregular_and_jittered_times(self, tmp_path, suffix):
        """20240131 and 20240201 follow each other."""
        days = pl.date_range(
            pl.date(2024, 1, 1), pl.date(2024, 4, 9), eager=True
        ).dt.strftime("%Y%m%d")
        generator = np.random.default_rng(0)
        even = np.arange(2000.0)
        jittered = even + generator.uniform(-0.2, 0.2, 2000)
        irregular = np.cumsum(generator.exponential(size=2000))
        for t, head in (
            (even, ""),
            (irregular, ""),
            (jittered, ""),
            (days.cast(pl.Int64), ""),
            (np.cumsum(generator.lognormal(0.0, 0.5, 2000)), ""),
            (even + 7.0 * (even > 999), "few gaps: 1 step is longer than others"),
            (
                irregular + 5000.0 * (even > 999),
                "few gaps: 1 step is longer than others",
            ),
            (jittered[generator.random(2000) > 0.05], "gaps: "),
        ):
            n = len(t)
            table = {
                "id": [0] * n,
                "t": t,
                "x": even[:n] % 7,
                "a": np.arange(n) % 2,
                "r": even[:n] % 3,
            }
            notes = inspect_table(write(table, tmp_path / f"log.{suffix}")).notes
            gaps = [note for note in notes if "longer than others" in note]
            assert len(gaps) == bool(head)
            assert all(note.startswith(head) for note in gaps)
        # of rows that were dropped, 5 %
        assert 4.0 < float(gaps[0].split("about ")[1].split("%")[0]) < 6.0

    def test_values_of_last_rows_alone_may_be_ends(self, tmp_path):
        usual = ["ok", "ok", "ok", "ok"]
        ends = {"how it is": [*usual, "gone"] * 6 + [*usual, "left"] * 6}
        table = walk([5] * 12, [True] * 12, done=None, **ends)
        repeated = {name: [*column, column[4]] for name, column in table.items()}
        inspection = inspect_table(write(repeated, tmp_path / "log.csv"))
        (question,) = (
            problem for problem in inspection.problems if "last rows" in problem
        )
        both = "max(`how it is` == 'gone', `how it is` == 'left')"
        assert question.endswith(f'if the world ended there, say terminal: "{both}"')
        assert "how it is" not in inspection.mapping["observations"]
        for ids in (np.repeat([0.0, 1.0], 30), np.repeat(["u1", "u2"], 30)):
            status = [*usual, "gone"] * 12
            session = np.arange(60) // 5
            known = look(
                tmp_path, "known.csv", id=None, session=session, user=ids, status=status
            )
            assert set(known.mapping["observations"]) <= {"x_1", "x_2"}
            assert known.problems[0].startswith(
                "status: 'gone': in last rows of episodes alone; left out"
            )
            assert known.problems[-1].endswith("name it (--cluster user)")
        answered = {**inspection.mapping, "terminal": "`how it is` == 'gone'"}
        assert (
            open_transitions(tmp_path / "log.csv", mapping=answered).terminated.sum()
            == 6
        )
        table["how it is"] = [
            None if text == "ok" else text for text in table["how it is"]
        ]
        again = inspect_table(write(table, tmp_path / "log.csv"))
        # an empty cell is a value, and no end
        assert any(both in problem for problem in again.problems)
        answered["terminal"] = both
        assert (
            open_transitions(tmp_path / "log.csv", mapping=answered).terminated.sum()
            == 12
        )

    def test_actions_keep_their_numbers_where_a_category_is_missing(self, tmp_path):
        """A policy's "stop" is no other action in a log that has no "pass"; texts say
        it without numbers.
        """
        acts = ["go", "pass", "stop", "go", "stop"] * 12
        table = walk([5] * 12, [True] * 12, a=acts)
        mapping = tmp_path / "mapping.yaml"
        mapping.write_text(
            inspect_table(write(table, tmp_path / "all.parquet")).to_yaml()
        )
        fewer = {
            name: np.array(column)[np.array(acts) != "pass"]
            for name, column in table.items()
        }
        log = open_transitions(
            write(fewer, tmp_path / "fewer.parquet"), mapping=mapping
        )
        assert log.action_space.n == 3
        assert sorted(np.unique(log.actions)) == [0, 2]
        write_transitions(log, tmp_path / "log.hdf5")
        for held in (log, open_transitions(tmp_path / "log.hdf5")):
            features = held.metadata.features
            arguments = (held.action_space, held.observation_shape, "mine", features)
            policy = as_policy(
                lambda table: np.where(table["x_1"] > 0, "stop", "pass"), *arguments
            )
            expected = np.eye(3)[np.where(held.observations[:, 0] > 0, 2, 1)]
            np.testing.assert_array_equal(
                policy.probabilities(held.observations), expected
            )
            named = {"stop": 0.2, "go": 0.7, "pass": 0.1}  # in any order
            for kind in (pl.DataFrame, dict):
                shares = {
                    name: np.full(len(held), share) for name, share in named.items()
                }
                policy = as_policy(
                    lambda states, shares=shares, kind=kind: kind(shares), *arguments
                )
                np.testing.assert_allclose(
                    policy.probabilities(held.observations)[0], [0.7, 0.1, 0.2]
                )
            for output, words in (
                (
                    {"go": np.ones(len(held)), "leave": 0.0},
                    "columns of the output are go, leave; name them",
                ),
                (
                    {"go": np.ones(len(held))},
                    "columns of the output are go; name them as the log's",
                ),
                (
                    ["stand"] * len(held),
                    "is 'stand', no action of this log; its actions are go, pass, stop",
                ),
            ):
                with pytest.raises(PolicyError, match=words):
                    as_policy(
                        lambda states, output=output: output, *arguments
                    ).probabilities(held.observations)

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
            f"{i // 5},{i % 5},{i % 2},{i * 0.5},{i * 0.1},{i % 3},{i % 7},{i * 2.5}\n"
            for i in range(40)
        )
        table = write_text(head + body, tmp_path / "log.csv")
        mapping = tmp_path / "m.yaml"
        assert run_cli("data", "inspect", table, "--out", mapping).exit_code == 0
        written = yaml.safe_load(mapping.read_text())
        log = open_transitions(table, mapping={**written, "last_row": "cut"})
        assert log.feature_names == tuple(
            name.strip('"') for name in names if name not in ("*", '"^.*$"')
        )
        np.testing.assert_allclose(log.observations[:4, 0], [0, 0.1, 0.2, 0.3])

    @pytest.mark.parametrize(
        "text", ["x,a,r\n1,0,1\n", "x,a,r\n,0,1\n,1,1\n", "user,city\n" + "1,z\n" * 50]
    )
    def test_tables_that_say_little(self, tmp_path, text):
        output = succeed("data", "inspect", write_text(text, tmp_path / "log.csv"))
        assert "problem 1: no column" in output

    def test_what_cannot_be_looked_at_and_a_file_that_is_not_replaced(self, tmp_path):
        for text, words in (
            ("id,t,x,a,r\n", "has no rows"),
            ('a,"new\nline"\n1,2\n', "a line break"),
        ):
            assert_refused(
                run_cli("data", "inspect", write_text(text, tmp_path / "log.csv")),
                words,
            )
        table = write(walk(), tmp_path / "log.parquet")
        out = tmp_path / "m.yaml"
        write_npz(open_transitions(table, mapping=MAPPING), tmp_path / "log.npz")
        assert_refused(
            run_cli("data", "inspect", tmp_path / "log.npz", "--out", out), "no mapping"
        )
        out.write_text("mine")
        assert_refused(
            run_cli("data", "inspect", table, "--out", out), "exists already"
        )
        assert out.read_text() == "mine"
        shown = run_cli(
            "data", "inspect", table, "--out", out, "--force", "--json"
        ).stdout
        assert json.loads(shown)["rows"] == 8


class TestAnswers:
    FRAME = pl.DataFrame(
        {
            "visit": np.repeat(np.arange(40), 5),
            "t": np.tile(np.arange(5), 40),
            "x": np.random.default_rng(0).normal(size=200),
            "push": ["left", "right"] * 100,
            "points": np.random.default_rng(1).normal(size=200),
            "fell": np.tile([False, False, False, False, True], 40),
        }
    )

    def test_a_frame_is_told_of_the_function(self):
        problems = " ".join(koffline.inspect(self.FRAME).problems)
        assert "say which one it is (koffline.inspect with action='COLUMN')" in problems
        assert "--action" not in problems

    def test_an_inspection_may_stand_for_its_mapping(self):
        inspection = koffline.inspect(self.FRAME, action="push", reward="points")
        with one_line(DataError, "in Python: inspection.answer(terminal='fell')"):
            koffline.open_transitions(self.FRAME, mapping=inspection)
        inspection.answer(terminal="fell")  # as printed
        log = koffline.open_transitions(self.FRAME, mapping=inspection)
        by_dict = koffline.open_transitions(self.FRAME, mapping=inspection.mapping)
        assert log.metadata.sha256 == by_dict.metadata.sha256
        assert log.n_episodes == 40

    @pytest.mark.parametrize("roles", [("action",), ("reward",), ("action", "reward")])
    def test_what_is_named_as_action_or_reward_is_no_observation(self, roles):
        named = {"action": "push", "reward": "points"}
        known = {role: name for role, name in named.items() if role not in roles}
        inspection = koffline.inspect(self.FRAME, **known)
        lacking = [f"'{role}': '{role[0]}'" for role in roles]
        with one_line(DataError, f"lacks {', '.join(roles)}", ", ".join(lacking)):
            koffline.open_transitions(self.FRAME, mapping=inspection)
        inspection.mapping["observations"] = ["x", "push", "points"]
        inspection.answer(terminal="fell", **named)
        assert inspection.mapping["observations"] == ["x"]
        log = koffline.open_transitions(self.FRAME, mapping=inspection)
        assert log.rewards.tolist() == self.FRAME["points"].to_list()

    @pytest.mark.parametrize("mapping", [3, ["reward"], 0.5, FRAME])
    def test_what_is_no_mapping_is_refused_in_one_line(self, mapping):
        with refused(DataError, "mapping is of type .*koffline.inspect"):
            koffline.open_transitions(self.FRAME, mapping=mapping)

    @pytest.mark.parametrize("answer", [{"terminal": "fell"}, {"last_row": "cut"}])
    def test_an_answer_takes_the_question_out(self, answer):
        inspection = koffline.inspect(self.FRAME, action="push", reward="points")
        assert "last_row" in inspection.open
        inspection.answer(**answer)
        assert inspection.open == {}
        assert {key: inspection.mapping[key] for key in answer} == answer
        assert ("last_row" in inspection.mapping) == ("last_row" in answer)
        log = koffline.open_transitions(self.FRAME, mapping=inspection.mapping)
        assert log.terminated.any() == ("terminal" in answer)

    def test_an_answer_takes_its_problem_out(self):
        inspection = koffline.inspect(self.FRAME)
        answers = {"action": "push", "reward": "points", "terminal": "fell"}
        beginnings = ["fell: ", "no column looks like action", "no column looks like r"]
        assert len(inspection.problems) == len(beginnings)
        for key, begins in zip(answers, [*beginnings[1:], beginnings[0]], strict=True):
            assert any(text.startswith(begins) for text in inspection.problems)
            inspection.answer(**{key: answers[key]})
            assert not any(text.startswith(begins) for text in inspection.problems)
        assert "problem" not in str(inspection)

    @pytest.mark.parametrize("answer", [{"terminal": "how: died"}, {"last_row": "cut"}])
    def test_an_answer_on_ends_takes_the_problem_of_their_column_out(self, answer):
        frame = self.FRAME.drop("fell").with_columns(
            how=pl.Series((["on"] * 4 + ["died"]) * 40)
        )
        inspection = koffline.inspect(frame, action="push", reward="points")
        (problem,) = inspection.problems
        assert problem.startswith("how: 'died': in last rows of episodes alone")
        inspection.answer(**answer)
        assert inspection.problems == []

    def test_what_is_no_key_is_one_line(self):
        inspection = koffline.inspect(self.FRAME, action="push", reward="points")
        with one_line(DataError, "'terminals', which is no key of a mapping; did you"):
            inspection.answer(terminals="fell")
