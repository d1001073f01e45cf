"""Logs as other tools write them: inspect proposes the right mapping or asks, and the
rows, and so the value, are those of the log that was written.
"""

import json
from pathlib import Path

import h5py
import numpy as np
import polars as pl
import pytest
import yaml

import koffline
from koffline.data.sources import layout_of, open_transitions
from koffline.data.table.by_tool import mapping_of_tool
from koffline.data.table.inspection import inspect_table
from koffline.errors import DataError
from tests.data import layouts
from tests.data.layouts import LAYOUTS, SELF_DESCRIBED, chain, split_by_episode
from tests.refusals import assert_refused, one_line, run_cli, succeed

pytestmark = pytest.mark.usefixtures("few_features_of_memory")

LOG = chain()
ROOT = Path(__file__).parents[2]


def mapping_of(path, answers):
    """The proposed mapping with answers to what it leaves open, and to nothing else."""
    inspection = inspect_table(path)
    mapping = {**inspection.mapping, **answers}
    open_keys = set(inspection.open)
    assert open_keys <= {"last_row", "terminal"}, inspection.problems
    assert bool(open_keys) == bool(answers)
    return mapping


def assert_rows(log, columns):
    np.testing.assert_allclose(log.observations, columns["obs"])
    np.testing.assert_array_equal(log.actions, columns["action"])
    np.testing.assert_allclose(log.rewards, columns["reward"], rtol=1e-6)
    np.testing.assert_array_equal(log.terminated, columns["terminated"])
    goes_on = ~log.terminated
    np.testing.assert_allclose(
        log.next_observations[goes_on], columns["following"][goes_on]
    )


def without_last_rows(columns):
    """What is left of a log whose last rows have no next observation."""
    kept = np.append(np.diff(columns["episode"]) == 0, False)
    rows = {name: column[kept] for name, column in columns.items()}
    return {**rows, "terminated": np.zeros(kept.sum(), bool)}


def without_cut_last_rows(columns):
    """What is left where last rows of cut episodes have no next observation."""
    return {name: column[~columns["truncated"]] for name, column in columns.items()}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_log_of_each_tool_is_read_row_for_row(tmp_path, name):
    file, write, title, answers = LAYOUTS[name]
    path = tmp_path / file
    write(LOG, path)
    mapping = mapping_of(path, answers)
    log = open_transitions(path, mapping=mapping)
    expected = LOG
    if answers.get("last_row") == "cut":
        expected = without_last_rows(LOG)
    elif "next_observations" not in mapping and "final_state" not in mapping:
        expected = without_cut_last_rows(LOG)
    assert_rows(log, expected)
    assert title in layout_of(path, mapping)


@pytest.mark.parametrize(
    "name", ["sb3", "rllib json", pytest.param("robomimic", marks=pytest.mark.slow)]
)
def test_the_value_is_the_exact_one(tmp_path, name):
    file, write, _, answers = LAYOUTS[name]
    path = tmp_path / file
    write(chain(episodes=150), path)
    log = open_transitions(path, mapping=mapping_of(path, answers))
    estimate = koffline.evaluate(
        log, layouts.policy, gamma=layouts.GAMMA, estimator="fqe", steps=300
    )
    exact = layouts.exact_value()
    assert estimate.value == pytest.approx(exact, abs=0.15)  # half the interval: 0.43
    assert estimate.interval.low < exact < estimate.interval.high


def test_groups_with_the_names_of_a_log_need_no_mapping(tmp_path):
    file, write = SELF_DESCRIBED
    write(LOG, tmp_path / file)
    log = open_transitions(tmp_path / file)
    assert_rows(log, LOG)
    np.testing.assert_array_equal(log.truncated, LOG["truncated"])
    assert "group of arrays for each episode" in layout_of(tmp_path / file)
    with one_line(DataError, match="needs no mapping"):
        inspect_table(tmp_path / file)


def test_groups_of_an_archive_are_read_like_those_of_hdf5(tmp_path):
    groups = {}
    for number, episode in enumerate(split_by_episode(LOG)):
        for name in ("obs", "action", "reward", "terminated"):
            groups[f"data/demo_{number}/{name}"] = episode[name]
    np.savez(tmp_path / "log.npz", **groups)
    inspection = inspect_table(tmp_path / "log.npz")
    log = open_transitions(tmp_path / "log.npz", mapping=inspection.mapping)
    assert_rows(log, without_cut_last_rows(LOG))


