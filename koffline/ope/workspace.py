"""One evaluation: log, policy, settings, and what several estimators share, made when first needed."""

from __future__ import annotations

import time
from functools import cached_property
from typing import Any

import numpy as np

from koffline.config import EvaluationSettings
from koffline.data.copies import without_copies
from koffline.data.transitions import Transitions
from koffline.errors import DataError, KofflineError, PolicyError
from koffline.fitting import Progress
from koffline.ope.coverage import Coverage, measure_coverage
from koffline.ope.ensemble import Ensemble, draw_ensemble
from koffline.ope.features import (
    FeatureSystem,
    default_features,
    make_feature_system,
    network_features,
)
from koffline.ope.fitted import FittedValues, fit_value_functions
from koffline.ope.importance.problem import EpisodeProblem, prepare_episodes
from koffline.ope.learning import fit_features, make_table
from koffline.ope.limits import Limits
from koffline.ope.out_of_bag import out_of_bag_values
from koffline.ope.problem import EvaluationProblem, prepare_problem, value_bounds
from koffline.ope.residuals import ResidualSummary, summarise_residuals
from koffline.ope.row_values import RowValues
from koffline.policies import ContinuousPolicy, DiscretePolicy
from koffline.solvers.features import FeatureMap
from koffline.store.run_record import versions


class Workspace:
    """What an estimator may ask for; nothing is computed twice.

    The settings' seed decides everything random. ``initial_observations`` (E, …) replace the log's own start
    states. ``transitions``: the log without copies of episodes, which their weight stands for.
    """

    def __init__(
        self,
        transitions: Transitions,
        policy: DiscretePolicy | ContinuousPolicy,
        settings: EvaluationSettings,
        initial_observations: np.ndarray | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.logged, self.policy, self.settings = transitions, policy, settings
        self.merged = without_copies(transitions)
        self.transitions = self.merged.transitions
        self.initial_observations, self._progress = initial_observations, progress
        self._generator = np.random.default_rng(settings.seed)
        self._started = time.perf_counter()

    @cached_property
    def problem(self) -> EvaluationProblem:
        """Standardised rows with the policy's actions."""
        return prepare_problem(
            self.transitions,
            self.policy,
            self.settings.gamma,
            self.settings.action_draws,
            self._generator,
            self.initial_observations,
        )

    @cached_property
    def limits(self) -> Limits:
        """What the log can say at all."""
        log, problem, given = self.transitions, self.problem, self.settings.reward_bounds
        low, high = problem.value_bounds
        bounds = (low * problem.reward_scale, high * problem.reward_scale)
        if given is not None:
            bounds = value_bounds(given, given if log.terminated.any() else None, self.settings.gamma)
        return Limits(
            units=problem.effective_units,
            by_episode=log.has_episodes,
            fixed_starts=problem.fixed_starts,
            longest=int(log.episode_lengths.max()) if log.has_episodes else None,
            ending_rate=float(log.terminated.mean()),
            gamma=self.settings.gamma,
            bounds=bounds,
        )

    @cached_property
    def ensemble(self) -> Ensemble:
        """Which rows every network is trained on."""
        settings = self.settings
        return draw_ensemble(self.problem, settings.full_replicas, settings.resampled_replicas, settings.seed)

    @cached_property
    def fitted(self) -> FittedValues:
        """The trained networks by head: the long part. Raises KofflineError when too few are left."""
        fitted = fit_value_functions(self.problem, self.ensemble, self.settings, self._progress)
        full = fitted.alive[: self.ensemble.full]
        if not full.any() or np.count_nonzero(fitted.alive[self.ensemble.full :]) < 2:
            raise KofflineError(
                f"{fitted.describe_diverged()}; "
                "lower learning_rate or look for outliers with 'koffline data validate'"
            )
        return fitted

    @cached_property
    def residuals(self) -> ResidualSummary:
        """Bellman residuals of the chosen head."""
        fitted = self.fitted
        return summarise_residuals(
            fitted.chosen,
            fitted.table,
            fitted.instruments,
            self.ensemble,
            fitted.alive,
            self.problem.reward_scale,
        )

    @cached_property
    def row_values(self) -> RowValues:
        """Kernel-loss values of every row by networks that did not see its episode."""
        return out_of_bag_values(self.fitted, "kloss")

    @cached_property
    def coverage(self) -> Coverage:
        """How far the policy's actions are from logged ones."""
        return measure_coverage(self.problem, np.random.default_rng([self.settings.seed, 1]))

    @cached_property
    def system(self) -> FeatureSystem:
        """The problem in the features of the settings, for closed forms and their intervals."""
        if self.settings.feature_source == "random":
            return self.fixed_system
        return self._system(self._learned_features())

    @cached_property
    def fixed_system(self) -> FeatureSystem:
        """The problem in random features, which are blind to rewards: what a certificate needs."""
        settings = self.settings
        return self._system(
            default_features(self.problem, settings.features, settings.feature_width, seed=settings.seed)
        )

    def _system(self, features: FeatureMap) -> FeatureSystem:
        settings = self.settings
        return make_feature_system(
            self.problem,
            features,
            gamma=settings.gamma,
            bandwidth=settings.bandwidth,
            instruments=settings.instruments,
            seed=settings.seed,
        )

    def _learned_features(self) -> FeatureMap:
        """Hidden layers of one network trained by fitted Q evaluation on the whole log.

        It is trained by itself, so that closed forms are the same whatever else is asked for.
        """
        settings = self.settings
        alone = draw_ensemble(self.problem, 1, 0, settings.seed, stream=2)
        table = make_table(self.problem, settings.device)
        record = fit_features(table, self.problem, alone, settings, progress=self._progress)
        if record.diverged_at[0] is not None:
            raise KofflineError(
                f"the network behind the features diverged at step {record.diverged_at[0]}; lower "
                "learning_rate, or use random features with feature_source=random"
            )
        return network_features(record.network)

    @cached_property
    def episodes(self) -> EpisodeProblem | str:
        """The log's episodes with the policy's weights, or why there are none."""
        settings = self.settings
        try:
            return prepare_episodes(
                self.transitions,
                self.policy,
                settings.gamma,
                behavior=settings.behavior,
                clip=settings.weight_clip,
                seed=settings.seed,
            )
        except (DataError, PolicyError) as error:
            return str(error)

    def describe(self) -> dict[str, Any]:
        """What every result record says of its run, beside the settings that it names itself."""
        log = self.logged
        return {
            "gamma": self.settings.gamma,
            "n_transitions": len(log),
            "n_episodes": log.n_episodes,
            "policy": self.policy.name,
            "source": log.metadata.source,
            "seed": self.settings.seed,
            "seconds": time.perf_counter() - self._started,
            "data_sha256": log.sha256,
            "versions": versions(),
        }
