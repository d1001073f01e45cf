"""The paper's sentences on its experiments, one row each, judged by the comparisons of
`claims`.

A sentence rests on groups of comparisons, one per world or per reading of what the
paper leaves open. A group holds if all its comparisons do, and fails if one goes the
other way; of a sentence that says "in general" most must hold and none go the other
way. A sentence whose groups all hold, holds; if some of them do, it holds under their
condition; if none does and one fails, it does not hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from koffline.experiments import style
from koffline.experiments.result_files import Claim, Statement
from koffline.experiments.seed_statistics import (
    FAILS,
    HOLDS,
    HOLDS_UNDER,
    TIED,
    UNDECIDED,
    SeedInterval,
)

# What the comparisons are about; `claims` gives them these sentences.
TRUE_WEIGHT = "our method converges to the true weight w*"
LSTD_SOLUTION = "it will find the TD solution"
WRONG_SOLUTION = "RG converges to a wrong solution"
INFERIOR = (
    "our method works well while residual gradient converged to inferior solutions"
)
UNSTABLE_OTHERS = (
    "FVI and TD(0) exhibit unstable/oscillating behaviour, and can even diverge"
)
NO_BETTER = (
    "GTD2 and SBEED do not find a better solution than our method in terms of MSE"
)
IN_GENERAL = "our method performs better than other methods in general"
CONVERGENT = "our method is convergent: no risk of divergence"
V_IN_BATCH = "V-statistics works better than U-statistics (in a mini-batch)"
V_OF_LOG = (
    "V-statistics works better than U-statistics (L_KV, the estimate of all rows' V)"
)
MIXTURE = "a mixture of V and U achieves better performance"
MAGNITUDE = "the magnitude of the empirical loss reflects the closeness of V"
EXPENSIVE = "SBEED is substantially more expensive than our method"
_PROXY = "our kernel loss is a good proxy for"
_NO_PROXY = "the L2 loss does not correlate well with"
_BETTER_POLICY = "K-loss learns a better policy than"
_FEWER_DATA = "K-loss learns with fewer data than"
_NUMBERS_WITH_INTERVALS = 2  # of a group; a longer one is shown without intervals
# Numbers between these are shown as integers.
_HUNDRED = 100.0
_MILLION = 1e6
# Readings of Section 5.3, as the comparisons name them, and on the page.
_GRIDS = {
    "equal settings or grid for all": "our learner, one grid for all",
    "the paper's grid and learner": "the paper's settings and grid",
}

Select = Callable[[Claim], bool]


class JudgedGroup(NamedTuple):
    """Comparisons that bear on a sentence under one condition.

    condition: in words. verdict: of the group. measured: its numbers in words. lead:
    what the numbers are, before those of the first group.
    """

    condition: str
    verdict: str
    measured: str
    comparisons: int
    lead: str = ""


def proxy_sentence(loss: str, error: str) -> str:
    """The sentence on a loss ("kloss" or "l2") as a proxy of an error, in words."""
    if loss == "kloss":
        return f"{_PROXY} {error}"
    return f"{_NO_PROXY} {error}"


def ratio_words(method: str) -> str:
    """What a comparison with a method's error measures."""
    return f"MSE of {style.LABELS[method]} / MSE of K-loss"


def is_ratio(claim: Claim) -> bool:
    """Whether a comparison is a ratio of two errors."""
    return claim.measured.startswith("MSE of ") and " / MSE of " in claim.measured


def statements_of(claims: Sequence[Claim]) -> Iterator[Statement]:
    """The sentences in the paper's order; those without any comparison are left out."""
    for sentence, where, groups in _sentences(claims):
        if groups:
            yield judge(sentence, where, groups)


def judge(sentence: str, where: str, groups: Sequence[JudgedGroup]) -> Statement:
    """The verdict on a sentence from its groups."""
    verdicts = [group.verdict for group in groups]
    holding = [group.condition for group in groups if group.verdict == HOLDS]
    condition = ""
    if len(holding) == len(groups):
        verdict = HOLDS
    elif holding:
        verdict = HOLDS_UNDER
        condition = ", ".join(holding)
    elif FAILS in verdicts:
        verdict = FAILS
    elif set(verdicts) == {TIED}:
        verdict = TIED
    else:
        verdict = UNDECIDED
    return Statement(
        sentence=sentence,
        where=where,
        verdict=verdict,
        condition=condition,
        measured="; ".join(_group_text(group) for group in groups),
        comparisons=sum(group.comparisons for group in groups),
    )


