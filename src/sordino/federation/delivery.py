"""Delivery of the finished model and its certificate to each silo, and evaluation on a silo's own held-out rows.

    server:  sends `MARK`, a JSON line {run, certificate, model} with both sizes in bytes, then both files
    silo:    writes DIR/model/model.safetensors, certificate.json, bundle.json, and evaluation.json, which stays there

Both files are already released, so a delivery has no privacy cost. A silo accepts only the result of a run in which it
took part, with weights that fit its model and have the hash in the certificate. Called by `app` and `silo_service`.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import safetensors.torch
import torch
from safetensors import SafetensorError

from sordino import codec
from sordino.codec import durable_files
from sordino.data.clients import Records
from sordino.data.metrics import Auc, Predictions
from sordino.errors import DataError
from sordino.outcome import load_weights
from sordino.runs.bundle import CERTIFICATE, MODEL, Bundle
from sordino.task import Task, evaluate

MARK = b"sordino result 1\n"
FOLDER, EVALUATION = "model", "evaluation.json"
HEAD, MOST_CERTIFICATE = 4096, 16 << 20  # bytes
TAKEN = b"taken"
_WRITTEN, _AGAIN = "a result in the format of a Sordino server", "deliver it again: run the server with --resume"


class Exchange(Protocol):
    """Channel that sends bytes to silos and yields their answers until a deadline."""

    def exchange(self, bodies: Mapping[int, bytes], deadline: float) -> Iterator[tuple[int, bytes]]: ...


def deliver(folder: Path, silos: int, channel: Exchange, seconds: float) -> list[int]:
    """Send model and certificate of a finished run to all silos; return the numbers of the silos that accepted them."""
    model, certificate = ((folder / name).read_bytes() for name in (MODEL, CERTIFICATE))
    run = json.loads(certificate)["run"]["id"]
    head = json.dumps({"run": run, "certificate": len(certificate), "model": len(model)}).encode()
    body = MARK + head + b"\n" + certificate + model
    answers = channel.exchange(dict.fromkeys(range(silos), body), time.time() + seconds)
    return sorted(silo for silo, answer in answers if answer == TAKEN)


@codec.hides_values
@dataclass(frozen=True)
class Inbox:
    """Folder in which a silo stores the model that it receives; `knows(run)` is true if the silo took part in it."""

    folder: Path
    task: Task
    bundle: Bundle | None  # of a table: by it raw rows are scored
    knows: Callable[[str], bool]
    heldout: Records | None  # rows of this silo that did not train
    log: Callable[[str], None]

    def take(self, body: bytes) -> bytes:
        """Check and store a delivered model, and evaluate it on the silo's held-out rows; metrics stay in the silo."""
        run, certificate, model = self._parse(body)
        if not self.knows(run):
            found = f"the result of run {run}, in which this silo did not take part"
            raise DataError(found, "the result of a run in which it took part", "deliver it to the run's own silos")
        try:
            made = json.loads(certificate)
            named = made["model_sha256"], made["run"]["id"]
        except (ValueError, KeyError, TypeError):
            needed = "the certificate of the run"
            raise DataError("a delivered certificate that cannot be read", needed, _AGAIN) from None
        if named != (hashlib.sha256(model).hexdigest(), run):
            found = "a model or a run that the delivered certificate does not name"
            raise DataError(found, "the certified model of this run", _AGAIN)
        figures = self._figures(model)
        place = self.folder / FOLDER
        place.mkdir(exist_ok=True)
        durable_files.write(place / MODEL, model)
        durable_files.write(place / CERTIFICATE, certificate)
        if self.bundle is not None:
            self.bundle.write(place)
        if figures:
            text = json.dumps(figures, indent=1) + "\n"
            durable_files.write(place / EVALUATION, text.encode(), durable_files.PRIVATE)
        self.log(f"run {run}: model and certificate are in {place}" + (f"; {EVALUATION} is for you" if figures else ""))
        return TAKEN

    def _parse(self, body: bytes) -> tuple[str, bytes, bytes]:
        end = body.find(b"\n", len(MARK), len(MARK) + HEAD)
        try:
            head = json.loads(body[len(MARK) : end])
            run, *sizes = (head[name] for name in ("run", "certificate", "model"))
        except (ValueError, KeyError, TypeError):
            raise DataError("a delivered result that cannot be read", _WRITTEN, _AGAIN) from None
        whole = all(type(size) is int and size >= 0 for size in sizes) and sum(sizes) == len(body) - end - 1
        most = 4 * self.task.layout.size + MOST_CERTIFICATE
        fits = whole and sizes[0] <= MOST_CERTIFICATE and sizes[1] <= most
        if not (isinstance(run, str) and re.fullmatch("[0-9a-f]{32}", run) and fits):
            raise DataError("a delivered result of another form or size", _WRITTEN, _AGAIN)
        data = body[end + 1 :]
        return run, data[: sizes[0]], data[sizes[0] :]

    def _figures(self, model: bytes) -> dict[str, Any]:
        """Return metrics of the model on the held-out rows; the weights are loaded, as a check, also without rows."""
        held = copy.deepcopy(self.task.model)
        try:
            load_weights(held, safetensors.torch.load(model))
        except (SafetensorError, RuntimeError) as error:
            found = f"delivered weights that do not fit this silo's model ({error})"
            raise DataError(found, "the weights of the run", _AGAIN) from None
        rows = self.heldout
        if rows is None:
            return {}
        figures: dict[str, Any] = {"rows": len(rows), **evaluate(held.eval(), rows, self.task.losses)}
        with torch.no_grad():
            seen = Predictions(held(rows.x), rows.y, self.task.losses)
        with suppress(DataError):  # numbers, or one class only
            figures |= Auc().values(seen)
        return figures
