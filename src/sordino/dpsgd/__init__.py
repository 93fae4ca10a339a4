"""DP-SGD in an ordinary PyTorch loop: `make_private`, and exact per-record gradient clipping.

model, optimizer, loader = make_private(model, optimizer, loader, epochs=5, epsilon=2.0)
for x, y in loader:
    optimizer.zero_grad()
    loss_fn(model(x), y).backward()
    optimizer.step()
optimizer.certificate()["epsilon"]
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sordino import lazy

if TYPE_CHECKING:
    from sordino.dpsgd.batch_independence import refuse_mixing as refuse_mixing
    from sordino.dpsgd.clipped_sum import Clipped as Clipped
    from sordino.dpsgd.clipped_sum import ClippedGradient as ClippedGradient
    from sordino.dpsgd.loader import PrivateLoader as PrivateLoader
    from sordino.dpsgd.optimizer import PrivateOptimizer as PrivateOptimizer
    from sordino.dpsgd.private_loop import make_private as make_private

__all__, __getattr__ = lazy.exports(__name__, __file__)
