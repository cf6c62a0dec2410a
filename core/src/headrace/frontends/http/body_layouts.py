"""JSON in front of binary tensors that has been read before.

A client that sends tensors of one shape sends the same JSON with each. What was read out of it, and
where it says that the tensors lie, is kept, and it is not parsed again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from headrace.frontends.http.decode import DecodedBody
from headrace.frontends.http.output_format import OutputFormat
from headrace.frontends.recognition import Recent, fixed_tensors
from headrace.messages.request import InferRequest, Parameter

#: Layouts that are kept, and the bytes of JSON that one may have.
_LAYOUTS = 1024
_JSON_BYTES = 1024


class InputPlace(NamedTuple):
    """Where in a body an input begins."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]
    begin: int


class BodyLayout(NamedTuple):
    """A body of ``body_bytes``: what its JSON says, and where its tensors lie."""

    body_bytes: int
    places: Sequence[InputPlace]
    outputs: Sequence[str]
    parameters: Mapping[str, Parameter]
    priority: int
    timeout_us: int
    formats: Mapping[str, OutputFormat]
    default: OutputFormat

    def request(self, model: str, version: str, body: memoryview) -> InferRequest:
        """What decoding ``body``, sent to ``model``, would make of it."""
        inputs = {name: np.ndarray(shape, dtype, body, begin) for name, shape, dtype, begin in self.places}
        parameters = {**self.parameters}  # its own, whatever a careless model does with it
        return InferRequest(model, inputs, self.outputs, "", version, parameters, self.priority, self.timeout_us)


class BodyLayoutCache:
    """Layouts by their JSON."""

    def __init__(self) -> None:
        self._known = Recent[bytes, BodyLayout](_LAYOUTS)

    def find(self, body: memoryview, json_bytes: int) -> BodyLayout | None:
        """The layout of ``body``, whose first ``json_bytes`` are JSON; None if it is not known."""
        if json_bytes > _JSON_BYTES or json_bytes == body.nbytes:
            return None
        layout = self._known.get(body[:json_bytes].tobytes())
        return layout if layout is not None and layout.body_bytes == body.nbytes else None

    def keep(self, decoded: DecodedBody, body: memoryview, json_bytes: int) -> None:
        """Know the layout of ``body``, of which ``decoded`` was made, if one like it may come again."""
        request, formats, default = decoded
        tensors = fixed_tensors(request)
        if json_bytes > _JSON_BYTES or json_bytes == body.nbytes or tensors is None:
            return
        places, end = [], json_bytes
        for name, tensor in tensors.items():
            places.append(InputPlace(name, tensor.shape, tensor.dtype, end))
            end += tensor.nbytes
        if end != body.nbytes:
            return  # some were written in the JSON
        outputs, parameters = tuple(request.outputs), dict(request.parameters)
        layout = BodyLayout(
            body.nbytes, places, outputs, parameters, request.priority, request.timeout_us, formats, default
        )
        self._known.keep(body[:json_bytes].tobytes(), layout)
