"""Five folds of small one-step logs: what is in a fold, the pooled certificate by plain
arithmetic and by simulation, refusals, going on, budgets, files.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from scipy import special

import koffline
from koffline.config import EvaluationSettings
from koffline.data.disk.writer import ShardWriter
from koffline.data.hashing import hash_rows
from koffline.errors import ConfigError, DataError, KofflineError
from koffline.improvement import folds as folds_module
from koffline.improvement import procedure, search
from koffline.improvement.certificate import Certificate, Cost, certificate_from
from koffline.improvement.exports import export_mixture
from koffline.improvement.folds import folds_for
from koffline.improvement.large_logs import held_if_small
from koffline.improvement.parts import (
    LogParts,
    UnitCount,
    count_units,
    split_in_folds,
    split_in_three,
)
from koffline.improvement.pooling import pooled_certificate, pooled_interval
from koffline.improvement.screening import SharedByCandidates, screen
from koffline.improvement.settings import ImproveSettings
from koffline.improvement.work import work_place
from koffline.ope.groups import GroupValue
from koffline.ope.results import Interval, Reason, Verdict
from scripts.bench.improve.pooled_ends import simulated_ends
from tests.improve.worlds import QUICK
from tests.refusals import assert_refused, run_cli

FAST = {
    **QUICK,
    "folds": 5,
    "candidates": ("clone_mode", "kernel_policy_iteration-1"),
    "shares": (1.0,),
    "training_steps": 300,
    "choosing_steps": 100,
    "certifying_steps": 100,
    "full_replicas": 1,
    "resampled_replicas": 4,
}
LARGE = UnitCount(number=1000, effective=1000.0, kind="row")


def offers(rows: int = 300, seed: int = 0, **changes: object) -> koffline.Transitions:
    """Offers at random; the third pays much more to half of the users."""
    generator = np.random.default_rng(seed)
    users = generator.normal(size=(rows, 2))
    actions = generator.integers(3, size=rows)
    is_liked = (actions == 2) & (users[:, 0] > 0)
    chances = np.where(is_liked, 0.9, 0.1)
    columns: dict = {
        "observations": users,
        "actions": actions,
        "rewards": (generator.random(rows) < chances).astype(float),
        "next_observations": users,
        "terminated": np.ones(rows, bool),
        "truncated": np.zeros(rows, bool),
        "episode_ids": np.arange(rows),
        "behavior_log_probabilities": np.log(np.full(rows, 1 / 3)),
        "action_space": koffline.Discrete(3),
    }
    return koffline.Transitions(**{**columns, **changes})


def truth_of(policy: koffline.policies.Policy) -> float:
    """The policy's uplift over random offers, from many users."""
    users = np.random.default_rng(9).normal(size=(20_000, 2))
    means = np.full((len(users), 3), 0.1)
    means[:, 2] = np.where(users[:, 0] > 0, 0.9, 0.1)
    gains = (policy.probabilities(users) - 1 / 3) * means
    return float(gains.sum(axis=1).mean())


def number_in(sets: list[set[int]]) -> int:
    """How many different items the sets hold together."""
    return len({item for of_set in sets for item in of_set})


# ---- folds


@pytest.mark.parametrize("count", [2, 3, 5, 7])
def test_folds_share_no_row_and_certify_every_row_once(count: int) -> None:
    folded = split_in_folds(offers(303), seed=1, folds=count)
    certified = [hash_rows(fold.certify) for fold in folded.folds]
    assert sorted(np.concatenate(certified)) == sorted(hash_rows(folded.rows))
    for fold in folded.folds:
        parts = (fold.train, fold.choose, fold.certify)
        hashes = [set(hash_rows(part).tolist()) for part in parts]
        assert sum(map(len, hashes)) == number_in(hashes) == 303
        outside = len(fold.train) + len(fold.choose)
        assert len(fold.choose) == pytest.approx(outside / 4, abs=1)
        assert len(fold.certify) == pytest.approx(303 / count, abs=1)
    assert sum(folded.shares) == pytest.approx(1.0)


