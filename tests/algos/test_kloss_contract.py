"""What d3rlpy's users do with its algorithms works on ours: the checks of its own algorithms, and more."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch

import koffline.algos as ours
from koffline.data.replay import to_d3rlpy
from koffline.errors import DataError
from tests.algos.makers import (
    ACTIONS,
    ALL,
    COLUMNS,
    CONTINUOUS,
    EVALUATORS,
    WITH_ACTOR,
    d3rlpy,
    fit,
    is_discrete,
    make,
    make_buffer,
    make_log,
    observations,
    parameters,
    same,
    scalers,
    some_actions,
)


@pytest.mark.parametrize("name", ALL)
def test_fit_writes_what_d3rlpy_writes(name: str, tmp_path: Path) -> None:
    algo = make(name)
    history = algo.fit(
        make_buffer(name),
        n_steps=6,
        n_steps_per_epoch=3,
        logger_adapter=d3rlpy.logging.FileAdapterFactory(str(tmp_path)),
        experiment_name="run",
        with_timestamp=False,
        show_progress=False,
    )
    assert [epoch for epoch, _ in history] == [1, 2]
    assert all(np.isfinite(list(metrics.values())).all() for _, metrics in history)
    run = tmp_path / "run"
    assert {"params.json", "critic_loss.csv", "bellman_error.csv", "model_3.d3", "model_6.d3"} <= {
        path.name for path in run.iterdir()
    }
    assert json.loads((run / "params.json").read_text())["config"]["type"] == algo.config.get_type()
    assert algo.grad_step == 6


@pytest.mark.parametrize("name", ALL)
def test_update_changes_what_it_trains(name: str) -> None:
    algo = make(name, build=True)
    before = parameters(algo)
    metrics = algo.update(make_buffer(name).sample_transition_batch(16))
    after = parameters(algo)
    assert all(np.isfinite(value) for value in metrics.values())
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    assert any(key.startswith("q_funcs") for key in changed)
    if name in WITH_ACTOR:
        assert any(key.startswith("policy") for key in changed)
    assert not any(key.startswith("target.") for key in changed), "the evaluated policy moved"


@pytest.mark.parametrize("name", ALL)
def test_stock_buffers_train_too(name: str) -> None:
    algo = make(name)
    assert len(fit(algo, to_d3rlpy(make_log(is_discrete(name))))) == 1


@pytest.mark.parametrize("name", ALL)
def test_prediction_has_d3rlpys_shapes(name: str) -> None:
    algo, x = make(name, build=True), observations()
    shape = (10,) if is_discrete(name) else (10, ACTIONS)
    for actions in (algo.predict(x), algo.sample_action(x)):
        assert actions.shape == shape
        if not is_discrete(name):
            assert np.abs(actions).max() <= 1.0
    assert algo.predict_value(x, some_actions(name)).shape == (10,)


@pytest.mark.parametrize("name", ALL)
def test_a_saved_model_is_the_model(name: str, tmp_path: Path) -> None:
    algo = make(name, **scalers(is_discrete(name)))
    buffer = make_buffer(name)
    fit(algo, buffer, steps=5)
    algo.save(str(tmp_path / "model.d3"))
    loaded = d3rlpy.load_learnable(str(tmp_path / "model.d3"))
    assert type(loaded) is type(algo)
    assert same(parameters(loaded), parameters(algo))
    x = observations()
    np.testing.assert_array_equal(loaded.predict(x), algo.predict(x))
    actions = some_actions(name)
    np.testing.assert_array_equal(loaded.predict_value(x, actions), algo.predict_value(x, actions))
    assert loaded.grad_step == 5


@pytest.mark.parametrize("name", ALL)
def test_training_goes_on_from_a_file_as_if_it_had_never_stopped(name: str, tmp_path: Path) -> None:
    algo, buffer = make(name), make_buffer(name)
    fit(algo, buffer, steps=3)
    algo.save(str(tmp_path / "model.d3"))
    loaded = d3rlpy.load_learnable(str(tmp_path / "model.d3"))
    batches = [buffer.sample_transition_batch(16) for _ in range(3)]
    for learner in (algo, loaded):
        torch.manual_seed(11)
        for batch in batches:
            learner.update(batch)
    assert same(parameters(loaded), parameters(algo))


@pytest.mark.parametrize("name", ALL)
def test_a_model_comes_back_from_its_params(name: str, tmp_path: Path) -> None:
    algo = make(name, bandwidth=0.7, diag_weight=0.25, gamma=0.9)
    algo.fit(
        make_buffer(name),
        n_steps=1,
        n_steps_per_epoch=1,
        logger_adapter=d3rlpy.logging.FileAdapterFactory(str(tmp_path)),
        experiment_name="run",
        with_timestamp=False,
        show_progress=False,
    )
    again = type(algo).from_json(str(tmp_path / "run" / "params.json"))
    assert type(again) is type(algo)
    assert (again.config.bandwidth, again.config.diag_weight, again.config.gamma) == (0.7, 0.25, 0.9)
    assert again.observation_shape == (COLUMNS,)
    assert again.action_size == ACTIONS
    again.load_model(_saved_model(algo, tmp_path))
    np.testing.assert_array_equal(again.predict(observations()), algo.predict(observations()))


def _saved_model(algo, folder: Path) -> str:
    path = str(folder / "weights.pt")
    algo.save_model(path)
    return path


@pytest.mark.parametrize("name", ALL)
def test_parameters_can_be_copied(name: str) -> None:
    source, copy = make(name, build=True, seed=1), make(name, build=True, seed=2)
    buffer = make_buffer(name)
    source.update(buffer.sample_transition_batch(16))
    copy.update(buffer.sample_transition_batch(16))
    copy.copy_q_function_from(source)
    copy.copy_q_function_optim_from(source)
    kinds = ["q_funcs"]
    if name in WITH_ACTOR:
        copy.copy_policy_from(source)
        copy.copy_policy_optim_from(source)
        kinds.append("policy")
    left, right = parameters(source), parameters(copy)
    for key in left:
        if key.split(".")[0] in kinds:
            assert torch.equal(left[key], right[key]), key
    copy.reset_optimizer_states()
    assert not copy.impl.q_function_optim.state


class _Toy(gymnasium.Env):
    """A walk of eight steps."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (COLUMNS,), np.float32)

    def __init__(self, discrete: bool) -> None:
        self.action_space = (
            gymnasium.spaces.Discrete(ACTIONS) if discrete else gymnasium.spaces.Box(-1.0, 1.0, (ACTIONS,))
        )
        self._generator = np.random.default_rng(0)
        self._step = 0

    def reset(self, **_):
        self._step = 0
        return self._observe(), {}

    def step(self, action):
        self._step += 1
        return self._observe(), 1.0, self._step == 8, False, {}

    def _observe(self):
        return self._generator.normal(size=COLUMNS).astype(np.float32)


