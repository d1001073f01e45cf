"""Which columns inspect takes for ends, states and their future, in the layouts in
which people keep logs.

Each case is a small log with right values: the mapping that inspect proposes must lead
to them, or be open.
"""

import re
import zlib

import numpy as np
import polars as pl
import pytest
import yaml

from koffline.data.sources import open_transitions
from koffline.data.table.column_names import Flag, earlier_name, flag_of
from koffline.data.table.inspection import inspect_table
from koffline.data.table.mapping import TableMapping
from koffline.errors import DataError
from tests.data.table_rows import write
from tests.refusals import assert_refused, one_line, run_cli, succeed

CUT_AFTER = 12


def walks(seed=0, n=120, end=0.1, limit=CUT_AFTER, dims=2):
    """Episodes of noisy walks that end by themselves with probability ``end``, or are
    cut after ``limit``.
    """
    generator = np.random.default_rng(seed)
    rows = []
    for episode in range(n):
        state = generator.normal(size=dims).round(3)
        for t in range(limit):
            action = int(generator.integers(2))
            following = (
                0.8 * state + 0.3 * (2 * action - 1) + 0.3 * generator.normal(size=dims)
            ).round(3)
            done = bool(generator.random() < end)
            reward = round(float(state[0] + 0.1 * generator.normal()), 3)
            rows.append(
                (
                    episode,
                    t,
                    state,
                    action,
                    reward,
                    following,
                    done,
                    t == limit - 1 and not done,
                )
            )
            state = following
            if done:
                break
    names = (
        "episode",
        "t",
        "state",
        "action",
        "reward",
        "next",
        "terminated",
        "truncated",
    )
    return {
        name: np.array(column)
        for name, column in zip(names, zip(*rows, strict=True), strict=True)
    }


def pair(columns):
    """State columns x and y."""
    return {"x": columns["state"][:, 0], "y": columns["state"][:, 1]}


def basic(columns):
    """Ids, times, states, actions and rewards in columns of numbers."""
    return {
        "episode": columns["episode"],
        "t": columns["t"],
        **pair(columns),
        "action": columns["action"],
        "reward": columns["reward"],
    }


def save(columns, path):
    if path.suffix == ".npz":
        np.savez(path, **columns)
    elif path.suffix == ".csv":
        pl.DataFrame(columns).write_csv(path)
    else:
        # polars takes arrays of vectors as lists
        vectors = {
            name: values.tolist() for name, values in columns.items() if values.ndim > 1
        }
        pl.DataFrame({**columns, **vectors}).write_parquet(path)
    return path


@pytest.mark.parametrize(
    ("name", "meaning"),
    [
        *(
            (n, Flag.GOES_ON)
            for n in (
                "not_done",
                "masks",
                "mask",
                "alive",
                "nonterminal",
                "non_terminals",
                "continues",
                "discount",
                "notDone",
                "not_dead",
                "NonTerminal",
            )
        ),
        *(
            (n, Flag.TERMINAL)
            for n in ("terminal", "terminateds", "is_terminal", "not_alive")
        ),
        *(
            (n, Flag.DONE)
            for n in ("done", "dones", "next.done", "dones_float", "ended")
        ),
        *(
            (n, Flag.CUT)
            for n in ("truncateds", "timeouts", "time_limit", "TimeLimit.truncated")
        ),
        *(
            (n, Flag.START)
            for n in ("is_first", "episode_starts", "first", "isFirst", "new_episode")
        ),
        *((n, Flag.LAST) for n in ("is_last", "episode_terminals", "end_of_episode")),
        *(
            (n, None)
            for n in (
                "action_mask",
                "notes",
                "weekend",
                "over_65",
                "undone",
                "not_truncated",
            )
        ),
    ],
)
def test_what_the_name_of_a_flag_says(name, meaning):
    assert flag_of(name) is meaning


