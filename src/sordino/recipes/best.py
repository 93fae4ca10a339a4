"""Tight noise, server momentum and a falling server step: our own composition, solved for a target epsilon."""

from __future__ import annotations

from sordino.parts.encode import Clip
from sordino.parts.local import LocalSgd
from sordino.parts.postprocess import LaplacianSmoothing
from sordino.parts.samplers import Poisson
from sordino.parts.schedules import Linear, Schedule
from sordino.parts.server import Sgd
from sordino.plan import Plan
from sordino.privacy import calibrate
from sordino.privacy.bill import Line, Participation, client_bill
from sordino.privacy.certificate import default_delta
from sordino.privacy.mechanisms import Gaussian
from sordino.privacy.release import CentralNoise


def best(
    *,
    population: int,
    epsilon: float,
    delta: float | None = None,
    rounds: int = 60,
    rate: float = 0.2,
    lr: float | Schedule = 0.1,
    radius: float | Schedule = 0.8,
    strength: float = 0.0,
    momentum: float = 0.5,
    final: float = 0.1,
    epochs: int = 1,
    batch: int | None = 10,
) -> Plan:
    """v <- momentum v + (noised mean), w <- w - lr_t v; lr_t falls in a straight line to `final` of its start.

    The multiplier is solved for (epsilon, delta) under Poisson sampling; `strength` > 0 adds Laplacian smoothing. The
    defaults were chosen on MNIST's validation images alone; `sordino papers run beyond-mnist` (-adult, -writers)
    compares the choices one by one.
    """
    clients = Poisson(population, rate)
    target = default_delta(population) if delta is None else delta

    def line(z: float) -> Line:
        release, counts = CentralNoise(Gaussian(z)), Participation.planned(clients, rounds)
        return client_bill(clients, release, counts).line("models")

    step = 1.0 - momentum
    return Plan(
        rounds=rounds,
        clients=clients,
        local=LocalSgd(lr=lr, epochs=epochs, batch=batch),
        encode=(Clip(radius),),
        release=CentralNoise(Gaussian(calibrate.multiplier(line, epsilon, target))),
        postprocess=(LaplacianSmoothing(strength),) if strength else (),
        server=Sgd(lr=Linear(step, final * step, rounds), momentum=momentum),
    )
