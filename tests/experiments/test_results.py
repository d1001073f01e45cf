import json
import math
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest

from koffline.errors import ConfigError
from koffline.experiments.results import (
    Results,
    read_results,
    write_curves,
    write_results,
)
from tests.experiments.fakes import make_claims, make_evaluation, make_results


@pytest.fixture
def results() -> Results:
    return make_evaluation("figure-puddle", ["puddle_world"], seeds=3, times=6)[0]


def test_results_come_back_as_they_were(results: Results, tmp_path: Path) -> None:
    write_results(results, tmp_path / "a.json")
    again = read_results(tmp_path / "a.json")
    assert again == replace(results, seconds=math.nan)  # the clock has its own file
    claims = make_claims()
    write_results(claims, tmp_path / "b.json")
    assert [claim.verdict for claim in read_results(tmp_path / "b.json").claims] == [
        claim.verdict for claim in claims.claims
    ]


def test_the_file_is_plain_json_with_a_version(results: Results, tmp_path: Path) -> None:
    extra = {"array number": np.float64(2.0), "infinite": float("inf"), "missing": float("nan")}
    write_results(make_results("figure-toy", results.rows, extra=extra), tmp_path / "a.json")
    content = json.loads((tmp_path / "a.json").read_text(), parse_constant=pytest.fail)
    assert (content["name"], content["version"]) == ("figure-toy", 1)
    assert content["extra"] == {"array number": 2.0, "infinite": None, "missing": None}
    assert content["rows"][0]["world"] == "puddle_world"
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_select(results: Results) -> None:
    chosen = results.select(method="rg", truth="paper", best_by_truth=True)
    assert [(row.method, row.truth, row.learning_rate) for row in chosen] == [("rg", "paper", 0.001)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[: len(text) // 2], "is not a results file .*; delete it and run again"),
        (lambda text: "", "is not a results file"),
        (lambda text: "[1, 2]", "is not a results file"),
        (lambda text: "7", "is not a results file"),
        (
            lambda text: text.replace('"version": 1', '"version": 2', 1),
            "is of version 2, this koffline reads 1",
        ),
        (lambda text: "{}", "is of version None, this koffline reads 1"),
        (lambda text: text.replace('"rows"', '"lines"', 1), "is damaged"),
        (lambda text: text.replace('"method"', '"way"', 1), "is damaged .*unknown fields way"),
        (lambda text: text.replace('"command"', '"order"', 1), "is damaged"),
    ],
)
def test_a_file_that_is_not_ours_is_one_clear_line(results: Results, tmp_path: Path, change, message) -> None:
    path = tmp_path / "a.json"
    write_results(results, path)
    path.write_text(change(path.read_text()))
    with pytest.raises(ConfigError, match=message) as caught:
        read_results(path)
    assert "\n" not in str(caught.value)
    assert "delete it and run again" in str(caught.value)


def test_curves_are_groups_of_an_hdf5_file(tmp_path: Path) -> None:
    curves = {
        "puddle_world/kloss": {
            "epochs": np.arange(3),
            "mse": np.ones((3, 2), np.float32),
            "value": np.asarray(2.0),
        },
        "puddle_world/rg": {"mse": np.full((3, 2), np.nan, np.float32)},
    }
    write_curves(curves, tmp_path / "a.h5")
    with h5py.File(tmp_path / "a.h5") as file:
        assert file.attrs["koffline_curves"] == 1
        for group, datasets in curves.items():
            assert set(file[group]) == set(datasets)
            for name, array in datasets.items():
                assert file[group][name].dtype == array.dtype
                np.testing.assert_array_equal(file[group][name][()], array)
        attributes = file["puddle_world/kloss"].attrs
        assert (attributes["world"], attributes["method"]) == ("puddle_world", "kloss")
