"""Engines: where clients run. `Engine` and `Worker` are the bases of your own, `add` registers it by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sordino import lazy

if TYPE_CHECKING:
    from sordino.engines.base import ClientJob as ClientJob
    from sordino.engines.base import Collected as Collected
    from sordino.engines.base import Engine as Engine
    from sordino.engines.base import Worker as Worker
    from sordino.engines.distributed import Distributed as Distributed
    from sordino.engines.inprocess import InProcess as InProcess
    from sordino.engines.registry import add as add

__all__, __getattr__ = lazy.exports(__name__, __file__)
