"""The benchmark of `koffline.improve`: tail means and counts by hand, limits of SPIBB,
exact values against a simulation, cells that go on.
"""

import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest

from koffline.errors import DataError
from koffline.ope.importance.episode_intervals import student_interval
from koffline.policies import DiscretePolicy
from scripts.bench.finite_worlds import sample_episodes
from scripts.bench.improve import __main__ as command
from scripts.bench.improve import (
    cells,
    cross_fitting,
    few_units,
    ours,
    peers,
    report,
    spibb,
    tabular,
    worlds,
)
from scripts.bench.improve.logs import ENTRIES, TEST, TUNING, Entry, icu_world, softened
from scripts.bench.improve.spibb import GAMMA


@pytest.fixture(scope="module")
def problem():
    return spibb.draw("grid", 0)


@pytest.fixture(scope="module")
def rows(problem):
    return problem.episodes(60, np.random.default_rng(0))


@pytest.fixture(scope="module")
def model(problem, rows):
    return tabular.counted_model(rows, problem.behavior.shape)


def test_tail_mean_by_hand():
    scores = np.array([4.0, 1.0, 2.0, 3.0])
    assert tabular.tail_mean(scores, 1.0) == 2.5
    assert tabular.tail_mean(scores, 0.5) == 1.5
    # one and a half numbers: (1 + 0.5 · 2) / 1.5
    assert tabular.tail_mean(scores, 0.375) == pytest.approx(2.0 / 1.5)


def test_a_model_is_its_counts():
    log = SimpleNamespace(
        states=np.array([0, 0, 0, 1]),
        actions=np.array([1, 1, 1, 0]),
        rewards=np.array([1.0, 2.0, 6.0, 5.0]),
        next_states=np.array([1, 1, 2, 2]),
        terminated=np.array([False, False, True, True]),
    )
    model = tabular.counted_model(log, (3, 2))
    assert model.counts.tolist() == [[0, 3], [1, 0], [0, 0]]
    assert model.reward[0, 1] == 3.0
    assert model.transition[0, 1].tolist() == [0.0, pytest.approx(2.0 / 3.0), 0.0]
    assert model.transition[1, 0].sum() == 0.0


def test_values_of_the_true_model_are_those_of_the_process(problem):
    values = tabular.action_values(
        tabular.true_model(problem.mdp), problem.behavior, GAMMA
    )
    exact = problem.mdp.action_values(problem.behavior, GAMMA)
    np.testing.assert_allclose(values, exact, atol=1e-10)


def test_exact_value_agrees_with_a_simulation(problem):
    generator = np.random.default_rng(1)
    log = sample_episodes(problem.mdp, 4000, problem.behavior, 400, generator)
    first = np.flatnonzero(log.steps == 0)
    returns = np.add.reduceat(log.rewards * GAMMA**log.steps, first)
    error = returns.std() / len(returns) ** 0.5
    assert abs(returns.mean() - problem.behavior_value) < 4.0 * error


def test_random_process_has_the_behavior_that_was_asked_for():
    drawn = spibb.draw("random", 3)
    uniform = np.full(drawn.behavior.shape, 0.25)
    worst = drawn.mdp.policy_value(uniform, GAMMA)
    ratio = (drawn.behavior_value - worst) / (drawn.best_value - worst)
    assert drawn.ratio == spibb.RATIOS[3]
    assert drawn.ratio - 0.1 < ratio <= drawn.ratio
    assert drawn.normalised(spibb.best_policy(drawn.mdp)) == pytest.approx(1.0)


def test_no_policy_is_better_than_the_best(problem):
    generator = np.random.default_rng(2)
    for policy in generator.dirichlet(np.ones(4), size=(20, 25)):
        assert problem.normalised(policy) < 1.0


