"""The bootstrap of an estimating equation: each draw is the estimate of the resampled
log.
"""

import dataclasses

import numpy as np
import pytest

import koffline.ope.intervals as resampling
from koffline.data.hashing import poisson_counts
from koffline.errors import ConfigError
from koffline.ope.intervals import base, make_interval, pivot_interval, resample_values
from koffline.ope.names import SYSTEM_KINDS
from tests.ope.intervals.systems import finite_system, small_system


@pytest.mark.parametrize(("constants", "fixed"), [(0, False), (1, True)])
def test_draws_solve_the_resampled_equation(constants: int, fixed: bool) -> None:
    """By loops: rows of a unit drawn twice count twice, instruments stay, starts go
    with their units.
    """
    system = small_system(1, constants=constants, fixed=fixed)
    counts = poisson_counts(3, range(5), range(len(system.unit_starts)))
    values, exact = resample_values(system, counts)
    assert exact
    matrix = system.projected[:, :-1]
    centre = base.best_constant(system).numpy()
    ridge = np.diag(
        base.ridge_sizes(matrix.mT @ matrix, system.free, base.RIDGE).numpy()
    )
    psi = system.instruments(system.kernel_inputs)
    lengths = np.diff(np.append(system.unit_starts, len(system)))
    for draw, per_unit in enumerate(counts):
        times = np.repeat(per_unit, lengths)
        left = ridge
        right = ridge @ centre
        total = 0.0
        weights = times * system.row_weights.numpy()
        for i in range(len(system)):
            instrument = (psi[i] @ matrix).numpy() * weights[i] / weights.sum()
            left = left + np.outer(instrument, system.difference[i].numpy())
            right = right + instrument * float(system.rewards[i])
        theta = np.linalg.solve(left, right)
        mean = np.zeros(system.parameters)
        total = 0.0
        for u in range(5):
            weight = float(system.start_weights[u]) * (1.0 if fixed else per_unit[u])
            mean = mean + weight * system.starts[u].numpy()
            total = total + weight
        assert values[draw] == pytest.approx(mean @ theta / total, rel=1e-8)


def test_first_order_where_matrices_are_too_large(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, system = finite_system("chain_tuples", rows=3000)
    counts = poisson_counts(1, range(300), range(len(system.unit_starts)))
    exact, is_exact = resample_values(system, counts)
    monkeypatch.setattr(resampling, "_MOST_NUMBERS", 1.0)
    first, is_first_exact = resample_values(system, counts)
    assert (is_exact, is_first_exact) == (True, False)
    assert np.corrcoef(exact, first)[0, 1] > 0.99
    # second-order terms are of relative size 1/√n
    assert first.std() == pytest.approx(exact.std(), rel=0.05)
    assert (
        "first order"
        in pivot_interval(
            system, base.KernelIntervalSettings(draws=99)
        ).interval.assumptions
    )


def test_spread_agrees_with_the_sandwich() -> None:
    """Two ways to the same asymptotic variance; 400 draws know a spread to 3.5 %, n =
    2000 adds its own.
    """
    _, system = finite_system("chain_tuples", rows=2000)
    values, _ = resample_values(
        system, poisson_counts(0, range(400), range(len(system.unit_starts)))
    )
    assert values.std(ddof=1) == pytest.approx(
        float(base.make_profile(system).influences.norm()), rel=0.12
    )
    assert (
        "rows resampled"
        in pivot_interval(
            system, base.KernelIntervalSettings(draws=99)
        ).interval.assumptions
    )


@pytest.mark.parametrize("kind", SYSTEM_KINDS)
def test_rewards_that_are_all_zero(kind: str) -> None:
    """The value is zero and every kind says so: bounds of values that rewards imply are
    [0, 0].
    """
    system = small_system(7, rows=80, constants=1)
    silent = dataclasses.replace(
        system,
        rewards=0.0 * system.rewards,
        value_bounds=(0.0, 0.0),
        unit_starts=np.arange(0, 80, 16),
    )
    interval = make_interval(kind, silent, draws=99).interval
    assert (interval.low, interval.high) == (0.0, 0.0)


def test_high_levels_get_the_draws_they_need() -> None:
    assert (base.enough_draws(0.9995, 999), base.enough_draws(0.95, 999)) == (3999, 999)
    with pytest.raises(ConfigError, match="which a bootstrap could only tell by"):
        make_interval("bootstrap-pivot", small_system(), level=1.0 - 1e-9)
