"""The exact clipped gradient per record on a CPU, for any module: the heart of DP-SGD.

ClippedGradient(model, losses).sum(x, y, radius=1.0)         -> Clipped(total, norms, losses)
Recorder(model)                                               the same inside an ordinary loss.backward() loop
refuse_mixing(model)                                          no batch norm: it has no per-record gradient
"""

from sordino.per_record.clip import Clipped
from sordino.per_record.gradient import ClippedGradient
from sordino.per_record.mixing import refuse_mixing
from sordino.per_record.record import Recorder

__all__ = ["Clipped", "ClippedGradient", "Recorder", "refuse_mixing"]
