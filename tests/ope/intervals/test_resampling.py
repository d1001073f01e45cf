"""The bootstrap of an estimating equation: each draw is the estimate of the resampled log."""

import dataclasses

import numpy as np
import pytest
import torch

import koffline.ope.intervals.resampling as resampling
from koffline.errors import ConfigError
from koffline.ope.intervals import make_interval
from koffline.ope.intervals.calibrated import make_profile
from koffline.ope.intervals.resampling import (
    Units,
    kernel_equation,
    pivot_interval,
    pivotal_interval,
    resample_values,
)
from koffline.ope.intervals.settings import KernelIntervalSettings
from koffline.ope.intervals.value_range import best_constant
from koffline.ope.names import CERTIFIED_SYSTEM_KINDS, KERNEL_CALIBRATED, SYSTEM_KINDS
from tests.ope.intervals.systems import finite_system, small_system


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
        left, right, total = np.diag(equation.ridge.numpy()), equation.ridge.numpy() * centre, 0.0
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


def test_the_whole_log_once_gives_the_estimate() -> None:
    system = small_system(2)
    equation, units = kernel_equation(system), _units(system)
    values, _ = resample_values(equation, units, np.ones((1, 5), dtype=np.int64))
    assert values[0] == pytest.approx(make_profile(system).value, rel=1e-9)


def test_units_without_weight_are_not_drawn() -> None:
    system = small_system(3)
    weights = system.row_weights.clone()
    weights[2:5] = 0.0  # the second unit
    units = Units(system.unit_starts, weights, False)
    counts = units.draw_counts(50, seed=0)
    assert counts[:, 1].sum() == 0
    assert set(counts.sum(axis=1)) == {4}


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


def test_errors_are_turned_around() -> None:
    draws = np.append(np.linspace(0.0, 1.0, 101), np.nan)
    assert pivotal_interval(0.2, draws, 0.9) == pytest.approx((0.4 - 0.95, 0.4 - 0.05))


def test_spread_agrees_with_the_sandwich() -> None:
    """Two ways to the same asymptotic variance; 400 draws know a spread to 3.5 %, n = 2000 adds its own."""
    _, system = finite_system("chain_tuples", rows=2000)
    result = pivot_interval(system, KernelIntervalSettings(draws=400))
    assert result.details["spread"] == pytest.approx(make_profile(system).standard_error, rel=0.12)
    assert "rows resampled" in result.interval.assumptions


def test_few_episodes_and_lost_draws_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    system = small_system(4)
    result = pivot_interval(system, KernelIntervalSettings(draws=99))
    assert "5 episodes to draw from" in result.warnings[0]
    one = dataclasses.replace(system, start_weights=torch.tensor([1.0, 0, 0, 0, 0], dtype=torch.float64))
    lost = pivot_interval(one, KernelIntervalSettings(draws=99))  # a third of the draws have no start state
    assert lost.interval is None
    assert "no answer" in lost.warnings[-1]


@pytest.mark.parametrize("kind", SYSTEM_KINDS)
def test_every_kind_has_one_entry(kind: str) -> None:
    exact, system = finite_system("chain_tuples", rows=500)
    result = make_interval(kind, system, level=0.9, draws=199, seed=2)
    assert result.interval.kind == result.kind == kind
    assert result.interval.level == 0.9
    assert result.interval.holds(exact.value)
    assert result.interval.assumptions.startswith("Holds" if kind in CERTIFIED_SYSTEM_KINDS else "Asymptotic")
    low, high = system.value_bounds
    assert low <= result.interval.low <= result.interval.high <= high


def test_one_episode_has_nothing_to_resample() -> None:
    lone = dataclasses.replace(small_system(6), unit_starts=np.array([0]))
    result = pivot_interval(lone, KernelIntervalSettings(draws=99))
    assert result.interval is None
    assert "one episode" in result.warnings[0]


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
    _, system = finite_system("chain_tuples", rows=300)
    result = make_interval("bootstrap-pivot", system, level=0.9995)
    assert result.details["draws"] == 3999
    with pytest.raises(ConfigError, match="give 3999 or more"):
        make_interval("bootstrap-pivot", system, level=0.9995, draws=999)
    with pytest.raises(ConfigError, match="level is 2"):
        make_interval("bootstrap-pivot", system, level=2.0)


def test_unknown_kinds_are_refused() -> None:
    with pytest.raises(ConfigError, match="give one of bootstrap-pivot"):
        make_interval("kernel", small_system())
    assert KERNEL_CALIBRATED in SYSTEM_KINDS
