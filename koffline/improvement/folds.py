"""A search in folds, for small one-step logs: every row teaches and certifies.

Divide whole units in five folds. For each fold, learn a clone and candidates from three
quarters of the other four, value all mixtures on the last quarter, and evaluate the
best one (or the clone, where none seems better) on the fold, which it has not seen. What
is recommended is the mixture that draws one of the five policies, with the fold's share
of the weight: its uplift is the weighted mean of the folds' uplifts, so that the
certificate rests on all rows (`koffline.improvement.pooling`).

In a one-step log a row is an episode, and the mixture a policy of states. In longer
episodes the mixture would have to remember its draw, and no policy file can.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from koffline.data.disk.log import AnyLog
from koffline.data.transitions import Transitions
from koffline.errors import ConfigError, listed
from koffline.improvement.budget import Unreached
from koffline.improvement.certificate import Certificate
from koffline.improvement.differences import differences
from koffline.improvement.mixing import policy_of
from koffline.improvement.outcome import CandidatePolicy
from koffline.improvement.parts import (
    CERTIFY,
    FoldedLog,
    IndependentRows,
    count_units,
    sizes_of,
)
from koffline.improvement.pooling import pooled_certificate
from koffline.improvement.scaling import LogScaling
from koffline.improvement.search import (
    CLONE,
    Scored,
    Search,
    Trained,
    choose_finalists,
    fingerprints_of,
    first_failure,
    nothing_trained,
)
from koffline.improvement.search_findings import (
    Findings,
    Recommended,
    candidate_on_choose,
    low_of,
)
from koffline.jobs import Job
from koffline.policies import Mixture, MixturePart, Policy

FOLDS = 5
# Logs of fewer independent units are divided in folds, if folds hold so many: below,
# deterministic policies have too few rows of weight in a fold to be valued without
# networks.
UNITS_OF_SMALL = 3000
# The lower end is that of one of two finalists, 97.5 % for a promise of 95: where few
# rows carry the weight, ends of 95 % are false in 7 to 8 % of logs of 400 rows
# (`scripts.bench.improve.pooled_ends`).
CAREFUL_AS_FOR = 2
UNITS_IN_FOLD = 100


def folds_for(log: AnyLog, wanted: int | None) -> int:
    """How many folds a log is divided in; 1: three parts.

    log: as far as it is read into memory. wanted: of the settings. Raises ConfigError
    where folds were asked for and the log does not allow them.
    """
    if wanted == 1:
        return 1
    if not isinstance(log, Transitions):
        if wanted is None:
            return 1
        raise ConfigError(
            f"folds is {wanted}, and the log lies on disk: folds are for small logs,"
            " which are searched in memory; leave folds out, or give fewer rows"
        )
    if not np.all(log.terminated):
        if wanted is None:
            return 1
        raise ConfigError(
            f"folds is {wanted}, and the log has episodes of more than one step: the"
            " mixture of the folds' policies would have to remember its draw during an"
            " episode, and a policy file takes states alone; leave folds out"
        )
    if wanted is not None:
        return wanted
    units = IndependentRows.of(log).units
    if FOLDS * UNITS_IN_FOLD <= units < UNITS_OF_SMALL:
        return FOLDS
    return 1


@dataclass(frozen=True, eq=False)
class Fold:
    """One fold's search: what it trained and scored, and the policy that it gives: the
    best mixture, or the clone where ``best`` is None. ``number``: from 1.
    """

    number: int
    search: Search
    trained: Trained
    scored: list[Scored]
    best: Scored | None

    @property
    def name(self) -> str:
        """The name of the fold's policy."""
        if self.best is None:
            return CLONE
        return self.best.name

    @property
    def share(self) -> float:
        """The share of the trained network in the fold's policy."""
        if self.best is None:
            return 1.0
        return self.best.score.share

    @property
    def mixture(self) -> Mixture:
        """The fold's policy."""
        if self.best is None:
            return Mixture((self.trained.clone.part,), (1.0,))
        return self.search.mixture(self.best, self.trained)

    @property
    def policy(self) -> Policy:
        """The fold's policy, for the log."""
        return policy_of(self.mixture, self.name, self.search.parts.choose)


