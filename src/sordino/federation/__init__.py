"""The same plan across machines, over Flower (extra `flower`). Names of Flower stand in internals.py alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sordino.federation.flower_private import Private, private_mod

__all__ = ["Private", "private_mod"]


def __getattr__(name: str) -> Any:
    """Loaded when asked for: without flwr, one sentence."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from sordino.federation import flower_private

    return getattr(flower_private, name)
