"""Each estimator against plain loops, exact expectations; deviations, draws and the
blend.
"""

from dataclasses import replace

import numpy as np
import pytest
from scipy.optimize import minimize

from koffline.data.transitions import Discrete
from koffline.errors import DataError
from koffline.ope.importance.episode_means import cut_steps, least_error_mix, magic
from koffline.ope.log.row_values import RowValues
from koffline.ope.value_functions import as_value_function
from tests import reference_importance as reference
from tests.ope.importance.cases import (
    Case,
    episode_estimates,
    random_case,
    three_states,
    weighed,
)

LOOPS = {
    "is": "trajectory_is",
    "wis": "trajectory_wis",
    "pdis": "per_decision_is",
    "wpdis": "per_decision_wis",
    "dr": "doubly_robust",
    "wdr": "weighted_doubly_robust",
}
COUNTS = (
    np.random.default_rng(3).multinomial(9, np.full(9, 1 / 9), size=4).astype(float)
)
EACH = pytest.mark.parametrize("name", LOOPS)


@pytest.fixture(params=[0, 2], ids=["plain", "zeros"])
def case(request: pytest.FixtureRequest) -> Case:
    return random_case(request.param, zeros=request.param == 2)


@EACH
def test_estimator_equals_loops(case: Case, name: str) -> None:
    starts = (case.model.starts,) if name in ("dr", "wdr") else ()
    expected = getattr(reference, LOOPS[name])(
        case.episodes, case.problem.shares, *starts, 0.9
    )
    assert case.statistic(name).value == pytest.approx(expected, rel=1e-10, abs=1e-12)


def test_expectations_are_exact() -> None:
    """Over all paths with their probabilities every weight averages one, so even the
    ratios are exact.

    A wrong model cancels up to the cut; there its value of the last state stands in for
    the rest.
    """
    world = three_states()
    table = np.array([[0.4, -1.0], [2.0, 0.7], [5.0, -3.0]])
    q = as_value_function(
        lambda observations, actions: table[observations.argmax(axis=1), actions],
        Discrete(2),
        (3,),
    )
    estimates = episode_estimates(
        world.all_paths(), world.policy, 0.9, q=q, names=LOOPS, draws=10
    )
    at_cut = np.sum(world.target * table, axis=1)
    for name, estimate in estimates.items():
        last = at_cut if name in ("dr", "wdr") else np.zeros(3)
        assert estimate.value == pytest.approx(world.finite_value(0.9, last), abs=1e-12)


def counted(case: Case, counts: np.ndarray) -> Case:
    """The case with episodes counted that often, those of zero left out."""
    problem = case.problem
    model = case.model
    kept = counts > 0
    rows = np.repeat(kept, problem.lengths)
    lengths = problem.lengths[kept]
    shares = counts * problem.shares
    columns = {
        name: getattr(problem, name)[rows]
        for name in ("log_weights", "rewards", "discounts")
    }
    columns |= {"starts": np.cumsum(lengths) - lengths, "lengths": lengths}
    picked = replace(problem, shares=shares[kept] / shares.sum(), **columns)
    values = RowValues(model.now[rows], model.later[rows], model.starts[kept])
    return replace(case, problem=picked, model=values)


@EACH
def test_deviations_leave_episodes_out_and_draws_repeat_them(
    case: Case, name: str
) -> None:
    here = case.statistic(name)
    for i, left_out in enumerate(1.0 - np.eye(case.problem.n_episodes)):
        without = counted(case, left_out).statistic(name).value
        assert here.deviations[i] == pytest.approx(
            here.value - without, rel=1e-9, abs=1e-12
        )
    for draw, counts in zip(here.resampled(COUNTS), COUNTS, strict=True):
        assert draw == pytest.approx(
            counted(case, counts).statistic(name).value, rel=1e-9
        )


