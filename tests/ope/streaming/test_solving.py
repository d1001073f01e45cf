"""Values from sums: the heads and the closed forms of the same features in memory, and their jackknife."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch

from koffline.ope.closed_form.dualdice import fit_dualdice
from koffline.ope.closed_form.fit import LinearFit
from koffline.ope.closed_form.minimax import fit_lstdq, fit_mql, fit_mwl
from koffline.ope.closed_form.weights import normalising_mass
from koffline.ope.last_layer import (
    LinearSystems,
    kernel_loss_layer,
    last_layer,
    temporal_layer,
)
from koffline.ope.streaming.columns import STRETCH
from koffline.ope.streaming.jackknife import group_spread, jackknife
from koffline.ope.streaming.moments import StreamingMoments
from koffline.ope.streaming.solving import (
    CLOSED_FORMS,
    ClosedForm,
    Reader,
    TowardPath,
    choose_closed_form,
    folded_sums,
    head_layer,
)
from koffline.ope.streaming.sums import PassPlan, sum_over_log
from tests.ope.streaming.logs import HERE, example, on_disk, seen, system_of

FITS = {"mql": fit_mql, "lstdq": fit_lstdq, "mwl": fit_mwl, "dualdice": fit_dualdice}


def summed(tmp_path, kind="episodes", rows=200, **changes):
    log, policy = example(kind, rows)
    frame, problem = seen(log, policy, **changes)
    sums = sum_over_log(PassPlan(on_disk(tmp_path, log, 50), frame, STRETCH), HERE).moments
    return Reader(frame), sums, problem


def value_in_memory(system, fit: LinearFit, normalised: bool) -> float:
    weights = fit.weights.numpy()
    value = float(system.row_weights.numpy() @ (weights * system.rewards.numpy()) / len(system))
    return value / normalising_mass(system, weights) if normalised else value


@pytest.mark.parametrize("kind", ["episodes", "tuples"])
def test_closed_forms_are_those_in_memory(kind, tmp_path):
    reader, sums, problem = summed(tmp_path, kind)
    for name, replica in itertools.product(CLOSED_FORMS, range(2)):
        options = {"critic_ridge": 0.1, "critics": 20} if name == "dualdice" else {}
        found = ClosedForm(name, reader, (1e-3,) * 2, (0.1,) * 2).values(sums.total())
        system = system_of(problem, reader.frame.features.network, replica)
        fit = FITS[name](system, ridge=1e-3, **options)
        expected = value_in_memory(system, fit, name == "mwl")
        np.testing.assert_allclose(found[replica], expected, rtol=1e-8)


@pytest.mark.parametrize("kind", ["episodes", "tuples"])
def test_heads_are_those_in_memory(kind, tmp_path):
    reader, sums, problem = summed(tmp_path, kind)
    network = reader.frame.features.network
    trained = last_layer(network)
    for replica in range(2):
        system = system_of(problem, network, replica)
        scale = problem.reward_scale
        weighted = system.row_weights[:, None] * torch.cat(
            [system.difference, system.rewards[:, None] / scale], dim=1
        )
        psi = system.instruments(system.kernel_inputs)
        projected, temporal = psi.mT @ weighted / len(system), system.now.mT @ weighted / len(system)
        systems = LinearSystems(
            projected[None, :, :-1], projected[None, :, -1], temporal[None, :, :-1], temporal[None, :, -1]
        )
        for name, solve, ridge in (("kloss", kernel_loss_layer, 1e-2), ("lstd", temporal_layer, 1e-3)):
            expected = solve(trained[replica : replica + 1], systems, ridge)[0]
            theta = head_layer(reader.frame, name, 1e-2)(sums.total())
            np.testing.assert_allclose(theta[replica], expected, atol=1e-8)
            value = reader.value(sums.total(), theta)[replica]
            np.testing.assert_allclose(value, system.value(expected) * scale, rtol=1e-8)
    np.testing.assert_array_equal(head_layer(reader.frame, "fqe", 1.0)(sums), trained)


def test_ridges_are_chosen_on_folds_of_groups(tmp_path):
    reader, sums, _ = summed(tmp_path)
    for name in CLOSED_FORMS:
        form = choose_closed_form(name, reader, sums)
        assert len(form.ridges) == 2
        assert np.isfinite(form.values(sums.total())).all()
    assert sum(part.weight for part in folded_sums(reader, sums, 0).parts) == pytest.approx(sums.weight.sum())


def test_kloss_on_a_fold_is_the_head_in_units_of_the_return(tmp_path):
    reader, sums, problem = summed(tmp_path)
    trained = reader.frame.features.last_layers
    path = TowardPath(reader.moments(sums, 1), trained[1] * problem.reward_scale)
    expected = head_layer(reader.frame, "kloss", 1e-2)(sums.total())[1] * problem.reward_scale
    np.testing.assert_allclose(path.solve_value(1e-2), expected, rtol=1e-7, atol=1e-9)


def test_the_jackknife_of_a_mean_is_the_textbooks():
    """A value that is the mean start feature: contributions are the groups' own."""
    generator = np.random.default_rng(0)
    counts, means = np.array([5.0, 3.0, 8.0, 4.0]), generator.normal(size=4)
    sums = empty(4)
    sums.starts[:, 0, 0], sums.start_weight[:], sums.weight[:] = counts * means, counts, counts
    spread = jackknife(sums, lambda part: part.start_mean()[:, 0])
    shares = counts / counts.sum()
    contributions = shares * (means - shares @ means)
    assert spread is not None
    assert spread.variance == pytest.approx(np.square(contributions).sum() / (1.0 - np.square(shares).sum()))
    assert spread.freedom == pytest.approx(1.0 / np.square(shares).sum() - 1.0)


