"""HTTP routes of extensions: their interface, their call object, and the handler that runs them.

::

    class Events(HttpRoute):
        name = "POST /v2/models/{name}[/versions/{version}]/events"

        async def answer(self, call):
            request = await call.read_inference(call.values["name"])
            return HttpStream(200, [(b"Content-Type", b"text/event-stream")], self.events(call, request))
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from http import HTTPStatus
from itertools import chain
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple
from urllib.parse import parse_qs

from headrace.engine import AnyOperation, Operation
from headrace.errors import HeadraceError, InternalError, InvalidArgument, plugin_failure
from headrace.frontends.extension import Addition, check_operation, require_async
from headrace.frontends.failures import Failure
from headrace.off_loop import LARGE_BYTES
from headrace.telemetry.log_limits import rate_limited_logger
from headrace_http.admitted_requests import caller_of
from headrace_http.documents import T, member, read_value
from headrace_http.infer_request import PARAMETERS
from headrace_http.message import (
    Cancel,
    ErrorReply,
    HttpReply,
    HttpRequest,
    Reply,
    ReplyStream,
    error_reply,
    reply_stream,
)
from headrace_http.request_head import TOKEN
from headrace_http.url_paths import PathTarget, PathTemplate, read_path

if TYPE_CHECKING:
    from headrace.engine import Caller
    from headrace.frontends.request_parameters import RequestParameters
    from headrace.messages.request import InferRequest
    from headrace.messages.response import InferResponse
    from headrace.messages.tensor import Tensor
    from headrace_http.outputs import OutputFormat
    from headrace_http.route_handlers import Handler, RouteHandlers

log = rate_limited_logger(__name__)


METHODS = ("DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT")
#: A query with more fields is refused.
_QUERY_FIELDS = 1000
#: Answers with these statuses have no body; the host ends them itself.
_BODILESS = {204, 205, 304}
_STATUSES = {status.value for status in HTTPStatus if status >= 200} - _BODILESS
#: Headers that only the host sets.
_FRAMING = {b"connection", b"content-length", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade"}


class HttpStream(NamedTuple):
    """A streamed answer. ``headers`` have no header about its length, as in `HttpReply`.

    The status is sent with the first of ``chunks``. An exception before it is answered as an error; a later one breaks
    the answer off. The next chunk is asked for when the caller has read most of the earlier ones. ``chunks`` is closed
    when the caller disconnects.
    """

    status: int
    headers: Sequence[tuple[bytes, bytes]]
    chunks: AsyncIterator[bytes]


class HttpRoute(Addition):
    """Answers the requests to one path. One object per server; it runs on the event loop and must not block.

    ``name`` is the method and the path, ``"POST /v2/models/{name}/events"``. A placeholder is one segment;
    ``{version}`` is a segment of digits. A part in brackets may be missing. Interceptors admit ``operation`` before the
    body is read, for the model in ``{name}``. An `ExtensionOperation` declares its category of
    ``--http-restricted-api``.
    """

    kind: ClassVar[str] = "route"
    _clash_rule: ClassVar[str] = ": one path fits both templates, and then their methods do not matter"
    operation: ClassVar[AnyOperation] = Operation.INFER
    #: Members of its operation in an OpenAPI description, such as ``requestBody``. The rest is made from the others.
    openapi: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    #: Where `refusal` also words the errors of paths that no route has, such as ``"/v1/"``: of those that begin so.
    refusal_prefix: ClassVar[str] = ""

    @property
    def max_body_bytes(self) -> int | None:
        """The largest body. None: that of the port. A larger one is refused by 413, before it is received."""
        return None

    async def answer(self, call: HttpCall) -> HttpReply | HttpStream:
        """Return the answer. A `HeadraceError` is answered as usual, another exception with 500.

        Cancelled when the caller disconnects.
        """
        raise NotImplementedError

    def refusal(self, error: HeadraceError, usual: HttpReply, request: HttpRequest) -> HttpReply:
        """Return the answer to ``request``, which interceptors refuse or which failed, by ``error``.

        Override it for errors in a form of the route's own. ``usual`` is the answer in Triton's form: its message has
        nothing that is not for callers. It also words what the host refuses at the route's path, by any method, such
        as a body that is too large or malformed: ``request`` then has no body. Must not raise.
        """
        return usual

    def handler(self, handlers: RouteHandlers) -> Handler:
        """Return a handler that runs `answer` in a task per request."""
        return RouteHandler(self, handlers)

    @classmethod
    def check(cls) -> None:
        read_route(cls)
        if cls.answer is HttpRoute.answer and cls.handler is HttpRoute.handler:
            raise TypeError(f"route '{cls.name}' has no method 'answer'")
        require_async(cls, "answer")

    @classmethod
    def clashes_with(cls, other: type[Addition]) -> bool:
        return issubclass(other, HttpRoute) and clash(cls, other)


class HttpCall:
    """One request to an `HttpRoute`. ``values`` are those of the placeholders, as received."""

    __slots__ = ("_handlers", "_located", "_max_bytes", "_reply", "has_left", "held_bytes", "request", "values")

    def __init__(
        self,
        request: HttpRequest,
        values: Mapping[str, str],
        reply: Reply,
        handlers: RouteHandlers,
        max_bytes: int | None = None,
    ) -> None:
        self.request, self.values = request, values
        self._reply, self._handlers, self._max_bytes = reply, handlers, max_bytes
        #: Bytes of its document, which the memory budget counts.
        self.held_bytes = 0
        self._located: Mapping[str, OutputFormat] = {}
        #: True if the caller has disconnected: the route is cancelled.
        self.has_left = False

    @property
    def caller(self) -> Caller:
        """The caller of the request."""
        return caller_of(self.request, self._reply, self._handlers.transport)

    @property
    def query(self) -> dict[str, list[str]]:
        """The values of each field of the URL's query. Raises `InvalidArgument` if there are too many."""
        try:
            return parse_qs(self.request.query, keep_blank_values=True, max_num_fields=_QUERY_FIELDS)
        except ValueError:
            raise InvalidArgument(f"the query of the URL has more than {_QUERY_FIELDS} fields") from None

    async def read_inference(self, model: str, version: str = "") -> InferRequest:
        """Return the inference in the body, as for ``POST /v2/models/{name}/infer``.

        Raises `HeadraceError` if the model does not exist, or if the body is invalid.
        """
        request, self._located = await self._handlers.inference.read_request(self.request, model, version)
        if hasattr(self._reply, "caller"):  # the server has interceptors
            request.send_as(self.caller)
        return request

    async def read_json(self, has_texts: bool = False) -> Any:
        """Return the JSON document in the body, of at most `HttpRoute.max_body_bytes`, or else
        ``--http-max-input-size`` bytes. NaN and Infinity are numbers.

        Raises `InvalidArgument`, also for a nesting of more than 100 levels, and for more than 65,536 values or 4 MiB,
        which would block the event loop. With ``has_texts``, strings of 128 KiB and more are not counted in these
        4 MiB. Then the memory budget counts the document until the request is answered; raises `OutOfMemory`.
        """
        size, inference = self.request.body.nbytes, self._handlers.inference
        if has_texts and size > LARGE_BYTES and not self.held_bytes:
            inference.hold(size)
            self.held_bytes = size
        return await inference.read_document(self.request, self._max_bytes, has_texts)

    @staticmethod
    def read_value(value: Any, kind: type[T], name: str | None = None) -> T:
        """Return ``value`` of a JSON document, of the type ``kind``: bool, int (an unsigned 64-bit integer), str, list
        or dict.

        Raises `InvalidArgument` for another type in Triton's words (500), which name the member ``name`` if given.
        """
        return read_value(value, kind, name)

    @staticmethod
    def read_member(members: dict[str, Any], name: str, kind: type[T], default: T | None = None) -> T:
        """Return the member ``name`` of a JSON object, as `read_value` does; ``default`` if it is missing.

        Raises `InvalidArgument` if it is missing and has no default.
        """
        if default is not None and name not in members:
            return default
        return read_value(member(members, name), kind, name)

    @staticmethod
    def read_parameters(members: Mapping[str, Any]) -> RequestParameters:
        """Return the ``parameters`` of an infer request in JSON: those with a meaning, and the ``custom`` ones.

        Raises `InvalidArgument` for a wrong type or range, and for a reserved name.
        """
        return PARAMETERS.read(members)

    @staticmethod
    def read_parameter(value: Any, name: str) -> str | int | bool | float:
        """Return ``value`` as the custom parameter ``name`` of a request, whatever the name means in an infer request.

        Raises `InvalidArgument` for a wrong type, and for a reserved name.
        """
        return PARAMETERS.read_custom(value, name)

    def read_tensor(self, name: str, datatype: str, shape: Sequence[int], values: list[Any]) -> Tensor:
        """Return ``values`` of a JSON document as the input ``name``, with the rules and errors of an infer request.

        ``values`` may be nested; only their number must fit ``shape``. Raises `InvalidArgument`.
        """
        return self._handlers.inference.read_tensor(name, datatype, shape, values)

    async def print_tensors(self, response: InferResponse) -> dict[str, bytes]:
        """Return each output of ``response`` as a flat JSON array. Raises `HeadraceError` if it has no JSON form."""
        return await self._handlers.inference.print_tensors(response)

    async def print_response(self, response: InferResponse) -> bytes:
        """Return ``response`` as one line of JSON. Raises `HeadraceError` if it has no JSON form.

        Outputs for which the request of `read_inference` names a `TensorLocation` are written there.
        """
        return await self._handlers.inference.print_response(response, self._located)

    def print_error(self, error: HeadraceError) -> bytes:
        """Return ``error`` as one line of JSON, without details that are not for callers."""
        return b"".join(error_reply(error).parts)