class TestSPIBB:
    def test_threshold_zero_is_the_unsafe_baseline(self, problem, model):
        greedy = tabular.unsafe(model, problem.behavior, GAMMA)
        policy = tabular.spibb(model, problem.behavior, GAMMA, 0)
        np.testing.assert_array_equal(policy, greedy)

    def test_no_pair_counted_is_the_behavior_policy(self, problem, model):
        policy = tabular.spibb(model, problem.behavior, GAMMA, np.inf)
        np.testing.assert_array_equal(policy, problem.behavior)

    def test_rare_pairs_keep_their_probability(self, problem, model):
        policy = tabular.spibb(model, problem.behavior, GAMMA, 10)
        rare = model.counts < 10
        np.testing.assert_allclose(policy[rare], problem.behavior[rare])
        np.testing.assert_allclose(policy.sum(axis=1), 1.0)
        moved = np.abs(policy - problem.behavior).sum(axis=1) > 1e-9
        assert moved.any()
        # all that moves goes to one action
        assert ((policy > problem.behavior + 1e-12).sum(axis=1)[moved] == 1).all()

    def test_it_is_better_in_its_own_model(self, problem, model):
        policy = tabular.spibb(model, problem.behavior, GAMMA, 10)
        before = tabular.action_values(model, problem.behavior, GAMMA)
        after = tabular.action_values(model, policy, GAMMA)
        gain = (policy * after).sum(axis=1) - (problem.behavior * before).sum(axis=1)
        assert gain.min() > -1e-9
        assert gain[0] > 0.0


class TestSoftSPIBB:
    def test_no_error_allowed_is_the_behavior_policy(self, problem, model):
        policy = tabular.soft_spibb(model, problem.behavior, GAMMA, 0.0)
        np.testing.assert_array_equal(policy, problem.behavior)

    @pytest.mark.parametrize("epsilon", [0.5, 2.0])
    def test_the_constraint_holds(self, problem, model, epsilon):
        policy = tabular.soft_spibb(model, problem.behavior, GAMMA, epsilon)
        change = np.abs(policy - problem.behavior)
        errors = tabular.pair_errors(model.counts)
        assert (change[np.isinf(errors)] == 0.0).all()
        finite = np.where(np.isinf(errors), 0.0, errors)
        assert (finite * change).sum(axis=1).max() < epsilon + 1e-9
        np.testing.assert_allclose(policy.sum(axis=1), 1.0)
        assert policy.min() >= 0.0

    def test_certain_pairs_become_greedy(self, problem):
        truth = tabular.true_model(problem.mdp)
        often = dataclasses.replace(truth, counts=np.full(truth.counts.shape, 1e12))
        policy = tabular.soft_spibb(often, problem.behavior, GAMMA, 1.0)
        values = problem.mdp.action_values(problem.behavior, GAMMA)
        inner = ~problem.mdp.terminal
        best = (policy * values).sum(axis=1)
        np.testing.assert_allclose(best[inner], values.max(axis=1)[inner])


class TestHCPI:
    def test_uplifts_by_hand(self):
        episodes = tabular.WeightedEpisodes(
            first=np.array([0, 2]),
            returns=np.array([1.0, 4.0]),
            behavior=np.array([0.5, 0.5, 0.25]),
        )
        uplifts = episodes.uplifts(np.array([1.0, 0.75, 0.0]))
        np.testing.assert_allclose(uplifts, [(3.0 - 1.0) * 1.0, -4.0])

    def test_the_uplift_is_unbiased(self, problem):
        better = 0.9 * problem.behavior + 0.1 * spibb.best_policy(problem.mdp)
        log = problem.episodes(20_000, np.random.default_rng(3))
        episodes = spibb.weighted_episodes(log, problem.behavior)
        uplifts = episodes.uplifts(better[log.states, log.actions])
        truth = problem.mdp.policy_value(better, GAMMA) - problem.behavior_value
        error = uplifts.std() / len(uplifts) ** 0.5
        # episodes are cut after 50 steps, which leaves GAMMA^50 = 0.08 of a value
        assert abs(uplifts.mean() - truth) < 4.0 * error + 0.01

    def test_bound_by_hand(self):
        # t of 2 degrees at 95 % is 2.919986; mean 2, deviation 1
        bound = tabular.lower_bound(np.array([1.0, 2.0, 3.0]), 0.95)
        assert bound == pytest.approx(2.0 - 2.919986 / 3.0**0.5, abs=1e-5)
        assert tabular.lower_bound(np.array([1.0]), 0.95) == -np.inf