def test_equal_groups_give_the_usual_standard_error():
    values = np.array([1.0, 4.0, 2.0, 7.0, 1.0])
    shares = np.full(5, 0.2)
    spread = group_spread(shares * (values - values.mean()), shares, np.array([values.mean()]))
    assert spread is not None
    assert spread.standard_error == pytest.approx(values.std(ddof=1) / np.sqrt(5))
    assert spread.total_freedom == pytest.approx(4.0)


def test_random_groups_are_unbiased_for_the_variance_over_units():
    """The mean over many random partitions of Σ D²/(1 − Σ share²) is the variance over units."""
    generator = np.random.default_rng(1)
    values = generator.normal(size=60)
    found = []
    for _ in range(4000):
        groups = generator.integers(12, size=60)
        shares = np.bincount(groups, minlength=12) / 60
        sums = np.bincount(groups, weights=values - values.mean(), minlength=12) / 60
        spread = group_spread(sums[shares > 0], shares[shares > 0], values[:1])
        assert spread is not None
        found.append(spread.variance)
    expected = values.var(ddof=1) / 60
    error = np.std(found) / np.sqrt(len(found))
    assert abs(np.mean(found) - expected) < 4.0 * error


def test_networks_that_differ_widen_the_interval():
    shares, contributions = np.full(4, 0.25), np.array([0.1, -0.1, 0.2, -0.2])
    alone = group_spread(contributions, shares, np.array([1.0]))
    several = group_spread(contributions, shares, np.array([0.0, 1.0, 2.0]))
    assert alone is not None
    assert several is not None
    assert several.between == pytest.approx(1.0 / 3.0)
    assert several.standard_error > alone.standard_error
    assert 2.0 <= several.total_freedom <= 5.0
    assert several.interval(1.0, 0.95, "rows", "").width > alone.interval(1.0, 0.95, "rows", "").width


def test_one_group_has_no_spread():
    sums = empty(3)
    sums.weight[1] = 5.0
    assert jackknife(sums, lambda part: np.zeros(1)) is None


def empty(groups: int) -> StreamingMoments:
    """Sums of no rows for one feature."""
    shapes = {
        "projected": (groups, 2, 1, 2),
        "temporal": (groups, 1, 1, 2),
        "squares": (groups, 1, 2, 2),
        "critic": (groups, 0, 0),
        "starts": (groups, 1, 1),
    }
    names = [field.name for field in dataclasses.fields(StreamingMoments)]
    return StreamingMoments(*(np.zeros(shapes.get(name, (groups,))) for name in names))