def refuse(route: HttpRoute, error: HeadraceError, request: HttpRequest, usual: HttpReply | None = None) -> ErrorReply:
    """Return the `HttpRoute.refusal` of ``route``, with the failure for the log and for the watches of the operation.

    ``usual`` is `error_reply` of ``error``, by default.
    """
    reply = route.refusal(error, error_reply(error) if usual is None else usual, request)
    return ErrorReply(*reply).of(Failure.of(error))


def read_route(part: type[HttpRoute]) -> tuple[str, PathTemplate]:
    """Return method and path of a route class. Raises TypeError with the broken rule."""
    method, _, path = part.name.partition(" ")
    if method not in METHODS:
        raise TypeError(f"route {part.__name__} is named {part.name!r}, not '<{'|'.join(METHODS)}> /path'")
    if hasattr(part, "category"):
        raise TypeError(
            f"route '{part.name}' has a category, {part.category!r}: the category is that of its operation, such as "
            f"ExtensionOperation('{part.__name__.lower()}', {part.category!r})"
        )
    check_operation(part, part.operation)
    prefix = part.refusal_prefix
    if prefix and not (prefix.startswith("/") and prefix.endswith("/")):
        raise TypeError(f"route '{part.name}' has the refusal_prefix {prefix!r}, which does not begin and end with '/'")
    return method, read_path(path)