@pytest.mark.parametrize(
    ("name", "other_names", "now"),
    [
        *(
            (n, {"obs"}, "obs")
            for n in ("next_obs", "obs_next", "new_obs", "nextObs", "obs2", "next.obs")
        ),
        ("next_observations", {"obs", "act"}, "obs"),
        ("s2", {"s", "a"}, "s"),
        ("sp", {"s"}, "s"),
        ("next_state", {"state", "x"}, "state"),
        ("x_tp1", {"x"}, "x"),
        ("x_prime", {"x"}, "x"),
        ("x_2", {"x_1", "x_3"}, None),
        ("new_customer", {"x"}, None),
        ("next_observations", {"obs", "state"}, None),
    ],
)
def test_what_the_name_of_a_next_state_says(name, other_names, now):
    assert earlier_name(name, [*other_names, name]) == now


C = walks()
DONE = C["terminated"]
ENDS = DONE | C["truncated"]
FIRST = C["t"] == 0


def flag(kind, values):
    """A flag as people write it."""
    if kind == "text":
        return np.where(values, "yes", "no")
    return values.astype(kind)


class TestFlagsOfEnds:
    """With ids: the flag is found by its meaning, in every spelling, and the rows are
    right.
    """

    @pytest.mark.parametrize("kind", ["bool", "int64", "float32", "text"])
    @pytest.mark.parametrize("suffix", ["parquet", "csv"])
    @pytest.mark.parametrize(
        "name",
        ["not_done", "masks", "alive", "nonterminal", "continues", "discount", "done"],
    )
    def test_negations(self, tmp_path, name, kind, suffix):
        if (kind, name) == ("text", "discount"):
            pytest.skip("a discount is a number")
        values = ~DONE
        if name == "done":
            values = DONE
        path = save({**basic(C), name: flag(kind, values)}, tmp_path / f"log.{suffix}")
        inspection = inspect_table(path)
        assert inspection.problems == []
        assert inspection.mapping["observations"] == ["x", "y"]
        log = open_transitions(path, mapping=inspection.mapping)
        assert int(log.terminated.sum()) == int(DONE.sum())
        assert log.n_episodes == 120

    @pytest.mark.parametrize(
        ("flags", "terminal", "truncated"),
        [
            # RLlib, Gymnasium
            (
                {"terminateds": DONE, "truncateds": C["truncated"]},
                "terminateds",
                "truncateds",
            ),
            # TianShou: done is either of them
            (
                {"done": ENDS, "terminated": DONE, "truncated": C["truncated"]},
                "terminated",
                "truncated",
            ),
            # IQL: ends of any kind beside masks
            (
                {"masks": 1.0 - DONE, "dones_float": 1.0 * ENDS},
                "masks == 0",
                "dones_float",
            ),
            ({"terminal": DONE, "done": ENDS}, "terminal", "done"),
            # where all episodes end by themselves, the second flag says nothing
            ({"terminal": ENDS, "done": ENDS}, "terminal", None),
            ({"masks": 1.0 - ENDS, "dones_float": 1.0 * ENDS}, "masks == 0", None),
            # RLDS
            (
                {"is_first": FIRST, "is_last": ENDS, "is_terminal": DONE},
                "is_terminal",
                None,
            ),
            # a done that is set in most rows is none
            ({"done": ~DONE}, "done == 'false'", None),
        ],
    )
    def test_several_flags(self, tmp_path, flags, terminal, truncated):
        path = save({**basic(C), **flags}, tmp_path / "log.parquet")
        inspection = inspect_table(path)
        assert (
            inspection.mapping.get("terminal"),
            inspection.mapping.get("truncated"),
        ) == (
            terminal,
            truncated,
        )
        mapping = dict(inspection.mapping)
        if "final_state" in inspection.open:
            # Last rows with a reward may be steps, in spite of the names of RLDS.
            mapping["final_state"] = False
        log = open_transitions(path, mapping=mapping)
        terminal_is_every_end = (
            terminal == "terminal"
            and "done" in flags
            and (flags["terminal"] == ENDS).all()
        )
        masks_are_every_end = truncated is None and "masks" in flags
        expected = DONE
        if terminal_is_every_end or masks_are_every_end:
            expected = ENDS
        assert int(log.terminated.sum()) == int(expected.sum())

    @pytest.mark.parametrize(
        "flags",
        [
            {"terminated": DONE, "died": DONE & (C["reward"] > 0)},
            {"done": ENDS, "is_terminal": FIRST},
        ],
    )
    def test_flags_that_contradict_each_other_are_asked_about(self, tmp_path, flags):
        path = save({**basic(C), **flags}, tmp_path / "log.parquet")
        inspection = inspect_table(path)
        assert inspection.mapping["terminal"].startswith("? ")
        with one_line(
            DataError,
            match=r"the mapping leaves terminal open; write one of: terminal: ",
        ):
            open_transitions(path, mapping=inspection.mapping)

    @pytest.mark.parametrize("name", ["mask", "alive", "discount", "finished_school"])
    def test_a_flag_that_fits_no_end_is_an_observation(self, tmp_path, name):
        values = np.random.default_rng(0).integers(2, size=len(DONE))
        path = save({**basic(C), name: values, "done": DONE}, tmp_path / "log.parquet")
        mapping = inspect_table(path).mapping
        assert mapping["terminal"] == "done"
        assert name in mapping["observations"]


