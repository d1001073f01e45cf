"""The steps of a search, each of which keeps its results as files: train, choose,
certify.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from koffline.config import EvaluationSettings
from koffline.data.disk.log import AnyLog
from koffline.data.transitions import Transitions
from koffline.data.units import sample_units
from koffline.errors import ConfigError, KofflineError, listed
from koffline.improvement.budget import (
    NOT_REACHED,
    Unreached,
    note_seconds,
    unreached,
)
from koffline.improvement.certificate import (
    Certificate,
    certificate_from,
    certify,
    certify_cost,
)
from koffline.improvement.clone import Clone, fit_clone
from koffline.improvement.constraint import Constraint, CostLogs
from koffline.improvement.differences import Differences, differences
from koffline.improvement.logged_probabilities import contradictions
from koffline.improvement.mixing import mixture_of, name_of, policy_of
from koffline.improvement.parts import CERTIFY, LogParts
from koffline.improvement.portfolio import (
    CandidateSpec,
    TrainingPart,
    specs_for,
    steps_for,
    train_candidate,
)
from koffline.improvement.scaling import LogScaling
from koffline.improvement.screening import SharedByCandidates, ShareScore, screen
from koffline.improvement.settings import (
    ImproveSettings,
)
from koffline.jobs import Job, run_jobs
from koffline.ope.groups import By
from koffline.ope.stream_settings import StreamSettings
from koffline.ope.value_functions import counted_rows
from koffline.policies import (
    Mixture,
    MixturePart,
    Policy,
    read_mixture,
    save_mixture_policy,
)
from koffline.policies.base import TrainingRows
from koffline.store.files import write_text
from koffline.untrusted.limits import read_json

Tell = Callable[..., Any]
CLONE = "clone"
_MOST_OF_ONE = 1  # finalists that are mixtures of the same candidate
_FINALISTS = "finalists.json"
_FINGERPRINTS = 1024  # of rows, by which a policy is known to have seen them


@dataclass(frozen=True, eq=False)
class Trained:
    """Candidates that were trained, by name; ``clone``; ``dropped``: why others were
    not; ``unreached``: which of these for lack of time.
    """

    clone: Clone
    candidates: dict[str, MixturePart]
    dropped: dict[str, str]
    unreached: Unreached | None = None


@dataclass(frozen=True)
class Scored:
    """A candidate at a share, with its score on the part to choose on."""

    candidate: str
    score: ShareScore

    @property
    def name(self) -> str:
        """The name of the mixture."""
        return name_of(self.candidate, self.score.share)


@dataclass(frozen=True, eq=False)
class TrainingPlan:
    """The clone, and the jobs that train candidates, by the candidates' names.

    ``missing``: of names that the budget did not reach, what would reach them.
    """

    clone: Clone
    planned: dict[str, Job]
    missing: Callable[[Sequence[str]], Unreached]

    @property
    def jobs(self) -> list[Job]:
        """The jobs, the most promising candidates first."""
        return list(self.planned.values())

    def trained(self, failures: Mapping[str, KofflineError]) -> Trained:
        """What the jobs have trained. failures: of jobs, by their names."""
        candidates = {}
        dropped = {}
        for name, job in self.planned.items():
            if job.done:
                candidates[name] = read_mixture(job.path).parts[0]
            elif job.name in failures:
                dropped[name] = str(failures[job.name])
        late = [name for name, why in dropped.items() if NOT_REACHED in why]
        if not late:
            return Trained(self.clone, candidates, dropped)
        missing = self.missing(late)
        dropped.update(dict.fromkeys(late, missing.text))
        return Trained(self.clone, candidates, dropped, missing)


@dataclass(frozen=True, eq=False)
class ChoosingPlan:
    """The jobs that score candidates, by the candidates' names."""

    planned: dict[str, Job]

    @property
    def jobs(self) -> list[Job]:
        """The jobs, in the order of the candidates."""
        return list(self.planned.values())

    def scored(
        self, failures: Mapping[str, KofflineError], trained: Trained
    ) -> list[Scored]:
        """What the jobs have scored; what failed is dropped from the trained ones.

        failures: of jobs, by their names.
        """
        scored = []
        for name, job in self.planned.items():
            if job.name in failures:
                trained.dropped[name] = str(failures[job.name])
            if job.done:
                for content in read_json(job.path):
                    scored.append(Scored(name, ShareScore(**content)))
        return scored


