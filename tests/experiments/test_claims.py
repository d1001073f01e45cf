"""Verdicts follow from intervals: fabricated results whose answer is known."""

import numpy as np
import pytest

from koffline.experiments import claims
from koffline.experiments.cells import CellResult
from koffline.experiments.result_files import Correlation, ErrorRow
from koffline.experiments.seed_statistics import SeedInterval

SEEDS = 10


def result_of(error, swing=1.0, diverged=False):
    """One learning rate, ten seeds around an error; late errors swing up by a
    factor.
    """
    generator = np.random.default_rng(int(error * 1000))
    late = error * (1.0 + 0.05 * generator.standard_normal(SEEDS))
    curve = np.tile(late, (30, 1, 1)).astype(np.float32)
    curve[-6::2] *= swing
    flags = np.full((1, SEEDS), 7 if diverged else -1)
    names = ("mse_monte_carlo", "mse_paper", "kernel_loss", "l2_loss", "objective")
    return CellResult(
        epochs=np.arange(30),
        learning_rates=np.array([0.001]),
        curve={
            **dict.fromkeys(names, curve),
            "bellman_error": np.full_like(curve, 0.1),
            "largest_value": np.ones_like(curve),
        },
        diverged_at=flags,
        held_out=np.ones((1, SEEDS)),
        paper_noise=0.0,
        value_variance=10.0,
        largest_return=50.0,
    )


def verdicts(cells, correlations=()):
    return list(claims.evaluation_claims(cells, tuple(correlations)))


def fabricated(**puddle):
    errors = {
        "td0": 3.0,
        "fvi": 3.0,
        "rg": 3.0,
        "gtd2": 3.0,
        "sbeed": 3.0,
        "kloss": 1.0,
    } | puddle
    worlds = ("puddle_world", "cart_pole", "gymnasium_pole", "mountain_car")
    return {
        (world, method): result_of(error)
        for world in worlds
        for method, error in errors.items()
    }


def against(judged, other):
    return next(
        c
        for c in judged
        if c.world == "puddle_world" and c.measured.startswith(f"MSE of {other} /")
    )


@pytest.mark.parametrize(
    ("error", "verdict"), [(3.0, "holds"), (0.4, "does not hold"), (1.0, "undecided")]
)
def test_larger_errors_of_others_make_a_claim_hold_and_smaller_ones_break_it(
    error, verdict
):
    judged = verdicts(fabricated(rg=error, sbeed=error))
    assert against(judged, "SBEED").verdict == verdict
    against_rg = against(judged, "RG")
    assert against_rg.verdict == verdict
    assert against_rg.number.value == pytest.approx(error, rel=0.1)
    assert against_rg.number.low <= against_rg.number.value <= against_rg.number.high
    assert bool(against_rg.reason) == (verdict == "does not hold")


def test_oscillation_is_counted_per_run():
    cells = fabricated()
    cells["puddle_world", "td0"] = result_of(3.0, swing=5.0)
    oscillating = [c for c in verdicts(cells) if "oscillating" in c.sentence]
    judged = {
        c.measured.split(" of ")[2].split(" whose")[0]: (c.number.value, c.verdict)
        for c in oscillating
    }
    assert judged == {"FVI": (0.0, "does not hold"), "TD(0)": (1.0, "holds")}


def test_divergence_of_the_kernel_loss_is_counted():
    cells = fabricated()
    assert (
        next(c for c in verdicts(cells) if "convergent" in c.sentence).verdict
        == "holds"
    )
    cells["cart_pole", "kloss"] = result_of(1.0, diverged=True)
    broken = next(c for c in verdicts(cells) if "convergent" in c.sentence)
    assert (broken.number.value, broken.verdict) == (SEEDS, "does not hold")


@pytest.mark.parametrize(
    ("loss", "low", "high", "verdict"),
    [
        ("kloss", 0.8, 0.9, "holds"),
        ("kloss", 0.6, 0.8, "undecided"),
        ("kloss", 0.1, 0.2, "does not hold"),
        ("l2", 0.8, 0.9, "does not hold"),
        ("l2", 0.1, 0.2, "holds"),
    ],
)
def test_proxies_are_judged_by_the_interval(loss, low, high, verdict):
    correlation = Correlation(
        "puddle_world",
        loss,
        "mse",
        "own",
        SeedInterval((low + high) / 2, low, high),
        99,
    )
    judged = [
        c
        for c in verdicts(fabricated(), [correlation])
        if "rank correlation" in c.measured
    ]
    assert [c.verdict for c in judged] == [verdict]


def toy_row(method, error, diverged=0):
    ends = (
        SeedInterval()
        if error is None
        else SeedInterval(error, 0.9 * error, 1.1 * error)
    )
    return ErrorRow(
        "chain",
        method,
        0.5,
        10,
        "exact",
        SeedInterval(),
        diverged=diverged,
        weight_error=ends,
    )


def test_toy_claims():
    rows = [
        toy_row("kloss", 0.01),
        toy_row("rg", 0.16),
        toy_row("td0", None, 10),
        toy_row("fvi", None, 9),
    ]
    judged = list(claims.toy_claims(rows, {"lstd_weight_error": 0.01}))
    assert [claim.verdict for claim in judged] == [
        "holds",
        "does not hold",
        "holds",
        "holds",
    ]
    rows[0] = toy_row("kloss", 0.3)
    rows[1] = toy_row("rg", 0.011)
    judged = list(claims.toy_claims(rows, {"lstd_weight_error": 0.01}))
    assert [judged[0].verdict, judged[3].verdict] == ["does not hold", "does not hold"]


def test_statistics_are_compared_on_every_world():
    errors = {
        ("a", "U"): np.array([2.0, 2.1, 1.9]),
        ("a", "V of 150 rows"): np.array([1.0, 1.1, 0.9]),
        ("a", "L_KV"): np.array([1.9, 2.0, 2.05]),
        ("a", "mixture 0.5"): np.array([3.0, 3.1, 2.9]),
    }
    verdicts = [claim.verdict for claim in claims.statistic_claims(errors)]
    assert verdicts == ["holds", "undecided", "does not hold"]
