"""What the paper leaves open reaches problem and training; stacks of logs equal single
logs; the page.
"""

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from koffline.builders.uniform import learn_grid_policy, random_policy
from koffline.envs.boxes import GymnasiumPole, NoisyPole, make_world
from koffline.errors import ConfigError
from koffline.experiments import STAGES, WORLDS, choices
from koffline.experiments.ablation import variants
from koffline.experiments.benchmark import (
    Metrics,
    Problem,
    ProblemSettings,
    Scaling,
    SoftmaxProblem,
    as_table,
    build_problem,
    scaling_of,
)
from koffline.experiments.cells import Cell, Scale, TrainingSettings, _train
from koffline.experiments.choices import (
    Chapter,
    ChoiceCell,
    ChoiceTraining,
    PaperReading,
    settings_of,
    train_on_logs,
)
from koffline.experiments.choices_traits import (
    conditioning,
    leading_share,
    measure_traits,
    variances_of,
)
from koffline.experiments.exact_losses import DIAG_WEIGHTS
from koffline.experiments.figure_choices import compared, compared_so_far
from koffline.experiments.figure_methods import OBJECTIVES, evaluation_cells
from koffline.experiments.result_files import ChoiceRow, read_results
from koffline.experiments.seed_statistics import SeedInterval
from koffline.kernels import Gaussian
from koffline.replicas import StackedMLP
from tests.experiments.shrunk import blank_figures, shrink_experiments
from tests.refusals import assert_refused, run_cli, succeed

SMALL = SoftmaxProblem(
    "puddle_world", rows=120, held_out_rows=40, truth_repeats=3, temperature=0.3
)
TINY = ChoiceTraining(
    learning_rates=(0.003, 0.001),
    seeds=2,
    epochs=4,
    batch_size=50,
    hidden=(4,),
    probe_every=1,
)


@pytest.fixture(scope="module")
def problems() -> list[Problem]:
    return [build_problem(replace(SMALL, seed=seed)) for seed in (0, 1)]


def test_names_of_cells_in_users_folders_stay() -> None:
    """Names that were computed before `choices` existed."""
    puddle = {
        cell.method: cell for cell in evaluation_cells(("puddle_world",), Scale())
    }
    assert puddle["sbeed"].name == "puddle_world-sbeed-b3b6c597a18a"
    assert puddle["sbeed"].problem.name == "problem-puddle_world-e2c980864a49"
    car = {cell.method: cell for cell in evaluation_cells(("mountain_car",), Scale())}
    assert car["fvi"].name == "mountain_car-fvi-0847bd875759"
    balance = [
        cell
        for *place, cell in variants("ablation", Scale())
        if place == ["reward", "balance fvi"]
    ]
    assert balance[0].name == "cart_pole-fvi-dbf3ced52b81"
    assert balance[0].problem.name == "problem-cart_pole-77f147db9e68"


@pytest.mark.parametrize("world", WORLDS)
def test_the_stages_of_a_world_are_its_factorial(world: str) -> None:
    stages = {stage: settings_of(Chapter(world, stage)) for stage in STAGES}
    together = list(itertools.chain.from_iterable(stages.values()))
    assert len(set(together)) == len(together) == 32
    usual = make_world(world)
    first = stages["temperature"][0]
    assert (first.noise, first.scaling, first.reward_divisor) == (
        usual.noise,
        "unit",
        usual.reward_scale,
    )
    assert (
        len({setting.temperature for setting in stages["temperature"]})
        == len(stages["temperature"])
        == 4
    )
    telling = sorted({setting.temperature for setting in stages["single"]})
    assert telling == pytest.approx([first.temperature, 10.0 * first.temperature])
    assert len(stages["single"]) == (8 if "pole" in world else 6)


