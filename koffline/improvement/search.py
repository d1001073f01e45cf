"""The steps of a search, each of which keeps its results as files: train, choose,
certify.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
from koffline.improvement.screening import ShareScore, screen
from koffline.improvement.settings import (
    ImproveSettings,
)
from koffline.jobs import Job, run_jobs
from koffline.ope.groups import By
from koffline.ope.stream_settings import StreamSettings
from koffline.ope.value_functions import counted_rows
from koffline.ope.workspace import SharedByPolicies
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
_CLONE = "clone"
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
class Search:
    """One search: parts of a log, settings, and the folder that keeps what is done.

    ``place``: workers and Ray address of the trainings. ``by``: groups of the certify
    part. ``cost_logs``: with what ``limit`` limits in place of rewards.
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

    def train(self) -> Trained:
        """The clone, and every candidate of the portfolio that can be trained and that
        the budget reaches.

        Raises KofflineError if none can be trained, whatever the budget.
        """
        rows = sample_units(
            self.parts.train, self.settings.training_rows, self.evaluation.seed
        ).transitions
        gamma = self.evaluation.gamma
        scaling = LogScaling.of(rows, gamma)
        self.tell(0, None, "learning the behavior policy")
        clone = self._clone(rows, scaling)
        part = TrainingPart(rows, scaling.scaled_log(rows), scaling, clone, gamma)
        specs = wanted_specs(rows, self.settings.candidates)
        steps = self.settings.training_steps or steps_for(len(rows))
        jobs = [
            Job(
                name=spec.name,
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
            for spec in specs
        ]
        failures = self._run(jobs, "training")
        candidates = {
            job.name: read_mixture(job.path).parts[0] for job in jobs if job.done
        }
        dropped = {name: str(error) for name, error in failures.items()}
        late = [name for name, why in dropped.items() if NOT_REACHED in why]
        if late:
            missing = unreached(self.folder, _CLONE, specs, late, steps, self.place[0])
            dropped.update(dict.fromkeys(late, missing.text))
            return Trained(clone, candidates, dropped, missing)
        if not candidates:
            raise KofflineError(f"no candidate could be trained: {_in_groups(dropped)}")
        return Trained(clone, candidates, dropped)

    def choose(self, trained: Trained) -> list[Scored]:
        """Scores of all candidates at all shares, on the part to choose on."""
        log = self.parts.choose
        clone = policy_of(
            mixture_of(trained.clone, trained.clone.part, 1.0), _CLONE, log
        )
        cost_log = None
        if self.cost_logs is not None:
            cost_log = self.cost_logs.choose
        jobs = []
        for name, candidate in trained.candidates.items():
            policy = policy_of(Mixture((candidate,), (1.0,)), name, log)
            jobs.append(
                Job(
                    name=name,
                    call=_choose_job,
                    arguments=(
                        log,
                        policy,
                        clone,
                        self.evaluation,
                        self.settings,
                        cost_log,
                    ),
                    path=self.folder / "choose" / f"{name}.json",
                    is_valid=_is_json,
                )
            )
        failures = self._run(jobs, "choosing")
        trained.dropped.update({name: str(why) for name, why in failures.items()})
        scored = []
        for job in jobs:
            if job.done:
                for content in read_json(job.path):
                    scored.append(Scored(job.name, ShareScore(**content)))
        return scored

    def keep_finalists(self, finalists: Sequence[Scored]) -> list[Scored]:
        """The finalists, or those of an interrupted search that has begun to certify.

        Others than those would be a second look at the certify part.
        """
        path = self.folder / _FINALISTS
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
        shared = SharedByPolicies()
        settings = self.evaluation.model_copy(
            update={
                "steps": self.settings.certifying_steps,
                "full_replicas": self.settings.full_replicas,
                "resampled_replicas": self.settings.resampled_replicas,
            }
        )
        certificates = {}
        for number, finalist in enumerate(finalists):
            path = self.folder / CERTIFY / f"{finalist.name}.json"
            if not _is_json(path):
                self.tell(number, len(finalists), f"certifying {finalist.name}")
                try:
                    certificate = self._certificate(
                        finalist, trained, len(finalists), settings, shared
                    )
                except ConfigError:
                    raise
                except KofflineError as error:
                    trained.dropped[finalist.name] = str(error)
                    continue
                path.parent.mkdir(parents=True, exist_ok=True)
                write_text(path, json.dumps(certificate.as_dict(), indent=1))
            certificates[finalist.name] = certificate_from(read_json(path))
        return certificates

    def _certificate(
        self,
        finalist: Scored,
        trained: Trained,
        count: int,
        settings: EvaluationSettings,
        shared: SharedByPolicies,
    ) -> Certificate:
        """The certificate of one of ``count`` finalists, with its constraint."""
        policy = self.policy(finalist, trained)
        certificate = certify(
            self.parts.certify,
            policy,
            count,
            settings,
            shared,
            stream=self.stream,
            by=self.by,
        )
        if self.cost_logs is None or self.limit is None:
            return certificate
        cost = certify_cost(self.cost_logs.certify, policy, count, settings)
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
        present = policy_of(Mixture((trained.clone.part,), (1.0,)), _CLONE, rows)
        scaling = LogScaling.of(self.parts.train, self.evaluation.gamma)
        return differences(policy, present, rows, scaling, self.evaluation.seed)

    def training_rows(self) -> TrainingRows:
        """The rows from which policies were learnt and on which they were chosen."""
        seen = [counted_rows(self.parts.train), counted_rows(self.parts.choose)]
        fingerprints = np.sort(np.concatenate(seen))[:_FINGERPRINTS]
        return TrainingRows(sha256=self.log.sha256, fingerprints=fingerprints)

    def _clone(self, rows: Transitions, scaling: LogScaling) -> Clone:
        path = self.folder / f"{_CLONE}.npz"
        if not _is_mixture(path):
            clone = fit_clone(rows, scaling, self.evaluation.seed)
            note_seconds(self.folder, _CLONE, clone.step_seconds or 0.0)
            path.parent.mkdir(parents=True, exist_ok=True)
            save_mixture_policy(path, Mixture((clone.part, clone.mode), (1.0, 0.0)))
        part, mode = read_mixture(path).parts
        layers = list(zip(part.network.weights, part.network.biases, strict=True))
        return Clone(part, mode, layers)

    def _seed_of(self, name: str) -> int:
        """A seed that depends on the search's and on the candidate's name alone."""
        return (zlib.crc32(name.encode()) ^ self.evaluation.seed) % 2**31

    def _run(self, jobs: Sequence[Job], stage: str) -> dict[str, KofflineError]:
        """Run the jobs that have no result yet; the errors by name."""
        workers, ray = self.place
        return run_jobs(
            jobs, workers, ray, progress=self._report(stage), keep_going=True
        )

    def _report(self, stage: str) -> Tell:
        def report(done: int, total: int, running: str = "") -> None:
            self.tell(done, total, f"{stage} {running}".rstrip())

        return report


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
        is_better = item.score.uplift > 0.0 and not item.score.refused
        if at_most is not None and item.score.cost is not None:
            is_better = is_better and item.score.cost <= at_most
        if is_better and len(of_same) < _MOST_OF_ONE and len(finalists) < count:
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
) -> None:
    """Score a candidate at every share and write the scores. Raises KofflineError."""
    scores = screen(log, policy, clone, evaluation, settings, cost_log)
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
