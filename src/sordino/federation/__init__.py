"""Federated runs across machines over Flower (extra `flower`): server, silos and secure aggregation. Used by `cli`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sordino import lazy

if TYPE_CHECKING:
    from sordino.federation.flower_private import Private as Private
    from sordino.federation.flower_private import private_mod as private_mod

__all__, __getattr__ = lazy.exports(__name__, __file__)