class TestWithoutIds:
    """Flags and next observations show the episodes; the rows are those of the log with
    ids.
    """

    @pytest.mark.parametrize("name", ["not_done", "masks", "dones", "terminals"])
    @pytest.mark.parametrize(
        "names",
        [("state", "next_state"), ("obs", "obs_next"), ("s", "s2"), ("obs", "new_obs")],
    )
    def test_td3_and_its_like(self, tmp_path, name, names):
        """Without a flag of cuts, next observations show them."""
        is_set = ~DONE
        if name in ("dones", "terminals"):
            is_set = DONE
        values = is_set.astype(np.float32)
        columns = {
            names[0]: C["state"],
            "action": C["action"],
            names[1]: C["next"],
            "reward": C["reward"],
        }
        path = save({**columns, name: values.reshape(-1, 1)}, tmp_path / "log.npz")
        inspection = inspect_table(path)
        assert inspection.problems == []
        log = open_transitions(path, mapping=inspection.mapping)
        np.testing.assert_array_equal(log.next_observations, C["next"])
        np.testing.assert_array_equal(log.terminated, DONE)
        np.testing.assert_array_equal(log.episode_ids, C["episode"])

    @pytest.mark.parametrize("name", ["episode_starts", "is_first", "first"])
    @pytest.mark.parametrize("kind", ["bool", "float32"])
    def test_starts(self, tmp_path, name, kind):
        columns = {
            "obs": C["state"],
            "actions": C["action"],
            "rewards": C["reward"],
            name: flag(kind, FIRST),
        }
        path = save(columns, tmp_path / "log.npz")
        inspection = inspect_table(path)
        assert inspection.mapping["starts"] == name
        with one_line(
            DataError,
            match=(
                "the mapping leaves last_row open; write one of: last_row: cut;"
                " last_row: term"
            ),
        ):
            open_transitions(path, mapping=inspection.mapping)
        log = open_transitions(
            path, mapping={**inspection.mapping, "last_row": "terminal"}
        )
        np.testing.assert_array_equal(log.episode_ids, C["episode"])

    @pytest.mark.parametrize("suffix", ["csv", "parquet"])
    def test_a_count_of_steps_that_begins_anew(self, tmp_path, suffix):
        """No ids, and no time: without ids a time would order the rows of the whole
        table.
        """
        columns = {
            name: column for name, column in basic(C).items() if name != "episode"
        } | {"done": DONE}
        path = save({**columns, "t": C["t"] + 1}, tmp_path / f"log.{suffix}")
        inspection = inspect_table(path)
        assert (
            inspection.problems,
            inspection.mapping["starts"],
            "time" in inspection.mapping,
        ) == (
            [],
            "t == 1",
            False,
        )
        log = open_transitions(path, mapping=inspection.mapping)
        assert (log.n_episodes, int(log.terminated.sum())) == (120, int(DONE.sum()))
        path = save({**columns, "is_first": FIRST}, tmp_path / f"flagged.{suffix}")
        inspection = inspect_table(path)
        assert (
            inspection.problems,
            inspection.mapping["starts"],
            "time" in inspection.mapping,
        ) == (
            [],
            "is_first",
            False,
        )
        assert open_transitions(path, mapping=inspection.mapping).n_episodes == 120

    def test_a_flag_of_last_rows_is_asked_about_and_every_answer_is_read(
        self, tmp_path
    ):
        path = save(
            {
                **{k: v for k, v in basic(C).items() if k not in ("episode", "t")},
                "is_last": ENDS,
            },
            tmp_path / "log.csv",
        )
        inspection = inspect_table(path)
        assert (
            inspection.mapping["terminal"] == "? terminal: is_last | truncated: is_last"
        )
        rest = {
            name: value
            for name, value in inspection.mapping.items()
            if name != "terminal"
        }
        assert (
            open_transitions(
                path, mapping={**rest, "terminal": "is_last"}
            ).terminated.sum()
            == ENDS.sum()
        )
        assert not open_transitions(
            path, mapping={**inspection.mapping, "truncated": "is_last"}
        ).terminated.any()


