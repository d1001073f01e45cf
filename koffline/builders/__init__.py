"""Build datasets and target policies: uniform states, rollouts, mixtures, logs to learn control from."""

# Kinds of logs for learning control (as in D4RL, Fu et al. 2020) and the levels of the policies in them.
POLICY_LEVELS: dict[str, tuple[str, ...]] = {
    "random": (),
    "replay": (),
    "medium": ("medium",),
    "medium-expert": ("medium", "expert"),
    "expert": ("expert",),
}
KINDS = tuple(POLICY_LEVELS)
