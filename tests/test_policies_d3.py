"""d3rlpy models: what their policy is, that scalers are honoured, and that no code in a file can run."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import pickle
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from koffline.algos.d3_policy import import_d3rlpy
from koffline.data.transitions import Continuous, Discrete
from koffline.errors import PolicyError
from koffline.policies import as_policy, load_policy

d3rlpy = import_d3rlpy()

DISCRETE = ["DQN", "DoubleDQN", "NFQ", "DiscreteCQL", "DiscreteBC", "DiscreteBCQ", "DiscreteSAC"]
DETERMINISTIC = ["DDPG", "TD3", "TD3PlusBC", "ReBRAC", "PRDC", "PLAS", "PLASWithPerturbation", "BC"]
STOCHASTIC = ["SAC", "CQL", "CalQL", "AWAC", "IQL"]
PREDICT_DRAWS = ["BCQ", "BEAR", "CRR"]
BOX = Continuous(2, low=(-2.0, 0.0), high=(3.0, 1.0))
SHAPE = (4,)


def raw_observations(n: int = 64) -> np.ndarray:
    """Far from standardised, so that a forgotten scaler shows."""
    observations = np.random.default_rng(0).normal(20.0, 8.0, size=(n, 4)).astype(np.float32)
    observations.flags.writeable = False
    return observations


def build(algorithm: str, action_size: int, **settings):
    config_class = getattr(d3rlpy.algos, f"{algorithm}Config")
    encoder = d3rlpy.models.VectorEncoderFactory([8, 8])
    encoders = {f.name: encoder for f in dataclasses.fields(config_class) if "encoder_factory" in f.name}
    algo = config_class(**encoders, **settings).create()
    with torch.random.fork_rng():
        torch.manual_seed(1)
        algo.create_impl(SHAPE, action_size)
    return algo


def standard_scaler():
    observations = raw_observations()
    return d3rlpy.preprocessing.StandardObservationScaler(mean=observations.mean(0), std=observations.std(0))


def minmax_scaler():
    observations = raw_observations()
    return d3rlpy.preprocessing.MinMaxObservationScaler(
        minimum=observations.min(0), maximum=observations.max(0)
    )


def action_scaler():
    return d3rlpy.preprocessing.MinMaxActionScaler(minimum=np.array(BOX.low), maximum=np.array(BOX.high))


def saved(algo, folder: Path) -> str:
    path = str(folder / "model.bin")  # the name plays no part
    algo.save(path)
    return path


@pytest.fixture(scope="module")
def dqn_file(tmp_path_factory) -> Path:
    return Path(saved(build("DQN", 3), tmp_path_factory.mktemp("dqn")))


def rewritten(source: Path, target: Path, **changes) -> Path:
    content = pickle.loads(source.read_bytes())
    target.write_bytes(pickle.dumps({**content, **changes}))
    return target


@pytest.mark.parametrize("scaler", [standard_scaler, minmax_scaler])
@pytest.mark.parametrize("algorithm", DISCRETE)
def test_discrete_models_act_as_predict_on_raw_observations(algorithm, scaler, tmp_path):
    algo = build(algorithm, 3, observation_scaler=scaler())
    policy = load_policy(saved(algo, tmp_path), Discrete(3), SHAPE)
    observations = raw_observations()
    probabilities = policy.probabilities(observations)
    np.testing.assert_array_equal(probabilities.argmax(axis=1), algo.predict(observations))
    is_stochastic = algorithm == "DiscreteSAC"
    assert (probabilities.max(axis=1) < 1).all() == is_stochastic
    unscaled = build(algorithm, 3)
    assert (
        policy.probabilities(observations)
        != as_policy(unscaled, Discrete(3), SHAPE).probabilities(observations)
    ).any()


def test_discrete_sac_gives_its_categorical_probabilities(tmp_path):
    algo = build("DiscreteSAC", 3, observation_scaler=standard_scaler())
    observations = raw_observations()
    with torch.no_grad():
        batch = algo.observation_scaler.transform(torch.tensor(observations))
        expected = torch.softmax(algo.impl.policy(batch).logits, dim=1).numpy()
    policy = load_policy(saved(algo, tmp_path), Discrete(3), SHAPE)
    np.testing.assert_allclose(policy.probabilities(observations), expected, atol=1e-6)


def test_ties_between_actions_go_to_the_first(tmp_path):
    algo = build("DQN", 3)
    with torch.no_grad():
        for parameter in algo.impl.q_function.parameters():
            parameter.zero_()
    probabilities = load_policy(saved(algo, tmp_path), Discrete(3), SHAPE).probabilities(raw_observations())
    np.testing.assert_array_equal(probabilities, np.tile([1.0, 0, 0], (64, 1)))


@pytest.mark.parametrize("scaler", [standard_scaler, minmax_scaler])
@pytest.mark.parametrize("algorithm", DETERMINISTIC + STOCHASTIC)
def test_continuous_models_have_predict_as_mean_with_both_scalers(algorithm, scaler, tmp_path):
    algo = build(algorithm, 2, observation_scaler=scaler(), action_scaler=action_scaler())
    policy = load_policy(saved(algo, tmp_path), BOX, SHAPE)
    observations = raw_observations()
    np.testing.assert_array_equal(policy.mean(observations), algo.predict(observations))
    assert policy.deterministic == (algorithm in DETERMINISTIC)
    draws = policy.sample(observations, np.random.default_rng(0))
    assert (draws == policy.mean(observations)).all() == policy.deterministic
    assert (draws >= BOX.low).all()
    assert (draws <= BOX.high).all()


@pytest.mark.parametrize("algorithm", [*STOCHASTIC, *PREDICT_DRAWS])
def test_draws_belong_to_the_generator(algorithm, tmp_path):
    policy = load_policy(saved(build(algorithm, 2), tmp_path), BOX, SHAPE)
    observations = raw_observations()
    state = torch.random.get_rng_state()
    generator = np.random.default_rng(7)
    first, second = policy.sample(observations, generator), policy.sample(observations, generator)
    np.testing.assert_array_equal(first, policy.sample(observations, np.random.default_rng(7)))
    np.testing.assert_array_equal(policy.mean(observations), policy.mean(observations))
    assert (first != second).any()
    assert torch.equal(state, torch.random.get_rng_state()), "torch's global generator is left as it was"


@pytest.mark.parametrize("algorithm", ["SAC", "AWAC", "IQL"])
def test_draws_have_the_law_of_sample_action(algorithm, tmp_path):
    algo = build(algorithm, 2, observation_scaler=standard_scaler(), action_scaler=action_scaler())
    policy = load_policy(saved(algo, tmp_path), BOX, SHAPE)
    n = 8000
    observations = np.repeat(raw_observations(1), n, axis=0)
    draws = policy.sample(observations, np.random.default_rng(0))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        expected = algo.sample_action(observations)
    # two-sample Kolmogorov-Smirnov; 1.95 sqrt(2/n) is exceeded with probability 0.001 per dimension
    for own, theirs in zip(draws.T, expected.T, strict=True):
        grid = np.sort(np.concatenate([own, theirs]))
        distance = np.abs(
            np.searchsorted(np.sort(own), grid, "right") - np.searchsorted(np.sort(theirs), grid, "right")
        )
        assert distance.max() / n < 1.95 * np.sqrt(2 / n)


@pytest.mark.parametrize("factory", ["QRQFunctionFactory", "IQNQFunctionFactory"])
def test_distributional_q_functions_load(factory, tmp_path):
    algo = build("DQN", 3, q_func_factory=getattr(d3rlpy.models, factory)())
    policy = load_policy(saved(algo, tmp_path), Discrete(3), SHAPE)
    observations = raw_observations()
    np.testing.assert_array_equal(
        policy.probabilities(observations).argmax(axis=1), algo.predict(observations)
    )


def test_image_observations_are_taken_as_they_are(tmp_path):
    shape = (1, 44, 44)
    encoder = d3rlpy.models.PixelEncoderFactory(filters=[[4, 8, 4]], feature_size=8)
    config = d3rlpy.algos.DQNConfig(
        encoder_factory=encoder, observation_scaler=d3rlpy.preprocessing.PixelObservationScaler()
    )
    algo = config.create()
    algo.create_impl(shape, 3)
    policy = load_policy(saved(algo, tmp_path), Discrete(3), shape)
    images = np.random.default_rng(0).integers(0, 256, (5, *shape)).astype(np.uint8)
    np.testing.assert_array_equal(policy.probabilities(images).argmax(axis=1), algo.predict(images))


def test_an_algorithm_in_memory_is_a_policy():
    algo = build("SAC", 2, action_scaler=action_scaler())
    policy = as_policy(algo, BOX, SHAPE)
    np.testing.assert_array_equal(policy.mean(raw_observations()), algo.predict(raw_observations()))
    with pytest.raises(PolicyError, match="no networks yet; fit it"):
        as_policy(d3rlpy.algos.SACConfig().create(), BOX, SHAPE)


def test_loading_leaves_the_global_generator_alone(dqn_file):
    state = torch.random.get_rng_state()
    load_policy(dqn_file, Discrete(3), SHAPE)
    assert torch.equal(state, torch.random.get_rng_state())


def test_loading_is_silent_in_a_fresh_process(dqn_file):
    code = (
        "import sys; import koffline; from koffline.policies import load_policy;"
        f"assert 'd3rlpy' not in sys.modules; load_policy({str(dqn_file)!r}, koffline.Discrete(3), (4,))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")


@pytest.mark.parametrize(
    ("action_space", "shape", "words"),
    [
        (Discrete(4), (4,), ["3 discrete actions", "the log 4 discrete actions"]),
        (Continuous(3), (4,), ["3 discrete actions", "3 continuous action dimensions"]),
        (Discrete(3), (5,), ["observations of shape (4,)", "the log has (5,)"]),
    ],
)
def test_a_model_for_another_log_is_refused(dqn_file, action_space, shape, words):
    with pytest.raises(PolicyError) as caught:
        load_policy(dqn_file, action_space, shape)
    assert all(word in str(caught.value) for word in [str(dqn_file), *words])


class _Shell:
    """Pickles as a call of os.system."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


