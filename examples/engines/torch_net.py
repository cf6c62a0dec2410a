"""The net of make_models.py for PyTorch."""

from __future__ import annotations

import torch


class DigitsNet(torch.nn.Module):
    """A dense net, 64 -> 64 -> 10."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = torch.nn.Linear(64, 64)
        self.scores = torch.nn.Linear(64, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """``image`` u8[rows, 8, 8] with values 0 to 16 -> probabilities f32[rows, 10]."""
        pixels = image.flatten(1).float() / 16
        scores: torch.Tensor = self.scores(self.hidden(pixels).relu())
        return scores.softmax(1)
