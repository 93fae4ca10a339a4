"""DP-SGD in Lightning, with automatic optimisation: make_private first, its optimizer and loader go to the Trainer.

Lightning is not a dependency of Sordino: `pip install lightning`.
"""

from __future__ import annotations

from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import sordino as so

EPOCHS = 3
torch.manual_seed(0)
x = torch.randn(600, 10)
records = TensorDataset(x, (x[:, 0] + x[:, 1] > 0).long())
net: nn.Module = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 2))
net, optimizer, loader = so.make_private(
    net, torch.optim.SGD(net.parameters(), lr=0.5), DataLoader(records, batch_size=60), epochs=EPOCHS, epsilon=2.0
)


class Classifier(lightning.LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: Any, index: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return optimizer


quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
trainer = lightning.Trainer(max_epochs=EPOCHS, accelerator="cpu", **quiet)
trainer.fit(Classifier(), loader)
certificate = optimizer.certificate()
print({key: certificate[key] for key in ("epsilon", "delta", "unit", "relation", "counts")})
