"""Certificates of runs: they are built from plan and charges, checked, signed, and explained in plain sentences."""
