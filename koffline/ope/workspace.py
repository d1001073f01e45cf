"""Workspace of one evaluation: log, policy, settings, and shared quantities computed on
demand.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch

from koffline.config import EvaluationSettings, check_networks_fit
from koffline.data.columns import rows_if_given
from koffline.data.disk.log import AnyLog
from koffline.data.independence import with_independent_clusters
from koffline.data.structure import Structure, Symptom
from koffline.data.transitions import Transitions
from koffline.errors import DataError, PolicyError
from koffline.fitting import Progress, threads
from koffline.jobs import most_workers
from koffline.jobs.cores import cores
from koffline.ope import names
from koffline.ope.assumptions.markov import Shift, memory_and_drift_shifts
from koffline.ope.importance.episodes import (
    EpisodeProblem,
    episodes_of_log,
    prepare_episodes,
    with_unknown_actions,
)
from koffline.ope.importance.ratios import ESTIMATED
from koffline.ope.intervals.feature_system import (
    FeatureMap,
    FeatureSystem,
    default_features,
    make_feature_system,
)
from koffline.ope.log.coverage import Coverage, among, known_actions, measure_coverage
from koffline.ope.log.facts import Limits, LogFacts, log_facts
from koffline.ope.log.problem import EvaluationProblem, Measures, prepare_problem
from koffline.ope.log.row_values import RowValues
from koffline.ope.log.working_log import LogPart, S, Sums, WorkingLog, hold, in_problem
from koffline.ope.networks.fitted_q import (
    SharedRounds,
    WholeLog,
    fit_value_functions,
)
from koffline.ope.networks.fitted_values import FittedValues, Summarise
from koffline.ope.networks.last_layer import hidden_features
from koffline.ope.networks.out_of_bag import PassOverRows, RowSums, reader_of
from koffline.ope.networks.resampling import Resampling
from koffline.ope.networks.reward_regression import RewardModel, fit_reward_model
from koffline.ope.networks.systems import NOTHING_FURTHER, Further
from koffline.ope.results import describe_log
from koffline.ope.stream_settings import StreamSettings
from koffline.policies import DiscretePolicy, Policy
from koffline.policies.base import PolicySource
from koffline.policy_specs import as_policy

_STATES_TO_ANSWER = 1000  # in which a policy is asked twice
# share of states where rounding, which differs between batches, may choose among equal
# actions
_TIES = 0.01


@dataclass(eq=False)
class SharedByPolicies:
    """What evaluations of several policies on one log share, each computed once.

    Nothing here depends on the policy. The evaluations' settings differ at most in
    ``history``, and their log is the same. ``first_pass``: over all rows.
    ``reward_models``: by ``history``. ``rounds``: of training, of one-step logs.
    ``log``: in which clusters that share copies are one.
    """

    first_pass: FirstPass | None = None
    reward_models: dict[int, RewardModel] = field(default_factory=dict)
    rounds: SharedRounds = field(default_factory=SharedRounds)
    log: AnyLog | None = None


@dataclass(frozen=True)
class SharedPasses:
    """What several estimators of one evaluation need, so that one pass over the log
    serves all of them.

    ``further``: sums beside the systems. ``rows``: both `Workspace.row_values` and
    `Workspace.row_sums`.
    """

    further: Further = NOTHING_FURTHER
    rows: bool = False

    @classmethod
    def of(
        cls, estimators: Collection[str], settings: EvaluationSettings, bounds: bool
    ) -> SharedPasses:
        """For these estimators, with intervals of the settings' kind; bounds: whether
        kernel intervals are made beside them.
        """
        of_networks = [
            name for name in estimators if names.NETWORKS in names.needs_of(name)
        ]
        is_widened = settings.interval in names.SYSTEM_KINDS or bounds
        further = Further(
            temporal=not {"lstd", "lstdq"}.isdisjoint(estimators),
            of_every_row=(
                bool(of_networks)
                and is_widened
                and settings.interval != names.KERNEL_CERTIFIED
                and settings.feature_source == "learned"
            ),
            critic_moments="dualdice" in estimators,
        )
        needs_values = not set(names.WITH_MODEL).isdisjoint(estimators)
        needs_sums = not {"drl", "mwl"}.isdisjoint(estimators)
        return cls(further=further, rows=needs_values and needs_sums)


NO_SHARED_PASSES = SharedPasses()


@dataclass(eq=False)
class Workspace:
    """Quantities that estimators share, each computed at most once.

    The settings' seed determines all random numbers. ``initial_observations`` (E, …)
    replace the log's own start states. ``log``: the log, with the rows of it that are
    in memory. ``shared``: with the workspaces of other policies. ``passes``: what one
    pass over the log is to serve.
    """

    log: WorkingLog
    policy: Policy
    settings: EvaluationSettings
    initial_observations: np.ndarray | None = None
    shared: SharedByPolicies = field(default_factory=SharedByPolicies)
    passes: SharedPasses = NO_SHARED_PASSES
    started: float = field(default_factory=time.perf_counter)

    @property
    def transitions(self) -> Transitions:
        """The rows in memory."""
        return self.log.held.transitions

    @cached_property
    def known_actions(self) -> np.ndarray | None:
        """Mask (n,) of the actions whose values the log can tell; None if all are, or
        if continuous.
        """
        return known_actions(self.policy, self.transitions)

    @property
    def answerable(self) -> Policy:
        """The policy, restricted to the known actions and renormalised if some are
        unknown.
        """
        known = self.known_actions
        if known is None or not isinstance(self.policy, DiscretePolicy):
            return self.policy
        return among(self.policy, known)

    @cached_property
    def problem(self) -> EvaluationProblem:
        """Standardised rows in memory, with the actions of the `answerable` policy."""
        return self.problem_of(self.answerable)

    def problem_of(self, policy: Policy) -> EvaluationProblem:
        """Standardised rows in memory, with the actions of another policy."""
        settings = self.settings
        problem = prepare_problem(
            self.transitions,
            policy,
            gamma=settings.gamma,
            action_draws=settings.action_draws,
            generator=np.random.default_rng(settings.seed),
            initial_observations=self.initial_observations,
            history=settings.history or 0,
            numbers=self.log.held.units,
        )
        # by the rewards of all rows, not only of those in memory
        facts = self.facts
        low, high = facts.bounds(settings.reward_bounds)
        scale = problem.reward_scale
        return replace(
            problem,
            value_bounds=(low / scale, high / scale),
            is_one_step=problem.is_one_step and facts.terminated == facts.rows,
        )

    def fold(self, summarise: Summarise[S]) -> S:
        """Sum ``summarise`` over all parts of the log, each prepared as a problem."""
        if self.log.is_whole:
            return summarise(self.problem)
        settings = self.settings
        problem = self.problem
        of_part = partial(
            in_problem,
            summarise,
            Measures(**problem.measures),
            self.answerable,
            settings.gamma,
            settings.action_draws,
            settings.seed,
            self.facts.longest,
        )
        replicas = settings.full_replicas + settings.resampled_replicas
        draws = problem.next_inputs.shape[1]
        columns = problem.inputs.shape[1] * (3 + draws) + 4 * (problem.n_actions or 0)
        return self.log.fold(of_part, row_bytes=12 * columns + 24 * replicas)

    @cached_property
    def facts(self) -> LogFacts:
        """Facts of all rows that need no model."""
        return self._first_pass.facts

    @property
    def _first_pass(self) -> FirstPass:
        """Facts and structure of all rows, read once for all policies."""
        if self.shared.first_pass is None:
            self.shared.first_pass = self._read_first_pass()
        return self.shared.first_pass

    def _read_first_pass(self) -> FirstPass:
        if self.log.is_whole:
            facts = log_facts(self.log.held, gamma=self.settings.gamma)
            return FirstPass(
                facts=facts, structure=Structure.of(self.log.sample.transitions)
            )
        return self.log.fold(partial(first_pass_of, gamma=self.settings.gamma))

    @cached_property
    def symptoms(self) -> tuple[Symptom, ...]:
        """Signs that the log was misread, from all rows."""
        return self._first_pass.structure.symptoms

    @cached_property
    def limits(self) -> Limits:
        """Limits that the log sets to any estimate."""
        bounds = self.facts.bounds(self.settings.reward_bounds)
        merged = self.log.merged
        if self.log.is_whole:
            copies = 0.0
        else:
            copies = 1.0 - len(merged.kept) / merged.units
        return Limits(
            facts=self.facts,
            bounds=bounds,
            fixed_starts=self.initial_observations is not None,
            copies=copies,
        )

    @cached_property
    def fitted(self) -> FittedValues:
        """The trained networks, the slow part.

        Raises KofflineError if too many diverged.
        """
        settings = self.settings
        facts = self.facts
        problem = self.problem
        self._check_networks()
        resampling = Resampling.draw(
            problem,
            full=settings.full_replicas,
            resampled=settings.resampled_replicas,
            seed=settings.seed,
        )
        units = facts.episodes or facts.rows
        fitted = fit_value_functions(
            problem,
            resampling,
            settings,
            progress=self.log.progress,
            log=WholeLog(
                fold=self.fold,
                effective_units=facts.units,
                is_cut=facts.terminated < units,
                further=self.passes.further,
            ),
            shared_rounds=self.shared.rounds,
        )
        fitted.summarise(fitted.values_of(fitted.head))  # raises
        return fitted

    @cached_property
    def reward_model(self) -> RewardModel:
        """Networks that predict the rewards of a one-step log.

        Raises KofflineError if too many diverged.
        """
        settings = self.settings
        history = settings.history or 0
        known_model = self.shared.reward_models.get(history)
        if known_model is not None:
            return known_model
        problem = self.problem
        self._check_networks()
        resampling = Resampling.draw(
            problem, full=0, resampled=settings.resampled_replicas, seed=settings.seed
        )
        model = fit_reward_model(problem, resampling, settings, self.log.progress)
        self.shared.reward_models[history] = model
        return model

    def _check_networks(self) -> None:
        """Raise ConfigError if networks of the settings' sizes need more memory than
        there is.
        """
        problem = self.problem
        check_networks_fit(
            self.settings,
            inputs=problem.inputs.shape[1],
            outputs=problem.n_actions or 1,
            rows=problem.n_rows,
            units=len(problem.units),
        )

    @cached_property
    def held_pass(self) -> PassOverRows:
        """Pass of the chosen head's networks over the rows in memory; for kloss+fqe,
        those of kloss.
        """
        return reader_of(self.fitted, self.fitted.head.partition("+")[0])(self.problem)

    @cached_property
    def held_values(self) -> RowValues:
        """Values of the rows in memory by kernel-loss networks that were not trained on
        their episodes.
        """
        if self.fitted.head.startswith("kloss"):
            return self.held_pass.values
        return reader_of(self.fitted, "kloss")(self.problem).values

    @property
    def memory_shift(self) -> Shift | None:
        """Change of J if earlier rows were part of the state, from the rows in
        memory.
        """
        memory, _ = self._shifts
        return memory

    @property
    def drift_shift(self) -> Shift | None:
        """Change of J by a drift of the world along the log, from the rows in
        memory.
        """
        _, drift = self._shifts
        return drift

    @cached_property
    def _shifts(self) -> tuple[Shift | None, Shift | None]:
        """Shifts by memory and by drift."""
        return memory_and_drift_shifts(
            self.problem, self.held_values, self.settings.seed
        )

    @cached_property
    def row_values(self) -> RowValues:
        """Values of all rows by kernel-loss networks that were not trained on their
        episodes.
        """
        if self.log.is_whole:
            return self.held_values
        if self._shares_rows:
            return self._values_and_sums.passed.values
        return self.fold(reader_of(self.fitted, "kloss")).values

    @property
    def _shares_rows(self) -> bool:
        """Whether one pass gives both values and sums of all rows."""
        return self.passes.rows and self.sees_all_episodes

    @cached_property
    def _values_and_sums(self) -> _ValuesAndSums:
        """Values and doubly robust sums of all rows by one pass."""
        both: _ValuesAndSums = self.fold(
            partial(_read_and_weigh, reader_of(self.fitted, "kloss"))
        )
        return both

    @cached_property
    def held_sums(self) -> RowSums:
        """Doubly robust sums of the rows in memory."""
        return RowSums.of(self.problem, self.held_values)

    @cached_property
    def row_sums(self) -> RowSums:
        """Doubly robust sums of all rows."""
        if self.log.is_whole:
            return self.held_sums
        if self._shares_rows:
            sums = self._values_and_sums.sums
        else:
            sums = self.fold(partial(_weigh, reader_of(self.fitted, "kloss")))
        if not self.problem.fixed_starts:
            return sums
        # given start states belong to no part of the log
        return replace(
            sums,
            start_value=self.held_sums.start_value,
            start_weight=self.held_sums.start_weight,
        )

    @cached_property
    def coverage(self) -> Coverage:
        """Coverage of the policy's actions by the rows in memory."""
        if self.known_actions is None:
            problem = self.problem
        else:
            problem = self.problem_of(self.policy)
        generator = np.random.default_rng([self.settings.seed, 1])
        return measure_coverage(problem, generator, self.known_actions)

    @cached_property
    def held_system(self) -> FeatureSystem:
        """Feature system of the rows in memory, for intervals that need every row.

        Learned features are the hidden layers of the first full-log network that did
        not diverge.
        """
        if self.settings.feature_source == "random":
            return self.fixed_system
        full = self.fitted.alive[: self.settings.full_replicas]
        first = np.flatnonzero(full)[:1].tolist()
        network = self.fitted.record.network.select(first)
        device = network.flat.device
        return self._system(
            lambda inputs: hidden_features(network, inputs.to(device))[0].cpu()
        )

    @cached_property
    def fixed_system(self) -> FeatureSystem:
        """Feature system with random features.

        They do not depend on rewards, as a certificate requires.
        """
        settings = self.settings
        features = default_features(
            self.problem, settings.features, settings.feature_width, settings.seed
        )
        return self._system(features)

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

    @cached_property
    def episodes(self) -> EpisodeProblem:
        """Episodes with the policy's importance weights. Raises DataError and
        PolicyError.

        If the behavior policy must be estimated, which needs observations, only the
        episodes in memory are used.
        """
        settings = self.settings
        behavior: str = settings.behavior
        if settings.estimates_behavior:
            behavior = ESTIMATED
        rows, log_probabilities = self._rows_of_episodes
        return prepare_episodes(
            rows,
            self.policy,
            settings.gamma,
            behavior=behavior,
            behavior_model=settings.behavior_model,
            clip=settings.weight_clip,
            seed=settings.seed,
            target=log_probabilities,
        )

    @cached_property
    def _rows_of_episodes(self) -> tuple[Transitions, np.ndarray | None]:
        """Rows that estimators over episodes use, and the policy's log-probabilities
        (N,) if known.
        """
        if self.sees_all_episodes:
            return episodes_of_log(self.log, self.policy)
        return (self.transitions, None)

    @property
    def sees_all_episodes(self) -> bool:
        """Whether estimators over episodes use more episodes than those in memory."""
        logged = self.transitions.behavior_log_probabilities is not None
        whole = self.log.is_whole or not self.transitions.has_episodes
        return not whole and logged and not self.settings.estimates_behavior

    @cached_property
    def row_values_of_episodes(self) -> RowValues:
        """Values of the rows that estimators over episodes use, by networks that were
        not trained on their episodes, with one Q for unknown actions too.

        Of one-step logs they are predicted rewards, else values of the kernel loss.
        """
        if self.problem.is_one_step:
            predict = self.reward_model.predict
            if self.sees_all_episodes:
                values = self.fold(predict).values
            else:
                values = predict(self.problem).values
        elif self.sees_all_episodes:
            values = self.row_values
        else:
            values = self.held_values
        if self.known_actions is None:
            return values
        rows, _ = self._rows_of_episodes
        return with_unknown_actions(values, rows, self.known_actions)

    @cached_property
    def notes_on_masks(self) -> tuple[str, ...]:
        """A note if the policy gives probability to actions that were not available in
        the rows in memory.
        """
        log = self.transitions
        if log.action_mask is None or not isinstance(self.policy, DiscretePolicy):
            return ()
        share = self.policy.share_on_unavailable(log.observations, log.action_mask)
        if not share > 0.0:
            return ()
        return (
            f"{share:.2%} of {self.policy.name}'s probability, on average over the rows,"
            " was on actions that were not available (action_mask): it was divided among"
            " the available ones in proportion to theirs",
        )

    def describe(self) -> dict[str, Any]:
        """Fields that describe the run in every result."""
        n_transitions = self.facts.rows
        n_episodes = self.facts.episodes
        if self.log.is_whole:  # including merged copies
            n_transitions = len(self.log.sample.transitions)
            n_episodes = self.log.sample.transitions.n_episodes
        return {
            **describe_log(self.log.log, self.settings.seed, self.started),
            "gamma": self.settings.gamma,
            "policy": self.policy.name,
            "notes": (
                *self.log.log.metadata.notes,
                *self.policy.notes,
                *self.notes_on_masks,
            ),
            "n_transitions": n_transitions,
            "n_episodes": n_episodes,
            "settings": {
                **self.settings.model_dump(
                    # cores change no result
                    exclude={"gamma", "estimator", "seed", "cores"}
                ),
                "behavior_model": self.settings.behavior_model_name,
            },
        }


