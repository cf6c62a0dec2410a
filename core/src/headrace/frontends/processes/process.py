"""One frontend process, as the engine's process has it."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from headrace.frontends.processes.incoming import IncomingInferences
from headrace.frontends.processes.schema import FrontendKind, write_options
from headrace.frontends.processes.whole_calls import Tables, WholeCalls
from headrace.ipc.arena import Arena, Reader, Writer
from headrace.ipc.channel import ReleasedPlaces, Releases
from headrace.ipc.codec import Decoder, Encoder
from headrace.ipc.framing import Frame, Kind
from headrace.ipc.json_parts import json_frame
from headrace.remote_engine import write_view
from headrace.supervision.supervised_process import LaunchedProcess, SupervisedProcess, launch

if TYPE_CHECKING:
    from headrace.engine import Engine, Offer

#: Address space of each arena; memory is taken as it is used.
ARENA_BYTES: Final = 256 * 1024 * 1024
#: How long a process may take until it accepts connections: imports on a machine that is busy.
START_TIMEOUT_S: Final = 120.0
#: How long it may answer nothing, not even whether it is there, before another takes its place.
SILENT_S: Final = 30
_CALLS: Final = frozenset((FrontendKind.CALL, FrontendKind.TAKEN, FrontendKind.LEFT))


class FrontendProcess(SupervisedProcess):
    """One life of a frontend process, which inherits ``listeners``, by name of the protocol. The engine allocates in
    ``inbound`` and reads ``outbound``."""

    start_timeout_s = START_TIMEOUT_S
    most_silent_s = SILENT_S

    def __init__(self, name: str, engine: Engine, tables: Tables, listeners: Mapping[str, socket.socket]) -> None:
        super().__init__(name)
        self._engine, self._listeners = engine, listeners
        self._offered: dict[str, Offer] = {}
        self._inbound, self._outbound = Arena.create(ARENA_BYTES), Arena.create(ARENA_BYTES)
        writer = Writer(self._inbound)
        self._released = ReleasedPlaces(writer)
        decoder = Decoder(Reader(self._outbound), Releases(self.soon, self.send).add)
        encoder = Encoder(writer, names_models=True)
        self._requests = IncomingInferences(encoder, decoder, engine, self.send)
        self._calls = WholeCalls(tables, self.send)

    def launch(self) -> LaunchedProcess:
        fds = {"inbound": self._inbound.fd, "outbound": self._outbound.fd}
        fds |= {protocol: listener.fileno() for protocol, listener in self._listeners.items()}
        return launch(self.name, "headrace.cli.frontend_process:serve", fds, arena_bytes=ARENA_BYTES)

    def settings(self) -> Mapping[str, Any]:
        return write_options(self._engine.options)

    def introduce(self) -> None:
        self.tell_models()

    def tell_models(self) -> None:
        """Tell what has changed since it was last told; nothing while there is no line to it."""
        if not self.is_connected:
            return
        offered, known = self._engine.offered(), self._offered
        changed = {name: offer for name, offer in offered.items() if known.get(name) != offer}
        gone = known.keys() - offered.keys()
        self._offered = offered
        if changed or gone:
            found: dict[str, Any] = {name: [(), ()] for name in gone}
            for name, offer in changed.items():
                found[name] = [offer.versions, [write_view(view) for view in offer.views]]
            self.send(json_frame(FrontendKind.MODELS, found))

    def hear(self, message: Frame) -> None:
        if self._requests.hear(message, self.send):
            return
        kind = message.kind
        if kind == Kind.RELEASE:
            self._released.hear(message)
        elif kind in _CALLS:
            self._calls.hear(message)
        else:
            super().hear(message)

    def close(self) -> None:
        self._requests.close()
        self._calls.close()
        self._inbound.close()
        self._outbound.close()