def _ran(marker: Path, load) -> bool:
    """Whether an ordinary pickle.load of this payload would have run it; removes the trace."""
    load()
    ran = marker.exists()
    marker.unlink(missing_ok=True)
    return ran


@pytest.mark.parametrize(
    ("place", "protocol"), [("whole", 2), ("whole", 5), ("version", 4), ("extra", 3), ("extra", 4)]
)
def test_code_in_the_pickle_is_refused_and_does_not_run(dqn_file, tmp_path, protocol, place):
    marker = tmp_path / "ran"
    content = pickle.loads(dqn_file.read_bytes())
    payload = _Shell(marker) if place == "whole" else {**content, place: _Shell(marker)}
    path = tmp_path / "model.d3"
    path.write_bytes(pickle.dumps(payload, protocol))
    assert _ran(marker, lambda: pickle.loads(path.read_bytes())), "the payload must work to prove anything"
    with pytest.raises(PolicyError, match=r"asks to import \w+\.system.*nothing ran.*algo\.save") as caught:
        load_policy(path, Discrete(3), SHAPE)
    assert "\n" not in str(caught.value)
    assert not marker.exists()


def test_code_in_the_weights_is_refused_and_does_not_run(dqn_file, tmp_path):
    marker = tmp_path / "ran"
    buffer = io.BytesIO()
    torch.save({"q_funcs": _Shell(marker)}, buffer)
    assert _ran(marker, lambda: torch.load(io.BytesIO(buffer.getvalue()), weights_only=False))
    path = rewritten(dqn_file, tmp_path / "model.d3", torch=buffer.getvalue())
    with pytest.raises(PolicyError, match=r"weights ask to import \w+\.system.*nothing ran"):
        load_policy(path, Discrete(3), SHAPE)
    assert not marker.exists()