def test_sums_and_effective_sizes_equal_loops(case: Case) -> None:
    # (T, E)
    rows = np.array(reference.step_weights(case.episodes, case.problem.shares))
    totals = rows.sum(axis=1, keepdims=True)
    expected = np.divide(rows, totals, out=np.zeros_like(rows), where=totals > 0.0)
    all_parts = np.concatenate([parts for _, _, parts in case.problem.blocks()], axis=1)
    np.testing.assert_allclose(all_parts, expected.T, rtol=1e-12)
    expected = reference.effective_sizes(case.episodes, case.problem.shares)
    np.testing.assert_allclose(case.problem.effective_sizes, expected, rtol=1e-12)


def test_mix_is_that_of_a_general_solver() -> None:
    root = np.random.default_rng(0).standard_normal((6, 6))
    errors = root @ root.T
    mix = least_error_mix(errors)
    assert mix.sum() == pytest.approx(1.0)
    assert mix.min() >= 0.0
    limits = {
        "bounds": [(0.0, 1.0)] * 6,
        "constraints": {"type": "eq", "fun": lambda x: x.sum() - 1.0},
    }
    precise = {"method": "SLSQP", "options": {"ftol": 1e-14, "maxiter": 500}}
    other = minimize(lambda x: x @ errors @ x, np.full(6, 1 / 6), **limits, **precise)
    assert mix @ errors @ mix <= other.fun * (1.0 + 1e-6)
    np.testing.assert_allclose(
        least_error_mix(np.diag([1.0, 3.0])), [0.75, 0.25], rtol=1e-6
    )
    np.testing.assert_allclose(least_error_mix(np.zeros((4, 4))), 0.25)


def test_blend_is_no_worse_than_any_of_its_parts_by_its_own_measure() -> None:
    whole = random_case(2).statistic("wdr")
    counts = (
        np.random.default_rng(0)
        .multinomial(9, np.full(9, 1 / 9), size=100)
        .astype(float)
    )
    draws = whole.resampled(counts)
    cuts, mix = magic(whole, draws)
    values = whole.partial_values(cuts)
    low, high = np.quantile(draws, [0.25, 0.75])
    low = min(low, whole.value)
    high = max(high, whole.value)
    deviations = whole.partial_deviations(cuts)
    covariance = deviations.T @ deviations * 8 / 9
    best = reference.magic_error(values, covariance, low, high, mix)
    for single in np.eye(len(values)):
        assert best <= reference.magic_error(values, covariance, low, high, single) * (
            1.0 + 1e-8
        )
    # A model that is far off in its first values, which the residual of the first step
    # mends.
    off = replace(
        whole,
        first=whole.first + 1e4,
        rows=whole.rows - 1e4 * (whole.episodes.steps == 0),
    )
    assert magic(off, off.resampled(counts))[1][0] < 1e-3


def test_partial_sums_are_those_of_a_log_that_stops_there() -> None:
    case = random_case(5)
    whole = case.statistic("wdr")
    cuts = cut_steps(case.problem.horizon)
    for column, cut in enumerate(cuts):
        stopped = replace(
            whole, rows=np.where(case.problem.steps < cut, whole.rows, 0.0)
        )
        assert whole.partial_values(cuts)[column] == pytest.approx(stopped.value)
        np.testing.assert_allclose(
            whole.partial_deviations(cuts)[:, column], stopped.deviations
        )
        columns = case.episodes, case.problem.shares, case.model.starts
        expected = reference.weighted_doubly_robust(*columns, 0.9, cut - 1)
        assert stopped.value == pytest.approx(expected, rel=1e-10)


def test_clips_and_uneven_weights() -> None:
    case = random_case(4)
    ratios = case.problem.ratios.logs
    capped = weighed(case.transitions, ratios, clip=1.5)
    np.testing.assert_allclose(
        np.exp(capped.log_weights), np.minimum(np.exp(case.problem.log_weights), 1.5)
    )
    weights = np.asarray(case.transitions.weights).copy()
    row = int(np.flatnonzero(np.asarray(case.transitions.steps) == 1)[0])
    weights[row] *= 2.0
    with pytest.raises(DataError, match=f"row {row}"):
        weighed(case.transitions.replace(weights=weights), ratios)
