"""What a frontend sees of a model: facts that do not change while the version serves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.config.model_config_pb2 import ModelConfig
    from headrace.errors import HeadraceError
    from headrace.messages.request import InferRequest
    from headrace.messages.spec import Spec
    from headrace.messages.ticket import Ticket


@dataclass(frozen=True, slots=True, eq=False)
class ModelView:
    """One version that is served. Made once, at load, and shared by all who ask for it.

    ``labels`` maps an output to the lines of its label file. ``metadata`` is what the document
    of the protocol says behind the name and the versions. The last three are functions: ``check`` accepts a request
    or raises what ``explain`` words, and ``enqueue`` hands it to the scheduler; `Entrance.start`
    calls them, on the event loop.
    """

    name: str
    version: int
    platform: str
    max_batch_size: int
    decoupled: bool
    config: ModelConfig
    inputs: Mapping[str, Spec]
    outputs: Mapping[str, Spec]
    labels: Mapping[str, Sequence[str]]
    metadata: Mapping[str, Any]
    check: Callable[[Ticket], None]
    explain: Callable[[InferRequest], HeadraceError]
    enqueue: Callable[[Ticket], None]
