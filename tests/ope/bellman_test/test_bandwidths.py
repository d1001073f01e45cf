"""The test over several bandwidths: by hand, against a loop, its level and its power."""

import dataclasses

import numpy as np
import pytest

import koffline
from koffline.config import make_bellman_settings
from koffline.errors import ConfigError
from koffline.kernels import Gaussian
from koffline.ope.bellman_test.bandwidths import BandwidthDraws, draw_bandwidths
from koffline.ope.bellman_test.case import make_case
from koffline.ope.bellman_test.forms import SignDraws, draw_by_products, random_signs
from koffline.ope.value_functions import as_value_function
from tests.ope.bellman_test.problems import known_problem

MULTIPLES = (0.15, 0.6, 2.4)


def draws_by_hand(
    statistic: float, statistics: list[float], mean: float, variance: float
) -> SignDraws:
    """Draws without an alternative."""
    return SignDraws(
        statistic=statistic,
        statistics=np.array(statistics),
        linear=np.zeros(len(statistics)),
        mean=mean,
        variance=variance,
        quadratic=0.0,
    )


def test_the_largest_studentised_statistic_by_hand() -> None:
    """(4 − 1)/2 = 1.5 is larger than (10 − 10)/1, and one of three draws reaches it."""
    narrow = draws_by_hand(4.0, [1.0, 5.0, 3.0], mean=1.0, variance=4.0)
    wide = draws_by_hand(10.0, [11.0, 10.0, 9.0], mean=10.0, variance=1.0)
    together = BandwidthDraws((narrow, wide))
    assert together.statistic == pytest.approx(1.5)
    assert together.statistics == pytest.approx([1.0, 2.0, 1.0])
    assert together.p_value == pytest.approx(2 / 4)


def test_a_kernel_that_compares_no_rows_is_left_out() -> None:
    """T* of the identity is constant; alone it rejects nothing."""
    identity = draws_by_hand(5.0, [5.0, 5.0, 5.0], mean=5.0, variance=0.0)
    narrow = draws_by_hand(4.0, [1.0, 5.0, 3.0], mean=1.0, variance=4.0)
    assert (
        BandwidthDraws((identity, narrow)).p_value == BandwidthDraws((narrow,)).p_value
    )
    assert BandwidthDraws((identity,)).p_value == 1.0
    assert BandwidthDraws((identity,)).power(1.0, 0.25) == 0.0


def test_draws_are_loops_over_bandwidths_and_signs() -> None:
    known = known_problem(5, 25)
    log = known.transitions
    q = as_value_function(
        lambda s, a: known.q(s, a) + s[:, 0],
        log.action_space,
        log.observation_shape,
    )
    case = make_case(q, log, known.policy, make_bellman_settings(gamma=0.9, draws=19))
    drawn = draw_bandwidths(case, MULTIPLES, features=0, seed=3)
    signs = random_signs((19, 25), np.random.default_rng(3))
    median = case.kernel.bandwidth / 0.6
    for draw in range(5):
        scaled = []
        for multiple in MULTIPLES:
            gram = Gaussian(multiple * median).gram(case.inputs).numpy()
            total = 0.0
            variance = 0.0
            for i in range(25):
                for j in range(25):
                    product = case.residuals[i] * gram[i, j] * case.residuals[j] / 25
                    if i != j:
                        total += signs[draw, i] * signs[draw, j] * product
                        variance += 2.0 * product**2
            scaled.append(total / np.sqrt(variance))
        assert drawn.statistics[draw] == pytest.approx(max(scaled), rel=1e-9)


@pytest.mark.parametrize("features", [None, 64])
def test_one_bandwidth_is_the_test_without_others(features: int | None) -> None:
    """Also its power; statistic, kernel loss and witness never change."""
    known = known_problem(2, 120)

    def wrong(s, a):
        return known.q(s, a) + 0.5

    options = {"gamma": 0.9, "features": features}
    alone = koffline.bellman_test(wrong, known.transitions, known.policy, **options)
    listed = koffline.bellman_test(
        wrong, known.transitions, known.policy, bandwidths=(0.6,), **options
    )
    assert listed.p_value == alone.p_value == listed.p_values[0]
    assert listed.power == pytest.approx(alone.power, abs=1e-12)
    assert listed.detectable == pytest.approx(alone.detectable, rel=1e-6)
    assert listed.bandwidths == pytest.approx((alone.bandwidth,))
    several = koffline.bellman_test(
        wrong, known.transitions, known.policy, bandwidths=MULTIPLES, **options
    )
    assert several.statistic == alone.statistic
    assert several.kernel_loss == alone.kernel_loss
    assert several.p_values[1] == alone.p_value
    assert several.as_dict()["bandwidths"] == pytest.approx(
        [multiple * alone.bandwidth / 0.6 for multiple in MULTIPLES]
    )


