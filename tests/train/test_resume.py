"""A killed run that goes on equals one that was never killed, wherever it was hit."""

import shutil

import pytest

import koffline.algos.training
import koffline.train.run
from koffline.algos.options import algorithm_types
from koffline.errors import ConfigError
from koffline.store import files
from koffline.train.config import load_config
from koffline.train.run import train
from tests.interrupts import Hit, contents_of, hit_at
from tests.refusals import one_line
from tests.train.small_runs import (
    check_equal,
    check_killed_run,
    is_discrete,
    make_config,
    write_log,
)

METRICS = (koffline.algos.training.RunLogger, "write_metric")


def small(folder, kind="dqn"):
    return load_config(make_config(write_log(folder, is_discrete(kind)), kind))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Three epochs, never interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    return train(small(folder), folder / "run").out


@pytest.fixture
def again(whole, tmp_path):
    """The run, to be changed, and what it is trained by."""
    shutil.copytree(whole, tmp_path / "run")
    return tmp_path / "run", load_config(whole / "config.yaml")


@pytest.mark.parametrize(
    "also_after", [pytest.param(False, marks=pytest.mark.slow), True]
)
def test_hit_at_every_write(also_after, tmp_path, monkeypatch):
    content = make_config(write_log(tmp_path), n_steps=5, n_steps_per_epoch=3)
    config = load_config(
        {**content, "evaluators": {"td_error": {}}}, ["logger.gradients=false"]
    )
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
    # 2 × (5 metrics, a model, a checkpoint), config, params and two records
    assert number > 15


def test_a_model_has_one_temporary_file_whose_name_is_known_to_who_cleans_up(
    tmp_path, monkeypatch
):
    named = []
    plain = files.temporary_beside
    kept = lambda path, *ending: named.append(path.name) or plain(path, *ending)  # noqa: E731
    monkeypatch.setattr(files, "temporary_beside", kept)
    train(small(tmp_path, "kloss_dqn"), tmp_path / "run")
    assert "model_25.d3" in named
    assert not any(name.startswith(".") for name in named)


KINDS = ("kloss_sac", "bcq", "bear", "discrete_trust_pcl", "kloss_dqn")
OTHERS = [
    kind for kind in algorithm_types() if kind not in (*KINDS, "fqe", "kloss_fqe")
]


@pytest.mark.parametrize(
    "kind", [*KINDS, *(pytest.param(kind, marks=pytest.mark.slow) for kind in OTHERS)]
)
def test_every_family_goes_on_to_the_bit(kind, tmp_path, monkeypatch):
    check_killed_run(small(tmp_path, kind), tmp_path, monkeypatch)


def test_schedules_of_learning_rates_go_on(tmp_path, monkeypatch):
    schedule = {"type": "cosine_annealing", "params": {"T_max": 30}}
    content = make_config(write_log(tmp_path))
    content["algo"]["params"]["optim_factory"] = {
        "type": "adam_w",
        "params": {"clip_grad_norm": 0.5, "lr_scheduler_factory": schedule},
    }
    content["algo"]["params"]["encoder_factory"]["params"]["dropout_rate"] = 0.3
    check_killed_run(
        load_config(content, ["logger.gradients=false"]), tmp_path, monkeypatch
    )


def test_a_finished_run_is_reported_and_not_touched(again):
    out, config = again
    before = contents_of(out)
    assert train(config, out, resume=True).steps == 25
    with pytest.raises(
        ConfigError, match="holds a run already; go on with it by --resume"
    ):
        train(config, out)
    assert contents_of(out) == before


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        (
            "algo.params.gamma=0.5",
            r"another config: algo\.params\.gamma is 0\.99 there and 0\.5 here",
        ),
        ("train.seed=9", r"train\.seed is 0 there and 9 here"),
        ("data.source=other", "another config: the digest of the data"),
        ("algo.type=kloss_dqn", r"algo\.type is dqn there and kloss_dqn here"),
    ],
)
def test_the_folder_of_another_run(assignment, message, whole, tmp_path):
    content = load_config(whole / "config.yaml").resolved()
    if assignment == "data.source=other":
        assignment = f"data.source={write_log(tmp_path, seed=1)}"
    if assignment.startswith("algo.type"):
        content = make_config(content["data"]["source"], "kloss_dqn")
    before = contents_of(whole)
    with one_line(ConfigError, match=message):
        train(load_config(content, [assignment]), whole, resume=True)
    assert contents_of(whole) == before


@pytest.mark.parametrize("resume", [False, True])
def test_foreign_folders_and_files(resume, whole, tmp_path):
    config = load_config(whole / "config.yaml")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "diary.txt").write_text("dear diary")
    with pytest.raises(ConfigError, match="holds something that is not a training run"):
        train(config, tmp_path / "notes", resume=resume)
    assert [p.name for p in (tmp_path / "notes").iterdir()] == ["diary.txt"]
    with pytest.raises(ConfigError, match="is a file; name a folder"):
        train(config, tmp_path / "notes" / "diary.txt", resume=resume)


@pytest.mark.parametrize(
    ("name", "damaged", "message"),
    [
        (
            "checkpoint.pt",
            None,
            r"checkpoint\.pt is gone.*train again into another --out",
        ),
        (
            "checkpoint.pt",
            b"junk",
            r"checkpoint\.pt: it cannot be read.*train again into another --out",
        ),
        ("td_error.csv", b"", r"td_error\.csv is shorter than its checkpoint says"),
        ("run.json", b"{", r"run\.json cannot be read"),
    ],
)
def test_damaged_files_end_in_one_line_and_nothing_is_lost(
    name, damaged, message, again
):
    out, config = again
    (out / name).unlink()
    if damaged is not None:
        (out / name).write_bytes(damaged)
    before = contents_of(out)
    with pytest.raises(ConfigError, match=message) as caught:
        train(config, out, resume=True)
    assert "delete it" not in str(caught.value)
    assert contents_of(out) == before


@pytest.mark.parametrize(
    ("assignment", "damaged"),
    [
        ("learning_rate=1e30", "the networks' values are not finite"),
        # Squares of rewards overflow, Adam's steps do not.
        (
            "reward_scaler={type: multiply, params: {multiplier: 3e19}}",
            "critic_loss is not finite",
        ),
    ],
)
def test_a_diverged_run_is_a_failure_that_its_record_keeps(
    assignment, damaged, tmp_path, monkeypatch
):
    config = load_config(
        make_config(write_log(tmp_path), "kloss_dqn"), [f"algo.params.{assignment}"]
    )
    with pytest.raises(
        ConfigError, match=f"training diverged after step 0: .*{damaged}"
    ) as caught:
        train(config, tmp_path / "run")
    # nothing is trained again
    monkeypatch.setattr("koffline.train.run._train_epoch", None)
    with pytest.raises(ConfigError) as again:
        train(config, tmp_path / "run", resume=True)
    assert str(again.value) == str(caught.value)
