"""d3rlpy models: what their policy is; files that are refused, and code in them cannot
run.
"""

import io
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

import koffline
from koffline.data.transitions import Discrete
from koffline.errors import PolicyError
from koffline.policy_specs import as_policy, load_policy
from tests.d3_models import (
    BOX,
    DETERMINISTIC,
    DISCRETE,
    PREDICT_DRAWS,
    SHAPE,
    STOCHASTIC,
    action_scaler,
    build,
    raw_observations,
    rewritten,
    rewritten_config,
    saved,
    standard_scaler,
)
from tests.refusals import Attack, one_line


@pytest.mark.parametrize("algorithm", DISCRETE)
def test_discrete_models_act_as_predict_on_raw_observations(algorithm, tmp_path):
    algo = build(algorithm, 3, observation_scaler=standard_scaler())
    policy = load_policy(saved(algo, tmp_path), Discrete(3), SHAPE)
    observations = raw_observations()
    probabilities = policy.probabilities(observations)
    np.testing.assert_array_equal(
        probabilities.argmax(axis=1), algo.predict(observations)
    )
    expected = np.eye(3)[probabilities.argmax(axis=1)]
    if algorithm == "DiscreteSAC":
        with torch.no_grad():
            batch = algo.observation_scaler.transform(torch.tensor(observations))
            expected = torch.softmax(algo.impl.policy(batch).logits, dim=1).numpy()
    np.testing.assert_allclose(probabilities, expected, atol=1e-6)
    assert len(policy.notes) == 1 + (algorithm == "DiscreteSAC"), (
        "what is drawn is said"
    )
    with one_line(
        PolicyError, "in column 1 as the model scales them; give", "order and units"
    ):
        policy.probabilities(np.tile(observations, (2, 1)) * [1, 1e3, 1, 1])


@pytest.mark.parametrize("algorithm", DETERMINISTIC + STOCHASTIC)
def test_continuous_models_have_predict_as_mean_with_both_scalers(algorithm, tmp_path):
    algo = build(
        algorithm,
        2,
        observation_scaler=standard_scaler(),
        action_scaler=action_scaler(),
    )
    policy = load_policy(saved(algo, tmp_path), BOX, SHAPE)
    observations = raw_observations()
    np.testing.assert_array_equal(policy.mean(observations), algo.predict(observations))
    np.testing.assert_array_equal(
        as_policy(algo, BOX, SHAPE).mean(observations), policy.mean(observations)
    )
    assert (
        policy.deterministic == (algorithm in DETERMINISTIC) == (len(policy.notes) == 1)
    )
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
    first = policy.sample(observations, generator)
    second = policy.sample(observations, generator)
    np.testing.assert_array_equal(
        first, policy.sample(observations, np.random.default_rng(7))
    )
    np.testing.assert_array_equal(policy.mean(observations), policy.mean(observations))
    assert (first != second).any()
    assert torch.equal(state, torch.random.get_rng_state()), (
        "torch's global generator is left as it was"
    )


@pytest.fixture(scope="module")
def dqn_file(tmp_path_factory) -> Path:
    return Path(saved(build("DQN", 3), tmp_path_factory.mktemp("dqn")))


@pytest.fixture(params=["policy", "model"])
def load(request):
    """Both ways to what a .d3 file holds."""
    return (
        koffline.load
        if request.param == "model"
        else lambda p: load_policy(p, Discrete(3), SHAPE)
    )


def _ran(marker: Path, unpickle) -> bool:
    """Whether an ordinary pickle.load of this payload would have run it; removes the
    trace.
    """
    unpickle()
    ran = marker.exists()
    marker.unlink(missing_ok=True)
    return ran


@pytest.mark.parametrize(
    ("place", "protocol"),
    [("whole", 2), ("whole", 5), ("version", 4), ("extra", 3), ("extra", 4)],
)
def test_code_in_the_pickle_is_refused_and_does_not_run(
    load, dqn_file, tmp_path, protocol, place
):
    marker = tmp_path / "ran"
    content = pickle.loads(dqn_file.read_bytes())
    payload = Attack(marker) if place == "whole" else {**content, place: Attack(marker)}
    path = tmp_path / "model.d3"
    path.write_bytes(pickle.dumps(payload, protocol))
    assert _ran(marker, lambda: pickle.loads(path.read_bytes())), (
        "the payload must work to prove anything"
    )
    with one_line(
        PolicyError, match=r"asks to import \w+\.system.*nothing ran.*algo\.save"
    ):
        load(path)
    assert not marker.exists()


def _weights_with(payload: Attack) -> bytes:
    buffer = io.BytesIO()
    torch.save({"q_funcs": payload}, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("made", "unpickle", "words"),
    [
        (
            _weights_with,
            lambda content: torch.load(io.BytesIO(content), weights_only=False),
            r"asks to import \w+\.system.*nothing ran",
        ),
        (
            lambda payload: pickle.dumps(payload, 2),
            pickle.loads,
            "not in torch's zip layout",
        ),
    ],
    ids=["zip", "older layout"],
)
def test_code_in_the_weights_is_refused_and_does_not_run(
    load, dqn_file, tmp_path, made, unpickle, words
):
    marker = tmp_path / "ran"
    content = made(Attack(marker))
    assert _ran(marker, lambda: unpickle(content))
    path = rewritten(dqn_file, tmp_path / "model.d3", torch=content)
    with pytest.raises(PolicyError, match=words):
        load(path)
    assert not marker.exists()


@pytest.mark.parametrize("keep", [0.001, 0.5, 0.99])
def test_a_truncated_model_is_refused(load, dqn_file, tmp_path, keep):
    content = dqn_file.read_bytes()
    path = tmp_path / "model.d3"
    path.write_bytes(content[: int(keep * len(content))])
    with pytest.raises(
        PolicyError, match=r"truncated or corrupt.*save the model again"
    ):
        load(path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ["3 discrete actions", "the log 4 discrete actions"]),
        (
            {"type": "fqe"},
            [
                "FQE does not save the policy it evaluates",
                "use koffline.algos.KLossFQE",
            ],
        ),
        ({"type": "decision_transformer"}, ["decision_transformer", "save it again"]),
        (
            {"type": "my_algorithm"},
            ["'my_algorithm' is unknown", "known are awac", "import the module"],
        ),
        ({"observation_shape": [[4], [3]]}, ["d3rlpy cannot rebuild the dqn networks"]),
        (
            {"params": {"n_critics": 10**9}},
            ["asks for networks of more than", "save it again"],
        ),
    ],
)
def test_a_model_that_is_no_policy_of_this_log_is_refused(
    dqn_file, tmp_path, changes, words
):
    path = rewritten_config(dqn_file, tmp_path / "model.d3", **changes)
    with one_line(PolicyError, str(path), *words):
        load_policy(path, Discrete(3 if changes else 4), SHAPE)