@pytest.mark.parametrize(("unfilled", "first"), [(9, 0), (0, 17)])
def test_a_ring_loses_what_was_never_filled_and_begins_with_the_oldest_row(
    tmp_path, unfilled, first
):
    layouts.ring(LOG, tmp_path / "log.hdf5", unfilled, first)
    mapping = inspect_table(tmp_path / "log.hdf5").mapping
    assert_rows(open_transitions(tmp_path / "log.hdf5", mapping=mapping), LOG)


def test_environments_side_by_side_are_episodes_apart(tmp_path):
    # two environments that took as many steps, neither ending with the last
    half = len(LOG["action"]) // 2
    names = {
        "observations": "obs",
        "next_observations": "following",
        "actions": "action",
        "rewards": "reward",
        "dones": "terminated",
    }
    columns = {}
    for key, name in names.items():
        column = LOG[name][: 2 * half].reshape(2, half, -1)
        columns[key] = np.swapaxes(column, 0, 1)
    for key in ("rewards", "dones"):
        columns[key] = columns[key][:, :, 0]
    np.savez(tmp_path / "log.npz", **columns)
    mapping = inspect_table(tmp_path / "log.npz").mapping
    log = open_transitions(tmp_path / "log.npz", mapping={**mapping, "last_row": "cut"})
    both = {name: column[: 2 * half] for name, column in LOG.items()}
    assert_rows(log, both)
    assert log.episode_ids[half - 1] != log.episode_ids[half]


def test_dones_that_mark_every_last_row_are_asked_about(tmp_path):
    layouts.robomimic(chain(episodes=12), tmp_path / "log.hdf5", done_mode=1)
    inspection = inspect_table(tmp_path / "log.hdf5")
    assert inspection.open == {"terminal": [{"terminal": "dones"}, {"last_row": "cut"}]}
    with one_line(DataError, match="leaves terminal open; write one of: terminal"):
        open_transitions(tmp_path / "log.hdf5", mapping=inspection.mapping)
    for answer, n_terminated in (({"terminal": "dones"}, 12), ({"last_row": "cut"}, 0)):
        mapping = {**inspection.mapping, **answer}
        if "terminal" not in answer:
            assert mapping["terminal"].startswith("?")
        log = open_transitions(tmp_path / "log.hdf5", mapping=mapping)
        assert log.terminated.sum() == n_terminated


@pytest.mark.parametrize("version", [2, 3])
def test_the_root_of_a_lerobot_dataset_is_its_rows(tmp_path, version):
    layouts.lerobot(LOG, tmp_path / "root", version)
    for folder in ("root", "root/data"):
        inspection = inspect_table(tmp_path / folder)
        assert inspection.rows == len(LOG["action"])
        assert inspection.open["terminal"] == [
            {"terminal": "next.success"},
            {"terminal": "next.done"},
            {"last_row": "cut"},
        ]
    mapping = {**inspection.mapping, "terminal": "next.success"}
    assert "LeRobot" in layout_of(tmp_path / "root", mapping)


class TestRLlib:
    def write(self, path, change):
        batches = []
        for number, episode in enumerate(split_by_episode(LOG)):
            batches.append(change(layouts.rllib_batch(episode, number)))
        path.write_text("\n".join(map(json.dumps, batches)))
        return path

    def test_batches_of_one_policy_are_unwrapped(self, tmp_path):
        path = self.write(
            tmp_path / "log.json",
            lambda batch: {
                "type": "MultiAgentBatch",
                "count": len(batch["t"]),
                "policy_batches": {"default_policy": batch},
            },
        )
        log = open_transitions(path, mapping=inspect_table(path).mapping)
        assert_rows(log, LOG)

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            (
                lambda batch: {**batch, "obs": "BCJNGGhAgA"},
                "output_compress_columns=[]",
            ),
            (
                lambda batch: {
                    "type": "MultiAgentBatch",
                    "policy_batches": {"red": batch, "blue": batch},
                },
                "several policies (red, blue)",
            ),
            (lambda batch: {**batch, "t": [0]}, "has t for 1 of"),
            (
                lambda batch: {"type": "MultiAgentBatch", "policy_batches": {"a": 1}},
                "a batch that is a single value",
            ),
        ],
    )
    def test_what_cannot_be_read_is_said(self, tmp_path, change, words):
        path = self.write(tmp_path / "log.json", change)
        assert_refused(run_cli("data", "inspect", path), words)

    def test_probabilities_that_disagree_are_asked_about(self, tmp_path):
        path = self.write(
            tmp_path / "log.json",
            lambda batch: {**batch, "action_logp": [-0.1] * len(batch["t"])},
        )
        assert inspect_table(path).open == {
            "behavior_probability": [
                {"behavior_probability": "action_prob"},
                {"behavior_log_probability": "action_logp"},
            ]
        }


