"""Columns that tell what happens later are found in the rows; right ones are left
alone.
"""

import numpy as np
import polars as pl
import pytest

from koffline.data.table.inspection import inspect_table

EPISODES = 120
LENGTH = 25


def walk(momentum=0.0, noise=0.3):
    """Columns of a walk that actions move, with its next two places: a state of two
    numbers, of which the second has a memory, and a reward for place and action.
    """
    generator = np.random.default_rng(3)
    rows = []
    for episode in range(EPISODES):
        place = generator.normal()
        speed = generator.normal()
        wind = 0.0
        steps = []
        for step in range(LENGTH + 2):
            action = int(generator.integers(3))
            reward = place - 0.4 * action + 0.05 * generator.normal()
            steps.append((episode, step, place, speed, wind, action, reward))
            pushed = 0.5 * (action - 1) + noise * generator.normal()
            place = 0.8 * place + 0.3 * speed + pushed
            speed = 0.9 * speed + momentum * pushed + noise * generator.normal()
            wind = 0.7 * wind + generator.normal()
        rows += steps
    names = ("id", "t", "place", "speed", "wind", "action", "reward")
    frame = pl.DataFrame(rows, schema=names, orient="row")
    later = [
        pl.col("place").shift(-1).over("id").alias("next"),
        pl.col("place").shift(-2).over("id").alias("second"),
        pl.col("wind").shift(-1).over("id").alias("next_wind"),
        pl.col("place").shift(1).over("id").alias("before"),
    ]
    frame = frame.with_columns(later).filter(pl.col("t") < LENGTH)
    done = (pl.col("t") == LENGTH - 1) & (pl.col("id") % 2 == 0)
    jitter = generator.normal(size=len(frame))
    return frame.with_columns(done=done, jitter=pl.Series(jitter))


def inspected(frame, column, path, beside=()):
    """What inspect says of a table of the walk with one more column ``x``, and with
    those ``beside`` it of the frame's own.
    """
    used = ["id", "t", "place", "speed", "action", "reward", "done"]
    frame = frame.with_columns(column.alias("x")).select([*used, *beside, "x"])
    frame.write_csv(path)
    return inspect_table(path)


place = pl.col("place")
following = pl.col("next")
reward = pl.col("reward")
to_go = reward.reverse().cum_sum().reverse().over("id")


@pytest.mark.parametrize(
    ("column", "words"),
    [
        (following, "place one row later"),
        (following * 9 / 5 + 32, "tells place one row later"),
        ((following * 10).round(1), "tells place one row later"),
        (following + 0.02 * pl.col("jitter"), "tells place one row later"),
        (following.exp(), "tells place one row later"),
        (following - place, "tells the next change of place"),
        ((following - place).round(2), "tells the next change of place"),
        ((following > place).cast(pl.Int64), "tells the next change of place"),
        (following > place, "tells the next change of place"),
        (pl.col("second"), "tells place two rows later"),
        (reward, "tells reward of the same row"),
        (
            (reward * 1.1 + 0.01 * pl.col("jitter")).round(2),
            "tells reward of the same row",
        ),
        (to_go, "the sum of the rewards that follow"),
        (to_go.round(2), "the sum of the rewards that follow"),
        (to_go.round(1), "the sum of the rewards that follow"),
        (reward.cum_sum().over("id"), "the sum of the rewards up to that of its own"),
        (reward.sum().over("id"), "in every episode it is its sum of rewards"),
        (
            reward.sum().over("id") + 0.1 * pl.col("jitter"),
            "goes with its sum of rewards",
        ),
        (place.max().over("id"), "in every episode it is the largest place in it"),
    ],
)
def test_what_is_not_known_before_the_action(tmp_path, column, words):
    inspection = inspected(walk(), column, tmp_path / "log.csv")
    (problem,) = [text for text in inspection.problems if text.startswith("x: ")]
    assert words in problem
    left_out = {"observations": ["place", "speed"]}
    if "observations" in inspection.open:
        assert inspection.open["observations"][0] == left_out
    else:
        assert inspection.mapping["observations"] == left_out["observations"]


@pytest.mark.parametrize(
    "column",
    [
        pl.col("before").fill_null(0.0),
        (place - pl.col("before")).fill_null(0.0),
        place * 9 / 5 + 32,
        (place > 0).cast(pl.Int64),
        pl.col("wind"),
        pl.col("next_wind") + 0.3 * pl.col("jitter"),
        pl.col("t") * 1.0,
        LENGTH - pl.col("t"),
        (reward.cum_sum() - reward).over("id"),
        100 - (reward.cum_sum() - reward).over("id"),
        pl.col("id").hash(1) % 7,
        pl.col("jitter").first().over("id"),
        (pl.col("id") * 0.01 + pl.col("t") * 0.2).sin(),
        pl.col("jitter"),
        reward.shift(1).over("id").fill_null(0.0),
    ],
    ids=[
        "the place before",
        "the last change",
        "another unit",
        "a flag of the state",
        "weather that persists",
        "a forecast with an error",
        "the step",
        "steps that are left of a course",
        "earned so far",
        "a budget",
        "a category of the episode",
        "a quantity of the episode",
        "a trend",
        "noise",
        "the last reward",
    ],
)
def test_what_is_known_before_the_action_stays(tmp_path, column):
    inspection = inspected(walk(), column, tmp_path / "log.csv", ["wind"])
    assert "observations" not in inspection.open
    assert "x" in inspection.mapping["observations"]


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_a_speed_that_moves_the_place_exactly_is_no_future(tmp_path, noise):
    """Its last value and the last action tell much of it, whoever acts on it."""
    generator = np.random.default_rng(5)
    rows = []
    for episode in range(EPISODES):
        place = generator.normal()
        speed = generator.normal()
        for step in range(LENGTH):
            force = -0.5 * place - speed + generator.normal()
            rows.append((episode, step, place, speed, force, -(place**2), False))
            place += 0.1 * speed
            speed += 0.1 * force + noise * generator.normal()
    names = ("id", "t", "place", "speed", "action", "reward", "done")
    path = tmp_path / "log.csv"
    pl.DataFrame(rows, schema=names, orient="row").write_csv(path)
    inspection = inspect_table(path)
    assert inspection.mapping["observations"] == ["place", "speed"]


def test_of_two_columns_of_later_each_is_found(tmp_path):
    """Each follows from the other and the place, so that either would hide the other."""
    frame = walk().with_columns(after=(pl.col("next") * 2 + 1).round(3))
    change = pl.col("next") - pl.col("place")
    inspection = inspected(frame, change, tmp_path / "log.csv", ["after"])
    assert sorted(inspection.doubtful) == ["after", "x"]
