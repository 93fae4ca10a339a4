"""The colours of a page in both themes, and the contrast that they must have (WCAG 2.2, success criterion 1.4.3).

    contrast = (L1 + 0.05) / (L2 + 0.05),   L = 0.2126 R + 0.7152 G + 0.0722 B of linear light

Series colours follow Okabe and Ito's order of hues, which the common colour blindnesses tell apart, made darker for
paper and lighter for the dark: a label in the colour of its line must be as readable as text.
"""

from __future__ import annotations

SERIES = ("s0", "s1", "s2", "s3", "s4", "s5")
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
    "s1": "#ad3f00",
    "s2": "#00704d",
    "s3": "#8c2f7d",
    "s4": "#6d5a00",
    "s5": "#42474f",
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
    "s1": "#f79b63",
    "s2": "#54cfa3",
    "s3": "#e79ddb",
    "s4": "#d9c25a",
    "s5": "#c3c8cf",
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