@dataclass(frozen=True, eq=False)
class Search:
    """One search: parts of a log, settings, and the folder that keeps what is done.

    ``place``: workers and Ray address of the trainings. ``by``: groups of the certify
    part. ``cost_logs``: with what ``limit`` limits in place of rewards. ``label``: what
    the names of jobs begin with, as "fold 2: ".
    """

    log: AnyLog
    parts: LogParts
    settings: ImproveSettings
    evaluation: EvaluationSettings
    folder: Path
    deadline: float | None
    stream: StreamSettings | None
    tell: Tell
    place: tuple[int, str | None] = (1, None)
    by: By | None = None
    limit: Constraint | None = None
    cost_logs: CostLogs | None = None
    label: str = ""

    @property
    def most_cost(self) -> float | None:
        """What the second return may be at most; None without a constraint."""
        if self.limit is None:
            return None
        return self.limit.at_most

    def train(self) -> Trained:
        """The clone, and every candidate of the portfolio that can be trained and that
        the budget reaches.

        Raises KofflineError if none can be trained, whatever the budget.
        """
        training = self.training()
        trained = training.trained(self.run(training.jobs, "training"))
        if not trained.candidates and trained.unreached is None:
            raise nothing_trained(trained.dropped)
        return trained

    def training(self) -> TrainingPlan:
        """Learn the clone, and plan the training of every candidate."""
        rows = sample_units(
            self.parts.train, self.settings.training_rows, self.evaluation.seed
        ).transitions
        gamma = self.evaluation.gamma
        scaling = LogScaling.of(rows, gamma)
        self.tell(0, None, f"{self.label}learning the behavior policy")
        clone = self._clone(rows, scaling)
        part = TrainingPart(rows, scaling.scaled_log(rows), scaling, clone, gamma)
        specs = wanted_specs(rows, self.settings.candidates)
        steps = self.settings.training_steps or steps_for(len(rows))
        planned = {}
        for spec in specs:
            planned[spec.name] = Job(
                name=f"{self.label}{spec.name}",
                call=_train_job,
                arguments=(
                    self.folder,
                    spec,
                    part,
                    steps,
                    self._seed_of(spec.name),
                    self.deadline,
                ),
                path=self.folder / "candidates" / f"{spec.name}.npz",
                is_valid=_is_mixture,
            )
        missing = partial(
            unreached,
            folder=self.folder,
            clone=CLONE,
            specs=specs,
            steps=steps,
            workers=self.place[0],
        )
        return TrainingPlan(clone, planned, missing)

    def choose(self, trained: Trained) -> list[Scored]:
        """Scores of all candidates at all shares, on the part to choose on."""
        choosing = self.choosing(trained)
        return choosing.scored(self.run(choosing.jobs, "choosing"), trained)

    def choosing(self, trained: Trained) -> ChoosingPlan:
        """Plan the scores of all candidates, on the part to choose on."""
        log = self.parts.choose
        clone = policy_of(
            mixture_of(trained.clone, trained.clone.part, 1.0), CLONE, log
        )
        cost_log = None
        if self.cost_logs is not None:
            cost_log = self.cost_logs.choose
        shared = SharedByCandidates()
        planned = {}
        for name, candidate in trained.candidates.items():
            policy = policy_of(Mixture((candidate,), (1.0,)), name, log)
            planned[name] = Job(
                name=f"{self.label}{name}",
                call=_choose_job,
                arguments=(
                    log,
                    policy,
                    clone,
                    self.evaluation,
                    self.settings,
                    cost_log,
                    shared,
                ),
                path=self.folder / "choose" / f"{name}.json",
                is_valid=_is_json,
            )
        return ChoosingPlan(planned)

    def keep_finalists(self, finalists: Sequence[Scored]) -> list[Scored]:
        """The finalists, or those of an interrupted search that has begun to certify.

        Others than those would be a second look at the certify part.
        """
        path = self.folder / _FINALISTS
        path.parent.mkdir(parents=True, exist_ok=True)
        if _is_json(path):
            return [
                Scored(item["candidate"], ShareScore(**item["score"]))
                for item in read_json(path)
            ]
        if not finalists:
            return []  # the certify part is not looked at
        content = [dataclasses.asdict(item) for item in finalists]
        write_text(path, json.dumps(content, indent=1))
        return list(finalists)

    def certify(
        self, finalists: Sequence[Scored], trained: Trained
    ) -> dict[str, Certificate]:
        """Certificates of the finalists by the names of their mixtures."""
        policies = {}
        for finalist in finalists:
            policies[finalist.name] = self.policy(finalist, trained)
        return self.certify_policies(policies, trained.dropped, len(policies))

    def certify_policies(
        self, policies: Mapping[str, Policy], dropped: dict[str, str], count: int
    ) -> dict[str, Certificate]:
        """Certificates of policies by their names, with lower ends that hold for
        ``count`` policies together.

        dropped: gets why a policy could not be evaluated.
        """
        shared = SharedByCandidates()
        rows = self.log
        if not isinstance(rows, Transitions):
            rows = self.parts.choose
        contradicted = contradictions(rows)
        settings = self.evaluation.model_copy(
            update={
                "steps": self.settings.certifying_steps,
                "full_replicas": self.settings.full_replicas,
                "resampled_replicas": self.settings.resampled_replicas,
            }
        )
        certificates = {}
        for number, (name, policy) in enumerate(policies.items()):
            path = self.folder / CERTIFY / f"{name}.json"
            if not _is_json(path):
                self.tell(number, len(policies), f"{self.label}certifying {name}")
                try:
                    certificate = self._certificate(policy, count, settings, shared)
                    certificate = certificate.doubting(contradicted)
                except ConfigError:
                    raise
                except KofflineError as error:
                    dropped[name] = str(error)
                    continue
                path.parent.mkdir(parents=True, exist_ok=True)
                write_text(path, json.dumps(certificate.as_dict(), indent=1))
            certificates[name] = certificate_from(read_json(path))
        return certificates

    def _certificate(
        self,
        policy: Policy,
        count: int,
        settings: EvaluationSettings,
        shared: SharedByCandidates,
    ) -> Certificate:
        """The certificate of one of ``count`` policies, with its constraint."""
        certificate = certify(
            self.parts.certify,
            policy,
            count,
            settings,
            shared.rewards,
            stream=self.stream,
            by=self.by,
        )
        if self.cost_logs is None or self.limit is None:
            return certificate
        cost = certify_cost(
            self.cost_logs.certify, policy, count, settings, shared.costs
        )
        return dataclasses.replace(
            certificate, cost=cost, cost_limit=self.limit.at_most
        )

    def mixture(self, scored: Scored, trained: Trained) -> Mixture:
        """The mixture of a candidate at a share."""
        return mixture_of(
            trained.clone, trained.candidates[scored.candidate], scored.score.share
        )

    def policy(self, scored: Scored, trained: Trained) -> Policy:
        """The mixture as a policy for the log."""
        mixture = self.mixture(scored, trained)
        return policy_of(mixture, scored.name, self.parts.choose)

    def differences(self, policy: Policy | None, trained: Trained) -> Differences:
        """Where a policy acts differently from the clone, in states of the log."""
        assert policy is not None
        rows = self.parts.choose
        if isinstance(self.parts.certify, Transitions):
            rows = self.parts.certify
        present = policy_of(Mixture((trained.clone.part,), (1.0,)), CLONE, rows)
        scaling = LogScaling.of(self.parts.train, self.evaluation.gamma)
        return differences(policy, present, rows, scaling, self.evaluation.seed)

    def training_rows(self) -> TrainingRows:
        """The rows from which policies were learnt and on which they were chosen."""
        return fingerprints_of([self.parts.train, self.parts.choose], self.log.sha256)

    def _clone(self, rows: Transitions, scaling: LogScaling) -> Clone:
        path = self.folder / f"{CLONE}.npz"
        if not _is_mixture(path):
            clone = fit_clone(rows, scaling, self.evaluation.seed)
            note_seconds(self.folder, CLONE, clone.step_seconds or 0.0)
            path.parent.mkdir(parents=True, exist_ok=True)
            save_mixture_policy(path, Mixture((clone.part, clone.mode), (1.0, 0.0)))
        part, mode = read_mixture(path).parts
        layers = list(zip(part.network.weights, part.network.biases, strict=True))
        return Clone(part, mode, layers)

    def _seed_of(self, name: str) -> int:
        """A seed that depends on the search's and on the candidate's name alone."""
        return (zlib.crc32(name.encode()) ^ self.evaluation.seed) % 2**31

    def run(self, jobs: Sequence[Job], stage: str) -> dict[str, KofflineError]:
        """Run the jobs that have no result yet; the errors by the jobs' names."""
        workers, ray = self.place
        return run_jobs(
            jobs, workers, ray, progress=self._report(stage), keep_going=True
        )

    def _report(self, stage: str) -> Tell:
        def report(done: int, total: int, running: str = "") -> None:
            self.tell(done, total, f"{stage} {running}".rstrip())

        return report


