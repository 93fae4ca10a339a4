"""Engines, which run the clients of a round: base classes, the shipped engines, and `add` to register a new one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sordino import lazy

if TYPE_CHECKING:
    from sordino.engines.base import ClientJob as ClientJob
    from sordino.engines.base import Collected as Collected
    from sordino.engines.base import Engine as Engine
    from sordino.engines.base import Worker as Worker
    from sordino.engines.base import add as add
    from sordino.engines.distributed import Distributed as Distributed
    from sordino.engines.inprocess import InProcess as InProcess

__all__, __getattr__ = lazy.exports(__name__, __file__)
