"""A killed run that goes on equals one that was never killed, wherever it was hit."""

import signal
import subprocess
import sys

import numpy as np
import pytest

import koffline.algos.loggers
import koffline.train.checkpoint
import koffline.train.folder
import koffline.train.run
from koffline.algos.from_config import algorithm_types
from koffline.errors import ConfigError
from koffline.train.config import load_config
from koffline.train.run import train
from tests.interrupts import Hit, hit_at
from tests.train.small_runs import is_discrete, make_config, metric_files, read_model, same, write_log

METRICS = (koffline.algos.loggers.FileLogger, "write_metric")


def check_equal(left, right):
    assert metric_files(left) == metric_files(right)
    models = sorted(path.name for path in left.glob("*.d3"))
    assert models == sorted(path.name for path in right.glob("*.d3"))
    for name in models:
        assert same(read_model(left / name), read_model(right / name)), name
    leftovers = [path.name for path in right.iterdir() if path.name.endswith((".tmp", ".part"))]
    assert leftovers == []


def small(folder, kind="dqn"):
    return load_config(make_config(write_log(folder, is_discrete(kind)), kind), ["logger.gradients=false"])


@pytest.mark.parametrize("also_after", [False, True])
def test_hit_at_every_write(also_after, tmp_path, monkeypatch):
    content = make_config(write_log(tmp_path), n_steps=5, n_steps_per_epoch=3)
    config = load_config({**content, "evaluators": ["td_error"]}, ["logger.gradients=false"])
    whole = train(config, tmp_path / "whole").out
    for number in range(1, 60):
        folder = tmp_path / f"hit_{number}"
        try:
            with hit_at(monkeypatch, METRICS, number, also_after):
                train(config, folder)
        except Hit:
            train(config, folder, resume=True)
            check_equal(whole, folder)
        else:
            break
    assert number > 15  # 2 × (5 metrics, a model, a checkpoint), config, params and two records


KINDS = [
    "sac",
    "kloss_sac",
    "discrete_cql",
    "bcq",
    "trust_pcl",
    "discrete_trust_pcl",
    "kloss_dqn",
    "kloss_iql",
]


