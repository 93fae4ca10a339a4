"""DP-SGD, DP-LSSGD, DP-Adam and DP-LSAdam inside an ordinary PyTorch loop.

model, optimizer, loader = make_private(model, optimizer, loader, epochs=5, epsilon=2.0)
for x, y in loader:
    optimizer.zero_grad()
    loss_fn(model(x), y).backward()
    optimizer.step()
optimizer.certificate()["epsilon"]
"""

from sordino.optim.loader import PrivateLoader
from sordino.optim.make import make_private
from sordino.optim.optimizer import PrivateOptimizer

__all__ = ["PrivateLoader", "PrivateOptimizer", "make_private"]
