"""Privacy loss distributions: the mathematics of the accountant. No plan, no data, no randomness."""
