"""koffline.load: any .d3 model comes back whole, and no file can run anything."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import koffline
from koffline.algos.model_files import export_policy
from koffline.data import quiet
from koffline.errors import ConfigError, PolicyError
from tests.algos.makers import ACTIONS, fit, make_buffer, optimiser_states, parameters, same, scalers
from tests.d3_models import build, rewritten_config

STOCK = ("DQN", "DiscreteSAC", "SAC", "IQL", "BCQ")


def stock(name: str):
    algo = build(name, ACTIONS, batch_size=8, **scalers(discrete=name in STOCK[:2]))
    log = make_buffer("KLossDQN" if name in STOCK[:2] else "KLossSAC")
    with quiet():
        fit(algo, log)
    return algo, log


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


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"type": "kloss_dqm"}, ["'kloss_dqm' is unknown; did you mean 'kloss_dqn'?", "import the package"]),
        ({"params": {"n_critics": 2}}, ["weights do not fit", "save it again"]),
        ({"observation_shape": [5]}, ["weights do not fit", "save it again"]),
    ],
)
def test_what_cannot_be_rebuilt_is_refused_in_one_line(
    model: Path, tmp_path: Path, changes: dict[str, object], words: list[str]
) -> None:
    path = rewritten_config(model, tmp_path / "model.d3", **changes)
    with pytest.raises(PolicyError) as caught:
        koffline.load(path)
    assert "\n" not in str(caught.value)
    assert all(word in str(caught.value) for word in [str(path), *words]), str(caught.value)


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
