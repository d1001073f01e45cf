"""The worlds as Gymnasium environments: what Gymnasium itself checks, seeds, limits, pictures."""

from __future__ import annotations

import pickle
import subprocess
import sys
from itertools import pairwise

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.wrappers import RenderCollection

from koffline.envs.boxes import GYMNASIUM_IDS, TIME_LIMITS, make_world
from koffline.envs.gymnasium_worlds import register_envs
from koffline.envs.pictures import draw_world
from koffline.errors import ConfigError

EACH = pytest.mark.parametrize("identifier", GYMNASIUM_IDS.values())
HEADS = ("import gymnasium, koffline.envs", "import koffline.envs, gymnasium", "import gymnasium, koffline")


def play(env, seed, steps=30):
    """Observations, rewards and ends of the first steps under a fixed sequence of actions."""
    observation, _ = env.reset(seed=seed)
    rows = [observation]
    for action in np.random.default_rng(1).integers(env.action_space.n, size=steps):
        observation, reward, terminated, truncated, info = env.step(int(action))
        assert info == {}
        rows += [observation, np.array([reward, terminated, truncated])]
        if terminated or truncated:
            break
    return np.concatenate(rows)


@EACH
@pytest.mark.parametrize("start", ["reset", "uniform"])
def test_gymnasium_has_no_complaints(identifier, start):
    check_env(gymnasium.make(identifier, render_mode="rgb_array", start=start).unwrapped)


@EACH
def test_a_step_is_the_world_s(identifier):
    env = gymnasium.make(identifier, noise=0.0)
    world = env.unwrapped.world
    observation, _ = env.reset(seed=3)
    state = observation[None].astype(np.float64)
    for action in (0, 1, 2, 1):
        observation, reward, terminated, _, _ = env.step(action)
        outcome = world.step(state, np.array([action]), np.random.default_rng(0))
        state = outcome.state
        # the first observation was rounded to float32, and the unstable pole doubles errors within steps
        np.testing.assert_allclose(observation, state[0], rtol=1e-5, atol=1e-6)
        assert reward == pytest.approx(outcome.reward[0], abs=1e-4)
        assert terminated == outcome.terminated[0]


@EACH
def test_same_seed_same_episode(identifier):
    first, second = gymnasium.make(identifier), gymnasium.make(identifier)
    np.testing.assert_array_equal(play(first, 7), play(second, 7))
    np.testing.assert_array_equal(play(first, 7), play(first, 7))  # reset forgets what was played
    assert not np.array_equal(play(first, 7)[:20], play(first, 8)[:20])


@EACH
def test_the_limit_truncates(identifier):
    env = gymnasium.make(identifier, noise=0.0)
    assert env.spec.max_episode_steps == TIME_LIMITS[env.spec.kwargs["world"]]
    # going nowhere: into the wall, upright, at the bottom of the valley
    state, action = {
        "koffline/PuddleWorld-v0": ((0.0, 0.0), 2),
        "koffline/NoisyPole-v0": ((0.0, 0.0), 1),
        "koffline/NoisyMountainCar-v0": ((-np.pi / 6, 0.0), 1),
    }[identifier]
    env.reset(options={"state": state})
    for _ in range(env.spec.max_episode_steps - 1):
        assert env.step(action)[2:4] == (False, False)
    assert env.step(action)[2:4] == (False, True)


@EACH
def test_vector_environments_give_what_single_ones_give(identifier):
    vector = gymnasium.make_vec(identifier, num_envs=3, vectorization_mode="sync")
    observations, _ = vector.reset(seed=11)
    singles = [gymnasium.make(identifier) for _ in range(3)]
    alone = [env.reset(seed=11 + i)[0] for i, env in enumerate(singles)]
    for _ in range(4):  # no episode ends so soon
        np.testing.assert_array_equal(observations, alone)
        observations, rewards, *_ = vector.step(np.array([0, 1, 2]))
        outcomes = [env.step(i) for i, env in enumerate(singles)]
        alone = [outcome[0] for outcome in outcomes]
        np.testing.assert_array_equal(rewards, [outcome[1] for outcome in outcomes])
    vector.close()


def test_in_other_processes():
    vector = gymnasium.make_vec("koffline/PuddleWorld-v0", num_envs=2, vectorization_mode="async")
    try:
        observations, _ = vector.reset(seed=0)
        following, *_ = vector.step(np.array([1, 1]))
    finally:
        vector.close()
    # one step right is 0.05, give or take five standard deviations of the noise
    np.testing.assert_allclose(following - observations, np.tile([0.05, 0.0], (2, 1)), atol=0.05)


def test_uniform_starts_fill_the_box():
    env = gymnasium.make("koffline/NoisyMountainCar-v0", start="uniform")
    env.reset(seed=0)
    starts = np.array([env.reset()[0] for _ in range(400)])
    assert starts[:, 0].max() < 0.5
    # 400 uniform draws leave no gap of a twentieth of the range (chance below 20 · 0.95^400 = 2e-8)
    for column, width in zip(starts.T, (1.7, 0.14), strict=True):
        assert max(b - a for a, b in pairwise(sorted(column))) < width / 20
        assert np.ptp(column) > 0.9 * width
    usual = gymnasium.make("koffline/NoisyMountainCar-v0").reset(seed=0)[0]
    assert usual[1] == 0.0