def search_in_folds(searches: Sequence[Search], folded: FoldedLog) -> Findings:
    """Search every fold, and certify the mixture of their policies.

    searches: of the folds, each with a folder of its own. Raises KofflineError if no
    candidate can be trained in any fold.
    """
    trained = _train(searches)
    scored = _choose(searches, trained)
    folds = []
    for number, search in enumerate(searches, 1):
        best = search.keep_finalists(
            choose_finalists(scored[number - 1], 1, search.most_cost)
        )
        folds.append(
            Fold(
                number=number,
                search=search,
                trained=trained[number - 1],
                scored=scored[number - 1],
                best=next(iter(best), None),
            )
        )
    if all(fold.best is None for fold in folds):
        return _findings(folds, folded, {}, None)
    certificates: dict[int, Certificate] = {}
    for fold in folds:
        issued = fold.search.certify_policies(
            {fold.name: fold.policy}, fold.trained.dropped, CAREFUL_AS_FOR
        )
        if not issued:  # the mixture cannot be certified without it
            return _findings(folds, folded, certificates, None)
        certificates[fold.number] = issued[fold.name]
    pooled = pooled_certificate(
        list(certificates.values()),
        folded.shares,
        count_units(folded.rows),
        searches[0].evaluation.level,
    )
    return _findings(folds, folded, certificates, pooled)


def _train(searches: Sequence[Search]) -> list[Trained]:
    """Train the candidates of all folds. A fold in which none could be trained has its
    clone.
    """
    trainings = [search.training() for search in searches]
    jobs = _in_turn([training.jobs for training in trainings])
    failures = searches[0].run(jobs, "training")
    trained = [training.trained(failures) for training in trainings]
    missing = _unreached([of_fold.unreached for of_fold in trained])
    if missing is None and not any(of_fold.candidates for of_fold in trained):
        raise nothing_trained(trained[0].dropped)
    if missing is not None:
        for of_fold in trained:
            if of_fold.unreached is not None:
                names = of_fold.unreached.names
                of_fold.dropped.update(dict.fromkeys(names, missing.text))
    return [dataclasses.replace(of_fold, unreached=missing) for of_fold in trained]


def _unreached(of_folds: Sequence[Unreached | None]) -> Unreached | None:
    """What the budget did not reach in any fold, and a budget that reaches all in all
    folds.
    """
    missing = [of_fold for of_fold in of_folds if of_fold is not None]
    if not missing:
        return None
    names = dict.fromkeys(chain.from_iterable(of_fold.names for of_fold in missing))
    longest = max(of_fold.seconds for of_fold in missing)
    return Unreached(tuple(names), len(of_folds) * longest)


def _choose(
    searches: Sequence[Search], trained: Sequence[Trained]
) -> list[list[Scored]]:
    """Score the candidates of all folds."""
    choosings = [
        search.choosing(of_fold)
        for search, of_fold in zip(searches, trained, strict=True)
    ]
    jobs = list(chain.from_iterable(choosing.jobs for choosing in choosings))
    failures = searches[0].run(jobs, "choosing")
    return [
        choosing.scored(failures, of_fold)
        for choosing, of_fold in zip(choosings, trained, strict=True)
    ]


def _in_turn(jobs: Sequence[Sequence[Job]]) -> list[Job]:
    """The first job of every fold, then the second: a budget cuts all folds alike."""
    longest = max(map(len, jobs), default=0)
    ordered: list[Job] = []
    for place in range(longest):
        for of_fold in jobs:
            ordered += of_fold[place : place + 1]
    return ordered