@pytest.mark.parametrize(
    "kind",
    [
        *KINDS,
        *(
            pytest.param(kind, marks=pytest.mark.slow)
            for kind in algorithm_types()
            if kind not in (*KINDS, "fqe", "kloss_fqe")
        ),
    ],
)
def test_every_family_goes_on_to_the_bit(kind, tmp_path, monkeypatch):
    config = small(tmp_path, kind)
    whole = train(config, tmp_path / "whole").out
    save = koffline.train.run.save_state

    def save_once(folder, fingerprint, progress, *rest):
        if progress.epochs == 2:
            raise Hit
        save(folder, fingerprint, progress, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(koffline.train.run, "save_state", save_once)
        with pytest.raises(Hit):
            train(config, tmp_path / "hit")
    train(config, tmp_path / "hit", resume=True)
    check_equal(whole, tmp_path / "hit")


def test_schedules_of_learning_rates_go_on(tmp_path, monkeypatch):
    schedule = {"type": "cosine_annealing", "params": {"T_max": 30}}
    content = make_config(write_log(tmp_path))
    content["algo"]["params"]["optim_factory"] = {
        "type": "adam_w",
        "params": {"clip_grad_norm": 0.5, "lr_scheduler_factory": schedule},
    }
    content["algo"]["params"]["encoder_factory"]["params"]["dropout_rate"] = 0.3
    config = load_config(content, ["logger.gradients=false"])
    whole = train(config, tmp_path / "whole").out
    with (
        hit_at(monkeypatch, METRICS, 14, also_after=True),
        pytest.raises(Hit),
    ):
        train(config, tmp_path / "hit")
    train(config, tmp_path / "hit", resume=True)
    check_equal(whole, tmp_path / "hit")


KILLED = """
import os, signal, sys
import koffline.train.run as run
save = run.save_state
def killed(folder, fingerprint, progress, *rest):
    if progress.epochs == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    save(folder, fingerprint, progress, *rest)
run.save_state = killed
from koffline.train.config import load_config
run.train(load_config(sys.argv[1]), sys.argv[2])
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no kill -9 on this system")
def test_kill_9(tmp_path):
    whole = train(small(tmp_path), tmp_path / "whole").out
    command = [sys.executable, "-c", KILLED, str(whole / "config.yaml"), str(tmp_path / "killed")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert (tmp_path / "killed" / "model_20.d3").exists()
    config = load_config(whole / "config.yaml")
    with pytest.raises(ConfigError, match="holds a run already; go on with it by --resume"):
        train(config, tmp_path / "killed")
    result = train(config, tmp_path / "killed", resume=True)
    assert result.steps == 25
    check_equal(whole, tmp_path / "killed")


def test_a_finished_run_is_reported_and_not_touched(tmp_path):
    config = small(tmp_path)
    first = train(config, tmp_path / "run")
    before = {p.name: p.read_bytes() for p in first.out.iterdir()}
    again = train(config, tmp_path / "run", resume=True)
    assert again == first
    assert {p.name: p.read_bytes() for p in first.out.iterdir()} == before


def test_resume_of_nothing_begins(tmp_path):
    assert train(small(tmp_path), tmp_path / "deep" / "run", resume=True).steps == 25
    (tmp_path / "empty").mkdir()
    assert train(small(tmp_path), tmp_path / "empty").steps == 25


def test_the_log_may_have_moved(tmp_path):
    content = make_config(write_log(tmp_path / "a"))
    train(load_config(content), tmp_path / "run")
    moved = load_config(content, data=write_log(tmp_path / "b"))
    assert train(moved, tmp_path / "run", resume=True).steps == 25


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        (
            "algo.params.gamma=0.5",
            r"another config: algo\.params\.gamma is 0\.99 there and 0\.5 here; resume it",
        ),
        (
            "algo.params.encoder_factory.params.hidden_units=[9]",
            r"hidden_units is \[8\] there and \[9\] here",
        ),
        ("algo.params.observation_scaler=min_max", r"algo\.params\.observation_scaler.* there"),
        ("train.seed=9", r"train\.seed is 0 there and 9 here"),
        ("data.split.held_out=0.5", r"data\.split\.held_out is 0\.0 there and 0\.5 here"),
        ("evaluators.initial_value.type=initial_value", r"evaluators\.initial_value"),
    ],
)
def test_the_folder_of_another_config(assignment, message, tmp_path):
    content = make_config(write_log(tmp_path))
    train(load_config(content), tmp_path / "run")
    before = {p.name: p.read_bytes() for p in (tmp_path / "run").iterdir()}
    with pytest.raises(ConfigError, match=message) as caught:
        train(load_config(content, [assignment]), tmp_path / "run", resume=True)
    assert "\n" not in str(caught.value)
    assert {p.name: p.read_bytes() for p in (tmp_path / "run").iterdir()} == before


def test_the_folder_of_another_log(tmp_path):
    content = make_config(write_log(tmp_path / "a"))
    train(load_config(content), tmp_path / "run")
    other = load_config(content, data=write_log(tmp_path / "b", seed=1))
    with pytest.raises(ConfigError, match="another config: the digest of the data"):
        train(other, tmp_path / "run", resume=True)


@pytest.mark.parametrize("resume", [False, True])
def test_foreign_folders_and_files(resume, tmp_path):
    config = small(tmp_path)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "diary.txt").write_text("dear diary")
    with pytest.raises(ConfigError, match="holds something that is not a training run"):
        train(config, tmp_path / "notes", resume=resume)
    assert [p.name for p in (tmp_path / "notes").iterdir()] == ["diary.txt"]
    (tmp_path / "file").write_text("a file")
    with pytest.raises(ConfigError, match="is a file; name a folder"):
        train(config, tmp_path / "file", resume=resume)


def test_damaged_files(tmp_path):
    config = small(tmp_path)
    folder = train(config, tmp_path / "run").out
    checkpoint = (folder / "checkpoint.pt").read_bytes()
    (folder / "checkpoint.pt").write_bytes(checkpoint[:100])
    with pytest.raises(ConfigError, match=r"checkpoint\.pt cannot be read"):
        train(config, folder, resume=True)
    (folder / "checkpoint.pt").write_bytes(checkpoint)
    (folder / "td_error.csv").write_text("")
    with pytest.raises(ConfigError, match=r"td_error\.csv is shorter than its checkpoint says"):
        train(config, folder, resume=True)
    (folder / "run.json").write_text("{")
    with pytest.raises(ConfigError, match=r"run\.json cannot be read"):
        train(config, folder, resume=True)
    (folder / "run.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"run\.json is not of a training run"):
        train(config, folder, resume=True)


def test_one_process_at_a_time(tmp_path):
    config = small(tmp_path)
    record = {"digests": {"data": "x"}}
    with (
        koffline.train.folder.open_folder(tmp_path / "run", config, record, resume=False),
        pytest.raises(ConfigError, match="another process is writing to"),
        koffline.train.folder.open_folder(tmp_path / "run", config, record, resume=True),
    ):
        pass


def test_other_versions_are_noticed(tmp_path, caplog, monkeypatch):
    config = small(tmp_path)
    train(config, tmp_path / "run")
    monkeypatch.setattr(koffline.train.run.platform, "python_version", lambda: "2.7")
    train(config, tmp_path / "run", resume=True)
    assert "begun with other versions" in caplog.text


def test_generators_come_back(tmp_path):
    generator = np.random.default_rng(3)
    draws = koffline.train.checkpoint.GeneratorDraws(generator)
    state = koffline.train.checkpoint._random_state(draws)
    expected = (generator.integers(1 << 60), np.random.random())  # noqa: NPY002
    koffline.train.checkpoint._set_random_state(state, draws)
    assert (generator.integers(1 << 60), np.random.random()) == expected  # noqa: NPY002


@pytest.mark.parametrize("damage", ["gone", "cut", "junk"])
def test_a_finished_run_outlives_its_checkpoint(damage, tmp_path):
    """Without a checkpoint that can be read nothing is trained again, and nothing is lost."""
    config, out = load_config(make_config(write_log(tmp_path))), tmp_path / "run"
    train(config, out)
    checkpoint = out / "checkpoint.pt"
    if damage == "gone":
        checkpoint.unlink()
    else:
        checkpoint.write_bytes(checkpoint.read_bytes()[:100] if damage == "cut" else b"junk")
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    with pytest.raises(ConfigError, match="train again into another --out") as caught:
        train(config, out, resume=True)
    assert "delete it" not in str(caught.value)
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before


def test_a_run_of_another_algorithm_says_so_first(tmp_path):
    source, out = write_log(tmp_path), tmp_path / "run"
    train(load_config(make_config(source)), out)
    with pytest.raises(ConfigError, match=r"algo\.type is dqn there and kloss_dqn here"):
        train(load_config(make_config(source, "kloss_dqn")), out, resume=True)


def test_a_diverged_run_is_a_failure_that_its_record_keeps(tmp_path, monkeypatch):
    content = make_config(write_log(tmp_path), "kloss_dqn")
    config = load_config(content, ["algo.params.learning_rate=1e30"])
    with pytest.raises(ConfigError, match="training diverged after step") as caught:
        train(config, tmp_path / "run")
    monkeypatch.setattr("koffline.train.run._train_epoch", None)  # nothing is trained again
    with pytest.raises(ConfigError) as again:
        train(config, tmp_path / "run", resume=True)
    assert str(again.value) == str(caught.value)


@pytest.mark.parametrize(
    ("kind", "assignment", "says"),
    [
        ("kloss_dqn", "algo.params.encoder_factory.params.hidden_units=[]", "one positive number per layer"),
        ("kloss_dqn", "algo.params.encoder_factory.params.hidden_units=[0]", "one positive number per layer"),
        ("cql", "algo.params.n_action_samples=0", "give a positive number"),
        ("kloss_td3_plus_bc", "algo.params.alpha=-3", "give 0 or a positive number"),
    ],
)
def test_numbers_that_make_no_network_are_refused_by_name(kind, assignment, says, tmp_path):
    content = make_config(write_log(tmp_path, discrete=is_discrete(kind)), kind)
    with pytest.raises(ConfigError, match=says) as caught:
        load_config(content, [assignment])
    assert assignment.split("=")[0] in str(caught.value)