def test_copies_and_clusters_that_share_them_stay_in_one_fold() -> None:
    log = offers(300)
    twice = log.select(np.repeat(np.arange(300), 2))
    copied = twice.replace(episode_ids=np.arange(600))
    folded = split_in_folds(copied, seed=0, folds=5)
    assert len(folded.rows) == 300
    assert sum(len(fold.certify) for fold in folded.folds) == 300
    assert all("copies count as weight" in fold.notes[0] for fold in folded.folds)

    # rows 2 k and 2 k + 1 are copies, in clusters that share them in a chain
    clusters = np.arange(600) // 3
    folded = split_in_folds(copied.replace(clusters=clusters), seed=0, folds=5)
    independent = count_units(folded.rows).number
    assert independent < 200
    names = [set(np.asarray(f.certify.clusters).tolist()) for f in folded.folds]
    assert sum(map(len, names)) == number_in(names) == independent


def test_shares_are_of_the_weight() -> None:
    weights = np.linspace(0.1, 5.0, 300)
    folded = split_in_folds(offers(weights=weights), seed=0, folds=5)
    for share, fold in zip(folded.shares, folded.folds, strict=True):
        assert share == pytest.approx(fold.certify.row_weights.sum() / weights.sum())


def test_three_parts_are_what_they_were() -> None:
    parts = split_in_three(offers(500), seed=3)
    sizes = [len(part) for part in (parts.train, parts.choose, parts.certify)]
    assert sizes == [300, 100, 100]
    assert isinstance(parts, LogParts)


@pytest.mark.parametrize(
    ("rows", "expected"), [(499, 1), (500, 5), (2999, 5), (3000, 1)]
)
def test_small_logs_are_searched_in_folds(rows: int, expected: int) -> None:
    assert folds_for(offers(rows), None) == expected
    assert folds_for(offers(rows), 1) == 1
    assert folds_for(offers(rows), 4) == 4


