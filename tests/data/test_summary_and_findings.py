"""What `data info` and `data validate` know about a log."""

import numpy as np
import pytest

from koffline.data.findings import inspect_log
from koffline.data.raw import RawLog
from koffline.data.spaces import Discrete
from koffline.data.summary import Spread, summarise
from koffline.data.transitions import Metadata
from tests.data.logs import roll_out

ENDS = ("truncated", "terminated") * 6
LENGTHS = (5, 3) * 6


def raw_of(log, **changes) -> RawLog:
    names = ("observations", "actions", "rewards", "next_observations", "terminated", "truncated")
    columns = {name: getattr(log, name) for name in (*names, "episode_ids", "steps")}
    space, metadata = changes.pop("action_space", log.action_space), changes.pop("metadata", log.metadata)
    return RawLog({**columns, **changes}, space, metadata)


def messages(raw: RawLog, severity: str) -> list[str]:
    found = inspect_log(raw)
    assert all(finding.severity in ("error", "warning") for finding in found)
    return [finding.message for finding in found if finding.severity == severity]


@pytest.fixture
def log():
    return roll_out(ENDS, LENGTHS).transitions()


class TestSummary:
    def test_numbers_by_hand(self):
        rollout = roll_out(("truncated", "terminated", "truncated", "neither"), (4, 2, 4, 1))
        log = rollout.transitions(metadata=Metadata(source="walk", gamma=0.9, notes=("made up",)))
        summary = summarise(log)
        returns = [sum(row.reward for row in rollout.episode(i)) for i in range(4)]
        rewards = [row.reward for row in rollout.rows]
        assert (summary.rows, summary.episodes) == (11, 4)
        assert summary.returns is not None
        assert summary.returns.min == pytest.approx(min(returns))
        assert summary.returns.mean == pytest.approx(np.mean(returns))
        assert summary.returns.max == pytest.approx(max(returns))
        assert summary.rewards.mean == pytest.approx(np.mean(rewards))
        assert summary.lengths == Spread(1.0, 2.75, 4.0)
        assert (summary.terminated, summary.truncated, summary.unfinished) == (1, 2, 1)
        assert summary.time_limit == 4
        assert sum(summary.action_counts) == 11
        assert summary.action_counts[2] == sum(row.action == 2 for row in rollout.rows)
        assert summary.action_ranges is None
        assert summary.notes == ("made up",)

    def test_a_time_limit_is_one_only_if_all_cuts_share_it(self):
        assert summarise(roll_out(("truncated", "terminated"), (4, 5)).transitions()).time_limit is None
        assert summarise(roll_out(("truncated", "truncated"), (4, 3)).transitions()).time_limit is None
        assert summarise(roll_out(("terminated", "terminated"), (4, 3)).transitions()).time_limit is None


class TestErrors:
    def test_all_of_them_at_once(self, log):
        rewards, observations = log.rewards.copy(), log.observations.copy()
        rewards[[3, 9]] = np.nan, np.inf
        observations[7, 1] = np.nan
        raw = raw_of(
            log,
            rewards=rewards,
            observations=observations,
            actions=np.where(np.arange(48) == 5, 9, log.actions),
            terminated=np.where(np.arange(48) == 2, 2, log.terminated),
            weights=-np.ones(48),
        )
        assert messages(raw, "error") == [
            "observations: NaN or infinite in row 7; drop or mend them",
            "rewards: NaN or infinite in 2 rows (first: row 3); drop or mend them",
            "actions: outside Discrete(3) in row 5; declare the space anew or mend them",
            "terminated: neither true nor false in row 2; give 0 or 1",
            "weights: negative in 48 rows (first: row 0); give weights of at least 0",
        ]
        assert messages(raw, "warning") == []


class TestWarnings:
    def test_a_sound_log_has_none(self, log):
        assert inspect_log(raw_of(log)) == []

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            (lambda log: {"action_space": Discrete(5)}, "actions 3, 4 never appear"),
            (lambda log: {"rewards": np.ones(48)}, "rewards are all 1"),
            (
                lambda log: {
                    name: np.where([True, False, False], np.float32(2), getattr(log, name))
                    for name in ("observations", "next_observations")
                },
                r"observations: 1 of 3 columns are constant \(0\)",
            ),
            (
                lambda log: {"truncated": np.zeros(48, dtype=bool)},
                "6 episodes end without a flag; taken as cut",
            ),
            (
                lambda log: {"next_observations": log.next_observations + 1},
                r"not the observation of the row below in 36 rows \(first: row 0\) inside episodes",
            ),
            (
                lambda log: {"next_observations": np.roll(log.observations, -1, axis=0)},
                r"first one of the following episode in 6 rows \(first: row 4\); is it one stream cut",
            ),
            (lambda log: {"metadata": Metadata(sha256="0" * 64)}, "it was edited"),
            (
                lambda log: (
                    {"episode_ids": np.arange(48) // 24, "steps": np.arange(48) % 24}
                    | dict.fromkeys(("terminated", "truncated"), np.zeros(48, dtype=bool))
                ),
                "only 2 episodes",
            ),
        ],
    )
    def test_each(self, log, change, words):
        import re

        raw = raw_of(log, **change(log))
        assert messages(raw, "error") == []
        assert any(re.search(words, message) for message in messages(raw, "warning"))

    def test_rows_written_twice(self, log):
        names = ("observations", "actions", "rewards", "next_observations", "terminated", "truncated")
        twice = {name: np.concatenate([getattr(log, name)] * 2) for name in names}
        ids = np.concatenate([log.episode_ids, log.episode_ids + 12])
        raw = raw_of(log, **twice, episode_ids=ids, steps=np.concatenate([log.steps] * 2))
        assert messages(raw, "warning") == [
            "48 of 96 rows repeat an earlier row exactly; were episodes written twice?"
        ]
