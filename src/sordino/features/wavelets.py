"""Scattering transform of images (Bruna and Mallat 2013): Morlet wavelets, modulus, averages; nothing is learned.

    S x = ( x * phi,   |x * psi_a| * phi,   ||x * psi_a| * psi_b| * phi )      subsampled by 2^J

for image x, Gaussian phi, J scales, all wavelets psi_a with a = (scale j_a, angle), and all pairs a, b with j_a < j_b.
With L angles these are 1 + L J + L^2 J (J - 1) / 2 channels: 81 for J = 2 and L = 8. Filters, padding and order of the
channels are those of kymatio 0.3 (Andreux et al. 2020); a test compares the two. Called by features/extractors.py.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

ANGLES = 8  # number of directions; the shape of the wavelets depends on it
PI = 3.1415  # as in kymatio's norm of a wavelet: a closer value would change features by 3e-5
COPIES = range(-2, 3)  # shifts by whole periods that are added to make a filter periodic


def gabor(size: tuple[int, int], sigma: float, angle: float, frequency: float, slant: float) -> NDArray[np.complex128]:
    """Return a periodic Gabor function of pixels u: exp(-u^T A u / (2 sigma^2) + i frequency <u, e>) / norm.

    e is the unit vector at `angle`; the matrix A has eigenvalue 1 along e and slant^2 across.
    """
    c, s = math.cos(angle), math.sin(angle)
    found = np.zeros(size, dtype=np.complex128)
    for down in COPIES:
        for right in COPIES:
            y, x = np.mgrid[down * size[0] : (down + 1) * size[0], right * size[1] : (right + 1) * size[1]]
            along, across = y * c + x * s, x * c - y * s
            envelope = -(along**2 + (slant * across) ** 2) / (2 * sigma**2)
            found += np.exp(envelope + 1j * frequency * along)
    return found / (2 * PI * sigma**2 / slant)


def morlet(size: tuple[int, int], sigma: float, angle: float, frequency: float, slant: float) -> NDArray[np.float64]:
    """Return the Fourier transform of a Morlet wavelet: a Gabor function minus a Gaussian, so that its mean is 0."""
    wave, bell = (gabor(size, sigma, angle, xi, slant) for xi in (frequency, 0.0))
    return np.fft.fft2(wave - wave.sum() / bell.sum() * bell).real


def halved(spectrum: NDArray[np.float64], times: int) -> NDArray[np.float64]:
    """Return the spectrum of a filter for images subsampled by 2^times: its low frequencies, folded."""
    for axis, length in enumerate(spectrum.shape):
        k = 2**times if length > 1 else 1
        start = length // (2 * k)
        middle = slice(start, start + int(length * (1 - 1 / k)))
        low = spectrum.copy()
        low[(slice(None),) * axis + (middle,)] = 0.0
        spectrum = sum(np.split(low, k, axis=axis), np.zeros(1))
    return spectrum


@lru_cache(maxsize=8)
def wavelets(size: tuple[int, int], J: int) -> dict[tuple[int, int], Tensor]:
    """Return the spectra of all wavelets, [angles, height, width], by scale and by how often the image was halved."""
    bands = {}
    for j in range(J):
        angles = [(ANGLES // 2 - 1 - k) * math.pi / ANGLES for k in range(ANGLES)]
        spectra = [morlet(size, 0.8 * 2**j, angle, 0.75 * math.pi / 2**j, 4.0 / ANGLES) for angle in angles]
        for times in range(j + 1):
            bands[j, times] = torch.from_numpy(np.stack([halved(one, times) for one in spectra]).astype(np.float32))
    return bands


@lru_cache(maxsize=32)
def averages(length: int, J: int, times: int) -> Tensor:
    """Return the matrix that smooths one axis of an image by a Gaussian, subsamples it and cuts the edges.

    It maps length / 2^times pixels to length / 2^J - 2. A Gaussian average of an image applies it along both axes.
    """
    sigma, k = 0.8 * 2 ** (J - 1), 2 ** (J - times)
    points = np.arange(length) + length * np.arange(COPIES.start, COPIES.stop)[:, None]
    bell = np.exp(-(points**2) / (2 * sigma**2)).sum(axis=0) / math.sqrt(2 * PI * sigma**2)
    low = halved(np.fft.fft(bell).real[:, None], times)[:, 0]
    spectra = low[:, None] * np.fft.fft(np.eye(len(low)), axis=0)
    folded = spectra.reshape(k, len(low) // k, -1).mean(axis=0)
    return torch.from_numpy(np.fft.ifft(folded, axis=0).real[1:-1].astype(np.float32).copy())


def modulus(spectrum: Tensor, bands: Tensor, times: int) -> Tensor:
    """Return the modulus |x * psi|, subsampled by k = 2^times, for every wavelet psi whose spectrum is in `bands`.

    x is given by its spectrum. Subsampling folds a spectrum: it becomes the mean over its k x k blocks.
    """
    k, (height, width) = 2**times, spectrum.shape[-2:]
    rows, columns, folded = height // k, width // k, None
    for i in range(0, height, rows):
        for j in range(0, width, columns):
            block = (..., slice(i, i + rows), slice(j, j + columns))
            part = spectrum[block].unsqueeze(-3) * bands[block]
            folded = part if folded is None else folded.add_(part)
    assert folded is not None
    found: Tensor = torch.fft.ifft2(folded).abs() / k**2
    return found


class Scattering(nn.Module):
    """Scattering transform with J scales: images [n, c, h, w] -> [n, c * channels, h / 2^J, w / 2^J].

    h and w must be at least 2^J; edges are padded by reflection.
    """

    def __init__(self, J: int) -> None:
        super().__init__()
        self.J = J

    def forward(self, images: Tensor) -> Tensor:
        """Return the scattering coefficients of all colour channels, colour by colour."""
        n, colours, *size = images.shape
        k = 2**self.J
        height, width = (((length + k) // k + 1) * k for length in size)
        edges = [*_sides(width - size[1]), *_sides(height - size[0])]
        padded = functional.pad(images.reshape(n * colours, 1, *size), edges, mode="reflect")
        bands = {place: found.to(images.device) for place, found in wavelets((height, width), self.J).items()}

        def average(found: Tensor, times: int) -> Tensor:  # [m, ..., h, w] at resolution 2^times -> [m, channels, ...]
            down, right = (averages(length, self.J, times).to(found) for length in (height, width))
            return (down @ found @ right.T).flatten(1, -3)

        spectrum, first, second = torch.fft.fft2(padded[:, 0]), [], []
        for j in range(self.J):
            once = modulus(spectrum, bands[j, 0], j)  # [m, angles, h, w]
            first.append(average(once, j))
            wider, waves = range(j + 1, self.J), torch.fft.fft2(once) if j + 1 < self.J else once
            pairs = [average(modulus(waves, bands[b, j], b - j), b) for b in wider]
            split = [one.view(len(one), ANGLES, -1, *one.shape[2:]) for one in pairs]
            second += [torch.cat(split, dim=2).flatten(1, 2)] if split else []  # all wavelets b beside each other
        every = torch.cat([average(padded, 0), *first, *second], dim=1)
        return every.reshape(n, colours * every.shape[1], *every.shape[2:])


def _sides(more: int) -> tuple[int, int]:
    return more // 2, more - more // 2