def test_units_count_and_not_rows() -> None:
    log = offers(4000)
    assert folds_for(log, None) == 1
    assert folds_for(log.replace(clusters=np.arange(4000) // 5), None) == 5
    assert folds_for(log.replace(clusters=np.arange(4000) // 100), None) == 1


# ---- the pooled certificate


def issued(low: float, uplift: float, **changes: object) -> Certificate:
    fields: dict = {
        "value": 2.0 + uplift,
        "value_interval": Interval(1.9, 2.0 + 2 * uplift, 0.9, "episodes-t"),
        "uplift": uplift,
        "interval": Interval(low, 2 * uplift - low, 0.9, "episodes-t"),
        "behavior_value": 2.0,
        "verdict": Verdict("supported", (), "The policy is worth 1."),
        **changes,
    }
    return Certificate(**fields)


def pooled(
    certificates: list[Certificate], shares: tuple[float, ...], units: UnitCount = LARGE
) -> Certificate:
    return pooled_certificate(certificates, shares, units, 0.95)


def test_a_pooled_certificate_by_hand() -> None:
    both = pooled([issued(1.0 - 0.3, 1.0), issued(2.0 - 0.8, 2.0)], (0.5, 0.5))
    assert both.uplift == pytest.approx(1.5)
    # half the root of 0.3² + 0.8²
    assert both.interval.low == pytest.approx(1.5 - 0.5 * np.sqrt(0.09 + 0.64))
    assert both.behavior_value == pytest.approx(2.0)
    assert both.value == pytest.approx(3.5)
    assert both.interval.kind == "episodes-t"
    assert "95%" in both.interval.assumptions
    assert both.passes


def test_ends_that_are_not_symmetric_stay_so() -> None:
    first = Interval(-1.0, 0.5, 0.9, "bootstrap")
    second = Interval(0.0, 5.0, 0.9, "episodes-t")
    both = pooled_interval([0.0, 1.0], [first, second], [0.25, 0.75])
    assert both.low == pytest.approx(0.75 - np.sqrt(0.25**2 + 0.75**2))
    assert both.high == pytest.approx(0.75 + np.sqrt(0.125**2 + 3.0**2))
    assert both.kind == "pooled"


@pytest.mark.parametrize(
    ("robust", "moved"), [((2.6, 2.6), -0.4), ((2.6, 3.4), 0.0), ((None, 2.5), -0.25)]
)
def test_a_bias_of_networks_is_no_error_that_folds_make_smaller(
    robust: tuple[float | None, ...], moved: float
) -> None:
    certificates = []
    for number in robust:
        own_move = 0.0
        if number is not None:
            own_move = min(0.0, number - 3.0)
        certificates.append(issued(0.5 + own_move, 1.0, robust=number, moved=own_move))
    # issued mirrors the low end, which the move does not
    certificates = [
        dataclasses.replace(item, interval=Interval(0.5 + item.moved, 1.5, 0.9, "x"))
        for item in certificates
    ]
    both = pooled(certificates, (0.5, 0.5))
    assert both.moved == pytest.approx(moved)
    assert both.interval.low == pytest.approx(1.0 - 0.5 * np.sqrt(0.5) + moved)


def refused(answer: str, kind: str) -> Verdict:
    return Verdict(answer, (Reason(kind, f"{kind} lacks"),), "It is not known.")


NOT_ANSWERED = "not answerable from this log"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, None),
        ({"verdict": refused(NOT_ANSWERED, "support")}, "support"),
        ({"verdict": refused("with care", "order")}, "log"),
        ({"verdict": refused("with care", "training")}, None),
        ({"verdict": refused(NOT_ANSWERED, "size"), "interval": None}, "size"),
        ({"interval": None}, "size"),
        ({"probabilities": ("they are no probabilities",)}, "log"),
        ({"cost": Cost(1.0, 9.0), "cost_limit": 1.5}, "constraint"),
        ({"cost": Cost(1.0, None), "cost_limit": 1.5}, "constraint"),
        ({"cost": Cost(1.0, 1.2), "cost_limit": 1.5}, None),
    ],
)
def test_what_one_fold_refuses_the_mixture_is_refused(
    changes: dict, expected: str | None
) -> None:
    of_others = {}
    if "cost" in changes:
        of_others = {"cost": Cost(1.0, 1.1), "cost_limit": 1.5}
    certificates = [issued(0.5, 1.0, **of_others) for _ in range(5)]
    certificates[3] = issued(0.5, 1.0, **changes)
    if changes.get("interval", 0) is None:
        certificates[3] = dataclasses.replace(certificates[3], interval=None)
    mixture = pooled(certificates, (0.2,) * 5)
    assert mixture.why_not == expected
    if "verdict" in changes:
        assert mixture.verdict.answer == changes["verdict"].answer
        assert mixture.verdict.reasons[0].text.startswith("in fold 4: ")


def test_few_units_in_all_folds_together_certify_nothing() -> None:
    certificates = [issued(0.5, 1.0) for _ in range(5)]
    few = UnitCount(number=40, effective=19.0, kind="row")
    assert pooled(certificates, (0.2,) * 5, few).why_not == "size"
    enough = UnitCount(number=40, effective=21.0, kind="row")
    assert pooled(certificates, (0.2,) * 5, enough).passes


@pytest.mark.parametrize(
    ("of_folds", "expected"),
    [
        ((("Few: 96 of 240.",),) * 3, "Few: 96 of 240."),
        (
            (("Few: 96 of 240.",), (), ("Few: 93 of 240.",)),
            "in folds 1, 3 (numbers of fold 1): Few: 96 of 240.",
        ),
        (
            (("Few: 1,096.",), ("Few: 7.5.",), ("Few: 12.",)),
            "in every fold (numbers of fold 1): Few: 1,096.",
        ),
        (((), ("Few: 1.",), ()), "in fold 2: Few: 1."),
    ],
)
def test_warnings_that_differ_in_their_numbers_are_one(
    of_folds: tuple[tuple[str, ...], ...], expected: str
) -> None:
    certificates = [issued(0.5, 1.0, warnings=warnings) for warnings in of_folds]
    assert pooled(certificates, (0.4, 0.3, 0.3)).warnings == (expected,)


def test_costs_are_pooled_as_uplifts_are() -> None:
    costs = [Cost(1.0, 1.3, robust=None), Cost(2.0, 2.9, robust=2.1)]
    certificates = [issued(0.5, 1.0, cost=cost, cost_limit=9.0) for cost in costs]
    cost = pooled(certificates, (0.5, 0.5)).cost
    assert cost.value == pytest.approx(1.5)
    # the second was moved by 0.1, which is no error of sampling
    assert cost.high == pytest.approx(1.5 + 0.5 * np.sqrt(0.3**2 + 0.8**2) + 0.05)


def test_groups_are_pooled_or_say_which_fold_cannot() -> None:
    interval = Interval(0.5, 1.5, 0.95, "bootstrap")
    known = GroupValue("a", 10, 1.0, interval)
    unknown = GroupValue("b", 3, reason="too few start states")
    certificates = [
        issued(0.5, 1.0, groups=(known, dataclasses.replace(known, group="b"))),
        issued(0.5, 1.0, groups=(known, unknown)),
        issued(0.5, 1.0, groups=(known,)),
    ]
    first, second = pooled(certificates, (0.4, 0.4, 0.2)).groups
    assert (first.group, first.starts) == ("a", 30)
    assert first.value == pytest.approx(1.0)
    assert first.interval.low == pytest.approx(1.0 - 0.5 * 0.6)  # √(0.16 + 0.16 + 0.04)
    assert second.value is None
    assert second.reason == "fold 2: too few start states"


def test_a_certificate_is_read_as_it_was_written() -> None:
    cost = Cost(1.0, 1.3, robust=1.1)
    written = issued(0.5, 1.0, robust=2.5, cost=cost, cost_limit=2.0)
    content = json.loads(json.dumps(written.as_dict()))
    assert certificate_from(content).as_dict() == written.as_dict()
    del content["robust"], content["cost"]["robust"]  # of an earlier version
    assert certificate_from(content).robust is None


# ---- with policies


@pytest.fixture(scope="module")
def log() -> koffline.Transitions:
    return offers(600)


@pytest.fixture(scope="module")
def better(log: koffline.Transitions, tmp_path_factory: pytest.TempPathFactory):
    out = tmp_path_factory.mktemp("folds") / "out"
    return koffline.improve(log, settings=FAST, cores=1, out=out), out


def test_the_mixture_is_recommended_and_is_better(better) -> None:
    result, _ = better
    assert result.folds == 5
    assert result.recommended
    assert result.name == result.policy.name == "mixture_of_5_folds"
    assert 0.0 < result.interval.low < result.uplift
    assert truth_of(result.policy) > 0.05
    assert result.parts["certify"] == {"rows": 600, "units": 600}
    assert result.parts["train"]["rows"] == 360
    text = str(result)
    assert "on all 600 episodes: the log was cut in 5 folds" in text
    assert repr(result).endswith(f"; {len(result.candidates)} candidates in 5 folds)")
    certified_on = result.finalists
    assert [item.fold for item in certified_on] == [None, 1, 2, 3, 4, 5]
    frame = result.to_frame()
    assert frame["fold"].to_list()[:6] == [None, 1, 2, 3, 4, 5]
    assert result.candidates[0].certified
    assert sum(item.certified for item in result.candidates) == 1


def test_uplift_and_lower_end_are_those_of_plain_arithmetic(better, log) -> None:
    """Doubly robust uplifts of all rows with the true chances in place of a regression,
    and Student t in each fold.
    """
    result, _ = better
    folded = split_in_folds(log, seed=0, folds=5)
    means = []
    halves = []
    for fold, candidate in zip(folded.folds, result.finalists[1:], strict=True):
        rows = fold.certify
        numbers = np.arange(len(rows))
        chances = candidate.policy.probabilities(rows.observations)
        truth = np.full((len(rows), 3), 0.1)
        truth[:, 2] = np.where(rows.observations[:, 0] > 0, 0.9, 0.1)
        ratios = 3.0 * chances[numbers, rows.actions]
        scores = (chances * truth).sum(axis=1) - rows.rewards
        scores += ratios * (rows.rewards - truth[numbers, rows.actions])
        means.append(scores.mean())
        error = scores.std(ddof=1) / np.sqrt(len(scores))
        halves.append(special.stdtrit(len(scores) - 1, 0.975) * error)
        assert candidate.uplift == pytest.approx(means[-1], abs=0.08)
    uplift = np.dot(folded.shares, means)
    assert result.uplift == pytest.approx(uplift, abs=0.03)
    half = np.sqrt(np.sum(np.square(np.multiply(folded.shares, halves))))
    assert result.uplift - result.interval.low == pytest.approx(half, rel=0.25)
    # and to the digit from what is said of the folds
    of_folds = result.finalists[1:]
    total = np.dot(folded.shares, [item.uplift for item in of_folds])
    below = [item.uplift - item.interval.low for item in of_folds]
    low = total - np.sqrt(np.sum(np.square(np.multiply(folded.shares, below))))
    assert result.uplift == pytest.approx(total)
    assert result.interval.low == pytest.approx(low)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_files_hold_the_whole_mixture(better) -> None:
    result, out = better
    states = np.random.default_rng(5).normal(size=(50, 2)).astype(np.float32)
    expected = np.zeros((50, 3))
    shares = split_in_folds(offers(600), seed=0, folds=5).shares
    for share, item in zip(shares, result.finalists[1:], strict=True):
        expected += share * item.policy.probabilities(states)
    for name, tolerance in (("policy.npz", 1e-12), ("policy.pt", 1e-5)):
        policy = koffline.load_policy(out / name, koffline.Discrete(3), (2,))
        answers = policy.probabilities(states)
        np.testing.assert_allclose(answers, expected, atol=tolerance)
    np.testing.assert_allclose(
        result.policy.probabilities(states), expected, atol=1e-12
    )
    page = (out / "report.html").read_text()
    assert "The log was divided in 5 folds." in page
    assert "It draws the 5 policies in proportion to the sizes of their folds." in page
    assert "certify, fold 3" in page
    card = (out / "model_card.md").read_text()
    assert "to train: 360 rows" in card
    assert "in each of 5 folds" in card
    content = json.loads((out / "improvement.json").read_text())
    assert content["folds"] == 5
    assert content["candidates"][1]["fold"] == 1


def test_the_policy_is_known_to_have_seen_all_rows(better, log) -> None:
    result, _ = better
    assert result.policy.trained_on.sha256 == result.data_sha256
    assert len(result.policy.trained_on.fingerprints) == len(log)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_a_mixture_of_ten_networks_is_exported(tmp_path: Path, better) -> None:
    result, _ = better
    halves = []
    for part in result.mixture.parts:
        halves += [part, part]
    shares = [0.5 * share for share in result.mixture.shares for _ in range(2)]
    mixture = koffline.policies.Mixture(tuple(halves), tuple(shares))
    assert len(mixture.parts) == 10
    states = np.random.default_rng(1).normal(size=(20, 2)).astype(np.float32)
    for path in export_mixture(mixture, tmp_path):
        if path.suffix == ".onnx":
            pytest.importorskip("onnxruntime")
        policy = koffline.load_policy(path, koffline.Discrete(3), (2,))
        answers = policy.probabilities(states)
        np.testing.assert_allclose(
            answers, result.policy.probabilities(states), atol=1e-5
        )


def test_groups_and_a_constraint_are_those_of_all_folds() -> None:
    log = offers(300)
    costs = np.where(np.asarray(log.actions) == 2, 1.5, 1.0)
    plain, result = (
        koffline.improve(
            log,
            settings={**FAST, "candidates": ("clone_mode",), "shares": (0.25,)},
            cores=1,
            **further,
        )
        for further in (
            {},
            {
                "by": {"half": np.arange(300) % 2},
                "constraint": {"name": "effort", "costs": costs, "at_most": 1.4},
            },
        )
    )
    # they only add to what is said
    assert (result.uplift, result.interval) == (plain.uplift, plain.interval)
    # random offers cost 1.17
    assert 1.0 < result.constraint["value"] < 1.4
    assert result.constraint["value"] < result.constraint["high"]
    if result.recommended:
        assert [row.starts for row in result.groups] == [150, 150]
        assert all(row.interval.low < row.value for row in result.groups)


def test_without_anything_better_nothing_is_certified_on(monkeypatch) -> None:
    monkeypatch.setattr(folds_module, "choose_finalists", lambda *_: [])
    result = koffline.improve(offers(200), settings=FAST, cores=1)
    assert not result.recommended
    assert result.finalists == ()
    assert result.reason.kind == "noise"
    assert {item.fold for item in result.candidates} == {1, 2, 3, 4, 5}


def test_a_fold_without_a_better_policy_keeps_its_clone(monkeypatch) -> None:
    real = search.Search.keep_finalists

    def none_in_fold_2(self, finalists):
        if self.label == "fold 2: ":
            finalists = []
        return real(self, finalists)

    monkeypatch.setattr(search.Search, "keep_finalists", none_in_fold_2)
    result = koffline.improve(offers(300), settings=FAST, cores=1)
    assert [item.name for item in result.finalists][2] == "clone"
    assert abs(result.finalists[2].uplift) < 0.1
    assert result.uplift == pytest.approx(
        np.mean([item.uplift for item in result.finalists[1:]])
    )


def test_a_fold_that_cannot_be_valued_keeps_the_present_policy(monkeypatch) -> None:
    real = search.certify

    failing = mock.Mock(wraps=real)
    failing.side_effect = raise_at_call(failing, 3, KofflineError("networks diverged"))
    monkeypatch.setattr(search, "certify", failing)
    result = koffline.improve(offers(300), settings=FAST, cores=1)
    assert not result.recommended
    assert "networks diverged" in str(result.reason)


@pytest.mark.parametrize("stage", ["_train_job", "_choose_job", "certify"])
def test_an_interrupted_search_goes_on_and_ends_the_same(
    stage: str, tmp_path: Path, better, log
) -> None:
    result, _ = better
    out = tmp_path / "out"
    real = getattr(search, stage)
    interrupted = mock.Mock(wraps=real)
    interrupted.side_effect = raise_at_call(interrupted, 4, KeyboardInterrupt())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, stage, interrupted)
        with pytest.raises(KeyboardInterrupt):
            koffline.improve(log, settings=FAST, cores=1, out=out)
    kept = {path.name for path in work_place(out).iterdir()}
    assert {"fold_1", "fold_2", "fold_5"} <= kept
    counted = mock.Mock(wraps=real)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, stage, counted)
        again = koffline.improve(log, settings=FAST, cores=1, out=out, resume=True)
    jobs = {"certify": 5}.get(stage, 10)
    assert counted.call_count == jobs - 3  # three had ended
    assert again.to_json(timing=False) == result.to_json(timing=False)
    assert not work_place(out).exists()