def _group_text(group: JudgedGroup) -> str:
    if not group.condition:
        return f"{group.lead}{group.measured}"
    return f"{group.lead}{group.condition}: {group.measured}"


def group_verdict(verdicts: Sequence[str], *, in_general: bool = False) -> str:
    """The verdict on a group; see the module.

    in_general: most comparisons must hold, not all.
    """
    if FAILS in verdicts:
        return FAILS
    if in_general and 2 * verdicts.count(HOLDS) > len(verdicts):
        return HOLDS
    for verdict in (UNDECIDED, TIED):
        if verdict in verdicts:
            return verdict
    return HOLDS


def _sentences(
    claims: Sequence[Claim],
) -> Iterator[tuple[str, str, Sequence[JudgedGroup]]]:
    """Each sentence with its place in the paper and the groups that bear on it."""
    toy = "5.1"
    demo = "5.2, fig. 2"
    bench = "5.2, fig. 3"
    mujoco = "5.3, figs. 4, 5"
    yield (
        "our method converges to the true weight w*",
        toy,
        _single(claims, (TRUE_WEIGHT,), "‖w − w*‖"),
    )
    yield (
        "we use a linear kernel, so that it will find the TD solution",
        toy,
        _single(claims, (LSTD_SOLUTION,), "distance from LSTD"),
    )
    yield (
        "both FVI and TD(0) diverge",
        toy,
        _single(claims, ("FVI diverges", "TD(0) diverges"), "share of seeds"),
    )
    yield (
        "RG converges to a wrong solution",
        toy,
        _single(claims, (WRONG_SOLUTION,), "‖w − w*‖"),
    )
    yield (
        "V-statistics works (slightly) better than U-statistics",
        "3.1, B.1",
        _statistic_groups(
            claims,
            (V_IN_BATCH, V_OF_LOG),
            "U's error by that of the batch's V, and of L_KV",
        ),
    )
    yield (
        "a mixed combination of these two [achieves] better performance",
        "B.1",
        _statistic_groups(claims, (MIXTURE,), "L_KV's error by that of half and half"),
    )
    yield (
        "the magnitude of the empirical loss reflects the closeness of V to the true"
        " value function",
        "3.1",
        _by_world(claims, _has_sentence(MAGNITUDE), "rank correlation", of_puddle=True),
    )
    yield (
        "[SBEED] is substantially more expensive than our method",
        "3.2",
        _single(claims, (EXPENSIVE,), "processor time, a multiple of K-loss's"),
    )
    yield (
        "our method works well while residual gradient converged to inferior solutions",
        demo,
        _by_temperature(
            claims,
            _of_method(INFERIOR, "rg"),
            ("rg",),
            quantity="RG's error by K-loss's",
        ),
    )
    yield (
        "FVI and TD(0) exhibit unstable/oscillating behavior, and can even diverge",
        demo,
        _by_temperature(
            claims,
            _has_sentence(UNSTABLE_OTHERS),
            quantity="runs whose late error is twice their smallest",
        ),
    )
    yield (
        "GTD2 and SBEED do not find a better solution than our method in terms of MSE",
        demo,
        _by_temperature(
            claims,
            _of_method(NO_BETTER, "gtd2", "sbeed"),
            ("gtd2", "sbeed"),
            quantity="error by K-loss's",
        ),
    )
    yield (
        "our kernel loss appears to be a good proxy for both MSE and Bellman error",
        demo,
        _by_error(claims, _PROXY),
    )
    yield (
        "the L2 loss does not correlate well",
        demo,
        _by_error(claims, _NO_PROXY),
    )
    yield (
        "our method performs better than other methods in general (CartPole and Mountain"
        " Car)",
        bench,
        _by_world(
            claims,
            _has_sentence(IN_GENERAL),
            "error by K-loss's",
            in_general=True,
        ),
    )
    yield (
        "[against] nonlinear GTD2 our method is empirically more effective",
        "4",
        _by_world(claims, _is_against("gtd2"), "its error by K-loss's", of_puddle=True),
    )
    yield (
        "compared to prior algorithms, our method is convergent",
        "6",
        _single(claims, (CONVERGENT,), "diverged runs of K-loss"),
    )
    yield (
        "K-loss consistently outperforms all the other methods, learning better policy",
        mujoco,
        _by_grid(claims, _BETTER_POLICY),
    )
    yield (
        "… with fewer data",
        mujoco,
        _by_grid(claims, _FEWER_DATA),
    )