@EACH
def test_an_episode_may_start_where_another_stood(identifier):
    """Also on the border of the box, which float32 rounds outward."""
    env = gymnasium.make(identifier)
    env.reset(seed=0)
    # the border on which episodes go on
    corner = np.array(env.unwrapped.world.low, dtype=np.float32)
    for observation in (corner, env.observation_space.sample() * 0.3):
        got, _ = env.reset(options={"state": observation})
        np.testing.assert_array_equal(got, observation)


@pytest.mark.parametrize("state", [(2.0, 0.5), (0.5,), (0.5, 0.5, 0.5), (np.nan, 0.0), (0.99, 0.99), "here"])
def test_states_that_no_episode_starts_in_are_refused(state):
    env = gymnasium.make("koffline/PuddleWorld-v0")
    with pytest.raises(ConfigError, match="give a point of the box in which episodes go on"):
        env.reset(options={"state": state})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"start": "anywhere"}, "start is 'anywhere'; use 'reset' or 'uniform'"),
        ({"render_mode": "human"}, "render_mode is 'human'; use 'rgb_array' or None"),
        ({"nois": 0.1}, "puddle_world has no such setting .*nois"),
        ({"noise": -0.1}, "noise is -0.1; give a number that is not negative"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, message):
    from koffline.envs.gymnasium_worlds import BoxWorldEnv

    with pytest.raises(ConfigError, match=message):
        BoxWorldEnv("puddle_world", **settings)


def test_wrong_use_is_refused():
    env = gymnasium.make("koffline/NoisyMountainCar-v0").unwrapped
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step(0)
    assert env.render() is None
    env.reset(seed=0)
    for action in (3, -1, 0.5, "left"):
        with pytest.raises(ConfigError, match=r"action is .*; give one of Discrete\(3\)"):
            env.step(action)


def test_overrides_reach_the_world():
    env = gymnasium.make("koffline/NoisyPole-v0", reward="balance", noise=0.0)
    env.reset(seed=0)
    assert env.step(1)[1] == 1.0
    assert env.unwrapped.world.noise == 0.0


def test_environments_can_be_pickled():
    env = gymnasium.make("koffline/PuddleWorld-v0").unwrapped
    env.reset(seed=0)
    copy = pickle.loads(pickle.dumps(env))
    np.testing.assert_array_equal(env.step(1)[0], copy.step(1)[0])


@EACH
def test_episodes_can_be_filmed(identifier):
    env = RenderCollection(gymnasium.make(identifier, render_mode="rgb_array"))
    env.reset(seed=0)
    env.step(0)
    frames = env.render()
    assert len(frames) == 2
    assert all(frame.shape == (320, 320, 3) and frame.dtype == np.uint8 for frame in frames)
    assert not np.array_equal(*frames)
    assert gymnasium.make(identifier).unwrapped.metadata["render_fps"] > 0


def test_pictures_show_the_state():
    red, green = np.array([214, 84, 54]), np.array([96, 168, 92])

    def centre_of(picture, color):
        rows, columns = np.nonzero((picture == color).all(axis=-1))
        return columns.mean() / 320, 1.0 - rows.mean() / 320

    puddles = draw_world(make_world("puddle_world"), np.array([0.3, 0.2]))
    np.testing.assert_allclose(centre_of(puddles, red), [0.3, 0.2], atol=0.01)
    np.testing.assert_allclose(centre_of(puddles, green), [1 - 0.1 / 3, 1 - 0.1 / 3], atol=0.01)
    car = draw_world(make_world("mountain_car"), np.array([-0.3, 0.0]))
    across, up = centre_of(car, red)
    # x runs from -1.25 to 0.65; the valley's floor is at 0.1 of 1.9, and the car is above it
    assert across == pytest.approx((1.25 - 0.3) / 1.9, abs=0.05)
    assert 0.15 < up < 0.4
    left, right = (centre_of(draw_world(make_world("mountain_car"), np.zeros(2), a), red) for a in (0, 2))
    assert left != right
    wood = np.array([183, 140, 92])
    poles = [draw_world(make_world("cart_pole"), np.array([angle, 0.0])) for angle in (-1, 0, 1)]
    left, middle, right = (centre_of(pole, wood)[0] for pole in poles)
    assert left < 0.35
    assert middle == pytest.approx(0.5, abs=0.01)
    assert right == pytest.approx(1.0 - left, abs=0.01)


def test_a_picture_does_not_stain_the_next():
    world, state = make_world("puddle_world"), np.array([0.3, 0.2])
    first = draw_world(world, state)
    draw_world(world, np.array([0.8, 0.8]))
    np.testing.assert_array_equal(draw_world(world, state), first)


@pytest.mark.parametrize("head", HEADS)
def test_names_are_known_in_a_fresh_process_without_a_word(head):
    code = f"{head}; print([gymnasium.spec(i).id for i in {list(GYMNASIUM_IDS.values())}])"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert done.stderr == ""
    assert done.stdout.count("koffline/") == 3


def test_gymnasium_finds_them_by_module_without_an_import():
    code = (
        "import gymnasium, sys; env = gymnasium.make('koffline.envs:koffline/PuddleWorld-v0'); env.reset();"
        "print(sorted({'torch', 'd3rlpy', 'matplotlib', 'minari', 'pygame'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def test_registering_twice_is_silent(recwarn):
    register_envs()
    assert len(recwarn) == 0
