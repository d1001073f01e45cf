"""The three laws: hand-made cases, moments by enumeration, agreement with each other, power."""

import itertools

import numpy as np
import pytest
from scipy import stats

from koffline.ope.bellman_test.forms import GramForm, Moments, SignDraws, SumForm
from koffline.ope.bellman_test.laws import (
    GammaLaw,
    WildLaw,
    detectable_shift,
    make_law,
    weighted_chi_square_tail,
)
from koffline.ope.bellman_test.settings import BellmanSettings


def random_form(units: int, seed: int = 0) -> GramForm:
    scores, shifts = random_scores(units, seed)
    return GramForm(scores @ scores.T, shifts @ scores.T, shifts @ shifts.T)


def random_scores(units: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """f and s (G, 6): zero-mean noise and a shift in one direction."""
    generator = np.random.default_rng(seed)
    scores = generator.normal(size=(units, 6)) * np.array([3.0, 2.0, 1.0, 0.5, 0.3, 0.1]) / np.sqrt(units)
    shifts = (generator.normal(size=6) + 0.3 * generator.normal(size=(units, 6))) / units
    return scores, shifts


def all_signs(units: int) -> np.ndarray:
    return np.array(list(itertools.product((-1.0, 1.0), repeat=units)))


def test_moments_are_those_of_all_signs() -> None:
    """T − mean of the null made anew, and that null's variance, over all 2⁸ residuals ε_g f_g + c s_g."""
    form, (scores, shifts), c = random_form(8), random_scores(8, 0), 0.7
    signs = all_signs(8)
    drawn = np.square(signs @ scores).sum(axis=1)
    lifted = signs[:, :, None] * scores + c * shifts  # (B, G, 6)
    excess = np.square(lifted.sum(axis=1)).sum(axis=1) - np.square(lifted).sum(axis=(1, 2))
    products = np.einsum("bgm,bhm->bgh", lifted, lifted)
    spread = 2.0 * (np.square(products).sum(axis=(1, 2)) - np.square(np.einsum("bgg->bg", products)).sum(1))
    found = form.moments()
    assert found.mean == pytest.approx(drawn.mean(), rel=1e-12)
    assert found.variance == pytest.approx(drawn.var(), rel=1e-12)
    assert c**2 * found.quadratic == pytest.approx(excess.mean(), rel=1e-10)
    assert found.variance + 4 * c**2 * found.linear == pytest.approx(excess.var(), rel=1e-10)
    assert found.spread(c) ** 2 * found.variance == pytest.approx(spread.mean(), rel=1e-10)


def test_spectrum_has_three_moments_of_all_signs() -> None:
    """κ_r of Σ λ χ² + c is 2^(r−1) (r−1)! Σ λ^r."""
    form = random_form(8, 1)
    signs = all_signs(8)
    drawn = np.einsum("bg,gh,bh->b", signs, form.products, signs)
    eigenvalues, constant = form.eigenvalues()
    centred = drawn - drawn.mean()
    assert eigenvalues.sum() + constant == pytest.approx(drawn.mean(), rel=1e-12)
    assert 2.0 * np.square(eigenvalues).sum() == pytest.approx(np.mean(centred**2), rel=1e-10)
    assert 8.0 * (eigenvalues**3).sum() == pytest.approx(np.mean(centred**3), rel=1e-9)


def test_wild_p_value_by_hand() -> None:
    moments = Moments(2.5, 1.25, 0.0, 0.0)
    law = WildLaw(SignDraws(np.array([1.0, 2.0, 3.0, 4.0]), np.zeros(4), moments), critical=3.0)
    assert law.p_value(3.0) == pytest.approx(3 / 5)  # itself, 3 and 4
    assert law.p_value(5.0) == pytest.approx(1 / 5)
    assert law.p_value(0.5) == 1.0


def test_wild_power_is_that_of_the_p_value() -> None:
    """A statistic above the critical value is one with p ≤ level, and none below it."""
    form = random_form(40)
    law = make_law(form, BellmanSettings(draws=199, level=0.1), np.random.default_rng(0))
    assert law.p_value(law.critical * 1.0001) <= 0.1
    assert law.p_value(law.critical * 0.9999) > 0.1
    assert law.power(0.0) == np.mean([law.p_value(one) <= 0.1 for one in law.draws.statistics])


def test_stated_power_is_that_of_testing_anew() -> None:
    """200 shifted sets of residuals, each tested with signs of its own."""
    (scores, shifts), generator = random_scores(60, 3), np.random.default_rng(4)
    options = BellmanSettings(draws=299)
    law = make_law(random_form(60, 3), options, np.random.default_rng(0))
    rejected = 0
    for _ in range(200):
        lifted = generator.choice([-1.0, 1.0], size=(60, 1)) * scores + 1.5 * shifts
        form = GramForm(lifted @ lifted.T, np.zeros((60, 60)), np.zeros((60, 60)))
        rejected += make_law(form, options, generator).p_value(form.statistic) <= 0.05
    assert 0.1 < law.power(1.5) < 0.3
    assert rejected / 200 == pytest.approx(law.power(1.5), abs=0.11)  # 4 · √(0.16 · 0.84/200)


@pytest.mark.parametrize("df", [1, 2, 7, 300])
def test_equal_weights_are_a_chi_square(df: int) -> None:
    for chance in (0.9, 0.3, 0.05, 1e-3):
        found = weighted_chi_square_tail(np.full(df, 2.5), 2.5 * stats.chi2.isf(chance, df))
        assert found == pytest.approx(chance, abs=1e-4 if df == 1 else 1e-6)


def test_weights_of_both_signs() -> None:
    """χ² − χ² with one degree each has density K₀(|x|/2)/(2π): symmetric, and a tail by quadrature."""
    from scipy import integrate, special

    weights = np.array([1.0, -1.0])
    tail = integrate.quad(lambda x: special.k0(x / 2.0) / (2.0 * np.pi), 1.5, 80.0)[0]
    assert weighted_chi_square_tail(weights, 1.5) == pytest.approx(tail, abs=1e-6)
    assert weighted_chi_square_tail(weights, 0.0) == pytest.approx(0.5, abs=1e-9)
    assert weighted_chi_square_tail(weights, -1.5) == pytest.approx(1.0 - tail, abs=1e-6)


def test_far_tails_are_floored_and_nothing_is_certain_of_zero() -> None:
    assert weighted_chi_square_tail(np.ones(3), 500.0) == 1e-6
    assert weighted_chi_square_tail(np.zeros(3), 0.0) == 0.0
    assert weighted_chi_square_tail(np.zeros(3), -1.0) == 1.0


def test_the_three_laws_agree() -> None:
    form = random_form(300, 2)
    laws = {
        method: make_law(form, BellmanSettings(method=method, draws=4000), np.random.default_rng(1))
        for method in ("wild", "spectral", "gamma")
    }
    for quantile in (0.5, 0.9, 0.95):
        at = float(np.quantile(laws["wild"].draws.statistics, quantile))
        # The wild bootstrap's own error: 4 · √(0.25/4000) = 0.03; the Gamma law is an approximation.
        assert laws["spectral"].p_value(at) == pytest.approx(1.0 - quantile, abs=0.03)
        assert laws["gamma"].p_value(at) == pytest.approx(1.0 - quantile, abs=0.08)
    for method in ("spectral", "gamma"):
        assert laws[method].power(1.0) == pytest.approx(laws["wild"].power(1.0), abs=0.1)


@pytest.mark.parametrize("method", ["wild", "spectral", "gamma"])
def test_power_grows_from_the_level_to_one(method: str) -> None:
    law = make_law(random_form(200), BellmanSettings(method=method), np.random.default_rng(0))
    power = [law.power(shift) for shift in (0.0, 0.5, 1.0, 2.0, 4.0, 50.0)]
    assert power[0] == pytest.approx(0.05, abs=0.02)
    assert all(low <= high + 1e-12 for low, high in itertools.pairwise(power))
    assert power[-1] == pytest.approx(1.0, abs=1e-6)
    shift = detectable_shift(law, 0.1)
    assert shift is not None
    assert law.power(shift) >= 0.8 > law.power(0.99 * shift)


def test_nothing_is_detectable_where_the_alternative_does_nothing() -> None:
    form = random_form(50)
    silent = GramForm(form.products, np.zeros((50, 50)), np.zeros((50, 50)))
    law = make_law(silent, BellmanSettings(), np.random.default_rng(0))
    assert detectable_shift(law, 1.0) is None


def test_no_spread_is_no_rejection() -> None:
    """One unit: T* = T whatever the sign."""
    one = GramForm(np.array([[4.0]]), np.array([[1.0]]), np.array([[1.0]]))
    for method in ("wild", "spectral", "gamma"):
        law = make_law(one, BellmanSettings(method=method, draws=99), np.random.default_rng(0))
        assert law.p_value(one.statistic) > 0.05, method
    assert isinstance(law, GammaLaw)
    assert law.power(3.0) == 0.0


def test_parts_add_up() -> None:
    first, second = random_form(9, 1), random_form(7, 2)
    both = SumForm((first, second))
    matrices = []
    for name in ("products", "crossed", "shifted"):
        left, right = getattr(first, name), getattr(second, name)
        matrices.append(np.block([[left, np.zeros((9, 7))], [np.zeros((7, 9)), right]]))
    joint = GramForm(*matrices)
    assert both.statistic == pytest.approx(joint.statistic, rel=1e-12)
    for name in ("mean", "variance", "linear", "quadratic", "growth"):
        assert getattr(both.moments(), name) == pytest.approx(getattr(joint.moments(), name), rel=1e-12)
    np.testing.assert_allclose(np.sort(both.eigenvalues()[0]), np.sort(joint.eigenvalues()[0]), atol=1e-12)
