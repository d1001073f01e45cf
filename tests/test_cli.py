"""The command line as a stranger uses it: results, JSON, reports, and every kind of bad
input.
"""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result

import koffline
from koffline.data.sources import write_transitions
from koffline.store.files import digest_of
from tests.ope.problems import AS_OPTIONS, discrete_log
from tests.refusals import assert_refused, run_cli

ROOT = Path(__file__).parents[1]


def evaluate(log: Path, *arguments: str) -> Result:
    usual = () if "--policy" in arguments else ("--policy", "uniform")
    return run_cli(
        "evaluate", str(log), *usual, "--gamma", "0.9", *AS_OPTIONS, *arguments
    )


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six episodes of twenty steps."""
    path = tmp_path_factory.mktemp("log") / "log.hdf5"
    write_transitions(discrete_log(120, 20), path)
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
    ]
    words = ["--gamma", "0.9", "--json", *AS_OPTIONS]
    done = subprocess.run(
        [*command, *words], capture_output=True, text=True, check=True
    )
    estimate = json.loads(done.stdout)
    assert {"value", "estimator", "diagnostics", "seed", "versions", "seconds"} <= set(
        estimate
    )
    interval = estimate["interval"]
    assert (interval["kind"], interval["level"]) == ("bootstrap", 0.95)
    assert interval["low"] < estimate["value"] < interval["high"]
    assert (estimate["n_transitions"], estimate["n_episodes"], estimate["gamma"]) == (
        120,
        6,
        0.9,
    )
    shown = {"held_out_kernel_loss", "effective_bandwidth", "coverage"}
    assert shown <= set(estimate["diagnostics"])
    assert estimate["data_sha256"] == koffline.open_transitions(log).sha256


def test_config_file_below_set_below_options(log: Path, tmp_path: Path) -> None:
    config = tmp_path / "eval.yaml"
    config.write_text("gamma: 0.5\nsteps: 40\nseed: 9\nlearning_rate: 0.1\n")
    np.save(tmp_path / "starts.npy", np.zeros((5, 2), dtype=np.float32))
    words = ("--config", str(config), "--set", "gamma=0.6", "--set", "steps=3e1")
    starts = (
        "--initial-states",
        str(tmp_path / "starts.npy"),
        "--estimator",
        "fqe",
        "--level",
        "0.9",
    )
    estimate = json.loads(
        evaluate(log, *words, "--set", "learning_rate=1e-4", *starts, "--json").stdout
    )
    assert (estimate["estimator"], estimate["interval"]["level"]) == ("fqe", 0.9)
    settings = estimate["settings"]
    assert (estimate["gamma"], estimate["seed"], settings["steps"]) == (0.9, 9, 30)
    assert settings["learning_rate"] == 1e-4
    assert estimate["diagnostics"]["n_initial_states"] == 5


def test_what_a_policy_does_does_not_spoil_the_json(log, tmp_path, monkeypatch):
    (tmp_path / "chatty_policies.py").write_text(
        "import numpy as np\nprint('imported')\ndef even(observations):\n   "
        " print('called')\n    return np.full((len(observations), 3), 1 / 3)\ndef"
        " leave(observations):\n    raise SystemExit(0)\n"
    )
    monkeypatch.chdir(tmp_path)
    done = evaluate(log, "--policy", "chatty_policies:even", "--json")
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["value"] is not None
    assert_refused(evaluate(log, "--policy", "chatty_policies:leave"), "SystemExit")


def test_a_report_is_replaced_only_on_request_and_nothing_else_ever(
    log: Path, tmp_path: Path
) -> None:
    out = tmp_path / "runs" / "first"
    options = ("--estimator", "pdis", "--truth", "0.5", "--out", str(out))
    done = evaluate(log, *options)
    assert done.exit_code == 0, done.stderr
    assert "truth" in done.stdout
    assert str(out / "report.html") in done.stdout.replace("\n", "")
    assert {path.name for path in out.iterdir()} == {
        "estimate.json",
        "plots",
        "report.html",
        "run.json",
    }
    before = (out / "estimate.json").read_text()
    assert json.loads(before)["truth"] == 0.5
    assert_refused(evaluate(log, *options), "--force")
    assert (out / "estimate.json").read_text() == before
    assert evaluate(log, *options, "--force").exit_code == 0
    estimate = json.loads(
        evaluate(
            log, "--estimator", "mql, wis,mql,kloss", "--truth", "2", "--json"
        ).stdout
    )
    # auto's is first
    assert [entry["estimator"] for entry in estimate["estimates"]] == [
        "kloss",
        "mql",
        "wis",
    ]
    assert estimate["truth"] == 2.0
    for names in ("is,pdis", "pdis"):  # a table in place of one estimate, and back
        assert (
            evaluate(log, "--estimator", names, "--out", str(out), "--force").exit_code
            == 0
        )


def test_the_record_names_and_digests_every_input(log, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)  # of another test
    Path("settings.yaml").write_text("steps: 4\nresampled_replicas: 2\n")
    Path("truth.json").write_text('{"value": 1.0}')
    Path("mine.py").write_text(
        "import numpy as np\n\ndef act(s):\n    return np.full((len(s), 3), 1 / 3)\n"
    )
    words = ("--policy", "epsilon:0.1:mine:act", "--gamma", "0.9", "--estimator", "is")
    options = ("--config", "settings.yaml", "--truth", "truth.json", "--out", "a")
    assert run_cli("evaluate", log, *words, *options).exit_code == 0
    record = json.loads(Path("a/run.json").read_text())
    call = record["call"]
    assert {str(log), "epsilon:0.1:mine:act", "settings.yaml", "truth.json"} == set(
        call["inputs"]
    )
    assert call["inputs"]["epsilon:0.1:mine:act"] == digest_of(Path("mine.py"))
    assert call["command"] == shlex.join(
        ["koffline", "evaluate", str(log), *words, *options]
    )
    assert (call["directory"], record["kind"], record["seed"]) == (
        str(tmp_path),
        "evaluate",
        0,
    )
    assert record["settings"]["steps"] == 4
    assert record["seconds"] > 0
    assert {"python", "koffline", "torch", "numpy"} <= set(call["versions"])


@pytest.fixture(scope="module")
def bad(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with files that are refused, and a good one."""
    folder = tmp_path_factory.mktemp("bad")
    write_transitions(discrete_log(120, 20), folder / "good.npz")
    texts = {
        "typo": "gama: 0.9",
        "kind": "interval: foo",
        "wrong": "steps: many",
        "none": "estimator: klos",
    }
    for name, text in texts.items():
        (folder / f"{name}.yaml").write_text(f"{text}\n")
    np.save(folder / "wide.npy", np.zeros((5, 3)))
    return folder


