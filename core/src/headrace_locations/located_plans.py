"""Requests whose tensors are all in locations. Requests that differ only in their ids are parsed once.

A client that shares memory sends such requests: only the contents of the memory change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from headrace.messages.request import InferRequest, LocatedRequest
from headrace.messages.spec import Spec
from headrace_locations.tensor_locations import LocatedTensors, Parameters, TensorLocation, TensorLocations

if TYPE_CHECKING:
    from headrace.engine import ModelView

#: A protocol keeps at most 256 plans, of messages with at most 2048 bytes.
PLANS = 256
PLANNED_BYTES = 2048


class LocatedPlan(NamedTuple):
    """The common part of requests with different ids. ``flag`` is the parameter that only its protocol has."""

    inputs: Sequence[tuple[TensorLocation, Parameters, Spec]]
    outputs: Sequence[tuple[TensorLocation, Parameters, str]]
    names: Sequence[str]
    flag: bool

    @classmethod
    def of(cls, request: InferRequest, located: LocatedTensors, flag: bool) -> LocatedPlan | None:
        """Return the plan of ``request``, whose tensors are ``located``; None if it has parameters or other tensors."""
        if (
            len(located.inputs) != len(request.inputs)
            or len(located.outputs) != len(request.outputs)
            or request.parameters
            or request.is_in_sequence
            or request.priority
            or request.timeout_us
        ):
            return None
        return cls(tuple(located.inputs), tuple(located.outputs), tuple(request.outputs), flag)

    def request(
        self, locations: TensorLocations, view: ModelView, name: str, version: str, request_id: str
    ) -> tuple[InferRequest, LocatedTensors] | None:
        """Return the request to ``name`` and ``version``, which ``view`` describes, and its tensors.

        None if the model lacks one of the outputs. Raises what the locations raise.
        """
        located = LocatedTensors(view.takes_device_tensors or ())
        inputs = {each[2].name: locations.read(*each, located) for each in self.inputs}
        for location, parameters, output in self.outputs:
            spec = view.outputs.get(output)
            if spec is None:
                return None
            locations.target(location, parameters, spec, located)
        targets = {output: target.memory for output, target in located.targets.items()}
        request = LocatedRequest(
            name,
            inputs,
            self.names,
            request_id,
            version,
            targets=targets,
            release=located.release,
            on_device=located.on_device,
        )
        return request, located
