"""What a Python session holds is a log: every kind gives the rows and the number that
the same rows in a file give, and the same questions are asked.
"""

import datetime
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet
import pytest

import koffline
from koffline.data import import_d3rlpy
from koffline.data.replay import to_d3rlpy
from koffline.data.sources import write_transitions
from koffline.errors import DataError
from tests.data.table_rows import MAPPING
from tests.refusals import one_line

pytestmark = pytest.mark.usefixtures("few_features_of_memory")

pandas = pytest.importorskip("pandas")

EPISODES = 24
LENGTH = 6
QUICK: dict[str, Any] = {
    "gamma": 0.9,
    "estimator": "kloss",
    "steps": 25,
    "full_replicas": 1,
    "resampled_replicas": 2,
    "history": 0,
}


def columns() -> dict[str, Any]:
    """Episodes that all end, as columns of a table: every format keeps all rows."""
    generator = np.random.default_rng(3)
    n = EPISODES * LENGTH
    return {
        "id": np.repeat(np.arange(EPISODES), LENGTH),
        "t": np.tile(np.arange(LENGTH), EPISODES),
        "x_0": generator.normal(size=n),
        "x_1": generator.normal(size=n),
        "a": generator.integers(2, size=n),
        "r": generator.normal(size=n).round(3),
        "done": np.tile(np.arange(LENGTH) == LENGTH - 1, EPISODES),
    }


def own_arrays() -> dict[str, np.ndarray]:
    """The same rows under the keys of D4RL."""
    table = columns()
    return {
        "observations": np.stack([table["x_0"], table["x_1"]], axis=1),
        "actions": table["a"],
        "rewards": table["r"],
        "terminals": table["done"],
        "timeouts": np.zeros(len(table["r"]), bool),
    }


def episodes(*, final_states: bool = True, whole_flags: bool = False) -> list[Any]:
    """The same rows as a list of episodes."""
    arrays = own_arrays()
    listed = []
    for start in range(0, EPISODES * LENGTH, LENGTH):
        rows = slice(start, start + LENGTH)
        observations = arrays["observations"][rows]
        if final_states:
            observations = np.concatenate([observations, observations[-1:]])
        episode = {
            "observations": observations,
            "actions": arrays["actions"][rows],
            "rewards": list(arrays["rewards"][rows]),
            "terminations": arrays["terminals"][rows],
            "truncations": arrays["timeouts"][rows],
            "infos": {"seed": start},
        }
        if whole_flags:
            episode["terminated"] = True
            episode["truncated"] = False
            del episode["terminations"]
            del episode["truncations"]
        listed.append(episode)
    return listed


def minari_dataset(folder: Path) -> Any:
    minari = pytest.importorskip("minari")
    write_transitions(koffline.open_transitions(own_arrays()), folder, "minari")
    return minari.MinariDataset(folder / "data")


def mdp_dataset() -> Any:
    d3rlpy = import_d3rlpy()
    arrays = own_arrays()
    return d3rlpy.dataset.MDPDataset(
        observations=arrays["observations"],
        actions=arrays["actions"].reshape(-1, 1),
        rewards=arrays["rewards"].reshape(-1, 1),
        terminals=arrays["terminals"].astype(np.float32),
        action_space=d3rlpy.ActionSpace.DISCRETE,
    )


def written(folder: Path, name: str) -> str:
    path = folder / name
    frame = pl.DataFrame(columns())
    if path.suffix == ".csv":
        frame.write_csv(path)
    else:
        frame.write_parquet(path)
    return str(path)


def indexed_frame() -> Any:
    """pandas after set_index, a shuffle of columns and a filter: names are in the
    index.
    """
    frame = pandas.DataFrame(columns()).set_index(["id", "t"])
    return frame[["done", "r", "a", "x_1", "x_0"]]


