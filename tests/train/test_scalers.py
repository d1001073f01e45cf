"""Scalers fitted on columns are those that d3rlpy fits row by row."""

import numpy as np
import pytest

from koffline import ColumnarReplayBuffer
from koffline.algos.from_config import fit_scalers, make_algorithm, resolve_params
from koffline.data.d3rlpy_import import import_d3rlpy
from koffline.errors import ConfigError
from tests.train.small_runs import make_log

KINDS = {
    "observation_scaler": ("standard", "min_max"),
    "action_scaler": ("min_max",),
    "reward_scaler": ("standard", "min_max", "return", "clip", "multiply"),
}
import_d3rlpy()


def made(name, kind):
    return make_algorithm("td3", resolve_params("td3", {name: kind}))


@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name in KINDS for kind in KINDS[name]])
def test_as_d3rlpys(name, kind):
    log = make_log(discrete=False)
    buffer = ColumnarReplayBuffer(log, 0)
    ours = made(name, kind)
    fit_scalers(ours, buffer)
    theirs = getattr(made(name, kind), name)
    if not theirs.built:
        theirs.fit_with_transition_picker(buffer.episodes, buffer.transition_picker)
    left, right = getattr(ours, name).serialize_to_dict(), theirs.serialize_to_dict()
    assert left.keys() == right.keys()
    for key in left:
        np.testing.assert_allclose(np.asarray(left[key], float), np.asarray(right[key], float), rtol=1e-6)


def test_refusals():
    log = make_log(discrete=False)
    still = ColumnarReplayBuffer(log.replace(observations=np.ones_like(log.observations)), 0)
    with pytest.raises(
        ConfigError, match="observation_scaler 'min_max' gives observations that are not finite"
    ):
        fit_scalers(made("observation_scaler", "min_max"), still)
    rows = ColumnarReplayBuffer(log.replace(episode_ids=None, steps=None), 0)
    with pytest.raises(ConfigError, match="'return' needs episodes"):
        fit_scalers(made("reward_scaler", "return"), rows)
    even = ColumnarReplayBuffer(log.replace(rewards=np.zeros(len(log))), 0)
    with pytest.raises(ConfigError, match="reward_scaler 'return' gives rewards"):
        fit_scalers(made("reward_scaler", "return"), even)