def recommend(world, share):
    """A stand-in for koffline.improve that recommends a share of the optimum."""
    best = spibb.best_policy(world.world.mdp, world.gamma)
    table = share * best + (1.0 - share) * world.behavior
    half = 0.5 * best + 0.5 * world.behavior

    def policy(chances):
        return DiscretePolicy(4, world.world.policy(chances))

    def improve(log, *, gamma, seed, cores=1):
        assert len(log) == world.rows
        candidates = [
            SimpleNamespace(
                name=name,
                policy=policy(chances),
                uplift=0.1,
                interval=SimpleNamespace(low=0.0999, high=0.1001),
                stage="certify",
            )
            for name, chances in (("half", half), ("whole", best))
        ]
        return SimpleNamespace(
            recommended=share > 0.0,
            policy=policy(table),
            uplift=0.1,
            interval=None,
            name="mixture",
            candidates=candidates,
            reason="because",
        )

    return improve


@pytest.fixture
def world():
    ward = icu_world(1)
    behavior = softened(ward.mdp, 0.99, 0.3, np.random.default_rng(0))
    return worlds.FiniteWorld("tiny", ward, behavior, 300)


def test_ours_is_measured_exactly(world):
    answer = ours.measure(world, recommend(world, 0.5))
    entry = Entry("tiny", "icu", TEST, lambda: world)
    row = report.log_row(entry, answer, None)
    half = next(
        candidate for candidate in answer["candidates"] if candidate["name"] == "half"
    )
    assert answer["value"] == half["value"]
    assert row["best_candidate"] == "whole"
    assert row["best_uplift"] == pytest.approx(row["optimal_uplift"])
    assert 0.0 < row["uplift"] < row["best_uplift"]
    assert row["owed"]


def test_what_keeps_the_present_policy_gains_nothing(world):
    answer = ours.measure(world, recommend(world, 0.0))
    row = report.log_row(Entry("tiny", "icu", TEST, lambda: world), answer, None)
    assert not row["recommended"]
    assert row["uplift"] == 0.0
    count = report.counts([row])
    assert (count["false"], count["owed"], count["owed_recommended"]) == (0, 1, 0)


def test_a_log_that_is_refused_keeps_the_present_policy(world):
    def improve(log, *, gamma, seed, cores):
        raise DataError("too few episodes")

    answer = ours.measure(world, improve)
    assert not answer["recommended"]
    assert answer["value"] == answer["behavior"]
    assert answer["reason"] == "too few episodes"


def test_a_search_that_was_cut_goes_on(tmp_path):
    log = object()
    options = []

    def improve(log, **keywords):
        options.append(keywords)
        keywords["out"].mkdir()
        return "result"

    assert ours.search(log, 0.9, 0, improve, tmp_path / "work") == "result"
    assert options[0]["resume"]
    # what is finished leaves nothing
    assert list(tmp_path.iterdir()) == []


def row(recommended, uplift, best, owed=False, error=0.0):
    return {
        "recommended": recommended,
        "uplift": uplift,
        "uplift_error": error,
        "best_uplift": best,
        "optimal_uplift": None,
        "owed": owed,
        "owed_finalist": False,
        "peers": {},
    }


def test_counts_by_hand():
    count = report.counts(
        [
            row(True, 1.0, 2.0, owed=True),
            row(True, 3.0, 3.0, owed=True),
            row(True, -0.1, 1.0, error=0.2),
            row(False, 0.0, 1.0, owed=True),
            row(True, 0.0, 0.0),
        ]
    )
    assert count["recommended"] == 4
    assert count["false"] == 2
    assert count["false_within_error"] == 1
    # 2 of 5 by Clopper and Pearson
    assert count["false_share_interval"] == [0.0527, 0.8534]
    assert count["realised_of_best_candidate"] == pytest.approx(1.4 / 3.0, abs=1e-4)
    assert count["realised_of_optimal"] is None
    assert (count["owed"], count["owed_recommended"]) == (3, 2)


