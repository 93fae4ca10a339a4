"""Contrast of colours by WCAG 2.2, and which text colours of the page stand on which grounds."""

from __future__ import annotations

from sordino.report.figures import SERIES

PAIRS = (
    *((text, ground) for text in ("ink", "quiet", "link") for ground in ("ground", "card")),
    ("warn", "warn-ground"),
    ("bad", "bad-ground"),
    ("good", "good-ground"),
    *((series, "card") for series in SERIES),
    ("card", "link"),
)


def luminance(colour: str) -> float:
    """Relative luminance of #rrggbb: 0.2126 R + 0.7152 G + 0.0722 B of linear light."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    """(L1 + 0.05) / (L2 + 0.05), from 1 (the same) to 21 (black on white): success criterion 1.4.3."""
    lighter, darker = sorted((luminance(one), luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)