class TestLists:
    """A list that is called an action is never the observation, wherever it stands."""

    @pytest.mark.parametrize(
        ("names", "next_columns"),
        [
            # LeRobot
            (
                ("action", "observation.state", None),
                ("action", "observation.state"),
            ),
            (("act", "obs", "obs_next"), ("act", "obs")),  # TianShou
            (("actions", "obs", "new_obs"), ("actions", "obs")),  # RLlib
            (("a", "s", "s2"), ("a", "s")),
            (("action", "features", None), ("action", "features")),
        ],
    )
    @pytest.mark.parametrize("first", ["action", "state"])
    def test_names(self, tmp_path, names, next_columns, first):
        action, state, following = names
        vectors = C["state"] * [1.0, 0.0] + np.random.default_rng(0).normal(
            size=(len(DONE), 2)
        )
        columns = {
            action: vectors,
            state: C["state"],
            "possible_actions": C["next"] * 0 + 1,
        }
        if first == "state":
            columns = dict(reversed(columns.items()))
        expected_next = None
        if following:
            columns[following] = C["next"]
            expected_next = [following]
        columns |= {
            "rewards": C["reward"],
            "done": DONE,
            "eps_id": C["episode"],
            "t": C["t"],
        }
        path = save(columns, tmp_path / "log.parquet")
        mapping = inspect_table(path).mapping
        assert (mapping["action"], mapping["observations"]) == (
            [next_columns[0]],
            [next_columns[1]],
        )
        assert mapping.get("next_observations") == expected_next
        log = open_transitions(path, mapping=mapping)
        np.testing.assert_array_equal(log.actions[:3], vectors[:3])

    @pytest.mark.parametrize("name", ["terminateds", "status", "finito"])
    def test_ends_are_found_beside_a_list(self, tmp_path, name):
        values = DONE
        answer = "finito"
        if name == "status":
            values = np.where(DONE, "over", "on")
            answer = "status == 'over'"
        columns = {
            "obs": C["state"],
            "actions": C["action"],
            "rewards": C["reward"],
            "eps_id": C["episode"],
        }
        path = save(
            {**columns, "t": C["t"], name: values, "agent": np.zeros(len(DONE))},
            tmp_path / "log.parquet",
        )
        inspection = inspect_table(path)
        if name == "terminateds":
            assert inspection.mapping["terminal"] == name
            return
        assert (
            inspection.mapping["last_row"]
            == f"? terminal: {answer} | last_row: cut | last_row: terminal"
        )
        answered = {**inspection.mapping, "terminal": answer}
        assert open_transitions(path, mapping=answered).terminated.sum() == DONE.sum()

    def test_structs_and_ragged_lists_are_named_and_the_remedy_is_right(self, tmp_path):
        rows = {
            "mdp_id": C["episode"].astype(str),
            "sequence_number": C["t"],
            "ds": ["2019-01-01"] * len(DONE),
            "state_features": [{"0": x, "1": y} for x, y in C["state"]],
            "action": C["action"].astype(str),
            "reward": C["reward"],
            "action_probability": 0.5,
            "a": [list(range(1 + i % 3)) for i in range(len(DONE))],
        }
        frame = pl.DataFrame(rows)
        frame.write_parquet(tmp_path / "log.parquet")
        inspection = inspect_table(tmp_path / "log.parquet")
        assert (inspection.mapping["time"], inspection.mapping["action"]) == (
            "sequence_number",
            ["action"],
        )
        assert "observations" not in inspection.mapping
        (remedy,) = (
            re.search(r"in polars: frame\.(unnest\('\w+'\))", problem)
            for problem in inspection.problems[1:]
        )
        assert remedy.group(1) == "unnest('state_features')"
        frame.unnest("state_features").write_parquet(tmp_path / "flat.parquet")
        again = inspect_table(tmp_path / "flat.parquet")
        assert again.mapping["observations"] == ["0", "1"]
        assert again.problems == []

    def test_costs_are_rewards_of_the_other_sign_if_the_user_says_so(self, tmp_path):
        columns = {**basic(C), "done": DONE}
        columns["daily_cost"] = columns.pop("reward")
        path = save(columns, tmp_path / "log.csv")
        inspection = inspect_table(path)
        assert (
            inspection.mapping["reward"] == "? reward: -daily_cost | reward: daily_cost"
        )
        log = open_transitions(
            path, mapping={**inspection.mapping, "reward": "-daily_cost"}
        )
        np.testing.assert_allclose(log.rewards[:5], -C["reward"][:5])


