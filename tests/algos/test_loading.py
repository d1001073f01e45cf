"""koffline.load: any .d3 model comes back whole, and no file can run anything."""

from __future__ import annotations

import io
import json
import logging
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import koffline
from koffline.algos.export import export_policy
from koffline.algos.loggers import quiet
from koffline.errors import ConfigError, PolicyError
from koffline.policies.d3 import read_d3_model
from tests.algos.makers import (
    ACTIONS,
    COLUMNS,
    d3rlpy,
    fit,
    make,
    make_buffer,
    optimiser_states,
    parameters,
    same,
    scalers,
)
from tests.d3_models import build

STOCK = ("DQN", "DiscreteSAC", "SAC", "IQL", "BCQ")


def stock(name: str):
    algo = build(name, ACTIONS, batch_size=8, **scalers(discrete=name in STOCK[:2]))
    log = make_buffer("KLossDQN" if name in STOCK[:2] else "KLossSAC")
    with quiet():
        fit(algo, log)
    return algo, log


def changed(source: Path, target: Path, **changes) -> Path:
    target.write_bytes(pickle.dumps(pickle.loads(source.read_bytes()) | changes))
    return target


def changed_config(source: Path, target: Path, **changes) -> Path:
    config = json.loads(pickle.loads(source.read_bytes())["config"])
    config["config"] |= {key: changes.pop(key) for key in ("type", "params") if key in changes}
    return changed(source, target, config=json.dumps(config | changes))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "dqn.d3"
    build("DQN", 3).save(str(path))
    return path


@pytest.mark.parametrize("name", STOCK)
def test_stock_algorithms_go_on_where_they_were_saved(name: str, tmp_path: Path) -> None:
    algo, log = stock(name)
    algo.save(str(tmp_path / "model.d3"))
    loaded = koffline.load(str(tmp_path / "model.d3"))
    loaded.set_grad_step(algo.grad_step)  # d3rlpy does not save it
    batch = log.sample_transition_batch(8)
    for each in (algo, loaded):
        with torch.random.fork_rng():
            torch.manual_seed(3)
            each.update(batch)
    assert same(parameters(loaded), parameters(algo))
    torch.testing.assert_close(optimiser_states(loaded), optimiser_states(algo), rtol=0, atol=0)


def test_sequence_models_load(tmp_path: Path) -> None:
    config = d3rlpy.algos.DiscreteDecisionTransformerConfig(
        encoder_factory=d3rlpy.models.VectorEncoderFactory([8]), num_heads=1, num_layers=1, context_size=4
    )
    algo = config.create()
    algo.create_impl((COLUMNS,), ACTIONS)
    algo.save(str(tmp_path / "model.d3"))
    loaded = koffline.load(tmp_path / "model.d3")
    assert same(parameters(loaded), parameters(algo))
    with pytest.raises(PolicyError, match="history and a target return"):
        koffline.load_policy(tmp_path / "model.d3", koffline.Discrete(ACTIONS), (COLUMNS,))


def test_observations_of_several_parts_are_read(model: Path, tmp_path: Path) -> None:
    path = changed_config(model, tmp_path / "parts.d3", observation_shape=[[4], [3, 8, 8]])
    assert read_d3_model(path).observation_shape == ((4,), (3, 8, 8))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"type": "kloss_dqm"},
            ["'kloss_dqm' is not one of", "the nearest is kloss_dqn", "import the package"],
        ),
        ({"type": "fqe"}, ["does not save the policy", "KLossFQE"]),
        ({"params": {"n_critics": 2}}, ["cannot rebuild", "save it again"]),
        ({"observation_shape": [5]}, ["weights do not fit", "save it again"]),
        ({"observation_shape": "wide"}, ["shape wide", "save the model again"]),
    ],
)
def test_what_cannot_be_rebuilt_is_refused_in_one_line(
    model: Path, tmp_path: Path, changes: dict[str, object], words: list[str]
) -> None:
    path = changed_config(model, tmp_path / "model.d3", **changes)
    with pytest.raises(PolicyError) as caught:
        koffline.load(path)
    assert "\n" not in str(caught.value)
    assert all(word in str(caught.value) for word in [str(path), *words]), str(caught.value)


def test_an_evaluator_without_its_policy_is_refused(tmp_path: Path) -> None:
    make("KLossFQE", build=True).save(str(tmp_path / "fqe.d3"))
    params = json.loads(read_d3_model(tmp_path / "fqe.d3").config)["config"]["params"]
    path = changed_config(tmp_path / "fqe.d3", tmp_path / "model.d3", params=params | {"policy": None})
    with pytest.raises(PolicyError, match="kloss_fqe has no policy to evaluate"):
        koffline.load(path)


def test_optimisers_must_be_in_the_file(model: Path, tmp_path: Path) -> None:
    file = read_d3_model(model)
    weights = io.BytesIO()
    torch.save({key: state for key, state in file.states.items() if "optim" not in key}, weights)
    path = changed(model, tmp_path / "model.d3", torch=weights.getvalue())
    with pytest.raises(PolicyError, match="weights do not fit"):
        koffline.load(path)
    koffline.load_policy(path, koffline.Discrete(3), (4,))  # acting needs none


def test_what_is_no_model_file_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="there is no such file"):
        koffline.load(tmp_path / "nothing.d3")
    with pytest.raises(PolicyError, match=r"is a folder; give one of its models, such as dqn.d3"):
        koffline.load(model.parent)
    with pytest.raises(PolicyError, match=r"is a folder; it holds no .d3 model"):
        koffline.load(tmp_path)
    scripted = tmp_path / "policy.pt"
    export_policy(koffline.load(model), scripted)
    with pytest.raises(PolicyError, match=r"of kind torchscript.*load_policy reads it"):
        koffline.load(scripted)


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("gpu", "give cpu, cuda"),
        ("meta", "unknown to d3rlpy"),
        ("cuda:99", "give cpu"),
        (None, "give cpu, cuda"),
    ],
)
def test_devices_that_are_not_there_are_refused(model: Path, device: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        koffline.load(model, device=device)


@pytest.mark.parametrize("device", ["cpu", "cpu:0", False])
def test_names_of_the_cpu(model: Path, device: str | bool) -> None:
    assert koffline.load(model, device=device).impl.device == "cpu"


def test_a_model_of_another_version_is_loaded_with_a_warning(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = changed(model, tmp_path / "old.d3", version="2.7.0")
    with caplog.at_level(logging.WARNING):
        koffline.load(path)
    assert "written by d3rlpy 2.7.0" in caplog.text


def test_loading_leaves_the_random_generator_alone(model: Path) -> None:
    state = torch.random.get_rng_state()
    koffline.load(model)
    assert torch.equal(state, torch.random.get_rng_state())


def test_loading_is_silent_in_a_fresh_process(model: Path) -> None:
    code = f"import koffline, sys; assert 'torch' not in sys.modules; koffline.load({str(model)!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")


def test_quiet_may_be_nested_and_ends_once(capsys: pytest.CaptureFixture[str]) -> None:
    from d3rlpy.logging import LOG

    with quiet():
        with quiet():
            LOG.warning("one")
        LOG.warning("two")
    assert capsys.readouterr().out == ""
    LOG.warning("three")
    assert "three" in capsys.readouterr().out
