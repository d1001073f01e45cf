"""Any log through any format, and through all of them in a row, is the same log."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from koffline.data.sources import open_transitions, write_transitions
from tests.data.logs import assert_same_rows, drawn_logs, roll_out

NAMES = {"hdf5": "log.hdf5", "npz": "log.npz", "minari": "log-v0", "d3rlpy": "log.h5"}
ANY_FORMAT = st.sampled_from(sorted(NAMES))
# Files under tmp_path are overwritten by each example, which is what hypothesis warns of.
RELAXED = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def through(log, folder: Path, format: str):
    target = folder / NAMES[format]
    write_transitions(log, target, format, force=True)
    return open_transitions(target)


def assert_equal(found, expected):
    assert_same_rows(found, expected)
    assert found.sha256 == expected.sha256
    assert found.action_space == expected.action_space
    assert found.observations.dtype == expected.observations.dtype
    assert found.metadata.gamma == expected.metadata.gamma
    assert found.metadata.extra == expected.metadata.extra
    for name in ("behavior_log_probabilities", "weights"):
        wanted = getattr(expected, name)
        if wanted is None:
            assert getattr(found, name) is None
        else:
            np.testing.assert_array_equal(getattr(found, name), wanted)


@RELAXED
@given(drawn=drawn_logs(), format=ANY_FORMAT)
def test_one_format(tmp_path, drawn, format):
    shutil.rmtree(tmp_path, ignore_errors=True)
    tmp_path.mkdir()
    log = drawn.log()
    assert_equal(through(log, tmp_path, format), log)
    assert len(list(tmp_path.iterdir())) == 1  # nothing temporary is left behind


@RELAXED
@given(drawn=drawn_logs(), formats=st.lists(ANY_FORMAT, min_size=2, max_size=4))
def test_a_chain_of_formats(tmp_path, drawn, formats):
    log = drawn.log()
    changed = log
    for format in formats:
        changed = through(changed, tmp_path, format)
    assert_equal(changed, log)


@pytest.mark.parametrize("format", sorted(NAMES))
@pytest.mark.parametrize("discrete", [True, False])
def test_names_do_not_matter(tmp_path, format, discrete):
    """The reader goes by content: every format is read under every name."""
    log = roll_out(discrete=discrete).transitions()
    write_transitions(log, tmp_path / "original", format)
    for name in ("log.hdf5", "log.npz", "log.txt", "log"):
        shutil.move(tmp_path / "original", tmp_path / name)
        assert open_transitions(tmp_path / name).sha256 == log.sha256
        shutil.move(tmp_path / name, tmp_path / "original")
