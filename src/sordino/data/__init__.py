"""Data sets by name, their partition into clients, and checks of model, loss and records before training."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sordino import lazy

if TYPE_CHECKING:
    from sordino.data.clients import Clients as Clients
    from sordino.data.clients import Records as Records
    from sordino.data.datasets import load as load
    from sordino.data.datasets import names as names
    from sordino.data.records import Dataset as Dataset
    from sordino.data.records import Partitioner as Partitioner
    from sordino.data.records import Split as Split

__all__, __getattr__ = lazy.exports(__name__, __file__)
