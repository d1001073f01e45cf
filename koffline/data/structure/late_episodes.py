"""Episodes of a log with few states and actions in which each action stands one row
late, found by the likelihood of whole episodes.

The log of an episode's likelihood ratio is L = Σ log p(s'|s, action of the row below) −
log p(s'|s, own action), with p from the other half of the episodes. If a share q of
episodes is late, Σ log(1 − q + q exp(L)) over the episodes is large; of a log that was
read rightly it reaches x with a chance of about exp(−x) (Markov's inequality for a
likelihood ratio). Episodes whose worlds differ in something that is not logged can
raise it, too, but then they do the same for actions of the wrong rows: the actions
below are exchanged among rows with the same next state, of which a policy that sees the
state knows no more, and the statistic must be larger than theirs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from koffline.data.spaces import Discrete
from koffline.data.structure.chances import SIGNIFICANT
from koffline.data.structure.logged_rows import LoggedRows
from koffline.data.structure.symptom import Symptom
from koffline.errors import counted

_MOST_STATES = 128
_MOST_ACTIONS = 24
_MOST_ROWS = 20_000
_FEWEST_ROWS = 200
_FEWEST_EPISODES = 20
_SHARES = np.array([0.02, 0.05, 0.1, 0.2, 0.3, 0.5])  # of episodes that may be late
_LARGEST = 20.0  # log likelihood ratio of one episode: no more is believed
_EXCHANGES = 8
# Of 22 right logs with few states the largest statistic is 6.6, that of exchanged
# actions 12.3; with late actions in 10 % of the episodes the median is 173, and that of
# exchanged actions a tenth of it (`scripts/bench/structure_worlds.py`).
_CLEAR = -math.log(SIGNIFICANT)
_TIMES_EXCHANGED = 2.0


@dataclass(frozen=True, eq=False)
class _SmallSteps:
    """Rows with a row below in their episode, as numbers of states and actions.

    log_ratios: log p(s'|s, a) − log p(s'|s, own action) of each row and action a.
    """

    episode: Int[np.ndarray, " row"]
    following: Int[np.ndarray, " row"]
    action_below: Int[np.ndarray, " row"]
    log_ratios: Float[np.ndarray, "row action"]

    @classmethod
    def of(cls, rows: LoggedRows) -> _SmallSteps | None:
        """The steps of the first episodes, up to 20,000 rows; None if states or actions
        are many, or rows are few.
        """
        space = rows.log.action_space
        if not isinstance(space, Discrete) or space.n > _MOST_ACTIONS:
            return None
        if rows.few_observations is None or len(rows.firsts) < _FEWEST_EPISODES:
            return None
        chosen = np.arange(min(len(rows.log), _MOST_ROWS))
        episode = rows.episode[chosen]
        keys, numbers = np.unique(
            [rows.observation_keys[chosen], rows.next_keys[chosen]],
            return_inverse=True,
        )
        state, following = numbers.reshape(2, -1)
        has_below = ~rows.is_last[chosen]
        has_below[-1] = False
        inner = np.flatnonzero(has_below)
        if len(keys) > _MOST_STATES or len(inner) < _FEWEST_ROWS:
            return None
        action = np.asarray(rows.log.actions[chosen], dtype=np.int64)
        log_ratios = np.zeros((len(inner), space.n))
        half = episode % 2
        for number in range(2):
            is_other_half = half != number
            log_chance = _log_transitions(
                state[is_other_half],
                action[is_other_half],
                following[is_other_half],
                len(keys),
                space.n,
            )
            is_judged = half[inner] == number
            judged = inner[is_judged]
            of_actions = log_chance[state[judged], :, following[judged]]
            of_own = np.take_along_axis(of_actions, action[judged][:, None], axis=1)
            log_ratios[is_judged] = of_actions - of_own
        return cls(
            episode=episode[inner],
            following=following[inner],
            action_below=action[inner + 1],
            log_ratios=log_ratios,
        )

    def ratios_of_episodes(
        self, action: Int[np.ndarray, " row"]
    ) -> Float[np.ndarray, " episode"]:
        """L of each episode, at most 20, for an action at each row."""
        of_rows = np.take_along_axis(self.log_ratios, action[:, None], axis=1)[:, 0]
        return np.minimum(np.bincount(self.episode, weights=of_rows), _LARGEST)

    def exchanged(self, generator: np.random.Generator) -> Int[np.ndarray, " row"]:
        """The actions below, permuted among rows with the same next state."""
        order = np.argsort(self.following, kind="stable")
        shuffled = np.lexsort((generator.random(len(order)), self.following))
        actions = np.empty_like(self.action_below)
        actions[order] = self.action_below[shuffled]
        return actions


def late_episode_symptoms(rows: LoggedRows) -> Iterator[Symptom]:
    """Yield a symptom if in some episodes the action of the row below made the step."""
    steps = _SmallSteps.of(rows)
    if steps is None:
        return
    ratios = steps.ratios_of_episodes(steps.action_below)
    statistics = _statistics(ratios)
    share = float(_SHARES[statistics.argmax()])
    generator = np.random.default_rng(0)
    exchanged = max(
        float(_statistics(steps.ratios_of_episodes(steps.exchanged(generator))).max())
        for _ in range(_EXCHANGES)
    )
    excess = float(statistics.max()) - _TIMES_EXCHANGED * max(exchanged, 0.0)
    if excess <= _CLEAR:
        return
    is_late = ratios > math.log((1.0 - share) / share)  # more probable than not
    count = int(is_late.sum())
    yield Symptom(
        test="alignment of actions in some episodes",
        kind="actions",
        rows=count,
        of=len(ratios),
        p_value=math.exp(-excess),
        statement=(
            f"in {count} of {counted(len(ratios), 'episode')} the action of the row"
            " below fits each step, and the row's own action does not"
        ),
        remedy="check how these episodes were recorded; move their actions up by one row",
    )


def _statistics(
    ratios: Float[np.ndarray, " episode"],
) -> Float[np.ndarray, " share"]:
    """Σ log(1 − q + q exp(L)) over the episodes, for each share q of late ones."""
    likelihood_ratios = np.exp(ratios)[:, None]
    return np.log1p(_SHARES * (likelihood_ratios - 1.0)).sum(axis=0)


def _log_transitions(
    state: Int[np.ndarray, " row"],
    action: Int[np.ndarray, " row"],
    following: Int[np.ndarray, " row"],
    states: int,
    actions: int,
) -> Float[np.ndarray, "state action state"]:
    """log p(s'|s, a) from counts, to which one step is added that is drawn by p(s'|s),
    to whose counts in turn one step by p(s') is added.
    """
    counts = np.zeros((states, actions, states))
    np.add.at(counts, (state, action, following), 1.0)
    of_state = counts.sum(axis=1)
    of_all = of_state.sum(axis=0) + 0.5
    of_state = of_state + of_all / of_all.sum()
    of_state /= of_state.sum(axis=1, keepdims=True)
    chances = counts + of_state[:, None]
    return np.log(chances / chances.sum(axis=2, keepdims=True))