def _single(
    claims: Sequence[Claim], sentences: Sequence[str], quantity: str
) -> list[JudgedGroup]:
    """One group of all comparisons with these sentences, without a condition."""
    chosen = [claim for claim in claims if claim.sentence in sentences]
    if not chosen:
        return []
    numbers = ", ".join(
        f"{_subject(claim)} {_number_text(claim)}".strip() for claim in chosen
    )
    verdict = group_verdict([claim.verdict for claim in chosen])
    return [JudgedGroup("", verdict, f"{quantity} {numbers}", len(chosen))]


def _statistic_groups(
    claims: Sequence[Claim], sentences: Sequence[str], quantity: str
) -> list[JudgedGroup]:
    """Groups by world of comparisons of V, U and mixtures.

    sentences: of the comparisons. quantity: the ratios, in words.
    """
    chosen = [claim for claim in claims if claim.sentence in sentences]
    groups = []
    for world in dict.fromkeys(claim.world for claim in chosen):
        here = [claim for claim in chosen if claim.world == world]
        texts = [_number_text(claim) for claim in here]
        # One of the two statistics is enough: the paper does not say which it means.
        verdicts = [claim.verdict for claim in here]
        verdict = group_verdict(verdicts)
        if HOLDS in verdicts and FAILS not in verdicts:
            verdict = HOLDS
        name = style.WORLD_NAMES.get(world, world)
        groups.append(JudgedGroup(name, verdict, ", ".join(texts), len(here)))
    return _with_words(groups, quantity)


def _with_words(groups: Sequence[JudgedGroup], quantity: str) -> list[JudgedGroup]:
    """The groups; the first says what the numbers of all are."""
    worded = list(groups)
    if worded and quantity:
        first = worded[0]
        if first.condition:
            worded[0] = first._replace(lead=f"{quantity}; ")
        else:
            worded[0] = first._replace(lead=f"{quantity} ")
    return worded


def _of_method(sentence: str, *methods: str) -> Select:
    """Whether a comparison is with one of the methods, under this sentence."""
    words = [ratio_words(method) for method in methods]

    def is_chosen(claim: Claim) -> bool:
        return claim.sentence == sentence and claim.measured in words

    return is_chosen


def _is_against(method: str) -> Select:
    """Whether a comparison is with the method's error, under whatever sentence."""

    def is_chosen(claim: Claim) -> bool:
        return claim.measured == ratio_words(method)

    return is_chosen


def _by_error(claims: Sequence[Claim], beginning: str) -> list[JudgedGroup]:
    """Groups of Puddle World by error and temperature, of a loss as a proxy.

    beginning: of the comparisons' sentences; the error follows.
    """
    errors = dict.fromkeys(
        claim.sentence.removeprefix(beginning).strip()
        for claim in claims
        if claim.sentence.startswith(beginning)
    )
    groups = []
    for error in errors:
        sentence = f"{beginning} {error}"
        for group in _by_temperature(claims, _has_sentence(sentence)):
            name = error.removeprefix("the ")
            groups.append(group._replace(condition=f"{name} {group.condition}".strip()))
    return _with_words(groups, "rank correlation")


def _has_sentence(sentence: str) -> Select:
    """Whether a comparison has this sentence."""

    def is_chosen(claim: Claim) -> bool:
        return claim.sentence == sentence

    return is_chosen


