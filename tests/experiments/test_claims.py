"""Verdicts follow from intervals: fabricated results whose answer is known."""

import numpy as np
import pytest

from koffline.experiments import claims
from koffline.experiments.cells import CellResult
from koffline.experiments.result_files import ChoiceRow, Claim, Correlation, ErrorRow
from koffline.experiments.seed_statistics import SeedInterval
from koffline.experiments.statements import (
    JudgedGroup,
    group_verdict,
    judge,
    proxy_sentence,
    statements_of,
)

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


def verdicts(cells):
    return list(claims.evaluation_claims(cells))


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
    ("error", "verdict"), [(3.0, "holds"), (0.4, "does not hold"), (1.0, "level")]
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
    judged = list(claims.proxy_claims([correlation]))
    assert [c.verdict for c in judged] == [verdict]
    assert judged[0].sentence == proxy_sentence(loss, "MSE")


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


def toy_extra(distance):
    return {
        "lstd_weight_error": 0.01,
        "largest_distance_from_lstd": {"kloss": distance},
    }


def test_toy_claims():
    rows = [
        toy_row("kloss", 0.01),
        toy_row("rg", 0.16),
        toy_row("td0", None, 10),
        toy_row("fvi", None, 9),
    ]
    judged = list(claims.toy_claims(rows, toy_extra(1e-14)))
    assert [claim.verdict for claim in judged] == [
        "holds",
        "holds",
        "does not hold",
        "holds",
        "holds",
    ]
    rows[0] = toy_row("kloss", 0.3)
    rows[1] = toy_row("rg", 0.011)
    judged = list(claims.toy_claims(rows, toy_extra(0.3)))
    assert [judged[place].verdict for place in (0, 1, 4)] == 3 * ["does not hold"]


def test_statistics_are_compared_on_every_world():
    errors = {
        ("a", "U"): np.array([2.0, 2.1, 1.9]),
        ("a", "V of 150 rows"): np.array([1.0, 1.1, 0.9]),
        ("a", "L_KV"): np.array([1.9, 2.0, 2.05]),
        ("a", "mixture 0.5"): np.array([3.0, 3.1, 2.9]),
    }
    verdicts = [claim.verdict for claim in claims.statistic_claims(errors)]
    assert verdicts == ["holds", "undecided", "does not hold"]


# Verdicts on sentences, from those on comparisons.


@pytest.mark.parametrize(
    ("kinds", "in_general", "expected"),
    [
        (("holds", "holds"), False, "holds"),
        (("holds", "level"), False, "level"),
        (("holds", "undecided", "level"), False, "undecided"),
        (("holds", "does not hold"), False, "does not hold"),
        (("holds", "holds", "undecided"), True, "holds"),
        (("holds", "undecided"), True, "undecided"),
        (("holds", "holds", "does not hold"), True, "does not hold"),
    ],
)
def test_a_group_is_as_good_as_its_worst_comparison(kinds, in_general, expected):
    assert group_verdict(kinds, in_general=in_general) == expected


@pytest.mark.parametrize(
    ("kinds", "verdict", "condition"),
    [
        (("holds", "holds"), "holds", ""),
        (("does not hold", "holds", "undecided", "holds"), "holds under", "B, D"),
        (("does not hold", "undecided"), "does not hold", ""),
        (("level", "level"), "level", ""),
        (("level", "undecided"), "undecided", ""),
    ],
)
def test_a_sentence_holds_under_the_conditions_of_its_groups(kinds, verdict, condition):
    groups = [
        JudgedGroup(name, kind, "1.0", 2)
        for name, kind in zip("ABCD", kinds, strict=False)
    ]
    statement = judge("words", "5.2", groups)
    assert (statement.verdict, statement.condition) == (verdict, condition)
    assert statement.comparisons == 2 * len(kinds)
    assert statement.measured.startswith("A: 1.0; B: 1.0")


