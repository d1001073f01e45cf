"""T against loops over pairs and in features, weights, and the law of random signs with
its power.
"""

import dataclasses
import itertools

import numpy as np
import pytest
import torch

import koffline
from koffline.config import make_bellman_settings
from koffline.kernels import random_fourier_features
from koffline.ope.bellman_test import forms
from koffline.ope.bellman_test.case import make_case
from koffline.ope.bellman_test.forms import (
    SignDraws,
    draw_by_features,
    draw_by_products,
    draw_signs,
)
from koffline.ope.value_functions import as_value_function
from tests import reference_bellman as reference
from tests.ope.bellman_test.problems import known_problem, simple_q
from tests.ope.problems import SOFT, discrete_log


def case_of(log, policy, **options):
    function = as_value_function(simple_q, log.action_space, log.observation_shape)
    return make_case(function, log, policy, make_bellman_settings(gamma=0.9, **options))


def drawn_of(case, features: int = 0, draws: int = 1, seed: int = 0) -> SignDraws:
    settings = case.settings.model_copy(update={"draws": draws})
    return draw_signs(
        dataclasses.replace(case, settings=settings),
        features,
        np.random.default_rng(seed),
    )


def random_scores(units: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """f and s (G, 6): zero-mean noise and a shift in one direction."""
    generator = np.random.default_rng(seed)
    scores = (
        generator.normal(size=(units, 6))
        * np.array([3.0, 2.0, 1.0, 0.5, 0.3, 0.1])
        / np.sqrt(units)
    )
    shifts = (
        generator.normal(size=6) + 0.3 * generator.normal(size=(units, 6))
    ) / units
    return scores, shifts


def random_draws(units: int, seed: int = 0, draws: int = 999) -> SignDraws:
    scores, shifts = random_scores(units, seed)
    products = scores @ scores.T, shifts @ scores.T, shifts @ shifts.T
    return draw_by_products(*products, draws, np.random.default_rng(0))


def test_statistic_is_the_double_loop_and_a_permutation_changes_nothing() -> None:
    weights = np.random.default_rng(0).integers(0, 3, size=60).astype(float)
    case = case_of(discrete_log(weights=weights), SOFT)
    columns = case.residuals, case.inputs.numpy(), case.kernel.bandwidth, case.weights
    assert drawn_of(case).statistic == pytest.approx(
        reference.statistic(*columns), rel=1e-10
    )
    known = known_problem(1, 80)
    order = np.random.default_rng(0).permutation(80)
    first, second = (
        koffline.bellman_test(known.q, rows, known.policy, 0.9)
        for rows in (known.transitions, known.transitions.select(order))
    )
    assert first.statistic == pytest.approx(second.statistic, rel=1e-6)


@pytest.mark.parametrize("kind", ["exact", "features", "blocks of features"])
def test_draws_are_loops(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In features, with the Gram matrix of the features themselves, whatever the
    blocks.
    """
    case = case_of(discrete_log(20, 5), SOFT)
    features = 0 if kind == "exact" else 64
    near = case.kernel.gram(case.inputs)
    signs = forms.random_signs((7, 20), np.random.default_rng(5))
    scores = case.weights * case.residuals
    shifts = case.weights * (case.problem.discounts - 1.0)
    generator = torch.Generator().manual_seed(case.settings.seed)
    if kind == "exact":
        by_loops = reference.products(
            np.eye(20), case.inputs.numpy(), case.kernel.bandwidth, 1
        )
        np.testing.assert_allclose(near, by_loops, atol=1e-12)
    else:
        mapping = random_fourier_features(
            case.kernel, case.inputs.shape[1], features, generator
        )
        near = mapping(case.inputs) @ mapping(case.inputs).mT
    drawn = drawn_of(case, features, 7, 5)
    if kind == "blocks of features":
        monkeypatch.setattr(forms, "_BLOCK", 7)
        of_features = draw_by_features(
            scores, shifts, case.inputs, mapping, 20, 7, np.random.default_rng(5)
        )
        drawn_at_once = drawn
        bits = np.random.default_rng(5)
        signs = np.concatenate(
            [forms.random_signs((rows, 7), bits) for rows in (7, 7, 6)]
        ).T
        drawn = of_features
        assert (drawn.growth_2, drawn.statistic) == (
            0.0,
            pytest.approx(drawn_at_once.statistic, rel=1e-10),
        )
    near = near.numpy() / 20
    beside_diagonal = near - np.diag(np.diagonal(near))
    assert set(np.unique(signs)) == {-1.0, 1.0}
    for draw, signed in enumerate(signs * scores):
        assert drawn.statistics[draw] == pytest.approx(signed @ near @ signed, rel=1e-9)
        assert drawn.linear[draw] == pytest.approx(
            shifts @ beside_diagonal @ signed, rel=1e-8
        )
    assert drawn.mean == pytest.approx(np.diagonal(near) @ scores**2, rel=1e-9)
    assert drawn.quadratic == pytest.approx(shifts @ beside_diagonal @ shifts, rel=1e-9)


def test_units_scale_with_rewards() -> None:
    """Rewards and values times 1e6: T times 1e12, p and power alike."""
    known = known_problem(2, 100)
    big = known.transitions.replace(rewards=known.transitions.rewards * 1e6)
    test = koffline.bellman_test(known.q, known.transitions, known.policy, 0.9)
    other = koffline.bellman_test(
        lambda s, a: 1e6 * known.q(s, a), big, known.policy, 0.9
    )
    assert other.statistic == pytest.approx(1e12 * test.statistic, rel=1e-9)
    assert (other.p_value, other.power) == (test.p_value, test.power)
    assert other.detectable == pytest.approx(1e6 * test.detectable, rel=1e-6)


def test_moments_are_those_of_all_signs() -> None:
    """T − mean of the null made anew, and that null's variance, over all 2⁸ residuals
    ε_g f_g + c s_g.
    """
    draws_of_signs, (scores, shifts), c = random_draws(8), random_scores(8, 0), 0.7
    signs = np.array(list(itertools.product((-1.0, 1.0), repeat=8)))
    drawn = np.square(signs @ scores).sum(axis=1)
    lifted = signs[:, :, None] * scores + c * shifts  # (B, G, 6)
    excess = np.square(lifted.sum(axis=1)).sum(axis=1) - np.square(lifted).sum(
        axis=(1, 2)
    )
    products = np.einsum("bgm,bhm->bgh", lifted, lifted)
    spread = 2.0 * (
        np.square(products).sum(axis=(1, 2))
        - np.square(np.einsum("bgg->bg", products)).sum(1)
    )
    assert (draws_of_signs.mean, draws_of_signs.variance) == pytest.approx(
        (drawn.mean(), drawn.var()), rel=1e-12
    )
    assert c**2 * draws_of_signs.quadratic == pytest.approx(excess.mean(), rel=1e-10)
    grown = (
        draws_of_signs.variance
        + c**2 * draws_of_signs.growth_2
        + c**4 * draws_of_signs.growth_4
    )
    assert grown == pytest.approx(spread.mean(), rel=1e-10)


def test_stated_power_is_that_of_testing_anew() -> None:
    """200 shifted sets of residuals, each tested with signs of its own."""
    (scores, shifts), generator = random_scores(60, 3), np.random.default_rng(4)
    stated = random_draws(60, 3).power(1.5, 0.05)
    rejected = 0
    for _ in range(200):
        lifted = generator.choice([-1.0, 1.0], size=(60, 1)) * scores + 1.5 * shifts
        silent = np.zeros((60, 60)), np.zeros((60, 60))
        drawn = draw_by_products(lifted @ lifted.T, *silent, 99, generator)
        rejected += drawn.p_value(drawn.statistic) <= 0.05
    assert 0.1 < stated < 0.3
    assert rejected / 200 == pytest.approx(stated, abs=0.11)  # 4 · √(0.16 · 0.84/200)


def test_power_grows_from_the_level_to_one() -> None:
    drawn = random_draws(200)
    power = [drawn.power(shift, 0.05) for shift in (0.0, 0.5, 1.0, 2.0, 4.0, 50.0)]
    assert power[0] == pytest.approx(0.05, abs=0.02)
    assert all(low <= high + 1e-12 for low, high in itertools.pairwise(power))
    assert power[-1] == pytest.approx(1.0, abs=1e-6)
    shift = drawn.detectable_shift(0.1, 0.05)
    assert drawn.power(shift, 0.05) >= 0.8 > drawn.power(0.99 * shift, 0.05)
    silent = drawn._replace(
        linear=np.zeros(999), quadratic=0.0, growth_2=0.0, growth_4=0.0
    )
    assert silent.detectable_shift(1.0, 0.05) is None


def test_p_value_by_hand_and_critical_value() -> None:
    by_hand = SignDraws(
        0.0, np.array([1.0, 2.0, 3.0, 4.0]), np.zeros(4), 2.5, 1.25, 0.0
    )
    assert [
        by_hand.p_value(statistic) for statistic in (3.0, 5.0, 0.5)
    ] == pytest.approx([3 / 5, 1 / 5, 1.0])
    drawn = random_draws(40, draws=199)
    critical = drawn.critical(0.1)
    assert drawn.p_value(critical * 1.0001) <= 0.1 < drawn.p_value(critical * 0.9999)
    assert drawn.power(0.0, 0.1) == np.mean(
        [drawn.p_value(statistic) <= 0.1 for statistic in drawn.statistics]
    )
