"""Business logic scripting: a model calls another model.

Source: docs/spec/behaviours.md section 9.5. Errors are in the response. Calls need no threads: the services call back
and wake the waiting thread.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from threading import Lock
from typing import TYPE_CHECKING, TypeVar

from headrace import Answer, DeviceTensor, InferRequest, InferResponse, InvalidArgument, Ticket
from triton_python_backend_utils import runtime as runtimes
from triton_python_backend_utils.attributes import (
    TRITONSERVER_REQUEST_FLAG_SEQUENCE_END,
    TRITONSERVER_REQUEST_FLAG_SEQUENCE_START,
)
from triton_python_backend_utils.error import TritonModelException
from triton_python_backend_utils.inference_response import InferenceResponse
from triton_python_backend_utils.named_tensor import read_only
from triton_python_backend_utils.runtime import ModelPhase, Runtime

if TYPE_CHECKING:
    import asyncio

    from headrace import Services
    from triton_python_backend_utils.inference_request import InferenceRequest

Result = TypeVar("Result")


def execute(request: InferenceRequest) -> InferenceResponse:
    """Return the one response. Blocks. Raises `TritonModelException` where BLS is not supported."""
    services, runtime = _serving(request)
    message = _message(request, runtime)
    if services.passes_device_tensors:
        return InferenceResponse._received(_infer_on_device(services, request, message))
    return InferenceResponse._received(_refusal(request, message) or services.ask(message), services.shares_memory)


def execute_async(request: InferenceRequest) -> asyncio.Future[InferenceResponse]:
    """Do as `execute` on the running loop. Raises RuntimeError where none runs. Cancelling it cancels the request."""
    services, runtime = _serving(request)
    loop = _running_loop()
    future: asyncio.Future[InferenceResponse] = loop.create_future()
    answers: list[Answer] = []

    def respond(answer: Answer, final: bool) -> None:
        if answer is not None:
            answers[:] = [answer]
        if final:
            _wake(
                loop,
                future,
                lambda: InferenceResponse._received(answers[0] if answers else None, services.shares_memory),
            )

    ticket = Ticket(_message(request, runtime), respond)
    future.add_done_callback(lambda done: services.cancel(ticket) if done.cancelled() else None)
    _send(services, request, ticket)
    return future


def stream(request: InferenceRequest) -> ResponseIterator:
    """Return the responses as they arrive. Raises `TritonModelException` where BLS is not supported."""
    services, runtime = _serving(request)
    answers: SimpleQueue[tuple[Answer, bool]] = SimpleQueue()

    def respond(answer: Answer, final: bool) -> None:
        answers.put((answer, final))

    ticket = Ticket(_message(request, runtime, decoupled=True), respond)
    _send(services, request, ticket)
    return ResponseIterator(services, ticket, answers)


def stream_async(request: InferenceRequest) -> asyncio.Future[ResponseIterator]:
    """Do as `stream` on the running loop: done when the first response has arrived."""
    services, runtime = _serving(request)
    loop = _running_loop()
    future: asyncio.Future[ResponseIterator] = loop.create_future()
    answers: SimpleQueue[tuple[Answer, bool]] = SimpleQueue()

    def respond(answer: Answer, final: bool) -> None:
        answers.put((answer, final))
        if not future.done():
            _wake(loop, future, lambda: ResponseIterator(services, ticket, answers))

    ticket = Ticket(_message(request, runtime, decoupled=True), respond)
    future.add_done_callback(lambda done: services.cancel(ticket) if done.cancelled() else None)
    _send(services, request, ticket)
    return future


class ResponseIterator:
    """Yields each response as it arrives; the last may be empty. A second iteration yields them again.

    If it is dropped unfinished, the request is cancelled.
    """

    __slots__ = ("__weakref__", "_answers", "_finished", "_position", "_responses", "_services", "_ticket")

    def __init__(self, services: Services, ticket: Ticket, answers: SimpleQueue[tuple[Answer, bool]]) -> None:
        self._services = services
        self._ticket = ticket
        self._answers = answers
        self._responses: list[InferenceResponse] = []
        self._position = 0
        self._finished = False

    def __iter__(self) -> ResponseIterator:
        if self._finished and self._position == len(self._responses):
            self._position = 0
        return self

    def __next__(self) -> InferenceResponse:
        """Waits for the next response."""
        if self._position == len(self._responses):
            if self._finished:
                raise StopIteration
            self._take()
        response = self._responses[self._position]
        self._position += 1
        return response

    def cancel(self) -> None:
        """Cancel the request. Responses that still arrive are returned as usual."""
        if not self._finished:
            self._services.stop(self._ticket)

    def __del__(self) -> None:
        # Perhaps at the end of the interpreter, where nothing handles an error.
        with suppress(Exception):
            if not self._finished:
                self._services.cancel(self._ticket)

    def _take(self) -> None:
        answer, final = self._answers.get()
        if final:
            self._finished = True
        else:
            self._services.read(self._ticket)
        self._responses.append(InferenceResponse._received(answer, self._services.shares_memory))


def _serving(request: InferenceRequest) -> tuple[Services, Runtime]:
    """Return the services. As in Triton, calls are refused in ``initialize`` and ``finalize``."""
    runtime = request._runtime or runtimes.current()
    if runtime is None or runtime.services is None or runtime.phase is not ModelPhase.SERVING:
        raise TritonModelException("BLS is only supported during the 'execute' function.")
    return runtime.services, runtime


def _message(request: InferenceRequest, runtime: Runtime, decoupled: bool = False) -> InferRequest:
    """Return the message for ``request``, a new one for each execution."""
    source, flags = request._source, request.flags()
    return InferRequest(
        source.model_name,
        {tensor._name: read_only(tensor._wire()) for tensor in request.inputs()},
        request._outputs,
        source.id,
        source.model_version,
        source.parameters,
        source.priority,
        source.timeout_us,
        source.sequence_id,
        bool(flags & TRITONSERVER_REQUEST_FLAG_SEQUENCE_START),
        bool(flags & TRITONSERVER_REQUEST_FLAG_SEQUENCE_END),
        (*request._callers, runtime.model_name),
        request._caller,
        decoupled,
    )


#: The remaining calls that expect arrays, by the name and version of the model.
_arrays: dict[tuple[str, str], int] = {}
_CALLS = 100


def _infer_on_device(services: Services, request: InferenceRequest, message: InferRequest) -> Answer:
    """Return the last answer that is not empty, with outputs in the memory in which the model produces them.

    After an answer with arrays, the next `_CALLS` calls use the faster path, which is for arrays only.
    """
    key = message.model_name, message.model_version
    remaining = _arrays.get(key, 0)
    if remaining:
        _arrays[key] = remaining - 1
    if remaining or request._prefers_host:
        return _refusal(request, message) or services.ask(message)
    answers: list[Answer] = [None]
    done = Lock()
    done.acquire()

    def respond(answer: Answer, final: bool) -> None:
        if answer is not None:
            answers[0] = answer
        if final:
            done.release()

    _send(services, request, Ticket(message, respond))
    with done:
        (answer,) = answers
    if isinstance(answer, InferResponse) and not any(
        isinstance(each, DeviceTensor) for each in answer.outputs.values()
    ):
        _arrays[key] = _CALLS
    return answer


def _send(services: Services, request: InferenceRequest, ticket: Ticket) -> None:
    refusal = _refusal(request, ticket.request)
    if services.passes_device_tensors and not request._prefers_host:
        ticket.on_device = dict.fromkeys(ticket.request.outputs, False)
    if refusal is None:
        services.infer(ticket)
    else:
        ticket.respond(refusal, True)


def _refusal(request: InferenceRequest, message: InferRequest) -> InvalidArgument | None:
    """Return the error if two inputs have the same name, of which the mapping in ``message`` has only one."""
    if len(message.inputs) == len(request.inputs()):
        return None
    names = [tensor._name for tensor in request.inputs()]
    twice = next(name for name in message.inputs if names.count(name) > 1)
    return InvalidArgument(
        f"Model {message.model_name} - Error when running inference: "
        f"{message.log_id}input '{twice}' already exists in request"
    )


def _running_loop() -> asyncio.AbstractEventLoop:
    import asyncio  # here, because most processes of models do not need it

    return asyncio.get_running_loop()


def _wake(loop: asyncio.AbstractEventLoop, future: asyncio.Future[Result], result: Callable[[], Result]) -> None:
    def settle() -> None:
        if not future.done():
            future.set_result(result())

    with suppress(RuntimeError):  # the loop is closed, and nothing waits
        loop.call_soon_threadsafe(settle)