def test_weights_in_an_older_layout_are_refused_unread(dqn_file, tmp_path):
    marker = tmp_path / "ran"
    path = rewritten(dqn_file, tmp_path / "model.d3", torch=pickle.dumps(_Shell(marker), 2))
    with pytest.raises(PolicyError, match="not in torch's zip layout"):
        load_policy(path, Discrete(3), SHAPE)
    assert not marker.exists()


@pytest.mark.parametrize("keep", [3, 20, 500, 0.5, 0.99])
def test_a_truncated_model_is_refused(dqn_file, tmp_path, keep):
    content = dqn_file.read_bytes()
    path = tmp_path / "model.d3"
    path.write_bytes(content[: int(keep * len(content)) if isinstance(keep, float) else keep])
    with pytest.raises(PolicyError, match=r"truncated or corrupt.*save the model again"):
        load_policy(path, Discrete(3), SHAPE)


def test_truncated_weights_are_refused(dqn_file, tmp_path):
    weights = pickle.loads(dqn_file.read_bytes())["torch"]
    path = rewritten(dqn_file, tmp_path / "model.d3", torch=weights[: len(weights) // 2])
    with pytest.raises(PolicyError, match="weights are truncated or corrupt"):
        load_policy(path, Discrete(3), SHAPE)


def edited_config(source: Path, target: Path, **changes) -> Path:
    config = json.loads(pickle.loads(source.read_bytes())["config"])
    config["config"]["type"] = changes.pop("type", config["config"]["type"])
    config["config"]["params"] |= changes.pop("params", {})
    return rewritten(source, target, config=json.dumps({**config, **changes}))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"type": "fqe"}, ["FQE evaluator", "save the algorithm it evaluates"]),
        ({"type": "decision_transformer"}, ["history and a target return", "function of the observation"]),
        ({"type": "discrete_random_policy"}, ["nothing to load", "uniform"]),
        ({"type": "my_algorithm"}, ["'my_algorithm' is not one of", "dqn", "import the package"]),
        ({"type": "sac"}, ["cannot rebuild the sac", "save it again"]),
        ({"observation_shape": [[4], [3]]}, ["one observation array", "join the parts"]),
        ({"action_size": "many"}, ["action size 'many'", "save the model again"]),
        ({"params": {"encoder_factory": {"type": "nothing", "params": {}}}}, ["cannot rebuild", "KeyError"]),
        ({"params": {"n_critics": 2}}, ["weights do not fit", "save it again"]),
    ],
)
def test_a_model_that_is_no_policy_or_contradicts_itself_is_refused(dqn_file, tmp_path, changes, words):
    path = edited_config(dqn_file, tmp_path / "model.d3", **changes)
    with pytest.raises(PolicyError) as caught:
        load_policy(path, Discrete(3), SHAPE)
    assert "\n" not in str(caught.value)
    assert all(word in str(caught.value) for word in [str(path), *words]), str(caught.value)