def choice_row(method, by_log, temperature, **changes):
    level = SeedInterval(1.0, 0.9, 1.1)
    fields = {
        "world": "puddle_world",
        "temperature": temperature,
        "noise": 0.01,
        "scaling": "unit",
        "reward_divisor": 20.0,
        "fastest": None,
        "method": method,
        "logs": 3,
        "seeds": 2,
        "epochs": 10,
        "rates": 3,
        "hours": 0.1,
        "learning_rate": 0.001,
        "by_log": by_log,
        "error": level,
        "bellman_error": level,
        "worst": 1.0,
        "leading": level,
        "diverged": 0,
        "diverged_any": 0,
        "learning_rate_by_paper": 0.001,
        "by_log_by_paper": by_log,
        "error_by_paper": level,
    }
    return ChoiceRow(**(fields | changes))


def statement_about(judged, words):
    (statement,) = [part for part in judged if words in part.sentence]
    return statement


def test_temperatures_of_the_policy_are_the_conditions_of_puddle_world():
    rows = [
        choice_row("kloss", (0.4, 0.41, 0.39), 0.3, swinging=0.2),
        choice_row("rg", (0.2, 0.21, 0.19), 0.3),
        choice_row("kloss", (0.2, 0.21, 0.19), 3.0, swinging=0.2),
        choice_row("rg", (2.0, 2.1, 1.9), 3.0),
        choice_row("fvi", (9.0, 9.1, 8.8), 3.0, swinging=0.9, diverged_any=2),
        choice_row("sbeed", (0.9, 0.8, 0.7), 3.0, hours=0.3),
        # another noise is another setting
        choice_row("rg", (0.1, 0.1, 0.1), 3.0, noise=0.05),
    ]
    correlations = [
        Correlation(
            f"puddle_world T {temperature}",
            "l2",
            "mse",
            "own",
            SeedInterval(value, value - 0.1, value + 0.1),
            99,
        )
        for temperature, value in (("0.3", 0.85), ("3", -0.6))
    ]
    compared = list(claims.choice_claims(rows, correlations))
    judged = list(statements_of(compared))
    inferior = statement_about(judged, "inferior solutions")
    assert (inferior.verdict, inferior.condition) == ("holds under", "T 3")
    assert "T 0.3: 0.5 " in inferior.measured
    assert "T 3: 10 " in inferior.measured
    correlate = statement_about(judged, "L2 loss does not correlate")
    assert (correlate.verdict, correlate.condition) == ("holds under", "MSE T 3")
    unstable = statement_about(judged, "unstable")
    assert (unstable.verdict, unstable.comparisons) == ("holds", 1)
    assert statement_about(judged, "expensive").verdict == "holds"
    # GTD2 is missing, and so is the sentence on both.
    assert not [part for part in judged if "GTD2 and SBEED" in part.sentence]


def test_ties_at_a_cap_are_level_and_defeats_are_counted():
    def claim_of(rival, score, verdict, grid):
        return Claim(
            sentence=f"K-loss {score} {rival}",
            where="Section 5.3",
            world="InvertedPendulum",
            measured=f"final return, K-loss − {rival}, IQM of 6 seeds ({grid})",
            number=SeedInterval(0.0, 0.0, 0.0),
            verdict=verdict,
        )

    better = "learns a better policy than"
    judged = list(
        statements_of(
            [
                claim_of("TD(0)", better, "level", "the paper's grid and learner"),
                claim_of("RG", better, "level", "the paper's grid and learner"),
            ]
        )
    )
    (tied,) = judged
    assert (tied.verdict, tied.comparisons) == ("level", 2)
    assert "0 hold, 0 the other way, 2 level" in tied.measured


@pytest.mark.parametrize(
    ("interval", "expected"),
    [
        (SeedInterval(0.0, 0.0, 0.0), "level"),
        (SeedInterval(0.0, -3.0, 4.0), "level"),
        (SeedInterval(0.0, -3.0, 6.0), "undecided"),
        (SeedInterval(2.0, 1.0, 3.0), "holds"),
        (SeedInterval(-2.0, -3.0, -1.0), "does not hold"),
    ],
)
def test_level_is_an_undecided_number_without_room_for_a_difference(interval, expected):
    assert interval.judged(0.0, -5.0, 5.0) == expected
