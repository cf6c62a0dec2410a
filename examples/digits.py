"""The handwritten digits of scikit-learn, split once for the training script and for the client."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn.datasets import load_digits

HELD_OUT_EVERY = 5  #: every fifth digit is not used for training


@dataclass(frozen=True, slots=True)
class Digits:
    """``images`` u8[digits, 8, 8] with values 0 to 16, and their numbers, ``numbers`` i64[digits]."""

    images: npt.NDArray[np.uint8]
    numbers: npt.NDArray[np.int64]


def training_digits() -> Digits:
    """The 1437 digits for training."""
    return _select(held_out=False)


def held_out_digits() -> Digits:
    """The 360 digits that are not used for training."""
    return _select(held_out=True)


def _select(*, held_out: bool) -> Digits:
    everything: Any = load_digits()
    chosen = (np.arange(len(everything.target)) % HELD_OUT_EVERY == 0) == held_out
    return Digits(everything.images[chosen].astype(np.uint8), everything.target[chosen].astype(np.int64))
