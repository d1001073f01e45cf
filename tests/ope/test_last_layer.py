"""Exact last layers and closed forms against least-squares problems written down row by
row in numpy.
"""

import dataclasses
from functools import cache

import numpy as np
import pytest
import torch
from scipy import stats

from koffline.config import EvaluationSettings
from koffline.kernels import Gaussian, random_fourier_features
from koffline.ope.estimators.registry import find_estimator
from koffline.ope.estimators.running import run_estimator
from koffline.ope.estimators.system_intervals import system_interval
from koffline.ope.intervals import make_interval
from koffline.ope.networks.equations import accumulate_systems
from koffline.ope.networks.fitted_values import ReplicaMean
from koffline.ope.networks.last_layer import (
    last_layer,
    least_squares,
    minimise_kernel_loss,
    with_last_layer,
)
from koffline.ope.networks.resampling import (
    Resampling,
    cut_shares,
    make_table,
    stop_probabilities,
)
from koffline.ope.networks.systems import logged_of_part
from koffline.ope.workspace import open_workspace
from tests import reference_closed_form as reference
from tests.ope.problems import NOISY, SOFT, plain_hidden, prepared, stack, uneven_log

SETTINGS = {
    "gamma": 0.9,
    "steps": 30,
    "full_replicas": 1,
    "resampled_replicas": 3,
    "instruments": 40,
}


def plain_features(network, replica, inputs, readout):
    """φ of one row as a loop: hidden units and a one, for each output times its
    readout, mean over draws.
    """
    rows = []
    for index in range(len(inputs)):
        draws = np.atleast_2d(inputs[index])
        of_draws = [
            np.append(plain_hidden(network, replica, draw[None])[0], 1.0)
            for draw in draws
        ]
        units = np.mean(of_draws, axis=0)
        rows.append(
            units if readout is None else np.outer(units, readout[index]).ravel()
        )
    return np.array(rows)


def asked(kind, critics=400):
    """A problem, two networks, its table, instruments and weights of rows (2, N)."""
    problem = prepared(kind)
    network, table = stack(problem)
    weights = torch.rand(
        2,
        problem.n_rows,
        generator=torch.Generator().manual_seed(0),
        dtype=torch.float64,
    )
    generator = torch.Generator().manual_seed(1)
    instruments = random_fourier_features(
        Gaussian(1.5), table.kernel_inputs.shape[1], critics, generator
    )
    return problem, network, table, instruments, weights


# whether sums are added output by output
@pytest.mark.parametrize("sparse", [0.0, 9.0])
@pytest.mark.parametrize(
    ("kind", "critics"), [("discrete", 400), ("continuous", 400), ("discrete", 12)]
)
def test_minimiser_solves_the_ridged_least_squares_problem(
    kind, critics, sparse, monkeypatch
):
    """‖A θ − b‖² + λ ‖P (θ − θ₀)‖² as one stacked problem, λ relative to the mean
    curvature.

    P is the identity but for the same constant added to every output.
    """
    monkeypatch.setattr("koffline.ope.networks.equations._SPARSE", sparse)
    # several blocks, the last one ragged
    monkeypatch.setattr("koffline.ope.networks.resampling._MOST_ROWS", 17)
    problem, network, table, instruments, weights = asked(kind, critics)
    weights[:, ::7] = 0.0
    resampling = Resampling.draw(problem, 1, 1, seed=0)
    cuts_by_step = cut_shares(problem)
    steps = problem.steps
    unit = np.repeat(np.arange(len(problem.lengths)), problem.lengths)
    logged = logged_of_part(network, resampling, 0.9, cuts_by_step, problem)
    stopped = stop_probabilities(problem, cuts_by_step)
    system = accumulate_systems(network, table, instruments, weights)
    solved = last_layer(minimise_kernel_loss(network, system, 1e-2)).numpy()
    psi = instruments(table.kernel_inputs).numpy()
    for replica in range(2):
        now = plain_features(network, replica, problem.inputs, problem.readout)
        later = plain_features(
            network, replica, problem.next_inputs, problem.next_probabilities
        )
        weighted = psi * weights[replica].numpy()[:, None]
        matrix = (
            weighted.T @ (now - problem.discounts[:, None] * later) / problem.n_rows
        )
        vector = weighted.T @ problem.rewards / problem.n_rows
        old = last_layer(network)[replica].numpy()
        scale = np.sqrt(1e-2 * np.mean(np.sum(matrix**2, axis=0)))
        held = scale * np.eye(len(old))
        outputs = network.sizes[-1]
        held[-outputs:, -outputs:] -= scale * (1.0 - 1e-9**0.5) / outputs
        stacked = np.vstack([matrix, held])
        expected = np.linalg.lstsq(
            stacked, np.concatenate([vector, held @ old]), rcond=None
        )[0]
        np.testing.assert_allclose(solved[replica], expected, atol=2e-5)
        weights_of_rows = resampling.row_weights(problem)[replica].numpy() * (
            1.0 - stopped
        )
        # LSTD with the log's next row
        moves = now - problem.discounts[:, None] * np.roll(now, -1, axis=0)
        columns = np.column_stack([moves, problem.rewards])
        np.testing.assert_allclose(
            logged.system[replica], (now.T * weights_of_rows) @ columns, atol=1e-5
        )
        cuts = (
            resampling.start_weights(problem)[replica].numpy()[:, unit]
            * stopped
            * 0.9**steps
        )
        np.testing.assert_allclose(logged.cuts[replica], cuts @ now, rtol=1e-5)


