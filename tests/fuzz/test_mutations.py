"""Every reader against changed files: one printable line, or a log; long campaigns are
scripts/fuzz's.
"""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scripts.fuzz.mutate import mutate
from scripts.fuzz.readers import Trial, readers

# d3rlpy or onnx is imported for these, which takes most of their time.
SLOW = {"d3", "model", "onnx"}
CAMPAIGNS = [
    pytest.param(
        name, examples, marks=pytest.mark.slow if examples > 15 or name in SLOW else ()
    )
    for examples in (15, 1000)
    for name in readers()
]
# what libraries remark on damaged files
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def little_memory(monkeypatch):
    """Changed sizes soon ask for gigabytes of nothing, which takes its time where it is
    allowed.
    """
    monkeypatch.setenv("KOFFLINE_MAX_BYTES", "100000000")


@pytest.mark.parametrize(("name", "examples"), CAMPAIGNS)
def test_changed_files_are_one_line_or_a_log(tmp_path, name, examples):
    trial = Trial(name, tmp_path)
    contents = readers()[name].seeds()
    for content in contents:
        trial(content)
    assert trial.accepted, "a changed file proves nothing where none is read"

    @settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.integers(0, 2**32 - 1))
    def read(seed: int) -> None:
        generator = np.random.default_rng(seed)
        first, second = (
            contents[int(i)] for i in generator.integers(len(contents), size=2)
        )
        trial(mutate(first, second, generator))

    read()
    assert trial.executions > examples


def test_a_reader_that_fails_otherwise_is_noticed(tmp_path, monkeypatch):
    trial = Trial("json", tmp_path)
    monkeypatch.setattr("koffline.data.raw.parse_json", lambda text: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trial(b"{}")
