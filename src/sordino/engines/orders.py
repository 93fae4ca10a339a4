"""What rank 0 says to the others: a frame of engines/frames.py. Nothing that is read can run code."""

from __future__ import annotations

from dataclasses import dataclass

from sordino import codec
from sordino.engines.frames import Frame, public_arrays, public_bytes, public_names, public_of, public_said, within
from sordino.errors import DataError
from sordino.parts.encode import Public
from sordino.parts.samplers import Cohort

LINE = 1 << 12  # bytes that a line of JSON may take
END = Frame("end").to_bytes()  # the run is over


@codec.hides_values
@dataclass(frozen=True)
class Order:
    """What rank 0 wants: the messages of a cohort, or, without one, an evaluation. The vector follows."""

    public: Public | None = None
    cohort: Cohort | None = None

    def written(self) -> bytes:
        """What everybody knows, and the cohort; nothing for an evaluation."""
        if self.public is None or self.cohort is None:
            return Frame("evaluation").to_bytes()
        arrays = {"cohort": self.cohort.astype("<i8"), **public_arrays(self.public)}
        return Frame("round", public_said(self.public), arrays).to_bytes()


@dataclass(frozen=True)
class Limits:
    """What an order may name: so many clients, so many coordinates. Public numbers of the plan and the model."""

    population: int
    size: int

    @property
    def most(self) -> int:
        """Bytes of the longest order there is."""
        return LINE + 8 * self.population + public_bytes(self.size)

    def read(self, body: bytes) -> Order | None:
        """The order, or None when the run is over; `DataError` for anything that rank 0 would not say."""
        frame = Frame.of_bytes(body, self.most, LINE)
        if frame.kind in ("end", "evaluation"):
            frame.holds((), set())
            return None if frame.kind == "end" else Order()
        if frame.kind != "round":
            raise DataError("other words than those of an order")
        frame.holds(("t", "radius", "size"), {"cohort", *public_names(frame)})
        return Order(public_of(frame, self.size), within(frame.arrays["cohort"], "cohort", self.population))