def test_a_saved_fqe_is_refused(tmp_path):
    """A real one: its file carries weights but no policy."""
    fqe = d3rlpy.ope.DiscreteFQE(algo=build("DQN", 3), config=d3rlpy.ope.FQEConfig())
    fqe.create_impl(SHAPE, 3)
    with pytest.raises(PolicyError, match="FQE evaluator"):
        load_policy(saved(fqe, tmp_path), Discrete(3), SHAPE)


def test_a_scaler_without_ranges_is_refused():
    algo = build("DQN", 3, observation_scaler=d3rlpy.preprocessing.StandardObservationScaler())
    with pytest.raises(PolicyError, match="StandardObservationScaler holds no ranges; fit the model"):
        as_policy(algo, Discrete(3), SHAPE)


@pytest.mark.parametrize("content", [[1, 2], {"torch": b"", "config": 3, "version": ""}, {"weights": 1}])
def test_another_pickle_is_refused(tmp_path, content):
    path = tmp_path / "model.d3"
    path.write_bytes(pickle.dumps(content))
    with pytest.raises(PolicyError, match="does not hold a d3rlpy model"):
        load_policy(path, Discrete(3), SHAPE)


def test_random_policies_cannot_be_saved_by_d3rlpy(tmp_path):
    """Pins the reason why there is no loader for them."""
    algo = d3rlpy.algos.RandomPolicyConfig().create()
    algo.create_impl(SHAPE, 2)
    with pytest.raises(AssertionError):
        algo.save(str(tmp_path / "model.d3"))


@pytest.mark.parametrize("algorithm", ["DQN", "TD3"])
def test_torchscript_exported_by_d3rlpy_acts_as_predict(algorithm, tmp_path):
    settings = {} if algorithm == "DQN" else {"action_scaler": action_scaler()}
    space = Discrete(3) if algorithm == "DQN" else BOX
    algo = build(algorithm, 3 if algorithm == "DQN" else 2, observation_scaler=standard_scaler(), **settings)
    path = str(tmp_path / "policy.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # remarks of torch.jit.trace
        algo.save_policy(path)
    policy = load_policy(path, space, SHAPE)
    observations = raw_observations()
    if algorithm == "DQN":
        actions = policy.probabilities(observations).argmax(axis=1)
        np.testing.assert_array_equal(actions, algo.predict(observations))
    else:
        np.testing.assert_allclose(policy.mean(observations), algo.predict(observations), rtol=1e-5)