def test_possible_actions_that_differ_are_masks(tmp_path):
    rows = list(layouts.reagent_rows(LOG))
    chosen = rows[3]["action"]
    rows[3]["possible_actions"] = [chosen]
    path = tmp_path / "log.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    inspection = inspect_table(path)
    assert inspection.problems == []
    assert inspection.mapping["action_mask"] == ["possible_actions"]
    mapping = {**inspection.mapping, "last_row": "terminal"}
    log = open_transitions(path, mapping=mapping)
    counts = log.action_mask.sum(axis=1)
    assert np.flatnonzero(counts == 1).tolist() == [3]
    assert log.action_mask[3, log.actions[3]]


class TestVowpalWabbit:
    LABELS = ("sport", "food", "politics")

    def write(self, path, change=lambda record, i: record, decisions=400):
        """Decisions with probabilities (0.6, 0.3, 0.1); sport is clicked in the
        afternoon, food in the morning.
        """
        generator = np.random.default_rng(0)
        chances = [0.6, 0.3, 0.1]
        lines = []
        for i in range(decisions):
            place = int(generator.choice(3, p=chances))
            noon = ("am", "pm")[i % 2]
            cost = -float(place == (noon == "am"))
            other_places = [k for k in range(3) if k != place]
            record = {
                "_label_cost": cost,
                "_label_probability": chances[place],
                "_label_Action": place + 1,
                "_labelIndex": place,
                "Timestamp": "2024-03-01T00:00:00Z",
                "Version": "1",
                "EventId": f"e{i}",
                "a": [k + 1 for k in (place, *other_places)],
                "p": [chances[k] for k in (place, *other_places)],
                "c": {
                    "User": {"time": noon},
                    "_multi": [{"Article": {"id": label}} for label in self.LABELS],
                },
                "VWState": {"m": "x/y"},
            }
            lines.append(json.dumps(change(record, i)))
        path.write_text("\n".join(lines))
        return path

    def test_decisions_are_a_bandit_log_whose_reward_is_minus_the_cost(self, tmp_path):
        path = self.write(tmp_path / "log.json")
        inspection = inspect_table(path)
        assert (inspection.problems, inspection.open) == ([], {})
        log = open_transitions(path, mapping=inspection.mapping)
        assert log.metadata.extra["action_names"] == ["food", "politics", "sport"]
        assert len(log.episode_lengths) == 400
        # always food is right in half of the rows
        value = koffline.evaluate(
            log,
            lambda observations: np.tile([1.0, 0.0, 0.0], (len(observations), 1)),
            gamma=0.5,
            estimator="wis",
        ).value
        assert value == pytest.approx(0.5, abs=0.1)  # 120 rows: standard error 0.046

    def test_sets_of_actions_that_differ_are_masks(self, tmp_path):
        """In the morning politics is not on offer; actions have an id beside other
        features.
        """

        def change(record, i):
            multi = [
                {"Article": {"id": label, "age": i + 0.5}} for label in self.LABELS
            ]
            if i % 2 == 0:
                if record["_labelIndex"] == 2:
                    record["_labelIndex"] = 0
                multi = multi[:2]
                record["_label_probability"] = (0.7, 0.3)[record["_labelIndex"]]
                record["_label_cost"] = -float(record["_labelIndex"])
            return {**record, "c": {**record["c"], "_multi": multi}}

        path = self.write(tmp_path / "log.json", change, decisions=1000)
        inspection = inspect_table(path)
        assert (inspection.problems, inspection.open) == ([], {})
        assert inspection.mapping["action_mask"] == ["available_actions"]
        log = open_transitions(path, mapping=inspection.mapping)
        assert log.metadata.extra["action_names"] == ["food", "politics", "sport"]
        np.testing.assert_array_equal(log.action_mask[:2], [[1, 0, 1], [1, 1, 1]])
        estimate = koffline.evaluate(
            log,
            # in the morning a third of its probability is on what is not available
            lambda observations: np.full((len(observations), 3), 1.0 / 3.0),
            gamma=0.5,
            estimator="wis",
        )
        # mornings: food is right, chosen in half of the rows; afternoons: sport, in a
        # third
        assert estimate.value == pytest.approx(0.5 * (1 / 2 + 1 / 3), abs=0.06)
        assert any("16.67% of" in note for note in estimate.notes)

    def test_dropped_decisions_are_weights(self, tmp_path):
        path = self.write(
            tmp_path / "log.json",
            lambda record, i: {**record, "pdrop": 0.5 * (i % 2)},
        )
        mapping = inspect_table(path).mapping
        log = open_transitions(path, mapping=mapping)
        np.testing.assert_array_equal(log.weights[:4], [1.0, 2.0, 1.0, 2.0])

    @pytest.mark.parametrize(
        ("changed", "words"),
        [
            (
                lambda c: {**c, "_multi": [{"x": 1.5}, *c["_multi"][1:]]},
                "nothing identifies those of decision 8",
            ),
            (
                lambda c: {**c, "_multi": [c["_multi"][0]] * 3},
                "nothing identifies those of decision 8",
            ),
            (lambda c: {"User": c["User"]}, "decision 8 lists no actions"),
        ],
    )
    def test_sets_of_actions_that_nothing_identifies_are_refused(
        self, tmp_path, changed, words
    ):
        def change(record, i):
            if i != 7:
                return record
            return {**record, "c": changed(record["c"])}

        path = self.write(tmp_path / "log.json", change)
        assert_refused(run_cli("data", "inspect", path), words)

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"_skipLearn": True}, "not carried out"),
            ({"pdrop": 1.0}, "below 1"),
            ({"_labelIndex": 3}, "does not say which action"),
            (
                {"_labelIndex": None, "_label_Action": "1"},
                "does not say which action",
            ),
        ],
    )
    def test_decisions_that_say_too_little_are_refused(self, tmp_path, change, words):
        path = self.write(tmp_path / "log.json", lambda record, i: {**record, **change})
        assert_refused(run_cli("data", "inspect", path), words)