def sums(rewards, discount=1.0, with_its_reward=True):
    """Discounted sums of the rewards that follow in each episode, with a row's own
    reward or without it.
    """
    sums_of_rows = np.zeros(len(rewards))
    total = 0.0
    for i in range(len(rewards) - 1, -1, -1):
        if ENDS[i]:
            total = 0.0
        with_reward = rewards[i] + discount * total
        sums_of_rows[i] = total
        if with_its_reward:
            sums_of_rows[i] = with_reward
        total = with_reward
    return sums_of_rows


def of_episode(values, how):
    """A number of each episode in all of its rows."""
    return np.array([how(values[C["episode"] == e]) for e in range(120)])[C["episode"]]


def earned():
    """The rewards of the rows before in each episode."""
    episodes = (C["reward"][C["episode"] == e] for e in range(120))
    return np.concatenate([np.cumsum(rewards) - rewards for rewards in episodes]).round(
        3
    )


class TestTheFuture:
    """Does a column depend on what happens later?

    Named or not, it is no observation.
    """

    def look(self, tmp_path, suffix="csv", **columns):
        path = save({**basic(C), "done": DONE, **columns}, tmp_path / f"log.{suffix}")
        return inspect_table(path)

    @pytest.mark.parametrize(
        "names",
        [
            ("x_tp1", "y_tp1"),
            ("next_x", "next_y"),
            ("x_after", "y_after"),
            ("lead_x", "lead_y"),
            ("post_u", "post_v"),
        ],
    )
    def test_next_states_are_next_observations(self, tmp_path, names):
        inspection = self.look(tmp_path, **dict(zip(names, C["next"].T, strict=True)))
        assert inspection.mapping["observations"] == ["x", "y"]
        assert inspection.mapping["next_observations"] == list(names)
        assert inspection.problems == []

    @pytest.mark.parametrize("suffix", ["csv", "parquet"])
    @pytest.mark.parametrize(
        "column",
        [
            sums(C["reward"]).round(3),
            sums(C["reward"], 0.9).round(3),
            sums(C["reward"], with_its_reward=False).round(3),
            sums(np.ones(len(DONE))),
            sums(np.ones(len(DONE)), with_its_reward=False),
        ],
    )
    def test_sums_of_what_follows_are_left_out(self, tmp_path, suffix, column):
        inspection = self.look(tmp_path, suffix, z=column)
        assert inspection.mapping["observations"] == ["x", "y"]
        (problem,) = inspection.problems
        assert re.match(
            r"z: the (sum of the rewards|number of rows) that follow: left out", problem
        )

    @pytest.mark.parametrize(
        "column",
        [
            of_episode(C["reward"], np.sum).round(4),
            of_episode(C["reward"], len),
            of_episode(DONE, lambda d: d[-1]),
        ],
    )
    def test_what_is_known_at_the_end_alone_is_left_out(self, tmp_path, column):
        inspection = self.look(tmp_path, z=column.astype(float))
        assert inspection.mapping["observations"] == ["x", "y"]
        assert inspection.problems[0].startswith("z: in every episode it is its ")

    @pytest.mark.parametrize(
        "column",
        [
            # a label of the result
            of_episode(C["reward"], lambda r: "good" if r.sum() > 0 else "bad"),
            of_episode(C["reward"], lambda r: r.sum() + 0.01 * r[0]),
            of_episode(DONE, lambda d: "left" if d[-1] else "stayed"),
        ],
    )
    def test_what_goes_with_the_result_is_asked_about(self, tmp_path, column):
        inspection = self.look(tmp_path, z=column)
        assert (
            inspection.mapping["observations"]
            == "? observations: [x, y] | observations: [x, y, z]"
        )
        assert "known only at the end?" in inspection.problems[0]
        path = tmp_path / "log.csv"
        with one_line(
            DataError,
            match=(
                r"leaves observations open; write one of: observations: \[x, y\]; obs"
            ),
        ):
            open_transitions(path, mapping=inspection.mapping)
        for names in (["x", "y"], ["x", "y", "z"]):
            changes = {
                "observations": names,
                "encode": (
                    {"z": "one-hot"}
                    if "z" in names and column.dtype.kind == "U"
                    else {}
                ),
            }
            assert open_transitions(
                path, mapping={**inspection.mapping, **changes}
            ).observations.shape[1] >= len(names)

    def test_values_of_the_next_row_without_a_name_are_asked_about(self, tmp_path):
        inspection = self.look(tmp_path, b=C["next"][:, 0])
        assert (
            inspection.mapping["observations"]
            == "? observations: [x, y] | observations: [x, y, b]"
        )
        assert inspection.problems[0].startswith(
            "b: it is x one row later, or x is its value of before"
        )

    @pytest.mark.parametrize("name", ["action", "reward"])
    def test_the_next_action_or_reward_is_left_out(self, tmp_path, name):
        following = np.append(C[name][1:], 0)
        inspection = self.look(tmp_path, z=np.where(ENDS, 0, following))
        assert inspection.mapping["observations"] == ["x", "y"]
        assert inspection.problems[0].startswith(
            f"z: it is {name} one row later: left out"
        )

    @pytest.mark.parametrize(
        "columns",
        [
            {"x_lag1": np.where(FIRST, 0.0, np.roll(C["state"][:, 0], 1))},  # the past
            {"prev_x": np.where(FIRST, 9.0, np.roll(C["state"][:, 0], 1))},
            {"before": np.where(FIRST, -1.0, np.roll(C["state"][:, 0], 1))},
            {"b": np.where(FIRST, 0.0, np.roll(C["state"][:, 0], 1))},  # begins empty
            {"prev_action": np.where(FIRST, 0, np.roll(C["action"], 1))},
            {"step_of_all": C["t"] / CUT_AFTER, "step_1": C["t"] + 1.0},  # counters
            # of the patient
            {"age": of_episode(C["reward"], lambda r: zlib.crc32(r.tobytes()) % 80)},
            {
                "sex": of_episode(
                    C["reward"], lambda r: "fm"[zlib.crc32(r.tobytes()) % 2]
                )
            },
            {"score": earned()},
            {"budget": 9 - earned()},  # what was not spent so far
            {"open": np.arange(len(DONE)) % 2, "closed": 1 - np.arange(len(DONE)) % 2},
            {"copy": C["state"][:, 0]},
        ],
    )
    def test_what_is_known_before_stays(self, tmp_path, columns):
        inspection = self.look(tmp_path, **columns)
        assert [
            problem
            for problem in inspection.problems
            if "later" in problem or "follow" in problem or "end?" in problem
        ] == []
        assert set(columns) <= set(inspection.mapping["observations"])


