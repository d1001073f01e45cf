"""export, record and play: models in environments, videos, and what is refused."""

from __future__ import annotations

from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from PIL import Image

import koffline
from koffline.errors import ConfigError
from koffline.playing import Player, film
from tests.algos.makers import d3rlpy, make, with_small_networks
from tests.builders import environments
from tests.runs.models import WORLD, command, puddle_model, refusal


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "dqn.d3"
    puddle_model(path)
    return path


def test_export_writes_a_policy(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "policy.onnx"
    result = command("export", str(model), str(path))
    assert result.exit_code == 0, result.output
    assert result.stdout == f"{path}: the policy of the DQN in {model}\n"
    observations = np.random.default_rng(0).uniform(size=(20, 2)).astype(np.float32)
    policy = koffline.load_policy(path, koffline.Discrete(4), (2,))
    wanted = koffline.load(model).predict(observations)
    np.testing.assert_array_equal(policy.probabilities(observations).argmax(axis=1), wanted)
    before = path.read_bytes()
    assert "exists already" in refusal("export", str(model), str(path))
    assert path.read_bytes() == before
    assert command("export", str(model), str(path), "--force").exit_code == 0
    assert "give .pt" in refusal("export", str(model), str(tmp_path / "policy.d3"))
    assert "no such file" in refusal("export", str(tmp_path / "nothing.d3"), str(tmp_path / "policy.pt"))
    assert [found.name for found in tmp_path.iterdir()] == ["policy.onnx"]


def test_record_writes_a_gif_of_every_episode(model: Path, tmp_path: Path) -> None:
    options = ("--env-id", "koffline-tests/Drawn-v0", "--n-episodes", "2", "--max-steps", "5")
    options += ("--out", str(tmp_path / "videos"))
    result = command("record", str(model), *options)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert [line.split(":")[0] for line in lines] == ["episode 0", "episode 1", "Score"]
    assert "5 steps, cut by --max-steps -> " in lines[0]
    for number in (0, 1):
        with Image.open(tmp_path / "videos" / f"rl-video-episode-{number}.gif") as gif:
            assert gif.format == "GIF"
            assert gif.size == (48, 32)
            assert gif.n_frames > 1
    assert "rl-video-episode-0.gif exists already" in refusal("record", str(model), *options)
    assert command("record", str(model), *options, "--force").exit_code == 0


def test_play_gives_the_return_of_the_greedy_policy(model: Path) -> None:
    """Against a loop by hand; the seeds of record and play are the same."""
    result = command("play", str(model), "--env-id", WORLD, "--no-render", "--n-episodes", "2", "--seed", "7")
    assert result.exit_code == 0, result.output
    algo, values = koffline.load(model), []
    env = gymnasium.make(WORLD)
    for seed in (7, 8):
        observation, _ = env.reset(seed=seed)
        values.append(0.0)
        is_over = False
        while not is_over:
            action = int(algo.predict(observation[None])[0])
            observation, reward, terminated, truncated, _ = env.step(action)
            values[-1] += float(reward)
            is_over = terminated or truncated
    error = abs(values[0] - values[1]) / 2
    assert result.stdout.splitlines()[-1] == (
        f"Score: {np.mean(values):.6g} ± {error:.3g} (standard error of 2 episodes)"
    )


def test_models_and_environments_that_do_not_fit(model: Path, tmp_path: Path) -> None:
    play = ("play", str(model), "--no-render", "--env-id")
    shapes = "4 discrete actions for observations of shape (2,), the environment 2 discrete actions and (4,)"
    assert shapes in refusal(*play, "CartPole-v1")
    assert "did you mean" in refusal(*play, "koffline/PudleWorld-v0")
    assert "no such file" in refusal("play", str(tmp_path / "no.d3"), "--no-render", "--env-id", WORLD)


def test_sequence_models_need_a_target_return(tmp_path: Path) -> None:
    config = with_small_networks(
        d3rlpy.algos.DiscreteDecisionTransformerConfig, num_heads=1, num_layers=1, context_size=4
    )
    algo = config.create()
    algo.create_impl((2,), 4)
    algo.save(str(tmp_path / "model.d3"))
    arguments = ("play", str(tmp_path / "model.d3"), "--env-id", WORLD, "--no-render", "--max-steps", "6")
    assert "give it with --target-return" in refusal(*arguments)
    results = [command(*arguments, "--target-return", "-10", "--n-episodes", "2") for _ in range(2)]
    assert results[0].exit_code == 0, results[0].output
    assert results[0].stdout == results[1].stdout, "seeded, though it draws its actions"


class Box(environments.Shapes):
    """Remembers the actions that it is given."""

    observation_space = gymnasium.spaces.Box(-9, 9, (4,), np.float32)
    action_space = gymnasium.spaces.Box(-0.01, 0.02, (3,), np.float32)

    def __init__(self) -> None:
        self.actions: list[np.ndarray] = []

    def reset(self, *, seed=None, options=None):
        gymnasium.Env.reset(self, seed=seed)
        return np.zeros(4, np.float32), {}

    def step(self, action):
        self.actions.append(action)
        return self.np_random.normal(size=4).astype(np.float32), 1.0, len(self.actions) == 5, False, {}


def test_continuous_actions_are_clipped_to_the_space() -> None:
    env, algo = Box(), make("KLossTD3PlusBC", build=True)
    episode = Player(algo, env, "box").play(seed=0)
    assert (episode.value, episode.steps, episode.is_cut) == (5.0, 5, False)
    actions = np.stack(env.actions)
    assert actions.dtype == np.float32
    assert (actions >= np.float32(-0.01)).all()
    assert (actions <= np.float32(0.02)).all()
    assert (np.abs(algo.predict(np.ones((1, 4)))) > 0.02).any(), "nothing had to be clipped"


def test_playing_leaves_the_random_generators_alone() -> None:
    before, numpy_before = torch.random.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    Player(make("KLossSAC", build=True), Box(), "box").play(seed=3)
    assert torch.equal(torch.random.get_rng_state(), before)
    np.testing.assert_array_equal(np.random.get_state()[1], numpy_before)  # noqa: NPY002


def test_an_episode_that_fails_leaves_no_film(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="uint8"), film(tmp_path / "a.gif", 20.0, False) as add:
        [add(frame) for frame in (np.zeros((6, 8, 3), np.uint8), np.zeros(3))]
    with pytest.raises(ConfigError, match="has no frame"), film(tmp_path / "b.gif", 20.0, False):
        pass
    assert not list(tmp_path.iterdir())
