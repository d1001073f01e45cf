"""Episodes of a saved model in a Gymnasium environment."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium.error import DependencyNotInstalled

from koffline.data.transitions import ActionSpace, Continuous, Discrete
from koffline.envs.make import SpaceTranslator, make_env, playing
from koffline.errors import ConfigError, PolicyError
from koffline.policies.base import describe_actions


@dataclass(frozen=True)
class Episode:
    """How an episode went. is_cut: it was ended by the limit of steps that was asked for."""

    value: float  # undiscounted return
    steps: int
    is_cut: bool


def open_environment(env_id: str | None, env_header: str | None, render_mode: str | None) -> Any:
    """The environment of --env-id or of the line of Python of --env-header. Raises ConfigError."""
    if (env_id is None) == (env_header is None):
        received = "neither" if env_id is None else "both"
        raise ConfigError(
            f"{received} of --env-id and --env-header given; give one, for instance --env-id CartPole-v1"
        )
    if env_header is not None:
        return _run_header(env_header)
    import koffline.envs  # noqa: F401  (registers our worlds)

    assert env_id is not None
    return make_env(env_id, render_mode=render_mode)


class Player:
    """A model in an environment that fits it. Raises PolicyError where it does not."""

    def __init__(self, algo: Any, env: Any, name: str, target_return: float | None = None) -> None:
        self._env, self._name = env, name
        self._translator = SpaceTranslator(name, env.observation_space, env.action_space)
        self._model = _Model(algo, target_return)
        self._model.check_fits(self._translator)

    def play(
        self, seed: int | None, max_steps: int | None = None, on_frame: Callable[[Any], None] | None = None
    ) -> Episode:
        """One episode; `on_frame` is given what the environment renders, from the first state to the last.

        seed: of the environment, of torch and of NumPy's global generator, which some of d3rlpy's models
        draw from; both generators are as before afterwards.
        """
        with _seeded(seed):
            with playing(self._name, "reset"):
                raw, _ = self._env.reset(seed=seed)
            self._model.reset()
            self._hear(on_frame)
            value, steps, reward, is_over = 0.0, 0, 0.0, False
            while not is_over and (max_steps is None or steps < max_steps):
                raw, reward, is_over = self._step(raw, reward)
                value, steps = value + reward, steps + 1
                self._hear(on_frame)
        return Episode(value, steps, is_cut=not is_over)

    def _step(self, raw: Any, reward: float) -> tuple[Any, float, bool]:
        with playing(self._name, "its observations"):
            observation = self._translator.observations([raw])[0]
        action = self._model.act(observation, reward, self._translator)
        with playing(self._name, "step"):
            raw, reward, terminated, truncated, _ = self._env.step(action)
        return raw, float(reward), bool(terminated or truncated)

    def _hear(self, on_frame: Callable[[Any], None] | None) -> None:
        if on_frame is None:
            return
        with playing(self._name, "render"):
            try:
                frame = self._env.render()
            except DependencyNotInstalled as error:
                raise ConfigError(f"{self._name} needs another package to draw: {error}") from error
        on_frame(frame)


class _Model:
    """What acts: an algorithm, or a sequence model with the return that it aims at."""

    def __init__(self, algo: Any, target_return: float | None) -> None:
        self._algo, self._memory = algo, None
        if hasattr(algo, "as_stateful_wrapper"):
            if target_return is None:
                raise ConfigError(
                    f"a {type(algo).__name__} aims at a return; give it with --target-return, "
                    "in the units of the environment's rewards"
                )
            self._memory = algo.as_stateful_wrapper(float(target_return))

    def reset(self) -> None:
        """Forget the last episode."""
        if self._memory is not None:
            self._memory.reset()

    def act(self, observation: np.ndarray, reward: float, translator: SpaceTranslator) -> Any:
        """What the environment's step takes; continuous actions are clipped to the space."""
        if self._memory is None:
            action = np.asarray(self._algo.predict(observation[None]))[0]
        else:
            action = np.asarray(self._memory.predict(observation, reward))
        if not np.isfinite(action).all():
            raise PolicyError(
                f"the {type(self._algo).__name__} gives the action {action}; its weights or the observations "
                "are not finite, give an earlier model of the run"
            )
        space = translator.action_space
        if isinstance(space, Continuous):
            action = np.clip(action, space.low, space.high)
        return translator.native_actions(action[None])[0]

    def check_fits(self, translator: SpaceTranslator) -> None:
        """Raise PolicyError for other observations or actions than the environment's."""
        algo, kind = self._algo, type(self._algo).__name__
        size = algo.action_size
        own: ActionSpace = Discrete(size) if algo.get_action_type().name == "DISCRETE" else Continuous(size)
        wanted = describe_actions(translator.action_space)
        if describe_actions(own) != wanted:
            raise PolicyError(
                f"the {kind} has {describe_actions(own)}, the environment {wanted}; "
                "give the environment that it was trained for"
            )
        if tuple(algo.observation_shape) != translator.observation_shape:
            raise PolicyError(
                f"the {kind} takes observations of shape {tuple(algo.observation_shape)}, the environment "
                f"gives {translator.observation_shape}; give the environment that it was trained for"
            )


def load_model(path: str) -> Any:
    """koffline.load on the command line: nothing but the model's file decides. Raises PolicyError."""
    from koffline.algos.loading import load

    return load(Path(path))


def _run_header(code: str) -> Any:
    """Run the user's own line of Python, the only code from outside that is ever run, and take its `env`."""
    import gymnasium

    import koffline.envs  # noqa: F401  (registers our worlds)

    names: dict[str, Any] = {"gymnasium": gymnasium, "gym": gymnasium, "np": np}
    try:
        exec(code, names)
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"--env-header failed ({reason}); try the line in Python") from error
    env = names.get("env")
    if not (hasattr(env, "reset") and hasattr(env, "step")):
        raise ConfigError(
            "--env-header defines no environment called env; give for instance "
            "\"env = gymnasium.make('CartPole-v1', render_mode='rgb_array')\""
        )
    return env


@contextlib.contextmanager
def _seeded(seed: int | None) -> Iterator[None]:
    import torch

    before = np.random.get_state()  # noqa: NPY002
    try:
        with torch.random.fork_rng(devices=[]):
            if seed is not None:
                torch.manual_seed(seed)
                np.random.seed(seed % 2**32)  # noqa: NPY002
            yield
    finally:
        np.random.set_state(before)  # noqa: NPY002
