"""Rollouts against episodes played one by one by a loop that shares no code with the builder."""

import gymnasium
import numpy as np
import pytest

from koffline.builders import RolloutSettings, build_rollouts
from koffline.builders import rollouts as rollouts_module
from koffline.builders.resumable import PartsFolder
from koffline.builders.rollouts import RolloutPlayer
from koffline.errors import ConfigError, DataError, PolicyError


def greedy(observations):
    """Push towards the side the pole leans to."""
    right = (observations[:, 2] + 0.5 * observations[:, 3] > 0).astype(float)
    return np.stack([1.0 - right, right], axis=1)


def episodes_of(log):
    starts = np.flatnonzero(log.steps == 0)
    return [slice(a, b) for a, b in zip(starts, [*starts[1:], len(log)], strict=True)]


def test_rows_are_those_of_a_single_environment():
    settings = RolloutSettings("CartPole-v1", 7, time_limit=30, num_envs=3, seed=5)
    log = build_rollouts(settings, [greedy])
    assert log.n_episodes == 7
    for number, rows in enumerate(episodes_of(log)):
        batch, place = divmod(number, 3)
        count = min(3, 7 - 3 * batch)
        seeds = np.random.SeedSequence([5, batch]).generate_state(count)
        env = gymnasium.make("CartPole-v1", max_episode_steps=30)
        seen, _ = env.reset(seed=int(seeds[place]))
        for row in range(rows.start, rows.stop):
            np.testing.assert_array_equal(log.observations[row], seen)
            action = int(greedy(seen[None])[0].argmax())
            seen, reward, ended, cut, _ = env.step(action)
            assert log.actions[row] == action
            assert (log.rewards[row], log.terminated[row], log.truncated[row]) == (reward, ended, cut)
            np.testing.assert_array_equal(log.next_observations[row], seen)
        assert ended or cut
    assert log.truncated.sum() > 0
    assert not (log.truncated & log.terminated).any()


@pytest.mark.parametrize("env", ["koffline/NoisyPole-v0", "koffline/PuddleWorld-v0"])
def test_our_worlds_keep_their_episodes_and_limits(env):
    log = build_rollouts(RolloutSettings(env, 40, time_limit=9, num_envs=16), ["uniform"])
    assert log.n_episodes == 40
    for rows in episodes_of(log):
        np.testing.assert_array_equal(log.observations[rows][1:], log.next_observations[rows][:-1])
        assert not (log.terminated[rows][:-1] | log.truncated[rows][:-1]).any()
        ended = log.terminated[rows][-1]
        assert log.truncated[rows][-1] == (not ended)
        assert rows.stop - rows.start <= 9
        assert ended or rows.stop - rows.start == 9


def test_a_mixture_plays_whole_episodes_by_weight():
    left = lambda observations: np.tile([1.0, 0.0], (len(observations), 1))  # noqa: E731
    right = lambda observations: np.tile([0.25, 0.75], (len(observations), 1))  # noqa: E731
    settings = RolloutSettings("CartPole-v1", 300, (1.0, 3.0), time_limit=5, num_envs=50)
    log = build_rollouts(settings, [left, right])
    chances = np.exp(log.behavior_log_probabilities)
    lefts = 0
    for rows in episodes_of(log):
        if np.all(chances[rows] == 1.0):
            assert (log.actions[rows] == 0).all()
            lefts += 1
        else:
            np.testing.assert_allclose(chances[rows], np.where(log.actions[rows] == 1, 0.75, 0.25), rtol=1e-6)
    assert 45 <= lefts <= 105  # 75 expected, four standard deviations


def test_continuous_actions_are_clipped_and_have_no_log_probabilities():
    log = build_rollouts(
        RolloutSettings("Pendulum-v1", 2, time_limit=6, num_envs=2),
        [lambda observations: 5.0 * observations[:, :1]],
    )
    assert log.actions.min() >= -2.0
    assert log.actions.max() <= 2.0
    np.testing.assert_allclose(log.actions[:, 0], np.clip(5.0 * log.observations[:, 0], -2, 2), rtol=1e-6)
    assert log.behavior_log_probabilities is None
    assert log.truncated.sum() == 2


def test_the_same_seed_gives_the_same_rows_and_another_another():
    def digest(seed):
        return build_rollouts(
            RolloutSettings("koffline/NoisyPole-v0", 9, num_envs=4, seed=seed), ["uniform"]
        ).sha256

    assert digest(0) == digest(0) != digest(1)


def test_a_build_that_was_cut_continues_to_the_same_rows(tmp_path, monkeypatch):
    settings = RolloutSettings("CartPole-v1", 10, time_limit=12, num_envs=3)
    whole = build_rollouts(settings, ["uniform"])
    folder = PartsFolder(tmp_path / "log.parts", settings, ["uniform"])
    folder.open(resume=False, force=False)
    real, calls = rollouts_module.RolloutPlayer.play_batch, []

    def cut(self, number):
        calls.append(number)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(self, number)

    monkeypatch.setattr(rollouts_module.RolloutPlayer, "play_batch", cut)
    with RolloutPlayer(settings, ["uniform"]) as player, pytest.raises(KeyboardInterrupt):
        folder.build(player)
    with pytest.raises(DataError, match="--resume"):
        folder.open(resume=False, force=False)
    other = PartsFolder(tmp_path / "log.parts", RolloutSettings("CartPole-v1", 11), ["uniform"])
    with pytest.raises(DataError, match="other settings"):
        other.open(resume=True, force=False)
    half = tmp_path / "log.parts" / "part-000001.npz"
    half.write_bytes(half.read_bytes()[:100])
    folder.open(resume=True, force=False)
    with RolloutPlayer(settings, ["uniform"]) as player:
        log = folder.build(player)
    assert calls == [0, 1, 2, 1, 2, 3]
    assert log.sha256 == whole.sha256
    folder.remove()
    assert not (tmp_path / "log.parts").exists()


@pytest.mark.parametrize(
    ("settings", "policies", "message"),
    [
        (lambda: RolloutSettings("CartPole-v1", 0), ["uniform"], "episodes is 0"),
        (lambda: RolloutSettings("CartPole-v1", 1, num_envs=0), ["uniform"], "num_envs is 0"),
        (lambda: RolloutSettings("CartPole-v1", 1, time_limit=0), ["uniform"], "time_limit is 0"),
        (lambda: RolloutSettings("CartPole-v1", 1, (0.0,)), ["uniform"], "weights"),
        (lambda: RolloutSettings("CartPole-v1", 1, (1.0, -1.0)), ["uniform"] * 2, "weights"),
        (lambda: RolloutSettings("CartPole-v1", 1, (1.0, 1.0)), ["uniform"], "1 policies and 2 weights"),
        (lambda: RolloutSettings("CartPoel-v1", 1), ["uniform"], r"did you mean CartPole-v1\?"),
        (lambda: RolloutSettings("nothing at all", 1), ["uniform"], "cannot be made"),
        (lambda: RolloutSettings("Taxi-v3", 1), ["uniform"], "FlattenObservation"),
    ],
)
def test_bad_requests_are_one_line(settings, policies, message):
    with pytest.raises(ConfigError, match=message):
        build_rollouts(settings(), policies)


def test_a_policy_that_does_not_fit_is_named():
    three = lambda observations: np.full((len(observations), 3), 1 / 3)  # noqa: E731
    with pytest.raises(PolicyError):
        build_rollouts(RolloutSettings("CartPole-v1", 1), [three])