def test_workers_change_no_number(better, log) -> None:
    result, _ = better
    again = koffline.improve(log, settings=FAST, cores=2)
    assert again.uplift == pytest.approx(result.uplift, rel=1e-9)
    assert again.interval.low == pytest.approx(result.interval.low, rel=1e-9)


def test_a_budget_cuts_all_folds_alike(monkeypatch, log) -> None:
    real = search.train_candidate
    trained = []

    def counted(spec, part, steps, seed):
        trained.append(spec.name)
        return real(spec, part, steps, seed)

    def clock() -> float:  # the budget ends after seven candidates
        if len(trained) < 7:
            return 0.0
        return 1e12

    monkeypatch.setattr(search, "train_candidate", counted)
    monkeypatch.setattr(search.time, "time", clock)
    result = koffline.improve(log, settings=FAST, cores=1, budget="1h")
    assert trained == ["clone_mode"] * 5 + ["kernel_policy_iteration-1_round"] * 2
    (entry,) = result.dropped
    assert entry["name"] == "kernel_policy_iteration-1_round (folds 3, 4, 5)"
    assert "budget" in entry["reason"]
    assert len(result.finalists) in (0, 6)


@pytest.mark.parametrize("is_better", [True, False])
def test_a_budget_never_leads_to_a_second_look_at_folds(
    monkeypatch, is_better: bool
) -> None:
    """A longer budget is offered only if no row to certify on was looked at."""
    trained = []
    real = search.train_candidate
    choose_finalists = folds_module.choose_finalists

    def train(spec, part, steps, seed):
        trained.append(spec.name)
        return real(spec, part, steps, seed)

    def clock() -> float:  # the budget ends after the first candidates of all folds
        if len(trained) < 5:
            return 0.0
        return 1e12

    def finalists(scored, count, at_most):
        if is_better:
            return choose_finalists(scored, count, at_most)
        return []

    monkeypatch.setattr(search, "train_candidate", train)
    monkeypatch.setattr(search.time, "time", clock)
    monkeypatch.setattr(folds_module, "choose_finalists", finalists)
    certify = mock.Mock(wraps=search.certify)
    monkeypatch.setattr(search, "certify", certify)
    keep = mock.Mock()
    monkeypatch.setattr(procedure, "keep_for_resume", keep)
    # what is known of users says nothing of what they like
    users = np.random.default_rng(2).normal(size=(300, 2))
    log = offers(300, observations=users, next_observations=users)
    result = koffline.improve(log, settings=FAST, cores=1, budget="1h")
    assert {item["name"] for item in result.dropped} == {
        "kernel_policy_iteration-1_round"
    }
    assert not result.recommended
    assert certify.called == is_better
    assert keep.called != is_better
    assert (result.reason.kind == "budget") != is_better
    assert ("--resume" in result.reason.remedy) != is_better


