"""What d3rlpy's users do with its algorithms works on ours: the checks of its own
algorithms, and more.
"""

import copy
import json
import os
import pickle
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

import koffline
from koffline.data.replay import to_d3rlpy
from koffline.errors import DataError
from tests.algos import makers
from tests.algos.makers import (
    ACTIONS,
    ALL,
    COMPOSED,
    CONTINUOUS,
    EVALUATORS,
    d3rlpy,
    make,
)

ACTING = [name for name in ALL if name not in EVALUATORS]


@pytest.fixture(scope="module", params=ALL)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def run(name: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """An algorithm after six steps in two epochs, and the folder that d3rlpy's logger
    has written.
    """
    folder = tmp_path_factory.mktemp(name)
    algo = make(
        name,
        bandwidth=0.7,
        diag_weight=0.25,
        gamma=0.9,
        **makers.scalers(makers.is_discrete(name)),
    )
    history = algo.fit(
        makers.make_buffer(name),
        n_steps=6,
        n_steps_per_epoch=3,
        experiment_name="run",
        with_timestamp=False,
        logger_adapter=d3rlpy.logging.FileAdapterFactory(str(folder)),
        show_progress=False,
    )
    assert [epoch for epoch, _ in history] == [1, 2]
    assert all(np.isfinite(list(metrics.values())).all() for _, metrics in history)
    assert {"params.json", "critic_loss.csv", "model_3.d3", "model_6.d3"} <= set(
        os.listdir(folder / "run")
    )
    return algo, folder / "run"


@pytest.mark.parametrize("load", [koffline.load, d3rlpy.load_learnable])
def test_a_saved_model_goes_on_as_if_it_had_never_stopped(name, run, load):
    algo = run[0]
    x = makers.observations()
    actions = makers.some_actions(name)
    whole = load(str(run[1] / "model_6.d3"))
    assert type(whole) is type(algo)
    assert json.loads(whole.config.serialize()) == json.loads(algo.config.serialize())
    assert makers.same(makers.parameters(whole), makers.parameters(algo))
    torch.testing.assert_close(
        makers.optimiser_states(whole), makers.optimiser_states(algo), rtol=0, atol=0
    )
    acted = []
    for learner in (whole, algo):
        torch.manual_seed(12)  # BCQ draws candidates
        acted.append(learner.predict(x))
    np.testing.assert_array_equal(*acted)
    np.testing.assert_array_equal(
        whole.predict_value(x, actions), algo.predict_value(x, actions)
    )
    assert whole.grad_step == 6
    batch = makers.make_buffer(name).sample_transition_batch(16)
    whole.update(batch)
    whole.save(str(run[1] / "again.d3"))
    loaded = load(str(run[1] / "again.d3"))
    for learner in (whole, loaded):
        torch.manual_seed(11)
        learner.update(batch)
    assert makers.same(makers.parameters(loaded), makers.parameters(whole))


def test_pickles_and_copies_go_on_alike(name: str, run: tuple[Any, Path]) -> None:
    algo = run[0]
    batch = makers.make_buffer(name).sample_transition_batch(16)
    before = makers.parameters(algo)
    copies = [pickle.loads(pickle.dumps(run[0])), copy.deepcopy(run[0])]
    for copied in copies:
        torch.manual_seed(11)
        copied.update(batch)
    assert makers.same(*map(makers.parameters, copies))
    assert not makers.same(makers.parameters(copies[0]), before)
    assert makers.same(makers.parameters(algo), before)


def test_states_of_optimisers_are_copied(name: str, run: tuple[Any, Path]) -> None:
    fresh = make(name, build=True)
    parts = ["q_function_optim", "policy_optim"]
    if "policy" not in run[0].impl.modules.get_torch_modules():
        with pytest.raises(NotImplementedError):  # as in d3rlpy
            getattr(fresh, f"copy_{parts.pop()}_from")(run[0])
    for part in parts:
        getattr(fresh, f"copy_{part}_from")(run[0])
        states = [
            getattr(algo_of_side.impl, part).state_dict()["state"]
            for algo_of_side in (fresh, run[0])
        ]
        torch.testing.assert_close(*states, rtol=0, atol=0)


@pytest.mark.parametrize("name", ACTING, scope="module")
def test_online_training_and_collection(name: str) -> None:
    algo = make(name)
    env = gymnasium.make("CartPole-v1" if makers.is_discrete(name) else "Pendulum-v1")
    buffer = d3rlpy.dataset.create_fifo_replay_buffer(100, env=env)
    silent = {
        "logger_adapter": d3rlpy.logging.NoopAdapterFactory(),
        "show_progress": False,
    }
    algo.fit_online(env, buffer, n_steps=24, n_steps_per_epoch=24, **silent)
    assert algo.grad_step > 0
    assert not algo.impl.modules.kernel.bandwidth.isnan()
    assert algo.collect(env, n_steps=10, show_progress=False).transition_count >= 8
    assert np.isfinite(
        d3rlpy.metrics.EnvironmentEvaluator(env, n_trials=1)(algo, buffer)
    )


def test_stock_buffers_ensembles_memory_and_shared_encoders(name: str) -> None:
    settings = (
        {"n_critics": 3}
        if name in COMPOSED
        else {"n_critics": 3, "backup": "min", "memory": 0.9}
    )
    if name != "KLossIQL" and "TrustPCL" not in name:
        settings["q_func_factory"] = d3rlpy.models.MeanQFunctionFactory(
            share_encoder=True
        )
    algo = make(name, **settings)
    assert (
        len(
            makers.fit(
                algo, to_d3rlpy(makers.make_log(makers.is_discrete(name))), steps=3
            )
        )
        == 1
    )
    assert len(algo.impl.q_function) == 3


@pytest.mark.parametrize(
    "name", [name for name in CONTINUOUS if name not in EVALUATORS], scope="module"
)
def test_actions_come_back_in_the_units_of_the_log(name: str) -> None:
    box = d3rlpy.preprocessing.MinMaxActionScaler(
        np.full(ACTIONS, 10.0), np.full(ACTIONS, 20.0)
    )
    algo = make(name, action_scaler=box, build=True)
    for actions in (
        algo.predict(makers.observations()),
        algo.sample_action(makers.observations()),
    ):
        assert actions.min() >= 10.0
        assert actions.max() <= 20.0


def test_copied_values_stay_where_they_are_when_the_kernel_is_fixed() -> None:
    source = make("KLossDQN", build=True)
    copy = make("KLossDQN", build=True, learning_rate=1e-9)
    copy.copy_q_function_from(source)
    where = makers.observations(), np.zeros(len(makers.observations()), dtype=np.int64)
    before = copy.predict_value(*where)
    makers.fit(copy, to_d3rlpy(makers.make_log(True)), steps=1)
    np.testing.assert_allclose(copy.predict_value(*where), before, atol=1e-5)


def test_an_interrupted_save_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    algo = make("KLossDQN", build=True)
    path = tmp_path / "model.d3"
    algo.save(str(path))
    before = path.read_bytes()

    def breaks(_) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(algo.impl, "save_model", breaks)
    with pytest.raises(DataError, match="disk full"):
        algo.save(str(path))
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["model.d3"]


# of torch's compiler, which d3rlpy loads
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
# of torch's compiler, on newer cards
@pytest.mark.filterwarnings("ignore:TensorFloat32:UserWarning")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize(
    "name", [name for name in ALL if "TrustPCL" not in name and "FQE" not in name]
)
def test_a_cuda_graph_trains_as_the_plain_loop(name: str) -> None:
    d3rlpy.seed(0)
    algos = [
        make(name, compile_graph=compiled).config.create("cuda:0")
        for compiled in (False, True)
    ]
    for algo in algos:
        algo.create_impl((4,), 3)
    algos[1].impl.modules.q_funcs.load_state_dict(
        algos[0].impl.modules.q_funcs.state_dict()
    )
    batch = makers.make_buffer(name).sample_transition_batch(16)
    for algo in algos:
        for _ in range(8):  # three warm up, the fourth is recorded, the rest replay
            metrics = algo.update(batch)
        assert all(torch.isfinite(torch.tensor(value)) for value in metrics.values())
    if name == "KLossDQN":  # no draws: the same numbers
        left, right = (makers.parameters(algo) for algo in algos)
        for key in left:
            if key.startswith("q_funcs"):
                torch.testing.assert_close(left[key], right[key], rtol=1e-3, atol=1e-5)


OF_D3RLPY = {
    "KLossDQN": d3rlpy.algos.DQNConfig,
    "KLossDiscreteCQL": d3rlpy.algos.DiscreteCQLConfig,
    "KLossDiscreteSAC": d3rlpy.algos.DiscreteSACConfig,
    "KLossSAC": d3rlpy.algos.SACConfig,
    "KLossTD3PlusBC": d3rlpy.algos.TD3PlusBCConfig,
    "KLossCQL": d3rlpy.algos.CQLConfig,
    "KLossIQL": d3rlpy.algos.IQLConfig,
    "KLossBCQ": d3rlpy.algos.BCQConfig,
    "KLossFQE": d3rlpy.ope.FQE,
    "DiscreteKLossFQE": d3rlpy.ope.DiscreteFQE,
}
MULTIPLIER = "alpha"  # of CQL's constraint; koffline's weight is a constant


@pytest.mark.parametrize("name", OF_D3RLPY)
def test_metrics_have_the_names_of_d3rlpys_algorithm(name: str) -> None:
    """Who plots DQN's `loss` plots KLossDQN's by the same line."""
    buffer = makers.make_buffer(name)
    if name in EVALUATORS:
        target = makers.make_target(makers.is_discrete(name))
        original = OF_D3RLPY[name](target, d3rlpy.ope.FQEConfig())
    else:
        original = makers.with_small_networks(OF_D3RLPY[name]).create()
    ours = make(name)
    metrics = []
    for algo in (original, ours):
        algo.build_with_dataset(buffer)
        metrics.append(algo.update(buffer.sample_transition_batch(16)))
    assert set(metrics[0]) - set(metrics[1]) <= {MULTIPLIER}
    if "loss" in metrics[0]:
        assert metrics[1]["loss"] == metrics[1]["critic_loss"]
    if "td_loss" in metrics[0]:
        parts = metrics[1]["td_loss"] + metrics[1]["conservative_loss"]
        assert metrics[1]["loss"] == pytest.approx(parts, rel=1e-6)
