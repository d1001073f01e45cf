"""``koffline.improve``: from a log to a better policy with a certificate; the file
reads from top to bottom.

Split whole units in three. Learn a clone of the behavior policy and a portfolio of
candidates from the first part. Value every candidate, mixed with the clone at several
shares, on the second part. Certify the few best by lower bound on the third part, which
took no part in learning or choosing. (Small one-step logs do so in five folds:
`koffline.improvement.folds`.)
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from koffline.data.disk.log import AnyLog
from koffline.data.sources import LogMapping, LogSource, open_log_by
from koffline.data.spaces import SpaceRequest
from koffline.data.transitions import Transitions, check_without_masks
from koffline.errors import ConfigError, DataError, counted
from koffline.improvement.budget import SHARE_TO_TRAIN
from koffline.improvement.certificate import Certificate
from koffline.improvement.constraint import CostLogs, parse_constraint
from koffline.improvement.folds import folds_for, search_in_folds
from koffline.improvement.large_logs import check_held, held_if_small, parts_of
from koffline.improvement.outcome import MARKER, CandidatePolicy, Improvement
from koffline.improvement.parts import (
    CERTIFY,
    LogParts,
    count_units,
    sizes_of,
    split_in_folds,
)
from koffline.improvement.search import (
    Scored,
    Search,
    Tell,
    Trained,
    choose_finalists,
    first_failure,
    wanted_specs,
)
from koffline.improvement.search_findings import (
    Findings,
    Recommended,
    candidate_on_choose,
    improvement_of,
    low_of,
    name_of_groups,
)
from koffline.improvement.settings import (
    ImproveSettings,
    make_improve_settings,
    seconds_of,
)
from koffline.improvement.work import (
    begin_search,
    goes_on,
    keep_for_resume,
    work_folder,
)
from koffline.jobs import AUTOMATIC
from koffline.ope.evaluation import merge_settings
from koffline.ope.groups import By, check_groups
from koffline.ope.stream_settings import StreamSettings
from koffline.policies import save_mixture_policy
from koffline.shown_results import views
from koffline.store.files import check_place, check_target
from koffline.store.run_record import check_results


def improve(  # noqa: PLR0913
    log: LogSource,
    *,
    gamma: float | None = None,
    mapping: LogMapping = None,
    action_space: SpaceRequest | None = None,
    seed: int = 0,
    level: float = 0.95,
    budget: str | int | float | None = None,
    cores: int | str | None = None,
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
    level, as far as intervals have their level. Small one-step logs are searched in
    folds (`ImproveSettings.folds`), and the mixture of the folds' policies is certified
    on all rows. log, gamma, mapping, action_space, by,
    stream: as in `koffline.evaluate`. seed: of everything random; to try several and keep
    the best answer undoes the certainty. level: of the lower ends of all finalists
    together. budget: time for the search, as in "10m" or "1h"; candidates that it does
    not reach are left out and named; the clone and its likeliest action are always
    tried. cores, ray: where candidates are trained, side by side.
    constraint: "COLUMN <= X", for a table with a mapping: the discounted sum of that
    column is certified to be at most X; or a mapping with the keys name, costs (one
    for each row) and at_most. out: a folder that gets the policy, the report and a
    model card, or a page ending in .html, beside which the policy is written with the
    same name and the ending .npz; what is done before an interrupt stays beside it, and
    ``resume`` goes on there. force: replace earlier results in ``out``. progress: called with the number
    done, all, and a note. settings: an `ImproveSettings`, or a mapping with some of its
    fields. Raises KofflineError in one line.
    """
    policy_file = None
    if out is not None:
        check_place(out)
        out = Path(out).expanduser()
        policy_file = _check_out(out, force)
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
            resume=resume,
            progress=progress,
            settings=settings,
            stream=stream,
        )
        if out is not None:
            result.report(out, force)
        if policy_file is not None and result.mixture is not None:
            save_mixture_policy(policy_file, result.mixture)
    return result