def test_choices_of_the_peers():
    def candidate(value, td_error, fqe):
        return {"value": [value, 0.0], "td_error": td_error, "fqe": fqe}

    cell = {
        "candidates": {
            "discrete_cql": candidate(1.0, 0.3, 5.0),
            "double_dqn": candidate(2.0, 0.1, 4.0),
            "discrete_bc": candidate(3.0, None, 6.0),
        }
    }
    values = {title: value.value for title, value in peers.chosen(cell).items()}
    assert values == {
        "CQL": 1.0,
        "least TD error": 2.0,
        "best by FQE": 3.0,
        "behavior clone": 3.0,
    }


def test_certificates_by_hand(tmp_path):
    def record(low, certified):
        answer = {"kind": "equal", "seed": 0, "uplift": 0.1}
        return {**answer, "low": low, "certified": certified, "truth": 0.0}

    block = [record(-0.1, False), record(0.0, False), record(0.3, True)]
    cells.run([cells.Cell("equal", lambda: block)], tmp_path / "certificates")
    (line,) = report.certificate_rows(tmp_path)
    assert (line["logs"], line["above_truth"], line["certified"]) == (3, 1, 1)
    assert line["above_truth_interval"] == [0.0084, 0.9057]
    assert line["mean_low"] == pytest.approx(0.2 / 3.0)


def test_cells_go_on(tmp_path):
    calls = []

    def measured(number):
        def measure():
            calls.append(number)
            if number == 1 and calls.count(1) == 1:
                raise ValueError("cut")
            return {"number": number}

        return measure

    plan = [cells.Cell(f"cell {number}", measured(number)) for number in range(3)]
    assert cells.run(plan, tmp_path) == 2
    assert [cell.name for cell in cells.missing(plan, tmp_path)] == ["cell 1"]
    (tmp_path / "cell-2.json").write_text("{", encoding="utf-8")
    assert cells.run(plan, tmp_path) == 2
    assert calls == [0, 1, 2, 1, 2]
    assert cells.run(plan, tmp_path) == 0
    assert len(cells.results(tmp_path)) == 3


def test_the_protocol_is_summed_over_draws(tmp_path):
    block = spibb.measure_tabular("grid", range(3), sizes=(10, 50))
    cell = cells.Cell("grid 00000", lambda: block)
    cells.run([cell], tmp_path / "spibb")

    def improve(log, *, gamma, seed, cores):
        assert gamma == GAMMA
        return SimpleNamespace(recommended=False, uplift=None, reason="too few rows")

    answer = spibb.measure_ours("grid", 1, 10, improve)
    cells.run([cells.Cell("grid 10 1", lambda: answer)], tmp_path / "spibb-ours")
    table = {(line["size"], line["method"]): line for line in report.protocol(tmp_path)}
    assert table[10, "spibb"]["draws"] == 3
    scores = [line["scores"]["spibb"] for line in block if line["size"] == 10]
    assert table[10, "spibb"]["mean"] == pytest.approx(np.mean(scores), abs=1e-4)
    assert table[10, "ours"]["mean"] == 0.0
    assert table[10, "spibb (ours' draws)"]["draws"] == 1
    # the worst 1 % of three draws is less than one draw
    assert table[10, "spibb"]["worst 1 %"] is None


def test_the_same_seed_gives_the_same_log():
    first = spibb.measure_tabular("grid", range(1), sizes=(20,))
    assert first == spibb.measure_tabular("grid", range(1), sizes=(20,))


