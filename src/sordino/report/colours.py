"""The colours of a page in both themes, and the contrast that they must have (WCAG 2.2, success criterion 1.4.3).

    contrast = (L1 + 0.05) / (L2 + 0.05),   L = 0.2126 R + 0.7152 G + 0.0722 B of linear light

The seven series colours were searched for: as readable as text on a card, and any two at least 25 apart in CIELAB as
normal, protanopic, deuteranopic and tritanopic eyes see them (Machado, Oliveira, Fernandes 2009).
"""

from __future__ import annotations

SERIES = ("s0", "s1", "s2", "s3", "s4", "s5", "s6")
LIGHT = {
    "ground": "#f6f5f1",
    "card": "#ffffff",
    "ink": "#1b1d21",
    "quiet": "#565a61",
    "rule": "#d8d6cf",
    "link": "#00549b",
    "warn": "#7a2e00",
    "warn-ground": "#fdeee3",
    "bad": "#9b0016",
    "bad-ground": "#fde4e6",
    "good": "#0b5c3d",
    "good-ground": "#e6f3ec",
    "s0": "#005a9e",
    "s1": "#ce2f65",
    "s2": "#966b00",
    "s3": "#8f42f8",
    "s4": "#671400",
    "s5": "#000045",
    "s6": "#2c0017",
}
DARK = {
    "ground": "#121417",
    "card": "#1b1e23",
    "ink": "#eceae4",
    "quiet": "#aeb2b9",
    "rule": "#3a3f47",
    "link": "#7cc0f5",
    "warn": "#ffc49b",
    "warn-ground": "#3b2213",
    "bad": "#ffb0b5",
    "bad-ground": "#4a141a",
    "good": "#8fdcb6",
    "good-ground": "#12301f",
    "s0": "#6fb9f2",
    "s1": "#fe5a14",
    "s2": "#ffff3f",
    "s3": "#b56cff",
    "s4": "#da748a",
    "s5": "#c9fafa",
    "s6": "#00ff6d",
}
# what is written on what
PAIRS = (
    *((text, ground) for text in ("ink", "quiet", "link") for ground in ("ground", "card")),
    ("warn", "warn-ground"),
    ("bad", "bad-ground"),
    ("good", "good-ground"),
    *((series, "card") for series in SERIES),
    ("card", "link"),
)


def luminance(colour: str) -> float:
    """Relative luminance of #rrggbb."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    """From 1 (the same) to 21 (black on white)."""
    lighter, darker = sorted((luminance(one), luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def variables(theme: dict[str, str]) -> str:
    """A theme as CSS."""
    return " ".join(f"--{name}: {value};" for name, value in theme.items())
