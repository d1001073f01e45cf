"""The command line as a stranger uses it: results, JSON, reports, and every kind of bad input."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
from click.testing import CliRunner, Result

import koffline
from koffline.cli import cli

QUICK = ["--set", "steps=60", "--set", "full_replicas=1", "--set", "resampled_replicas=2"]
ROOT = Path(__file__).parents[1]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, list(arguments), prog_name="koffline")


def columns(n: int = 120) -> dict[str, np.ndarray]:
    """A small discrete log in six episodes of twenty steps, as NPZ or HDF5 keys."""
    generator = np.random.default_rng(0)
    states = generator.normal(size=(n, 2)).astype(np.float32)
    last = np.arange(n) % 20 == 19
    return {
        "observations": states,
        "actions": generator.integers(3, size=n),
        "rewards": generator.normal(size=n).astype(np.float32),
        "next_observations": states + 0.1,
        "terminals": last & (np.arange(n) % 40 == 39),
        "timeouts": last & (np.arange(n) % 40 != 39),
    }


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "log.hdf5"
    with h5py.File(path, "w") as file:
        for name, column in columns().items():
            file[name] = column
    return path


def test_evaluate_prints_one_json_object_on_stdout(log: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "koffline",
        "evaluate",
        str(log),
        "--policy",
        "uniform",
        "--gamma",
        "0.9",
    ]
    done = subprocess.run([*command, "--json", *QUICK], capture_output=True, text=True, check=True)
    estimate = json.loads(done.stdout)
    assert set(estimate) >= {
        "value",
        "interval",
        "estimator",
        "gamma",
        "n_transitions",
        "n_episodes",
        "diagnostics",
        "seed",
        "versions",
        "data_sha256",
        "seconds",
    }
    assert set(estimate["interval"]) >= {"low", "high", "level", "kind"}
    assert estimate["interval"]["kind"] == "bootstrap"
    assert estimate["interval"]["low"] < estimate["value"] < estimate["interval"]["high"]
    assert (estimate["n_transitions"], estimate["n_episodes"], estimate["gamma"]) == (120, 6, 0.9)
    assert {"held_out_kernel_loss", "effective_bandwidth", "mean_off_diagonal_kernel", "coverage"} <= set(
        estimate["diagnostics"]
    )
    assert estimate["data_sha256"] == koffline.open_transitions(log).sha256


def test_same_seed_same_json_and_options_reach_the_estimate(log: Path) -> None:
    arguments = ["evaluate", str(log), "--policy", "uniform", "--gamma", "0.9", "--json", *QUICK]
    first, again = (json.loads(run(*arguments, "--seed", "3", "--estimator", "fqe").stdout) for _ in range(2))
    for estimate in (first, again):
        estimate.pop("seconds")
    assert first == again
    assert (first["seed"], first["estimator"]) == (3, "fqe")
    other = json.loads(run(*arguments, "--seed", "5", "--level", "0.9").stdout)
    assert other["value"] != first["value"]
    assert other["interval"]["level"] == 0.9


def test_a_policy_that_prints_does_not_spoil_the_json(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "chatty_policies.py").write_text(
        "import numpy as np\nprint('imported')\n"
        "def even(observations):\n    print('called')\n    return np.full((len(observations), 3), 1 / 3)\n"
    )
    monkeypatch.chdir(tmp_path)
    result = run("evaluate", str(log), "--policy", "chatty_policies:even", "--gamma", "0.9", "--json", *QUICK)
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["value"] is not None


def test_report_directory(log: Path, tmp_path: Path) -> None:
    out = tmp_path / "runs" / "first"
    arguments = ["evaluate", str(log), "--policy", "uniform", "--gamma", "0.9", "--out", str(out), *QUICK]
    result = run(*arguments, "--truth", "0.5")
    assert result.exit_code == 0, result.stderr
    assert "truth" in result.stdout
    assert str(out / "report.html") in result.stdout.replace("\n", "")
    assert sorted(path.name for path in out.iterdir()) == [
        "estimate.json",
        "plots",
        "report.html",
        "run.json",
    ]
    before = (out / "estimate.json").read_text()
    refused = run(*arguments)
    assert refused.exit_code == 2
    assert "--force" in refused.stderr
    assert (out / "estimate.json").read_text() == before
    assert run(*arguments, "--force").exit_code == 0
    assert sorted(path.name for path in out.parent.iterdir()) == ["first"]


def test_config_file_below_set_below_options(log: Path, tmp_path: Path) -> None:
    config = tmp_path / "eval.yaml"
    config.write_text("gamma: 0.5\nsteps: 40\nseed: 9\nfull_replicas: 1\nresampled_replicas: 2\n")
    arguments = ["evaluate", str(log), "--policy", "uniform", "--config", str(config), "--json"]
    estimate = json.loads(run(*arguments, "--set", "gamma=0.6", "--set", "steps=30", "--gamma", "0.7").stdout)
    assert (estimate["gamma"], estimate["seed"], estimate["settings"]["steps"]) == (0.7, 9, 30)


def test_initial_states_from_a_file(log: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "starts.npy", np.zeros((5, 2), dtype=np.float32))
    result = run(
        "evaluate",
        str(log),
        "--policy",
        "uniform",
        "--gamma",
        "0.9",
        "--initial-states",
        str(tmp_path / "starts.npy"),
        "--json",
        *QUICK,
    )
    assert json.loads(result.stdout)["diagnostics"]["n_initial_states"] == 5


def test_version_module_and_help() -> None:
    done = subprocess.run([sys.executable, "-m", "koffline", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, f"koffline, version {koffline.__version__}")
    for command in ([], ["evaluate"], ["data"], ["data", "info"], ["data", "validate"], ["data", "convert"]):
        result = run(*command, "--help")
        assert result.exit_code == 0
        assert "Usage: koffline" in result.output
    assert "Examples:" in run("evaluate", "--help").output


def _npz(path: Path, **changes: object) -> Path:
    content = {key: value for key, value in {**columns(), **changes}.items() if value is not None}
    np.savez(path, **content)  # type: ignore[arg-type]
    return path


class _Payload:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch koffline_was_here",)


def bad_inputs(folder: Path) -> dict[str, tuple[list[str], str]]:
    """Every bad input of the hand-book: the arguments after `evaluate`, and words of the message."""
    good = _npz(folder / "good.npz")
    rewards, actions = columns()["rewards"], columns()["actions"]
    rewards[7], actions[5] = np.nan, 7
    bounded = folder / "bounded.npz"
    koffline_log = koffline.Transitions(
        observations=np.zeros((4, 2), np.float32),
        actions=np.zeros((4, 1), np.float32),
        rewards=np.ones(4, np.float32),
        next_observations=np.zeros((4, 2), np.float32),
        terminated=np.zeros(4, bool),
        truncated=np.zeros(4, bool),
        action_space=koffline.Continuous(1, -1.0, 1.0),
    )
    from koffline.data.sources import write_transitions

    write_transitions(koffline_log, bounded)
    (folder / "text.hdf5").write_text("observations, actions\n1, 2\n")
    with h5py.File(folder / "keys.hdf5", "w") as file:
        file["states"] = np.zeros((3, 2))
    with h5py.File(folder / "whole.hdf5", "w") as file:
        for name, column in columns().items():
            file[name] = column
    whole = (folder / "whole.hdf5").read_bytes()
    (folder / "cut.hdf5").write_bytes(whole[: len(whole) // 2])
    (folder / "zeros.hdf5").write_bytes(whole[:512] + bytes(len(whole) - 512))
    (folder / "evil.d3").write_bytes(pickle.dumps({"torch": b"", "config": _Payload(), "version": "2.8.1"}))
    (folder / "typo.yaml").write_text("gama: 0.9\n")
    (folder / "list.yaml").write_text("- 1\n")
    (folder / "broken.yaml").write_text("a: [1\n")
    np.save(folder / "wide.npy", np.zeros((5, 3)))
    empty = {name: column[:0] for name, column in columns().items()}
    uniform, gamma = ["--policy", "uniform"], ["--gamma", "0.9"]
    usual = [*uniform, *gamma]
    return {
        "missing file": ([str(folder / "none.hdf5"), *usual], "none.hdf5"),
        "truncated hdf5": ([str(folder / "cut.hdf5"), *usual], "cut.hdf5"),
        "corrupt hdf5": ([str(folder / "zeros.hdf5"), *usual], "zeros.hdf5"),
        "wrong keys": ([str(folder / "keys.hdf5"), *usual], "states"),
        "text named hdf5": ([str(folder / "text.hdf5"), *usual], "text.hdf5"),
        "lengths differ": ([str(_npz(folder / "a.npz", rewards=rewards[:9])), *usual], "119|120|9"),
        "nan reward": ([str(_npz(folder / "b.npz", rewards=rewards)), *usual], "row 7"),
        "action outside": (
            [str(_npz(folder / "c.npz", actions=actions)), *usual, "--discrete", "3"],
            "row 5",
        ),
        "empty data": ([str(_npz(folder / "d.npz", **empty)), *usual], "empty|no rows|0 rows|no transitions"),
        "no rewards": ([str(_npz(folder / "e.npz", rewards=None)), *usual], "rewards"),
        "gamma one": ([str(good), *uniform, "--gamma", "1.0"], "gamma"),
        "gamma zero": ([str(good), *uniform, "--gamma", "0"], "gamma"),
        "gamma missing": ([str(good), *uniform], "gamma"),
        "level": ([str(good), *usual, "--level", "1.5"], "level"),
        "estimator": ([str(good), *usual, "--estimator", "sorcery"], "kloss"),
        "unknown config option": ([str(good), *usual, "--config", str(folder / "typo.yaml")], "gamma"),
        "unknown set option": ([str(good), *usual, "--set", "step=3"], "steps"),
        "set without value": ([str(good), *usual, "--set", "steps"], "key=value"),
        "config is a list": ([str(good), *usual, "--config", str(folder / "list.yaml")], "list.yaml"),
        "config is broken": ([str(good), *usual, "--config", str(folder / "broken.yaml")], "broken.yaml"),
        "config is missing": ([str(good), *usual, "--config", str(folder / "none.yaml")], "none.yaml"),
        "code in a d3": ([str(good), *gamma, "--policy", str(folder / "evil.d3")], "evil.d3"),
        "policy is missing": ([str(good), *gamma, "--policy", str(folder / "none.d3")], "none.d3"),
        "policy module": ([str(good), *gamma, "--policy", "no_such_module:policy"], "no_such_module"),
        "policy of another size": (
            [str(good), *gamma, "--policy", str(ROOT / "datasets" / "cartpole_policy.npz")],
            "observations|actions",
        ),
        "discrete policy, continuous log": (
            [str(bounded), *gamma, "--policy", str(ROOT / "datasets" / "cartpole_policy.npz")],
            "actions|observations",
        ),
        "epsilon": ([str(good), *gamma, "--policy", "epsilon:1.5:uniform"], "epsilon"),
        "initial states": (
            [str(good), *usual, "--initial-states", str(folder / "wide.npy")],
            "initial states",
        ),
        "truth": ([str(good), *usual, "--truth", "much"], "truth"),
        "no cuda": ([str(good), *usual, "--device", "cuda:99"], "cuda"),
    }


CASES = [
    "missing file",
    "truncated hdf5",
    "corrupt hdf5",
    "wrong keys",
    "text named hdf5",
    "lengths differ",
    "nan reward",
    "action outside",
    "empty data",
    "no rewards",
    "gamma one",
    "gamma zero",
    "gamma missing",
    "level",
    "estimator",
    "unknown config option",
    "unknown set option",
    "set without value",
    "config is a list",
    "config is broken",
    "config is missing",
    "code in a d3",
    "policy is missing",
    "policy module",
    "policy of another size",
    "discrete policy, continuous log",
    "epsilon",
    "initial states",
    "truth",
    "no cuda",
]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[list[str], str]]:
    return bad_inputs(tmp_path_factory.mktemp("bad"))


def test_every_case_is_run(cases: dict[str, tuple[list[str], str]]) -> None:
    assert sorted(cases) == sorted(CASES)


@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_one_line_and_exit_code_2(
    case: str, cases: dict[str, tuple[list[str], str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import re

    monkeypatch.chdir(tmp_path)
    arguments, words = cases[case]
    result = run("evaluate", *arguments, "--out", "out", "--json", *QUICK)
    assert result.exit_code == 2, (result.output, result.exception)
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("error: ")
    assert "Traceback" not in result.stderr
    assert re.search(words, lines[0]), lines[0]
    assert list(tmp_path.iterdir()) == []  # no output directory, nothing half-written, no payload run


def test_an_output_directory_that_cannot_be_used(log: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("mine")
    for name in ("file", "full", "file/below"):
        for extra in ([], ["--force"]):
            arguments = [
                "--policy",
                "uniform",
                "--gamma",
                "0.9",
                "--out",
                str(tmp_path / name),
                *QUICK,
                *extra,
            ]
            result = run("evaluate", str(log), *arguments)
            assert result.exit_code == 2, result.output
            assert result.stderr.startswith("error: --out")
            assert len(result.stderr.splitlines()) == 1
    assert (tmp_path / "file").read_text() == "mine"
    assert (tmp_path / "full" / "thesis.tex").read_text() == "mine"


def test_a_crash_while_writing_leaves_nothing(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import koffline.report.page

    def fail(*arguments: object) -> str:
        raise OSError(28, "No space left on device", "report.html")

    monkeypatch.setattr(koffline.report.page, "render_page", fail)
    out = tmp_path / "out"
    result = run("evaluate", str(log), "--policy", "uniform", "--gamma", "0.9", "--out", str(out), *QUICK)
    assert result.exit_code == 2
    assert "No space left" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["log.hdf5"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["evaluate", "log.hdf5"], "--policy"),
        (["evaluate", "log.hdf5", "--polcy", "uniform"], "'--policy'"),
        (["evaluate", "log.hdf5", "--policy", "uniform", "--gamma", "high"], "--gamma"),
        (["evaluat"], "evaluat"),
        (["data", "convert", "a", "b", "--format", "excel"], "excel"),
    ],
)
def test_wrong_usage_is_one_line_too(arguments: list[str], words: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("error: ")
    assert words in result.stderr


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("steps=true", "yes or no"),
        ("instruments=3", "instruments"),
        ("hidden_units=[0]", "hidden_units"),
        ("device=tpu", "device"),
        ("threads=0", "threads"),
        ("learning_rate=.nan", "learning_rate"),
        ("seed=-1", "seed"),
    ],
)
def test_settings_out_of_range(log: Path, setting: str, words: str) -> None:
    result = run("evaluate", str(log), "--policy", "uniform", "--gamma", "0.9", "--set", setting)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: option '{words}'") or words in result.stderr


def test_numbers_as_people_write_them_and_keys_named_once(log: Path, tmp_path: Path) -> None:
    arguments = ["evaluate", str(log), "--policy", "uniform", "--gamma", "0.9", "--json", *QUICK]
    result = run(*arguments, "--set", "steps=2e1", "--set", "learning_rate=1e-4")
    settings = json.loads(result.stdout)["settings"]
    assert (settings["steps"], settings["learning_rate"]) == (20, 1e-4)
    config = tmp_path / "twice.yaml"
    config.write_text("steps: 30\nsteps: 40\n")
    assert "'steps' twice" in run(*arguments, "--config", str(config)).stderr


def test_a_policy_that_exits_is_an_error(log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "leaving_policies.py").write_text("def leave(observations):\n    raise SystemExit(0)\n")
    monkeypatch.chdir(tmp_path)
    result = run("evaluate", str(log), "--policy", "leaving_policies:leave", "--gamma", "0.9", *QUICK)
    assert result.exit_code == 2
    assert "SystemExit" in result.stderr


def test_every_estimator_in_one_table_and_one_page(log: Path, tmp_path: Path) -> None:
    out = tmp_path / "all"
    command = ["evaluate", str(log), "--policy", "uniform", "--gamma", "0.9", "--estimator", "all"]
    done = run(*command, "--out", str(out), "--truth", "0.5", *QUICK)
    assert done.exit_code == 0, done.output
    for name in ("kloss", "mwl", "wpdis", "drl", "kernel-certified", "truth"):
        assert name in done.output
    assert {path.name for path in out.iterdir()} == {"estimates.json", "plots", "report.html", "run.json"}
    assert (out / "plots" / "forest.png").stat().st_size > 5000
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "What the intervals assume" in page
    assert (out / "plots" / "sensitivity.png").stat().st_size > 5000
    assert "What ρ does to the certified interval" in page
    assert "http" not in page.replace("http://www.w3.org", "")
    again = run(*command, "--out", str(out), *QUICK)
    assert again.exit_code == 2
    assert "--force" in again.output


def test_some_estimators_as_json(log: Path) -> None:
    done = run(
        "evaluate",
        str(log),
        "--policy",
        "uniform",
        "--gamma",
        "0.9",
        "--estimator",
        "mql, wis,mql",
        "--json",
        *QUICK,
    )
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert [entry["estimator"] for entry in found["estimates"]] == ["mql", "wis"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--estimator", "klos"], "there is no estimator 'klos'; did you mean 'kloss'?"),
        (["--estimator", "ALL"], "there is no estimator 'ALL'; did you mean 'all'?"),
        (["--estimator", "all,kloss"], "'all' stands by itself"),
        (["--estimator", ","], "give names separated by commas, or all"),
        (["--estimator", "mql,klos"], "there is no estimator 'klos'; did you mean 'kloss'?"),
        (["--interval", "kernel"], "there is no interval 'kernel'"),
        (["--interval", "hoeffding"], "kloss has no interval of kind 'hoeffding'"),
        (["--estimator", "pdis", "--interval", "dual"], "pdis has no interval of kind 'dual'"),
        (["--estimator", "all", "--interval", "nonsense"], "there is no interval 'nonsense'"),
    ],
)
def test_estimators_and_intervals_that_are_none(log: Path, options: list[str], message: str) -> None:
    done = run("evaluate", str(log), "--policy", "uniform", "--gamma", "0.9", *options)
    assert done.exit_code == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("kind", ["kernel-certified", "kernel-simultaneous", "dual"])
def test_an_interval_with_a_norm_shows_what_the_norm_does(log: Path, tmp_path: Path, kind: str) -> None:
    out = tmp_path / "out"
    command = ["evaluate", str(log), "--policy", "uniform", "--gamma", "0.9", "--estimator", "mql"]
    done = run(*command, "--interval", kind, "--out", str(out), *QUICK)
    assert done.exit_code == 0, done.output
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "How the interval depends on ρ" in page
    assert (out / "plots" / "sensitivity.png").stat().st_size > 5000
    assert "{&#39;" not in page


def test_diagnostics_of_a_report_are_read_by_people(log: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = ["evaluate", str(log), "--policy", "uniform", "--gamma", "0.9", "--estimator", "pdis"]
    done = run(*command, "--out", str(out), *QUICK)
    assert done.exit_code == 0, done.output
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "(95% episodes-t)" in page
    assert "step 20 values" in page
    assert "{&#39;" not in page
    assert "[1, 2" not in page
