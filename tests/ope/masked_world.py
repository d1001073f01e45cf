"""A finite world with other actions in every state, whose value is known exactly."""

from dataclasses import dataclass

import numpy as np

import koffline

# Available actions of each of five states.
MASKS = np.array(
    [[1, 1, 0, 0], [0, 1, 1, 0], [1, 0, 0, 1], [1, 1, 1, 0], [0, 0, 1, 1]], dtype=bool
)
STATES, ACTIONS = MASKS.shape
GAMMA = 0.8
GOES_ON = 0.75
STARTS = np.array([0.4, 0.3, 0.1, 0.1, 0.1])
# Where an action is worth much is where it is not available: who ignores masks errs.
PREFERENCES = np.array(
    [
        [0.5, 0.0, 1.5, 0.0],
        [1.5, 0.0, 0.7, 0.0],
        [0.0, 1.5, 0.0, 0.6],
        [0.3, 0.0, 0.8, 1.5],
        [0.0, 1.5, 0.6, 0.0],
    ]
)


@dataclass(frozen=True)
class MaskedWorld:
    """Transitions (5, 4, 5) to next states, and mean rewards (5, 4)."""

    chances: np.ndarray
    rewards: np.ndarray

    @classmethod
    def make(cls) -> "MaskedWorld":
        generator = np.random.default_rng(5)
        chances = generator.dirichlet(np.full(STATES, 0.6), (STATES, ACTIONS))
        rewards = generator.normal(size=(STATES, ACTIONS))
        return cls(chances, rewards)

    def value(self) -> float:
        """The target's value by the linear equations of the states, in which only
        available actions occur.
        """
        matrix = np.eye(STATES)
        mean_rewards = np.zeros(STATES)
        for state in range(STATES):
            actions = [a for a in range(ACTIONS) if MASKS[state, a]]
            odds = [float(np.exp(PREFERENCES[state, a])) for a in actions]
            for action, weight in zip(actions, odds, strict=True):
                chance = weight / sum(odds)
                mean_rewards[state] += chance * self.rewards[state, action]
                matrix[state] -= GAMMA * GOES_ON * chance * self.chances[state, action]
        return float(STARTS @ np.linalg.solve(matrix, mean_rewards))

    def log(self, episodes: int, seed: int = 0) -> koffline.Transitions:
        """A log of a policy that takes all available actions alike, with its
        probabilities and the masks; observations are one-hot.
        """
        generator = np.random.default_rng(seed)
        rows: list[tuple[int, int, float, int, bool, int]] = []
        for episode in range(episodes):
            state = int(generator.choice(STATES, p=STARTS))
            is_over = False
            while not is_over:
                action = int(generator.choice(np.flatnonzero(MASKS[state])))
                reward = self.rewards[state, action] + 0.1 * generator.normal()
                after = int(generator.choice(STATES, p=self.chances[state, action]))
                is_over = bool(generator.random() > GOES_ON)
                rows.append((state, action, reward, after, is_over, episode))
                state = after
        fields = range(len(rows[0]))
        states, actions, rewards, following, ended, numbers = (
            np.array([row[field] for row in rows]) for field in fields
        )
        return koffline.Transitions(
            observations=np.eye(STATES)[states],
            actions=actions,
            rewards=rewards,
            next_observations=np.eye(STATES)[following],
            terminated=ended,
            truncated=np.zeros(len(rows), bool),
            action_space=koffline.Discrete(ACTIONS),
            episode_ids=numbers,
            behavior_log_probabilities=-np.log(MASKS[states].sum(axis=1)),
            action_mask=MASKS[states],
        )


def target(observations: np.ndarray) -> np.ndarray:
    """The evaluated policy: it knows no masks and has a favourite among the actions
    that are not available.
    """
    odds = np.exp(PREFERENCES[observations.argmax(axis=1)])
    return np.asarray(odds / odds.sum(axis=1, keepdims=True))
