"""Data sets bundled with scikit-learn; features are scaled by the public ranges in this file. Called by `datasets`."""

from __future__ import annotations

import numpy as np

from sordino.data.records import Array, Dataset, hold_out, to_unit

Range = tuple[float, float]

# Ten measurements of a cell nucleus (radius, texture, perimeter, area, smoothness, compactness, concavity, concave
# points, symmetry, fractal dimension): mean, standard error, worst value. Rounded outwards from the published table.
BREAST_CANCER: tuple[Range, ...] = (
    *((5, 30), (5, 40), (40, 200), (100, 2600), (0.05, 0.2), (0, 0.4), (0, 0.5), (0, 0.25), (0.1, 0.35), (0.04, 0.1)),
    *((0, 3), (0, 5), (0, 25), (0, 600), (0, 0.04), (0, 0.15), (0, 0.4), (0, 0.06), (0, 0.08), (0, 0.03)),
    *((5, 40), (10, 50), (50, 260), (100, 4500), (0.05, 0.25), (0, 1.2), (0, 1.3), (0, 0.3), (0.1, 0.7), (0.05, 0.25)),
)

# age, sex (1 or 2), body mass index, blood pressure, cholesterol, LDL, HDL, their ratio, log triglycerides, glucose.
DIABETES: tuple[Range, ...] = (
    *((0, 100), (1, 2), (15, 45), (60, 140), (90, 310)),
    *((40, 250), (20, 100), (2, 10), (3, 6.5), (50, 130)),
)

# alcohol, malic acid, ash, alcalinity, magnesium, phenols, flavanoids,
# nonflavanoids, proanthocyanins, colour, hue, OD280/OD315, proline.
WINE: tuple[Range, ...] = (
    *((11, 15), (0, 6), (1, 3.5), (10, 30), (70, 170), (0.5, 4), (0, 5.5)),
    *((0, 0.7), (0, 4), (1, 13), (0.4, 1.8), (1, 4), (200, 1700)),
)


def _scaled(values: Array, ranges: tuple[Range, ...]) -> Array:
    low, high = np.array(ranges, dtype=np.float64).T
    return to_unit(values, low, high)


def digits() -> Dataset:
    """Handwritten digits, 8x8 pixels from 0 to 16."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    return hold_out((x.reshape(-1, 1, 8, 8) / 16).astype(np.float32), y, classes=10)


def breast_cancer() -> Dataset:
    """Benign or malignant from 30 measurements."""
    from sklearn.datasets import load_breast_cancer

    x, y = load_breast_cancer(return_X_y=True)
    return hold_out(_scaled(x, BREAST_CANCER), y, classes=2)


def wine() -> Dataset:
    """The cultivar of a wine from 13 measurements."""
    from sklearn.datasets import load_wine

    x, y = load_wine(return_X_y=True)
    return hold_out(_scaled(x, WINE), y, classes=3)


def diabetes() -> Dataset:
    """Disease progression after one year, in hundreds; raw columns, as the scaled ones use the data's moments."""
    from sklearn.datasets import load_diabetes

    x, y = load_diabetes(return_X_y=True, scaled=False)
    return hold_out(_scaled(x, DIABETES), y / 100, target_unit=100.0)
