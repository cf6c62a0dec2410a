"""A child on a GPU, on the server's side. Its tensors pass to and from other models without a copy in the host's memory
(`headrace_processes.ipc.device_memory`).

The event loop calls no function of CUDA. Each child has a `StagingThread`. It copies inputs into device memory that the
child reads; inputs that the child or its model takes on the host it copies to the host. A tensor of the child is opened
when an instance first reads it, on the thread of that instance.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from time import monotonic_ns
from typing import Any

from headrace.errors import BackendError, HeadraceError, InternalError, summary
from headrace.executors.output_schema import OutputSchema
from headrace.messages.device_tensor import DeviceTensor, on_host
from headrace.messages.request import InferRequest, LocatedRequest
from headrace.messages.response import Answer, InferResponse
from headrace.messages.spec import Spec
from headrace.messages.tensor import data_type
from headrace.messages.ticket import Ticket
from headrace_engines import CudaError, CudaLibrary, cuda_library
from headrace_processes.batch_channel import BatchChannel
from headrace_processes.child import Child
from headrace_processes.ipc.arena import Reader, Writer
from headrace_processes.ipc.codec import Decoder, Encoder
from headrace_processes.ipc.device_codec import HOST_COPY, DeviceDecoder, DeviceEncoder, has_device_tensor, on_device_of
from headrace_processes.ipc.device_memory import ReceivedDeviceMemory, SentDeviceMemory, StagedTensor
from headrace_processes.ipc.framing import Frame, Kind, read_integers
from headrace_processes.ipc.peer_requests import IncomingRequests
from headrace_processes.ipc.tensors import Placed
from headrace_processes.remote_services import ServiceEndpoint

#: Runs a function on the event loop soon, from any thread.
Soon = Callable[[Callable[[], None]], object]


def visible_gpus() -> Sequence[str]:
    """Return the UUIDs of the GPUs that this process can use; none without a driver. Blocks while CUDA is loaded."""
    try:
        return cuda_library().devices()
    except CudaError:
        return ()


class StagingThread:
    """Prepares the tensors of one child's messages on a thread of its own, in order. Event loop only.

    Set when the child is loaded: ``gpus`` are the UUIDs of the GPUs that it can use. If ``inputs_on_host``, its inputs
    are arrays.
    """

    def __init__(self, name: str, library: CudaLibrary, send: Callable[[bytes], None], soon: Soon) -> None:
        self.gpus: Sequence[str] = ()
        self.inputs_on_host = False
        self._library, self._send, self._soon = library, send, soon
        self._thread = ThreadPoolExecutor(1, f"headrace-stage-{name}")
        self._sent: SentDeviceMemory | None = None
        self._is_closed = False
        #: The number of jobs that are not done.
        self.waiting = 0

    def run(self, work: Callable[[], Any], done: Callable[[Any], None]) -> None:
        """Call ``work`` on the thread, and then ``done`` with its result or error on the event loop. After `close`,
        neither is called."""
        if self._is_closed:
            return
        self.waiting += 1
        self._thread.submit(self._work, work, done)

    def staged(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``tensors`` with each device tensor staged, or as an array. Called on the thread."""
        return {name: self._stage(each) if isinstance(each, DeviceTensor) else each for name, each in tensors.items()}

    def receive(self, message: Frame) -> bool:
        """Handle the child's messages about memory that was sent to it. Return False for any other kind."""
        if self._sent is None or message.kind not in (Kind.DEVICE_FREE, Kind.DEVICE_CLOSED):
            return False
        numbers = read_integers(message)
        if message.kind == Kind.DEVICE_FREE:
            self._sent.free_blocks(numbers)
        else:
            self._sent.closed(numbers)
        return True

    def close(self) -> None:
        """Free everything: the child has ended."""
        self._is_closed = True
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._sent is not None:
            self._sent.close()

    def _stage(self, tensor: DeviceTensor) -> Any:
        staged: StagedTensor | None = None
        if self.gpus:
            if self._sent is None:
                self._sent = SentDeviceMemory(self._library, self.gpus, self._send)
            staged = self._sent.stage(tensor)
        return tensor.to_host() if staged is None else staged

    def _work(self, work: Callable[[], Any], done: Callable[[Any], None]) -> None:
        try:
            result = work()
        except BaseException as error:
            result = error
        self._soon(partial(self._finish, done, result))

    def _finish(self, done: Callable[[Any], None], result: Any) -> None:
        self.waiting -= 1
        if not self._is_closed:
            done(result)
        elif self._sent is not None:  # the thread may have created it after `close`
            self._sent.close()


def _as_error(error: BaseException) -> HeadraceError:
    """Return the error of a request whose tensors could not be prepared."""
    if isinstance(error, HeadraceError):
        return error
    return BackendError(f"a tensor on a GPU cannot be read: {summary(error)}")