def _findings(
    folds: Sequence[Fold],
    folded: FoldedLog,
    certificates: dict[int, Certificate],
    pooled: Certificate | None,
) -> Findings:
    """What the folds have found. certificates: of the folds, by number."""
    name = f"mixture_of_{len(folds)}_folds"
    mixture = mixture_of_folds(folds, folded.shares)
    policy = policy_of(mixture, name, folded.rows)
    leading = None
    candidates = []
    certificates_by_name = {}
    if pooled is not None:
        certificates_by_name[name] = pooled
        leading = CandidatePolicy(
            name=name,
            share=1.0,
            stage=CERTIFY,
            value=pooled.value,
            uplift=pooled.uplift,
            interval=pooled.interval,
            certified=pooled.passes,
            note=pooled.why_not or "",
            policy=policy,
        )
        candidates.append(leading)
    candidates += _candidates(folds, certificates)
    dropped = _dropped(folds)
    failure = first_failure(dropped)
    tried = sum(len(fold.scored) for fold in folds)
    if pooled is None and any(fold.best is not None for fold in folds):
        # a fold's policy was chosen and could not be evaluated
        tried = 0
        failing = next(fold for fold in folds if fold.number not in certificates)
        failure = failing.trained.dropped[failing.name]
    unreached = None
    if all(fold.best is None for fold in folds):
        # else rows to certify on were looked at: a longer budget would do so twice
        unreached = folds[0].trained.unreached
    recommended = None
    if leading is not None and leading.certified:
        recommended = Recommended(
            name=name,
            policy=dataclasses.replace(
                policy,
                trained_on=fingerprints_of([folded.rows], folds[0].search.log.sha256),
            ),
            mixture=mixture,
            differences=differences(
                policy,
                policy_of(_mixture_of_clones(folds, folded.shares), CLONE, folded.rows),
                folded.rows,
                LogScaling.of(folded.rows, folds[0].search.evaluation.gamma),
                folds[0].search.evaluation.seed,
            ),
        )
    first = folds[0].search.parts
    return Findings(
        candidates=candidates,
        leading=leading,
        certificates=certificates_by_name,
        recommended=recommended,
        dropped=dropped,
        parts=sizes_of(first.train, first.choose, folded.rows),
        units=count_units(folded.rows),
        tried=tried,
        failure=failure,
        folds=len(folds),
        unreached=unreached,
    )


def mixture_of_folds(folds: Sequence[Fold], shares: Sequence[float]) -> Mixture:
    """Draw a fold by the shares, and act as its policy: the clone's and the trained
    network's shares in it are multiplied by the fold's.
    """
    parts: list[MixturePart] = []
    probabilities: list[float] = []
    for fold, share in zip(folds, shares, strict=True):
        of_fold = fold.mixture
        parts += of_fold.parts
        probabilities += [share * inside for inside in of_fold.shares]
    return Mixture(tuple(parts), tuple(probabilities))


def _mixture_of_clones(folds: Sequence[Fold], shares: Sequence[float]) -> Mixture:
    """The present policy as the folds have learnt it."""
    return Mixture(tuple(fold.trained.clone.part for fold in folds), tuple(shares))


def _candidates(
    folds: Sequence[Fold], certificates: dict[int, Certificate]
) -> list[CandidatePolicy]:
    """The folds' policies, then all other mixtures of all folds by their lower ends."""
    certified_on = []
    not_certified = []
    for fold in folds:
        certificate = certificates.get(fold.number)
        if certificate is not None:
            chosen_by = None
            if fold.best is not None:
                chosen_by = fold.best.score.low
            certified_on.append(
                CandidatePolicy(
                    name=fold.name,
                    share=fold.share,
                    stage=CERTIFY,
                    value=certificate.value,
                    uplift=certificate.uplift,
                    interval=certificate.interval,
                    note="a part of the mixture",
                    chosen_by=chosen_by,
                    policy=fold.policy,
                    fold=fold.number,
                )
            )
        for item in fold.scored:
            if certificate is not None and item.name == fold.name:
                continue
            policy = fold.search.policy(item, fold.trained)
            most_cost = fold.search.most_cost
            not_certified.append(
                candidate_on_choose(item, policy, most_cost, fold.number)
            )
    not_certified.sort(key=lambda item: -low_of(item))
    return [*certified_on, *not_certified]


def _dropped(folds: Sequence[Fold]) -> dict[str, str]:
    """Why candidates were not tried, by name with the folds; the folds of one reason
    together.
    """
    numbers: dict[tuple[str, str], list[int]] = {}
    for fold in folds:
        for name, why in fold.trained.dropped.items():
            numbers.setdefault((name, why), []).append(fold.number)
    dropped = {}
    for (name, why), of_folds in numbers.items():
        where = ""
        if len(of_folds) == 1 and len(folds) > 1:
            where = f" (fold {of_folds[0]})"
        elif len(of_folds) < len(folds):
            where = f" (folds {listed(of_folds)})"
        dropped[f"{name}{where}"] = why
    return dropped
