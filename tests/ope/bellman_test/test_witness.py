"""The witness function against loops, its norm, maps and regions."""

import numpy as np
import pytest
import torch

import koffline
from koffline.errors import ConfigError, DataError
from koffline.ope.bellman_test import witness_function
from tests import reference_bellman as reference
from tests.ope.bellman_test.problems import Known, known_problem
from tests.ope.problems import NOISY, SOFT, continuous_log, discrete_log


def simple_q(observations, actions):
    return np.sin(observations[:, 0]) + 0.3 * np.asarray(actions).reshape(len(observations), -1)[:, 0]


def broken(known: Known):
    """Q^π with 1.5 more for action 1 in one corner."""
    return lambda s, a: known.q(s, a) + 1.5 * ((s[:, 0] > 0.0) & (s[:, 1] > 0.0) & (np.asarray(a) == 1))


@pytest.mark.parametrize("kind", ["discrete", "continuous"])
def test_witness_is_the_loop(kind: str) -> None:
    weights = np.random.default_rng(0).integers(0, 3, size=60 if kind == "discrete" else 50).astype(float)
    log, policy = (discrete_log(), SOFT) if kind == "discrete" else (continuous_log(), NOISY)
    witness = witness_function(simple_q, log.replace(weights=weights), policy, 0.9)
    places = log.observations[5:9] + 0.1
    actions = log.actions[5:9]
    found = witness(places, actions)
    at = witness.space.place(places, actions).numpy()
    for index in range(4):
        expected = reference.witness(
            witness.residuals, witness.weights, witness.inputs, at[index], witness.space.bandwidth
        )
        numbers = [
            part[index] for part in (found.witness, found.mean, found.standard_error, found.effective_rows)
        ]
        np.testing.assert_allclose(numbers, expected, rtol=1e-9)


def test_kernel_loss_is_the_squared_norm_of_the_witness() -> None:
    """‖f*‖² = n⁻² Σ δ δ k = T/n: the mean of δ f*(x) over the rows."""
    log = discrete_log()
    result = koffline.bellman_test(simple_q, log, SOFT, 0.9)
    assert result.witness is not None
    at_rows = result.witness(log.observations, log.actions).witness
    assert result.witness.residuals @ at_rows / len(log) == pytest.approx(
        result.statistic / len(log), rel=1e-10
    )


def test_scores_never_exceed_the_root_of_the_effective_rows() -> None:
    witness = witness_function(simple_q, discrete_log(), SOFT, 0.9)
    far = np.array([[50.0, 50.0], [0.0, 0.0], [2.0, -1.0]])
    found = witness(far, np.array([0, 1, 2]))
    assert np.all(np.abs(found.z_scores) <= np.sqrt(found.effective_rows) + 1e-9)


def test_nothing_is_said_where_there_are_no_rows() -> None:
    log = discrete_log()
    witness = witness_function(simple_q, log, SOFT, 0.9, bandwidth=0.05)
    found = witness(np.array([[9.0, 9.0]]), np.array([0]))
    assert np.isnan(found.mean[0])
    assert found.effective_rows[0] == 0.0
    assert found.z_scores[0] == 0.0


def test_blocks_are_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    log = discrete_log()
    witness = witness_function(simple_q, log, SOFT, 0.9)
    whole = witness(log.observations, log.actions)
    regions = witness.top_regions(2)
    monkeypatch.setattr("koffline.ope.bellman_test.witness._BLOCK_NUMBERS", 300)
    parts = witness(log.observations, log.actions)
    np.testing.assert_allclose(parts.mean, whole.mean, rtol=1e-9)
    again = witness.top_regions(2)
    assert [r.size for r in again] == [r.size for r in regions]
    assert again[0].threshold == pytest.approx(regions[0].threshold, rel=1e-9)


def test_regions_find_where_the_error_is() -> None:
    known = known_problem(0, 2000)
    result = koffline.bellman_test(broken(known), known.transitions, known.policy, 0.9)
    assert result.rejects
    assert result.witness is not None
    regions = result.witness.top_regions(4)
    worst = regions[0]
    assert worst.is_significant
    assert worst.action == 1
    assert (worst.center > 0.0).all()
    assert worst.mean_residual < -3 * worst.standard_error  # the value is too high there
    members = known.transitions.actions[worst.rows]
    assert (members == 1).all()
    assert len(members) == worst.size
    assert abs(worst.z_score) >= abs(regions[-1].z_score)


def test_no_region_of_the_true_values_is_significant() -> None:
    known = known_problem(1, 800)
    witness = witness_function(known.q, known.transitions, known.policy, 0.9)
    assert not any(region.is_significant for region in witness.top_regions(5))


def test_maps_are_the_witness_on_a_grid() -> None:
    known = known_problem(0, 400)
    witness = witness_function(broken(known), known.transitions, known.policy, 0.9)
    found = witness.map(resolution=7, action=1)
    assert found.values.mean.shape == (7, 7)
    place = np.array([[found.x[2], found.y[5]]])
    assert found.values.mean[5, 2] == pytest.approx(witness(place, np.array([1])).mean[0], rel=1e-9)
    pooled = witness.map(resolution=5)
    assert pooled.action is None
    assert np.isfinite(pooled.values.witness).all()


def test_map_of_all_actions_ignores_them_in_the_kernel() -> None:
    known = known_problem(0, 200)
    pooled = witness_function(known.q, known.transitions, known.policy, 0.9).map(resolution=3)
    of_state = witness_function(known.v, known.transitions, known.policy, 0.9, on_policy=True)
    assert of_state.map(resolution=3).values.witness.shape == pooled.values.witness.shape


def test_continuous_maps_and_regions() -> None:
    witness = witness_function(simple_q, continuous_log(), NOISY, 0.9)
    assert witness.map(resolution=4, action=np.array([0.2])).values.mean.shape == (4, 4)
    assert witness.map(resolution=4).values.mean.shape == (4, 4)
    region = witness.top_regions(1)[0]
    assert np.shape(region.action) == (1,)


def test_bad_places_are_refused() -> None:
    witness = witness_function(simple_q, discrete_log(), SOFT, 0.9)
    with pytest.raises(DataError, match="observations have shape"):
        witness(np.zeros((3, 5)), np.zeros(3))
    with pytest.raises(DataError, match="one action per observation"):
        witness(np.zeros((3, 2)))
    with pytest.raises(ConfigError, match="use top_regions"):
        witness.map(columns=(0, 2))
    with pytest.raises(ConfigError, match="at least 1"):
        witness.top_regions(0)
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize(
    ("observation", "action", "message"),
    [
        (np.nan, 0, "NaN"),
        (0.0, 9, "hold 9; give whole numbers from 0 to 2"),
        (0.0, -1, "hold -1"),
        (0.0, 0.5, "hold 0.5"),
        (0.0, None, "one action per observation"),
    ],
)
def test_places_that_do_not_exist_are_refused(observation: float, action: object, message: str) -> None:
    witness = witness_function(simple_q, discrete_log(), SOFT, 0.9)
    with pytest.raises(DataError, match=message) as caught:
        witness(np.full((1, 2), observation), None if action is None else np.array([action]))
    assert "\n" not in str(caught.value)
