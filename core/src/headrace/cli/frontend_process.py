"""The program of a frontend process (``headrace serve --frontend-processes``): speaks HTTP and gRPC in front of the
engine, which is in the process that has started it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import NoReturn

from headrace.cli.garbage import GarbagePolicy
from headrace.cli.serve import run_loop
from headrace.errors import HeadraceError, InternalError, summary
from headrace.frontends.base import streams_s
from headrace.frontends.failures import learn_paths
from headrace.frontends.processes.forwarding import Forwarder, ForwardingRoutes, forwarding_rpcs
from headrace.frontends.processes.schema import FrontendKind, read_options
from headrace.ipc.arena import Arena, Reader, Writer
from headrace.ipc.channel import ReleasedPlaces, Releases
from headrace.ipc.codec import Decoder, Encoder
from headrace.ipc.framing import Frame, Kind
from headrace.ipc.json_parts import json_frame, read_json
from headrace.remote_engine import RemoteEngine, RemoteRequests
from headrace.supervision.parent_line import ParentLine, run
from headrace.supervision.supervised_process import LifeKind
from headrace.telemetry.logs import Log, LogSettings
from headrace_grpc.native_host import NativeHost
from headrace_grpc.rpc_table import rpcs
from headrace_http.frontend import choose_host


def serve(
    *, channel: int, inbound: int, outbound: int, crash_file: int, arena_bytes: int, http: int = -1, grpc: int = -1
) -> NoReturn:
    """What `headrace.supervision.bootstrap` calls, with inherited descriptors; -1 for what is not served."""

    def main() -> int:
        arenas = Arena.attach(inbound, arena_bytes), Arena.attach(outbound, arena_bytes)
        listeners = {name: socket.socket(fileno=fd) for name, fd in (("http", http), ("grpc", grpc)) if fd >= 0}
        return run_loop(_serve(socket.socket(fileno=channel), *arenas, listeners))

    run(main, channel, crash_file, [fd for fd in (inbound, outbound, http, grpc) if fd >= 0])


async def _serve(channel: socket.socket, inbound: Arena, outbound: Arena, listeners: dict[str, socket.socket]) -> int:
    process = RunningFrontend(inbound, outbound)
    await process.connect(channel)
    found = await process.told
    options = read_options(found)
    with contextlib.closing(Log(LogSettings.from_options(options))):
        learn_paths(options.model_repository)
        engine = RemoteEngine(options, process.requests)
        process.open(engine)
        stops = []
        try:
            if "grpc" in listeners:
                table = forwarding_rpcs(rpcs(engine), engine, process.forwarder)
                grpc_host = NativeHost(table, options, engine.large_work)
                grpc_host.listener = listeners["grpc"]
                await grpc_host.start()
                stops.append(grpc_host.stop)
            if "http" in listeners:
                make_host = choose_host(options.http_server)
                http_host = make_host(engine, listeners["http"], ForwardingRoutes(engine, process.forwarder))
                await http_host.start()
                stops.append(http_host.stop)
        except Exception as error:
            told = error if isinstance(error, HeadraceError) else InternalError(summary(error))
            process.send(json_frame(LifeKind.FAILED, {"code": told.code.value, "message": told.message}))
            await process.draining.wait()
            return 1
        garbage = GarbagePolicy(asyncio.get_running_loop())
        garbage.start()
        process.send(json_frame(LifeKind.STARTED, {}))
        await process.draining.wait()
        garbage.close()
        asyncio.get_running_loop().call_later(streams_s(options.exit_timeout_secs), engine.streams.end_all)
        await asyncio.gather(*(stop() for stop in stops))
    return 0


class RunningFrontend(ParentLine):
    """This process's end of the channel."""

    def __init__(self, inbound: Arena, outbound: Arena) -> None:
        super().__init__()
        self.forwarder = Forwarder(self.send)
        writer = Writer(outbound)
        self._released = ReleasedPlaces(writer)
        decoder = Decoder(Reader(inbound), Releases(self.soon, self.send).add)
        self.requests = RemoteRequests(Encoder(writer, names_models=True), decoder, self.send)
        self._engine: RemoteEngine | None = None
        self._early: list[Frame] = []

    def open(self, engine: RemoteEngine) -> None:
        """From now on what is heard of models is for ``engine``."""
        self._engine = engine
        for message in self._early:
            self.hear(message)

    def hear(self, message: Frame) -> None:
        kind = message.kind
        if kind in (Kind.ALIKE_ANSWERS, Kind.ANSWERS, Kind.LAYOUT):
            self.requests.hear(message)
        elif kind == Kind.RELEASE:
            self._released.hear(message)
        elif kind == FrontendKind.MODELS:
            if self._engine is None:
                self._early.append(message)
                return
            for name, (versions, views) in read_json(message).items():
                self._engine.change(name, versions, views)
        elif kind in (FrontendKind.ANSWER, FrontendKind.CHUNK):
            self.forwarder.hear(message)
        else:
            super().hear(message)
