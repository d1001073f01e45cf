"""Build datasets and target policies: uniform states, rollouts, mixtures, logs to learn control from."""

# The kinds of logs to learn control from (D4RL's: Fu et al. 2020) and whose policies play them.
POLICY_LEVELS: dict[str, tuple[str, ...]] = {
    "random": (),
    "replay": (),
    "medium": ("medium",),
    "medium-expert": ("medium", "expert"),
    "expert": ("expert",),
}
KINDS = tuple(POLICY_LEVELS)