def _check_out(out: Path, force: bool) -> Path | None:
    """The file of the policy beside a page; None for a folder. Raises DataError, before
    any work, if ``out`` is in use.
    """
    if out.is_dir() or not views().is_page(out):
        check_results(out, force, MARKER)
        return None
    policy_file = out.with_suffix(".npz")
    for place in (out, policy_file):
        if place.exists():
            check_target(place, force)
    return policy_file


def search_better(  # noqa: PLR0913
    log: LogSource,
    folder: Path,
    *,
    gamma: float | None = None,
    mapping: LogMapping = None,
    action_space: SpaceRequest | None = None,
    seed: int = 0,
    level: float = 0.95,
    budget: str | int | float | None = None,
    cores: int | str | None = None,
    ray: str | None = None,
    by: By | None = None,
    constraint: str | Mapping[str, Any] | None = None,
    resume: bool = False,
    progress: Tell | None = None,
    settings: ImproveSettings | Mapping[str, Any] | None = None,
    stream: StreamSettings | None = None,
) -> Improvement:
    """`improve` that keeps what is done in ``folder``, and with ``resume`` goes on with
    what is there.
    """
    started = time.perf_counter()
    chosen = make_improve_settings(settings)
    seconds = seconds_of(budget)
    limit = parse_constraint(constraint)
    if cores == AUTOMATIC:
        cores = None
    workers = 1
    if isinstance(cores, int):
        workers = cores
    opened, by = open_log_by(log, action_space, mapping, by)
    check_without_masks(opened, "the methods of improve")
    evaluation = merge_settings(
        opened, None, {"gamma": gamma, "level": level, "seed": seed, "cores": cores}
    )
    _check_behavior_value(opened)
    wanted_specs(opened, chosen.candidates)
    opened = held_if_small(opened)
    _check_groups(by, opened)
    if isinstance(by, Mapping):
        check_held(opened, f"by with labels ({next(iter(by))})")
    limit_identity = None
    costs = None
    if limit is not None:
        costs = limit.costs_of(opened, log, action_space, mapping)
        limit_identity = limit.identity(costs)
    deadline = None
    if seconds is not None:
        deadline = time.time() + SHARE_TO_TRAIN * seconds
    identity = {
        "data": opened.sha256,
        "actions": repr(opened.action_space),
        "gamma": evaluation.gamma,
        "level": evaluation.level,
        "seed": evaluation.seed,
        "constraint": limit_identity,
        "by": _identity_of_groups(by),
        "settings": chosen.model_dump(mode="json"),
    }
    folds = folds_for(opened, chosen.folds)
    is_begun = resume and goes_on(folder, identity)

    def search_of(parts: LogParts, place: Path, label: str = "") -> Search:
        cost_logs = None
        if costs is not None:
            cost_logs = CostLogs.of(parts, opened, costs)
        return Search(
            log=opened,
            parts=parts,
            settings=chosen,
            evaluation=evaluation,
            folder=place,
            deadline=deadline,
            stream=stream,
            tell=progress or _tell_nobody,
            place=(workers, ray),
            by=_labels_of_part(by, parts),
            limit=limit,
            cost_logs=cost_logs,
            label=label,
        )

    if folds > 1:
        assert isinstance(opened, Transitions)
        folded = split_in_folds(opened, evaluation.seed, folds)
        searches = [
            search_of(parts, folder / f"fold_{number}", f"fold {number}: ")
            for number, parts in enumerate(folded.folds, 1)
        ]
        if not is_begun:
            begin_search(folder, identity)
        findings = search_in_folds(searches, folded)
    else:
        searches = [search_of(parts_of(opened, evaluation.seed, folder), folder)]
        if not is_begun:
            begin_search(folder, identity)
        findings = search_in_parts(searches[0])
    if findings.may_go_on:
        keep_for_resume(folder)
    return improvement_of(findings, searches[0], started)


def search_in_parts(search: Search) -> Findings:
    """Train on the first part, choose on the second, certify on the third."""
    trained = search.train()
    scored = search.choose(trained)
    finalists = search.keep_finalists(
        choose_finalists(scored, search.settings.finalists, search.most_cost)
    )
    certificates = search.certify(finalists, trained)
    return _findings(search, trained, scored, certificates)


