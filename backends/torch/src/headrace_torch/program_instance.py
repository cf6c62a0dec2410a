"""The executions of a ``model.pt2``: a function of tensors, in the order of its signature."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from headrace import Model, Tensor, Tensors
from headrace_torch.exported import Program
from headrace_torch.instance import ForwardInstance
from headrace_torch.leaf_names import LeafNames
from headrace_torch.size_check import SizeCheck


class ProgramInstance(ForwardInstance):
    """Runs ``program``; ``options`` is `ForwardInstance`'s.

    Measured for two f32[1, 16] inputs and outputs, in microseconds of CPU: two operators called by Python 1.5, the
    program 3.3, an execution 14; ``ExportedProgram.module()`` of the same file 50. A package of AOTInductor of the same
    takes 5.5, 4 of which are its C interface, and an execution 19.

    Raises `ConfigError` for a config that the program's signature contradicts."""

    def __init__(self, torch: Any, program: Program, model: Model, **options: Any) -> None:
        signature = program.signature
        names = LeafNames(model.config, signature)
        names.require_agreement()
        inputs = names.ordered_inputs
        forward = replace(program.forward, arguments=inputs)
        super().__init__(torch, forward, model, inputs, names.outputs, **options)
        self._scalars = {
            name for name, leaf in zip(inputs, signature.inputs, strict=True) if leaf.is_known and not leaf.tensor.shape
        }
        check = SizeCheck(signature)
        self._check: Callable[[Sequence[str], Sequence[Tensor]], None] | None = check.require if check else None

    def _answer(self, inputs: Tensors) -> Tensors:
        arrays = [inputs[name] for name in self._names]
        if self._check is not None:
            self._check(self._names, arrays)
        if self._scalars:
            pairs = zip(self._names, arrays, strict=True)
            arrays = [array.reshape(()) if name in self._scalars else array for name, array in pairs]
        tensors = [self._tensor(name, array) for name, array in zip(self._names, arrays, strict=True)]
        return self._results(self._run(*tensors))