TABLES = {
    "CSV": lambda folder: written(folder, "log.csv"),
    "path": lambda folder: Path(written(folder, "log.parquet")),
    "pandas": lambda folder: pandas.DataFrame(columns()),
    "pandas, index": lambda folder: indexed_frame(),
    "pandas, unnamed index": lambda folder: pandas.DataFrame(
        columns(), index=np.arange(EPISODES * LENGTH)[::-1]
    ),
    "pandas, nullable": lambda folder: pandas.DataFrame(columns()).convert_dtypes(),
    "polars": lambda folder: pl.DataFrame(columns()),
    "polars, lazy": lambda folder: pl.LazyFrame(columns()),
    "Arrow": lambda folder: pa.table(columns()),
    "Arrow batch": lambda folder: pa.RecordBatch.from_pydict(columns()),
    "dict of arrays": lambda folder: columns(),
    "dict of lists": lambda folder: {
        name: values.tolist() for name, values in columns().items()
    },
    "records": lambda folder: pl.DataFrame(
        pandas.DataFrame(columns()).to_dict("records")
    ),
}
ARRAYS = {
    "D4RL's keys": lambda folder: own_arrays(),
    "episodes": lambda folder: episodes(),
    "episodes, no final state": lambda folder: episodes(final_states=False),
    "episodes, one flag": lambda folder: tuple(episodes(whole_flags=True)),
    "MDPDataset": lambda folder: mdp_dataset(),
    "ReplayBuffer": lambda folder: to_d3rlpy(koffline.open_transitions(own_arrays())),
    "columnar buffer": lambda folder: koffline.ColumnarReplayBuffer(
        koffline.open_transitions(own_arrays())
    ),
    "Minari": lambda folder: minari_dataset(folder / "dataset"),
    "Minari's episodes": lambda folder: list(
        minari_dataset(folder / "dataset").iterate_episodes()
    ),
}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> float:
    """The value by the rows in a Parquet file, opened beforehand."""
    path = written(tmp_path_factory.mktemp("table"), "log.parquet")
    log = koffline.open_transitions(path, mapping=MAPPING)
    return koffline.evaluate(log, "uniform", **QUICK).value


@pytest.mark.parametrize("kind", [*TABLES, *ARRAYS])
def test_every_kind_gives_the_number_of_the_file(
    kind: str, expected: float, tmp_path: Path
) -> None:
    options = dict(QUICK)
    if kind in TABLES:
        options["mapping"] = MAPPING
    source = {**TABLES, **ARRAYS}[kind](tmp_path)
    estimate = koffline.evaluate(source, "uniform", **options)
    assert estimate.n_transitions == EPISODES * LENGTH
    assert estimate.n_episodes == EPISODES
    # d3rlpy keeps rewards as float32
    tolerance = 1e-12
    if kind in ("MDPDataset", "ReplayBuffer"):
        tolerance = 1e-5
    assert estimate.value == pytest.approx(expected, rel=tolerance)


def by_name(source: Any, mapping: Any) -> dict[str, Any]:
    """The number of rows that each public function saw."""
    options: dict[str, Any] = {**QUICK, "mapping": mapping}
    of_rows = {"gamma": 0.9, "mapping": mapping}

    def q(observations: np.ndarray, actions: np.ndarray) -> np.ndarray:
        return np.zeros(len(observations))

    ranking = koffline.select_policies(
        source, ["uniform", "epsilon:0.1:uniform"], **options
    )
    del options["estimator"]
    table = koffline.estimate_all(source, "uniform", names="kloss", **options)
    folds = koffline.cross_fit(source, lambda part: q, mapping=mapping)
    parts = koffline.split_transitions(source, mapping=mapping)
    return {
        "select_policies": ranking.n_transitions,
        "estimate_all": table.n_transitions,
        "diagnose": koffline.diagnose(q, source, "uniform", **of_rows).n_transitions,
        "bellman_test": koffline.bellman_test(q, source, "uniform", **of_rows).n,
        "cross_fit": len(folds.folds),
        "split_transitions": sum(map(len, parts)),
        "cross-fitted": koffline.bellman_test(folds, source, "uniform", **of_rows).n,
    }


@pytest.mark.parametrize("kind", ["pandas", "path", "episodes"])
def test_every_function_that_takes_transitions_takes_it(
    kind: str, tmp_path: Path
) -> None:
    mapping = None
    if kind in TABLES:
        mapping = MAPPING
    source = {**TABLES, **ARRAYS}[kind](tmp_path)
    rows = by_name(source, mapping)
    assert set(rows.values()) == {EPISODES * LENGTH}, rows
    koffline.write_transitions(source, tmp_path / "out.hdf5", mapping=mapping)
    assert len(koffline.open_transitions(tmp_path / "out.hdf5")) == EPISODES * LENGTH


