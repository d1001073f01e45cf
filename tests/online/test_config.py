"""Online configs: files load, wrong keys and values end in a line that says what to do."""

from pathlib import Path

import pytest

from koffline.errors import ConfigError
from koffline.online.config import load_config

CONFIGS = sorted((Path(__file__).parents[2] / "configs" / "online").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_configs_load(path):
    assert load_config(path).environment.endswith("-v5")


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("max_divergance=1", "max_divergance is unknown; did you mean 'max_divergence'?"),
        ("gamma=.nan", "gamma is nan: input should be a finite number"),
        ("gamma=yes", "gamma is true: a yes or no is no value here"),
        ("hidden=[1000000000]", "less than or equal to 65536"),
        ("capacity=3", "capacity is 3; give at least 64"),
        ("n_environments=3", "no multiple of n_environments 3"),
        ("batch_size=1", "the kernel loss compares pairs"),
    ],
)
def test_what_is_wrong_is_one_line(assignment, message):
    with pytest.raises(ConfigError) as caught:
        load_config({"environment": "CartPole-v1"}, [assignment])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
