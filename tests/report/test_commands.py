"""``koffline diagnose`` and ``koffline select`` as a stranger uses them, with their
pages.
"""

import json
from pathlib import Path

import pytest

from koffline.data.sources import write_transitions
from koffline.data.transitions import Metadata
from tests.data.logs import in_shards
from tests.ope.problems import AS_OPTIONS, discrete_log
from tests.refusals import assert_refused, run_cli, succeed

pytestmark = pytest.mark.usefixtures("few_features_of_memory")

MODEL = (
    "print('hello')\ndef q(s, a):\n    return s[:, 0] + a\n\ndef v(s):\n    return s[:,"
    " 0]\n"
)
DIAGNOSE = (
    "diagnose",
    "log.npz",
    "--policy",
    "uniform",
    "--model",
    "values_here:q",
    "--gamma",
    "0.9",
)
TWO = ("--policies", "uniform", "epsilon:0.5:uniform")
SELECT = ("select", "log.npz", "--gamma", "0.9")


@pytest.fixture(autouse=True)
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("values_here.py").write_text(MODEL)
    names = Metadata(
        extra={
            "feature_names": ["height", "speed"],
            "action_names": ["brake", "go", "turn"],
        }
    )
    write_transitions(discrete_log().replace(metadata=names), "log.npz", None, False)


@pytest.mark.parametrize(
    ("command", "name", "words", "plots"),
    [
        (
            DIAGNOSE,
            "diagnosis",
            (
                "rejected",
                "power",
                "kernel loss",
                "coverage",
                "not known which",
                "state: height, speed, action 0: brake, action 1: go",
            ),
            {"map", "by_value", "by_step", "residuals", "coverage"},
        ),
        (
            (*SELECT, *TWO, *AS_OPTIONS),
            "ranking",
            ("May be the best", "uplift"),
            {"ranking"},
        ),
        (
            (
                "evaluate",
                *SELECT[1:],
                "--policy",
                "uniform",
                "--estimator",
                "all",
                *AS_OPTIONS,
            ),
            "estimates",
            ("kloss", "mwl", "wpdis", "drl", "kernel-certified"),
            {"forest"},
        ),
    ],
)
def test_table_and_report(command, name, words, plots) -> None:
    shown = succeed(*command, "--out", "why")
    assert all(word in shown for word in (*words, "report: why/report.html"))
    written = {path.name for path in Path("why").iterdir()}
    assert written == {"plots", f"{name}.json", "report.html", "run.json"}
    page = Path("why/report.html").read_text(encoding="utf-8")
    assert {path.stem for path in Path("why/plots").iterdir()} == plots
    assert page.count("<svg") == len(plots)
    # it loads nothing
    known = (
        "www.w3.org",
        "purl.org",
        "creativecommons.org",
        "matplotlib.org",
    )
    assert all(
        any(name in word for name in known) for word in page.split() if "http" in word
    )
    assert_refused(run_cli(*command, "--out", "why"), "--force")


def test_a_selection_has_every_policy_and_pair() -> None:
    null = ("--set", "estimator=", "--set", "interval=")  # the defaults
    ranking = json.loads(succeed(*SELECT, *TWO, "--json", *AS_OPTIONS, *null))
    assert {policy["name"] for policy in ranking["policies"]} == {
        "uniform",
        "epsilon:0.5:uniform",
    }
    assert len(ranking["comparisons"]) == 1
    for policy in ranking["policies"]:
        uplift = policy["uplift"]
        assert uplift["value"] == pytest.approx(
            policy["value"] - uplift["behavior_value"], abs=1.0
        )
    shown = succeed(
        "evaluate", *SELECT[1:], "--policy", "uniform", *AS_OPTIONS, "--discrete", 4
    )
    assert "3 25% (log 0%)" in shown  # three have names


def test_what_a_model_was_fitted_to() -> None:
    """Own estimators are cross-fitted, training rows can be allowed; what a model
    prints is no result.
    """
    fitted_to = (
        "--model",
        "fqe",
        "--cross-fit",
        "3",
        *AS_OPTIONS,
        "--set",
        "gamma=0.8",
        "--set",
        "seed=3",
    )
    diagnosis = json.loads(succeed(*DIAGNOSE[:-2], *fitted_to, "--json"))
    assert (diagnosis["model"], diagnosis["gamma"], diagnosis["seed"]) == (
        "fqe (cross-fitted, 3 folds)",
        0.8,
        3,
    )
    assert diagnosis["test"]["held_out"] is True
    assert diagnosis["shown"]
    diagnosis = json.loads(
        succeed(*DIAGNOSE, "--trained-on", "log.npz", "--allow-training-rows", "--json")
    )
    assert diagnosis["test"]["held_out"] is False


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((*DIAGNOSE, "--level", "0.95"), "chance of a false alarm"),
        ((*DIAGNOSE, "--set", "steps=5"), "--set is for the models kloss and fqe"),
        ((*DIAGNOSE, "--model", "values_here:nothing"), "has no 'nothing'"),
        ((*DIAGNOSE, "--model", "kloss", "--set", "stepps=5"), "stepps is unknown"),
        ((*DIAGNOSE, "--model", "kloss", "--cross-fit", "50"), "folds is 50 for a log"),
        (
            (*DIAGNOSE, "--model", "kloss", "--level", "1e-5"),
            "draws is 999, too few for level 1e-05",
        ),
        (
            (*DIAGNOSE, "--model", "kloss", "--set", "interval=bootstrp"),
            "did you mean 'bootstrap'?",
        ),
        ((*DIAGNOSE, "--trained-on", "log.npz"), "was fitted to 100% of these rows"),
        (
            (*SELECT, "--policies", "uniform"),
            "--policies names uniform; give two or more",
        ),
        ((*SELECT, "--policies", "uniform", "uniform"), "each once"),
        ((*SELECT, *TWO, "--set", "interval=bootstrp"), "did you mean 'bootstrap'?"),
        ((*SELECT, "--policies", "--json"), "Missing option '--policies'"),
    ],
)
def test_bad_input_is_one_line(arguments, message) -> None:
    assert_refused(run_cli(*arguments), message)


@pytest.mark.parametrize(
    "command",
    [DIAGNOSE, (*SELECT, *TWO, "--set", "steps=20")],
    ids=["diagnose", "select"],
)
def test_shards_say_what_their_file_says(command) -> None:
    write_transitions(discrete_log(120), "log.hdf5")
    in_shards(discrete_log(120), Path("shards"), 30)
    results = [
        _untimed(json.loads(succeed(command[0], *data, *command[2:], "--json")))
        for data in (["log.hdf5"], ["shards"], ["log.hdf5", "--lazy"])
    ]
    assert results[0] == results[1] == results[2]


def _untimed(record):
    if not isinstance(record, dict):
        return (
            [_untimed(entry) for entry in record]
            if isinstance(record, list)
            else record
        )
    return {
        key: _untimed(entry)
        for key, entry in record.items()
        if key not in ("seconds", "source")
    }


def test_a_reason_that_ends_the_output_is_no_warning_too() -> None:
    log = discrete_log()
    write_transitions(log.replace(rewards=0.0 * log.rewards), "zero.npz", None, False)
    shown = succeed(
        "evaluate", "zero.npz", *SELECT[2:], "--policy", "uniform", *AS_OPTIONS
    )
    assert (
        "say what the policy is worth: there is no interval, because rewards and"
        " endings are" in shown
    )
    assert "warning: No interval" not in shown
