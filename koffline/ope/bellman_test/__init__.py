"""A calibrated test of Q = Q^π with the kernel Bellman loss, its power, and where the equation fails."""
