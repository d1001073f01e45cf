"""Small worlds of many kinds whose logs are right, and faults that make their logs
wrong.

Used by ``scripts/bench/structure.py``. A log is simulated row by row, so that the
faults below do to it what faulty recorders, exporters and readers do.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.random import Generator

from koffline.data.transitions import Continuous, Discrete, Transitions

State = Any
Wrong = Transitions | None
FAULTS = (
    "reset rows",
    "next observations of resets",
    "terminals that end nothing",
    "limits flagged as ends",
    "unmarked ends",
    "unmarked time limits",
    "actions late",
    "actions and rewards late",
    "rewards late",
    "marks in rewards",
    "marks in observations",
    "rows lost inside",
    "labels as numbers",
)


@dataclass(frozen=True)
class World:
    """A world: its start states, its steps, and what is logged of a state.

    start(generator) → state; step(state, action, generator) → (next state, reward,
    terminated); observe(state) → array. actions: number of choices, or 0 for one
    quantity in [−1, 1]. limit: steps after which an episode is cut. sticky: probability
    that the behavior policy repeats its last action. goes_on: whether the next episode
    goes on where the last one was cut.
    """

    name: str
    start: Callable[[Generator], State]
    step: Callable[[State, Any, Generator], tuple[State, float, bool]]
    observe: Callable[[State], np.ndarray]
    actions: int = 2
    limit: int = 40
    sticky: float = 0.0
    goes_on: bool = False


@dataclass
class Episode:
    """One episode: observations (T + 1, ...), actions (T, ...), rewards (T,), and
    whether it terminated.
    """

    observations: list[np.ndarray]
    actions: list[Any]
    rewards: list[float]
    terminated: bool


def play(world: World, rows: int, generator: Generator) -> list[Episode]:
    """Episodes of a behavior policy that prefers some actions in some states, about
    ``rows`` rows.
    """
    taste = generator.normal(size=64)
    episodes: list[Episode] = []
    state = world.start(generator)
    count = 0
    while count < rows:
        episode = Episode(
            observations=[world.observe(state)],
            actions=[],
            rewards=[],
            terminated=False,
        )
        last = None
        for _ in range(world.limit):
            action = _behave(
                world=world,
                observation=episode.observations[-1],
                last=last,
                taste=taste,
                generator=generator,
            )
            state, reward, terminated = world.step(state, action, generator)
            episode.observations.append(world.observe(state))
            episode.actions.append(action)
            episode.rewards.append(reward)
            last = action
            if terminated:
                episode.terminated = True
                break
        episodes.append(episode)
        count += len(episode.rewards)
        if episode.terminated or not world.goes_on:
            state = world.start(generator)
    return episodes


def _behave(
    world: World,
    observation: np.ndarray,
    last: Any,
    taste: np.ndarray,
    generator: Generator,
) -> Any:
    """An action: a soft choice by the observation, or the last one again."""
    if last is not None and generator.random() < world.sticky:
        return last
    numbers = np.asarray(observation, dtype=np.float64).ravel()
    leaning = float(
        np.tanh(numbers[:8] / (1.0 + np.abs(numbers[:8]))) @ taste[: len(numbers[:8])]
    )
    if world.actions == 0:
        return float(np.clip(0.5 * leaning + 0.6 * generator.normal(), -1.0, 1.0))
    logits = 0.7 * leaning * taste[16 : 16 + world.actions]
    chances = np.exp(logits - logits.max())
    return int(generator.choice(world.actions, p=chances / chances.sum()))


def as_log(world: World, episodes: list[Episode]) -> Transitions:
    """The episodes as a log."""
    parts: dict[str, list[Any]] = {
        name: []
        for name in (
            "observations",
            "actions",
            "rewards",
            "next_observations",
            "terminated",
            "truncated",
            "episode_ids",
            "steps",
        )
    }
    for number, episode in enumerate(episodes):
        length = len(episode.rewards)
        if not length:
            continue
        flags = np.zeros(length, dtype=np.bool_)
        parts["observations"].append(np.stack(episode.observations[:-1]))
        parts["next_observations"].append(np.stack(episode.observations[1:]))
        parts["actions"].append(np.asarray(episode.actions))
        parts["rewards"].append(np.asarray(episode.rewards, dtype=np.float64))
        terminated = flags.copy()
        truncated = flags.copy()
        terminated[-1] = episode.terminated
        # the world may end in the very step of the limit
        truncated[-1] = length == world.limit or not episode.terminated
        parts["terminated"].append(terminated)
        parts["truncated"].append(truncated)
        parts["episode_ids"].append(np.full(length, number))
        parts["steps"].append(np.arange(length))
    columns: dict[str, Any] = {
        name: np.concatenate(arrays) for name, arrays in parts.items()
    }
    if world.actions:
        return Transitions(**columns, action_space=Discrete(world.actions))
    columns["actions"] = columns["actions"].reshape(-1, 1)
    return Transitions(**columns, action_space=Continuous(1, [-1.0], [1.0]))


_TABULAR = "random tabular"

# --- worlds
# ---------------------------------------------------------------------------------------------


def worlds(generator: Generator) -> Iterator[World]:
    """One world of each kind, with parameters drawn at random."""
    for make in (
        _random_tabular,
        _corridor,
        _corridor_sparse,
        _corridor_from_anywhere,
        _grid_with_absorbing_goal,
        _home,
        _periodic,
        _seasons,
        _inventory,
        _queue,
        _machine,
        _linear,
        _linear_deterministic,
        _linear_continuous,
        _heavy_tails,
        _stream_in_pieces,
        _pictures,
        _one_step,
        _independent_contexts,
        _cart_pole,
        _mountain_car,
        _pendulum,
        _maze,
        _jackpots,
        _ward,
        _customers,
        _stores,
        _wards_by_age,
    ):
        yield make(generator)


def _number(value: float) -> np.ndarray:
    return np.array([value], dtype=np.float32)


def _random_tabular(generator: Generator) -> World:
    states = int(generator.integers(5, 40))
    actions = int(generator.integers(2, 6))
    support = int(generator.integers(1, 4))
    to = generator.integers(0, states, size=(states, actions, support))
    chances = generator.dirichlet(np.ones(support), size=(states, actions))
    pay = generator.normal(size=(states, actions))
    ends = generator.random(states) < 0.1
    ends[:3] = False
    starts = np.flatnonzero(~ends)[: int(generator.integers(1, 4))]

    def step(state: int, action: int, g: Generator) -> tuple[int, float, bool]:
        following = int(to[state, action, g.choice(support, p=chances[state, action])])
        return following, float(pay[state, action]), bool(ends[following])

    def observe(state: int) -> np.ndarray:
        return np.eye(states, dtype=np.float32)[state]

    return World(
        _TABULAR, lambda g: int(g.choice(starts)), step, observe, actions, limit=30
    )


def _corridor_of(
    name: str,
    generator: Generator,
    cost: float,
    prize: float,
    from_anywhere: bool = False,
) -> World:
    length = int(generator.integers(4, 15))
    slip = float(generator.choice([0.0, 0.1, 0.3]))

    def step(state: int, action: int, g: Generator) -> tuple[int, float, bool]:
        move = -1
        if action == 1:
            move = 1
        if g.random() < slip:
            move = -move
        following = int(np.clip(state + move, 0, length))
        if following == length:
            return following, prize, True
        return following, cost, False

    def start(g: Generator) -> int:
        if from_anywhere:
            return int(g.integers(0, length))
        return 0

    return World(name, start, step, _number, 2, limit=int(generator.integers(20, 60)))


def _corridor(generator: Generator) -> World:
    return _corridor_of("corridor with costs", generator, cost=-1.0, prize=0.0)


def _corridor_sparse(generator: Generator) -> World:
    return _corridor_of("corridor with a prize", generator, cost=0.0, prize=1.0)


def _corridor_from_anywhere(generator: Generator) -> World:
    return _corridor_of(
        "corridor from anywhere", generator, cost=-0.1, prize=1.0, from_anywhere=True
    )


def _grid_with_absorbing_goal(generator: Generator) -> World:
    size = int(generator.integers(4, 8))
    slip = float(generator.choice([0.0, 0.2]))
    moves = np.array([[1, 0], [-1, 0], [0, 1], [0, -1]])

    def step(
        state: tuple[int, int], action: int, g: Generator
    ) -> tuple[tuple[int, int], float, bool]:
        if state == (size - 1, size - 1):
            return state, 1.0, False
        if g.random() < slip:
            action = int(g.integers(4))
        x, y = np.clip(np.asarray(state) + moves[action], 0, size - 1).tolist()
        return (x, y), 0.0, False

    def start(g: Generator) -> tuple[int, int]:
        return int(g.integers(size)), int(g.integers(size))

    return World(
        "grid, absorbing goal",
        start,
        step,
        lambda s: np.asarray(s, dtype=np.float32),
        4,
        limit=25,
    )


def _home(generator: Generator) -> World:
    width = int(generator.integers(4, 9))
    cost = float(generator.choice([0.0, -0.2]))

    def step(state: int, action: int, g: Generator) -> tuple[int, float, bool]:
        following = int(np.clip(state + (1, -1, 0)[action], 0, width))
        if following == width and g.random() < 0.5:
            pay = 1.0
        else:
            pay = cost
        return following, pay, following == 0 and state != 0

    return World("leaves home and returns", lambda g: 0, step, _number, 3, limit=60)


def _periodic(generator: Generator) -> World:
    period = int(generator.integers(4, 13))
    noise = float(generator.choice([0.0, 0.3]))
    of_circle = generator.random() < 0.5

    def step(state: int, action: int, g: Generator) -> tuple[int, float, bool]:
        pay = np.cos(2 * np.pi * state / period) * (2 * action - 1) + noise * g.normal()
        return (state + 1) % period, float(pay), False

    def observe(state: int) -> np.ndarray:
        angle = 2 * np.pi * state / period
        if of_circle:
            return np.array([np.cos(angle), np.sin(angle)], dtype=np.float32)
        return _number(state)

    return World(
        "periodic",
        lambda g: 0,
        step,
        observe,
        2,
        limit=int(period * generator.integers(2, 5)),
    )


def _seasons(generator: Generator) -> World:
    period = int(generator.integers(5, 10))

    def step(
        state: tuple[int, float], action: int, g: Generator
    ) -> tuple[tuple[int, float], float, bool]:
        day, stock = state
        stock = 0.8 * stock + action + 0.3 * g.normal()
        return (
            ((day + 1) % period, stock),
            float(stock * (day == 0) - 0.2 * action),
            False,
        )

    return World(
        "days of a week",
        lambda g: (0, float(g.normal())),
        step,
        lambda s: np.asarray(s, dtype=np.float32),
        2,
        limit=period * 4,
    )


def _inventory(generator: Generator) -> World:
    mean = float(generator.uniform(1.5, 4.0))

    def step(state: int, action: int, g: Generator) -> tuple[int, float, bool]:
        stock = min(state + 2 * action, 20)
        sold = min(stock, int(g.poisson(mean)))
        return stock - sold, float(3.0 * sold - 0.2 * stock - 2.0 * action), False

    return World(
        "inventory", lambda g: int(g.integers(0, 8)), step, _number, 4, limit=30
    )


def _queue(generator: Generator) -> World:
    arrival = float(generator.uniform(0.3, 0.6))

    def step(state: int, action: int, g: Generator) -> tuple[int, float, bool]:
        served = g.random() < (0.4, 0.7)[action]
        following = max(0, state - int(served)) + int(g.random() < arrival)
        return following, float(-following - 0.5 * action), following >= 12

    return World("queue", lambda g: 0, step, _number, 2, limit=50)


def _machine(generator: Generator) -> World:
    wear = float(generator.uniform(0.2, 0.6))

    def step(state: int, action: int, g: Generator) -> tuple[int, float, bool]:
        if action == 1:
            return 0, -3.0, False
        following = min(9, state + int(g.random() < wear))
        return following, float(2.0 - 0.3 * state), False

    return World(
        "machine and repairs",
        lambda g: int(g.integers(0, 10)),
        step,
        _number,
        2,
        limit=30,
    )


def _linear_world(
    name: str,
    generator: Generator,
    noise: float,
    actions: int,
    tails: bool = False,
    limit: int = 40,
) -> World:
    size = int(generator.integers(2, 7))
    matrix = generator.normal(size=(size, size))
    matrix *= 0.9 / np.abs(np.linalg.eigvals(matrix)).max()
    push = generator.normal(size=(max(1, actions), size)) * 0.5

    def step(
        state: np.ndarray, action: Any, g: Generator
    ) -> tuple[np.ndarray, float, bool]:
        pushed = push[action] if actions else push[0] * action
        if tails:
            shock = g.standard_t(2.5, size=size)
        else:
            shock = g.normal(size=size)
        following = matrix @ state + pushed + noise * shock
        return (
            following,
            float(following[0] - 0.1 * np.square(following).sum()),
            bool(following[0] > 4.0),
        )

    return World(
        name,
        lambda g: g.normal(size=size) * 0.7,
        step,
        lambda s: np.asarray(s, dtype=np.float32),
        actions,
        limit=limit,
        sticky=float(generator.choice([0.0, 0.3])),
    )


def _linear(generator: Generator) -> World:
    return _linear_world(
        "linear, noisy", generator, noise=float(generator.uniform(0.05, 0.6)), actions=3
    )


def _linear_deterministic(generator: Generator) -> World:
    return _linear_world("linear, deterministic", generator, noise=0.0, actions=2)


def _linear_continuous(generator: Generator) -> World:
    return _linear_world("linear, continuous actions", generator, noise=0.2, actions=0)


def _heavy_tails(generator: Generator) -> World:
    return _linear_world(
        "heavy-tailed noise", generator, noise=0.3, actions=2, tails=True
    )


def _stream_in_pieces(generator: Generator) -> World:
    world = _linear_world(
        "one stream in pieces", generator, noise=0.2, actions=2, limit=25
    )

    def step(
        state: np.ndarray, action: Any, g: Generator
    ) -> tuple[np.ndarray, float, bool]:
        following, pay, _ = world.step(state, action, g)
        return following, pay, False

    return World(
        world.name, world.start, step, world.observe, 2, limit=25, goes_on=True
    )


def _pictures(generator: Generator) -> World:
    size = 8

    def step(
        state: tuple[int, int], action: int, g: Generator
    ) -> tuple[tuple[int, int], float, bool]:
        x, y = state
        x = int(np.clip(x + action - 1, 0, size - 1))
        fallen = y == size - 1
        return (x, 0 if fallen else y + 1), float(fallen and x < 3), False

    def observe(state: tuple[int, int]) -> np.ndarray:
        picture = np.zeros((1, size, size), dtype=np.uint8)
        picture[0, state[1], state[0]] = 255
        return picture

    return World(
        "pictures",
        lambda g: (int(g.integers(size)), 0),
        step,
        observe,
        3,
        limit=size * 3,
    )


def _one_step(generator: Generator) -> World:
    size = int(generator.integers(1, 6))
    effect = generator.normal(size=(3, size))

    def step(
        state: np.ndarray, action: int, g: Generator
    ) -> tuple[np.ndarray, float, bool]:
        return (
            state,
            float(g.random() < 1.0 / (1.0 + np.exp(-effect[action] @ state))),
            True,
        )

    return World(
        "one step",
        lambda g: g.normal(size=size),
        step,
        lambda s: s.astype(np.float32),
        3,
        limit=1,
    )


def _independent_contexts(generator: Generator) -> World:
    size = int(generator.integers(1, 6))
    effect = generator.normal(size=(3, size))

    def step(
        state: np.ndarray, action: int, g: Generator
    ) -> tuple[np.ndarray, float, bool]:
        return (
            g.normal(size=size),
            float(effect[action] @ state + 0.5 * g.normal()),
            False,
        )

    return World(
        "independent contexts",
        lambda g: g.normal(size=size),
        step,
        lambda s: s.astype(np.float32),
        3,
        limit=10,
    )


def _of_gymnasium(name: str, title: str, actions: int, limit: int) -> World:
    import gymnasium

    env = gymnasium.make(name).unwrapped

    def start(g: Generator) -> np.ndarray:
        return np.asarray(env.reset(seed=int(g.integers(2**31)))[0])

    def step(
        state: np.ndarray, action: Any, g: Generator
    ) -> tuple[np.ndarray, float, bool]:
        if not actions:
            native = np.array([2.0 * action], dtype=np.float32)
        else:
            native = action
        following, pay, done, *_ = env.step(native)
        return np.asarray(following), float(pay), bool(done)

    return World(
        title,
        start,
        step,
        lambda s: np.asarray(s, dtype=np.float32),
        actions,
        limit=limit,
    )


def _cart_pole(generator: Generator) -> World:
    return _of_gymnasium(
        "CartPole-v1", "CartPole", actions=2, limit=int(generator.integers(30, 100))
    )


def _mountain_car(generator: Generator) -> World:
    return _of_gymnasium("MountainCar-v0", "Mountain Car", actions=3, limit=100)


def _pendulum(generator: Generator) -> World:
    return _of_gymnasium("Pendulum-v1", "Pendulum", actions=0, limit=100)


def _maze(generator: Generator) -> World:
    """Walks between goals that change; an episode goes on where the last one was
    cut.
    """

    def step(
        state: np.ndarray, action: int, g: Generator
    ) -> tuple[np.ndarray, float, bool]:
        moves = np.array([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
        following = np.clip(
            state + 0.2 * moves[action] + 0.02 * g.normal(size=2), 0.0, 4.0
        )
        return following, float(np.abs(following - 3.0).max() < 0.5), False

    return World(
        "maze, goes on",
        lambda g: g.uniform(0.0, 4.0, size=2),
        step,
        lambda s: s.astype(np.float32),
        4,
        limit=50,
        goes_on=True,
    )


def _jackpots(generator: Generator) -> World:
    prize = float(generator.choice([50.0, 100.0, 1000.0]))

    def step(state: float, action: int, g: Generator) -> tuple[float, float, bool]:
        following = 0.9 * state + 0.3 * g.normal()
        reward = -0.1 * action
        if g.random() < 0.01 + 0.01 * action:
            reward = prize
        return following, reward, False

    return World(
        "rare large rewards", lambda g: float(g.normal()), step, _number, 2, limit=20
    )


def _ward(generator: Generator) -> World:
    """Patients whose severity goes up and down; death or discharge ends the stay, and
    pays.
    """

    def step(
        state: tuple[float, float], action: int, g: Generator
    ) -> tuple[tuple[float, float], float, bool]:
        age, severity = state
        severity = severity + 0.4 * g.normal() + 0.1 * age - 0.3 * action
        if abs(severity) <= 2.5:
            return (age, severity), 0.0, False
        if severity > 0:
            return (age, severity), -1.0, True
        return (age, severity), 1.0, True

    return World(
        "ward",
        lambda g: (float(g.normal()), float(g.normal())),
        step,
        lambda s: np.asarray(s, dtype=np.float32),
        2,
        limit=30,
    )


def _customers(generator: Generator) -> World:
    """Customers whose age, income, tenure and number are constant in their episode.

    The activity of a customer goes up and down by actions. Age pays a little, income
    decides above a threshold, and tenure and number decide nothing.
    """
    has_pay_by_age = generator.random() < 0.5
    has_threshold = generator.random() < 0.5
    end = float(generator.uniform(0.02, 0.1))
    numbers = itertools.count()

    def start(g: Generator) -> np.ndarray:
        age = g.integers(18, 80)
        income = g.integers(20, 60)
        tenure = g.poisson(20)
        is_premium = g.random() < 0.3
        customer = [age, income, tenure, is_premium, next(numbers)]
        return np.array([g.normal(), *customer], dtype=np.float64)

    def step(
        state: np.ndarray, action: int, g: Generator
    ) -> tuple[np.ndarray, float, bool]:
        following = state.copy()
        following[0] = 0.8 * state[0] + 0.4 * (action - 1) + 0.3 * g.normal()
        pay = following[0] + 0.05 * g.normal()
        if has_pay_by_age:
            pay += 0.01 * state[1]
        if has_threshold and state[2] > 40:
            pay += 0.5
        return following, float(pay), bool(g.random() < end)

    return World(
        "customers",
        start,
        step,
        lambda s: s.astype(np.float32),
        3,
        limit=int(generator.integers(8, 30)),
    )


def _stores(generator: Generator) -> World:
    """Stores with an area and a list price; each week the price is one of three.

    The prices of a store are shares of its list price, so they stay alike for weeks.
    """
    change = float(generator.uniform(0.1, 0.5))
    shares = np.array([1.0, 0.9, 0.7])

    def start(g: Generator) -> np.ndarray:
        list_price = int(g.integers(20, 100))
        area = int(g.integers(4, 40))
        return np.array([g.normal(), list_price, list_price, area])

    def step(
        state: np.ndarray, action: int, g: Generator
    ) -> tuple[np.ndarray, float, bool]:
        demand, price, list_price, area = state
        following = state.copy()
        following[0] = 0.7 * demand + 0.4 * action + 0.3 * g.normal()
        if g.random() < change:
            following[1] = np.rint(list_price * g.choice(shares))
        pay = demand - 0.01 * price + 0.02 * area + 0.1 * g.normal()
        return following, float(pay), False

    return World(
        "stores with prices",
        start,
        step,
        lambda s: s.astype(np.float32),
        2,
        limit=int(generator.integers(10, 40)),
    )


def _wards_by_age(generator: Generator) -> World:
    """Stays in hospital: age, weight and number of beds are constant in a stay, and the
    days since admission are counted.

    Severity moves by age and treatment; the last row pays for survival.
    """
    risk = float(generator.uniform(0.0, 0.02))

    def start(g: Generator) -> np.ndarray:
        age = int(np.clip(np.rint(g.normal(60.0, 15.0)), 18, 100))
        weight = int(np.rint(g.normal(75.0, 12.0)))
        beds = int(g.choice([12, 18, 20, 24, 30, 36, 40, 44, 52, 60]))
        return np.array([g.normal(), age, weight, beds, 0.0])

    def step(
        state: np.ndarray, action: int, g: Generator
    ) -> tuple[np.ndarray, float, bool]:
        severity, age, _, _, day = state
        following = state.copy()
        drift = risk * (age - 60.0) - 0.3 * action
        following[0] = severity + 0.5 * g.normal() + drift
        following[4] = day + 1.0
        is_dead = following[0] > 2.5
        is_discharged = following[0] < -2.5
        pay = float(is_discharged) - float(is_dead)
        return following, pay, bool(is_dead or is_discharged)

    return World(
        "wards by age",
        start,
        step,
        lambda s: s.astype(np.float32),
        2,
        limit=int(generator.integers(10, 30)),
    )


# --- faults
# ---------------------------------------------------------------------------------------------


def with_fault(
    world: World,
    episodes: list[Episode],
    fault: str,
    share: float,
    generator: Generator,
) -> Transitions | None:
    """A log with a fault in ``share`` of the places where it can be; None where it
    cannot be.
    """
    return _FAULTS[fault](world, episodes, share, generator)


def _chosen(count: int, share: float, generator: Generator) -> np.ndarray:
    """Mask of a share of places, at least one."""
    mask = np.zeros(count, dtype=np.bool_)
    mask[generator.permutation(count)[: max(1, round(share * count))]] = True
    return mask


def _copy(episode: Episode) -> Episode:
    return Episode(
        observations=list(episode.observations),
        actions=list(episode.actions),
        rewards=list(episode.rewards),
        terminated=episode.terminated,
    )


def _any_action(world: World, generator: Generator) -> Any:
    if world.actions:
        return int(generator.integers(world.actions))
    return float(generator.uniform(-1.0, 1.0))


def _reset_rows(
    world: World, episodes: list[Episode], share: float, generator: Generator
) -> Wrong:
    """NEXT_STEP autoreset: the row after an end begins in its next observation, with
    reward 0.
    """
    if world.goes_on or len(episodes) < 3:
        return None
    hit = _chosen(len(episodes) - 1, share, generator)
    wrong = [episodes[0]]
    for before, episode, is_hit in zip(episodes[:-1], episodes[1:], hit, strict=True):
        changed = _copy(episode)
        if is_hit:
            changed.observations.insert(0, before.observations[-1])
            changed.actions.insert(0, _any_action(world, generator))
            changed.rewards.insert(0, 0.0)
        wrong.append(changed)
    return as_log(world, wrong)


def _next_of_resets(
    world: World, episodes: list[Episode], share: float, generator: Generator
) -> Wrong:
    """SAME_STEP autoreset: the next observation of a cut row is the following episode's
    first one.
    """
    cut = [
        number for number, episode in enumerate(episodes[:-1]) if not episode.terminated
    ]
    if world.goes_on or len(cut) < 3:
        return None
    wrong = [_copy(episode) for episode in episodes]
    for number, is_hit in zip(cut, _chosen(len(cut), share, generator), strict=True):
        if is_hit:
            wrong[number].observations[-1] = episodes[number + 1].observations[0]
    return as_log(world, wrong)


def _false_terminals(
    world: World, episodes: list[Episode], share: float, generator: Generator
) -> Wrong:
    """A flag in rows that end nothing: the episode goes on as another one."""
    rows = sum(len(episode.rewards) for episode in episodes)
    if world.limit == 1:
        return None
    hit = _chosen(rows, share, generator)
    wrong: list[Episode] = []
    row = 0
    for episode in episodes:
        begin = 0
        for step in range(len(episode.rewards)):
            is_last = step == len(episode.rewards) - 1
            if hit[row] or is_last:
                wrong.append(
                    Episode(
                        observations=episode.observations[begin : step + 2],
                        actions=episode.actions[begin : step + 1],
                        rewards=episode.rewards[begin : step + 1],
                        terminated=bool(hit[row]) or episode.terminated,
                    )
                )
                begin = step + 1
            row += 1
    return as_log(world, wrong)


def _limits_as_ends(
    world: World, episodes: list[Episode], share: float, generator: Generator
) -> Wrong:
    """A terminal flag at the limit too, in a share of the episodes that reach it."""
    at_limit = [
        number
        for number, episode in enumerate(episodes)
        if not episode.terminated and len(episode.rewards) == world.limit
    ]
    if len(at_limit) < 3:
        return None
    wrong = [_copy(episode) for episode in episodes]
    hit = _chosen(len(at_limit), share, generator)
    for number, is_hit in zip(at_limit, hit, strict=True):
        wrong[number].terminated = wrong[number].terminated or bool(is_hit)
    return as_log(world, wrong)


def _unmarked(
    world: World,
    episodes: list[Episode],
    share: float,
    generator: Generator,
    limits: bool,
) -> Wrong:
    """Episodes glued to the following one, with the next observation taken from the row
    below.
    """
    can = [
        number
        for number, episode in enumerate(episodes[:-1])
        if not limits
        or (not episode.terminated and len(episode.rewards) == world.limit)
    ]
    if world.goes_on or len(can) < 3 or world.limit == 1:
        return None
    hit = set(np.asarray(can)[_chosen(len(can), share, generator)].tolist())
    if share >= 1.0:
        hit = set(can[::2])  # all glued would be one episode
    wrong = [_copy(episodes[0])]
    for number in range(1, len(episodes)):
        if number - 1 in hit:
            glued = wrong[-1]
            glued.observations = glued.observations[:-1] + list(
                episodes[number].observations
            )
            glued.actions += episodes[number].actions
            glued.rewards += episodes[number].rewards
            glued.terminated = episodes[number].terminated
        else:
            wrong.append(_copy(episodes[number]))
    return as_log(world, wrong)


def _late(
    world: World,
    episodes: list[Episode],
    share: float,
    generator: Generator,
    actions: bool,
    rewards: bool,
) -> Transitions | None:
    """Each row of a share of the episodes holds the action, the reward or both of the
    row before.
    """
    if world.limit == 1:
        return None
    wrong = []
    for episode, is_hit in zip(
        episodes, _chosen(len(episodes), share, generator), strict=True
    ):
        changed = _copy(episode)
        if is_hit and actions:
            first = 0 if world.actions else 0.0
            changed.actions = [first, *episode.actions[:-1]]
        if is_hit and rewards:
            changed.rewards = [0.0, *episode.rewards[:-1]]
        wrong.append(changed)
    return as_log(world, wrong)


def _marks(
    world: World,
    episodes: list[Episode],
    share: float,
    generator: Generator,
    of_rewards: bool,
) -> Transitions | None:
    """−999 in a share of the rows."""
    if share > 0.4 or (not of_rewards and world.name == "pictures"):
        return None
    wrong = [_copy(episode) for episode in episodes]
    for episode in wrong:
        for step in range(len(episode.rewards)):
            if generator.random() < share:
                if of_rewards:
                    episode.rewards[step] = -999.0
                else:
                    changed = np.array(episode.observations[step], dtype=np.float32)
                    changed[0] = -999.0
                    episode.observations[step] = changed
    return as_log(world, wrong)


def _lost(
    world: World, episodes: list[Episode], share: float, generator: Generator
) -> Wrong:
    """Rows lost inside episodes, with the next observation as it was logged."""
    if world.limit == 1 or share > 0.4:
        return None
    log = as_log(world, episodes)
    kept = generator.random(len(log)) >= share
    kept[log.episode_ends] = True
    columns: dict[str, Any] = {
        name: column[kept] for name, column in log.columns.items() if name != "steps"
    }
    return Transitions(**columns, action_space=log.action_space)


def _labels(
    world: World, episodes: list[Episode], share: float, generator: Generator
) -> Wrong:
    """The states of a tabular world as their numbers, which mean nothing."""
    if world.name != _TABULAR or share < 1.0:
        return None
    wrong = [_copy(episode) for episode in episodes]
    for episode in wrong:
        episode.observations = [
            _number(float(observation.argmax())) for observation in episode.observations
        ]
    return as_log(world, wrong)


_FAULTS: dict[
    str, Callable[[World, list[Episode], float, Generator], Transitions | None]
] = {
    "reset rows": _reset_rows,
    "next observations of resets": _next_of_resets,
    "terminals that end nothing": _false_terminals,
    "limits flagged as ends": _limits_as_ends,
    "unmarked ends": lambda w, e, s, g: _unmarked(w, e, s, g, limits=False),
    "unmarked time limits": lambda w, e, s, g: _unmarked(w, e, s, g, limits=True),
    "actions late": lambda w, e, s, g: _late(w, e, s, g, actions=True, rewards=False),
    "actions and rewards late": lambda w, e, s, g: _late(
        w, e, s, g, actions=True, rewards=True
    ),
    "rewards late": lambda w, e, s, g: _late(w, e, s, g, actions=False, rewards=True),
    "marks in rewards": lambda w, e, s, g: _marks(w, e, s, g, of_rewards=True),
    "marks in observations": lambda w, e, s, g: _marks(w, e, s, g, of_rewards=False),
    "rows lost inside": _lost,
    "labels as numbers": _labels,
}
