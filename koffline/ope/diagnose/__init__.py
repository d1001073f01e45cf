"""Is a value function right, and if not, where? ``koffline diagnose``."""