def test_the_settings_are_those_of_the_issue() -> None:
    puddle = [
        s for stage in STAGES for s in settings_of(Chapter("puddle_world", stage))
    ]
    assert {s.temperature for s in puddle} == {0.3, 1.0, 3.0, math.inf}
    assert {s.noise for s in puddle} == {0.01, 0.05}
    assert {s.reward_divisor for s in puddle} == {20.0, 1.0}
    poles = [s for stage in STAGES for s in settings_of(Chapter("cart_pole", stage))]
    assert {s.fastest for s in poles} == {4.0, 6.0}
    assert {s.noise for s in poles} == {10.0, 50.0}
    assert {s.scaling for s in poles} == {"unit", "z"}
    assert choices.CHAPTERS[0] == Chapter("puddle_world", "temperature")
    assert {chapter.world for chapter in choices.CHAPTERS} == set(WORLDS)


def test_a_setting_reaches_problem_and_training() -> None:
    setting = PaperReading("gymnasium_pole", 0.01, 10.0, "z", 1.0, 6.0)
    scale = Scale(half_epochs=True, seed=3)
    problems = choices.problems_of(scale, setting)
    assert [problem.seed for problem in problems] == [3, 4, 5, 6, 7]
    world = problems[0].build_world()
    assert (world.noise, world.low[1], world.high[1]) == (10.0, -6.0, 6.0)
    assert problems[0].target_policy().temperature == 0.01
    training = choices.training_of(scale, setting)
    assert (training.scaling, training.epochs, training.seeds) == ("z", 1000, 2)
    puddle = PaperReading("puddle_world", 3.0, 0.01, "unit", 1.0, None)
    unscaled = choices.training_of(scale, puddle)
    assert unscaled.epochs == 2000
    assert unscaled.reward_factor * make_world("puddle_world").reward_scale == 1.0
    mixture = choices.cell_of(scale, puddle, choices.MIXTURE).objective
    assert mixture.diag_weight == pytest.approx(1.0 / 5000)
    names = {
        choices.cell_of(scale, s, "kloss").name
        for s in (setting, puddle, replace(puddle, scaling="z"))
    }
    assert len(names) == 3


def test_the_usual_temperature_gives_the_usual_problem(problems: list[Problem]) -> None:
    usual = build_problem(
        ProblemSettings("puddle_world", rows=120, held_out_rows=40, truth_repeats=3)
    )
    np.testing.assert_array_equal(problems[0].log.next_states, usual.log.next_states)
    np.testing.assert_array_equal(
        problems[0].monte_carlo.values, usual.monte_carlo.values
    )


def test_the_temperature_is_that_of_the_policy() -> None:
    states = np.array([[0.2, 0.2], [0.7, 0.5]])
    usual = learn_grid_policy("puddle_world")(states)
    warm = replace(SMALL, temperature=3.0).target_policy()(states)
    # (e^(q/.3))^(1/10) = e^(q/3)
    expected = usual**0.1 / (usual**0.1).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(warm, expected, rtol=1e-6)
    np.testing.assert_array_equal(
        replace(SMALL, temperature=math.inf).target_policy()(states), 0.25
    )


def test_the_random_policy_is_uniform_everywhere() -> None:
    policy = random_policy(make_world("mountain_car"))
    np.testing.assert_allclose(policy(np.array([[-1.2, 0.07], [0.0, 0.0]])), 1.0 / 3.0)


@pytest.mark.parametrize("kind", [NoisyPole, GymnasiumPole])
def test_the_box_cuts_velocities_where_it_ends(kind: type[NoisyPole]) -> None:
    """A pole at the angle 0.1 that turns with 4.9 and is pushed on."""
    state = np.array([[0.1, 4.9]])
    push = np.array([0])
    wide = kind(noise=0.0, fastest=6.0).move(state, push, np.zeros(1))
    narrow = kind(noise=0.0).move(state, push, np.zeros(1))
    assert 4.9 < wide.state[0, 1] <= 6.0
    assert narrow.state[0, 1] == 4.0
    assert kind(fastest=6.0).low == (-kind.widest, -6.0)


@pytest.mark.parametrize("fastest", [0.0, -4.0, math.inf, math.nan])
def test_a_box_without_width_is_refused(fastest: float) -> None:
    with pytest.raises(ConfigError, match="fastest"):
        NoisyPole(fastest=fastest)


