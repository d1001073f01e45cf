"""Estimates of logs on disk: near those in memory, refusals in one line, memory within its limit."""

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

import koffline
from koffline.cli import cli, options
from koffline.errors import ConfigError, DataError, KofflineError
from koffline.ope.streaming.estimating import ESTIMATORS
from koffline.ope.streaming.settings import StreamSettings, parse_memory
from koffline.policies import ContinuousPolicy
from tests.exact_problems import EXACT_PROBLEMS
from tests.ope.problems import NOISY, SOFT, continuous_log, discrete_log
from tests.ope.streaming.logs import STEADY, on_disk

QUICK = {"steps": 20, "full_replicas": 2, "hidden_units": (8, 8), "instruments": 40}


def logged(rows: int = 300):
    return discrete_log(rows, behavior_log_probabilities=np.full(rows, np.log(1.0 / 3.0)))


@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_estimator_answers(name, tmp_path):
    found = koffline.evaluate(on_disk(tmp_path, logged(), 120), SOFT, 0.9, estimator=name, **QUICK)
    assert found.n_transitions == 300
    assert found.n_episodes == 30
    assert found.data_sha256 == logged().sha256
    assert np.isfinite(found.value)
    assert (found.interval is None) == (name == "fqe")
    json.loads(found.to_json())


def test_the_same_again_is_the_same_number(tmp_path):
    lazy = on_disk(tmp_path, logged(), 120)
    found, again = (koffline.evaluate(lazy, SOFT, 0.9, **QUICK) for _ in range(2))
    assert again.value == found.value
    assert again.interval == found.interval


@pytest.mark.parametrize(
    "name", ["chain_off", pytest.param("linear_off_deterministic", marks=pytest.mark.slow)]
)
def test_values_agree_with_those_in_memory(name, tmp_path):
    problem = EXACT_PROBLEMS[name](1, 1500)
    options = {"steps": 250, "hidden_units": (16, 16), "full_replicas": 2, "resampled_replicas": 2}
    options["instruments"] = 200
    eager = koffline.evaluate(problem.transitions, problem.policy, problem.gamma, **options)
    lazy = koffline.evaluate(
        on_disk(tmp_path, problem.transitions, 1000), problem.policy, problem.gamma, **options
    )
    assert lazy.interval is not None
    assert abs(lazy.value - eager.value) < 0.5 * lazy.interval.width
    assert lazy.interval.holds(eager.value)
    assert lazy.diagnostics["behavior_return"] == pytest.approx(eager.diagnostics["behavior_return"])
    assert lazy.diagnostics["n_terminated"] == eager.diagnostics["n_terminated"]


def test_closed_forms_in_random_features_agree_with_those_in_memory(tmp_path):
    problem = EXACT_PROBLEMS["chain_off"](2, 1500)
    given = {"estimator": "mwl", "feature_source": "random", "features": 20, "instruments": 200}
    eager = koffline.evaluate(problem.transitions, problem.policy, problem.gamma, **given)
    lazy = koffline.evaluate(
        on_disk(tmp_path, problem.transitions, 700),
        problem.policy,
        problem.gamma,
        stream=StreamSettings(precision="double"),
        **given,
    )
    assert lazy.value == pytest.approx(eager.value, rel=0.02)  # bandwidths are medians of other rows
    assert lazy.interval is not None
    assert eager.interval is not None
    assert lazy.interval.width == pytest.approx(eager.interval.width, rel=0.5)


@pytest.mark.parametrize("policy", [STEADY, NOISY])
def test_given_start_states_replace_the_logs(policy: ContinuousPolicy, tmp_path):
    lazy = on_disk(tmp_path, continuous_log(200), 90)
    starts = np.array([[0.1, 0.2], [0.3, -0.1]])
    found = koffline.evaluate(lazy, policy, 0.9, initial_observations=starts, **QUICK)
    other = koffline.evaluate(lazy, policy, 0.9, initial_observations=starts + 0.5, estimator="mql", **QUICK)
    assert found.value != other.value
    assert found.interval is not None
    assert other.interval is not None