class TestOpenKeys:
    """What inspect is not sure of it leaves open; commands refuse it until it is
    answered, in every way.
    """

    def table(self, tmp_path):
        churned = np.where(DONE, 1, 0)
        return save({**basic(C), "left_us": churned}, tmp_path / "log.csv")

    def test_the_path_of_a_newcomer(self, tmp_path):
        path = self.table(tmp_path)
        mapping = tmp_path / "m.yaml"
        shown = succeed("data", "inspect", path, "--out", mapping)
        assert "left_us: 1: in last rows of episodes alone" in shown
        text = mapping.read_text()
        assert (
            "# last_row is open; write one of these lines instead:\n#   terminal:"
            " left_us\n#   last_row: cut" in text
        )
        assert yaml.safe_load(text)["last_row"].startswith("?")
        words = (
            "leaves last_row open; write one of: terminal: left_us; last_row: cut;"
            " last_row: terminal"
        )
        policy = ("--policy", "uniform", "--gamma", 0.9)
        for command in (
            ("data", "info", path),
            ("data", "validate", path),
            ("evaluate", path, *policy),
            ("select", path, "--policies", "uniform", "--gamma", 0.9),
            ("data", "convert", path, tmp_path / "x.npz"),
            ("data", "split", path, tmp_path / "a.npz", tmp_path / "b.npz"),
        ):
            assert_refused(run_cli(*command, "--mapping", mapping), words)
        for answer in (
            ("--terminal", "left_us"),
            ("--last-row", "cut"),
            ("--last-row", "terminal"),
        ):
            succeed("data", "info", path, "--mapping", mapping, *answer)
        lines = re.findall(r"^#   (.*)$", text, re.M)[1:]
        assert len(lines) == 3
        for line in lines:  # as the comments say: write one of the lines instead
            mapping.write_text(re.sub(r"^last_row: .*$", line, text, flags=re.M))
            succeed("data", "info", path, "--mapping", mapping)

    @pytest.mark.parametrize(
        ("lengths", "truncated", "expected"),
        [
            ([20] * 30, None, "?"),  # a limit, or a course that was over
            ([5, 9, 7] * 10, None, "?"),
            ([5, 9, 7] * 10, "all", "cut"),
            ([5, 9, 7] * 10, "some", "?"),
        ],
    )
    def test_last_rows_without_a_flag(self, tmp_path, lengths, truncated, expected):
        n = sum(lengths)
        ids = np.repeat(np.arange(len(lengths)), lengths)
        generator = np.random.default_rng(0)
        columns = {
            "id": ids,
            "t": np.concatenate([np.arange(length) for length in lengths]),
            "x": generator.normal(size=n),
            "a": generator.integers(2, size=n),
            "r": generator.normal(size=n),
        }
        if truncated:
            last = np.append(ids[1:] != ids[:-1], True)
            columns["truncated"] = last & ((ids % 2 == 0) | (truncated == "all"))
        inspection = inspect_table(save(columns, tmp_path / "log.parquet"))
        assert inspection.mapping["last_row"].startswith(expected)

    @pytest.mark.parametrize("value", ["?", "? last_row: cut | last_row: terminal"])
    def test_by_hand(self, value):
        roles = {
            "observations": "x",
            "action": "a",
            "reward": "r",
            "episode": "id",
            "last_row": value,
        }
        with one_line(
            DataError,
            match=(
                "leaves last_row open; write one of: last_row: cut; last_row: terminal"
            ),
        ):
            TableMapping(**roles)
        assert TableMapping(
            **{**roles, "observations": "?", "last_row": "cut"}
        ).observations == ("?",)  # a pattern

    def test_rewards_of_rows_without_an_action_are_proposed_to_move(self, tmp_path):
        lengths = [4] * 30
        step = np.tile(np.arange(4), 30)
        columns = {
            "stay_id": np.repeat(np.arange(30), lengths),
            "step": step,
            "x": np.random.default_rng(0).normal(size=120),
            "action": [
                None if number == 3 else ["treat", "watch"][i % 2]
                for i, number in enumerate(step)
            ],
            "reward": np.where(step == 3, np.repeat([1.0, -1.0], 60), -0.02),
            "done": step == 3,
        }
        path = write(columns, tmp_path / "log.csv")
        mapping = tmp_path / "m.yaml"
        succeed("data", "inspect", path, "--out", mapping)
        assert yaml.safe_load(mapping.read_text())["reward_row"] == "previous"
        log = open_transitions(path, mapping=mapping)
        assert log.rewards.sum() == pytest.approx(-0.02 * 90)
        np.testing.assert_allclose(
            np.abs(log.rewards[log.terminated]), [1 - 0.02] * 15 + [1 + 0.02] * 15
        )