def test_half_of_the_logs_are_not_for_tuning():
    halves = [entry.half for entry in ENTRIES.values()]
    assert len(halves) >= 40
    assert abs(halves.count(TUNING) - halves.count(TEST)) <= 1
    for half in (TUNING, TEST):
        kinds = {entry.kind for entry in ENTRIES.values() if entry.half == half}
        assert len(kinds) == 7


@pytest.mark.parametrize(
    "name", [name for name, entry in ENTRIES.items() if entry.kind == "nothing"]
)
def test_nothing_is_better_where_the_name_says_so(name):
    world = ENTRIES[name].make()
    behavior = world.behavior_value().value
    assert world.best_value() - behavior < 1e-3 * max(abs(behavior), 0.01)


def test_bandit_values_agree_with_a_long_log():
    world = ENTRIES["clicks 10000"].make()
    log = world.log()
    error = log.rewards.std() / len(log) ** 0.5
    assert abs(log.rewards.mean() - world.behavior_value().value) < 4.0 * error
    behavior = world.behavior_policy()
    assert world.value(behavior) == world.behavior_value()


def test_the_command_writes_a_summary(tmp_path, monkeypatch, world):
    entry = Entry("tiny", "icu", TEST, lambda: world)
    monkeypatch.setattr(command, "ENTRIES", {"tiny": entry})
    monkeypatch.setattr(report, "ENTRIES", {"tiny": entry})
    plan = command.our_cells([entry], recommend(world, 0.5))
    cells.run(plan, tmp_path / "logs")
    command.write_summary(tmp_path, tmp_path)
    content = json.loads((tmp_path / "improve.json").read_text())
    assert content["halves"][TEST]["ours"]["recommended"] == 1
    assert content["halves"][TUNING]["ours"]["logs"] == 0


@pytest.mark.parametrize("law", few_units.LAWS)
def test_laws_of_uplifts_have_mean_zero(law):
    draws = few_units.LAWS[law](np.random.default_rng(0), (400, 500))
    error = draws.std() / np.sqrt(draws.size)
    assert abs(draws.mean()) < 5.0 * error


def test_lower_ends_are_those_of_the_certificate():
    uplifts = np.random.default_rng(0).normal(size=(3, 20))
    ends = few_units.ends_by_student(uplifts)
    for row, end in zip(uplifts, ends, strict=True):
        # of the mean without each unit in turn
        deviations = (row - row.mean()) / (len(row) - 1)
        interval = student_interval(
            float(row.mean()), deviations, few_units.LEVEL, float(len(row))
        )
        assert end == pytest.approx(interval.low)


@pytest.mark.parametrize("units", [8, 15])
def test_what_no_unit_shows_is_missed_as_often_as_all_are_spared(units):
    """Of few units every lower end without a loss is false, and no other."""
    shares = few_units.measure(few_units.losses(10), units, draws=4000)
    spared = 0.9**units
    tolerance = 4.0 * np.sqrt(spared * (1.0 - spared) / 4000)
    assert shares["student"] == pytest.approx(spared, abs=tolerance)
    assert shares["resampled"] == pytest.approx(spared, abs=tolerance)


def test_folds_certify_on_all_rows_and_parts_on_theirs():
    generator = np.random.default_rng(0)
    contexts = generator.normal(size=(1000, 4))
    offers = generator.choice(4, size=1000, p=[0.4, 0.3, 0.2, 0.1])
    rows = cross_fitting.Rows(contexts, offers, (offers == 3).astype(float))
    order = generator.permutation(1000)
    assert len(cross_fitting.crossed(rows, order)) == cross_fitting.FOLDS
    (policy,) = cross_fitting.in_three(rows, order, 0.6, 0.2)
    assert policy.chances(contexts)[:, 3].mean() > 0.9
    # its uplift over the logged rewards is certain, and right
    assert policy.uplifts(rows).mean() == pytest.approx(0.9, abs=0.05)
    worthless = cross_fitting.Rows(contexts, offers, np.zeros(1000))
    assert cross_fitting.crossed(worthless, order) == []