def test_a_path_to_shards_stays_on_disk_and_gives_the_same_number(
    tmp_path: Path, expected: float
) -> None:
    from koffline.data.sources import convert_to_shards

    path = written(tmp_path, "log.parquet")
    convert_to_shards(path, tmp_path / "shards", 48, mapping=MAPPING)
    estimate = koffline.evaluate(tmp_path / "shards", "uniform", **QUICK)
    assert estimate.value == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("kind", ["path", "pandas", "polars", "Arrow", "dict of lists"])
def test_groups_by_any_column_of_a_frame(kind: str, tmp_path: Path) -> None:
    source = TABLES[kind](tmp_path)
    segment = np.repeat(np.arange(EPISODES) % 2, LENGTH)
    labels = [f"segment {number}" for number in segment]
    if kind == "path":
        frame = pl.read_parquet(source).with_columns(pl.Series("segment", labels))
        frame.write_parquet(source)
    elif kind == "pandas":
        source["segment"] = labels
    elif kind == "polars":
        source = source.with_columns(pl.Series("segment", labels))
    elif kind == "Arrow":
        source = source.append_column("segment", pa.array(labels))
    else:
        source["segment"] = labels
    estimate = koffline.evaluate(
        source, "uniform", mapping=MAPPING, by="segment", **QUICK
    )
    assert [group.group for group in estimate.groups] == ["segment 0", "segment 1"]
    assert [group.starts for group in estimate.groups] == [12, 12]


def test_rows_of_a_frame_are_ordered_as_those_of_a_file(tmp_path: Path) -> None:
    frame = pandas.DataFrame(columns()).sample(frac=1.0, random_state=1)
    frame.to_csv(tmp_path / "log.csv", index=False)
    of_file = koffline.open_transitions(tmp_path / "log.csv", mapping=MAPPING)
    of_frame = koffline.open_transitions(frame, mapping=MAPPING)
    assert of_frame.sha256 == of_file.sha256
    assert of_frame.metadata.notes == of_file.metadata.notes
    assert of_frame.metadata.source == "the pandas DataFrame"


def unmarked() -> dict[str, Any]:
    """Rows whose episodes end without a flag."""
    table = columns()
    del table["done"]
    return table


@pytest.mark.parametrize(
    "make",
    [pandas.DataFrame, pl.DataFrame, pa.table, dict],
    ids=["pandas", "polars", "Arrow", "dict"],
)
def test_what_inspect_leaves_open_is_asked_of_frames_too(
    make: Any, tmp_path: Path
) -> None:
    pl.DataFrame(unmarked()).write_csv(tmp_path / "log.csv")
    of_file = koffline.inspect(tmp_path / "log.csv")
    inspection = koffline.inspect(make(unmarked()))
    assert inspection.mapping == of_file.mapping
    assert inspection.open == of_file.open
    assert list(inspection.open) == ["last_row"]
    refusals = []
    for source in (tmp_path / "log.csv", make(unmarked())):
        with one_line(DataError, "leaves last_row open; write one of") as caught:
            koffline.evaluate(source, "uniform", mapping=inspection.mapping, **QUICK)
        refusals.append(str(caught.value))
    assert refusals[0] == refusals[1]
    # the printed remedy
    inspection.mapping["last_row"] = "cut"
    log = koffline.open_transitions(make(unmarked()), mapping=inspection.mapping)
    assert log.truncated.sum() == EPISODES


def test_an_inspection_shows_itself() -> None:
    frame = pandas.DataFrame({**unmarked(), "<script>": "<b>x</b>"})
    inspection = koffline.inspect(frame)
    problems = f"{len(inspection.problems)} problems"
    assert repr(inspection) == (
        f"Inspection(the pandas DataFrame: 7 columns; {problems}; open: last_row)"
    )
    assert inspection.roles["episode"] == ("id",)
    assert inspection.roles["observations"][:2] == ("x_0", "x_1")
    text = str(inspection)
    assert text.startswith("the pandas DataFrame, 144 rows looked at\n")
    assert "\nlast_row: '? last_row: cut | last_row: terminal'" in text
    page = inspection._repr_html_()
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert "&lt;b&gt;x&lt;/b&gt;" in page


