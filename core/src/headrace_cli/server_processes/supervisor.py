"""The supervisor of ``--workers``: starts servers, restarts them, adds up their metrics, and stops them."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from anyio import fail_after, move_on_after, to_thread

from headrace.engine import Engine, Phase
from headrace.errors import HeadraceError
from headrace.models.serving_table import ServingTable
from headrace_cli.server_processes.metric_sums import MetricSums, read_families
from headrace_cli.server_processes.model_changes import ModelChanges
from headrace_cli.server_processes.refusals import warning
from headrace_cli.server_processes.server_process import ServerProcess
from headrace_hosts.listening import listen_grpc, listen_http, reserve_port
from headrace_http.metrics_frontend import MetricsFrontend
from headrace_processes.supervision.process_set import ProcessSet

if TYPE_CHECKING:
    from prometheus_client import Metric

    from headrace.config.options import ServerOptions

log = logging.getLogger(__name__)

#: Longest time that the metrics page waits for a server. If it does not answer, its last metrics count.
MEASURE_S = 2.0
#: A server that has not ended this long after its exit timeout is killed.
OVERTIME_S = 5.0


class Supervisor:
    """Supervises ``options.workers`` servers. Each gets ``words``, the command line that was parsed to ``options``."""

    def __init__(self, words: Sequence[str], options: ServerOptions) -> None:
        self._words, self._options = words, options
        self._ports: dict[str, int] = {}
        self._reserved: list[socket.socket] = []
        # An engine without models, for the metrics frontend only.
        self._engine = Engine(options, ServingTable())
        self._engine.phase = Phase.STARTING
        self._changes = ModelChanges()
        self._servers: ProcessSet[ServerProcess] = ProcessSet(options.workers, self._make)
        self._metrics = SummedMetrics(self._engine, self._servers)

    @property
    def all_serve(self) -> bool:
        """True if all servers have started, and `stop` was not called."""
        return self._engine.phase is Phase.READY

    async def serve(self) -> None:
        """Start all servers, and replace each that exits, until the cancel scope around it ends. Call `stop` then.

        The first one starts alone: so errors of models are logged once, and the others find the engines that it has
        built and the environments that it has unpacked. Raises `Unavailable` naming a port in use, or the error of the
        first server that cannot start.
        """
        if self._options.workers > 1:
            log.warning("%s", warning(self._options))
        await to_thread.run_sync(self._reserve_ports)
        if self._metrics.enabled:
            await self._metrics.start()
        await self._servers.processes[0].start()
        await self._servers.start()
        self._engine.phase = Phase.READY
        log.info("%d workers serve", self._options.workers)
        self._engine.notify_ready()
        await self._servers.keep()

    async def stop(self) -> int:
        """Let all servers answer their requests and end. Return the exit code: 1 if one failed or was killed."""
        self._engine.phase = Phase.EXITING
        timeout_s = self._options.exit_timeout_secs + OVERTIME_S
        serving = [server for server in self._servers.processes if server.has_started]
        try:
            with move_on_after(timeout_s):
                await self._servers.drain()
            for server in self._servers.processes:
                if not server.ended.is_set():
                    server.kill(f"did not end within {timeout_s:g} s and was killed")
                    await server.ended.wait()
            failures = [server.reason for server in serving if server.exit_code]
            for failure in failures:
                log.error("%s", failure)
        finally:
            self._servers.end()
            await self._metrics.stop()
            for reserved in self._reserved:
                reserved.close()
            self._engine.off_loop_work.close()
        return int(bool(failures))

    def _make(self, number: int) -> ServerProcess:
        is_first = number == 0 and self._engine.is_loading
        return ServerProcess(number, self._words, self._ports, self._changes, logs_tables=is_first)

    def _reserve_ports(self) -> None:
        """Reserve the ports for the servers. Raises `Unavailable`."""
        options = self._options
        if options.allow_grpc:
            reserved = reserve_port(listen_grpc, options.grpc_address, options.grpc_port, options.reuse_grpc_port)
            self._reserved.append(reserved)
            self._ports["grpc_port"] = reserved.getsockname()[1]
        if options.allow_http:
            reserved = reserve_port(listen_http, options.http_address, options.http_port, options.reuse_http_port)
            self._reserved.append(reserved)
            self._ports["http_port"] = reserved.getsockname()[1]


class SummedMetrics(MetricsFrontend):
    """Serves the metrics page: the sum over ``servers``."""

    def __init__(self, engine: Engine, servers: ProcessSet[ServerProcess]) -> None:
        super().__init__(engine)
        self._servers = servers
        self._sums = MetricSums()
        #: The servers in the sums, by number.
        self._measured: dict[int, ServerProcess] = {}
        #: Pages are made one after the other: metrics of a server must be added in the order in which it sent them.
        self._turn = asyncio.Lock()

    async def families(self) -> Iterable[Metric]:
        async with self._turn:
            await asyncio.gather(*(self._measure(server) for server in self._servers.processes))
            return self._sums.collect()

    async def _measure(self, server: ServerProcess) -> None:
        before = self._measured.get(server.number)
        if before is not None and before.is_dead:
            self._sums.ended(server.number)
            del self._measured[server.number]
        if not server.has_started:
            return
        try:
            with fail_after(MEASURE_S):
                families = await server.ask("measure")
        except TimeoutError:
            log.warning("%s does not answer with its metrics; its last ones count", server.name)
        except HeadraceError as error:
            log.warning("%s does not answer with its metrics: %s", server.name, error.message)
        else:
            self._measured[server.number] = server
            self._sums.read(server.number, read_families(families))
