"""Off-policy evaluation: estimators, intervals, diagnostics."""
