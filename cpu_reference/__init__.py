"""The NumPy runner: the oracle. Correctness before speed; no torch."""
