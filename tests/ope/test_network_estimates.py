"""Closed forms in the features of every network against loops in numpy."""

import numpy as np
import pytest
from scipy import stats

from koffline.config import EvaluationSettings
from koffline.ope import network_estimates
from koffline.ope.estimators import run_estimator
from koffline.ope.evaluation import open_workspace
from koffline.ope.fitted import ReplicaMean
from koffline.ope.names import CLOSED_FORMS
from tests import reference_closed_form as reference
from tests.ope.problems import NOISY, SOFT, uneven_log
from tests.ope.test_last_layer import plain_features

SETTINGS = {"gamma": 0.9, "steps": 30, "full_replicas": 1, "resampled_replicas": 3, "instruments": 40}


@pytest.fixture(params=["discrete", "continuous"])
def workspace(request):
    policy = SOFT if request.param == "discrete" else NOISY
    with open_workspace(uneven_log(request.param, 12), policy, EvaluationSettings(**SETTINGS)) as made:
        yield made


def seen_by(fitted, replica):
    """The log as one network sees it: features, counts of its resampled units as weights."""
    problem, network = fitted.problem, fitted.record.network
    network = network.with_flat(network.flat.double())
    columns = {
        "now": plain_features(network, replica, problem.inputs, problem.readout),
        "later": plain_features(network, replica, problem.next_inputs, problem.next_probabilities),
        "starts": plain_features(network, replica, problem.start_inputs, problem.start_probabilities),
        "rewards": problem.rewards,
        "discounts": problem.discounts,
        "weights": fitted.ensemble.row_weights[replica].numpy(),
        "start_weights": fitted.ensemble.start_weights[replica, 0].numpy(),
        "constants": network.sizes[-1],
    }
    return columns, [
        reference.instrument(x, fitted.instruments.frequencies.tolist()) for x in problem.kernel_inputs
    ]


@pytest.mark.parametrize("name", CLOSED_FORMS)
def test_each_network_has_the_solution_of_its_own_system(workspace, name, monkeypatch):
    monkeypatch.setattr(network_estimates, "_CRITICS", 16)
    fitted = workspace.fitted
    found = network_estimates.closed_form(name, fitted) / fitted.problem.reward_scale
    np.testing.assert_array_equal(found[0, 0], found[0, 1])  # the network of the whole log
    for replica in range(4):
        columns, critics = seen_by(fitted, replica)
        if name == "lstdq":
            matrix, vector = reference.moments(list(columns["now"]), columns)
            ridge = reference.ridge_matrix(
                matrix, network_estimates.usual_ridge(fitted.rows, 1.0), columns["constants"]
            )
            expected = reference.start_mean(columns) @ np.linalg.solve(matrix + ridge, vector)
        elif name == "mwl":
            _, omega = reference.minimax(critics, columns, fitted.settings.ridge)
            expected = reference.weighted_reward(omega, columns)
        else:
            ridge, metric = network_estimates.usual_ridge(fitted.rows, 1.5), None
            if name == "dualdice":
                frequencies = fitted.instruments.frequencies[:, :8].tolist()
                critics = [reference.instrument(x, frequencies) for x in fitted.problem.kernel_inputs]
                whole, _ = seen_by(fitted, 0)  # the metric is that of the whole log
                metric = reference.dice_metric(critics, whole, 0.1)
            theta, _ = reference.minimax(critics, columns, ridge, metric)
            expected = reference.start_mean(columns) @ theta
        assert found[replica, 0] == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_estimate_is_the_mean_of_all_networks_and_its_error_their_spread(workspace):
    for name in ("kloss", "mql"):
        found, fitted = run_estimator(workspace, name), workspace.fitted
        values = (
            fitted.replica_values[name] if name == "kloss" else network_estimates.closed_form(name, fitted)
        )
        low, high = workspace.limits.bounds
        assert found.value == pytest.approx(np.clip(values[:, 1].mean(), low, high))
        assert found.standard_error == pytest.approx(values[1:, 0].std(ddof=1))


def test_a_network_that_gives_no_number_is_left_out_and_too_few_are_refused(workspace):
    fitted, values = workspace.fitted, np.array([1.0, np.nan, 2.0, 3.0])
    both = np.stack([values, values], axis=1)
    assert fitted.summarise(both) == ReplicaMean(2.0, 0.5**0.5, full=1, resampled=2)
    units = fitted.units  # Student's t of the two that are left
    half = stats.t.ppf(0.975, df=1) * 0.5**0.5 * np.sqrt(2.0 * units / (units - 1.0))
    assert fitted.interval(both).high == pytest.approx(2.0 + half)
    with pytest.raises(Exception, match="lower learning_rate"):
        fitted.summarise(np.array([1.0, np.nan, np.nan, 3.0])[:, None].repeat(2, axis=1))