PLAIN = "--policy uniform --gamma 0.9"
CARTPOLE = ROOT / "datasets" / "cartpole_policy.npz"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (f"gone.hdf5 {PLAIN}", "gone.hdf5"),
        ("good.npz --policy uniform", "gamma"),
        (f"good.npz --gamma 0.9 --policy {CARTPOLE}", "observations|actions"),
        (f"good.npz {PLAIN} --level 1.5", "level"),
        (
            f"good.npz {PLAIN} --config typo.yaml",
            "typo.yaml: gama is unknown; did you mean 'gamma'",
        ),
        (f"good.npz {PLAIN} --config wrong.yaml", "wrong.yaml: steps is 'many'"),
        (
            f"good.npz {PLAIN} --config kind.yaml",
            "kind.yaml: there is no interval 'foo'",
        ),
        (
            f"good.npz {PLAIN} --config none.yaml",
            "none.yaml: there is no estimator 'klos'",
        ),
        (f"good.npz {PLAIN} --workers 100000", "workers is 100000; give 1 to"),
        (f"good.npz {PLAIN} --initial-states wide.npy", "initial states"),
        (f"good.npz {PLAIN} --device cuda:99", "cuda"),
        (f"good.npz {PLAIN} --estimator all,kloss", "'all' or 'auto' alone"),
        (f"good.npz {PLAIN} --estimator ,", "give names separated by commas"),
        (
            f"good.npz {PLAIN} --interval hoeffding",
            "auto has no interval of kind 'hoeffding'",
        ),
        ("good.npz", "--policy"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(words, message, bad, monkeypatch):
    monkeypatch.chdir(bad)
    before = sorted(bad.iterdir())
    done = run_cli("evaluate", *words.split(), "--out", "new/deep/out", "--json")
    assert_refused(done)
    assert re.search(message, done.stderr), done.stderr
    assert sorted(bad.iterdir()) == before  # no output directory, nothing half-written


def test_help_of_a_command_that_reads_a_log_has_headings() -> None:
    shown = run_cli("evaluate", "--help").stdout
    options, large, tables = (
        shown.index(f"\n{heading}:\n")
        for heading in ("Options", "Large logs", "Tables")
    )
    assert (
        options
        < shown.index("--policy TEXT")
        < shown.index("--cores N|auto")
        < large
        < shown.index("--memory SIZE")
        < tables
    )
    assert tables < shown.index("--mapping FILE")
