"""Promise: a Flower app of somebody else gets clip, noise and certificate by at most five changed lines."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.pages import titled

from sordino.errors import DataError, EngineError, PlanError
from sordino.federation.flower_api import flower
from sordino.federation.flower_private import Private, check_plan, private_mod
from sordino.parts.encoding import Clip
from sordino.parts.local_solvers import LocalSgd
from sordino.parts.mechanisms import Gaussian
from sordino.parts.releases import CentralNoise, LocalNoise, NoiseShares, NoNoise
from sordino.parts.samplers import Everyone, Poisson
from sordino.parts.server_optimizers import Sgd
from sordino.plan import Plan

QUICKSTART = """
import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

app = ClientApp()

@app.train()
def train(message, context):
    model = message.content["arrays"].to_numpy_ndarrays()
    shift = float(context.node_id)
    moved = [model[0] + shift, model[1]]
    content = {"arrays": ArrayRecord(moved), "metrics": MetricRecord({"loss": shift, "num-examples": 7})}
    return Message(RecordDict(content), reply_to=message)

def serve(grid):
    arrays = ArrayRecord([np.zeros((2, 3), np.float32), np.arange(4)])
    strategy = FedAvg(min_train_nodes=4, min_available_nodes=4)
    return strategy, strategy.start(grid=grid, initial_arrays=arrays, num_rounds=3)
"""
CHANGES = (
    ("from flwr.serverapp.strategy import FedAvg\n", "from sordino.federation import Private, private_mod\n"),
    ("app = ClientApp()\n", "app = ClientApp(mods=[private_mod])\n"),
    (
        "    strategy = FedAvg(min_train_nodes=4, min_available_nodes=4)\n",
        "    strategy = Private(PLAN, delta=1e-2, allow_large_delta=True)\n",
    ),
)


def plan(release: Any = None, **changes: Any) -> Plan:
    held = {
        "rounds": 3,
        "clients": Everyone(4),
        "local": LocalSgd(lr=0.1, epochs=1),
        "encode": (Clip(1.0),),
        "release": release or CentralNoise(Gaussian(2.0)),
        "server": Sgd(),
    }
    return Plan(**{**held, **changes})


pytestmark = pytest.mark.usefixtures("in_a_run")


class Here:
    """A grid whose four nodes run the app in this process; it keeps what left them."""

    def __init__(self, app: Any, lost: tuple[int, ...] = ()) -> None:
        self.app, self.lost, self.left = app, lost, []  # type: ignore[var-annotated]

    def get_node_ids(self) -> list[int]:
        return [11, 12, 13, 14]

    def send_and_receive(self, messages: Iterable[Any], *, timeout: float | None = None) -> list[Any]:
        f, replies = flower(), []
        for message in messages:
            node = message.metadata.dst_node_id
            message.metadata.__dict__["_message_id"] = f"m{node}"
            context = f.Context(run_id=0, node_id=node, node_config={}, state=f.RecordDict(), run_config={})
            if node not in self.lost:
                replies.append(self.app(message=message, context=context))
        self.left += replies
        return replies


def changed() -> str:
    text = QUICKSTART
    for found, instead in CHANGES:
        assert text.count(found) == 1
        text = text.replace(found, instead)
    return text


def run(release: Any = None, lost: tuple[int, ...] = (), **changes: Any) -> tuple[Any, Any, Here]:
    scope: dict[str, Any] = {"PLAN": plan(release, **changes)}
    exec(changed(), scope)
    grid = Here(scope["app"], lost)
    return *scope["serve"](grid), grid


def test_the_lines_of_the_page_make_an_app_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/deploy.md: the first line in the client's file, the others in the server's."""
    monkeypatch.chdir(tmp_path)
    client, _, server = titled("docs/deploy.md", "your app").text.partition("\n")
    scope: dict[str, Any] = {"plan": plan(clients=Everyone(400)), "Private": Private, "private_mod": private_mod}
    exec(QUICKSTART.replace("app = ClientApp()", client), scope)
    scope |= {"grid": Here(scope["app"]), "arrays": scope["ArrayRecord"]([np.zeros((2, 3), np.float32), np.arange(4)])}
    with pytest.raises(DataError, match="400"):  # four nodes are not the plan's clients: the strategy is ours
        exec(server, scope)
    scope["plan"] = plan()
    exec(server.replace("Private(plan)", "Private(plan, delta=1e-2, allow_large_delta=True)"), scope)
    assert json.loads(Path("certificate.json").read_text())["epsilon"] == plan_epsilon(3)


