"""Public features (scattering, random convolutions, published nets) on which a private linear head is trained.

extractor = so.features.scattering(J=2, groups=27, normalise="digits")
head = so.features.fit_head(extractor(images), labels, epsilon=3.0)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sordino import lazy

if TYPE_CHECKING:
    from sordino.dpsgd.standardise import Standardise as Standardise
    from sordino.features.extractors import Extractor as Extractor
    from sordino.features.extractors import of as of
    from sordino.features.extractors import pretrained as pretrained
    from sordino.features.extractors import random_convolutions as random_convolutions
    from sordino.features.extractors import scattering as scattering
    from sordino.features.heads import Head as Head
    from sordino.features.heads import fit_head as fit_head

__all__, __getattr__ = lazy.exports(__name__, __file__)
