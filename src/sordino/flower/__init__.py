"""The same plan across machines, over Flower (extra `flower`). Names of Flower stand in internals.py alone."""
