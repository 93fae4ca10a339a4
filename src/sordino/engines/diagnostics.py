"""Figures of unreleased data, for simulation: NOT private, and marked so wherever they are written.

alpha_i = min(1, clip norm / ||update_i||);  alpha_bar = mean alpha_i;  alpha_tilde = mean |alpha_i - alpha_bar|
"""

from __future__ import annotations

import torch
from torch import Tensor


def of_updates(norms: list[Tensor], clip_norm: float) -> dict[str, float]:
    """Of a cohort's raw update norms: level, spread, and what the clip takes away (paper 003)."""
    if not norms:
        return {}
    every = torch.cat(norms)
    sound = every[every.isfinite()]
    figures = {"nonfinite_updates": float(len(every) - len(sound))}
    if not len(sound):
        return figures
    low, middle, high = torch.quantile(sound, sound.new_tensor([0.1, 0.5, 0.9])).tolist()
    alpha = (clip_norm / sound.clamp(min=1e-300)).clamp(max=1.0)
    return figures | {
        "update_norm_mean": float(sound.mean()),
        "update_norm_p10": low,
        "update_norm_p50": middle,
        "update_norm_p90": high,
        "clipped_fraction": float((sound > clip_norm).double().mean()),
        "alpha_bar": float(alpha.mean()),
        "alpha_tilde": float((alpha - alpha.mean()).abs().mean()),
    }


def of_release(clean: Tensor, noised: Tensor) -> dict[str, float]:
    """Of a round's mean before and after noise: signal to noise, and how far the direction turned."""
    noise = float((noised.double() - clean).norm())
    signal, seen = float(clean.norm()), float(noised.norm())
    if not (signal and seen):
        return {}
    cosine = float(clean @ noised.double()) / (signal * seen)
    return {"cosine": cosine} | ({"signal_to_noise": signal / noise} if noise > 1e-6 * signal else {})
