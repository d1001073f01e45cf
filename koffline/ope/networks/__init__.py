"""Networks on resampled logs: training, exact last layers, passes over all rows."""