def test_a_fold_in_which_nothing_could_be_trained_has_its_clone(
    monkeypatch, log
) -> None:
    real = search.train_candidate
    trained = []

    def only_two(spec, part, steps, seed):
        trained.append(spec.name)
        return real(spec, part, steps, seed)

    def clock() -> float:
        if len(trained) < 2:
            return 0.0
        return 1e12

    monkeypatch.setattr(search, "train_candidate", only_two)
    monkeypatch.setattr(search.time, "time", clock)
    settings = {**FAST, "candidates": ("kernel_policy_iteration-1",)}
    result = koffline.improve(log, settings=settings, cores=1, budget="1h")
    names = [item.name for item in result.finalists]
    assert names[3:] == ["clone"] * 3
    assert result.dropped[0]["name"].endswith(" (folds 3, 4, 5)")


def test_where_no_fold_can_train_that_is_said() -> None:
    log = offers(200)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "train_candidate", _failing)
        with pytest.raises(KofflineError, match="no candidate could be trained: odd"):
            koffline.improve(log, settings=FAST, cores=1)


def raise_at_call(
    watched: mock.Mock, number: int, error: BaseException
) -> Callable[..., object]:
    """What lets a mock call what it wraps, and raises in its call of this number."""

    def effect(*_: object, **__: object) -> object:
        if watched.call_count == number:
            raise error
        return mock.DEFAULT

    return effect


