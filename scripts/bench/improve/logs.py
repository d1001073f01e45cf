"""The logs of the benchmark by name, half of them for tuning `koffline.improve`, half
never looked at for that.

Kinds: ``icu`` (tabular, exact), ``finite`` (exact), ``bandit`` (exact), ``board``
(worlds of the leaderboard), ``control`` and ``locomotion`` (Gymnasium), and ``nothing``:
logs in which no policy is better than the one that wrote them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from koffline.envs.finite import FiniteMDP
from scripts.bench import controllers as c
from scripts.bench.classic import CartPole
from scripts.bench.doubly_robust import RareClicks
from scripts.bench.embedded import EmbeddedMDP
from scripts.bench.finite_worlds import graph_world, grid_world, random_mdp
from scripts.bench.held_out_worlds import Inventory, Navigation, Queues, Treatment
from scripts.bench.improve.spibb import best_policy
from scripts.bench.improve.worlds import (
    Array,
    Bandit,
    DoseBandit,
    FiniteWorld,
    PlayedWorld,
    VectorWorld,
    World,
    generator_of,
)
from scripts.bench.worlds import BestOffer, Clicks

TUNING = "tuning"
TEST = "test"
_ICU_GAMMA = 0.99


@dataclass(frozen=True)
class Entry:
    """A log of the benchmark. half: `TUNING` or `TEST`."""

    name: str
    kind: str
    half: str
    make: Callable[[], World]


def icu_world(seed: int, effect: float = 1.0) -> EmbeddedMDP:
    """A ward: severity 0 to 5, frail or not, on support or not; four treatments.

    Each step severity falls, stays or rises with chances that depend on whether the
    treatment suits the severity (by ``effect``; 0: treatments do nothing) and on
    frailty; support that is not needed harms. Severity below 0 is discharge (+1), above
    5 death (−1). Patients differ by ward (``seed``). Seen: the three numbers, scaled.
    """
    generator = np.random.default_rng([seed, 58])
    suits = generator.uniform(0.05, 0.25, size=4) * np.array([0.3, 1.0, 1.0, 1.0])
    centre = np.array([0.0, 2.0, 3.5, 4.5]) + generator.uniform(-0.5, 0.5, size=4)
    harm = generator.uniform(0.02, 0.08)
    count = 26  # 24 states, discharge, death
    transition = np.zeros((count, 4, count))
    reward = np.zeros((count, 4, count))
    points = np.zeros((count, 3))
    for state in range(24):
        severity = state // 4
        frail = state // 2 % 2
        support = state % 2
        points[state] = (severity / 5.0, frail, support)
        for action in range(4):
            fit = np.exp(-0.5 * (severity - centre[action]) ** 2)
            help_ = effect * suits[action] * (2.0 * fit - 0.4)
            needless = effect * harm * (action >= 2 and severity < 2)
            falls = np.clip(0.25 - 0.08 * frail + help_ - needless, 0.03, 0.9)
            rises = np.clip(0.22 + 0.06 * frail - 0.6 * help_ + needless, 0.03, 0.9)
            rises = min(rises, 0.95 - falls)
            on_support = int(action >= 2)
            if effect == 0.0:
                on_support = 0
            for step, chance in ((-1, falls), (1, rises), (0, 1.0 - falls - rises)):
                to = severity + step
                if to < 0:
                    following = 24
                    reward[state, action, following] = 1.0
                elif to > 5:
                    following = 25
                    reward[state, action, following] = -1.0
                else:
                    following = _ward_state(to, frail, on_support)
                transition[state, action, following] += chance
    points[24] = (-0.2, 0.5, 0.0)
    points[25] = (1.2, 0.5, 0.0)
    initial = np.zeros(count)
    for frail in (0, 1):
        for severity in (1, 2, 3):
            initial[_ward_state(severity, frail, 0)] = 1.0 / 6.0
    terminal = np.arange(count) >= 24
    return EmbeddedMDP(FiniteMDP(transition, reward, terminal, initial), points)


def _ward_state(severity: int, frail: int, support: int) -> int:
    return 4 * severity + 2 * frail + support


def softened(
    mdp: FiniteMDP, gamma: float, quality: float, generator: np.random.Generator
) -> Array:
    """A policy (S, A) between habit and the optimum: ``quality`` 0 is a habit drawn at
    random, 1 is a softmax of Q* near the optimum.
    """
    values = mdp.action_values(best_policy(mdp, gamma), gamma)
    spread = np.ptp(values, axis=1, keepdims=True)
    scores = 4.0 * (values - values.max(axis=1, keepdims=True))
    careful = np.exp(scores / np.where(spread > 0.0, spread, 1.0))
    careful /= careful.sum(axis=1, keepdims=True)
    habit = generator.dirichlet(np.full(mdp.n_actions, 2.0))
    habit = 0.9 * habit + 0.1 / mdp.n_actions
    return quality * careful + (1.0 - quality) * habit


def _icu(seed: int, rows: int, quality: float) -> Callable[[], World]:
    def make() -> World:
        name = f"icu {seed} {rows} {quality:g}"
        world = icu_world(seed)
        behavior = softened(world.mdp, _ICU_GAMMA, quality, generator_of(name, 1))
        return FiniteWorld(name, world, behavior, rows, _ICU_GAMMA, 60)

    return make


def _icu_nothing(seed: int, rows: int) -> Callable[[], World]:
    """Treatments do nothing."""

    def make() -> World:
        name = f"icu nothing {seed} {rows}"
        world = icu_world(seed, effect=0.0)
        habit = generator_of(name, 1).dirichlet(np.full(4, 2.0))
        behavior = np.tile(0.9 * habit + 0.025, (world.mdp.n_states, 1))
        return FiniteWorld(name, world, behavior, rows, _ICU_GAMMA, 60)

    return make


def _icu_best(seed: int, rows: int, share: float) -> Callable[[], World]:
    """The optimum wrote the log, with a small chance of the action that is as good or
    next best: what is better is the optimum alone, by very little.
    """

    def make() -> World:
        world = icu_world(seed)
        best = best_policy(world.mdp, _ICU_GAMMA)
        behavior = (1.0 - share) * best + share / 4.0
        name = f"icu best {seed} {rows} {share:g}"
        return FiniteWorld(name, world, behavior, rows, _ICU_GAMMA, 60)

    return make


def _finite(name: str, world: EmbeddedMDP, quality: float, rows: int) -> World:
    gamma = 0.95
    behavior = softened(world.mdp, gamma, quality, generator_of(name, 1))
    return FiniteWorld(name, world, behavior, rows, gamma, 50)


def _random(seed: int) -> EmbeddedMDP:
    generator = np.random.default_rng(seed)
    mdp = random_mdp(30, 4, generator, branching=3, ending=0.05)
    points = np.stack(np.meshgrid(*[np.arange(4)] * 3), axis=-1).reshape(-1, 3)
    return EmbeddedMDP(mdp, generator.permutation(points)[:30] / 4.0)


def offers(name: str, rows: int, key: int) -> Bandit:
    """Visitors and five offers, shown by habit."""
    world = Clicks(key)
    behavior = c.Mixed(0.4, c.Fixed((0.4, 0.3, 0.1, 0.1, 0.1)))
    return Bandit(name, 8, behavior, world.chances, rows)


def _offers(name: str, rows: int, key: int) -> Callable[[], World]:
    return lambda: offers(name, rows, key)


def equal_arms(name: str, rows: int, arms: int, rate: float) -> Bandit:
    """Every arm pays alike, whoever comes."""
    behavior = c.Fixed(tuple(generator_of(name, 1).dirichlet(np.full(arms, 3.0))))

    def rates(contexts: Array) -> Array:
        lift = 1.0 + 0.5 * np.tanh(contexts[:, :1])
        return np.repeat(rate * lift, arms, axis=1)

    return Bandit(name, 4, behavior, rates, rows)


def _equal_arms(name: str, rows: int, arms: int, rate: float) -> Callable[[], World]:
    return lambda: equal_arms(name, rows, arms, rate)


def _best_offer(name: str, rows: int, key: int) -> Callable[[], World]:
    """The best offer wrote the log, always."""
    world = Clicks(key)
    return lambda: Bandit(name, 8, BestOffer(world), world.chances, rows)


def _rare(name: str, rows: int) -> Callable[[], World]:
    world = RareClicks(rate=0.02)
    behavior = c.Fixed((1.0 / 30.0,) * 30)
    return lambda: Bandit(name, 3, behavior, world.chances, rows)


_DOSE = c.Scores(
    (
        (-1, 2, 0, 0, 0, 0, 0),
        (0, 1, 0, 0, 0, 0, 0),
        (2, -1, 0, 0, 0, 0, 0),
        (4, -2, 0, 0, 0, 0, -1),
    )
)


def _board(
    name: str, world: Any, behavior: Any, rows: int, gamma: float, limit: int
) -> Callable[[], World]:
    return lambda: VectorWorld(name, world, behavior, rows, gamma, limit)


def _treatment(name: str, rows: int) -> Callable[[], World]:
    behavior = c.Mixed(0.5, c.Mixed(0.3, _DOSE))
    return _board(name, Treatment(), behavior, rows, 0.97, 100)


def _queues(name: str, rows: int) -> Callable[[], World]:
    return _board(name, Queues(), c.Fixed((0.4, 0.35, 0.25)), rows, 0.98, 200)


def _shift(name: str, amount: float) -> Callable[[], World]:
    weights = (0.5, 1.0, 15.0, 4.0)
    turned = tuple((1.0 - 2.0 * amount) * weight for weight in weights)
    writer = c.LinearSoftmax(turned)
    return _board(name, CartPole(), writer, 10_000, 0.98, 200)


def _navigation(name: str, rows: int, gain: float) -> Callable[[], World]:
    plane = {"low": (-1.0, -1.0), "high": (1.0, 1.0)}
    slopes = ((-gain, 0, -0.6 * gain, 0), (0, -gain, 0, -0.6 * gain))
    drive = c.Gaussian(c.Linear(slopes), 0.5, **plane)
    behavior = c.PushSometimes(0.3, drive)
    return _board(name, Navigation(), behavior, rows, 0.98, 100)


def _played(env: str, kind: str, rows: int, seed: int = 0) -> Callable[[], World]:
    return lambda: PlayedWorld(env, kind, rows, seed=seed)


def _bundled(env: str, kind: str) -> Callable[[], World]:
    return lambda: PlayedWorld(env, kind, bundled=True)


def _sparse(name: str, rows: int) -> Callable[[], World]:
    def make() -> World:
        world = grid_world()
        behavior = np.tile((0.2, 0.3, 0.3, 0.2), (world.mdp.n_states, 1))
        return FiniteWorld(name, world, behavior, rows, 0.98, 100)

    return make


def _graph(name: str, rows: int, first: float) -> Callable[[], World]:
    def make() -> World:
        world = graph_world(16, True)
        behavior = np.tile((first, 1.0 - first), (world.mdp.n_states, 1))
        return FiniteWorld(name, world, behavior, rows, 0.98, 17)

    return make


_STORE = c.Mixed(0.5, c.OrderUpTo(15, 0, 0.02))
_POLE = "CartPole-v1"
_PENDULUM = "Pendulum-v1"
_INVERTED = "InvertedPendulum-v5"
_CHEETAH = "HalfCheetah-v5"
_HOPPER = "Hopper-v5"
_WALKER = "Walker2d-v5"

_LISTED: tuple[tuple[str, str, str, Callable[[], World]], ...] = (
    ("icu 1 2000", "icu", TUNING, _icu(1, 2000, 0.3)),
    ("icu 1 10000", "icu", TUNING, _icu(1, 10_000, 0.3)),
    ("icu 2 4000", "icu", TUNING, _icu(2, 4000, 0.7)),
    ("icu 3 20000", "icu", TUNING, _icu(3, 20_000, 0.5)),
    ("icu 11 2000", "icu", TEST, _icu(11, 2000, 0.5)),
    ("icu 11 10000", "icu", TEST, _icu(11, 10_000, 0.2)),
    ("icu 12 4000", "icu", TEST, _icu(12, 4000, 0.3)),
    ("icu 13 20000", "icu", TEST, _icu(13, 20_000, 0.7)),
    ("nothing equal arms 3000", "nothing", TUNING, _equal_arms("e5", 3000, 5, 0.2)),
    ("nothing icu 5000", "nothing", TUNING, _icu_nothing(4, 5000)),
    ("nothing icu best 5000", "nothing", TUNING, _icu_best(4, 5000, 0.0)),
    ("nothing dose 4000", "nothing", TUNING, lambda: DoseBandit("n", 4000, 0.0)),
    ("nothing equal arms 10000", "nothing", TEST, _equal_arms("e8", 10_000, 8, 0.3)),
    ("nothing icu 10000", "nothing", TEST, _icu_nothing(14, 10_000)),
    ("nothing best offer 5000", "nothing", TEST, _best_offer("bo", 5000, 3)),
    ("nothing dose 10000", "nothing", TEST, lambda: DoseBandit("m", 10_000, 0.0)),
    ("nearly best icu 5000", "icu", TUNING, _icu_best(5, 5000, 0.1)),
    ("nearly best icu 10000", "icu", TEST, _icu_best(15, 10_000, 0.1)),
    ("clicks 3000", "bandit", TUNING, _offers("c3", 3000, 0)),
    ("clicks 10000", "bandit", TEST, _offers("c10", 10_000, 1)),
    ("rare clicks 10000", "bandit", TUNING, _rare("r10", 10_000)),
    ("clicks 2000", "bandit", TEST, _offers("c2", 2000, 2)),
    ("dose 3000", "bandit", TUNING, lambda: DoseBandit("d", 3000)),
    ("dose 8000", "bandit", TEST, lambda: DoseBandit("f", 8000)),
    ("random 5000", "finite", TUNING, lambda: _finite("r1", _random(1), 0.3, 5000)),
    ("random 8000", "finite", TEST, lambda: _finite("r2", _random(2), 0.5, 8000)),
    ("grid 8000", "finite", TUNING, _sparse("sparse 8000", 8000)),
    ("grid 3000", "finite", TEST, _sparse("sparse 3000", 3000)),
    ("graph 4000", "finite", TUNING, _graph("graph 4000", 4000, 0.6)),
    ("graph 8000", "finite", TEST, _graph("graph 8000", 8000, 0.4)),
    ("treatment 3000", "board", TUNING, _treatment("treatment 3000", 3000)),
    ("treatment 6000", "board", TEST, _treatment("treatment 6000", 6000)),
    ("queues 3000", "board", TUNING, _queues("queues 3000", 3000)),
    ("queues 6000", "board", TEST, _queues("queues 6000", 6000)),
    ("shift 0.25", "board", TUNING, _shift("shift 0.25", 0.25)),
    ("shift 0.4", "board", TEST, _shift("shift 0.4", 0.4)),
    (
        "inventory 10000",
        "board",
        TUNING,
        _board("inventory", Inventory(), _STORE, 10_000, 0.97, 104),
    ),
    ("navigation 5000", "board", TUNING, _navigation("nav 5000", 5000, 0.2)),
    ("navigation 10000", "board", TEST, _navigation("nav 10000", 10_000, 0.3)),
    ("cartpole random", "control", TUNING, _bundled(_POLE, "random")),
    ("cartpole medium", "control", TEST, _bundled(_POLE, "medium")),
    ("cartpole replay", "control", TEST, _bundled(_POLE, "replay")),
    ("cartpole expert", "control", TUNING, _bundled(_POLE, "expert")),
    ("pendulum random", "control", TEST, _bundled(_PENDULUM, "random")),
    ("pendulum medium", "control", TUNING, _bundled(_PENDULUM, "medium")),
    ("pendulum replay", "control", TUNING, _bundled(_PENDULUM, "replay")),
    ("pendulum expert", "control", TEST, _bundled(_PENDULUM, "expert")),
    ("inverted pendulum random", "control", TUNING, _bundled(_INVERTED, "random")),
    ("inverted pendulum medium", "control", TEST, _bundled(_INVERTED, "medium")),
    ("inverted pendulum replay", "control", TEST, _bundled(_INVERTED, "replay")),
    ("inverted pendulum expert", "control", TUNING, _bundled(_INVERTED, "expert")),
    ("hopper medium", "locomotion", TUNING, _played(_HOPPER, "medium", 10_000)),
    ("hopper mixed", "locomotion", TEST, _played(_HOPPER, "medium-expert", 20_000)),
    ("walker medium", "locomotion", TEST, _played(_WALKER, "medium", 10_000)),
    ("walker mixed", "locomotion", TUNING, _played(_WALKER, "medium-expert", 20_000)),
    ("cheetah medium", "locomotion", TEST, _played(_CHEETAH, "medium", 20_000)),
    ("cheetah mixed", "locomotion", TUNING, _played(_CHEETAH, "medium-expert", 20_000)),
)

ENTRIES: dict[str, Entry] = {
    name: Entry(name, kind, half, make) for name, kind, half, make in _LISTED
}