def test_scalings_by_hand(problems: list[Problem]) -> None:
    world = replace(make_world("cart_pole"), fastest=6.0)
    np.testing.assert_allclose(
        Scaling.to_unit_square(world)(np.array([0.0, 3.0])), [0.5, 0.75]
    )
    states = np.array([[1.0, 0.0], [3.0, 10.0]])
    np.testing.assert_allclose(
        Scaling.to_z_scores(states)(states), [[-1.0, -1.0], [1.0, 1.0]]
    )
    z_scores = as_table(
        problems[0].log, problems[0].world, 20.0, scaling_of("z", problems[0])
    )
    np.testing.assert_allclose(z_scores.inputs.mean(dim=0), 0.0, atol=1e-6)
    np.testing.assert_allclose(
        z_scores.compared.std(dim=0, correction=0), 1.0, rtol=1e-5
    )
    torch.testing.assert_close(
        z_scores.rewards, torch.from_numpy(problems[0].log.rewards / 20.0).float()
    )


def test_measures_do_not_depend_on_the_scaling(problems: list[Problem]) -> None:
    """A network of z-scores whose first layer undoes them has the numbers of the one on
    the unit square.
    """
    problem = problems[0]
    square = scaling_of("unit", problem)
    z_scores = scaling_of("z", problem)
    network = StackedMLP.initialise((2, 5, 1), [1, 2])
    moved = network.select([0, 1])
    (weight, bias), *_ = moved.layers(moved.flat)
    ratio = torch.from_numpy(z_scores.spread / square.spread).float()
    shift = torch.from_numpy((z_scores.centre - square.centre) / square.spread).float()
    bias += (shift @ weight).unsqueeze(1)
    weight *= ratio[:, None]
    with torch.no_grad():
        on_square = Metrics(problem, 20.0, square)
        other = Metrics(problem, 20.0, z_scores)
        torch.testing.assert_close(
            on_square(0, network), other(0, moved), rtol=1e-3, atol=1e-4
        )
    np.testing.assert_allclose(
        on_square.held_out_loss(network), other.held_out_loss(moved), rtol=1e-3
    )
    np.testing.assert_allclose(
        on_square.values_at_backups(network), other.values_at_backups(moved), rtol=1e-3
    )


@pytest.mark.parametrize("method", ["kloss", "fvi", "sbeed", "gtd2"])
def test_a_stack_of_logs_has_the_numbers_of_each_log(
    problems: list[Problem], method: str
) -> None:
    """The first log draws the seeds 0 and 1, as a cell of `figure-puddle` does."""
    cell = ChoiceCell((SMALL, replace(SMALL, seed=1)), method, OBJECTIVES[method], TINY)
    together = train_on_logs(cell, problems)
    training = TrainingSettings((0.003, 0.001), 2, 4, 50, (4,), 1)
    single = _train(Cell(SMALL, method, OBJECTIVES[method], training), problems[0])
    for name, curve in single.curve.items():
        # Single precision; the kernel's exponents are centred on other means.
        np.testing.assert_allclose(
            together.curve[name][:, :, 0], curve, rtol=2e-3, atol=1e-5
        )
    np.testing.assert_allclose(together.held_out[:, 0], single.held_out, rtol=2e-3)
    assert together.of_log(0).value_variance == single.value_variance
    assert together.curve["mse_paper"].shape == (4, 2, 2, 2)
    assert together.final_values.shape == (2, 2, 2, 120)
    errors = together.final_values[:, 1] - problems[1].monte_carlo.values
    last = (errors**2).mean(axis=-1) - problems[1].monte_carlo.noise
    np.testing.assert_allclose(
        together.curve["mse_monte_carlo"][-1, :, 1], last, rtol=1e-3
    )


def test_backup_variances_by_hand() -> None:
    # one state, two actions, two draws
    targets = np.array([[[1.0, 3.0], [10.0, 10.0]]])
    transition, whole = variances_of(targets, np.array([[0.5, 0.5]]))
    assert transition == pytest.approx(0.5 * 2.0)
    # Means 2 and 10: the spread of actions is 16, of which the noise of the means
    # explains ¼ · 2 / 2.
    assert whole == pytest.approx(1.0 + 16.0 - 0.25)


