"""T against loops over pairs and in features, weights, and the law of random signs with its power."""

import itertools

import numpy as np
import pytest
import torch

import koffline
from koffline.kernels import random_fourier_features
from koffline.ope.bellman_test import forms
from koffline.ope.bellman_test.case import make_case, make_settings
from koffline.ope.bellman_test.forms import FeatureForm, GramForm, Moments, NullLaw, SignDraws, gram_form
from koffline.ope.value_functions import as_value_function
from tests import reference_bellman as reference
from tests.ope.bellman_test.problems import known_problem, simple_q
from tests.ope.problems import SOFT, discrete_log


def case_of(log, policy, **options):
    function = as_value_function(simple_q, log.action_space, log.observation_shape)
    return make_case(function, log, policy, make_settings(gamma=0.9, **options))


def columns_of(case):
    """Scores and what the alternative adds to them, (N,)."""
    return case.weights * case.residuals, case.weights * case.shifts


def exact_form(case):
    return gram_form(*columns_of(case), case.space.kernel.gram(case.inputs).numpy(), case.n)


def random_scores(units: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """f and s (G, 6): zero-mean noise and a shift in one direction."""
    generator = np.random.default_rng(seed)
    scores = generator.normal(size=(units, 6)) * np.array([3.0, 2.0, 1.0, 0.5, 0.3, 0.1]) / np.sqrt(units)
    shifts = (generator.normal(size=6) + 0.3 * generator.normal(size=(units, 6))) / units
    return scores, shifts


def random_form(units: int, seed: int = 0) -> GramForm:
    scores, shifts = random_scores(units, seed)
    return GramForm(scores @ scores.T, shifts @ scores.T, shifts @ shifts.T)


def law_of(form, draws: int = 999, level: float = 0.05, generator=None) -> NullLaw:
    return NullLaw(form.draw(draws, generator or np.random.default_rng(0)), level)


def test_statistic_is_the_double_loop_and_a_permutation_changes_nothing() -> None:
    weights = np.random.default_rng(0).integers(0, 3, size=60).astype(float)
    log = discrete_log(weights=weights)
    case = case_of(log, SOFT)
    expected = reference.statistic(
        case.residuals, case.inputs.numpy(), case.space.kernel.bandwidth, case.weights
    )
    assert exact_form(case).draw(1, np.random.default_rng(0)).statistic == pytest.approx(expected, rel=1e-10)
    known = known_problem(1, 80)
    order = np.random.default_rng(0).permutation(80)
    first, second = (
        koffline.bellman_test(known.q, rows, known.policy, 0.9)
        for rows in (known.transitions, known.transitions.select(order))
    )
    assert first.statistic == pytest.approx(second.statistic, rel=1e-6)


def test_products_of_scores_and_draws_are_loops() -> None:
    case = case_of(discrete_log(20, 5), SOFT)
    form = exact_form(case)
    near = reference.products(np.eye(20), case.inputs.numpy(), case.space.kernel.bandwidth, case.n)
    scores, shifts = columns_of(case)
    np.testing.assert_allclose(form.products, near * np.outer(scores, scores), atol=1e-12)
    np.testing.assert_allclose(form.shifted, near * np.outer(shifts, shifts), atol=1e-12)
    np.testing.assert_allclose(form.crossed, near * np.outer(shifts, scores), atol=1e-12)
    drawn = form.draw(7, np.random.default_rng(5))
    signs = forms.random_signs((7, 20), np.random.default_rng(5))
    assert set(np.unique(signs)) == {-1.0, 1.0}
    for draw in range(7):
        expected = (signs[draw] * scores) @ near @ (signs[draw] * scores)
        assert drawn.statistics[draw] == pytest.approx(expected, rel=1e-10)


def test_features_and_gram_are_one_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the Gram matrix of the features themselves everything agrees to rounding, whatever the blocks."""
    case = case_of(discrete_log(), SOFT)
    generator, columns = torch.Generator().manual_seed(0), columns_of(case)
    features = random_fourier_features(case.space.kernel, case.inputs.shape[1], 64, generator)
    psi = features(case.inputs).numpy()
    exact = gram_form(*columns, psi @ psi.T, case.n)
    left, others = exact.moments(), exact.crossed - np.diag(np.diagonal(exact.crossed))
    for block in (8192, 7):
        monkeypatch.setattr(forms, "_BLOCK", block)
        found = FeatureForm(*columns, case.inputs, features, case.n)
        statistic = found.draw(3, np.random.default_rng(1)).statistic
        assert statistic == pytest.approx(exact.products.sum(), rel=1e-10)
    monkeypatch.setattr(forms, "_BLOCK", 8192)
    drawn = found.draw(3, np.random.default_rng(1))
    signs = forms.random_signs((len(exact.products), 3), np.random.default_rng(1)).T
    for draw in range(3):
        assert drawn.statistics[draw] == pytest.approx(signs[draw] @ exact.products @ signs[draw], rel=1e-9)
        assert drawn.linear[draw] == pytest.approx(signs[draw] @ others.sum(axis=0), rel=1e-8)
    assert drawn.moments.mean == pytest.approx(left.mean, rel=1e-9)
    assert drawn.moments.quadratic == pytest.approx(left.quadratic, rel=1e-9)


def test_units_scale_with_rewards() -> None:
    """Rewards and values times 1e6: T times 1e12, p and power alike."""
    known = known_problem(2, 100)
    big = known.transitions.replace(rewards=known.transitions.rewards * 1e6)
    one = koffline.bellman_test(known.q, known.transitions, known.policy, 0.9)
    other = koffline.bellman_test(lambda s, a: 1e6 * known.q(s, a), big, known.policy, 0.9)
    assert other.statistic == pytest.approx(1e12 * one.statistic, rel=1e-9)
    assert (other.p_value, other.power) == (one.p_value, one.power)
    assert other.detectable == pytest.approx(1e6 * one.detectable, rel=1e-6)


def test_moments_are_those_of_all_signs() -> None:
    """T − mean of the null made anew, and that null's variance, over all 2⁸ residuals ε_g f_g + c s_g."""
    form, (scores, shifts), c = random_form(8), random_scores(8, 0), 0.7
    signs = np.array(list(itertools.product((-1.0, 1.0), repeat=8)))
    drawn = np.square(signs @ scores).sum(axis=1)
    lifted = signs[:, :, None] * scores + c * shifts  # (B, G, 6)
    excess = np.square(lifted.sum(axis=1)).sum(axis=1) - np.square(lifted).sum(axis=(1, 2))
    products = np.einsum("bgm,bhm->bgh", lifted, lifted)
    spread = 2.0 * (np.square(products).sum(axis=(1, 2)) - np.square(np.einsum("bgg->bg", products)).sum(1))
    found = form.moments()
    assert (found.mean, found.variance) == pytest.approx((drawn.mean(), drawn.var()), rel=1e-12)
    assert c**2 * found.quadratic == pytest.approx(excess.mean(), rel=1e-10)
    grown = found.variance + c**2 * found.growth_2 + c**4 * found.growth_4
    assert grown == pytest.approx(spread.mean(), rel=1e-10)


def test_stated_power_is_that_of_testing_anew() -> None:
    """200 shifted sets of residuals, each tested with signs of its own."""
    (scores, shifts), generator = random_scores(60, 3), np.random.default_rng(4)
    stated = law_of(random_form(60, 3)).power(1.5)
    rejected = 0
    for _ in range(200):
        lifted = generator.choice([-1.0, 1.0], size=(60, 1)) * scores + 1.5 * shifts
        form = GramForm(lifted @ lifted.T, np.zeros((60, 60)), np.zeros((60, 60)))
        rejected += law_of(form, 99, generator=generator).p_value(form.products.sum()) <= 0.05
    assert 0.1 < stated < 0.3
    assert rejected / 200 == pytest.approx(stated, abs=0.11)  # 4 · √(0.16 · 0.84/200)


def test_power_grows_from_the_level_to_one() -> None:
    law = law_of(random_form(200))
    power = [law.power(shift) for shift in (0.0, 0.5, 1.0, 2.0, 4.0, 50.0)]
    assert power[0] == pytest.approx(0.05, abs=0.02)
    assert all(low <= high + 1e-12 for low, high in itertools.pairwise(power))
    assert power[-1] == pytest.approx(1.0, abs=1e-6)
    shift = law.detectable_shift(0.1)
    assert law.power(shift) >= 0.8 > law.power(0.99 * shift)
    silent = GramForm(random_form(50).products, np.zeros((50, 50)), np.zeros((50, 50)))
    assert law_of(silent).detectable_shift(1.0) is None


def test_p_value_by_hand_and_critical_value() -> None:
    draws = SignDraws(0.0, np.array([1.0, 2.0, 3.0, 4.0]), np.zeros(4), Moments(2.5, 1.25, 0.0))
    by_hand = NullLaw(draws, 0.05)
    assert [by_hand.p_value(one) for one in (3.0, 5.0, 0.5)] == pytest.approx([3 / 5, 1 / 5, 1.0])
    law = law_of(random_form(40), draws=199, level=0.1)
    assert law.p_value(law.critical * 1.0001) <= 0.1 < law.p_value(law.critical * 0.9999)
    assert law.power(0.0) == np.mean([law.p_value(one) <= 0.1 for one in law.draws.statistics])
