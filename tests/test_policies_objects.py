"""Policies as a session holds them: functions of frames, classifiers, networks."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pytest
import torch

import koffline
from koffline.data.spaces import Continuous, Discrete, Features
from koffline.errors import PolicyError
from koffline.policy_specs import as_policy
from tests.refusals import one_line

sklearn = pytest.importorskip("sklearn")
from sklearn.linear_model import (  # noqa: E402
    LinearRegression,
    LogisticRegression,
    RidgeClassifier,
)
from sklearn.pipeline import make_pipeline  # noqa: E402
from sklearn.preprocessing import StandardScaler  # noqa: E402

ROWS = 40
STATES = np.random.default_rng(1).normal(size=(ROWS, 2))
FRAME = pd.DataFrame({"speed": STATES[:, 0], "angle": STATES[:, 1]})
NAMED = Features(("speed", "angle"), actions=("left", "right"))
UNNAMED_ACTIONS = Features(("speed", "angle"))
TWO = Discrete(2)
RIGHT = (STATES[:, 1] > 0.0).astype(int)


def probabilities(policy: Any, features: Features | None = NAMED) -> np.ndarray:
    return as_policy(policy, TWO, (2,), features=features).probabilities(STATES)


def by_name(table):
    assert isinstance(table, pl.DataFrame)
    return (table["angle"] > 0.0).cast(pl.Int64)


def by_polars(rows: pl.DataFrame):
    assert isinstance(rows, pl.DataFrame)
    return rows.select(
        left=(pl.col("angle") <= 0).cast(pl.Float64),
        right=(pl.col("angle") > 0).cast(pl.Float64),
    )


def by_pandas(rows: pd.DataFrame):
    assert isinstance(rows, pd.DataFrame)
    rows["angle"] = 1.0 * rows["angle"]  # its own copy
    return np.where(rows["angle"] > 0.0, "right", "left")


def by_optional(rows: pd.DataFrame | None):
    return by_pandas(rows)


def by_text(rows: pandas.DataFrame):  # noqa: F821
    return by_pandas(rows)


def table_of_pandas(table: pd.DataFrame):
    return by_pandas(table)


def with_options(rows, column="angle"):
    return rows[column].to_numpy() > 0.0


class Callable:
    def __call__(self, rows: pl.DataFrame):
        return by_name(rows)


FRAME_FUNCTIONS = {
    "named table": by_name,
    "polars": by_polars,
    "pandas": by_pandas,
    "optional": by_optional,
    "text of an annotation": by_text,
    "table annotated as pandas": table_of_pandas,
    "object": Callable(),
    "method": Callable().__call__,
    "partial": functools.partial(by_polars),
    "frame_policy": koffline.frame_policy(with_options),
    "frame_policy of pandas": koffline.frame_policy(
        lambda rows: by_pandas(rows), "pandas"
    ),
}


@pytest.mark.parametrize("kind", FRAME_FUNCTIONS)
def test_functions_of_frames(kind: str) -> None:
    assert probabilities(FRAME_FUNCTIONS[kind])[:, 1].tolist() == RIGHT.tolist()


def test_a_frame_has_categories_as_texts() -> None:
    features = Features.from_extra(
        {
            "feature_names": ["color=blue", "color=red"],
            "encodings": {"color": {"one-hot": ["blue", "red"]}},
        }
    )
    for frame in (pl.DataFrame, pd.DataFrame):

        def act(rows):
            assert isinstance(rows, frame)  # noqa: B023
            return [int(color == "red") for color in rows["color"]]

        act.__annotations__["rows"] = frame
        policy = as_policy(act, TWO, (2,), features=features)
        assert policy.probabilities(np.eye(2))[:, 1].tolist() == [0.0, 1.0]


def test_a_function_that_fails_on_arrays_is_told_of_frames_once() -> None:
    def act(rows):
        return rows["angle"] > 0.0

    with one_line(PolicyError, "it gets an array (N, d); for a frame") as caught:
        probabilities(act)
    message = str(caught.value)
    assert message.count("koffline.frame_policy(function)") == 1
    # the printed remedies
    assert probabilities(koffline.frame_policy(act))[:, 1].tolist() == RIGHT.tolist()
    act.__annotations__["rows"] = pd.DataFrame
    assert probabilities(act)[:, 1].tolist() == RIGHT.tolist()
    with one_line(PolicyError, "check that it accepts such a batch"):
        probabilities(lambda rows: rows["angle"], None)
    with one_line(PolicyError, "the columns of this log have no names"):
        probabilities(act, None)


def test_a_function_that_fails_on_a_frame_is_told_which_frame_it_received() -> None:
    def by_attribute(table):
        return np.where(table.angle > 0.0, "right", "left")  # pandas's way

    received = "it received a polars frame with the columns speed, angle"
    with one_line(PolicyError, received, "koffline.frame_policy(function, 'pandas')"):
        probabilities(by_attribute)
    # the printed remedies
    policy = koffline.frame_policy(by_attribute, "pandas")
    assert probabilities(policy)[:, 1].tolist() == RIGHT.tolist()
    by_attribute.__annotations__["table"] = pd.DataFrame
    assert probabilities(by_attribute)[:, 1].tolist() == RIGHT.tolist()

    def by_expression(rows: pd.DataFrame):
        return rows.select(pl.col("angle") > 0.0).to_series()  # polars's way

    with one_line(PolicyError, "a pandas frame", "annotate the parameter as polars."):
        probabilities(by_expression)
    by_expression.__annotations__["rows"] = pl.DataFrame
    assert probabilities(by_expression)[:, 1].tolist() == RIGHT.tolist()


def test_the_frame_that_a_function_received_has_categories_as_one_column() -> None:
    features = Features.from_extra(
        {
            "feature_names": ["color=blue", "color=red"],
            "encodings": {"color": {"one-hot": ["blue", "red"]}},
        }
    )
    policy = as_policy(lambda table: table["colour"], TWO, (2,), features=features)
    with one_line(PolicyError, "a polars frame with the columns color; "):
        policy.probabilities(np.eye(2))


LABELS = np.where(RIGHT, "right", "left")


def fitted(labels: Any, data: Any = STATES, model: Any = None) -> Any:
    if model is None:
        model = LogisticRegression()
    return model.fit(data, labels)


def expected(model: Any, data: Any = STATES) -> list[Any]:
    return model.predict_proba(data).tolist()


CLASSIFIERS = {
    "texts": (lambda: fitted(LABELS), STATES, NAMED),
    "numbers": (lambda: fitted(RIGHT), STATES, UNNAMED_ACTIONS),
    "floats": (lambda: fitted(1.0 * RIGHT), STATES, None),
    "pipeline": (
        lambda: fitted(
            LABELS, model=make_pipeline(StandardScaler(), LogisticRegression())
        ),
        STATES,
        NAMED,
    ),
    "frame": (lambda: fitted(LABELS, FRAME), FRAME, NAMED),
    "frame, other order": (
        lambda: fitted(LABELS, FRAME[["angle", "speed"]]),
        FRAME[["angle", "speed"]],
        NAMED,
    ),
    "frame, one column": (
        lambda: fitted(LABELS, FRAME[["angle"]]),
        FRAME[["angle"]],
        NAMED,
    ),
    "polars frame": (lambda: fitted(LABELS, pl.DataFrame(FRAME)), FRAME, NAMED),
}


@pytest.mark.parametrize("kind", CLASSIFIERS)
def test_classifiers_act_by_their_probabilities(kind: str) -> None:
    make, data, features = CLASSIFIERS[kind]
    model = make()
    chances = probabilities(model, features)
    assert chances == pytest.approx(np.asarray(expected(model, data)), abs=1e-12)


def test_the_order_of_classes_is_that_of_the_logs_actions() -> None:
    features = Features(("speed", "angle"), actions=("right", "left"))
    model = fitted(LABELS)
    assert probabilities(model, features).tolist() == [
        [right, left] for left, right in expected(model)
    ]
    # an action that no row of the fit had is never taken
    three = Features(("speed", "angle"), actions=("left", "none", "right"))
    chances = as_policy(model, Discrete(3), (2,), features=three).probabilities(STATES)
    assert chances[:, 1].tolist() == [0.0] * ROWS
    coded = Features(("speed", "angle"), actions=("10", "20"))
    chances = probabilities(fitted(10 + 10 * RIGHT), coded)
    assert chances == pytest.approx(np.asarray(expected(model)), abs=1e-9)


@pytest.mark.parametrize("labels", [LABELS, RIGHT])
def test_a_classifier_without_probabilities_is_deterministic(labels: Any) -> None:
    features = UNNAMED_ACTIONS
    if labels.dtype.kind == "U":
        features = NAMED
    model = fitted(labels, model=RidgeClassifier())
    chosen = (model.predict(STATES) == sorted(labels)[-1]).astype(float)
    assert probabilities(model, features)[:, 1].tolist() == chosen.tolist()


def test_a_regressor_acts_in_continuous_spaces() -> None:
    model = fitted(STATES @ [[1.0], [2.0]], FRAME, LinearRegression())
    policy = as_policy(model, Continuous(1), (2,), features=UNNAMED_ACTIONS)
    assert policy.deterministic
    assert policy.mean(STATES)[:, 0] == pytest.approx(STATES @ [1.0, 2.0])


def test_of_a_log_without_names_columns_are_taken_in_their_order() -> None:
    model = fitted(RIGHT, FRAME)
    policy = as_policy(model, TWO, (2,))
    assert policy.probabilities(STATES).tolist() == expected(model, FRAME)
    assert (
        "columns have no names: LogisticRegression, which was fitted to speed,"
        in (policy.notes[0])
    )


REFUSED = {
    "not fitted": (LogisticRegression, "no classes_, so that it was not fitted"),
    "other classes": (
        lambda: fitted(RIGHT),
        "its class 0 is no action of this log; its actions are left, right",
    ),
    "missing column": (
        lambda: fitted(LABELS, FRAME.assign(height=STATES[:, 0])),
        "the log's observations lack height",
    ),
    "class itself": (lambda: LogisticRegression, "this is a class; give an instance"),
    "number": (lambda: 3, "a int is not a policy"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_policy_is_refused_in_one_line(case: str) -> None:
    make, words = REFUSED[case]
    with one_line(PolicyError, words):
        probabilities(make())


def test_a_classifier_is_refused_for_continuous_actions() -> None:
    with one_line(PolicyError, "this is a classifier, and the log's actions are"):
        as_policy(fitted(RIGHT), Continuous(1), (2,))


LINEAR = torch.nn.Linear(2, 2)
LOGITS = (
    LINEAR(torch.tensor(STATES, dtype=torch.float32)).detach().numpy().astype(float)
)


def softmax(values: np.ndarray) -> np.ndarray:
    shifted = np.exp(values - values.max(axis=1, keepdims=True))
    return shifted / shifted.sum(axis=1, keepdims=True)


@pytest.mark.parametrize(
    "features", [None, NAMED, Features(("a", "b"), actions=("5", "7"))]
)
def test_networks_of_logits_and_values_are_said_to_be_so(features: Any) -> None:
    chances = probabilities(koffline.softmax_policy(LINEAR), features)
    assert chances == pytest.approx(softmax(LOGITS), abs=1e-6)
    chances = probabilities(koffline.softmax_policy(LINEAR, 0.5), features)
    assert chances == pytest.approx(softmax(2.0 * LOGITS), abs=1e-6)
    chances = probabilities(koffline.greedy_policy(LINEAR), features)
    assert chances.tolist() == np.eye(2)[LOGITS.argmax(axis=1)].tolist()
    chances = probabilities(
        torch.nn.Sequential(LINEAR, torch.nn.Softmax(dim=1)), features
    )
    assert chances == pytest.approx(softmax(LOGITS), abs=1e-6)


def test_logits_without_a_word_are_refused_with_the_remedy() -> None:
    with one_line(PolicyError, "koffline.softmax_policy and koffline.greedy_policy"):
        probabilities(LINEAR)


def test_values_of_a_frame_are_greedy_too() -> None:
    def values(rows: pl.DataFrame):
        return np.stack([-rows["angle"], rows["angle"]], axis=1)

    assert (
        probabilities(koffline.greedy_policy(values))[:, 1].tolist() == RIGHT.tolist()
    )


OUTPUTS = {
    "not finite": (np.full((ROWS, 2), np.nan), "is not finite"),
    "one column": (np.zeros(ROWS), "return one column per action, (N, n)"),
    "three columns": (np.zeros((ROWS, 3)), "the output has shape (40, 3)"),
    "a frame": (FRAME, "its output has named columns"),
}


@pytest.mark.parametrize("wrap", [koffline.softmax_policy, koffline.greedy_policy])
@pytest.mark.parametrize("case", OUTPUTS)
def test_wrong_outputs_are_refused_in_one_line(case: str, wrap: Any) -> None:
    outputs, words = OUTPUTS[case]
    with one_line(PolicyError, words):
        probabilities(wrap(lambda states: outputs))


def test_a_ruled_out_action_has_no_probability() -> None:
    logits = np.tile([0.0, -np.inf], (ROWS, 1))
    for wrap in (koffline.softmax_policy, koffline.greedy_policy):
        assert probabilities(wrap(lambda states: logits))[:, 1].tolist() == [0.0] * ROWS


def test_wrappers_refuse_what_cannot_be_called() -> None:
    for wrap in (
        koffline.softmax_policy,
        koffline.greedy_policy,
        koffline.frame_policy,
    ):
        with one_line(PolicyError, "received"):
            wrap(3)
    with one_line(PolicyError, "temperature 0; give a positive number"):
        koffline.softmax_policy(LINEAR, 0)
    with one_line(PolicyError, "knows polars and pandas, and received 'dask'"):
        koffline.frame_policy(by_name, "dask")


def test_evaluate_takes_a_classifier_and_a_function_of_pandas() -> None:
    frame = pd.concat([FRAME] * 4, ignore_index=True).assign(
        a=np.tile(LABELS, 4), r=1.0, p=0.5
    )
    mapping = {
        "observations": ["speed", "angle"],
        "action": "a",
        "reward": "r",
        "one_step": True,
        "behavior_probability": "p",
    }
    values = []
    for policy in (by_pandas, fitted(LABELS, FRAME, RidgeClassifier())):
        estimate = koffline.evaluate(frame, policy, mapping=mapping, estimator="wis")
        values.append(estimate.value)
    assert values == pytest.approx([1.0, 1.0])
