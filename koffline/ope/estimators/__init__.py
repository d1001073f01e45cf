"""The estimators by name, and all of them at once."""