@contextlib.contextmanager
def open_workspace(
    transitions: AnyLog,
    policy: PolicySource,
    settings: EvaluationSettings,
    initial_observations: np.ndarray | None = None,
    stream: StreamSettings | None = None,
    progress: Progress | None = None,
    shared: SharedByPolicies | None = None,
    passes: SharedPasses = NO_SHARED_PASSES,
) -> Iterator[Workspace]:
    """Check that log, policy and start states fit together, and read the rows to be
    held in memory.

    shared: with workspaces of other policies on the same log, whose settings differ at
    most in ``history``. passes: what one pass serves. Inside the context, networks
    compute on the cores of the settings, and workers are kept. Raises KofflineError.
    """
    policy = as_policy(
        policy,
        transitions.action_space,
        transitions.observation_shape,
        None,
        transitions.metadata.features,
    )
    stream = stream or StreamSettings()
    shared = shared or SharedByPolicies()
    chosen_cores = settings.chosen_cores
    uses_workers = stream.ray is not None or not isinstance(transitions, Transitions)
    if chosen_cores is not None and stream.workers == 1 and uses_workers:
        # Passes over shards have one process by default, because each needs the memory
        # that the user allowed.
        stream = replace(stream, workers=min(chosen_cores, most_workers()))
    of_cluster = None
    if stream.ray is not None:
        of_cluster = stream
    team = cores(chosen_cores, of_cluster)
    with torch.no_grad(), threads(1), stream.kept(), team:
        if shared.log is None:
            shared.log = with_independent_clusters(transitions)
        log = hold(shared.log, settings.sample_rows, settings.seed, stream, progress)
        if len(log.sample.transitions) < 2:
            raise DataError(
                "the log has 1 row; an estimate needs at least 2, an honest one"
                " hundreds"
            )
        if initial_observations is not None:
            initial_observations = _checked_starts(
                log.sample.transitions, initial_observations
            )
        answers = _checked_answers(policy, log.sample.transitions)
        if stream.partial is not None and not log.is_whole:
            identity = policy.name.encode() + answers.tobytes()
            log = dataclasses.replace(log, policy_identity=identity)
        yield Workspace(
            log=log,
            policy=policy,
            settings=settings,
            initial_observations=initial_observations,
            shared=shared,
            passes=passes,
        )


