"""Your own module and your own clients: one (x, y) pair per client is enough."""

from __future__ import annotations

import torch
from torch import nn

import sordino as so

torch.manual_seed(0)
truth = torch.randn(10)
clients = [(x, (x @ truth > 0).long()) for x in torch.randn(201, 20, 10)]
task = so.Task.of(nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 2)), clients[:200], test=clients[200])
plan = so.recipes.dp_fed_avg(
    rounds=40, clients=so.Poisson(200, 0.2), lr=0.5, clip_norm=1.0, noise_multiplier=1.0, batch=5
)
plan = so.calibrate(plan, epsilon=4.0)  # finds the noise multiplier
result = so.train(plan, task)
print(
    result.history[-1]["accuracy"], {key: result.certificate[key] for key in ("epsilon", "delta", "unit", "relation")}
)
