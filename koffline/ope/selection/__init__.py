"""Which of several policies is best: ranking with intervals, paired differences, quality of the choice."""