def test_the_level_of_all_values_is_free() -> None:
    """Rewards of one and a discount of 0.999: a network of zeros reaches 1000 in one
    solve.
    """
    _, network, table, instruments, weights = asked("discrete")
    ones = torch.ones_like(table.rewards)
    table = dataclasses.replace(table, rewards=ones, discounts=0.999 * ones)
    zero = with_last_layer(network, torch.zeros_like(last_layer(network)))
    solved = minimise_kernel_loss(
        zero, accumulate_systems(zero, table, instruments, weights), 1e-3
    )
    expected = torch.full((2, len(table), 3), 1000.0).double()
    torch.testing.assert_close(
        solved.forward(table.inputs.double()), expected, rtol=1e-3, atol=0
    )


@pytest.fixture(params=["discrete", "continuous"], scope="module")
def workspace(request):
    policy = SOFT if request.param == "discrete" else NOISY
    with open_workspace(
        uneven_log(request.param, 12), policy, EvaluationSettings(**SETTINGS)
    ) as opened:
        yield opened


def test_weights_of_rows_give_the_value_of_the_minimiser(workspace):
    """From a last layer of zeros, cᵀθ is the mean of rewards weighted by ω = ψᵀα."""
    fitted = workspace.fitted
    zero = with_last_layer(
        fitted.record.network, torch.zeros_like(fitted.start_features[:, 1])
    )
    table = make_table(fitted.problem, "cpu")
    theta = last_layer(
        minimise_kernel_loss(zero, fitted.systems.system, fitted.settings.ridge)
    )
    weights = fitted.resampling.row_weights(fitted.problem)
    rewarded = (
        (fitted.duals @ fitted.instruments(table.compared.double()).mT)
        * weights
        * table.rewards
    )
    values = (fitted.start_features[:, 1] * theta).sum(dim=1)
    torch.testing.assert_close(
        rewarded.sum(dim=1) / weights.sum(dim=1), values, rtol=1e-6, atol=1e-6
    )


def test_copies_of_critics_need_no_large_ridge() -> None:
    matrix = (
        torch.randn(10, 40, generator=torch.Generator().manual_seed(0))
        .double()
        .repeat(1, 2, 1)
    )
    goal = matrix.sum(dim=2)
    for ridge in (1e-12, 1e-18):  # the second leaves no Cholesky factor
        solution = least_squares(matrix, goal, ridge, 2)
        torch.testing.assert_close(
            (matrix @ solution[..., None])[..., 0], goal, rtol=1e-9, atol=1e-9
        )


def test_the_logging_policy_is_solved_by_groups_of_networks(
    workspace, monkeypatch
) -> None:
    fitted = workspace.fitted
    expected = workspace.fitted.behavior
    monkeypatch.setattr("koffline.ope.networks.systems._MOST_LOGGED", 1)
    monkeypatch.setattr(
        "koffline.ope.networks.last_layer._MANY", 1
    )  # solved by critics
    apart = dataclasses.replace(
        fitted, systems=dataclasses.replace(fitted.systems, logged=None)
    )
    np.testing.assert_allclose(apart.behavior, expected, rtol=1e-10)