def test_rough_errors_are_found_that_one_bandwidth_averages_away() -> None:
    """An error of its own for each state and action, 15 logs."""
    rejected = {"single": 0, "several": 0}
    for seed in range(15):
        known = known_problem(seed, 300, states=60)
        noise = np.random.default_rng(seed).normal(0.0, 0.5, size=(60, 2))
        states_of = known.world.states_of

        def rough(s, a, states_of=states_of, noise=noise, known=known):
            return known.q(s, a) + noise[states_of(s), a]

        for name, multiples in (("single", ()), ("several", MULTIPLES)):
            test = koffline.bellman_test(
                rough,
                known.transitions,
                known.policy,
                0.9,
                draws=199,
                bandwidths=multiples,
            )
            rejected[name] += test.rejects
    assert rejected["several"] >= rejected["single"] + 4


def test_level_of_the_true_values() -> None:
    """100 logs: 5 rejections are expected, 4 deviations are 9."""
    rejected = 0
    for seed in range(100):
        known = known_problem(seed, 60)
        test = koffline.bellman_test(
            known.q,
            known.transitions,
            known.policy,
            0.9,
            draws=99,
            bandwidths=MULTIPLES,
        )
        rejected += test.rejects
    assert rejected <= 14


def test_stated_power_is_that_of_testing_anew() -> None:
    """200 shifted sets of residuals, each tested with signs of its own; two kernels
    that see different columns.
    """
    generator = np.random.default_rng(4)
    scores = generator.normal(size=(60, 6)) / np.sqrt(60)
    shifts = (0.35 * np.arange(1, 7) / 6 + 0.1 * generator.normal(size=(60, 6))) / 60
    parts = (slice(0, 3), slice(3, 6))

    def drawn_of(scores: np.ndarray, seed: int, draws: int) -> BandwidthDraws:
        return BandwidthDraws(
            tuple(
                draw_by_products(
                    scores[:, part] @ scores[:, part].T,
                    shifts[:, part] @ scores[:, part].T,
                    shifts[:, part] @ shifts[:, part].T,
                    draws,
                    np.random.default_rng(seed),
                )
                for part in parts
            )
        )

    shift = 4.0
    stated = drawn_of(scores, 0, 999).power(shift, 0.05)
    rejected = 0
    for repetition in range(200):
        lifted = generator.choice([-1.0, 1.0], size=(60, 1)) * scores + shift * shifts
        rejected += drawn_of(lifted, repetition, 99).p_value <= 0.05
    assert 0.2 < stated < 0.8
    assert rejected / 200 == pytest.approx(stated, abs=0.14)  # 4 · √(0.25/200)


@pytest.mark.parametrize("bandwidths", [(0.0,), (0.6, -1.0), tuple([0.5] * 21)])
def test_other_bandwidths_are_refused(bandwidths: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match="bandwidths"):
        make_bellman_settings(gamma=0.9, bandwidths=bandwidths)


def test_seeds_are_shared_by_bandwidths() -> None:
    """Equal kernels give equal draws, so that a bandwidth counts once."""
    known = known_problem(1, 80)
    log = known.transitions
    q = as_value_function(known.q, log.action_space, log.observation_shape)
    case = make_case(q, log, known.policy, make_bellman_settings(gamma=0.9))
    twice = draw_bandwidths(case, (0.6, 0.6), features=0, seed=1)
    once = dataclasses.replace(twice, of_bandwidths=twice.of_bandwidths[:1])
    assert twice.statistics == pytest.approx(once.statistics)
    assert twice.p_value == once.p_value


def test_a_diagnosis_says_what_was_tested_together(tmp_path) -> None:
    known = known_problem(4, 100)
    diagnosis = koffline.diagnose(
        known.q, known.transitions, known.policy, 0.9, bandwidths=MULTIPLES
    )
    assert "3 bandwidths together" in str(diagnosis)
    diagnosis.report(tmp_path / "report.html")
    assert "bandwidths tested together" in (tmp_path / "report.html").read_text()