def _tell_nobody(*_: Any) -> None:
    """Progress that nobody follows."""


def _check_groups(by: By | None, log: AnyLog) -> None:
    """Raise ConfigError for groups by several columns, or by none, and for too many of
    them; DataError for a feature that the log has not.
    """
    if isinstance(by, Mapping) and len(by) != 1:
        raise ConfigError(
            f"by has {counted(len(by), 'column')}; give one, as in {{'segment':"
            " labels}"
        )
    if by is not None and isinstance(log, Transitions):
        check_groups(log, by)


def _check_behavior_value(log: AnyLog) -> None:
    """Raise DataError for a log of rows that stand alone and go on: what the present
    policy is worth, over which an improvement is measured, is unknown from it.
    """
    if log.has_episodes or not isinstance(log, Transitions):
        return
    going_on = int(np.count_nonzero(~np.asarray(log.terminated)))
    if going_on:
        raise DataError(
            f"the log has no episodes, and {counted(going_on, 'row')} of it are no"
            " last ones: what the present policy earns later is unknown; add"
            " episode_ids, or set terminated where nothing follows"
        )


def _identity_of_groups(by: By | None) -> str | None:
    """What tells groups from others: a name, and the labels if they were given."""
    name = name_of_groups(by)
    if not isinstance(by, Mapping):
        return name
    labels = json.dumps([str(label) for label in next(iter(by.values()))])
    return f"{name} of {hashlib.sha256(labels.encode()).hexdigest()[:16]}"


def _labels_of_part(by: By | None, parts: LogParts) -> By | None:
    """Groups of the certify part: labels are of all episodes of the log.

    Raises DataError for a feature that the log has not, or another number of labels.
    """
    if by is None:
        return None
    if not isinstance(by, Mapping):
        check_groups(parts.choose, by)  # of a log on disk, nothing was checked before
        return by
    for name, labels in by.items():
        if len(labels) != len(parts.part_of):
            raise DataError(
                f"{name} has {len(labels)} labels, the log {len(parts.part_of)}"
                " episodes in memory; give one label for each"
            )
    return {name: parts.of_certified(labels) for name, labels in by.items()}


def _findings(
    search: Search,
    trained: Trained,
    scored: Sequence[Scored],
    certificates: dict[str, Certificate],
) -> Findings:
    """What every part of the log has said."""
    candidates = _candidates(search, trained, scored, certificates)
    leading = max(
        (item for item in candidates if item.stage == CERTIFY),
        key=lambda item: (item.certified, low_of(item)),
        default=None,
    )
    recommended = None
    if leading is not None and leading.certified:
        assert leading.policy is not None
        by_name = {item.name: item for item in scored}
        recommended = Recommended(
            name=leading.name,
            policy=dataclasses.replace(
                leading.policy, trained_on=search.training_rows()
            ),
            mixture=search.mixture(by_name[leading.name], trained),
            differences=search.differences(leading.policy, trained),
        )
    parts = search.parts
    return Findings(
        candidates=candidates,
        leading=leading,
        certificates=certificates,
        recommended=recommended,
        dropped=trained.dropped,
        parts=sizes_of(parts.train, parts.choose, parts.certify),
        units=count_units(search.parts.certify),
        tried=len(scored),
        failure=first_failure(trained.dropped),
        unreached=trained.unreached,
    )


def _candidates(
    search: Search,
    trained: Trained,
    scored: Sequence[Scored],
    certificates: dict[str, Certificate],
) -> list[CandidatePolicy]:
    """All mixtures that were tried: finalists first, the largest lower end on top."""
    finalists = []
    not_certified = []
    for item in scored:
        policy = search.policy(item, trained)
        certificate = certificates.get(item.name)
        score = item.score
        if certificate is not None:
            finalists.append(
                CandidatePolicy(
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
        not_certified.append(candidate_on_choose(item, policy, search.most_cost))
    finalists.sort(key=lambda item: (not item.certified, -low_of(item)))
    not_certified.sort(key=lambda item: -low_of(item))
    return [*finalists, *not_certified]