@cache
def seen_by(fitted, replica):
    """The log as one network sees it: features, counts of its resampled units as
    weights.
    """
    problem = fitted.problem
    network = fitted.record.network
    network = network.with_flat(network.flat.double())
    columns = {
        "now": plain_features(network, replica, problem.inputs, problem.readout),
        "later": plain_features(
            network, replica, problem.next_inputs, problem.next_probabilities
        ),
        "starts": plain_features(
            network, replica, problem.start_inputs, problem.start_probabilities
        ),
        "rewards": problem.rewards,
        "discounts": problem.discounts,
        "weights": fitted.resampling.row_weights(problem)[replica].numpy(),
        "start_weights": fitted.resampling.start_weights(problem)[replica, 0].numpy(),
        "constants": network.sizes[-1],
    }
    return columns, [
        reference.instrument(x, fitted.instruments.frequencies.tolist())
        for x in problem.kernel_inputs
    ]


@pytest.mark.parametrize("name", ["mql", "lstdq", "mwl", "dualdice"])
def test_each_network_has_the_solution_of_its_own_system(workspace, name):
    fitted = workspace.fitted
    estimates = find_estimator(name).values(fitted) / fitted.problem.reward_scale
    # the network of the whole log
    np.testing.assert_allclose(estimates[0, 0], estimates[0, 1], rtol=1e-12)
    rows = fitted.problem.row_weights.sum()
    for replica in range(4):
        columns, critics = seen_by(fitted, replica)
        if name == "lstdq":
            theta, _ = reference.minimax(list(columns["now"]), columns, rows**-2.0)
            expected = reference.start_mean(columns) @ theta
        elif name == "mwl":
            _, omega = reference.minimax(critics, columns, fitted.settings.ridge)
            expected = reference.weighted_reward(omega, columns)
        else:
            ridge = rows**-1.5
            metric = None
            if name == "dualdice":
                whole, _ = seen_by(fitted, 0)  # the metric is that of the whole log
                metric = reference.dice_metric(critics, whole, 0.1)
            theta, _ = reference.minimax(critics, columns, ridge, metric)
            expected = reference.start_mean(columns) @ theta
        assert estimates[replica, 0] == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_kernel_intervals_allow_for_the_features_of_other_networks(workspace):
    fitted = workspace.fitted
    values = []
    level = workspace.settings.level
    for replica in range(4):
        columns, critics = seen_by(fitted, replica)
        old = last_layer(fitted.record.network)[replica].numpy()
        rest = (
            columns["rewards"]
            - (columns["now"] - columns["discounts"][:, None] * columns["later"]) @ old
        )
        whole = {
            "weights": fitted.problem.row_weights,
            "start_weights": fitted.problem.start_weights,
        }
        theta, _ = reference.minimax(
            critics, {**columns, **whole, "rewards": rest}, fitted.settings.ridge
        )
        values.append(reference.start_mean({**columns, **whole}) @ (old + theta))
    deviation = np.std(values, ddof=1) * fitted.problem.reward_scale
    reach = stats.t.ppf(0.5 + level / 2.0, df=3) * deviation * np.sqrt(1.0 + 1.0 / 4.0)
    assert fitted.feature_reach == pytest.approx(reach, rel=1e-4)
    of_system = system_interval(workspace, "bootstrap-pivot")
    bare = make_interval(
        "bootstrap-pivot",
        workspace.held_system,
        level=level,
        seed=workspace.settings.seed,
    )
    high = of_system.value + np.hypot(bare.interval.high - bare.value, reach)
    assert of_system.interval.high == pytest.approx(
        min(high, workspace.limits.bounds[1])
    )


def test_estimate_is_the_mean_of_all_networks_and_its_error_their_spread(workspace):
    for name in ("kloss", "mql"):
        estimate = run_estimator(workspace, name)
        fitted = workspace.fitted
        of_head = fitted.values_of(name) if name in fitted.heads else None
        values = find_estimator(name).values(fitted) if of_head is None else of_head
        low, high = workspace.limits.bounds
        assert estimate.value == pytest.approx(np.clip(values[:, 1].mean(), low, high))
        assert estimate.standard_error == pytest.approx(values[1:, 0].std(ddof=1))


def test_a_network_that_gives_no_number_is_left_out_and_too_few_are_refused(workspace):
    fitted = workspace.fitted
    values = np.array([1.0, np.nan, 2.0, 3.0])
    both = np.stack([values, values], axis=1)
    assert fitted.summarise(both) == ReplicaMean(2.0, 0.5**0.5, full=1, resampled=2)
    units = fitted.units  # Student's t of the two that are left
    half = stats.t.ppf(0.975, df=1) * 0.5**0.5 * np.sqrt(2.0 * units / (units - 1.0))
    assert fitted.interval(both).high == pytest.approx(2.0 + half)
    with pytest.raises(Exception, match="lower learning_rate"):
        fitted.summarise(
            np.array([1.0, np.nan, np.nan, 3.0])[:, None].repeat(2, axis=1)
        )
