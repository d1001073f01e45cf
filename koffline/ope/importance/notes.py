"""What a person should know of the weights behind an estimate over episodes, in sentences."""

from __future__ import annotations

from koffline.ope.names import WHOLE_WEIGHT, WITH_MODEL, WITHOUT_MODEL

_FEW_EPISODES = 10.0
_UNEVEN = 0.5  # on finite chains 95 % intervals held the truth in 76 to 91 % of logs below it
_CUT_SHARE = 0.01
NO_WEIGHT = (
    "the policy takes none of the logged actions: every episode's weight is zero after {steps}; use a policy "
    "that can take them (epsilon:0.1:<policy>) or an estimator without episode weights (kloss, fqe, mwl)"
)


def notes_on_weights(
    name: str,
    episodes: int,
    size: float,
    clip: float | None,
    cut_share: float,
    gone: int | None,
) -> list[str]:
    """Sentences on the weights of an estimator over episodes.

    size: effective number of episodes. gone: the step from which no episode has weight left.
    """
    notes = []
    if episodes == 1:
        notes.append("The log has a single episode: no standard error and no interval.")
    elif size < _FEW_EPISODES:
        notes.append(
            f"Only about {size:.1f} of {episodes} episodes carry the weight: the estimate and its "
            "interval hang on them."
        )
    elif size < _UNEVEN * episodes:
        notes.append(
            f"Uneven weights leave about {size:.0f} of {episodes} episodes: calibrated intervals "
            "are too narrow where weights have heavy tails."
        )
    if clip is not None:
        notes.append(f"Weights are capped at {clip:g}: less variance, and a bias of unknown size.")
    if name in WITHOUT_MODEL and cut_share > _CUT_SHARE:
        notes.append(
            "Recording stopped before episodes ended: rewards after the cut are left out, about "
            f"{cut_share:.1%} of the value if rewards stay as they are."
        )
    if gone is not None and name not in WHOLE_WEIGHT:
        notes.append(
            f"No episode has weight left from step {gone} on: "
            + ("the model stands alone there." if name in WITH_MODEL else "rewards from there are left out.")
        )
    return notes