def test_backup_variances_are_unbiased() -> None:
    """Targets N(1, 4) and N(5, 1), chosen with 0.3 and 0.7: variances 1.9, and 1.9 + 16
    · 0.21.
    """
    normal = np.random.default_rng(0).standard_normal((40_000, 2, 4))
    targets = np.array([[1.0], [5.0]]) + np.array([[2.0], [1.0]]) * normal
    variances = variances_of(targets, np.tile([0.3, 0.7], (40_000, 1)))
    # standard errors below 0.6 %
    assert variances == pytest.approx((1.9, 1.9 + 16.0 * 0.21), rel=0.02)


def test_conditioning_by_hand() -> None:
    """Eigenvalues 100, 1 and 1e-30; values with centred squares in all three
    directions.
    """
    eigenvalues, depth = conditioning(
        np.diag([1.0, 100.0, 1e-30]), np.array([3.0, 0.0, 0.0])
    )
    np.testing.assert_allclose(eigenvalues, [100.0, 1.0, 1e-14])
    # Centred (2, −1, −1): squares 4 at 2 powers of ten, 1 at none, 1 at 16.
    assert depth == pytest.approx((4 * 2 + 1 * 0 + 1 * 16) / 6)


def test_the_leading_share_of_a_constant_error_and_of_a_rough_one(
    problems: list[Problem],
) -> None:
    problem = problems[0]
    scaling = scaling_of("unit", problems[0])
    exact = replace(problem.monte_carlo, standard_errors=np.zeros(120))
    problem = replace(problem, monte_carlo=exact)
    rough = np.random.default_rng(0).choice([-1.0, 1.0], size=120)
    values = exact.values + np.stack([np.ones(120), rough])[:, None]
    constant, noisy = leading_share(values, problem, scaling, Gaussian(0.5))[:, 0]
    assert constant > 0.99
    assert noisy < 0.25  # ten of 120 directions hold a twelfth of it on average


def test_traits_of_a_deterministic_world_have_no_transition_noise() -> None:
    quiet = replace(SMALL, noise=0.0)
    traits = measure_traits(
        [build_problem(quiet), build_problem(replace(quiet, seed=1))], "unit"
    )
    np.testing.assert_allclose(traits.transition_share, 0.0, atol=1e-12)
    assert (traits.backup_share > 0.0).all()  # actions are drawn
    assert traits.kernel_spread > 1e3
    assert traits.kernel_depth > traits.squared_depth > 0.0


def row_of(
    method: str, by_log: tuple[float | None, ...], **changes: object
) -> ChoiceRow:
    level = SeedInterval(1.0, 0.9, 1.1)
    row = ChoiceRow(
        "puddle_world",
        3.0,
        0.01,
        "unit",
        20.0,
        None,
        method,
        3,
        2,
        10,
        3,
        0.1,
        0.001,
        by_log,
        level,
        level,
        1.0,
        level,
        0,
        0,
        0.001,
        by_log,
        level,
    )
    return replace(row, **changes)


def test_the_kernel_loss_is_compared_with_the_best_other() -> None:
    errors = {
        "kloss": (0.2, 0.21, 0.19),
        "rg": (1.8, 1.7, 1.9),
        "fvi": (0.1, None, 0.1),
        "td0": (4.0, 4.1, 4.0),
    }
    rows = [row_of(method, by_log) for method, by_log in errors.items()]
    assert compared(rows) == []  # two methods are missing
    (so_far,) = compared_so_far(rows)
    assert (so_far.rival, so_far.finished_rivals, so_far.is_complete) == (
        "rg",
        3,
        False,
    )
    # a method that is missing may still be better
    assert so_far.ratio.high < 1.0
    assert so_far.verdict == "level"
    rows += [row_of("gtd2", (9.0, 9.0, 9.0)), row_of("sbeed", (0.6, 0.61, 0.59))]
    rows += [row_of("kloss_mixture", (0.01, 0.01, 0.01))]  # a kernel loss is no rival
    (comparison,) = compared(rows)
    assert comparison.rival == "sbeed"  # FVI diverged on a log
    assert comparison.ratio.value == pytest.approx(1.0 / 3.0, rel=1e-3)
    assert comparison.verdict == "wins"
    rows = [
        replace(row, by_log=(None, 0.2, 0.2)) if row.method == "kloss" else row
        for row in rows
    ]
    assert compared(rows)[0].verdict == "loses"