def test_inspect_is_told_what_no_name_says() -> None:
    frame = pl.DataFrame(columns()).rename({"a": "move", "r": "points", "id": "key"})
    inspection = koffline.inspect(frame, action="move", reward="points", episode="key")
    assert inspection.mapping["action"] == ["move"]
    assert inspection.mapping["reward"] == "points"
    assert inspection.mapping["episode"] == "key"
    with one_line(DataError, "mov", "did you mean"):
        koffline.inspect(frame, action="mov")


def awkward(name: str) -> Any:
    """The frame with one column as people have it."""
    frame = pandas.DataFrame(columns())
    n = len(frame)
    day = datetime.datetime(2024, 1, 31)
    values: dict[str, Any] = {
        "categories": pandas.Categorical(["left", "right"] * (n // 2)),
        "texts": ["left", "right"] * (n // 2),
        "objects": pandas.Series(["left", "right"] * (n // 2), dtype=object),
        "times": pandas.to_datetime([day + datetime.timedelta(i) for i in range(n)]),
        "zones": pandas.date_range("2024-01-31", periods=n, tz="Europe/Paris"),
        "flags": pandas.Series([True, False] * (n // 2), dtype=object),
        "mixed": pandas.Series([1, "1"] * (n // 2), dtype=object),
        "missing": pandas.Series([0.5, None] * (n // 2)),
        "records": [{"a": 1}] * n,
        "sparse": pandas.arrays.SparseArray([0.0, 1.0] * (n // 2)),
        "periods": pandas.period_range("2024-01", periods=n, freq="D"),
        "huge": pandas.Series([2**70] * n, dtype=object),
    }
    return frame.assign(x_2=values[name])


def outcome(source: Any, mapping: Any) -> str:
    """The digest of the rows, or the refusal."""
    try:
        return koffline.open_transitions(source, mapping=mapping).sha256
    except DataError as error:
        return str(error)


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("categories", {"encode": {"x_2": "one-hot"}}),
        ("texts", {"encode": {"x_2": "one-hot"}}),
        ("objects", {"encode": {"x_2": "one-hot"}}),
        ("texts", {"action": "x_2", "observations": ["x_0", "x_1"]}),
        ("categories", {"action": "x_2", "observations": ["x_0", "x_1"]}),
        ("times", {"time": "x_2", "observations": ["x_0", "x_1"]}),
        ("zones", {"time": "x_2", "observations": ["x_0", "x_1"]}),
        ("mixed", {"observations": ["x_0", "x_1"]}),
        ("mixed", {}),
        ("missing", {"impute": "mean"}),
        ("missing", {}),
        ("sparse", {}),
    ],
)
def test_awkward_columns_of_pandas_are_read_as_from_a_file(
    name: str, role: dict[str, Any], tmp_path: Path
) -> None:
    frame = awkward(name)
    frame.to_csv(tmp_path / "log.csv", index=False)
    mapping = {**MAPPING, **role}
    of_file = outcome(tmp_path / "log.csv", mapping)
    of_frame = outcome(frame, mapping)
    shown = of_frame.replace("the pandas DataFrame", str(tmp_path / "log.csv"))
    assert shown.split(";")[0] == of_file.split(";")[0]


@pytest.mark.parametrize("name", ["records", "periods", "huge", "flags", "mixed"])
def test_a_column_that_is_not_used_hinders_nothing(name: str) -> None:
    mapping = {**MAPPING, "observations": ["x_0", "x_1"]}
    plain = koffline.open_transitions(columns(), mapping=MAPPING)
    log = koffline.open_transitions(awkward(name), mapping=mapping)
    assert log.sha256 == plain.sha256
    koffline.inspect(awkward(name))


def without(table: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: values for name, values in table.items() if name not in names}


def changed(**changes: Any) -> list[Any]:
    listed = episodes()
    return [{**listed[0], **changes}, *listed[1:]]


REFUSED = {
    "number": (3, None, "the log is a int; give a path, a pandas, polars or Arrow"),
    "nothing": (None, None, "the log is a NoneType"),
    "empty list": ([], None, "the log is a list"),
    "records": (
        pl.DataFrame(columns()).to_dicts(),
        MAPPING,
        "episode 0 lacks observations",
    ),
    "reader": (
        pa.table(columns()).to_reader(),
        MAPPING,
        "which can be read once only; give the table reader.read_all()",
    ),
    "no mapping": (
        pl.DataFrame(columns()),
        None,
        "has columns id, t, x_0, x_1, a, r, done; say what they are",
    ),
    "levels": (
        pandas.DataFrame({("a", "b"): [1]}),
        MAPPING,
        "has columns of several levels; join their names first",
    ),
    "lengths": (
        {**columns(), "t": [0]},
        MAPPING,
        "has columns of different lengths",
    ),
    "images": (
        {**columns(), "x_0": np.zeros((144, 2, 2))},
        MAPPING,
        "x_0 has shape (144, 2, 2); a column has one number",
    ),
    "doubled names": (
        pandas.DataFrame(np.zeros((4, 2)), columns=["a", "a"]),
        MAPPING,
        "has more than one column named a",
    ),
    "D4RL without rewards": (
        without(own_arrays(), "rewards"),
        None,
        "the dict of arrays lacks rewards: found keys",
    ),
    "episodes with a mapping": (
        episodes(),
        MAPPING,
        "the list of episodes says itself what its arrays are",
    ),
    "no flags": (changed(terminations=None), None, "lacks terminals"),
    "one more": (
        changed(observations=np.zeros((LENGTH + 2, 2))),
        None,
        "episode 0 has 8 observations for 6 rewards",
    ),
    "dict observations": (
        changed(observations={"camera": np.zeros(7)}),
        None,
        "observations is a dict; flatten it into one array",
    ),
    "short actions": (changed(actions=[0]), None, "has actions for 1 of 6 rewards"),
    "other entries": (
        [*episodes(), *episodes(final_states=False)],
        None,
        "give all episodes the same entries",
    ),
    "an end inside": (
        changed(terminations=np.arange(LENGTH) == 2),
        None,
        "row 2 is terminated but its episode goes on in row 3",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_log_is_refused_in_one_line(case: str) -> None:
    source, mapping, words = REFUSED[case]
    with one_line(DataError, words):
        koffline.open_transitions(source, mapping=mapping)
    with one_line(DataError):
        koffline.evaluate(source, "uniform", mapping=mapping, **QUICK)


def test_lazy_is_for_folders_of_shards() -> None:
    with one_line(DataError, "a DataFrame in memory; lazy=True is for folders of"):
        koffline.open_transitions(pl.DataFrame(columns()), lazy=True, mapping=MAPPING)


def test_of_a_filtered_minari_dataset_only_its_episodes_are_read(
    tmp_path: Path,
) -> None:
    dataset = minari_dataset(tmp_path / "dataset")
    total = [episode.rewards.sum() for episode in dataset.iterate_episodes()]
    kept = dataset.filter_episodes(lambda episode: episode.rewards.sum() > 0.0)
    log = koffline.open_transitions(kept)
    assert log.returns() == pytest.approx([value for value in total if value > 0.0])


def test_encode_declares_labels_among_arrays_of_any_kind() -> None:
    arrays = own_arrays()
    arrays["observations"] = (arrays["observations"] > 0.0).astype(float)
    mapping = {"encode": {"observations": "one-hot"}}
    of_dict = koffline.open_transitions(arrays, mapping=mapping)
    of_buffer = koffline.open_transitions(
        to_d3rlpy(koffline.open_transitions(arrays)), mapping=mapping
    )
    assert of_dict.observation_shape == of_buffer.observation_shape == (4,)


def test_a_frame_that_koffline_wrote_needs_no_mapping(tmp_path: Path) -> None:
    log = koffline.open_transitions(own_arrays())
    koffline.write_transitions(log, tmp_path / "log.parquet")
    table = pyarrow.parquet.read_table(tmp_path / "log.parquet")
    assert koffline.open_transitions(table).sha256 == log.sha256
    frame = pandas.read_parquet(tmp_path / "log.parquet")
    assert koffline.open_transitions(frame).sha256 == log.sha256
    koffline.write_transitions(log, tmp_path / "log.npz")
    archive = dict(np.load(tmp_path / "log.npz"))
    assert koffline.open_transitions(archive).sha256 == log.sha256
