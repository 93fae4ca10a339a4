"""DP-SGD with Hugging Face's accelerate: first make_private, then accelerator.prepare of what it returned."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import sordino as so

torch.manual_seed(0)
x = torch.randn(600, 10)
records = TensorDataset(x, (x[:, 0] + x[:, 1] > 0).long())
accelerator = Accelerator(cpu=True)
net: nn.Module = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 2)).to(accelerator.device)
model, private, loader = so.make_private(
    net, torch.optim.SGD(net.parameters(), lr=0.5), DataLoader(records, batch_size=60), epochs=5, epsilon=2.0
)
schedule = torch.optim.lr_scheduler.StepLR(private, step_size=20)
model, optimizer, loader, schedule = accelerator.prepare(model, private, loader, schedule)
for _ in range(5):
    for xs, ys in loader:
        optimizer.zero_grad()
        accelerator.backward(nn.functional.cross_entropy(model(xs), ys))
        optimizer.step()
        schedule.step()

certificate = private.certificate()
print({key: certificate[key] for key in ("epsilon", "delta", "unit", "relation", "counts")})
