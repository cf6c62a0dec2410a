"""template for Headrace: serves ``<version>/weights.npy``, a matrix f32[columns, scores], on the CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headrace import Backend, Instance, LoadError, Model, Tensors, dtypes, hookimpl


@dataclass(frozen=True, slots=True)
class Parameters:
    scale: float = 1.0  #: what the scores are multiplied with


class Template(Backend):
    name = "template"
    Parameters = Parameters
    dtypes = (dtypes.FP32,)
    instance_classes = (Instance,)

    def load(self, model: Model) -> Matrix:
        import numpy as np  # import your engine here: only servers that hold such a model pay for it

        path = model.file("weights.npy")
        try:
            return Matrix(np.load(path, allow_pickle=False), model.parameters.scale)
        except ValueError as error:
            raise LoadError(f"{path}: {error}") from error


class Matrix(Instance):
    def __init__(self, weights: Any, scale: float) -> None:
        self._weights, self._scale = weights, scale

    def execute(self, inputs: Tensors) -> Tensors:
        """``features`` f32[rows, columns] -> ``scores`` f32[rows, scores]."""
        return {"scores": (inputs["features"] @ self._weights) * self._scale}


@hookimpl
def register_backends() -> list[type[Backend]]:
    return [Template]
