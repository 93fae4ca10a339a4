"""Importing this package is all it takes: every part registers itself, recipes and data sets are added by name."""

from own_part import data, model, parts, recipe

__all__ = ["data", "model", "parts", "recipe"]
