"""The kinds of logs to learn control from (D4RL's: Fu et al. 2020) and who plays them; light to import."""

from __future__ import annotations

from koffline.errors import ConfigError

POLICY_LEVELS: dict[str, tuple[str, ...]] = {
    "random": (),
    "replay": (),
    "medium": ("medium",),
    "medium-expert": ("medium", "expert"),
    "expert": ("expert",),
}
KINDS = tuple(POLICY_LEVELS)


def policy_levels(kind: str) -> tuple[str, ...]:
    """Which learned policies a kind is played by. Raises ConfigError for an unknown kind."""
    if kind not in POLICY_LEVELS:
        raise ConfigError(f"there is no kind '{kind}'; give one of {', '.join(KINDS)}")
    return POLICY_LEVELS[kind]