class _SentTicket:
    """A request of a batch in the form that is encoded: with prepared inputs, and the outputs that stay on the
    device."""

    __slots__ = ("pinned", "request", "rows")

    def __init__(self, ticket: Ticket, inputs: Mapping[str, Any]) -> None:
        self.rows, self.pinned = ticket.rows, ticket.pinned
        request, on_device = ticket.request, getattr(ticket, "on_device", None)
        targets = request.targets if isinstance(request, LocatedRequest) else {}
        self.request: InferRequest = LocatedRequest.of(request.with_inputs(inputs), targets, None, on_device)


class DeviceBatchChannel(BatchChannel):
    """A `BatchChannel` for requests and responses with device tensors: see `Ticket.on_device`."""

    def __init__(self, stage: StagingThread, name: str, encoder: Encoder, *parts: Any) -> None:
        super().__init__(name, encoder, *parts)
        self._stage, self._encoder = stage, encoder

    def run(self, batch: Sequence[Ticket]) -> None:
        on_device = [ticket for ticket in batch if has_device_tensor(ticket.request.inputs)]
        if not on_device and not any(getattr(ticket, "on_device", None) for ticket in batch):
            super().run(batch)
            return
        numbered = self.numbered(batch)
        self.enter(numbered)
        if on_device:
            self._stage.run(partial(self._staged, numbered), partial(self._write, numbered))
        else:
            self._write(numbered, [(call, _SentTicket(ticket, ticket.request.inputs)) for call, ticket in numbered])

    def _staged(self, numbered: Sequence[tuple[int, Ticket]]) -> list[tuple[int, _SentTicket]]:
        prepared = arrays_of if self._stage.inputs_on_host else self._stage.staged
        return [(call, _SentTicket(ticket, prepared(ticket.request.inputs))) for call, ticket in numbered]

    def _write(self, numbered: Sequence[tuple[int, Ticket]], sent: Any) -> None:
        try:
            if isinstance(sent, BaseException):
                raise sent
            message = self._encoder.requests(sent)
        except BaseException as error:
            is_unsendable = isinstance(error, ValueError)
            failure = InternalError(f"the batch cannot be sent: {error}") if is_unsendable else _as_error(error)
            for call, _ in numbered:
                self.in_flight.pop(call, None)
            now = monotonic_ns()
            tickets = [ticket for _, ticket in numbered]
            self.sink.batch_done(tickets, [failure] * len(tickets), (now, now, now, now))
            return
        if not self._work.is_closing():
            self._work.write(message)


class DeviceEndpoint(ServiceEndpoint):
    """A `ServiceEndpoint` for a child whose requests and responses may have device tensors."""

    stage: StagingThread

    def _incoming(self, encoder: Encoder, decoder: Decoder, running: Mapping[int, Ticket]) -> IncomingRequests:
        services = self._services
        return DeviceIncomingRequests(
            self.stage, services.find, encoder, decoder, services.submit, services.cancel, running
        )


class DeviceIncomingRequests(IncomingRequests):
    """`IncomingRequests` with device tensors. ``find`` returns the view of a model by its name and version."""

    def __init__(self, stage: StagingThread, find: Callable[[str, str], Any], *parts: Any) -> None:
        super().__init__(*parts)
        self._stage, self._find = stage, find
        self._submit_now, self._submit = self._submit, self._submit_located

    def _submit_located(self, ticket: Ticket) -> None:
        request = ticket.request
        targets = getattr(request, "targets", None)
        is_on_device = has_device_tensor(request.inputs)
        if not targets and not is_on_device:
            self._submit_now(ticket)
            return
        device_inputs = self._device_inputs(request)
        others = {name: value for name, value in request.inputs.items() if name not in (device_inputs or ())}
        if is_on_device and has_device_tensor(others):
            self._stage.run(partial(arrays_of, others), partial(self._submit_arrays, ticket))
            return
        if targets and device_inputs is not None:
            ticket.on_device = on_device_of(targets)
        self._submit_now(ticket)

    def _device_inputs(self, request: InferRequest) -> Collection[str] | None:
        """Return `headrace.ModelView.takes_device_tensors` of the model."""
        try:
            names: Collection[str] | None = self._find(request.model_name, request.model_version).takes_device_tensors
        except HeadraceError:  # the request will be refused
            return None
        return names

    def _submit_arrays(self, ticket: Ticket, inputs: Any) -> None:
        if isinstance(inputs, BaseException):
            ticket.respond(_as_error(inputs), True)
            return
        ticket.request = ticket.request.with_inputs({**ticket.request.inputs, **inputs})
        self._submit_located(ticket)  # again: the model may have been replaced

    def _reply(self, send: Callable[[bytes], None], call: int, answer: Answer, final: bool) -> None:
        is_located = isinstance(answer, InferResponse) and has_device_tensor(answer.outputs)
        if is_located or self._stage.waiting:  # no answer overtakes another
            self._stage.run(
                partial(self._located, answer), lambda located: self._reply_located(send, call, located, final)
            )
        else:
            super()._reply(send, call, answer, final)

    def _located(self, answer: Answer) -> Answer:
        if not isinstance(answer, InferResponse):
            return answer
        staged = self._stage.staged(answer.outputs)
        outputs: dict[str, Any] = {
            name: Placed(each) if isinstance(each, StagedTensor) else each  # type: ignore[arg-type]
            for name, each in staged.items()
        }
        return InferResponse(outputs, answer.parameters, answer.model_name, answer.model_version, answer.id)

    def _reply_located(self, send: Callable[[bytes], None], call: int, answer: Any, final: bool) -> None:
        super()._reply(send, call, _as_error(answer) if isinstance(answer, BaseException) else answer, final)


