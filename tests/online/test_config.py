"""Online configs: files load, wrong keys and values end in a line that says what to do."""

from pathlib import Path

import pytest

from koffline.errors import ConfigError
from koffline.online.config import load_config

CONFIGS = sorted((Path(__file__).parents[2] / "configs" / "online").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_configs_load(path):
    assert load_config(path).env.endswith(("-v5", "-v0"))


@pytest.mark.parametrize(
    ("assignments", "message"),
    [
        ("max_divergance=1", "max_divergance is unknown; did you mean 'max_divergence'?"),
        ("environment=Other-v0", "environment is unknown; did you mean 'env'"),
        ("environment_options=1", "environment_options is unknown; did you mean 'env_options'"),
        ("n_environments=1", "n_environments is unknown; did you mean 'num_envs'"),
        ("gamma=.nan", "gamma is nan: input should be a finite number"),
        ("gamma=yes", "gamma is true: a yes or no is no value here"),
        ("hidden=[1000000000]", "less than or equal to 65536"),
        ("capacity=3", "capacity is 3; give at least 64"),
        ("num_envs=3", "no multiple of num_envs 3"),
        ("batch_size=1", "the kernel loss compares pairs"),
        ("memory=1", "memory is 1: input should be less than 1"),
        ("streaming=true steps_per_iteration=1", "steps_per_iteration is 1; the kernel loss compares pairs"),
        ("critic=memory standardise=false", "its kernel needs standardised inputs"),
    ],
)
def test_what_is_wrong_is_one_line(assignments, message):
    with pytest.raises(ConfigError) as caught:
        load_config({"env": "CartPole-v1"}, assignments.split())
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