@pytest.fixture
def shrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    shrink_experiments(monkeypatch)
    blank_figures(monkeypatch)


def test_the_experiment_goes_on_and_shows_what_is_finished(
    shrunk: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = choices.METHODS
    monkeypatch.setattr(choices, "METHODS", ("kloss", "rg"))
    succeed("reproduce", "choices", "--quiet", "--out", tmp_path)
    monkeypatch.setattr(choices, "METHODS", whole)
    succeed("reproduce", "choices", "--only-finished", "--quiet", "--out", tmp_path)
    partial = read_results(tmp_path / "choices.json")
    assert {row.method for row in partial.choices} == {"kloss", "rg"}
    assert len(partial.extra["not_run"]) == 2  # settings
    assert (tmp_path / "choices.png").exists()  # of what is finished
    assert "fvi, td0, kloss_mixture, gtd2, sbeed" in (
        tmp_path / "choices.md"
    ).read_text(encoding="utf-8")
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "cells").iterdir()}
    succeed("reproduce", "choices", "--quiet", "--out", tmp_path)
    assert all(path.stat().st_mtime_ns == when for path, when in written.items())
    results = read_results(tmp_path / "choices.json")
    assert results.extra["not_run"] == []
    assert len(results.choices) == 2 * len(whole)
    assert {(row.logs, row.seeds) for row in results.choices} == {(2, 2)}
    assert {row.temperature for row in results.choices} == {0.3, None}
    assert len(results.traits) == 2
    assert [(row.temperature, row.method) for row in results.minimisers] == [
        *((0.3, method) for method in DIAG_WEIGHTS),
        *((None, method) for method in DIAG_WEIGHTS),
    ]
    places = {correlation.world for correlation in results.correlations}
    assert places == {"puddle_world T 0.3", "puddle_world random"}
    assert all(0.0 <= (row.swinging or 0.0) <= 1.0 for row in results.choices)
    assert all(
        row.hours >= 0.0 and row.error.low <= row.error.value for row in results.choices
    )
    for suffix in (".png", "-paper.png", "-temperatures.svg", ".curves.h5"):
        assert (tmp_path / f"choices{suffix}").exists()
    content = json.loads((tmp_path / "choices.json").read_text())
    assert "half_epochs" not in content["settings"]
    assert_refused(
        run_cli("reproduce", "choices", "--half-epochs", "--out", tmp_path), "--force"
    )


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("figure-toy", "--only", "Ant"), "only figure-mujoco has"),
        (("choices", "--only", "Ant"), "puddle_world"),
        (("choices", "--part", "final"), "temperature, single, factorial"),
        (("figure-mujoco", "--only", "puddle_world"), "Swimmer"),
        (("figure-puddle", "--half-epochs"), "--half-epochs"),
        (("claims", "--only-finished"), "claims.json does not exist"),
        (("figure-toy", "--only-finished"), "choices, claims, figure-puddle"),
    ],
)
def test_requests_of_another_experiment_are_one_line(
    words: tuple[str, ...], expected: str, tmp_path: Path
) -> None:
    assert_refused(run_cli("reproduce", *words, "--out", tmp_path), expected)


def test_a_world_and_a_stage_can_be_chosen(shrunk: None, tmp_path: Path) -> None:
    succeed(
        "reproduce", "choices", "--only", "mountain_car", "--quiet", "--out", tmp_path
    )
    assert read_results(tmp_path / "choices.json").choices == ()
    assert list((tmp_path / "cells").iterdir()) == []