def open_bandit(path):
    generator = np.random.default_rng(0)
    rows = 2000
    items = generator.integers(5, size=rows)
    hashes = [f"{i:032x}" for i in generator.integers(2**60, size=6)]
    frame = pl.DataFrame(
        {
            "": range(rows),
            "timestamp": [
                f"2019-11-24 00:{i // 60:02d}:{i % 60:02d}.5+00:00" for i in range(rows)
            ],
            "item_id": items,
            "position": generator.integers(1, 4, rows),
            "click": (generator.random(rows) < 0.1 * items).astype(int),
            "propensity_score": np.full(rows, 0.2),
            **{
                f"user_feature_{k}": [
                    hashes[i] for i in generator.integers(6, size=rows)
                ]
                for k in range(4)
            },
            "user-item_affinity_0": np.zeros(rows),
            "user-item_affinity_1": generator.integers(3, size=rows).astype(float),
        }
    )
    frame.write_csv(path)


def test_open_bandit_rows_are_decisions_on_items(tmp_path):
    open_bandit(tmp_path / "all.csv")
    inspection = inspect_table(tmp_path / "all.csv")
    mapping = inspection.mapping
    assert inspection.open == {}
    assert (mapping["one_step"], mapping["action"]) == (True, ["item_id"])
    assert (mapping["reward"], mapping["behavior_probability"]) == (
        "click",
        "propensity_score",
    )
    assert "episode" not in mapping
    log = open_transitions(tmp_path / "all.csv", mapping=mapping)
    value = koffline.evaluate(
        log,
        lambda observations: np.tile(np.eye(5)[4], (len(observations), 1)),
        gamma=0.5,
        estimator="wis",
    ).value
    assert value == pytest.approx(0.4, abs=0.08)  # 400 rows: standard error 0.025


def test_open_bandit_rows_without_propensities_are_decisions_on_items_too():
    mapping = inspect_table("datasets/open_bandit/men_bts.parquet").mapping
    assert (mapping["one_step"], mapping["action"]) == (True, ["item_id"])
    assert mapping["reward"] == "click"
    assert "episode" not in mapping
    assert "behavior_probability" not in mapping


def test_options_that_are_not_given_leave_what_the_tool_says(tmp_path):
    open_bandit(tmp_path / "all.csv")
    written = tmp_path / "m.yaml"
    done = run_cli("data", "inspect", tmp_path / "all.csv", "--out", written)
    assert done.exit_code == 0
    by_command = yaml.safe_load(written.read_text())
    assert by_command["action"] in ("item_id", ["item_id"])
    assert by_command["behavior_probability"] == "propensity_score"


