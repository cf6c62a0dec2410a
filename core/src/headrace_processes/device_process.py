"""The child of an instance on a GPU. Its tensors pass to and from the server without a copy in the host's memory.

The classes extend those of `headrace_processes.child_main`. The thread of the model copies each output into a block of
device memory (`headrace_processes.ipc.device_memory`).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

from headrace.backends.base import DeferredInstance
from headrace.backends.services import Services
from headrace.errors import BackendError, HeadraceError, summary
from headrace.executors.runner import Later, Runner
from headrace.messages.device_tensor import DeviceTensor
from headrace.messages.request import InferRequest, LocatedRequest
from headrace.messages.response import Answer, InferResponse
from headrace.messages.ticket import Ticket
from headrace_engines import CudaError, cuda_library
from headrace_processes import child_main
from headrace_processes.child_main import BatchLoop, ChildParts, Listener
from headrace_processes.ipc.channel import FramedSocket
from headrace_processes.ipc.codec import ReceivedRequest
from headrace_processes.ipc.device_codec import HOST_COPY, DeviceDecoder, DeviceEncoder, has_device_tensor, on_device_of
from headrace_processes.ipc.device_memory import ReceivedDeviceMemory, SentDeviceMemory
from headrace_processes.ipc.framing import Frame, Kind, read_integers
from headrace_processes.ipc.replies import Reply
from headrace_processes.ipc.tensors import Placed
from headrace_processes.remote_services import RemoteServices

#: The variable in which a program chooses its GPUs, before it loads CUDA.
_VISIBLE = "CUDA_VISIBLE_DEVICES"


class ServerDeviceMemory:
    """The device memory that this process and its server share. CUDA is loaded with the first tensor in it."""

    def __init__(self, gpus: Sequence[str], side: FramedSocket) -> None:
        self._gpus, self._send = gpus, side.send
        self.received = ReceivedDeviceMemory(cuda_library, "the server", side.send)
        self.sent: SentDeviceMemory | None = None
        self._lock = threading.Lock()
        self._visible = os.environ.get(_VISIBLE)

    def visible_gpus(self) -> Sequence[str]:
        """Return the UUIDs of the GPUs that this process can use: the server's, unless the model has chosen others.
        CUDA is loaded only if it has."""
        if os.environ.get(_VISIBLE) == self._visible:
            return self._gpus
        try:
            return cuda_library().devices()
        except CudaError:
            return ()

    def stage(self, tensor: DeviceTensor) -> Any:
        """Return ``tensor`` in the form in which it is sent: staged, or as an array. Blocks."""
        with self._lock:
            if self.sent is None:
                try:
                    self.sent = SentDeviceMemory(cuda_library(), self._gpus, self._send)
                except CudaError:  # the tensor is on a device of another kind
                    return tensor.to_host()
        staged = self.sent.stage(tensor)
        return tensor.to_host() if staged is None else staged

    def receive(self, message: Frame) -> bool:
        """Handle the messages about device memory. Return False for any other kind."""
        kind = message.kind
        if kind == Kind.DEVICE_RETIRE:
            self.received.retire(read_integers(message))
        elif self.sent is not None and kind == Kind.DEVICE_FREE:
            self.sent.free_blocks(read_integers(message))
        elif self.sent is not None and kind == Kind.DEVICE_CLOSED:
            self.sent.closed(read_integers(message))
        else:
            return False
        return True


class DeviceBatchLoop(BatchLoop):
    """A `BatchLoop` for requests and responses with `DeviceTensor`s: see `Ticket.on_device`."""

    def __init__(self, memory: ServerDeviceMemory, *parts: Any) -> None:
        super().__init__(*parts)
        self._memory = memory

    def send(self, ticket: Ticket, answer: Answer, final: bool) -> None:
        super().send(ticket, self._located(ticket, answer), final)

    def _load_details(self, runner: Runner) -> Mapping[str, object]:
        """Return the GPUs that this process can use, if the instance takes or returns device tensors."""
        instance, spec = self.instance, self._spec
        assert spec is not None
        is_deferred = isinstance(instance, DeferredInstance) and instance.takes_device_tensors and not spec.shaping()
        if not runner.takes_device_tensors and not is_deferred:
            return {}
        return {"gpus": self._memory.visible_gpus(), "inputs_on_host": instance.inputs_on_host}

    def _ticket(self, request: ReceivedRequest) -> Ticket:
        ticket = super()._ticket(request)
        if request.targets and (on_device := on_device_of(request.targets)):
            ticket.on_device = on_device
            rest = {name: target for name, target in request.targets.items() if name not in on_device}
            request.targets = rest  # type: ignore[misc]  # it was received a moment ago
        return ticket

    def _reply(self, request: ReceivedRequest, answer: Answer | Later) -> Reply:
        ticket = self.open.get(request.call)
        if ticket is not None and isinstance(answer, InferResponse):
            return super()._reply(request, self._located(ticket, answer))
        return super()._reply(request, answer)

    def _located(self, ticket: Ticket, answer: Answer) -> Answer:
        """Return ``answer`` with its device tensors staged if the request takes them on the device, else as arrays."""
        if not isinstance(answer, InferResponse) or not has_device_tensor(answer.outputs):
            return answer
        on_device, values = getattr(ticket, "on_device", {}), dict[str, Any](answer.outputs)
        outputs: dict[str, Any] = {}
        try:
            for name, value in values.items():
                outputs[name] = self._sent(value, name in on_device) if isinstance(value, DeviceTensor) else value
                if on_device.get(name) and type(outputs[name]) is Placed:
                    outputs[HOST_COPY + name] = value.to_host()
        except HeadraceError as error:
            return error
        except Exception as error:  # raised by the framework that owns the tensor
            return BackendError(f"output '{name}' cannot be sent: {summary(error)}")
        return InferResponse(outputs, answer.parameters, answer.model_name, answer.model_version, answer.id)

    def _sent(self, value: DeviceTensor, on_device: bool) -> Any:
        staged = self._memory.stage(value) if on_device else value.to_host()
        return Placed(staged) if on_device and not hasattr(staged, "tobytes") else staged


class DeviceServices(RemoteServices):
    """The services of a server whose models may take and return device tensors."""

    passes_device_tensors = True

    def __init__(self, memory: ServerDeviceMemory, *parts: Any) -> None:
        super().__init__(*parts)
        self._memory = memory

    def infer(self, ticket: Ticket) -> None:
        request, on_device = ticket.request, getattr(ticket, "on_device", None)
        if on_device or has_device_tensor(request.inputs):
            ticket.request = self._staged(request, on_device)
        super().infer(ticket)

    def ask(self, request: InferRequest) -> Answer:
        if has_device_tensor(request.inputs):
            return Services.ask(self, request)
        return super().ask(request)

    def _staged(self, request: InferRequest, on_device: Mapping[str, bool] | None) -> InferRequest:
        values: Mapping[str, Any] = request.inputs
        inputs = {
            name: self._memory.stage(value) if isinstance(value, DeviceTensor) else value
            for name, value in values.items()
        }
        return LocatedRequest.of(request.with_inputs(inputs), {}, None, on_device)


class DeviceListener(Listener):
    """A `Listener` that also receives messages about device memory."""

    def __init__(self, memory: ServerDeviceMemory, *parts: Any) -> None:
        super().__init__(*parts)
        self._memory = memory

    def _receive(self, message: Frame) -> None:
        if not self._memory.receive(message):
            super()._receive(message)


def serve(*, gpus: Sequence[str], **arguments: Any) -> NoReturn:
    """Run the child as `headrace_processes.child_main.serve` does. ``gpus`` are the UUIDs of the server's GPUs."""
    child_main.serve(**arguments, parts_of=partial(_parts, gpus))


def _parts(gpus: Sequence[str], side: FramedSocket) -> ChildParts:
    memory = ServerDeviceMemory(gpus, side)

    def decoder(reader: Any, free: Any, mappings: Any) -> DeviceDecoder:
        return DeviceDecoder(reader, free, memory.received, mappings)

    return ChildParts(
        DeviceEncoder,
        decoder,
        partial(DeviceServices, memory),
        partial(DeviceBatchLoop, memory),
        partial(DeviceListener, memory),
    )