def _checked_answers(policy: Policy, log: Transitions) -> np.ndarray:
    """The policy's probabilities in the log's first states, or its draws from one seed.

    Raises PolicyError if the same states get other answers when asked again, or (for
    deterministic answers) in another batch.
    """
    states = log.observations[:_STATES_TO_ANSWER]
    masks = rows_if_given(log.action_mask, slice(_STATES_TO_ANSWER))
    answers = _answers(policy, states, masks)
    # Draws depend on the place of a state in its batch: then the batch stays the same.
    rows: slice | np.ndarray = slice(None)
    if getattr(policy, "deterministic", True):
        # half of the states, in another order, those with the smallest sums first
        sums = states.reshape(len(states), -1).sum(axis=1)
        rows = sums.argsort()[: len(states) // 2]
    repeated = _answers(policy, states, masks)
    masks_of_rows = rows_if_given(masks, rows)
    of_other_batch = _answers(policy, states[rows], masks_of_rows)
    if _share_of_changes(answers, repeated) > 0.0:
        raise PolicyError(
            f"{policy.name} answers the same states in another way each time; return"
            " probabilities (continuous: take a generator; networks: eval mode)"
        )
    if _share_of_changes(answers[rows], of_other_batch) > _TIES:
        raise PolicyError(
            f"{policy.name} answers the same states in another way in another batch;"
            " answer each by itself (a network: save it in evaluation mode)"
        )
    return answers


def _share_of_changes(answers: np.ndarray, repeated: np.ndarray) -> float:
    """Share of the states (N,) with another answer (N, k) the second time."""
    is_same = np.isclose(answers, repeated, rtol=1e-3, atol=1e-6).all(axis=1)
    return float(1.0 - is_same.mean())


def _answers(
    policy: Policy, states: np.ndarray, masks: np.ndarray | None
) -> np.ndarray:
    if isinstance(policy, DiscretePolicy):
        return policy.probabilities(states, masks)
    return policy.sample(states, np.random.default_rng(0))


def _checked_starts(transitions: Transitions, initial_observations: Any) -> np.ndarray:
    """Given start states, converted to the dtype of the log's observations.

    Raises DataError.
    """
    starts = np.asarray(initial_observations)
    expected = transitions.observation_shape
    features = transitions.metadata.features
    if (
        features is not None
        and features.layout is not None
        and starts.dtype.kind in "biuf"
    ):
        starts = features.layout.encode_if_logged(
            starts, transitions.observations.dtype
        )
    shape = (len(initial_observations), *expected)
    has_shape = starts.dtype.kind in "biuf" and starts.shape == shape
    if not has_shape or not len(starts) or not np.isfinite(starts).all():
        raise DataError(
            f"initial states have shape {starts.shape} and dtype {starts.dtype}, or NaN"
            " among them; give finite numbers (E, …), each of the observations' shape"
            f" {expected}"
        )
    dtype = transitions.observations.dtype
    if dtype.kind == "f":
        return starts.astype(dtype)
    return starts


def _weigh(
    reader: Callable[[EvaluationProblem], PassOverRows], problem: EvaluationProblem
) -> RowSums:
    """Doubly robust sums of a part of the log."""
    return RowSums.of(problem, reader(problem).values)


@dataclass(frozen=True, eq=False)
class _ValuesAndSums(Sums):
    """Values and doubly robust sums of the same rows."""

    passed: PassOverRows
    sums: RowSums


def _read_and_weigh(reader: Any, problem: EvaluationProblem) -> _ValuesAndSums:
    """Values and doubly robust sums of a part of the log."""
    passed = reader(problem)
    return _ValuesAndSums(passed=passed, sums=RowSums.of(problem, passed.values))


@dataclass(frozen=True, eq=False)
class FirstPass(Sums):
    """What one pass over all rows says of a log, before any model."""

    facts: LogFacts
    structure: Structure


def first_pass_of(part: LogPart, gamma: float) -> FirstPass:
    """Facts and structure of a part of a log that consists of whole units."""
    return FirstPass(
        facts=log_facts(part, gamma=gamma),
        structure=Structure.of(log=part.transitions, units=part.units),
    )