def arrays_of(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``inputs`` in the memory of the host. Blocks."""
    return {name: on_host(value) for name, value in inputs.items()}


class DeviceOutputSchema(OutputSchema):
    """An `OutputSchema` for responses with device tensors."""

    __slots__ = ()

    @classmethod
    def of(cls, schema: OutputSchema) -> DeviceOutputSchema:
        return cls(schema.name, schema.version, schema.outputs, schema.batched, schema.as_given)

    def sign(self, request: InferRequest, response: InferResponse) -> InferResponse:
        outputs: Mapping[str, Any] = response.outputs
        if not has_device_tensor(outputs):
            return super().sign(request, response)
        requested = request.outputs or (self.outputs if self.as_given else ())
        copies = {name.removeprefix(HOST_COPY): each for name, each in outputs.items() if name.startswith(HOST_COPY)}
        outputs = {name: each for name, each in outputs.items() if not name.startswith(HOST_COPY)}
        arrays = {name: each for name, each in outputs.items() if not isinstance(each, DeviceTensor)}
        signed = super().sign(request, InferResponse(arrays, response.parameters, "", ""))
        values: dict[str, Any] = dict(signed.outputs)
        for name, tensor in outputs.items():
            if isinstance(tensor, DeviceTensor) and (not requested or name in requested):
                spec: Spec = self._spec(name)
                tensor._host = copies.get(name)
                value: Any = tensor
                if data_type(value) is not spec.datatype:
                    self._differs_in_type(spec, value)
                values[name] = value if spec.reshape is None else self._undo_reshape(spec, value)
        ordered = {name: values[name] for name in outputs if name in values}
        return InferResponse(ordered, response.parameters, self.name, self.version, request.id)


class DeviceChild(Child):
    """A `Child` that may send and receive device tensors. ``endpoint`` is a `DeviceEndpoint`."""

    def __init__(self, gpus: Sequence[str], *parts: Any) -> None:
        super().__init__(*parts)
        self._gpus = gpus
        self._stage: StagingThread
        self._received: ReceivedDeviceMemory

    @property
    def takes_device_tensors(self) -> bool:
        return self._handshake.takes_device_tensors

    @property
    def inputs_on_host(self) -> bool:
        return self._handshake.inputs_on_host

    async def _load(self) -> None:
        await super()._load()
        self._stage.gpus, self._stage.inputs_on_host = self._handshake.gpus, self._handshake.inputs_on_host

    def _codec(self, writer: Writer, reader: Reader, free: Callable[[int], None]) -> tuple[Encoder, Decoder]:
        self._stage = StagingThread(self._name, cuda_library(), self._send_soon, self._call_soon)
        self._received = ReceivedDeviceMemory(cuda_library, self._name, self._send_soon)
        endpoint = self._endpoint
        assert isinstance(endpoint, DeviceEndpoint)
        endpoint.stage = self._stage
        return DeviceEncoder(writer, self._mappings), DeviceDecoder(reader, free, self._received)

    def _channel(self, encoder: Encoder, decoder: Decoder) -> BatchChannel:
        busy_poll_us = self._isolation.busy_poll_us
        return DeviceBatchChannel(
            self._stage, self._name, encoder, decoder, self._work, self._send_aside, self._owner, busy_poll_us
        )

    def _send_soon(self, message: bytes) -> None:
        self._call_soon(partial(self._send_aside, message))

    def _receive(self, message: Frame) -> None:
        if message.kind == Kind.DEVICE_RETIRE:
            self._received.retire(read_integers(message))
        elif not self._stage.receive(message):
            super()._receive(message)

    def _release(self) -> None:
        super()._release()
        self._stage.close()
        self._received.close()
