"""``koffline.improve``: from a log to a better policy with a certificate; the file
reads from top to bottom.

Split whole units in three. Learn a clone of the behavior policy and a portfolio of
candidates from the first part. Value every candidate, mixed with the clone at several
shares, on the second part. Certify the few best by lower bound on the third part, which
took no part in learning or choosing.
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
from koffline.improvement.budget import NOT_REACHED, SHARE_TO_TRAIN
from koffline.improvement.certificate import (
    Certificate,
)
from koffline.improvement.constraint import CostLogs, parse_constraint
from koffline.improvement.keeping import why_keep
from koffline.improvement.large_logs import check_held, held_if_small, parts_of
from koffline.improvement.outcome import MARKER, CandidatePolicy, Improvement
from koffline.improvement.parts import (
    CERTIFY,
    CHOOSE,
    TRAIN,
    LogParts,
    count_units,
)
from koffline.improvement.screening import LEVEL
from koffline.improvement.search import (
    Scored,
    Search,
    Tell,
    Trained,
    choose_finalists,
    wanted_specs,
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
from koffline.ope.groups import By, GroupValues, check_feature
from koffline.ope.names import BOOTSTRAP
from koffline.ope.results import Interval, describe_log
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
    level, as far as intervals have their level. log, gamma, mapping, action_space, by,
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
    _check_groups(by)
    _check_behavior_value(opened)
    wanted_specs(opened, chosen.candidates)
    opened = held_if_small(opened)
    if isinstance(by, Mapping):
        check_held(opened, f"by with labels ({next(iter(by))})")
    limit_identity = None
    at_most = None
    costs = None
    if limit is not None:
        costs = limit.costs_of(opened, log, action_space, mapping)
        limit_identity = limit.identity(costs)
        at_most = limit.at_most
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
    is_begun = resume and goes_on(folder, identity)
    parts = parts_of(opened, evaluation.seed, folder)
    cost_logs = None
    if costs is not None:
        cost_logs = CostLogs.of(parts, opened, costs)
    labels = _labels_of_part(by, parts)
    if not is_begun:
        begin_search(folder, identity)
    search = Search(
        log=opened,
        parts=parts,
        settings=chosen,
        evaluation=evaluation,
        folder=folder,
        deadline=deadline,
        stream=stream,
        tell=progress or _tell_nobody,
        place=(workers, ray),
        by=labels,
        limit=limit,
        cost_logs=cost_logs,
    )
    trained = search.train()
    scored = search.choose(trained)
    finalists = search.keep_finalists(
        choose_finalists(scored, chosen.finalists, at_most)
    )
    certificates = search.certify(finalists, trained)
    return _result(search, trained, scored, certificates, started)


def _tell_nobody(*_: Any) -> None:
    """Progress that nobody follows."""


def _check_groups(by: By | None) -> None:
    """Raise ConfigError for groups by several columns, or by none."""
    if isinstance(by, Mapping) and len(by) != 1:
        raise ConfigError(
            f"by has {counted(len(by), 'column')}; give one, as in {{'segment':"
            " labels}"
        )


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
    name = _name_of_groups(by)
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
    check_feature(parts.choose, by)
    if not isinstance(by, Mapping):
        return by
    for name, labels in by.items():
        if len(labels) != len(parts.part_of):
            raise DataError(
                f"{name} has {len(labels)} labels, the log {len(parts.part_of)}"
                " episodes in memory; give one label for each"
            )
    return {name: parts.of_certified(labels) for name, labels in by.items()}


def _result(
    search: Search,
    trained: Trained,
    scored: Sequence[Scored],
    certificates: dict[str, Certificate],
    started: float,
) -> Improvement:
    """The result, from what every part of the log has said."""
    candidates = _candidates(search, trained, scored, certificates)
    leading = max(
        (item for item in candidates if item.stage == CERTIFY),
        key=lambda item: (item.certified, _low_of(item)),
        default=None,
    )
    units = count_units(search.parts.certify)
    about = describe_log(search.log, search.evaluation.seed, started)
    about["notes"] = (*about["notes"], *search.parts.notes)
    about |= {
        "gamma": search.evaluation.gamma,
        "settings": search.settings.model_dump(mode="json"),
        "level": search.evaluation.level,
        "candidates": tuple(candidates),
        "dropped": tuple(
            {"name": name, "reason": why} for name, why in trained.dropped.items()
        ),
        "parts": _sizes(search.parts),
        "by": _name_of_groups(search.by),
        "kind_of_unit": units.kind,
    }
    reason = None
    if leading is None or not leading.certified:
        reason = why_keep(
            candidates,
            certificates,
            units=units.number,
            tried=len(scored),
            failure=_first_failure(trained),
            kind=units.kind,
        )
    missing = trained.unreached
    if missing is not None and reason is not None and leading is None:
        # the certify part was not looked at: a longer budget may go on from here
        reason = missing.reason(reason)
        keep_for_resume(search.folder)
    if leading is None:
        assert reason is not None
        return Improvement(
            recommended=False,
            name=None,
            value=None,
            behavior_value=None,
            uplift=None,
            interval=None,
            verdict=reason.as_verdict(),
            reason=reason,
            constraint=_cost_of(search, None),
            **about,
        )
    certificate = certificates[leading.name]
    result = Improvement(
        recommended=leading.certified,
        name=None,
        value=certificate.value,
        behavior_value=certificate.behavior_value,
        uplift=certificate.uplift,
        interval=certificate.interval,
        verdict=certificate.verdict,
        reason=reason,
        warnings=certificate.warnings,
        constraint=_cost_of(search, certificate),
        **about,
    )
    if not leading.certified:
        return result
    by_name = {item.name: item for item in scored}
    assert leading.policy is not None
    policy = dataclasses.replace(leading.policy, trained_on=search.training_rows())
    return dataclasses.replace(
        result,
        name=leading.name,
        policy=policy,
        mixture=search.mixture(by_name[leading.name], trained),
        groups=GroupValues(certificate.groups),
        differences=search.differences(leading.policy, trained),
    )


def _first_failure(trained: Trained) -> str:
    """Why the first candidate could not be trained or valued, but for lack of time;
    empty if there is none.
    """
    for why in trained.dropped.values():
        if NOT_REACHED not in why:
            return why
    return ""


def _cost_of(search: Search, certificate: Certificate | None) -> dict[str, Any] | None:
    """The constraint, with the second return of the leading finalist; None without
    one.
    """
    if search.limit is None:
        return None
    cost: dict[str, Any] = {
        "constraint": search.limit.text,
        "value": None,
        "high": None,
    }
    if certificate is not None and certificate.cost is not None:
        cost |= {"value": certificate.cost.value, "high": certificate.cost.high}
    return cost


def _name_of_groups(by: By | None) -> str | None:
    """The name of a grouping."""
    if by is None:
        return None
    if isinstance(by, Mapping):
        return str(next(iter(by)))
    return str(by)


def _low_of(candidate: CandidatePolicy) -> float:
    if candidate.interval is None:
        return -float("inf")
    return candidate.interval.low


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
        not_certified.append(
            CandidatePolicy(
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
    not_certified.sort(key=lambda item: -_low_of(item))
    return [*finalists, *not_certified]


def _sizes(parts: LogParts) -> dict[str, dict[str, int]]:
    """Rows and units of each part."""
    named = {TRAIN: parts.train, CHOOSE: parts.choose, CERTIFY: parts.certify}
    return {
        name: {"rows": len(part), "units": count_units(part).number}
        for name, part in named.items()
    }
