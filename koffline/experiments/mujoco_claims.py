"""The paper's sentences on policy optimisation, each beside our measurement and a verdict.

A comparison is the difference of interquartile means over seeds, K-loss minus a rival, each at its best
setting: it holds or does not where the 95 % bootstrap interval lies on one side of 0, else undecided; so is
what fewer than five seeds say.
(Feng et al. 2019, Section 5.3, fig:mujoco_bench)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from koffline.experiments.comparisons import Comparison
from koffline.experiments.methods import LABELS
from koffline.experiments.mujoco import Group, Learned
from koffline.experiments.mujoco_plan import BUDGETS, CRITICS
from koffline.experiments.mujoco_statistics import difference, scores_of
from koffline.experiments.results import Claim
from koffline.experiments.verdicts import FAILS, HOLDS, UNDECIDED

_WHERE = "Section 5.3, fig:mujoco_bench"
_GRIDS = {"final": "equal settings or grid for all", "paper": "the paper's grid and learner"}
_RIVALS = tuple(critic for critic in CRITICS if critic != "kloss")

Runs = Mapping[Group, Learned]


def mujoco_claims(learned: Runs) -> Iterator[Claim]:
    """Everything that the finished runs can say."""
    for part, grid in _GRIDS.items():
        found = [claim for environment in BUDGETS for claim in _against_rivals(learned, part, environment)]
        if found:
            yield _consistently(found, grid)
            yield from found
    yield from _with_noise(learned)


def _against_rivals(learned: Runs, part: str, environment: str) -> Iterator[Claim]:
    """Better policies (final return) with fewer data (area under the curve), rival by rival."""
    ours = learned.get(Group(part, environment, 0.0, "kloss"))
    for rival in _RIVALS:
        theirs = learned.get(Group(part, environment, 0.0, rival))
        if ours is None or theirs is None:
            continue
        label = LABELS[rival]
        for number, words, sentence in (
            ("final", "final return", f"K-loss learns a better policy than {label}"),
            ("area", "area under the curve", f"K-loss learns with fewer data than {label}"),
        ):
            greedy = _difference(ours, theirs, "returns", number)
            sampled = _difference(ours, theirs, "sampled", number)
            yield Claim(
                sentence, _WHERE, environment,
                f"{words}, K-loss − {label}, IQM of {len(ours.returns)} seeds ({_GRIDS[part]})",
                greedy.value, greedy.low, greedy.high, verdict_of(greedy),
                f"by the sampled policy: {sampled} ({verdict_of(sampled)})",
            )  # fmt: skip


def _consistently(found: Sequence[Claim], grid: str) -> Claim:
    """One that goes the other way refutes "consistently"; one that is undecided leaves it open."""
    counts = {verdict: sum(claim.verdict == verdict for claim in found) for verdict in (HOLDS, FAILS)}
    verdict = FAILS if counts[FAILS] else HOLDS if counts[HOLDS] == len(found) else UNDECIDED
    environments = dict.fromkeys(claim.world for claim in found)
    return Claim(
        "K-loss consistently outperforms all the other methods, learning better policy with fewer data",
        _WHERE, "MuJoCo",
        f"comparisons of {len(found)} that hold ({len(environments)} environments, {grid})",
        float(counts[HOLDS]), None, None, verdict, f"{counts[FAILS]} go the other way",
    )  # fmt: skip


def _with_noise(learned: Runs) -> Iterator[Claim]:
    """Double sampling biases the residual gradient where transitions are random, and not the K-loss."""
    for group, ours in learned.items():
        if (group.part, group.critic) != ("noise", "kloss"):
            continue
        for rival in _RIVALS:
            theirs = learned.get(Group("noise", group.environment, group.noise, rival))
            if theirs is None:
                continue
            label = LABELS[rival]
            sentence = f"K-loss learns a better policy than {label} where transitions are random"
            greedy = _difference(ours, theirs, "returns", "final")
            sampled = _difference(ours, theirs, "sampled", "final")
            yield Claim(
                sentence, "Sections 2 and 3 (double sampling), inside Trust-PCL",
                f"{group.environment}, noise {group.noise:g}",
                f"final return, K-loss − {label}, IQM of {len(ours.returns)} seeds",
                greedy.value, greedy.low, greedy.high, verdict_of(greedy),
                f"by the sampled policy: {sampled} ({verdict_of(sampled)})",
            )  # fmt: skip


def verdict_of(found: Comparison) -> str:
    """Whether a difference is positive."""
    if found.low > 0.0:
        return HOLDS
    return FAILS if found.high < 0.0 else UNDECIDED


def _difference(ours: Learned, theirs: Learned, curve: str, number: str) -> Comparison:
    scores = [getattr(scores_of(part.steps, getattr(part, curve)), number) for part in (ours, theirs)]
    return difference(scores[0], scores[1])