def test_evidence_and_value_function_come_from_the_sample(tmp_path):
    log = logged()
    found = koffline.evaluate(on_disk(tmp_path, log, 120), SOFT, 0.9, **QUICK)
    assert found.evidence is not None
    assert found.evidence.replica_roles == ("full", "full")
    assert len(found.evidence.residuals) == 300
    assert found.value_function is not None
    values = found.value_function.values(log.observations, log.actions)
    assert values.shape == (300,)
    assert found.diagnostics["sample_rows"] == 300


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"estimator": "dr"}, "needs all rows in memory"),
        ({"estimator": "nonsense"}, "there is no estimator"),
        ({"interval": "bootstrap"}, "needs all rows in memory"),
        ({"estimator": "wis", "behavior": "estimate"}, "to estimate the behavior needs all rows"),
        ({"estimator": "wis", "initial_observations": np.zeros((2, 2))}, "leave other starts out"),
        ({"full_replicas": 400, "stream": StreamSettings("600MB")}, "memory is 600MB, this evaluation needs"),
    ],
)
def test_what_sums_cannot_say_is_refused_in_one_line(given, message, tmp_path):
    lazy = on_disk(tmp_path, logged(60), 40)
    with pytest.raises(KofflineError, match=message) as caught:
        koffline.evaluate(lazy, SOFT, 0.9, **{**QUICK, **given})
    assert "\n" not in str(caught.value)


def test_importance_needs_episodes_and_probabilities(tmp_path):
    with pytest.raises(DataError, match="rows stand alone"):
        koffline.evaluate(on_disk(tmp_path, continuous_log(60)), NOISY, 0.9, estimator="wis", **QUICK)
    with pytest.raises(DataError, match="store behavior_log_probabilities"):
        koffline.evaluate(on_disk(tmp_path, discrete_log(60), 20), SOFT, 0.9, estimator="wis", **QUICK)


def test_images_are_refused_before_anything_is_read(tmp_path):
    pictures = np.zeros((4, 3, 84, 84), dtype=np.uint8)
    log = discrete_log(4, 2, observations=pictures, next_observations=pictures)
    with pytest.raises(DataError, match="embed images first"):
        koffline.evaluate(on_disk(tmp_path, log, 2), "uniform", 0.9, **QUICK)


def test_stream_settings_are_for_logs_on_disk():
    with pytest.raises(ConfigError, match="open the log with lazy=True"):
        koffline.evaluate(discrete_log(), SOFT, 0.9, stream=StreamSettings(), **QUICK)


def test_a_bad_shard_is_left_out_on_request_and_said(tmp_path):
    lazy = on_disk(tmp_path, logged(), 60)
    with open(lazy.shards[1].name, "r+b") as file:
        file.truncate(700)
    with pytest.raises(DataError, match="shard-00001"):
        koffline.evaluate(lazy, SOFT, 0.9, **QUICK)
    found = koffline.evaluate(lazy, SOFT, 0.9, stream=StreamSettings(skip_bad_shards=True), **QUICK)
    assert (found.n_transitions, found.n_episodes) == (240, 24)
    assert any("Left out" in warning and "shard-00001" in warning for warning in found.warnings)
    assert found.data_sha256 == ""


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("2GB", 2 * 10**9),
        ("1.5g", 15 * 10**8),
        ("500MiB", 500 * 2**20),
        (10**9, 10**9),
        ("700 MB", 7 * 10**8),
    ],
)
def test_memory_is_read_as_people_write_it(text, size):
    assert parse_memory(text) == size


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"memory": "two"}, "give a size such as 2GB"),
        ({"memory": True}, "give a size such as 2GB"),
        ({"sample_rows": 1}, "at least 2"),
        ({"groups": 1}, "from 2 to 1000"),
        ({"precision": "half"}, "single or double"),
    ],
)
def test_wrong_stream_settings_are_one_line(given, message):
    with pytest.raises(ConfigError, match=message):
        StreamSettings(**given)


