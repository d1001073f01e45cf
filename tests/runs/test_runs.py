"""export and d3rlpy's own commands: koffline's models and logs, and what is refused."""

import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import koffline
from koffline.data import quiet
from tests.algos.makers import d3rlpy, fit, make, make_buffer
from tests.builders import environments  # noqa: F401  (registers them)
from tests.refusals import Attack, run_cli, succeed

WORLD = "koffline-tests/Drawn-v0"


def refusal(*words: object) -> str:
    """The one line of a command that must end with exit code 2; d3rlpy may print before
    it.
    """
    result = run_cli(*words)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1), result.output
    assert result.stderr.startswith("error: ")
    return result.stderr


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A KLossDQN with random weights for that world, saved."""
    path = tmp_path_factory.mktemp("model") / "dqn.d3"
    algo: Any = make("KLossDQN")
    algo.create_impl((2,), 4)
    algo.save(str(path))
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of d3rlpy's own logger: parameters, metrics, gradients, models."""
    folder = tmp_path_factory.mktemp("runs")
    files = d3rlpy.logging.FileAdapterFactory(str(folder))
    options = {
        "n_steps_per_epoch": 2,
        "experiment_name": "run",
        "with_timestamp": False,
    }
    with quiet():
        fit(
            make("KLossDQN"),
            make_buffer("KLossDQN"),
            steps=4,
            logger_adapter=files,
            **options,
        )
    return folder / "run"


def test_export_writes_a_policy(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "policy.onnx"
    assert (
        succeed("export", model, path)
        == f"{path}: the policy of the KLossDQN in {model}\n"
    )
    observations = np.random.default_rng(0).uniform(size=(20, 2)).astype(np.float32)
    policy = koffline.load_policy(path, koffline.Discrete(4), (2,))
    wanted = koffline.load(model).predict(observations)
    np.testing.assert_array_equal(
        policy.probabilities(observations).argmax(axis=1), wanted
    )
    before = path.read_bytes()
    assert "exists already" in refusal("export", str(model), str(path))
    assert path.read_bytes() == before
    succeed("export", model, path, "--force")
    assert "give .pt" in refusal("export", str(model), str(tmp_path / "policy.d3"))
    assert "No such file" in refusal(
        "export", str(tmp_path / "nothing.d3"), str(tmp_path / "policy.pt")
    )
    assert [file.name for file in tmp_path.iterdir()] == ["policy.onnx"]


def test_d3rlpy_draws_a_run_with_gradients(run: Path, tmp_path: Path) -> None:
    assert len(list(run.glob("*_grad.csv"))) > 0
    output = succeed(
        "d3rlpy", "plot-all", run, "--save", tmp_path / "all.png", "--title", "A run"
    )
    assert "config={'type': 'kloss_dqn'" in output
    with Image.open(tmp_path / "all.png") as picture:
        pixels = np.asarray(picture.convert("L"))
    assert (pixels < 200).sum() > 1000, "the picture is empty"


def test_d3rlpy_prints_statistics_and_its_own_help(run: Path) -> None:
    assert "TOTAL STEPS:  4.0" in succeed("d3rlpy", "stats", run / "critic_loss.csv")
    assert "--show-max" in succeed("d3rlpy", "plot", "--help")
    assert "--use-gymnasium" in succeed("d3rlpy", "record", "--help")


def test_d3rlpy_plays_in_gymnasium(model: Path) -> None:
    assert "Score: " in succeed(
        "d3rlpy", "play", model, "--env-id", WORLD, "--n-episodes", "1"
    )


def test_d3rlpy_records_films(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("moviepy")
    world = ("--env-id", WORLD, "--out", tmp_path / "films")
    succeed("d3rlpy", "record", model, *world, "--n-episodes", "1")
    assert (tmp_path / "films" / "rl-video-episode-0.mp4").stat().st_size > 0


def test_without_moviepy_there_are_no_films(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("koffline.cli.models.find_spec", lambda name: None)
    assert "koffline[video]" in refusal(
        "d3rlpy", "record", str(model), "--env-id", WORLD
    )


def test_d3rlpy_never_runs_what_a_model_holds(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "bomb.d3", "w") as archive:
        archive.writestr(
            "archive/data.pkl", pickle.dumps(Attack(tmp_path / "exploded"))
        )
    assert "bomb.d3" in refusal(
        "d3rlpy", "play", str(tmp_path / "bomb.d3"), "--env-id", WORLD
    )
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("stats", "nothing.csv"), "nothing.csv not found"),
        (("plot", "--nonsense"), "there is no option '--nonsense'"),
        (("plot-all", "no-run"), "there is no *.csv in no-run"),
        (("export", "model.d3", "policy.onnx"), "use koffline export MODEL OUTPUT"),
        (("prance",), "there is no command 'prance'"),
        (("play", "nothing.d3", "--env-id", WORLD), "No such file"),
    ],
)
def test_one_line_for_every_mistake(words: tuple[str, ...], message: str) -> None:
    assert message in refusal("d3rlpy", *words)