def fingerprints_of(logs: Sequence[Transitions], sha256: str) -> TrainingRows:
    """The rows of these logs as rows that a policy has seen. sha256: of the whole log."""
    seen = [counted_rows(log) for log in logs]
    fingerprints = np.sort(np.concatenate(seen))[:_FINGERPRINTS]
    return TrainingRows(sha256=sha256, fingerprints=fingerprints)


def nothing_trained(dropped: dict[str, str]) -> KofflineError:
    """The error of a search without a single candidate. dropped: why, by name."""
    return KofflineError(f"no candidate could be trained: {_in_groups(dropped)}")


def first_failure(dropped: Mapping[str, str]) -> str:
    """Why the first candidate could not be trained or valued, but for lack of time;
    empty if there is none. dropped: reasons by name.
    """
    for why in dropped.values():
        if NOT_REACHED not in why:
            return why
    return ""


def _in_groups(reasons: dict[str, str]) -> str:
    """Reasons by name as one clause, each reason once with the names it is of."""
    names: dict[str, list[str]] = {}
    for name, why in reasons.items():
        names.setdefault(why, []).append(name)
    return "; ".join(f"{why} ({listed(group, 3)})" for why, group in names.items())


def choose_finalists(
    scored: Sequence[Scored], count: int, at_most: float | None = None
) -> list[Scored]:
    """The ``count`` mixtures of the largest lower ends, among those that seem better
    than the behavior policy and that the log supports; of a candidate only the best
    share.

    at_most: bound of the costs, which finalists seem to keep.
    """
    ranked = sorted(scored, key=lambda item: -item.score.low)
    finalists: list[Scored] = []
    for item in ranked:
        of_same = [rival for rival in finalists if rival.candidate == item.candidate]
        may_be_better = item.score.seems_better and item.score.keeps(at_most)
        if may_be_better and len(of_same) < _MOST_OF_ONE and len(finalists) < count:
            finalists.append(item)
    return finalists


