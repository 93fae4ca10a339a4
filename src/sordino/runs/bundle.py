"""Bundle of a model that scores raw rows of a table (`sordino predict`, `export`). Written by `execute` and by silos.

    model.safetensors     the weights
    bundle.json           encoding of the columns, classes, architecture, and the .csv format of this site
    certificate.json      the privacy guarantee, with the hash of model.safetensors

A run's folder is a bundle, and so is a folder with copies of these three files. Nothing in a bundle depends on private
rows except the released model and released histograms.
"""

from __future__ import annotations

import csv
import hashlib
import json
import logging
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from sordino import codec
from sordino.codec import durable_files
from sordino.data.files import CsvFormat, read_table
from sordino.data.records import Array
from sordino.data.tables import Encoding, check_columns
from sordino.errors import ConfigError, DataError
from sordino.models import Architecture, build_seeded
from sordino.outcome import load_weights

BUNDLE, MODEL, CERTIFICATE = "bundle.json", "model.safetensors", "certificate.json"
FORMAT = 1
BATCH = 65536  # rows that are scored at once


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """Encoding of a table's rows and architecture of the model; `csv` is the .csv format of the bundle's site."""

    encoding: Encoding
    model: Architecture
    seed: int = 0
    csv: CsvFormat = field(default_factory=CsvFormat)
    format: int = FORMAT

    def write(self, folder: Path) -> None:
        durable_files.write(folder / BUNDLE, (json.dumps(codec.dump(self), indent=1) + "\n").encode())

    @classmethod
    def read(cls, folder: Path) -> Bundle:
        """Read bundle.json in a folder; refuse a folder without it, and a file of another format version."""
        try:
            table = json.loads((folder / BUNDLE).read_bytes())
        except FileNotFoundError:
            needed = "the folder of a run on a table (dataset = csv) whose model is in the TOML file"
            raise ConfigError(f"no {BUNDLE} in {folder}", needed, "score other models in Python") from None
        except (OSError, ValueError) as error:
            unread = f"{folder / BUNDLE}, which cannot be read ({error})"
            raise DataError(unread, "an undamaged bundle", "copy the file again from its run") from None
        if not isinstance(table, dict) or table.get("format") != FORMAT:
            fix = "use the version of sordino that wrote it"
            raise ConfigError(f"{folder / BUNDLE} of another format", f"format {FORMAT}", fix)
        codec.load_plugins()
        found: Bundle = codec.read(cls, table, BUNDLE)
        return found

    def load(self, weights: bytes) -> nn.Module:
        """Return the bundle's model with the weights of a safetensors file."""
        rows = 1 if self.encoding.person is None else self.encoding.person.rows
        shape = (self.encoding.width,) if rows == 1 else (rows, self.encoding.width)
        model = build_seeded(self.model, shape, self.encoding.classes or 1, self.seed, rows)
        try:
            load_weights(model, safetensors.torch.load(weights))
        except (SafetensorError, RuntimeError) as error:
            found = f"weights that do not fit the bundle ({error})"
            raise DataError(found, "the weights of this bundle's model", "copy all files from the same run") from None
        return model.eval()

    @property
    def classes(self) -> list[str]:
        """Names of the classes; empty if a real number is predicted."""
        return list(self.encoding.words) or [str(one) for one in range(self.encoding.classes or 0)]


class Scorer(nn.Module):
    """Model of a bundle, followed by the map from its outputs to scores, in float64.

    For rows [n, width] the scores are probabilities [n, classes], or numbers [n, 1] in the unit of the target column.
    """

    def __init__(self, bundle: Bundle, model: nn.Module) -> None:
        super().__init__()
        self.bundle, self.model = bundle, model

    def forward(self, rows: Tensor) -> Tensor:
        encoding = self.bundle.encoding
        grouped = encoding.person is not None and encoding.person.rows > 1  # the model reads [n, rows, width]
        outputs = (self.model(rows[:, None])[:, 0] if grouped else self.model(rows)).double()
        if not self.bundle.classes:
            return encoding.unscaled(outputs)
        if outputs.shape[-1] > 1:
            return torch.softmax(outputs, -1)
        share = torch.sigmoid(outputs)
        return torch.cat([1 - share, share], 1)

    def scores(self, x: Array) -> Tensor:
        """Return the scores of rows [n, width], computed in pieces of `BATCH` rows."""
        with torch.no_grad():
            return torch.cat([self(part) for part in torch.split(torch.from_numpy(x.astype(np.float32)), BATCH)])


