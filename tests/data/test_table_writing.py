"""Logs as tables and back: the same rows, spaces and metadata."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from koffline.data.sources import open_transitions, write_transitions
from koffline.data.transitions import Metadata
from koffline.errors import DataError
from tests.data.logs import drawn_logs, small

DESCRIBED = Metadata(gamma=0.9, extra={"task": "walk", "action_names": ["l", "r"]}, notes=("made by hand",))
PICTURES = np.arange(4 * 6, dtype=np.uint8).reshape(4, 2, 3, 1)


def round_trip(log, path):
    write_transitions(log, path, force=True)
    return open_transitions(path)


@settings(max_examples=10, deadline=None)
@given(drawn=drawn_logs())
def test_everything_comes_back(tmp_path_factory, drawn):
    log, folder = drawn.log(), tmp_path_factory.mktemp("t")
    for suffix in ("parquet", "arrow"):
        found = round_trip(log, folder / f"log.{suffix}")
        assert found.sha256 == log.sha256
        for name in ("action_space", "has_episodes"):
            assert getattr(found, name) == getattr(log, name)
        for name in ("observations", "actions"):
            assert getattr(found, name).dtype == getattr(log, name).dtype
    if len(log.observation_shape) == 1:  # CSV has no types
        write_transitions(log, folder / "log.csv")
        found = open_transitions(folder / "log.csv", log.action_space)
        assert found.sha256 == log.sha256 or log.observations.dtype == np.uint8


@pytest.mark.parametrize("suffix", ["parquet", "feather"])
class TestTypedFormats:
    def test_metadata_pictures_and_long_vectors(self, tmp_path, suffix):
        for observations in (PICTURES, np.ones((4, 1001), dtype=np.float32)):
            log = small(observations=observations, next_observations=observations, metadata=DESCRIBED)
            found = round_trip(log, tmp_path / f"log.{suffix}")
            np.testing.assert_array_equal(found.observations, observations)
            assert found.observations.dtype == observations.dtype
            for name in ("gamma", "extra", "notes"):
                assert getattr(found.metadata, name) == getattr(DESCRIBED, name)
            assert found.metadata.sha256 == log.sha256


def test_pictures_do_not_fit_into_csv(tmp_path):
    log = small(observations=PICTURES, next_observations=PICTURES)
    with pytest.raises(DataError, match="write parquet"):
        write_transitions(log, tmp_path / "log.csv")
    assert list(tmp_path.iterdir()) == []
