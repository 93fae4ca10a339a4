"""pfl's half of banded.py: `python banded_pfl.py clients.npz mu step seed` prints a line of JSON."""

from __future__ import annotations

import json
import math
import sys

import numpy as np
import torch
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from torch import nn
from with_pfl import Counting, banded, fed_avg

ROUNDS, COHORT, RADIUS = 100, 50, 0.8


def true_over_claimed(c: np.ndarray, apart: int) -> float:
    """How far one client in every `apart`-th round moves C X, over the sqrt(rounds) that pfl takes it for."""
    gram = np.abs(c.T @ c)
    turns = [range(first, len(c), apart) for first in range(apart)]
    return max(math.sqrt(gram[np.ix_(turn, turn)].sum()) for turn in turns) / math.sqrt(-(-len(c) // apart))


def main(file: str, mu: float, step: float, seed: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    np.random.seed(seed)
    held = {name: torch.from_numpy(array) for name, array in np.load(file).items()}
    clients = len(held["x"])
    users = [Dataset([held["x"][i], held["y"][i]], user_id=str(i)) for i in range(clients)]
    data = FederatedDataset(users.__getitem__, get_user_sampler("minimize_reuse", list(range(clients))))
    net = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
    apart = clients // COHORT
    noise = banded(ROUNDS, apart, RADIUS, lambda most: math.sqrt(most) / mu)
    local = {"local_num_epochs": 1, "local_batch_size": 10, "local_learning_rate": 0.1}
    fed_avg(Counting(nn.functional.cross_entropy).on(net, step), data, local, ROUNDS, COHORT, None, noise)
    with torch.no_grad():
        right = (net(held["test_x"]).argmax(1) == held["test_y"]).float().mean()
    worth = true_over_claimed(noise.query_matrix, apart)
    print(json.dumps({"accuracy": 100 * float(right), "moves_over_claimed": round(worth, 4)}))


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]))
