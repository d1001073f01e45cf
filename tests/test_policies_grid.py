import numpy as np
import pytest

from koffline.data.transitions import Continuous, Discrete
from koffline.errors import PolicyError
from koffline.policies import GridPolicy, save_grid_policy
from koffline.policies.policy_file import write_arrays
from koffline.policy_specs import load_policy
from tests.refusals import refused

GRID = GridPolicy((0.0, -1.0), (2.0, 1.0), np.arange(12.0).reshape(2, 2, 3) ** 1.5, 2.0)


def softmax(values):
    raised = np.exp(values / 2.0)
    return raised / raised.sum()


def test_probabilities_at_centres_between_them_and_beyond():
    q = GRID.action_values
    points = np.array([[0.5, -0.5], [1.5, 0.5], [1.0, 0.0], [0.75, -0.5], [-9.0, 9.0]])
    expected = [q[0, 0], q[1, 1], q.mean(axis=(0, 1)), 0.75 * q[0, 0] + 0.25 * q[1, 0], q[0, 1]]
    np.testing.assert_allclose(GRID(points), [softmax(row) for row in expected])


def test_a_file_gives_the_policy_back_and_the_same_bytes(tmp_path):
    first, second = tmp_path / "a.npz", tmp_path / "b.npz"
    save_grid_policy(first, GRID)
    save_grid_policy(second, GRID)
    assert first.read_bytes() == second.read_bytes()
    loaded = load_policy(first, Discrete(3), (2,))
    points = np.random.default_rng(0).uniform(-1, 2, size=(50, 2)).astype(np.float32)
    np.testing.assert_allclose(loaded.probabilities(points), GRID(points), rtol=1e-12)
    mixed = load_policy(f"epsilon:0.5:{first}", Discrete(3), (2,))
    np.testing.assert_allclose(mixed.probabilities(points), 0.5 * GRID(points) + 0.5 / 3)


@pytest.mark.parametrize(
    ("space", "shape"), [(Discrete(4), (2,)), (Continuous(1), (2,)), (Discrete(3), (5,))]
)
def test_a_log_that_does_not_fit_is_named(tmp_path, space, shape):
    save_grid_policy(tmp_path / "a.npz", GRID)
    with pytest.raises(PolicyError, match=r"a\.npz.*give a policy trained for this log"):
        load_policy(tmp_path / "a.npz", space, shape)


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"low": np.zeros(3)},
        {"low": np.array([5.0, 5.0])},
        {"action_values": np.zeros(3)},
        {"action_values": np.full((2, 2, 3), np.nan)},
        {"temperature": 0.0},
        {"temperature": "warm"},
        {"more": 1.0},
    ],
)
def test_files_that_are_wrong_are_refused_with_their_name(tmp_path, change):
    arrays = {"low": GRID.low, "high": GRID.high, "action_values": GRID.action_values, "temperature": 2.0}
    version = change.get("version", 1)
    arrays |= {key: value for key, value in change.items() if key != "version"}
    write_arrays(tmp_path / "bad.npz", "koffline-grid-policy", version, arrays)
    with refused(PolicyError, r"bad\.npz"):
        load_policy(tmp_path / "bad.npz", Discrete(3), (2,))
