"""``koffline.improve``: from a log to a better policy with a certificate; the file
reads from top to bottom.

Split whole units in three. Learn a clone of the behavior policy and a portfolio of
candidates from the first part. Value every candidate, mixed with the clone at several
shares, on the second part. Certify the few best by lower bound on the third part, which
took no part in learning or choosing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from koffline.config import EvaluationSettings
from koffline.data.disk.log import AnyLog
from koffline.data.sources import LogMapping, LogSource, open_log_by
from koffline.data.spaces import SpaceRequest
from koffline.data.transitions import Transitions
from koffline.data.units import sample_units
from koffline.errors import ConfigError, KofflineError
from koffline.improvement.certificate import (
    Certificate,
    certificate_from,
    certify,
    certify_cost,
)
from koffline.improvement.clone import Clone, fit_clone
from koffline.improvement.constraint import Constraint, CostLogs, parse_constraint
from koffline.improvement.differences import Differences, differences
from koffline.improvement.keeping import why_keep
from koffline.improvement.large_logs import parts_of
from koffline.improvement.mixtures import mixture_of, name_of, policy_of
from koffline.improvement.portfolio import (
    CandidateSpec,
    TrainingPart,
    specs_for,
    steps_for,
    train_candidate,
)
from koffline.improvement.results import MARKER, Candidate, Improvement
from koffline.improvement.scaling import Scaling
from koffline.improvement.screening import LEVEL, ShareScore, screen
from koffline.improvement.settings import (
    ImproveSettings,
    make_improve_settings,
    seconds_of,
)
from koffline.improvement.splitting import CERTIFY, CHOOSE, TRAIN, LogParts, n_units
from koffline.improvement.work import check_same_search, work_folder
from koffline.jobs import Job, run_jobs
from koffline.ope.evaluation import merge_settings
from koffline.ope.groups import By, GroupValue, GroupValues
from koffline.ope.names import BOOTSTRAP
from koffline.ope.results import Interval, Verdict, describe_log
from koffline.ope.stream_settings import StreamSettings
from koffline.ope.workspace import SharedByPolicies
from koffline.policies import (
    Mixture,
    MixturePart,
    Policy,
    read_mixture,
    save_mixture_policy,
)
from koffline.store.files import write_text
from koffline.store.run_record import check_results
from koffline.untrusted.limits import read_json

Tell = Callable[..., Any]
_CLONE = "clone"
# of a budget; the rest is for choosing and certifying
_OF_BUDGET = 0.4
_MOST_OF_ONE = 2  # finalists that are mixtures of the same candidate


def improve(  # noqa: PLR0913
    log: LogSource,
    *,
    gamma: float | None = None,
    mapping: LogMapping = None,
    action_space: SpaceRequest | None = None,
    seed: int = 0,
    level: float = 0.95,
    budget: str | float | None = None,
    cores: int | None = None,
    ray: str | None = None,
    by: By | None = None,
    constraint: str | Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    force: bool = False,
    progress: Tell | None = None,
    settings: ImproveSettings | Mapping[str, Any] | None = None,
    stream: StreamSettings | None = None,
) -> Improvement:
    """Find a policy that is certified to be worth more than the one that wrote the
    log, or say why to keep that one.

    A policy that is truly worse is recommended with a probability of at most 1 −
    level, as far as intervals have their level. log, gamma, mapping, action_space, by,
    stream: as in `koffline.evaluate`. level: of the lower ends of all finalists
    together. budget: time for the search, as in "10m" or "1h"; candidates that it does
    not reach are left out. cores, ray: where candidates are trained, side by side.
    constraint: "COLUMN <= X", for a table with a mapping: the discounted sum of that
    column is certified to be at most X; or a mapping with the keys name, costs (one
    for each row) and at_most. out: a folder that gets the policy, the report and a
    model card; what is done before an interrupt stays beside it, and ``resume`` goes on
    there. force: replace earlier results in ``out``. progress: called with the number
    done, all, and a note. settings: an `ImproveSettings`, or a mapping with some of its
    fields. Raises KofflineError in one line.
    """
    if out is not None:
        check_results(Path(out), force, MARKER)
    with work_folder(out, resume) as folder:
        result = search_better(
            log,
            folder,
            gamma=gamma,
            mapping=mapping,
            action_space=action_space,
            seed=seed,
            level=level,
            budget=budget,
            cores=cores,
            ray=ray,
            by=by,
            constraint=constraint,
            progress=progress,
            settings=settings,
            stream=stream,
        )
        if out is not None:
            result.report(out, force)
    return result


def search_better(  # noqa: PLR0913
    log: LogSource,
    folder: Path,
    *,
    gamma: float | None = None,
    mapping: LogMapping = None,
    action_space: SpaceRequest | None = None,
    seed: int = 0,
    level: float = 0.95,
    budget: str | float | None = None,
    cores: int | None = None,
    ray: str | None = None,
    by: By | None = None,
    constraint: str | Mapping[str, Any] | None = None,
    progress: Tell | None = None,
    settings: ImproveSettings | Mapping[str, Any] | None = None,
    stream: StreamSettings | None = None,
) -> Improvement:
    """`improve` that keeps what is done in ``folder``, and goes on with what is
    there.
    """
    started = time.perf_counter()
    chosen = make_improve_settings(settings)
    seconds = seconds_of(budget)
    limit = parse_constraint(constraint)
    opened, by = open_log_by(log, action_space, mapping, by)
    evaluation = merge_settings(
        opened, None, {"gamma": gamma, "level": level, "seed": seed, "cores": cores}
    )
    check_same_search(
        folder,
        {
            "data": opened.sha256,
            "gamma": evaluation.gamma,
            "level": level,
            "seed": seed,
            "constraint": None if limit is None else limit.text,
            "by": _name_of_groups(by),
            "settings": chosen.model_dump(mode="json"),
        },
    )
    parts = parts_of(opened, seed, folder)
    cost_logs = None
    if limit is not None:
        costs = limit.costs_of(opened, log, action_space, mapping)
        cost_logs = CostLogs.of(parts, opened, costs)
    search = Search(
        log=opened,
        parts=parts,
        settings=chosen,
        evaluation=evaluation,
        folder=folder,
        deadline=None if seconds is None else time.time() + _OF_BUDGET * seconds,
        stream=stream,
        tell=progress or _tell_nobody,
        place=(cores or 1, ray),
        by=_labels_of_part(by, parts),
        limit=limit,
        cost_logs=cost_logs,
    )
    trained = search.train()
    scored = search.choose(trained)
    at_most = None if limit is None else limit.at_most
    finalists = choose_finalists(scored, chosen.finalists, at_most)
    certificates = search.certify(finalists, trained)
    return _result(search, trained, scored, certificates, started)


def _tell_nobody(*_: Any) -> None:
    """Progress that nobody follows."""


def _labels_of_part(by: By | None, parts: LogParts) -> By | None:
    """Groups of the certify part: labels are of all episodes of the log."""
    if not isinstance(by, Mapping):
        return by
    return {name: parts.of_certified(labels) for name, labels in by.items()}


@dataclass(frozen=True, eq=False)
class Trained:
    """Candidates that were trained, by name; ``clone``; ``dropped``: why others were
    not.
    """

    clone: Clone
    candidates: dict[str, MixturePart]
    dropped: dict[str, str]


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
        """The clone, and every candidate of the portfolio that can be trained.

        Raises KofflineError if none can.
        """
        rows = sample_units(
            self.parts.train, self.settings.training_rows, self.evaluation.seed
        ).transitions
        gamma = self.evaluation.gamma
        scaling = Scaling.of(rows, gamma)
        self.tell(0, None, "learning the behavior policy")
        clone = self._clone(rows, scaling)
        part = TrainingPart(rows, scaling.scaled_log(rows), scaling, clone, gamma)
        specs = _wanted(specs_for(rows), self.settings.candidates)
        steps = self.settings.training_steps or steps_for(len(rows))
        jobs = [
            Job(
                name=spec.name,
                call=_train_job,
                arguments=(spec, part, steps, self._seed_of(spec.name), self.deadline),
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
        if not candidates:
            reasons = "; ".join(f"{name}: {why}" for name, why in dropped.items())
            raise KofflineError(f"no candidate could be trained ({reasons})")
        return Trained(clone, candidates, dropped)

    def choose(self, trained: Trained) -> list[Scored]:
        """Scores of all candidates at all shares, on the part to choose on."""
        log = self.parts.choose
        clone = policy_of(
            mixture_of(trained.clone, trained.clone.part, 1.0), _CLONE, log
        )
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
                        None if self.cost_logs is None else self.cost_logs.choose,
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
        scaling = Scaling.of(self.parts.train, self.evaluation.gamma)
        return differences(policy, present, rows, scaling, self.evaluation.seed)

    def _clone(self, rows: Transitions, scaling: Scaling) -> Clone:
        path = self.folder / f"{_CLONE}.npz"
        if not _is_mixture(path):
            clone = fit_clone(rows, scaling, self.evaluation.seed)
            path.parent.mkdir(parents=True, exist_ok=True)
            save_mixture_policy(path, Mixture((clone.part, clone.mode), (1.0, 0.0)))
        part, mode = read_mixture(path).parts
        layers = list(zip(part.network.weights, part.network.biases, strict=True))
        return Clone(part, mode, layers)

    def _seed_of(self, name: str) -> int:
        """A seed that depends on the search's and on the candidate's name alone."""
        return (zlib.crc32(name.encode()) ^ self.evaluation.seed) % 2**31

    def _run(self, jobs: Sequence[Job], what: str) -> dict[str, KofflineError]:
        """Run the jobs that have no result yet; the errors by name."""
        workers, ray = self.place
        return run_jobs(
            jobs, workers, ray, progress=self._report(what), keep_going=True
        )

    def _report(self, what: str) -> Tell:
        def report(done: int, total: int, running: str = "") -> None:
            self.tell(done, total, f"{what} {running}".rstrip())

        return report


def choose_finalists(
    scored: Sequence[Scored], count: int, at_most: float | None = None
) -> list[Scored]:
    """The ``count`` mixtures of the largest lower ends, among those that seem better
    than the behavior policy and that the log supports; at most two of one candidate.

    at_most: bound of the costs, which finalists seem to keep.
    """
    ranked = sorted(scored, key=lambda item: -item.score.low)
    finalists: list[Scored] = []
    for item in ranked:
        of_same = [other for other in finalists if other.candidate == item.candidate]
        is_better = item.score.uplift > 0.0 and not item.score.refused
        if at_most is not None and item.score.cost is not None:
            is_better = is_better and item.score.cost <= at_most
        if is_better and len(of_same) < _MOST_OF_ONE and len(finalists) < count:
            finalists.append(item)
    return finalists


def _result(
    search: Search,
    trained: Trained,
    scored: Sequence[Scored],
    certificates: dict[str, Certificate],
    started: float,
) -> Improvement:
    """The result, from what every part of the log has said."""
    candidates = _candidates(search, trained, scored, certificates)
    passing = [item for item in candidates if item.certified]
    leading = max(
        (item for item in candidates if item.stage == CERTIFY),
        key=lambda item: (item.certified, _low_of(item)),
        default=None,
    )
    recommended = bool(passing)
    units = n_units(search.parts.certify)
    reason = None
    if not recommended:
        reason = why_keep(candidates, certificates, units, len(scored))
    fields: dict[str, Any] = {
        "value": None,
        "behavior_value": None,
        "uplift": None,
        "interval": None,
        "verdict": Verdict("", ()),
        "warnings": (),
    }
    if leading is None:
        assert reason is not None
        fields["verdict"] = reason.as_verdict()
    else:
        certificate = certificates[leading.name]
        fields |= {
            "value": certificate.value,
            "behavior_value": certificate.behavior_value,
            "uplift": certificate.uplift,
            "interval": certificate.interval,
            "verdict": certificate.verdict,
            "warnings": certificate.warnings,
        }
    about = describe_log(search.log, search.evaluation.seed, started)
    about["notes"] = (*about["notes"], *search.parts.notes)
    policy = None
    mixture = None
    name = None
    changes = None
    groups: tuple[GroupValue, ...] = ()
    if leading is not None and recommended:
        name = leading.name
        policy = leading.policy
        by_name = {item.name: item for item in scored}
        mixture = search.mixture(by_name[name], trained)
        groups = certificates[name].groups
        changes = search.differences(policy, trained)
    cost: dict[str, Any] | None = None
    if search.limit is not None:
        cost = {"constraint": search.limit.text, "value": None, "high": None}
        of_leading = None
        if leading is not None:
            of_leading = certificates[leading.name].cost
        if of_leading is not None:
            cost |= {"value": of_leading.value, "high": of_leading.high}
    return Improvement(
        recommended=recommended,
        name=name,
        reason=reason,
        level=search.evaluation.level,
        candidates=tuple(candidates),
        dropped=tuple(
            {"name": name, "reason": why} for name, why in trained.dropped.items()
        ),
        parts=_sizes(search.parts),
        policy=policy,
        mixture=mixture,
        differences=changes,
        by=_name_of_groups(search.by),
        groups=GroupValues(groups),
        constraint=cost,
        gamma=search.evaluation.gamma,
        settings=search.settings.model_dump(mode="json"),
        **fields,
        **about,
    )


def _name_of_groups(by: By | None) -> str | None:
    """The name of a grouping."""
    if by is None:
        return None
    if isinstance(by, Mapping):
        return str(next(iter(by)))
    return str(by)


def _low_of(candidate: Candidate) -> float:
    if candidate.interval is None:
        return -float("inf")
    return candidate.interval.low


def _candidates(
    search: Search,
    trained: Trained,
    scored: Sequence[Scored],
    certificates: dict[str, Certificate],
) -> list[Candidate]:
    """All mixtures that were tried: finalists first, the largest lower end on top."""
    finalists = []
    others = []
    for item in scored:
        policy = search.policy(item, trained)
        certificate = certificates.get(item.name)
        score = item.score
        if certificate is not None:
            finalists.append(
                Candidate(
                    name=item.name,
                    share=score.share,
                    stage=CERTIFY,
                    value=certificate.value,
                    uplift=certificate.uplift,
                    interval=certificate.interval,
                    certified=certificate.passes,
                    note=certificate.why_not or "",
                    chosen_by=score.low,
                    policy=policy,
                )
            )
            continue
        others.append(
            Candidate(
                name=item.name,
                share=score.share,
                stage=CHOOSE,
                value=score.value,
                uplift=score.uplift,
                interval=Interval(score.low, score.high, LEVEL, BOOTSTRAP),
                note=score.refused,
                chosen_by=score.low,
                policy=policy,
            )
        )
    finalists.sort(key=lambda item: (not item.certified, -_low_of(item)))
    others.sort(key=lambda item: -_low_of(item))
    return [*finalists, *others]


def _sizes(parts: LogParts) -> dict[str, dict[str, int]]:
    """Rows and units of each part."""
    named = {TRAIN: parts.train, CHOOSE: parts.choose, CERTIFY: parts.certify}
    return {
        name: {"rows": len(part), "units": n_units(part)}
        for name, part in named.items()
    }


def _wanted(
    specs: Sequence[CandidateSpec], names: Sequence[str] | None
) -> list[CandidateSpec]:
    """The candidates whose names begin with one of ``names``; all for None.

    Raises ConfigError for a name that fits none.
    """
    if names is None:
        return list(specs)
    for name in names:
        if not any(spec.name.startswith(name) for spec in specs):
            known = ", ".join(spec.name for spec in specs)
            raise ConfigError(f"there is no candidate '{name}'; known are {known}")
    return [spec for spec in specs if spec.name.startswith(tuple(names))]


def _train_job(
    path: Path,
    spec: CandidateSpec,
    part: TrainingPart,
    steps: int,
    seed: int,
    deadline: float | None,
) -> None:
    """Train a candidate and write its network. Raises KofflineError."""
    if deadline is not None and time.time() > deadline:
        raise KofflineError("the budget was used up before its training")
    candidate = train_candidate(spec, part, steps, seed)
    save_mixture_policy(path, Mixture((candidate,), (1.0,)))


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
