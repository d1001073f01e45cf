"""Configs and logs in the package: found by name from any folder, with the files that
they name.
"""

from pathlib import Path

import pytest
import yaml

from koffline.bundled import CONFIGS, ONLINE, PACKAGE, bundled_configs, config_file
from koffline.errors import ConfigError
from koffline.online.config import load_config as load_online
from koffline.train.config import load_config
from koffline.train.run import train
from tests.refusals import assert_refused, one_line, run_cli, succeed

ROOT = Path(__file__).parents[1]
PYPROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", bundled_configs())
def test_each_config_finds_its_log_from_any_folder(name):
    config = load_config(name)
    assert Path(config.data.source).is_file()
    if config.algo.policy is not None:
        # what `koffline train dqn` leaves in the current folder
        model = Path.cwd() / "runs" / "dqn" / "model_3000.d3"
        assert config.algo.policy == str(model)


@pytest.mark.parametrize("name", bundled_configs())
def test_the_wheel_holds_the_log_of_each_config(name):
    text = (CONFIGS / f"{name}.yaml").read_text(encoding="utf-8")
    source = yaml.safe_load(text)["data"]["source"].removeprefix("../")
    assert f'"{source}"' in PYPROJECT
    assert (PACKAGE / source).is_file()


@pytest.mark.parametrize("name", bundled_configs(ONLINE))
def test_configs_of_online_training_have_names(name):
    file = ROOT / "configs" / ONLINE / f"{name}.yaml"
    assert load_online(name) == load_online(file)


@pytest.mark.parametrize(
    ("command", "names"),
    [
        ("train", bundled_configs()),
        ("sweep", bundled_configs()),
        ("online", bundled_configs(ONLINE)),
    ],
)
def test_list_says_what_each_does(command, names):
    lines = succeed(command, "--list").splitlines()
    assert [line.split("  ")[0] for line in lines] == list(names)
    assert all(len(about) > 2 for about in names.values())
    assert max(map(len, lines)) <= 100


STEPS = "--set train.n_steps=20 --set train.n_steps_per_epoch=20 --quiet"


def test_a_bundled_config_trains_anywhere(tmp_path):
    succeed(*f"train dqn {STEPS} --set evaluators.environment=null".split())
    model = tmp_path / "runs" / "dqn" / "model_20.d3"
    assert model.is_file()
    succeed(*f"train kloss_fqe {STEPS} --set algo.policy={model}".split())
    assert (tmp_path / "runs" / "kloss_fqe" / "model_20.d3").is_file()


def test_a_run_in_python_takes_the_name(tmp_path):
    settings = ["train.n_steps=5", "evaluators.environment=null"]
    assert train(load_config("discrete_bc", settings), tmp_path / "run").steps == 5


def test_a_file_of_the_users_own_comes_first(tmp_path):
    (tmp_path / "dqn").write_text("data: {source: a.hdf5}\nalgo: {type: nfq}\n")
    assert load_config("dqn").algo.type == "nfq"
    assert config_file("dqn") == (Path("dqn"), False)


def test_a_folder_of_that_name_is_no_config(tmp_path):
    (tmp_path / "dqn").mkdir()
    assert load_config("dqn").algo.type == "dqn"


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("kloss_dqm", "(--list names them); did you mean 'kloss_dqn'?"),
        ("inverted_pendulum", "'inverted_pendulum' is no file, and no bundled config"),
        ("configs/kloss_dqn.yaml", "is kloss_dqn, without a folder and ending"),
        ("dqn.yaml", "is dqn, without a folder and ending"),
        ("mine.yaml", "config file mine.yaml"),
    ],
)
def test_an_unknown_name_is_one_line(name, remedy):
    with one_line(ConfigError, remedy):
        load_config(name)
    assert_refused(run_cli("train", name), remedy)


@pytest.mark.parametrize("option", ["--seeds", "--seed-count"])
def test_seeds_is_their_number_in_online_as_in_sweep(option):
    run = "online --set env=CartPole-v1 --set steps=200 --quiet --out run --seed 3"
    done = run_cli(*f"{run} {option} 2".split())
    assert done.exit_code == 0, done.output
    folders = sorted(path.name for path in Path("run").glob("seed_*"))
    assert folders == ["seed_3", "seed_4"]
    note = "--seed-count is an older name of --seeds; write --seeds 2"
    assert (note in done.stderr) == (option == "--seed-count")
