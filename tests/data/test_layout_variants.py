"""Logs of other tools in another order, with further columns, or with less than their
makers write: the right rows, or one question.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

import koffline
from koffline.data.sources import open_transitions
from koffline.data.table.inspection import inspect_table
from koffline.errors import ConfigError, DataError
from tests.data import layouts
from tests.data.layouts import chain, split_by_episode
from tests.refusals import one_line

LOG = chain()
ROWS = len(LOG["action"])


def assert_rows(log: Any, kept: Any = slice(None)) -> None:
    np.testing.assert_allclose(log.observations, LOG["obs"][kept])
    np.testing.assert_array_equal(log.actions, LOG["action"][kept])
    np.testing.assert_array_equal(log.terminated, LOG["terminated"][kept])


def rllib_columns() -> dict[str, list[Any]]:
    """Columns that a learner adds come first, and unrolls cut episodes."""
    return {
        "unroll_id": (np.arange(ROWS) // 7).tolist(),
        "agent_index": [0] * ROWS,
        "action_dist_inputs": [[0.1, 0.2]] * ROWS,
        "vf_preds": [0.3] * ROWS,
        "advantages": np.linspace(-1, 1, ROWS).tolist(),
        "value_targets": np.linspace(0, 1, ROWS).tolist(),
        "t": LOG["step"].tolist(),
        "rewards": LOG["reward"].tolist(),
        "actions": LOG["action"].tolist(),
        "eps_id": (1000 + 7 * LOG["episode"]).tolist(),
        "new_obs": LOG["following"].tolist(),
        "obs": LOG["obs"].tolist(),
        "action_logp": [float(np.log(0.5))] * ROWS,
    }


FLAGS: dict[str, dict[str, list[Any]]] = {
    "terminateds": {
        "truncateds": LOG["truncated"].tolist(),
        "terminateds": LOG["terminated"].tolist(),
    },
    "dones": {"dones": (LOG["terminated"] | LOG["truncated"]).tolist()},
}


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("ending", [".json", ".parquet"])
def test_rllib_episodes_are_those_of_eps_id(
    tmp_path: Path, ending: str, flags: str
) -> None:
    path = tmp_path / f"log{ending}"
    columns = {**rllib_columns(), **FLAGS[flags]}
    if ending == ".json":
        batches = []
        for start in range(0, ROWS, 7):
            piece = {key: values[start : start + 7] for key, values in columns.items()}
            batches.append(json.dumps({**piece, "type": "SampleBatch"}))
        path.write_text("\n".join(batches))
    else:
        pl.DataFrame(columns).write_parquet(path)
    inspection = inspect_table(path)
    mapping = dict(inspection.mapping)
    assert (mapping["episode"], mapping["time"]) == ("eps_id", "t")
    assert (mapping["action"], mapping["observations"]) == (["actions"], ["obs"])
    assert mapping["next_observations"] == ["new_obs"]
    if flags == "terminateds":
        assert inspection.open == {}
        assert_rows(open_transitions(path, mapping=mapping))
        return
    # older versions marked time limits, too
    assert list(inspection.open) == ["terminal"]
    with one_line(DataError, match="leaves terminal open"):
        open_transitions(path, mapping=mapping)
    inspection.answer(last_row="cut")
    log = open_transitions(path, mapping=inspection)
    assert len(log) == ROWS
    assert not log.terminated.any()


def test_features_of_coach_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    frame = pl.DataFrame(
        {
            "episode_name": [f"run {number}" for number in LOG["episode"]],
            "transition_number": LOG["step"],
            "state_feature_1": LOG["obs"][:, 1],
            "state_feature_0": LOG["obs"][:, 0],
            "reward": LOG["reward"],
            "episode_id": LOG["episode"],
            "action": LOG["action"],
        }
    )
    frame.write_csv(tmp_path / "log.csv")
    mapping = inspect_table(tmp_path / "log.csv").mapping
    assert mapping["episode"] == "episode_id"
    assert mapping["observations"] == ["state_feature_0", "state_feature_1"]


def rlds_steps(observation: Any) -> str:
    """Episodes of steps; observation: makes one of features."""
    episodes = []
    for episode in split_by_episode(LOG):
        steps = []
        features = [*episode["obs"], episode["following"][-1]]
        for i, feature in enumerate(features):
            is_last = i == len(features) - 1
            step: dict[str, Any] = {
                "is_last": is_last,
                "is_first": i == 0,
                "is_terminal": bool(is_last and episode["terminated"][-1]),
                "action": 0,
                "reward": 0.0,
                "observation": observation(feature),
            }
            if not is_last:
                step["action"] = int(episode["action"][i])
                step["reward"] = float(episode["reward"][i])
            steps.append(step)
        episodes.append(json.dumps({"steps": steps}))
    return "\n".join(episodes)


def test_numbers_beside_a_list_of_one_observation_are_asked_about(
    tmp_path: Path,
) -> None:
    path = tmp_path / "log.json"
    path.write_text(
        rlds_steps(lambda x: {"place": [float(x[0])], "parity": float(x[1])})
    )
    inspection = inspect_table(path)
    assert inspection.open == {
        "observations": [{"observations": ["observation.place"]}]
    }
    (problem,) = inspection.problems
    assert problem.startswith("observation.parity: left out beside the list")
    with one_line(DataError, match="leaves observations open"):
        open_transitions(path, mapping=inspection.mapping)
    inspection.answer(observations=["observation.place"])
    assert inspection.problems == []
    log = open_transitions(path, mapping=inspection)
    np.testing.assert_allclose(log.observations, LOG["obs"][:, :1])
    # the remedies that are named: one list, or columns of single numbers
    for whole in (
        lambda x: x.tolist(),
        lambda x: {"place": float(x[0]), "parity": float(x[1])},
    ):
        path.write_text(rlds_steps(whole))
        inspection = inspect_table(path)
        assert inspection.open == {}
        assert_rows(open_transitions(path, mapping=inspection.mapping))


def decisions(n_actions: int) -> str:
    """Decisions of VowpalWabbit among actions that nothing names: they have numbers."""
    generator = np.random.default_rng(0)
    lines = []
    for _ in range(400):
        place = int(generator.integers(n_actions))
        actions = [{"price": 1.5 * k, "size": 2.0} for k in range(n_actions)]
        record = {
            "c": {"user": {"age": float(generator.random())}, "_multi": actions},
            "_label_cost": -float(place == 2),
            "_label_probability": 1.0 / n_actions,
            "_labelIndex": place,
        }
        lines.append(json.dumps(record))
    return "\n".join(lines)


def test_decisions_among_numbered_actions_are_evaluated(tmp_path: Path) -> None:
    path = tmp_path / "log.json"
    path.write_text(decisions(3))
    inspection = inspect_table(path)
    assert (inspection.problems, inspection.open) == ([], {})
    estimate = koffline.evaluate(
        path,
        lambda states: np.full(len(states), 3),
        mapping=inspection,
        estimator="wis",
    )
    assert estimate.value == pytest.approx(1.0)


@pytest.mark.parametrize(
    "labels", [["1", "2", "3"], ["01", "02", "10"], ["-2", "7", "10"], ["0", "1", "2"]]
)
@pytest.mark.parametrize("kind", ["frame", "parquet", "json", "csv"])
def test_actions_that_are_texts_of_numbers_are_what_inspect_proposes(
    tmp_path: Path, kind: str, labels: list[str]
) -> None:
    generator = np.random.default_rng(0)
    places = generator.integers(3, size=300)
    frame = pl.DataFrame(
        {
            "x": generator.normal(size=300),
            "action": [labels[place] for place in places],
            "reward": (places == 2).astype(float),
        }
    )
    source: Any = frame
    if kind != "frame":
        source = tmp_path / f"log.{kind}"
    if kind == "parquet":
        frame.write_parquet(source)
    elif kind == "csv":
        frame.write_csv(source)
    elif kind == "json":
        source.write_text("\n".join(map(json.dumps, frame.to_dicts())))
    mapping = {**koffline.inspect(source).mapping, "one_step": True}
    log = open_transitions(source, mapping=mapping)
    np.testing.assert_array_equal(log.actions, places)


@pytest.mark.parametrize("names", [[1, 2, 10], ["1", "2", "10"]])
def test_action_names_may_be_numbers_where_the_column_has_texts(names: Any) -> None:
    frame = pl.DataFrame({"x": [0.1, 0.2], "a": ["10", "2"], "r": [0.0, 1.0]})
    mapping = {
        "one_step": True,
        "observations": "x",
        "action": "a",
        "reward": "r",
        "action_names": names,
    }
    assert open_transitions(frame, mapping=mapping).actions.tolist() == [2, 1]


@pytest.mark.parametrize(
    ("listed", "noted"),
    [
        ({}, ["a", "c"]),
        ({"action_names": ["none", "mail"]}, ["c"]),
        ({"encode": {"c": {"one-hot": ["NA", "b"]}}}, ["a"]),
        (
            {
                "action_names": ["none", "mail"],
                "encode": {"c": {"ordinal": ["NA", "b"]}},
            },
            [],
        ),
    ],
)
def test_words_for_missing_that_the_mapping_lists_are_labels_without_a_note(
    listed: dict[str, Any], noted: list[str]
) -> None:
    frame = pl.DataFrame(
        {
            "x": [0.1, 0.2, 0.3],
            "a": ["none", "mail", "none"],
            "c": ["NA", "b", "b"],
            "r": [1.0, 0.0, 1.0],
        }
    )
    mapping = {
        "one_step": True,
        "observations": ["x", "c"],
        "action": "a",
        "reward": "r",
        "encode": {"c": "one-hot"},
        **listed,
    }
    notes = open_transitions(frame, mapping=mapping).metadata.notes
    assert [
        name
        for name in ("a", "c")
        if any(f"{name} is a word such as NA" in note for note in notes)
    ] == noted


def test_a_missing_gamma_is_asked_for_in_the_words_of_both(tmp_path: Path) -> None:
    layouts.LAYOUTS["iql"][1](LOG, tmp_path / "log.npz")
    mapping = inspect_table(tmp_path / "log.npz").mapping
    with one_line(ConfigError, match="gamma is missing") as error:
        koffline.evaluate(tmp_path / "log.npz", "uniform", mapping=mapping)
    assert "--gamma 0.99 (gamma=0.99 in Python)" in str(error.value)