SMALL = [f"--set={setting}" for setting in ("hidden_units=[8]", "instruments=40", "full_replicas=1")]
ARGUMENTS = ["--policy", "uniform", "--gamma", "0.9", "--set", "steps=20", *SMALL]


def run(folder: str, *arguments: str) -> Result:
    return CliRunner().invoke(cli, ["evaluate", folder, *ARGUMENTS, *arguments], prog_name="koffline")


def test_the_command_reads_shards_from_disk(tmp_path):
    lazy = on_disk(tmp_path, logged(), 120)
    folder = str(Path(lazy.shards[0].name).parent)
    out = tmp_path / "report"
    found = run(folder, "--lazy", "--out", str(out))
    assert found.exit_code == 0, found.output
    assert "group-jackknife" in found.output
    assert "one pass over all rows, networks from 300 sampled rows" in found.output
    assert "networks from 300 sampled rows" in (out / "report.html").read_text()
    assert (out / "report.html").is_file()
    estimate = json.loads((out / "estimate.json").read_text())
    assert estimate["settings"]["groups"] == 40
    several = run(folder, "--lazy", "--estimator", "all")
    assert several.exit_code == 2
    assert "several estimators need all rows in memory" in several.output


def test_an_option_of_lazy_logs_makes_the_log_lazy(tmp_path):
    folder = str(Path(on_disk(tmp_path, logged(), 120).shards[0].name).parent)
    found = run(folder, "--memory", "1GB", "--json")
    assert json.loads(found.stdout)["interval"]["kind"] == "group-jackknife"


def test_shards_that_would_not_fit_stay_on_disk_and_say_so(tmp_path, monkeypatch):
    folder = str(Path(on_disk(tmp_path, logged(), 120).shards[0].name).parent)
    found = run(folder, "--json")
    assert json.loads(found.stdout)["interval"]["kind"] == "bootstrap"
    monkeypatch.setattr(options, "machine_memory", lambda: 1000)
    found = run(folder, "--json")
    record = json.loads(found.stdout)
    assert record["interval"]["kind"] == "group-jackknife"
    assert any("left on disk" in warning for warning in record["warnings"])


@pytest.mark.parametrize("option", ["--memory", "--sample-rows", "--workers", "--ray", "--skip-bad-shards"])
def test_options_of_lazy_logs_say_that_they_make_the_log_lazy(option):
    text = CliRunner().invoke(cli, ["evaluate", "--help"]).output
    described = text.split(f"\n  {option} ")[1].split("\n  --")[0]
    assert "implies --lazy" in " ".join(described.split()).lower()


STARTS = np.array([[0.1, 0.2], [0.3, -0.1]])


@pytest.mark.parametrize(
    ("given", "said", "unsaid"),
    [
        ({}, ["and their start states", "nor how trained features vary"], ["held fixed"]),
        ({"initial_observations": STARTS}, ["given start states held fixed"], ["and their start states"]),
        (
            {"estimator": "mwl", "feature_source": "random"},
            ["nor the pull of the ridge"],
            ["trained features"],
        ),
        ({"estimator": "wis"}, ["effective number", "heavy tails"], ["features", "ridge", "weight_clip"]),
        ({"estimator": "pdis", "weight_clip": 2.0}, ["bias of weight_clip"], ["features", "ridge"]),
    ],
)
def test_an_interval_says_what_it_covers(given, said, unsaid, tmp_path):
    found = koffline.evaluate(on_disk(tmp_path, logged(), 120), SOFT, 0.9, **{**QUICK, **given}).interval
    assert found is not None
    assert all(words in found.assumptions for words in said), found.assumptions
    assert not any(words in found.assumptions for words in unsaid), found.assumptions