@pytest.mark.parametrize(
    "columns", [{}, {"icustayid": "stay_id"}, {"icustayid": "patientid"}]
)
def test_outcomes_of_a_stay_are_no_features(tmp_path, columns):
    generator = np.random.default_rng(0)
    number = LOG["episode"]
    died = generator.random(60) < 0.3
    names = {
        "bloc": LOG["step"] + 1,
        "icustayid": 200003 + 7 * number,
        "charttime": 7245486000 + 1_000_000 * number + 14_400 * LOG["step"],
        "gender": generator.integers(2, size=60)[number],
        "died_in_hosp": died[number].astype(int),
        "mortality_90d": (died | (generator.random(60) < 0.2))[number].astype(int),
        "morta_hosp": died[number].astype(int),
        "HR": LOG["obs"][:, 0] + 0.01 * generator.standard_normal(len(number)),
        "input_4hourly": 50.0 * generator.integers(5, size=len(number)),
        "max_dose_vaso": 0.1 * generator.integers(3, size=len(number)),
        "reward": LOG["reward"],
    }
    renamed = {columns.get(name, name): values for name, values in names.items()}
    pl.DataFrame(renamed).write_csv(tmp_path / "log.csv")
    inspection = inspect_table(tmp_path / "log.csv")
    mapping = inspection.mapping
    assert mapping["episode"] == columns.get("icustayid", "icustayid")
    assert "last_row" in inspection.open
    used = str(mapping["observations"])
    for outcome in ("died_in_hosp", "mortality_90d", "morta_hosp"):
        assert outcome not in used
        assert mapping.get("terminal") != outcome
    if not columns:
        assert mapping["time"] == "bloc"
        assert mapping["action"] == ["input_4hourly", "max_dose_vaso"]


def test_outcomes_are_no_reward_of_every_row(tmp_path):
    frame = pl.DataFrame(
        {
            "icustayid": LOG["episode"],
            "bloc": LOG["step"],
            "HR": LOG["obs"][:, 0],
            "max_dose_vaso": LOG["action"],
            "mortality_90d": LOG["episode"] % 2,
        }
    )
    frame.write_csv(tmp_path / "log.csv")
    problems = " ".join(inspect_table(tmp_path / "log.csv").problems)
    assert "an outcome (mortality_90d) is the same in all rows" in problems


class TestFormats:
    def test_a_tool_may_be_named(self, tmp_path):
        path = tmp_path / "all.csv"
        open_bandit(path)
        printed = run_cli("data", "inspect", path, "--format", "open-bandit").stdout
        assert "layout: Open Bandit Dataset" in printed

    def test_unknown_and_wrong_names_are_one_line(self, tmp_path):
        path = tmp_path / "all.csv"
        open_bandit(path)
        assert_refused(
            run_cli("data", "inspect", path, "--format", "obd"),
            "format 'obd' is unknown; known are ai-clinician, coach",
        )
        assert_refused(
            run_cli("data", "inspect", path, "--format", "rllib"),
            "this is no table of rllib, which has",
        )

    @pytest.mark.parametrize(
        ("name", "tool"),
        [
            ("sb3", "stable-baselines3"),
            ("tianshou ring", "tianshou"),
            ("rllib json", "rllib"),
            ("rllib parquet", "rllib"),
            ("rlds parquet", "rlds"),
            ("robomimic", "robomimic"),
        ],
    )
    def test_a_named_tool_needs_no_mapping(self, tmp_path, name, tool):
        file, write, title, _ = LAYOUTS[name]
        path = tmp_path / file
        write(chain(episodes=12), path)
        summary = json.loads(succeed("data", "info", path, "--format", tool, "--json"))
        assert title in summary["layout"]
        proposed = inspect_table(path).mapping
        log = open_transitions(path, mapping=mapping_of_tool(path, tool, None))
        assert log.sha256 == open_transitions(path, mapping=proposed).sha256
        assert summary["sha256"] == log.sha256

    def test_commands_answer_by_it(self, tmp_path):
        path = tmp_path / "all.csv"
        open_bandit(path)
        log = f"{path} --format open-bandit --gamma 0.5 --json"
        answer = succeed(*f"evaluate {log} --policy uniform --estimator wis".split())
        assert json.loads(answer)["n_transitions"] == 2000
        policies = "--policies uniform epsilon:0.5:uniform --estimator wis"
        ranking = json.loads(succeed(*f"select {log} {policies}".split()))
        assert len(ranking["policies"]) == 2
        quick = "--set steps=20 --set full_replicas=1 --set resampled_replicas=2"
        model = f"--policy uniform --model fqe {quick}"
        answer = json.loads(succeed(*f"diagnose {log} {model}".split()))
        assert 0.0 < answer["test"]["p_value"] <= 1.0

    def test_what_only_the_user_can_say_is_one_line_and_an_option_answers(
        self, tmp_path
    ):
        file, write, _, answers = LAYOUTS["coach"]
        path = tmp_path / file
        write(LOG, path)
        words = f"data info {path} --format coach"
        remedy = f"koffline data inspect {path} --format coach --out mapping.yaml"
        assert_refused(
            run_cli(*words.split()),
            f"only you can say last_row: cut | last_row: terminal; write it with {remedy}",
        )
        assert "rows" in succeed(*f"{words} --last-row {answers['last_row']}".split())

    def test_options_come_before_what_is_proposed(self, tmp_path):
        path = tmp_path / "all.csv"
        open_bandit(path)
        request = {"reward": "2 * click", "one_step": True}
        mapping = mapping_of_tool(path, "open-bandit", request)
        assert (mapping.reward, list(mapping.action)) == ("2 * click", ["item_id"])

    def test_another_tools_log_is_refused(self, tmp_path):
        path = tmp_path / "all.csv"
        open_bandit(path)
        for words, message in {
            "--format rllib": "this is no table of rllib",
            "--format obd": "format 'obd' is unknown; known are ai-clinician",
        }.items():
            line = f"evaluate {path} {words} --policy uniform --gamma 0.9"
            assert_refused(run_cli(*line.split()), message)
        log = ROOT / "datasets" / "cartpole.hdf5"
        assert_refused(
            run_cli("data", "info", log, "--format", "rllib"),
            "is no log of rllib but a HDF5 file with an array for each column",
        )


