"""The engine as a frontend process has it: the same `Engine`, whose models are in another process.

A request is decoded and checked here, sent there with all others of its turn of the event loop, checked there against
what is served by then, and scheduled; its answers come back in the same way and are encoded here. Those that are like
others before them are neither checked nor described again (`headrace.ipc.layouts`). What else can be asked of the
server is not: it travels whole, as it was received (`headrace.frontends.processes`).
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Any

from headrace.config.model_config_pb2 import ModelConfig
from headrace.config.options import ServerOptions
from headrace.engine import Engine, Phase
from headrace.errors import Unavailable
from headrace.ipc.codec import Decoder, Encoder
from headrace.ipc.framing import Frame, Kind, ProtocolError, integers_frame
from headrace.ipc.layouts import MOST_ALIKE, Layout, LayoutReader, LayoutWriter, is_plain, request_key
from headrace.ipc.peer_requests import LoopOutgoingRequests
from headrace.ipc.replies import unsendable_request
from headrace.messages.request import InferRequest
from headrace.messages.response import Answer, InferResponse
from headrace.messages.ticket import Ticket
from headrace.models.serving_table import Offer, ServingTable, parse_version
from headrace.models.signature import Signature, explain
from headrace.models.states import ModelRecord, VersionRecord
from headrace.models.view import ModelView, metadata_document
from headrace.telemetry.pacing import paced

log = paced(__name__)

#: Requests that one process may have on their way; half of what its peer believes.
MOST_REQUESTS = 32768


class RemoteEngine(Engine):
    """An engine that finds what `change` has told it, and sends requests by ``requests``."""

    def __init__(self, options: ServerOptions, requests: RemoteRequests) -> None:
        self._remote = RemoteTable()
        super().__init__(options, self._remote)
        self._requests = requests
        self.phase = Phase.READY

    def change(self, name: str, versions: Sequence[int], views: Sequence[Mapping[str, Any]]) -> None:
        """``versions`` of a model are known from now on, of which those of ``views`` are served; none: forget it."""
        requests = self._requests
        self._remote.change(name, Offer(tuple(versions), tuple(read_view(view, requests) for view in views)))
        requests.layouts.forget()  # of versions that may be no more

    def finds(self, name: str, version: str) -> bool:
        """Whether a request for ``version`` (empty: the latest) can be decoded here. What is new is known at once to
        those only who have the models, and so are the reasons why something is not there."""
        return self._remote.finds(name, version)


class RemoteTable(ServingTable):
    """Finds the models of another process."""

    def __init__(self) -> None:
        super().__init__()
        self._offers: dict[str, Offer] = {}
        self.open()

    def change(self, name: str, offer: Offer) -> None:
        """What is known of ``name`` from now on."""
        if offer.versions:
            self._offers[name] = offer
            self._records[name] = ModelRecord(name, {number: VersionRecord() for number in offer.versions})
        else:
            self._offers.pop(name, None)
            self._records.pop(name, None)
        found: dict[tuple[str, str | int], ModelView] = {}
        for known, each in self._offers.items():
            for view in each.views:  # ascending: the last is the latest
                found[known, str(view.version)] = found[known, ""] = view
        self._open = found

    def finds(self, name: str, version: str) -> bool:
        return (name, version) in self._open

    def resolve(self, name: str, version: str | int = "") -> ModelView:
        view = self._open.get((name, version))
        if view is None and version:
            view = self._open.get((name, str(parse_version(version))))
        if view is None:
            raise self._explain(name, version)
        return view


# ---------------------------------------------------------------------- one version, as it travels


def write_view(view: ModelView) -> dict[str, Any]:
    """What `read_view` needs of ``view``, as JSON."""
    config = b64encode(view.config.SerializeToString()).decode()
    labels = {name: list(lines) for name, lines in view.labels.items()}
    return {"version": view.version, "platform": view.platform, "config": config, "labels": labels}


def read_view(found: Mapping[str, Any], requests: RemoteRequests) -> ModelView:
    """The view of a version that is served elsewhere, and asked by ``requests``."""
    config = ModelConfig.FromString(b64decode(found["config"]))
    signature = Signature(config.name, config, reshapes=False)
    return ModelView(
        config.name,
        found["version"],
        found["platform"],
        config.max_batch_size,
        config.model_transaction_policy.decoupled,
        config,
        signature.inputs,
        signature.outputs,
        found["labels"],
        metadata_document(found["platform"], signature),
        Recognition(signature, requests).check,
        partial(explain, signature),
        requests.submit,
    )


# ---------------------------------------------------------------------- requests

#: Where a ticket has the layout of its request between its check and its sending: here is no batch to be in.
_LAYOUT = attrgetter("batch_key")


class Recognition:
    """Checks the requests to one version, and finds the layout of those like which others have passed."""

    def __init__(self, signature: Signature, requests: RemoteRequests) -> None:
        self._signature, self._requests, self._layouts = signature, requests, requests.layouts
        self._known = requests.layouts.known

    def check(self, ticket: Ticket) -> None:
        """`Signature.check`; sets ``batch_key`` to the `Layout` of the request, None for one that has none."""
        request = ticket.request
        key = request_key(request)
        layout = self._known.get((self, key))
        if layout is None:
            self._signature.check(ticket)
            layout = self._meet(request, key)
        ticket.batch_key = layout if layout is not None and is_plain(request) else None

    def _meet(self, request: InferRequest, key: Hashable) -> Layout | None:
        if key is None or not is_plain(request):
            return None
        name, version, outputs = request.model_name, request.model_version, request.outputs
        return self._layouts.meet((self, key), name, version, outputs, request.inputs)


class RemoteRequests(LoopOutgoingRequests):
    """The requests of this process: those of one turn of the event loop in one message. Event loop only.

    ``send`` takes messages, in order.
    """

    def __init__(self, encoder: Encoder, decoder: Decoder, send: Callable[[bytes], None]) -> None:
        super().__init__(decoder, self._send_behind)
        self._encoder, self._write = encoder, send
        self._waiting: list[Ticket] = []
        self._next = 1
        self.layouts = LayoutWriter()
        self._heard = LayoutReader()

    def submit(self, ticket: Ticket) -> None:
        """Have ``ticket`` answered. Raises `Unavailable` where too many are on their way."""
        waiting = self._waiting
        if len(waiting) + len(self.in_flight) >= MOST_REQUESTS:
            raise Unavailable(
                f"{ticket.request.log_id}{MOST_REQUESTS} requests of one frontend process are not answered yet, try "
                "again later"
            )
        if not waiting:
            self._loop.call_soon(self._flush)
        waiting.append(ticket)

    def hear(self, message: Frame) -> None:
        """Take ANSWERS, ALIKE_ANSWERS and LAYOUT. Raises `ProtocolError`."""
        if message.kind == Kind.ALIKE_ANSWERS:
            self._take_alike(message)
        elif message.kind == Kind.LAYOUT:
            self._heard.hear(message)
        else:
            super().hear(message)

    def _flush(self) -> None:
        """Send what waits. It may have been sent already."""
        tickets, self._waiting = self._waiting, []
        for layout, some in groupby(tickets, _LAYOUT):
            run = list(some)
            if layout is None:
                self._send_others(run)
                continue
            for begin in range(0, len(run), MOST_ALIKE):
                self._send_alike(layout, run[begin : begin + MOST_ALIKE])

    def _send_alike(self, layout: Layout, tickets: Sequence[Ticket]) -> None:
        first = self._next
        self._next += len(tickets)
        self._write(self.layouts.requests(layout, first, [ticket.request for ticket in tickets]))
        self._enter(list(enumerate(tickets, first)))

    def _send_others(self, tickets: Sequence[Ticket]) -> None:
        numbered = list(enumerate(tickets, self._next))
        self._next += len(tickets)
        try:
            message = self._encoder.requests(numbered)
        except ValueError as error:
            self._send_apart(numbered, error)
            return
        self._write(message)
        self._enter(numbered)

    def _send_apart(self, numbered: Sequence[tuple[int, Ticket]], error: ValueError) -> None:
        """Send those of ``numbered`` that can travel, since together they cannot."""
        if len(numbered) == 1:
            numbered[0][1].respond(unsendable_request(error), True)
            return
        for _, ticket in numbered:
            self._send_others((ticket,))

    def _enter(self, numbered: Sequence[tuple[int, Ticket]]) -> None:
        """Expect answers to what has just been sent."""
        in_flight, tell = self.in_flight, self._tell_end
        for call, ticket in numbered:
            in_flight[call] = ticket
            ticket.on_cancel = partial(tell, call)
            if ticket.cancelled:  # its caller left before
                tell(call, ticket)

    def _take_alike(self, message: Frame) -> None:
        layout, calls, answers = self._heard.answers(message)
        model, version, leave = layout.model_name, layout.model_version, self.in_flight.pop
        for call, outputs in zip(calls, answers, strict=True):
            ticket = leave(call, None)
            if ticket is None:
                raise ProtocolError(f"an answer to request {call}, which is not in flight")
            try:
                ticket.respond(InferResponse(outputs, {}, model, version, ticket.request.id), True)
            except Exception:
                log.exception("an answer of model '%s' could not be passed on", model)

    def _tell_end(self, call: int, ticket: Ticket) -> None:
        if call in self.in_flight:
            self._send(integers_frame(Kind.CANCEL if ticket.abandoned else Kind.STOP, (call,)))

    def _deliver(self, ticket: Ticket, answer: Answer, final: bool) -> None:
        if type(answer) is InferResponse:
            answer.id = ticket.request.id
        try:
            ticket.respond(answer, final)
        except Exception:
            log.exception("an answer of model '%s' could not be passed on", ticket.request.model_name)

    def _send_behind(self, message: bytes) -> None:
        """Send what is said of requests, behind these."""
        self._flush()
        self._write(message)
