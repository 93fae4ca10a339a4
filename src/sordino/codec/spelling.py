"""Suggestions for unknown names: near spellings, and the words of other libraries. Called by `serialization`."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from sordino.errors import ConfigError

P = ParamSpec("P")
R = TypeVar("R")
ELSEWHERE = {  # what Opacus, Flower, pfl and TensorFlow Privacy call it, and what it may be called here
    "max_grad_norm": ("clip_norm",),
    "l2_norm_clip": ("clip_norm",),
    "clipping_norm": ("clip_norm",),
    "clipping_bound": ("clip_norm",),
    "multiplier": ("noise_multiplier",),
    "tries": ("trials",),
    "whole": ("integer",),
    "radius": ("clip_norm",),
    "noise_scale": ("noise_multiplier",),
    "target_epsilon": ("epsilon",),
    "target_delta": ("delta",),
    "sample_rate": ("rate",),
    "fraction_train": ("rate",),
    "fraction_fit": ("rate",),
    "num_clients": ("population",),
    "num_supernodes": ("population",),
    "population_size": ("population",),
    "cohort_size": ("size", "cohort"),
    "num_sampled_clients": ("size", "cohort"),
    "num_rounds": ("rounds",),
    "num_server_rounds": ("rounds",),
    "central_num_iterations": ("rounds",),
    "local_num_epochs": ("epochs",),
    "local_epochs": ("epochs",),
    "learning_rate": ("lr",),
    "local_learning_rate": ("lr",),
    "batch_size": ("batch", "max_physical_batch_size"),
    "local_batch_size": ("batch",),
    "data_loader": ("loader",),
    "module": ("model",),
    "physical_batch": ("max_physical_batch_size",),
    "secure_mode": ("noise",),
}


def nearest(word: str, known: list[str]) -> str:
    """The known word that a mistyped or a foreign one most likely meant, or all of them."""
    ours = next((name for name in ELSEWHERE.get(word, ()) if name in known), None)
    if ours is not None:
        return f"{word} is called {ours} here"
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else "known: " + ", ".join(sorted(known))


def check_keywords(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator: an unknown keyword argument is a `ConfigError` that names the nearest one."""
    known = list(inspect.signature(function).parameters)

    @functools.wraps(function)
    def called(*args: P.args, **words: P.kwargs) -> R:
        strange = next((word for word in words if word not in known), None)
        if strange is not None:
            raise ConfigError(f"argument {strange}", f"an argument of {function.__name__}", nearest(strange, known))
        return function(*args, **words)

    return called
