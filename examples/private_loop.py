"""DP-LSSGD in an ordinary PyTorch loop, on the bundled digits: four lines differ from a loop without privacy."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import sordino as so
from sordino.accounting.rounding import upto
from sordino.data.tabular import digits

torch.set_num_threads(1)  # a net this small is no faster on two
torch.manual_seed(0)
data = digits()
records = TensorDataset(torch.from_numpy(data.x), torch.from_numpy(data.y))
test_x, test_y = torch.from_numpy(data.test_x), torch.from_numpy(data.test_y)

model: nn.Module = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 10)
)
model, optimizer, loader = so.make_private(
    model,
    torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5),
    DataLoader(records, batch_size=128),
    epochs=15,
    epsilon=3.0,  # delta defaults to records ** -1.1, at most 1e-3
    clip_norm=1.0,
    smoothing=1.0,  # 0: DP-SGD
    max_physical_batch_size=64,  # at most so many records at once
)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=15)
loss_fn = nn.CrossEntropyLoss()
for epoch in range(15):
    for x, y in loader:
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        optimizer.step()
    schedule.step()
    if epoch % 5 == 4:
        with torch.no_grad():
            right = (model(test_x).argmax(1) == test_y).float().mean()
        so_far = optimizer.certificate()["loop"]["epsilon_so_far"]
        print(f"epoch {epoch + 1}: accuracy {right:.3f}, epsilon so far {upto(so_far)}")

certificate = optimizer.certificate()
print({key: certificate[key] for key in ("epsilon", "delta", "unit", "relation", "counts")})