def _by_temperature(
    claims: Sequence[Claim],
    select: Select,
    methods: Sequence[str] = (),
    quantity: str = "",
) -> list[JudgedGroup]:
    """Groups of Puddle World by temperature of the target policy; without these, of the
    one log of figure-puddle.

    methods: a group of fewer comparisons than these is left out. quantity: what is
    compared, in words.
    """
    chosen = [claim for claim in claims if select(claim)]
    puddle = "puddle_world"
    places = dict.fromkeys(
        claim.world for claim in chosen if claim.world.startswith(f"{puddle} ")
    )
    groups = []
    for place in [*places] or [puddle]:
        here = [claim for claim in chosen if claim.world == place]
        if len(here) < max(1, len(methods)):
            continue
        condition = place.removeprefix(puddle).strip()
        groups.append(_group_of(condition, here))
    return _with_words(groups, quantity)


def _by_world(
    claims: Sequence[Claim],
    select: Select,
    quantity: str,
    *,
    in_general: bool = False,
    of_puddle: bool = False,
) -> list[JudgedGroup]:
    """Groups by world. quantity: the quantity, said once.

    of_puddle: Puddle World's groups by temperature come first.
    """
    chosen = [claim for claim in claims if select(claim)]
    groups = []
    if of_puddle:
        for group in _by_temperature(claims, select):
            condition = f"Puddle World {group.condition}".strip()
            groups.append(group._replace(condition=condition))
    for world in dict.fromkeys(claim.world for claim in chosen):
        is_puddle = world.startswith("puddle_world")
        if " " in world or (of_puddle and is_puddle):
            continue
        here = [claim for claim in chosen if claim.world == world]
        name = style.WORLD_NAMES.get(world, world)
        groups.append(_group_of(name, here, in_general=in_general))
    return _with_words(groups, quantity)


def _by_grid(claims: Sequence[Claim], beginning: str) -> list[JudgedGroup]:
    """Groups of Section 5.3, by grid: how many comparisons hold and go the other way."""
    groups = []
    for words, name in _GRIDS.items():
        here = [
            claim
            for claim in claims
            if claim.sentence.startswith(beginning)
            and claim.measured.endswith(f"({words})")
        ]
        if not here:
            continue
        verdicts = [claim.verdict for claim in here]
        environments = len({claim.world for claim in here})
        text = (
            f"{environments} environments, {len(here)} comparisons:"
            f" {verdicts.count(HOLDS)} hold, {verdicts.count(FAILS)} the other way,"
            f" {verdicts.count(TIED)} level"
        )
        groups.append(JudgedGroup(name, group_verdict(verdicts), text, len(here)))
    return groups


def _group_of(
    condition: str, claims: Sequence[Claim], *, in_general: bool = False
) -> JudgedGroup:
    """A group with its numbers; those of many comparisons are shown without
    intervals.
    """
    texts = []
    for claim in claims:
        number = _short(claim.number.value)
        if len(claims) <= _NUMBERS_WITH_INTERVALS:
            number = _number_text(claim)
        if len(claims) > 1:
            number = f"{_subject(claim)} {number}".strip()
        texts.append(number)
    verdict = group_verdict([claim.verdict for claim in claims], in_general=in_general)
    return JudgedGroup(condition, verdict, ", ".join(texts), len(claims))


def _subject(claim: Claim) -> str:
    """Whose number a comparison shows: a method, or the error that a loss ranks."""
    if is_ratio(claim):
        return claim.measured.partition(" / ")[0].removeprefix("MSE of ")
    for method in ("fvi", "td0"):
        label = style.LABELS[method]
        if f" of {label} " in claim.measured or claim.sentence == f"{label} diverges":
            return label
    return ""


def _number_text(claim: Claim) -> str:
    """The number with its interval, two digits."""
    number = claim.number
    return style.interval_text(
        SeedInterval(number.value, number.low, number.high), _short
    )


def _short(value: float | None) -> str:
    """Two digits, large numbers without an exponent; a dash for None."""
    if value is None:
        return "–"
    if _HUNDRED <= abs(value) < _MILLION:
        return f"{value:,.0f}"
    return f"{value:.2g}"
