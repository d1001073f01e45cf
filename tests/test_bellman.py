import numpy as np
import pytest
import torch
from hypothesis import given, settings

from koffline import bellman
from koffline.errors import ConfigError, DataError
from tests.refusals import refused
from tests.strategies import draw_finite_case, finite_cases


def tensor(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)


def test_discount_ends_with_termination_and_knows_intervals():
    terminated = torch.tensor([False, True, False])
    torch.testing.assert_close(bellman.discount(0.9, terminated), tensor(0.9, 0.0, 0.9))
    interval = torch.tensor([1, 2, 3])
    torch.testing.assert_close(bellman.discount(0.5, terminated, interval), tensor(0.5, 0.0, 0.125))
    torch.testing.assert_close(bellman.discount(0.5, terminated, 2), tensor(0.25, 0.0, 0.25))
    with pytest.raises(ConfigError, match=r"gamma is 1\.5"):
        bellman.discount(1.5, terminated)


def test_state_value_residual_by_hand():
    residual = bellman.state_value_residual(
        tensor(1.0, 2.0), tensor(0.5, 0.0), tensor(3.0, 4.0), tensor(6.0, 100.0)
    )
    torch.testing.assert_close(residual, tensor(1.0 + 3.0 - 3.0, 2.0 - 4.0))


def test_path_consistency_is_zero_at_the_smoothed_optimum():
    case, coef = draw_finite_case(3, states=4, actions=3), 0.2
    transition, reward = case.mdp.transition, np.einsum("sat,sat->sa", case.mdp.transition, case.mdp.reward)
    value = np.zeros(4)
    for _ in range(400):  # a contraction by 0.9: 1e-18 left
        q = reward + case.gamma * transition @ value
        value = coef * np.log(np.exp(q / coef).sum(axis=1))
    log_policy = (q - value[:, None]) / coef
    for action in range(3):
        residual = bellman.path_consistency_residual(
            torch.tensor(reward[:, action]),
            torch.full((4,), case.gamma, dtype=torch.float64),
            torch.tensor(value),
            torch.tensor(transition[:, action] @ value),
            torch.tensor(log_policy[:, action]),
            coef,
        )
        assert residual.abs().max() < 1e-12


@settings(max_examples=20, deadline=None)
@given(arguments=finite_cases)
def test_expected_residuals_vanish_at_the_exact_values(arguments):
    case = draw_finite_case(**arguments)
    states, actions = case.policy.shape
    q = torch.tensor(case.mdp.action_values(case.policy, case.gamma))
    s, a, t = (index.flatten() for index in np.indices(case.mdp.transition.shape))
    residual = bellman.action_value_residual(
        torch.tensor(case.mdp.reward[s, a, t]),
        torch.full((len(s),), case.gamma, dtype=torch.float64),
        q[s],
        torch.tensor(a),
        q[t],
        torch.tensor(case.policy[t]),
    )
    expected = (residual.numpy() * case.mdp.transition[s, a, t]).reshape(states, actions, states).sum(axis=2)
    np.testing.assert_allclose(expected, 0.0, atol=1e-10)


@pytest.mark.parametrize(("rows", "width"), [(4, 1), (2, 4)])
def test_shapes_that_would_broadcast_are_refused(rows, width):
    with refused(DataError, match="equal N and R"):
        bellman.state_value_residual(
            torch.zeros(4), torch.ones(4), torch.zeros(rows, width), torch.zeros(3, 4)
        )
    actions, q = torch.zeros(4, dtype=torch.int64), torch.zeros(3, 2)
    with refused(DataError, match="n_actions"):
        bellman.action_value_residual(torch.zeros(4), torch.ones(4), q, actions, q, q)