def test_at_most_five_lines_change() -> None:
    lines = list(difflib.unified_diff(QUICKSTART.splitlines(), changed().splitlines(), n=0))
    assert sum(line.startswith("+") and not line.startswith("+++") for line in lines) <= 5


def test_the_app_gets_a_certificate_of_its_rounds() -> None:
    strategy, result, _ = run()
    made = strategy.certificate
    assert made["noise"]["mode"] == "secure"
    assert made["counts"]["rounds_charged"] == 3
    assert made["epsilon"] == plan_epsilon(3)
    assert any("app's own" in line for line in made["assumptions"])
    assert [array.shape for array in result.arrays.to_numpy_ndarrays()] == [(2, 3), (4,)]
    assert (result.arrays.to_numpy_ndarrays()[1] == np.arange(4)).all()  # integers are not aggregated


def plan_epsilon(rounds: int) -> float:
    from sordino.certificate.build import certificate
    from sordino.certificate.facts import Facts
    from sordino.outcome import facts_of_charges

    facts = facts_of_charges(plan(), list(range(rounds)), [], Facts(0.01, "secure", 0))
    return float(certificate(plan(), facts)["epsilon"])


def test_nothing_but_an_update_in_the_unit_ball_leaves_a_client() -> None:
    _, _, grid = run()
    for reply in grid.left:
        assert set(reply.content) == {"sordino"}
        row = reply.content["sordino"]["row"].numpy()
        assert row.shape == (6,)
        assert np.linalg.norm(row.astype(np.float64)) <= 1.0


def test_the_noise_of_the_sum_has_the_plans_deviation() -> None:
    """Every update is far outside the ball and the same, so all that is random in the mean is the noise."""
    moved = [run()[1].arrays.to_numpy_ndarrays()[0].ravel() for _ in range(60)]
    noise = np.concatenate(moved) - np.mean(moved)
    assert noise.std() == pytest.approx(2.0 / 4 * np.sqrt(3), rel=0.15)  # three rounds, mean of four


def test_local_noise_is_in_the_message_already() -> None:
    _, _, grid = run(LocalNoise(Gaussian(5.0)))
    norms = [np.linalg.norm(reply.content["sordino"]["row"].numpy()) for reply in grid.left]
    assert max(norms) > 3.0


def test_a_node_that_does_not_answer_changes_no_denominator() -> None:
    strategy, result, _ = run(CentralNoise(Gaussian(1e-6)), lost=(13,))
    moved = result.arrays.to_numpy_ndarrays()[0]
    assert np.linalg.norm(moved) == pytest.approx(3 * 3 / 4, abs=1e-3)  # three of four unit vectors, three rounds
    assert strategy.certificate["counts"]["rounds_charged"] == 3


def test_what_cannot_be_certified_is_refused() -> None:
    with pytest.raises(PlanError, match="without a Clip"):
        check_plan(plan(NoNoise(), encode=()))
    with pytest.raises(EngineError, match="secure_sum"):
        Private(plan(NoiseShares(2.0, 3)))
    with pytest.raises(DataError, match="4 nodes and a plan for 9 clients"):
        run(clients=Poisson(9, 0.5))
    scope: dict[str, Any] = {"PLAN": plan(rounds=2)}
    exec(changed(), scope)
    with pytest.raises(PlanError, match="round 3 of a plan for 2"):
        scope["serve"](Here(scope["app"]))