class TestJson:
    @pytest.mark.parametrize(
        "text",
        [
            '[{"x": 1.5, "a": 0}, {"x": 2.5, "a": 1}]',
            '{"x": 1.5, "a": 0}\n\n{"x": 2.5, "a": 1}\n',
            '{\n "reward": [0, 1],\n "x": [1.5, 2.5],\n "a": [0, 1]\n}',
        ],
    )
    def test_rows_may_be_lines_a_list_or_columns(self, tmp_path, text):
        (tmp_path / "log.txt").write_text(text)
        inspection = inspect_table(tmp_path / "log.txt")
        columns = {column.name: column for column in inspection.columns}
        assert columns["x"].values.to_list() == [1.5, 2.5]
        assert columns["a"].values.to_list() == [0, 1]

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ('{"a": 1', "its JSON cannot be read"),
            ('{"a": 1}\n{"a": }\n', "its JSON cannot be read"),
            ("[1, 2]", "a single value in place 1"),
            ('{"steps": [1]}', "steps of object 1 are no objects"),
        ],
    )
    def test_broken_files_are_one_line(self, tmp_path, text, words):
        (tmp_path / "log.json").write_text(text)
        assert_refused(run_cli("data", "inspect", tmp_path / "log.json"), words)

    def test_json_beside_tables_describes_them(self, tmp_path):
        layouts.LAYOUTS["rllib parquet"][1](LOG, tmp_path / "rows.parquet")
        (tmp_path / "stats.json").write_text("{}")
        assert inspect_table(tmp_path).rows == len(LOG["action"])


def test_terminals_inside_of_a_trajectory_are_said(tmp_path):
    """As in D4RL's antmaze, where a goal is flagged and the recording goes on."""
    generator = np.random.default_rng(0)
    places = np.cumsum(0.1 * generator.standard_normal((40, 50, 2)), axis=1)
    terminals = np.zeros((40, 50), bool)
    terminals[:, 30:40] = True
    timeouts = np.zeros((40, 50), bool)
    timeouts[:, -1] = True
    with h5py.File(tmp_path / "antmaze.hdf5", "w") as file:
        file["observations"] = places.reshape(-1, 2)
        file["actions"] = generator.uniform(-1, 1, (2000, 2))
        file["rewards"] = terminals.reshape(-1).astype(float)
        file["terminals"] = terminals.reshape(-1)
        file["timeouts"] = timeouts.reshape(-1)
    notes = " ".join(open_transitions(tmp_path / "antmaze.hdf5").metadata.notes)
    assert "starts: after 400 rows flagged terminals the recording goes on" in notes
