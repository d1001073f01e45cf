"""What `data info` and `data validate` know about a log, in memory and on disk."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from koffline.data.findings import _extremes, inspect_log
from koffline.data.raw import RawLog
from koffline.data.spaces import Discrete
from koffline.data.statistics import ColumnStatistics, summarise
from koffline.data.transitions import Metadata
from tests.data.logs import drawn_logs, in_shards, leaves, numbered_log, roll_out


def raw_of(log, **changes) -> RawLog:
    space = changes.pop("action_space", log.action_space)
    metadata = changes.pop("metadata", log.metadata)
    return RawLog({**log.columns, **changes}, space, metadata)


def said(raw: RawLog, severity: str) -> list[str]:
    inspection = inspect_log(raw)
    return [finding.message for finding in inspection if finding.severity == severity]


@pytest.fixture
def log():
    return roll_out(("truncated", "terminated") * 6, (5, 3) * 6).transitions()


class TestSummary:
    def test_numbers_by_hand(self):
        rollout = roll_out(
            ("truncated", "terminated", "truncated", "neither"), (4, 2, 4, 1)
        )
        log = rollout.transitions(
            metadata=Metadata(source="walk", gamma=0.9, notes=("made up",))
        )
        summary = summarise(log)
        returns = [sum(row.reward for row in rollout.episode(i)) for i in range(4)]
        rewards = [row.reward for row in rollout.rows]
        expected = {
            "rows": 11,
            "episodes": 4,
            "terminated": 1,
            "truncated": 2,
            "unfinished": 1,
            "time_limit": 4,
            "returns": {
                "min": min(returns),
                "mean": np.mean(returns),
                "max": max(returns),
            },
            "rewards": {
                "min": min(rewards),
                "mean": np.mean(rewards),
                "max": max(rewards),
            },
            "lengths": {"min": 1.0, "mean": 2.75, "max": 4.0},
            "action_counts": [
                sum(row.action == action for row in rollout.rows) for action in range(3)
            ],
            "action_ranges": None,
            "notes": ("made up",),
        }
        assert leaves({name: summary[name] for name in expected}) == pytest.approx(
            leaves(expected)
        )

    def test_a_time_limit_is_one_only_if_all_cuts_share_it(self):
        cut = "truncated"
        ended = "terminated"
        for ends, lengths in (
            ((cut, ended), (4, 5)),
            ((cut, cut), (4, 3)),
            ((ended, ended), (4, 3)),
        ):
            log = roll_out(ends, lengths).transitions()
            assert summarise(log)["time_limit"] is None
            lost = log.replace(metadata=Metadata(lost_last_rows=True))
            # one was cut after 5
            assert summarise(lost)["time_limit"] == (5 if lengths == (4, 5) else None)


class TestWarningsInMemory:
    def test_a_sound_log_has_none(self, log):
        assert inspect_log(raw_of(log)) == []

    def test_a_value_far_from_all_others_is_named_and_a_rare_flag_is_not(self):
        column = np.random.default_rng(0).normal(size=(2000, 3))
        column[5, 1] = 1e9
        column[:, 2] = np.arange(2000) == 0
        (finding,) = _extremes("observations", ColumnStatistics.of(column))
        assert finding.startswith(
            "observations in column 1 reach 1e+09, more than 30 standard deviations"
        )

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            (lambda log: {"action_space": Discrete(5)}, "actions 3, 4 never appear"),
            (lambda log: {"rewards": np.ones(48)}, "rewards are all 1"),
            (
                lambda log: {
                    name: np.where(
                        [True, False, False], np.float32(2), getattr(log, name)
                    )
                    for name in ("observations", "next_observations")
                },
                r"observations: 1 of 3 columns are constant \(0\)",
            ),
            (
                lambda log: {"truncated": np.zeros(48, dtype=bool)},
                "6 episodes end without a flag",
            ),
            (
                lambda log: {"next_observations": log.next_observations + 1},
                r"row below in 36 rows \(first: row 0",
            ),
            (
                lambda log: {
                    "next_observations": np.roll(log.observations, -1, axis=0)
                },
                r"following episode in 6 rows \(first: row 4\); is it one stream cut",
            ),
            (lambda log: {"metadata": Metadata(sha256="0" * 64)}, "it was edited"),
            (
                lambda log: {
                    "episode_ids": np.arange(48) // 24,
                    "steps": np.arange(48) % 24,
                    "terminated": np.zeros(48, bool),
                    "truncated": np.zeros(48, bool),
                },
                "only 2 episodes",
            ),
        ],
    )
    def test_each(self, log, change, words):
        raw = raw_of(log, **change(log))
        assert said(raw, "error") == []
        assert any(re.search(words, message) for message in said(raw, "warning"))


class TestOnDisk:
    @settings(max_examples=20, deadline=None)
    @given(drawn_logs(), st.integers(1, 3))
    def test_shards_and_blocks_do_not_matter(self, tmp_path_factory, drawn, copies):
        log = drawn.log()
        take, units = (
            (log.select_episodes, log.n_episodes)
            if log.has_episodes
            else (log.select, len(log))
        )
        log = take(np.tile(np.arange(units), copies)).with_metadata(log.metadata)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr("koffline.data.disk.log.BLOCK_BYTES", 400)
            lazy = in_shards(log, tmp_path_factory.mktemp("log") / "shards", 20)
            whole = lazy.load()
            assert inspect_log(lazy) == inspect_log(raw_of(whole))
            summary = summarise(lazy)
        assert summary.pop("shards", 1) == len(lazy.shards)
        assert leaves(summary) == pytest.approx(leaves(summarise(whole)))

    def test_one_stream_cut_into_shards(self, tmp_path):
        """The next observation of a shard's last row is the first observation of the
        next shard.
        """
        whole = numbered_log()
        following = np.roll(whole.observations, -1, axis=0)
        shifted = whole.replace(
            next_observations=following, terminated=np.zeros(len(whole), bool)
        )
        inspection = inspect_log(in_shards(shifted, tmp_path / "shards"))
        assert inspection == inspect_log(raw_of(shifted))
        assert any("71 rows" in finding.message for finding in inspection)