@pytest.mark.parametrize("name", [name for name in ALL if name not in EVALUATORS])
def test_online_training_and_collection(name: str) -> None:
    algo, env = make(name), _Toy(is_discrete(name))
    buffer = d3rlpy.dataset.create_fifo_replay_buffer(100, env=env)
    algo.fit_online(
        env,
        buffer,
        n_steps=30,
        n_steps_per_epoch=30,
        logger_adapter=d3rlpy.logging.NoopAdapterFactory(),
        show_progress=False,
    )
    assert algo.grad_step > 0
    assert algo.impl.modules.kernel.is_fixed()
    collected = algo.collect(env, n_steps=10, show_progress=False)
    assert collected.transition_count >= 8


@pytest.mark.parametrize("name", ALL)
def test_d3rlpys_evaluators_understand_it(name: str) -> None:
    algo, buffer = make(name, build=True), make_buffer(name)
    metrics = d3rlpy.metrics
    evaluators = [metrics.TDErrorEvaluator(), metrics.InitialStateValueEstimationEvaluator()]
    evaluators.append(metrics.AverageValueEstimationEvaluator())
    if not is_discrete(name):
        evaluators.append(metrics.ContinuousActionDiffEvaluator())
    else:
        evaluators.append(metrics.DiscreteActionMatchEvaluator())
    for evaluator in evaluators:
        assert np.isfinite(evaluator(algo, buffer))
    if name not in EVALUATORS:
        environment = metrics.EnvironmentEvaluator(_Toy(is_discrete(name)), n_trials=1)
        assert environment(algo, buffer) == 8.0


