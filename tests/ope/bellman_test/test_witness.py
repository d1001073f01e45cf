"""The witness function against loops, its norm, maps and regions."""

import numpy as np
import pytest

import koffline
from koffline.errors import ConfigError, DataError
from tests import reference_bellman as reference
from tests.ope.bellman_test.problems import known_problem, simple_q
from tests.ope.problems import NOISY, SOFT, continuous_log, discrete_log
from tests.refusals import refused


@pytest.fixture(scope="module")
def plain():
    return koffline.bellman_test(simple_q, discrete_log(), SOFT, 0.9).witness


@pytest.fixture(scope="module")
def broken():
    """The test of Q^π with 1.5 more for action 1 in one corner."""
    known = known_problem(0, 1000)

    def q(s, a):
        return known.q(s, a) + 1.5 * (
            (s[:, 0] > 0.0) & (s[:, 1] > 0.0) & (np.asarray(a) == 1)
        )

    return known, koffline.bellman_test(q, known.transitions, known.policy, 0.9)


@pytest.mark.parametrize("kind", ["discrete", "continuous"])
def test_witness_is_the_loop(kind: str) -> None:
    log, policy = (
        (discrete_log(), SOFT) if kind == "discrete" else (continuous_log(), NOISY)
    )
    weights = np.random.default_rng(0).integers(0, 3, size=len(log)).astype(float)
    witness = koffline.bellman_test(
        simple_q, log.replace(weights=weights), policy, 0.9
    ).witness
    case = witness.case
    places = log.observations[5:9] + 0.1
    actions = log.actions[5:9]
    at = case.place(places, actions).numpy()
    for index, values in enumerate(np.stack(witness(places, actions), axis=1)):
        expected = reference.witness(
            case.residuals,
            case.weights,
            case.inputs.numpy(),
            at[index],
            case.kernel.bandwidth,
        )
        np.testing.assert_allclose(values, expected, rtol=1e-9)


def test_kernel_loss_is_the_squared_norm_of_the_witness(plain) -> None:
    """‖f*‖² = n⁻² Σ δ δ k = T/n: the mean of δ f*(x) over the rows."""
    log = discrete_log()
    residuals = plain.case.residuals
    statistic = koffline.bellman_test(simple_q, log, SOFT, 0.9).statistic
    at_rows = plain(log.observations, log.actions).witness
    assert residuals @ at_rows / len(log) == pytest.approx(
        statistic / len(log), rel=1e-10
    )


def test_regions_find_where_the_error_is_and_nothing_in_true_values(broken) -> None:
    known, result = broken
    worst, *_, least = result.witness.top_regions(4)
    assert (result.rejects, worst.is_significant, worst.action) == (True, True, 1)
    assert (worst.center > 0.0).all()
    # the value is too high there
    assert worst.mean_residual < -3 * worst.standard_error
    assert (known.transitions.actions[worst.rows] == 1).all()
    assert len(worst.rows) == worst.size
    assert abs(worst.z_score) >= abs(least.z_score)
    exact = koffline.bellman_test(known.q, known.transitions, known.policy, 0.9).witness
    assert not any(region.is_significant for region in exact.top_regions(5))


def test_maps_are_the_witness_on_a_grid(broken) -> None:
    _, result = broken
    mapped = result.witness.map(1, resolution=7)
    assert mapped.values.mean.shape == (7, 7)
    place = np.array([[mapped.axes[0][2], mapped.axes[1][5]]])
    assert mapped.values.mean[5, 2] == pytest.approx(
        result.witness(place, np.array([1])).mean[0], rel=1e-9
    )
    log = discrete_log()
    flat = log.replace(
        observations=log.observations[:, :1],
        next_observations=log.next_observations[:, :1],
    )
    with pytest.raises(
        ConfigError, match=r"states of two numbers, these have \(1,\); use top_regions"
    ):
        koffline.bellman_test(simple_q, flat, "uniform", 0.9).witness.map(1)


@pytest.mark.parametrize(
    ("states", "message"),
    [
        (np.zeros((3, 5)), "observations have shape"),
        (np.full((1, 2), np.nan), "finite"),
    ],
)
def test_places_that_do_not_exist_are_refused(plain, states, message: str) -> None:
    with refused(DataError, message):
        plain(states, np.zeros(len(states), dtype=int))
