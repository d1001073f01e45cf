"""The paper's experiments, one file per figure, and what they share."""