@pytest.mark.parametrize("name", ALL)
def test_an_interrupted_save_leaves_the_old_file(name: str, tmp_path: Path, monkeypatch) -> None:
    algo = make(name, build=True)
    path = tmp_path / "model.d3"
    algo.save(str(path))
    before = path.read_bytes()

    def breaks(_) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(algo.impl, "save_model", breaks)
    with pytest.raises(DataError, match="disk full"):
        algo.save(str(path))
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["model.d3"]


@pytest.mark.parametrize("name", ALL)
def test_the_same_seed_gives_the_same_model(name: str) -> None:
    models = []
    for _ in range(2):
        d3rlpy.seed(3)
        algo = make(name)
        torch.manual_seed(4)
        fit(algo, make_buffer(name), steps=3)
        models.append(parameters(algo))
    assert same(*models)


@pytest.mark.parametrize("name", ALL)
def test_ensembles_and_shared_encoders(name: str) -> None:
    settings = {"n_critics": 3}
    if "TrustPCL" not in name:
        settings["q_func_factory"] = d3rlpy.models.MeanQFunctionFactory(share_encoder=True)
    for backup in ("own", "min", "mean"):
        algo = make(name, backup=backup, **settings)
        fit(algo, make_buffer(name), steps=2)
        assert len(algo.impl.q_function) == 3


@pytest.mark.parametrize("name", CONTINUOUS)
def test_actions_come_back_in_the_units_of_the_log(name: str) -> None:
    algo = make(name)
    if name in EVALUATORS:
        pytest.skip("an evaluator acts as its policy does, in the policy's units")
    algo = make(
        name,
        action_scaler=d3rlpy.preprocessing.MinMaxActionScaler(
            minimum=np.full(ACTIONS, 10.0), maximum=np.full(ACTIONS, 20.0)
        ),
        build=True,
    )
    for actions in (algo.predict(observations()), algo.sample_action(observations())):
        assert actions.min() >= 10.0
        assert actions.max() <= 20.0


def test_every_type_is_registered() -> None:
    from d3rlpy.base import LearnableConfig
    from d3rlpy.serializable_config import CONFIG_STORAGE

    known = CONFIG_STORAGE[LearnableConfig].config_list
    wanted = (
        "kloss_fqe kloss_dqn kloss_discrete_sac kloss_sac kloss_td3_plus_bc kloss_iql kloss_cql "
        "kloss_discrete_cql trust_pcl discrete_trust_pcl"
    )
    for name in wanted.split():
        assert known[name].__module__.startswith("koffline.algos")
    assert set(ours.__all__) <= set(dir(ours))


def test_importing_the_algorithms_is_silent() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import koffline.algos"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("name", ALL)
def test_the_policy_is_exported(name: str, tmp_path: Path) -> None:
    """TorchScript and ONNX files act as `predict` does."""
    import onnxruntime

    algo = make(name, **scalers(is_discrete(name)))
    fit(algo, make_buffer(name))
    x = observations()
    algo.save_policy(str(tmp_path / "policy.pt"))
    algo.save_policy(str(tmp_path / "policy.onnx"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls its own format deprecated
        scripted = torch.jit.load(str(tmp_path / "policy.pt"))(torch.tensor(x)).numpy()
    session = onnxruntime.InferenceSession(str(tmp_path / "policy.onnx"))
    exported = session.run(None, {session.get_inputs()[0].name: x})[0]
    for actions in (scripted, exported):
        np.testing.assert_allclose(actions.reshape(algo.predict(x).shape), algo.predict(x), atol=1e-5)