def checked_model(folder: Path) -> tuple[bytes, dict[str, Any]]:
    """Return weights and certificate of a bundle; refuse weights whose hash is not in the certificate."""
    try:
        weights, made = (folder / MODEL).read_bytes(), json.loads((folder / CERTIFICATE).read_bytes())
        wanted = str(made["model_sha256"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        found, needed = f"{folder}, which cannot be read ({error})", f"a folder with {MODEL} and {CERTIFICATE}"
        raise ConfigError(found, needed, "pass the folder of a finished run") from None
    if hashlib.sha256(weights).hexdigest() != wanted:
        found = f"{folder / MODEL}, whose hash is not the one in {CERTIFICATE}"
        raise DataError(found, "the model that was certified", "copy both files from the same run")
    return weights, made


def predict(folder: Path, rows: Path, out: Path, written: CsvFormat | None = None, keep: tuple[str, ...] = ()) -> int:
    """Score the raw rows of a table, write the scores to the .csv file `out`, and return the number of rows.

    The table may lack the target column. The columns of `out` are the row's number from 1, the columns `keep` of the
    table, the prediction, and the probability of each class. `written` is the .csv format of the table, by default that
    of the bundle's site.
    """
    bundle = Bundle.read(folder)
    weights, _ = checked_model(folder)
    table = read_table(rows, written or bundle.csv)
    check_columns(bundle.encoding, table, keep)
    values = Scorer(bundle, bundle.load(weights)).scores(bundle.encoding.features(table))
    if bundle.classes:
        found = [bundle.classes[place] for place in values.argmax(-1).tolist()]
        scores = [[f"{share:.6g}" for share in line] for line in values.tolist()]
    else:
        found, scores = [f"{value:.6g}" for value in values[:, 0].tolist()], [[] for _ in range(len(values))]
    held = [table.column(name) for name in keep]
    with open(out, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["row", *keep, "prediction", *(f"probability_{name}" for name in bundle.classes)])
        for place, (prediction, line) in enumerate(zip(found, scores, strict=True)):
            writer.writerow([place + 1, *(column[place] for column in held), prediction, *line])
    return len(found)


def export_onnx(folder: Path, out: Path) -> None:
    """Write the certified model of a bundle as ONNX: `features` [n, width] to `scores`, which are those of `Scorer`.

    The metadata of the file has the encoding of the columns, the classes, and the whole certificate.
    """
    bundle = Bundle.read(folder)
    weights, made = checked_model(folder)
    try:
        import onnxscript  # noqa: F401
    except ImportError:
        raise ConfigError("no package onnxscript", "onnx and onnxscript", "pip install 'sordino[onnx]'") from None
    example, free = torch.zeros(2, bundle.encoding.width), {0: torch.export.Dim("rows")}
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # notes on packages that this graph does not need
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of torch, about its own code
        program = torch.onnx.export(
            Scorer(bundle, bundle.load(weights)).eval(), (example,), input_names=["features"], output_names=["scores"],
            dynamic_shapes=(free,), dynamo=True, verbose=False,
        )  # fmt: skip
    assert program is not None
    facts = {"encoding": codec.dump(bundle.encoding), "classes": bundle.classes, "certificate": made}
    program.model.metadata_props.update({name: json.dumps(fact) for name, fact in facts.items()})
    durable_files.write(out, program.model_proto.SerializeToString())


def with_released_ranges(encoding: Encoding, scales: Mapping[str, Any]) -> Encoding:
    """Return the encoding with the ranges and imputations that the released histograms gave (prepared.json)."""
    columns = []
    for name, column in zip(encoding.names, encoding.columns, strict=True):
        own = scales.get(name)
        if own is not None:
            fill = own.get("missing", column.missing)
            column = replace(column, range=tuple(own["range"]), missing=fill, quantiles=None, histogram=None)
        columns.append(column)
    return replace(encoding, columns=tuple(columns))
