"""Build datasets and target policies: uniform states, rollouts, mixtures."""
