"""The bundled target policies: rebuilt bit for bit, as good as said, and a DQN as the
second source.
"""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from koffline.data.transitions import Discrete
from koffline.envs.boxes import WORLDS, make_world, uniform_states
from koffline.policy_specs import load_policy
from scripts import learn_policies
from scripts.bench.rollouts import monte_carlo_value

FOLDER = Path(__file__).resolve().parents[1] / "datasets" / "policies"
ENTRIES = json.loads((FOLDER / "policies.json").read_text())
EACH = pytest.mark.parametrize("name", WORLDS)


@EACH
def test_rebuilt_bit_for_bit(name, tmp_path, monkeypatch):
    # returns from a few: what is tested is the file
    monkeypatch.setattr(learn_policies, "STARTS", 5)
    monkeypatch.setattr(learn_policies, "REPEATS", 2)
    learn_policies.main(["--env", name, "--out", str(tmp_path)])
    written = (tmp_path / f"{name}.npz").read_bytes()
    assert written == (FOLDER / f"{name}.npz").read_bytes()
    entry = json.loads((tmp_path / "policies.json").read_text())[f"{name}.npz"]
    assert (
        entry["sha256"]
        == hashlib.sha256(written).hexdigest()
        == ENTRIES[f"{name}.npz"]["sha256"]
    )
    assert entry["command"] == ENTRIES[f"{name}.npz"]["command"]


@EACH
def test_returns_are_those_of_the_file(name):
    world = make_world(name)
    entry = ENTRIES[f"{name}.npz"]
    policy = load_policy(FOLDER / f"{name}.npz", Discrete(world.n_actions), (2,))
    generator = np.random.default_rng(1)
    starts = uniform_states(world, 200, generator)
    value = monte_carlo_value(
        world, policy.probabilities, entry["gamma"], starts, generator
    )
    stated = entry["returns"]["policy"]
    # other starts, 200 here and 1000 there: four standard errors of both means
    error = value.standard_error * np.sqrt(1 + 200 / learn_policies.STARTS)
    assert value.value == pytest.approx(stated["mean"], abs=4 * error)