def wanted_specs(log: AnyLog, names: Sequence[str] | None) -> list[CandidateSpec]:
    """The candidates for a log whose names begin with one of ``names``; all for None.

    Raises ConfigError for a name that fits none.
    """
    specs = specs_for(log)
    if names is None:
        return list(specs)
    for name in names:
        if not any(spec.name.startswith(name) for spec in specs):
            known = ", ".join(spec.name for spec in specs)
            raise ConfigError(f"there is no candidate '{name}'; known are {known}")
    return [spec for spec in specs if spec.name.startswith(tuple(names))]


def _train_job(
    path: Path,
    folder: Path,
    spec: CandidateSpec,
    part: TrainingPart,
    steps: int,
    seed: int,
    deadline: float | None,
) -> None:
    """Train a candidate and write its network; of one that takes no time, whatever
    the deadline. Raises KofflineError.

    folder: of the search.
    """
    if spec.work and deadline is not None and time.time() > deadline:
        raise KofflineError(NOT_REACHED)
    started = time.perf_counter()
    candidate = train_candidate(spec, part, steps, seed)
    save_mixture_policy(path, Mixture((candidate,), (1.0,)))
    note_seconds(folder, spec.name, time.perf_counter() - started)


def _choose_job(
    path: Path,
    log: Transitions,
    policy: Policy,
    clone: Policy,
    evaluation: EvaluationSettings,
    settings: ImproveSettings,
    cost_log: Transitions | None,
    shared: SharedByCandidates,
) -> None:
    """Score a candidate at every share and write the scores. Raises KofflineError.

    shared: with the candidates that are scored in the same process.
    """
    scores = screen(log, policy, clone, evaluation, settings, cost_log, shared)
    content = [dataclasses.asdict(score) for score in scores]
    write_text(path, json.dumps(content, indent=1))


def _is_mixture(path: Path) -> bool:
    """Whether a file holds a mixture."""
    if not path.is_file():
        return False
    with contextlib.suppress(KofflineError):
        read_mixture(path)
        return True
    return False


def _is_json(path: Path) -> bool:
    """Whether a file holds JSON."""
    if not path.is_file():
        return False
    with contextlib.suppress(OSError, ValueError, KofflineError):
        read_json(path)
        return True
    return False
