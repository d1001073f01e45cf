"""One engine: where a log lies changes nothing, and sums over parts are those over all
rows.
"""

import dataclasses
import pickle
from collections import Counter

import numpy as np
import pytest

import koffline
from koffline.config import EvaluationSettings
from koffline.data.disk.log import LazyTransitions
from koffline.data.late_ends import stop_shares, without_late_ends
from koffline.data.transitions import Metadata
from koffline.errors import ConfigError, DataError
from koffline.ope.evaluation import estimate_all
from koffline.ope.log import working_log
from koffline.ope.log.problem import prepare_part
from koffline.ope.log.working_log import hold
from koffline.ope.networks.out_of_bag import reader_of
from koffline.ope.stream_settings import StreamSettings, remove_saved
from koffline.ope.workspace import open_workspace
from koffline.policies import ContinuousPolicy, DiscretePolicy
from tests.data.logs import in_shards
from tests.ope.problems import mortal_log, uneven_log
from tests.refusals import Attack

QUICK = {
    "steps": 30,
    "hidden_units": (8, 8),
    "full_replicas": 2,
    "resampled_replicas": 3,
    "instruments": 60,
}
TILTED = DiscretePolicy(
    3, lambda s: np.tile([0.2, 0.3, 0.5], (len(s), 1)), name="tilted"
)
DRIFT = ContinuousPolicy(1, lambda s: np.tanh(s[:, :1]), name="drift")
DRAWN = ContinuousPolicy(
    1, None, lambda s, generator: generator.uniform(-1, 1, (len(s), 1)), name="drawn"
)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A log by kind: in memory, and opened from a folder of small shards."""
    logs = {}
    for kind in ("discrete", "continuous", "rows", "left out"):
        folder = tmp_path_factory.mktemp("logs") / kind
        log = uneven_log(kind.replace("left out", "discrete"))
        if kind == "left out":
            log = log.with_metadata(Metadata(lost_last_rows=True))
        logs[kind] = log, in_shards(log, folder, 90)
    return logs


def answers(log, policy, names=None, **options) -> dict[str, np.ndarray | str]:
    table = estimate_all(
        log, policy, 0.9, names=names, seed=4, bounds=False, **QUICK, **options
    )
    numbers: dict[str, np.ndarray | str] = {}
    for row in table.rows:
        estimate = row.estimate
        if estimate is None:
            numbers[row.name] = row.reason
            continue
        of_row = [estimate.value]
        if estimate.interval is not None:
            of_row += [estimate.interval.low, estimate.interval.high]
        if estimate.uplift is not None:
            of_row += [estimate.uplift.value, estimate.uplift.behavior_value]
        numbers[row.name] = np.array(of_row)
    return numbers


@pytest.mark.parametrize(
    ("kind", "policy", "sample_rows", "workers", "names"),
    [
        *(("discrete", TILTED, rows, 1, None) for rows in (200_000, 150)),
        *(
            (kind, DRIFT, rows, 1, None)
            for kind in ("continuous", "rows")
            for rows in (200_000, 150)
        ),
        *((kind, DRAWN, 150, 1, ("kloss", "drl")) for kind in ("continuous", "rows")),
        ("discrete", TILTED, 150, 2, ("lstdq", "wis")),  # features, weights of episodes
        *(("left out", TILTED, rows, 1, ("kloss", "wis")) for rows in (200_000, 150)),
    ],
)
def test_storage_changes_no_estimate_and_no_interval(
    stored, kind, policy, sample_rows, workers, names, monkeypatch
):
    """Every estimator, its value and its interval; sums over parts of 40 rows are those
    over all.
    """
    memory, shards = stored[kind]
    expected = answers(memory, policy, names, sample_rows=sample_rows)
    answered = sum(not isinstance(value, str) for value in expected.values())
    fewest = 8
    if names:
        fewest = len(names)
    elif kind == "discrete":
        fewest = 15
    assert answered >= fewest
    monkeypatch.setattr(working_log, "_MOST_ROWS", 40)
    stream = StreamSettings(memory="1GB", workers=workers)
    from_disk = answers(shards, policy, names, sample_rows=sample_rows, stream=stream)
    assert from_disk.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, str):
            assert from_disk[name] == value
        else:
            largest = np.abs(value).max()  # one end of an interval may be near zero
            np.testing.assert_allclose(
                from_disk[name], value, rtol=0.0, atol=1e-10 * largest, err_msg=name
            )


def test_all_estimators_together_read_a_log_five_times(stored, monkeypatch) -> None:
    """The sample, the log's facts, the networks' systems, rows, and episodes."""
    _, shards = stored["discrete"]
    read: list[str] = []
    shard_blocks = LazyTransitions.shard_blocks

    def counting(log: LazyTransitions, shard: int, block_rows: int | None = None):
        read.append(log.shards[shard].name)
        return shard_blocks(log, shard, block_rows)

    monkeypatch.setattr(LazyTransitions, "shard_blocks", counting)
    table = estimate_all(shards, TILTED, 0.9, sample_rows=150, seed=4, **QUICK)
    assert sum(row.estimate is not None for row in table.rows) >= 15
    times_read = Counter(read)
    assert times_read.keys() == {shard.name for shard in shards.shards}
    assert set(times_read.values()) <= {4, 5}  # the sample may need no row of a shard


def test_late_ends_are_left_out_as_often_as_recording_stopped(stored, tmp_path) -> None:
    """As often as rows were lost at the same step in episodes that went on; never a
    whole episode.
    """
    log = mortal_log(False, most=6)
    episodes = np.arange(log.n_episodes)
    lengths = np.asarray(log.episode_lengths)
    fair = without_late_ends(log, episodes, stop_shares(log))
    # all that ended at the limit
    assert np.array_equal(lengths - fair.episode_lengths, (lengths == 6) * 1)
    assert fair.truncated[fair.episode_ends].sum() + fair.terminated.sum() == len(
        episodes
    )
    # which has no place for the note on them
    koffline.write_transitions(log, tmp_path / "log.csv")
    assert len(koffline.open_transitions(tmp_path / "log.csv")) == len(
        without_late_ends(log)
    )
    memory, _ = stored["left out"]
    shares = stop_shares(memory)
    went_on = np.zeros(14)
    lost = np.zeros(14)
    for begin, end in zip(memory.episode_starts, memory.episode_ends, strict=True):
        steps = end - begin + 1
        weight = memory.weights[end]
        went_on[: steps - memory.terminated[end]] += weight
        lost[steps] += weight * ~memory.terminated[end]
    np.testing.assert_allclose(
        shares, (lost / np.maximum(lost + went_on, 1e-9))[: len(shares)]
    )
    assert stop_shares(stored["discrete"][0]) is None


def test_records_of_a_sampled_log_count_all_rows(stored) -> None:
    memory, shards = stored["discrete"]
    estimate = koffline.evaluate(shards, TILTED, 0.9, sample_rows=150, **QUICK)
    assert (estimate.n_transitions, estimate.n_episodes) == (
        len(memory),
        memory.n_episodes,
    )
    assert estimate.data_sha256 == memory.sha256
    assert estimate.diagnostics["sample_rows"] < 200
    assert estimate.diagnostics["n_terminated"] == memory.terminated.sum()
    assert estimate.diagnostics["logged_return"] == pytest.approx(
        memory.returns(0.9).mean(), rel=1e-12
    )
    whole = koffline.evaluate(memory, TILTED, 0.9, **QUICK)
    assert estimate.diagnostics["logged_return_se"] == pytest.approx(
        whole.diagnostics["logged_return_se"]
    )
    assert "sample_rows" not in whole.diagnostics


def test_shards_that_cannot_be_read(stored, tmp_path) -> None:
    """Refused with their name, in the sample and in the passes."""
    log = in_shards(stored["discrete"][0], tmp_path / "log", 90)
    (tmp_path / "log" / "shard-00001.hdf5").write_bytes(b"no shard")
    for rows in (200_000, 150):
        with pytest.raises(DataError, match=r"shard-00001\.hdf5"):
            koffline.evaluate(log, TILTED, 0.9, sample_rows=rows, **QUICK)


def test_memory_that_is_too_small_is_refused_with_what_is_enough(stored) -> None:
    _, shards = stored["discrete"]
    stream = StreamSettings(memory="600MB")
    with pytest.raises(
        ConfigError, match=r"memory is 600MB, this evaluation needs at least \d+MB"
    ):
        koffline.evaluate(shards, TILTED, 0.9, sample_rows=150, stream=stream, **QUICK)


def test_weights_of_another_mean_outside_the_sample(stored, monkeypatch) -> None:
    """The doubly robust sums of a sampled log are those of all its rows, in the units
    of the sample.
    """
    # several parts, of other mean weights
    monkeypatch.setattr(working_log, "_MOST_ROWS", 60)
    memory, _ = stored["discrete"]
    held = hold(memory, 150, seed=0).sample.units
    log = memory.replace(weights=np.where(np.isin(memory.episode_ids, held), 0.1, 3.0))
    with open_workspace(
        log, TILTED, EvaluationSettings(gamma=0.9, sample_rows=150, **QUICK)
    ) as workspace:
        sums = workspace.row_sums
        fitted = workspace.fitted
        rows = prepare_part(log, workspace.policy, 0.9, measures=workspace.problem)
        values = reader_of(fitted, "kloss")(rows).values
    mass = values.weights * (1.0 - rows.discounts)
    assert sums.diagnostics()["mass"] == pytest.approx(
        np.average(mass, weights=log.weights), rel=1e-9
    )
    direct = np.average(values.starts, weights=log.weights[log.episode_starts])
    delta = log.rewards + rows.discounts * values.later - values.now
    expected = direct + np.average(values.weights * delta, weights=log.weights)
    assert sums.value == pytest.approx(expected, rel=1e-9)


class TestAKilledPass:
    """An evaluation that is killed goes on from the sums of its passes, to the bit."""

    @staticmethod
    def run(
        shards, folder, monkeypatch, kill_after=None, policy=TILTED
    ) -> tuple[str, int]:
        """The estimate as JSON and the shards read; the read after ``kill_after`` ends
        it as Ctrl-C does.
        """
        read = 0
        sum_of = working_log._sum_of_shards

        def counting(plan, item):
            nonlocal read
            if read == kill_after:
                raise KeyboardInterrupt
            read += 1
            return sum_of(plan, item)

        with monkeypatch.context() as patched:
            patched.setattr(working_log, "_sum_of_shards", counting)
            patched.setattr(working_log, "SECONDS_BETWEEN_SAVES", 0.0)
            patched.setattr(working_log, "_ROWS_TOGETHER", 90)
            options = {"estimator": "dr", "seed": 4, "sample_rows": 150, **QUICK}
            estimate = koffline.evaluate(
                shards, policy, 0.9, stream=StreamSettings(partial=folder), **options
            )
        return estimate.to_json(timing=False), read

    def test_goes_on(self, stored, tmp_path, monkeypatch) -> None:
        _, shards = stored["discrete"]
        expected, whole = self.run(shards, None, monkeypatch)
        with pytest.raises(KeyboardInterrupt):
            self.run(shards, tmp_path / "sums", monkeypatch, kill_after=whole - 2)
        value, rest = self.run(shards, tmp_path / "sums", monkeypatch)
        assert value == expected
        assert rest == 2

    def test_another_policy_or_log_starts_anew(
        self, stored, tmp_path, monkeypatch
    ) -> None:
        """The policy's code may have changed, its name not: what it answers counts."""
        _, shards = stored["discrete"]
        other = DiscretePolicy(
            3, lambda s: np.tile([0.5, 0.3, 0.2], (len(s), 1)), name="tilted"
        )
        metadata = dataclasses.replace(shards.metadata, sha256="0" * 64)
        cases = (
            (shards, TILTED),
            (shards, other),
            (dataclasses.replace(shards, metadata=metadata), other),
        )
        reads = [
            self.run(log, tmp_path / "sums", monkeypatch, policy=policy)[1]
            for log, policy in cases
        ]
        assert reads[0] > 0
        assert reads == reads[:1] * 3

    def test_a_file_of_sums_can_run_nothing(
        self, stored, tmp_path, monkeypatch
    ) -> None:
        """Whatever lies there is a pass from the beginning."""
        _, shards = stored["discrete"]
        expected, whole = self.run(shards, tmp_path / "sums", monkeypatch)
        for path in (tmp_path / "sums").iterdir():
            path.write_bytes(pickle.dumps((1, Attack(tmp_path / "proof"), ())))
        assert self.run(shards, tmp_path / "sums", monkeypatch) == (expected, whole)
        assert not (tmp_path / "proof").exists()
        (tmp_path / "sums" / "mine").touch()
        remove_saved(tmp_path / "sums")
        assert [path.name for path in (tmp_path / "sums").iterdir()] == ["mine"]