def clash(one: type[HttpRoute], other: type[HttpRoute]) -> bool:
    """True if one path fits both. Routes with the same path share it if their methods differ. Both are checked."""
    (method, _, path), (other_method, _, other_path) = one.name.partition(" "), other.name.partition(" ")
    shared = path == other_path and method != other_method
    return not shared and read_path(path).overlaps(read_path(other_path))


def check_routes(routes: Sequence[type[HttpRoute]]) -> None:
    """Raise TypeError with the rule that one of the ``routes`` of one port breaks."""
    for number, route in enumerate(routes):
        route.check()
        for other in routes[:number]:
            if clash(route, other):
                raise TypeError(f"one path fits both of the routes '{other.name}' and '{route.name}'")


class RouteHandler:
    """Runs ``route`` for each request, in a task that is cancelled when the caller disconnects."""

    def __init__(self, route: HttpRoute, handlers: RouteHandlers) -> None:
        self._route, self._handlers, self._log_error = route, handlers, handlers.log_error
        self._tasks: set[asyncio.Task[None]] = set()
        self._name = f"route {route.name}"

    def __call__(self, request: HttpRequest, target: PathTarget, reply: Reply) -> Cancel | None:
        limits, size = self._handlers.limits, request.body.nbytes
        if size > limits.body_limit(request.path, request.headers):  # a host may accept small bodies without a check
            reply(refuse(self._route, limits.body_refusal(size, request.path, request.headers), request))
            return None
        call = HttpCall(request, target.values, reply, self._handlers, self._route.max_body_bytes)
        task = asyncio.get_running_loop().create_task(self._answer(call, reply), name=self._name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

        def leave() -> None:
            call.has_left = True
            task.cancel()

        return leave

    async def _answer(self, call: HttpCall, reply: Reply) -> None:
        try:
            await self._run(call, reply)
        except HeadraceError as error:
            self._log_error(error, call.request)
            reply(refuse(self._route, error.with_traceback(None), call.request))
        except BaseException as error:
            failure = plugin_failure(error, call.has_left)
            log.error("route '%s' failed", self._route.name, exc_info=failure)
            internal = InternalError("the request failed inside the server; its log has the reason")
            reply(refuse(self._route, internal, call.request))
        finally:
            if call.held_bytes:
                self._handlers.inference.hold(-call.held_bytes)

    async def _run(self, call: HttpCall, reply: Reply) -> None:
        answer = await self._route.answer(call)
        if isinstance(answer, HttpStream):
            await self._stream(answer, call, reply)
        else:
            reply(_checked(answer))

    async def _stream(self, answer: HttpStream, call: HttpCall, reply: Reply) -> None:
        head = _checked(HttpReply(answer.status, answer.headers))
        stream: ReplyStream | None = None
        try:
            if call.request.method != "HEAD":
                async for chunk in answer.chunks:
                    if len(chunk):  # an empty chunk would be the end
                        stream = stream or reply_stream(reply, head)
                        await stream.send(chunk)
            stream = stream or reply_stream(reply, head)
            await stream.end()
        except BaseException as error:
            if stream is None:
                raise
            failure = plugin_failure(error, call.has_left)
            if isinstance(failure, HeadraceError):
                self._log_error(failure, call.request)
            else:
                log.error("route '%s' failed in the middle of an answer", self._route.name, exc_info=failure)
            stream.break_off()
        finally:
            if (close := getattr(answer.chunks, "aclose", None)) is not None:
                await close()


def _checked(reply: HttpReply) -> HttpReply:
    """Return ``reply`` if its head is unambiguous. Raises TypeError or ValueError."""
    if not isinstance(reply, HttpReply):
        raise TypeError(f"the answer is {reply!r}, which is neither an HttpReply nor an HttpStream")
    if reply.status not in _STATUSES:
        raise ValueError(f"the status {reply.status!r} is none of an answer with a body")
    for each in chain(*reply.headers, reply.parts):
        memoryview(each)  # raises TypeError for text
    for name, value in reply.headers:
        if not name or name.translate(None, TOKEN) or name.lower() in _FRAMING:
            raise ValueError(f"the header {name!r} is none, or the server's own to say")
        if any((byte < 32 and byte != 9) or byte == 127 for byte in value):
            raise ValueError(f"the header {name!r} has control characters")
    return reply
