"""The bootstrap of an estimating equation: each draw is the estimate of the resampled log."""

import dataclasses

import numpy as np
import pytest
import torch

import koffline.ope.intervals.resampling as resampling
from koffline.config import make_settings
from koffline.errors import ConfigError
from koffline.ope.fitted import FittedValues
from koffline.ope.intervals import make_interval
from koffline.ope.intervals.base import KernelIntervalSettings, best_constant, enough_draws, make_profile
from koffline.ope.intervals.resampling import (
    Units,
    kernel_equation,
    network_equation,
    pivot_interval,
    resample_values,
    resampled_errors,
)
from koffline.ope.last_layer import last_layer
from koffline.ope.learning import Resampling
from koffline.ope.names import SYSTEM_KINDS
from koffline.ope.training import fit_value_functions
from tests.exact_problems import EXACT_PROBLEMS
from tests.ope.intervals.systems import finite_system, prepared, small_system


def _units(system) -> Units:
    return Units(system.unit_starts, system.row_weights, system.fixed_starts)


@pytest.mark.parametrize(("constants", "fixed"), [(0, False), (1, True)])
def test_draws_solve_the_resampled_equation(constants: int, fixed: bool) -> None:
    """By loops: rows of a unit drawn twice count twice, instruments stay, starts go with their units."""
    system = small_system(1, constants=constants, fixed_starts=fixed)
    equation, units = kernel_equation(system), _units(system)
    counts = units.draw_counts(5, seed=3)
    values, exact = resample_values(equation, units, counts)
    assert exact
    matrix, centre = system.projected[:, :-1], best_constant(system).numpy()
    psi = system.instruments(system.kernel_inputs)
    lengths = np.diff(np.append(system.unit_starts, len(system)))
    for draw, per_unit in enumerate(counts):
        times = np.repeat(per_unit, lengths)
        left, right, total = equation.ridge.numpy(), equation.ridge.numpy() @ centre, 0.0
        weights = times * system.row_weights.numpy()
        for i in range(len(system)):
            instrument = (psi[i] @ matrix).numpy() * weights[i] / weights.sum()
            left = left + np.outer(instrument, system.difference[i].numpy())
            right = right + instrument * float(system.rewards[i])
        theta = np.linalg.solve(left, right)
        mean, total = np.zeros(system.parameters), 0.0
        for u in range(5):
            weight = float(system.start_weights[u]) * (1.0 if fixed else per_unit[u])
            mean, total = mean + weight * system.starts[u].numpy(), total + weight
        assert values[draw] == pytest.approx(mean @ theta / total, rel=1e-8)


def test_first_order_where_matrices_are_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    _, system = finite_system("chain_tuples", rows=3000)
    equation, units = kernel_equation(system), _units(system)
    counts = units.draw_counts(300, seed=1)
    exact, is_exact = resample_values(equation, units, counts)
    monkeypatch.setattr(resampling, "_MOST_NUMBERS", 1.0)
    first, is_first_exact = resample_values(equation, units, counts)
    assert (is_exact, is_first_exact) == (True, False)
    assert np.corrcoef(exact, first)[0, 1] > 0.99
    assert first.std() == pytest.approx(exact.std(), rel=0.05)  # second-order terms are of relative size 1/√n
    assert "first order" in pivot_interval(system, KernelIntervalSettings(draws=99)).interval.assumptions


def test_spread_agrees_with_the_sandwich() -> None:
    """Two ways to the same asymptotic variance; 400 draws know a spread to 3.5 %, n = 2000 adds its own."""
    _, system = finite_system("chain_tuples", rows=2000)
    errors, _ = resampled_errors([kernel_equation(system)], _units(system), 400, 0)
    assert errors.std(ddof=1) == pytest.approx(float(make_profile(system).influences.norm()), rel=0.12)
    assert "rows resampled" in pivot_interval(system, KernelIntervalSettings(draws=99)).interval.assumptions


@pytest.mark.parametrize("kind", SYSTEM_KINDS)
def test_rewards_that_are_all_zero(kind: str) -> None:
    """The value is zero and every kind says so: bounds of values that rewards imply are [0, 0]."""
    system = small_system(7, rows=80, constants=1)
    silent = dataclasses.replace(
        system, rewards=0.0 * system.rewards, value_bounds=(0.0, 0.0), unit_starts=np.arange(0, 80, 16)
    )
    interval = make_interval(kind, silent, draws=99).interval
    assert (interval.low, interval.high) == (0.0, 0.0)


def test_high_levels_get_the_draws_they_need() -> None:
    assert (enough_draws(0.9995, 999), enough_draws(0.95, 999)) == (3999, 999)
    with pytest.raises(ConfigError, match="which a bootstrap could only tell by"):
        make_interval("bootstrap-pivot", small_system(), level=1.0 - 1e-9)


@pytest.fixture(scope="module")
def chain() -> FittedValues:
    exact = EXACT_PROBLEMS["chain_off"](3, 600)
    problem = prepared(exact)
    chosen = {"steps": 200, "hidden_units": (16, 16), "instruments": 200, "full_replicas": 2}
    settings = make_settings({"gamma": exact.gamma, **chosen, "resampled_replicas": 2}, {})
    with torch.no_grad():
        return fit_value_functions(problem, Resampling.draw(problem, 2, 2, 0), settings)


@pytest.mark.parametrize("head", ["kloss", "lstd"])
def test_the_head_solves_its_equation(chain: FittedValues, head: str) -> None:
    """Without the ridge's pull the mean of Ωδ̂ would be zero; it is τ(θ̂ − θ_trained)."""
    equation = network_equation(chain, 1, head)
    gap = (equation.instruments * equation.residuals[:, None]).mean(dim=0)
    trained = last_layer(chain.record.network.select([1]))[0]
    # the table is float32: its last bit times the size of the products
    assert torch.allclose(gap, equation.ridge @ (equation.theta - trained), atol=1e-6)
    value = float(equation.start_weights @ (equation.starts @ equation.theta))
    value *= chain.problem.reward_scale / float(equation.start_weights.sum())
    assert value == pytest.approx(chain.replica_values[head][1, 1], rel=1e-4)
