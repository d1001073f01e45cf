"""What a user does without `koffline.improve`: algorithms of d3rlpy at their defaults,
taken blindly or chosen by a number, the behavior clone, and HCPI.

All train on the same four fifths of the episodes; TD errors and the safety test are
computed on the rest. γ is the log's; all other settings are d3rlpy's own.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from koffline import Transitions
from koffline.data import import_d3rlpy, quiet
from koffline.data.replay import ColumnarReplayBuffer
from koffline.data.transitions import Discrete
from koffline.fitting import threads
from koffline.policies import DiscretePolicy, Policy
from koffline.policy_specs import as_policy
from scripts.bench.improve import tabular
from scripts.bench.improve.worlds import Value, World, mixed

DISCRETE = ("discrete_cql", "discrete_bcq", "double_dqn", "discrete_bc")
CONTINUOUS = ("cql", "iql", "td3_plus_bc", "bc")
# Gradient steps, which d3rlpy leaves to the user; with fewer than 8000 its discrete
# algorithms never update their targets. CQL of continuous actions takes 0.1 s a step.
DISCRETE_STEPS = 10_000
CONTINUOUS_STEPS = 3000
FQE_STEPS = 3000
CLONES = ("discrete_bc", "bc")
_TRAIN_SHARE = 0.8


def divided(log: Transitions, seed: int) -> tuple[Transitions, Transitions]:
    """Four fifths of the episodes and the others."""
    count = log.n_episodes
    order = np.random.default_rng(seed).permutation(count)
    train = max(1, min(count - 1, round(_TRAIN_SHARE * count)))
    first = log.select_episodes(np.sort(order[:train]))
    return first, log.select_episodes(np.sort(order[train:]))


def measure(world: World, seed: int = 0, steps: int | None = None) -> dict[str, Any]:
    """Train, value by each criterion, ask the world.

    steps: gradient steps in the place of the usual ones.
    Returns the behavior policy's value and, for each algorithm, its true value
    [value, error], TD error and value by FQE (None for a clone's TD error); HCPI's
    choice under ``hcpi``.
    """
    d3rlpy = import_d3rlpy()
    from d3rlpy.base import LearnableConfig
    from d3rlpy.serializable_config import CONFIG_STORAGE

    log = world.log()
    train, test = divided(log, seed)
    is_discrete = isinstance(log.action_space, Discrete)
    names = CONTINUOUS
    n_steps = steps or CONTINUOUS_STEPS
    if is_discrete:
        names = DISCRETE
        n_steps = steps or DISCRETE_STEPS
    types = CONFIG_STORAGE[LearnableConfig].config_list
    candidates: dict[str, Any] = {}
    policies: dict[str, Policy] = {}
    with threads(1), quiet():
        buffer = ColumnarReplayBuffer(train, seed)
        held_out = ColumnarReplayBuffer(test, seed)
        for name in names:
            d3rlpy.seed(seed)
            settings: dict[str, Any] = {}
            if name not in CLONES:
                settings["gamma"] = world.gamma
            algo = types[name](**settings).create()
            _fit(algo, buffer, n_steps)
            policies[name] = as_policy(
                algo, log.action_space, log.observation_shape, name
            )
            td_error = None
            if name not in CLONES:
                evaluator = d3rlpy.metrics.TDErrorEvaluator()
                td_error = float(evaluator(algo, held_out))
            fqe_steps = min(n_steps, FQE_STEPS)
            fqe = _fqe_value(algo, buffer, train, world.gamma, is_discrete, fqe_steps)
            value = world.value(policies[name])
            candidates[name] = {
                "value": list(value),
                "td_error": td_error,
                "fqe": fqe,
            }
    safety = None
    if is_discrete:
        safety = _safety(world, policies[names[0]], train, test)
    return {
        "behavior": list(world.behavior_value()),
        "best": world.best_value(),
        "steps": n_steps,
        "candidates": candidates,
        "hcpi": safety,
    }


def _fit(algo: Any, buffer: Any, steps: int) -> None:
    from d3rlpy.logging import NoopAdapterFactory

    algo.fit(
        buffer,
        n_steps=steps,
        n_steps_per_epoch=steps,
        show_progress=False,
        logger_adapter=NoopAdapterFactory(),
    )


def _fqe_value(
    algo: Any,
    buffer: Any,
    log: Transitions,
    gamma: float,
    is_discrete: bool,
    steps: int,
) -> float:
    """d3rlpy's FQE at its defaults: the mean value of the start states."""
    from d3rlpy.ope import FQE, DiscreteFQE, FQEConfig

    kind = FQE
    if is_discrete:
        kind = DiscreteFQE
    fqe = kind(algo=algo, config=FQEConfig(gamma=gamma))
    _fit(fqe, buffer, steps)
    starts = np.asarray(log.initial_observations(), dtype=np.float32)
    return float(np.mean(fqe.predict_value(starts, algo.predict(starts))))


def _safety(
    world: World, candidate: Policy, train: Transitions, test: Transitions
) -> dict[str, Any] | None:
    """HCPI of a candidate: what it would run, and its true value; None where the
    behavior policy is not one policy with logged probabilities.
    """
    behavior = world.behavior_policy()
    if behavior is None or test.behavior_log_probabilities is None:
        return None
    answer = tabular.hcpi(
        _weighted(train, world.gamma),
        _weighted(test, world.gamma),
        _chances(candidate, train),
        _chances(candidate, test),
    )
    value = world.behavior_value()
    if answer.share > 0.0:
        value = world.value(mixed(candidate, behavior, answer.share))
    return {"share": answer.share, "bound": answer.bound, "value": list(value)}


def _weighted(log: Transitions, gamma: float) -> tabular.WeightedEpisodes:
    return tabular.WeightedEpisodes(
        np.asarray(log.episode_starts),
        log.returns(gamma),
        np.exp(np.asarray(log.behavior_log_probabilities)),
    )


def _chances(policy: Policy, log: Transitions) -> np.ndarray:
    assert isinstance(policy, DiscretePolicy), "actions are numbered"
    chances = policy.probabilities(log.observations)
    return chances[np.arange(len(log)), log.actions]


def chosen(cell: dict[str, Any]) -> dict[str, Value]:
    """True value of what each way of choosing takes, from a result of `measure`.

    HCPI keeps the behavior policy where it cannot say anything.
    """
    candidates = cell["candidates"]
    blind = [name for name in candidates if name in ("discrete_cql", "cql", "iql")]
    choices = {_TITLES[name]: name for name in blind}
    learned = [name for name in candidates if candidates[name]["td_error"] is not None]
    choices["least TD error"] = min(
        learned, key=lambda name: abs(candidates[name]["td_error"])
    )
    choices["best by FQE"] = max(candidates, key=lambda name: candidates[name]["fqe"])
    for name in CLONES:
        if name in candidates:
            choices["behavior clone"] = name
    return {title: Value(*candidates[name]["value"]) for title, name in choices.items()}


_TITLES = {"discrete_cql": "CQL", "cql": "CQL", "iql": "IQL"}
