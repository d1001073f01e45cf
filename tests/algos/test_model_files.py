"""Any .d3 comes back whole and runs nothing; exported policies act as predict does, for
any batch size.
"""

import warnings
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch

import koffline
from koffline.algos.model_files import export_policy
from koffline.data import quiet
from koffline.errors import ConfigError, PolicyError
from tests import d3_models
from tests.algos import makers
from tests.algos.makers import ACTIONS, ALL, d3rlpy
from tests.algos.makers import observations as small_observations
from tests.d3_models import (
    BOX,
    DETERMINISTIC,
    DISCRETE,
    PREDICT_DRAWS,
    STOCHASTIC,
    build,
)
from tests.refusals import one_line

FORMATS = (".pt", ".onnx")


def run_file(path: Path, observations: np.ndarray) -> np.ndarray:
    """What the file answers, without koffline or d3rlpy."""
    if path.suffix == ".onnx":
        session = onnxruntime.InferenceSession(
            str(path), providers=["CPUExecutionProvider"]
        )
        return session.run(None, {"input_0": observations.astype(np.float32)})[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        script = torch.jit.load(str(path))
    return script(torch.tensor(observations)).numpy()


def assert_acts_as_predict(path: Path, algo, observations: np.ndarray) -> None:
    for rows in (1, 5, len(observations)):
        wanted = algo.predict(observations[:rows])
        actual = run_file(path, observations[:rows])
        assert (actual.shape, actual.dtype) == (wanted.shape, wanted.dtype)
        if wanted.dtype.kind == "i":
            np.testing.assert_array_equal(actual, wanted)
        else:
            np.testing.assert_allclose(actual, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", DISCRETE + DETERMINISTIC + STOCHASTIC)
def test_stock_policies(name: str, tmp_path: Path, caplog) -> None:
    scaled = {"observation_scaler": d3_models.standard_scaler()}
    if name not in DISCRETE:
        scaled = {
            "observation_scaler": d3_models.minmax_scaler(),
            "action_scaler": d3_models.action_scaler(),
        }
    algo = build(name, 3 if name in DISCRETE else 2, **scaled)
    for suffix in FORMATS:
        export_policy(algo, tmp_path / f"policy{suffix}")
        assert_acts_as_predict(
            tmp_path / f"policy{suffix}", algo, d3_models.raw_observations()
        )
    assert not caplog.records


# it draws, as BCQ does
@pytest.mark.parametrize("name", [name for name in ALL if name != "KLossBCQ"])
def test_our_policies(name: str, tmp_path: Path) -> None:
    algo = makers.make(name, **makers.scalers(makers.is_discrete(name)))
    with quiet():
        makers.fit(algo, makers.make_buffer(name))
    for suffix in FORMATS:
        algo.save_policy(str(tmp_path / f"policy{suffix}"))
        assert_acts_as_predict(
            tmp_path / f"policy{suffix}", algo, small_observations(30)
        )


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize("name", PREDICT_DRAWS)
def test_policies_that_draw_draw_in_the_file_too(
    name: str, suffix: str, tmp_path: Path, caplog
) -> None:
    """And a warning says so.

    Actions stay those of the box; equal observations get draws of their own.
    """
    algo = build(name, 2, action_scaler=d3_models.action_scaler())
    export_policy(algo, tmp_path / f"policy{suffix}")
    assert (
        f"policy{suffix} draws its actions, as the predict of {name} does"
        in caplog.text
    )
    actions = run_file(
        tmp_path / f"policy{suffix}",
        np.repeat(d3_models.raw_observations(1), 40, axis=0),
    )
    assert actions.shape == (40, 2)
    assert len(np.unique(actions, axis=0)) > 1
    assert (actions >= np.array(BOX.low) - 1e-5).all()
    assert (actions <= np.array(BOX.high) + 1e-5).all()


def test_the_algorithm_is_left_as_it_was(tmp_path: Path) -> None:
    """d3rlpy turns on the gradients of the target networks; here every flag is what it
    was.
    """
    algo = makers.make("KLossSAC", build=True)
    log = makers.make_buffer("KLossSAC")
    algo.update(log.sample_transition_batch(16))
    modules = algo.impl.modules.get_torch_modules()
    flagged = [
        parameter for module in modules.values() for parameter in module.parameters()
    ]
    flagged[0].requires_grad_(False)
    before = makers.parameters(algo)
    flags = [parameter.requires_grad for parameter in flagged]
    generator = torch.random.get_rng_state()
    for suffix in FORMATS:
        export_policy(algo, tmp_path / f"policy{suffix}")
    assert [parameter.requires_grad for parameter in flagged] == flags
    assert makers.same(makers.parameters(algo), before)
    assert torch.equal(torch.random.get_rng_state(), generator)
    algo.update(log.sample_transition_batch(16))
    assert not makers.same(makers.parameters(algo), before)


def test_what_has_no_policy_to_export_is_refused(tmp_path: Path) -> None:
    unfitted = build(
        "DQN", 3, observation_scaler=d3rlpy.preprocessing.StandardObservationScaler()
    )
    for algo, words in (
        (d3rlpy.algos.DQNConfig().create(), "no networks yet; fit it"),
        (unfitted, "StandardObservationScaler holds no ranges"),
        (
            d3rlpy.algos.DecisionTransformerConfig().create(),
            "does not act on one observation",
        ),
    ):
        with pytest.raises(PolicyError, match=words):
            export_policy(algo, tmp_path / "policy.pt")
    assert not list(tmp_path.iterdir())


STOCK = ("DQN", "DiscreteSAC", "SAC", "IQL", "BCQ")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "dqn.d3"
    build("DQN", 3).save(str(path))
    return path


@pytest.mark.parametrize("name", STOCK)
def test_stock_algorithms_go_on_where_they_were_saved(
    name: str, tmp_path: Path
) -> None:
    discrete = name in STOCK[:2]
    algo = build(name, ACTIONS, batch_size=8, **makers.scalers(discrete))
    log = makers.make_buffer("KLossDQN" if discrete else "KLossSAC")
    with quiet():
        makers.fit(algo, log)
    algo.save(str(tmp_path / "model.d3"))
    loaded = koffline.load(str(tmp_path / "model.d3"))
    loaded.set_grad_step(algo.grad_step)  # d3rlpy does not save it
    batch = log.sample_transition_batch(8)
    for side in (algo, loaded):
        with torch.random.fork_rng():
            torch.manual_seed(3)
            side.update(batch)
    assert makers.same(makers.parameters(loaded), makers.parameters(algo))
    torch.testing.assert_close(
        makers.optimiser_states(loaded), makers.optimiser_states(algo), rtol=0, atol=0
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"type": "kloss_dqm"},
            [
                "'kloss_dqm' is unknown; did you mean 'kloss_dqn'?",
                "import the module that",
            ],
        ),
        (
            {"params": {"encoder_factory": {"type": "mine", "params": {}}}},
            [
                "its encoder_factory 'mine' is unknown; import the module that"
                " registers it"
            ],
        ),
        ({"params": {"n_critics": 2}}, ["weights do not fit", "save it again"]),
        ({"observation_shape": [5]}, ["weights do not fit", "save it again"]),
    ],
)
def test_what_cannot_be_rebuilt_is_refused_in_one_line(model, tmp_path, changes, words):
    path = d3_models.rewritten_config(model, tmp_path / "model.d3", **changes)
    with one_line(PolicyError, str(path), *words):
        koffline.load(path)


def test_what_is_no_model_file_is_refused(model: Path, tmp_path: Path) -> None:
    scripted = tmp_path / "policy.pt"
    export_policy(koffline.load(model), scripted)
    for path, words in (
        (tmp_path / "nothing.d3", "cannot be read .*No such file.*check the path"),
        (tmp_path, r"no regular file"),
        (scripted, r"of kind torchscript.*load_policy reads it"),
    ):
        with pytest.raises(PolicyError, match=words):
            koffline.load(path)


@pytest.mark.parametrize("device", ["gpu", "meta", "cuda:99"])
def test_devices_that_are_not_there_are_refused(model: Path, device: str) -> None:
    with pytest.raises(ConfigError, match="which is not there; give cpu"):
        koffline.load(model, device=device)