def _failing(*_: object) -> None:
    raise KofflineError("odd")


# ---- refusals


def test_folds_of_longer_episodes_are_refused() -> None:
    ids = np.arange(300) // 2
    ends = np.arange(300) % 2 == 1
    log = offers(300, episode_ids=ids, terminated=ends)
    with pytest.raises(ConfigError, match="episodes of more than one step"):
        koffline.improve(log, gamma=0.9, settings={"folds": 5})
    assert folds_for(log, None) == 1


def test_folds_of_a_log_that_stays_on_disk_are_refused(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "shards", 200) as writer:
        writer.append(offers(600))
    lazy = koffline.open_transitions(tmp_path / "shards", lazy=True)
    with pytest.raises(ConfigError, match="lies on disk"):
        folds_for(held_if_small(lazy, held_bytes=0.0), 5)
    assert folds_for(held_if_small(lazy, held_bytes=0.0), None) == 1
    # a small one is read into memory
    assert folds_for(held_if_small(lazy), None) == 5


@pytest.mark.parametrize("count", [0, -1, 21])
def test_odd_numbers_of_folds_are_refused(count: int, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="folds is"):
        koffline.improve(offers(300), settings={"folds": count})


def test_few_units_are_refused_and_the_remedy_works() -> None:
    with pytest.raises(DataError, match=r"too few for 5 folds.* set folds=1"):
        koffline.improve(offers(8), settings={**FAST, "folds": 5})
    result = koffline.improve(offers(8), settings={**FAST, "folds": 1}, cores=1)
    assert result.folds == 1


