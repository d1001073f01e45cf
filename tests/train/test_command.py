"""``koffline train`` as it is typed: its result, exit codes, what to type next."""

import pytest
import yaml

import koffline.train.run
from tests.refusals import run_cli
from tests.train.small_runs import make_config, write_log


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(make_config(write_log(tmp_path))))
    return str(path)


def test_stdout_belongs_to_the_result_and_out_has_a_default(config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = run_cli("train", config, "--quiet")
    assert (done.exit_code, done.stderr) == (0, "")
    assert "dataset info" not in done.stdout
    assert "25 steps" in done.stdout
    assert (tmp_path / "runs" / "small" / "config.yaml").exists()
    for arguments, words in (((), "go on with it by --resume"), (("--data", "no.hdf5"), "does not exist")):
        again = run_cli("train", config, *arguments)
        assert (again.exit_code, again.stderr.count("\n")) == (2, 1)
        assert words in again.stderr


def test_an_interrupt_says_how_to_go_on(config, tmp_path, monkeypatch):
    save = koffline.train.run.save_state

    def interrupted(*arguments):
        save(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(koffline.train.run, "save_state", interrupted)
        done = run_cli("train", config, "--out", tmp_path / "run")
    assert done.exit_code == 130
    assert "go on with --resume" in done.stderr
    assert run_cli("train", config, "--out", tmp_path / "run", "--resume").exit_code == 0
