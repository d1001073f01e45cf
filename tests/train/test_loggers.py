"""Loggers beside the files: asked for and missing, and what they are told."""

import sys
import types

import pytest

from koffline.algos import loggers
from koffline.errors import ConfigError
from koffline.train.config import load_config
from koffline.train.run import train
from tests.train.small_runs import make_config, write_log


@pytest.mark.parametrize(("name", "package"), [("tensorboard", "tensorboardX"), ("wandb", "wandb")])
def test_a_missing_extra_is_one_line(name, package, tmp_path, monkeypatch):
    monkeypatch.setattr(loggers.importlib.util, "find_spec", lambda name: None)
    config = load_config(make_config(write_log(tmp_path)), [f"logger.{name}=true"])
    with pytest.raises(
        ConfigError, match=rf"logger\.{name} needs the package {package}; .*koffline\[{name}\]"
    ):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_wandb_is_told_steps_of_the_run(tmp_path, monkeypatch):
    logged = []

    class Run:
        config = types.SimpleNamespace(update=lambda params: logged.append(("params", params)))

        def watch(self, modules, **options):
            assert modules

        def log(self, values, step):
            logged.append((step, values))

        def finish(self):
            logged.append(("finished", None))

    module = types.ModuleType("wandb")
    module.init = lambda project, name: logged.append((project, name)) or Run()
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.setattr(loggers.importlib.util, "find_spec", lambda name: object())
    settings = ["logger.wandb=true", "logger.wandb_project=mine"]
    train(load_config(make_config(write_log(tmp_path)), settings), tmp_path / "run")
    assert logged[0] == ("mine", "run")
    assert [kind for kind, _ in logged].count("params") == 1
    assert {step for step, _ in logged if isinstance(step, int)} == {10, 20, 25}
    assert logged[-1] == ("finished", None)