def test_the_command_refuses_in_one_line(tmp_path: Path) -> None:
    from koffline.data.sources import write_transitions

    path = tmp_path / "log.hdf5"
    ends = np.arange(300) % 2 == 1
    write_transitions(
        offers(300, episode_ids=np.arange(300) // 2, terminated=ends), path
    )
    ended = run_cli("improve", path, "--gamma", 0.9, "--set", "folds=5")
    assert_refused(ended, "folds is 5", "leave folds out")


# ---- the guarantee, by simulation


def test_lower_ends_of_null_logs_are_false_as_often_as_promised() -> None:
    """Policies learnt by ridge regression and chosen by their lower ends, where every
    offer is worth the same: the pooled lower end of 97.5 % is above the truth in as
    many as that says, half of what is promised.
    """
    draws = 400
    ends = simulated_ends(effect=0.0, rows=400, draws=draws, folds=5)
    false = np.mean(ends.low > ends.truth)
    assert false < 0.025 + 3 * np.sqrt(0.025 * 0.975 / draws)
    assert false > 0.0025  # and not much lower than they must be


@pytest.mark.parametrize("with_costs", [False, True])
def test_scores_are_to_the_digit_what_they_are_alone(with_costs: bool) -> None:
    log = offers(120)
    cost_log = None
    if with_costs:
        cost_log = log.replace(rewards=1.0 + np.asarray(log.actions) % 2)
    evaluation = EvaluationSettings(gamma=0.9, cores=1)
    settings = ImproveSettings(shares=(0.5, 1.0), choosing_steps=60)
    clone = koffline.load_policy("uniform", koffline.Discrete(3), (2,))

    def scores(action: int, shared: SharedByCandidates | None) -> object:
        table = np.eye(3)[action]
        policy = koffline.policies.DiscretePolicy(
            3, lambda states: np.tile(table, (len(states), 1))
        )
        return screen(log, policy, clone, evaluation, settings, cost_log, shared)

    alone = [scores(action, None) for action in range(3)]
    shared = SharedByCandidates()
    assert [scores(action, shared) for action in range(3)] == alone
    assert alone[0] != alone[1]
    assert all((score.cost is not None) == with_costs for score in alone[0])
