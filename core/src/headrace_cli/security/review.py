"""Review a server before it starts: which of its ports, routes and methods are open to which callers."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from headrace.config.option_groups import OptionGroup
from headrace.config.option_parts import GrpcLimitOptions, HttpLimitOptions
from headrace.frontends.access import is_loopback
from headrace.frontends.base import Frontend
from headrace.messages.operation import AnyOperation, Operation
from headrace.plugins import Plugins
from headrace.server import Server
from headrace_cli import command_line
from headrace_cli.option_files import with_files
from headrace_cli.security.closed_operations import NOBODY
from headrace_cli.security.model_code import UnreadModel, model_code
from headrace_cli.security.profile_words import with_profile
from headrace_grpc.hosts import GrpcHost
from headrace_grpc.plugin_methods import GrpcMethod
from headrace_hosts.tls_files import TlsFiles
from headrace_http.forwarding import ForwardingPort
from headrace_http.http_host import FirstPort, HttpHost, HttpPort
from headrace_http.plugin_routes import HttpRoute

ANYBODY = "anybody"
#: Categories of operations that change the server or show all of its models. Strangers have no use for them.
_CONTROL = frozenset(("model-repository", "trace", "logging", "shared-memory"))
_LOADS = (Operation.LOAD, Operation.UNLOAD)
#: The control modes in which no caller loads a model.
_WITHOUT_LOADS = ("none", "poll")
#: The text about a model whose files are code.
_RUNS = "runs code of the repository in"
_IN_PROCESS = 'in its config, parameters { key: "isolation" value { string_value: "process" } }'
_REGIONS = (Operation.SHARED_MEMORY_REGISTER, Operation.SHARED_MEMORY_UNREGISTER)


@dataclass(frozen=True, slots=True)
class Exposure:
    """One line of a review: ``who`` may use ``what``. ``is_open``: the profile ``public`` closes it. ``flags``: the
    flags that decide it, without values. ``remedy`` has the setting that closes it.
    """

    where: str
    what: str
    who: str
    is_open: bool
    flags: tuple[str, ...] = ()
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.where}: {self.what}: {self.who}"


@dataclass(frozen=True, slots=True)
class ReviewedPort:
    """A port that the server would open, and the operations that it answers."""

    service: str
    transport: str
    address: str
    port: int
    tls: TlsFiles | None
    tls_flags: tuple[str, ...]
    operations: Sequence[AnyOperation]

    @property
    def is_local(self) -> bool:
        """True if only this machine reaches it."""
        return self.address == "localhost" or is_loopback(self.address)

    @property
    def where(self) -> str:
        return f"{self.service} on {self.address or '0.0.0.0'}:{self.port}"


class SecurityReview:
    """Review of the permissions of callers of ``server``, which need not have started."""

    def __init__(self, server: Server) -> None:
        """Read the parts of ``server``. Raises `HeadraceError` for a frontend that is not there."""
        self._server, self._options = server, server.options
        self._admission = server.engine.admission
        #: Frontends with a protocol of their own, of which nothing is known.
        self.unknown: list[str] = []
        self.ports = list(self._ports())

    @classmethod
    def of_command_line(cls, words: Sequence[str]) -> SecurityReview:
        """Return the review of a server with the flags ``words`` of ``headrace serve``.

        No port is opened and no model is loaded, but interceptors are made, and open the files that they write. Raises
        `ConfigError` for words that are no flags, and `HeadraceError`.
        """
        words = with_profile(with_files(words))
        groups: list[type[OptionGroup]] = list(Plugins.discover(command_line.allowed_plugins(words)).options)
        return cls(Server(command_line.read_options(words, os.environ, groups)[0]))

    def exposures(self) -> list[Exposure]:
        """Return all lines: for each port its TLS and its operations, then limits, files and models that are code.

        Reads the configs of all models, and blocks meanwhile.
        """
        exposed = [line for port in self.ports for line in (self.tls_of(port), *self.operations_of(port))]
        remedy = "leave its plugin out (--plugins), unless you know its operations and callers"
        exposed += [Exposure(name, "a protocol of its own", "not reviewed", True, (), remedy) for name in self.unknown]
        return [*exposed, *self._limits(), *self._files(), *self._models()]

    def as_dicts(self) -> list[dict[str, Any]]:
        """Return `exposures` as JSON values."""
        return [asdict(each) for each in self.exposures()]

    # ------------------------------------------------------------------ ports

    def _ports(self) -> Iterator[ReviewedPort]:
        for part in self._server.plugins.frontends.chosen(self._options):
            frontend = part(self._server.engine)
            if frontend.enabled:
                yield from self._port(frontend)

    def _port(self, frontend: Frontend) -> Iterator[ReviewedPort]:
        options, engine = self._options, self._server.engine
        if isinstance(frontend, GrpcHost):
            operations = [each.operation for each in engine.additions(GrpcMethod)]
            address, port, flags = options.grpc_address, options.grpc_port, ("--grpc-use-ssl",)
            yield ReviewedPort("gRPC", "grpc", address, port, frontend.tls, flags, _unique(operations))
            return
        served = frontend.served if isinstance(frontend, HttpHost) else frontend
        if not isinstance(served, HttpPort):
            self.unknown.append(served.name)
            return
        routes = list(served.make_routes()) + ([served.otherwise(served)] if served.otherwise is not None else [])
        if isinstance(served, FirstPort | ForwardingPort):
            routes += engine.additions(HttpRoute)
        forwarded = [Operation.METRICS] * (isinstance(served, ForwardingPort) and options.allow_metrics)
        address, port = served.place
        is_metrics = served.name == "metrics"
        yield ReviewedPort(
            "HTTP" if isinstance(served, FirstPort) else served.name,
            served.transport,
            address,
            port,
            served.tls,
            ("--metrics-use-ssl", "--metrics-address") if is_metrics else ("--http-use-ssl",),
            _unique([*(each.operation for each in routes), *forwarded]),
        )

    def tls_of(self, port: ReviewedPort) -> Exposure:
        """Return the line of the port itself."""
        if port.tls is not None:
            what = "TLS, clients need a certificate" if port.tls.mutual else "TLS"
            return Exposure(port.where, what, _reach(port), False)
        name = port.tls_flags[0].removesuffix("-use-ssl")
        remedy = f"{port.tls_flags[0]}=true"
        remedy += "" if name == "--metrics" else f" with {name}-server-cert and {name}-server-key"
        return Exposure(port.where, "no TLS", _reach(port), not port.is_local, port.tls_flags, remedy)

    # ------------------------------------------------------------------ operations

    def operations_of(self, port: ReviewedPort) -> list[Exposure]:
        """Return a line for each group of operations that the same callers may do."""
        groups: dict[tuple[str, bool, bool], list[AnyOperation]] = {}
        for operation in port.operations:
            who, is_control = self.allowed_callers(operation, port), _is_control(operation)
            is_exposed = not port.is_local and is_open(operation, who)
            groups.setdefault((who, is_exposed, is_control), []).append(operation)
        exposures = []
        for (who, is_exposed, is_control), operations in groups.items():
            what = ", ".join(map(str, operations))
            flags, remedy = _closing_control(operations) if is_control else _closing(port)
            exposures.append(Exposure(port.where, what, who, is_exposed, flags, remedy))
        return exposures

    def allowed_callers(self, operation: AnyOperation, port: ReviewedPort) -> str:
        """Return who may do ``operation`` at ``port``: `ANYBODY`, `NOBODY`, or a description."""
        options = self._options
        if operation in _LOADS and options.model_control_mode in _WITHOUT_LOADS:
            return NOBODY
        if operation in _REGIONS and not options.allow_client_shm:
            return NOBODY
        silent: list[str] = []
        conditions = ["clients with a certificate"] if port.tls is not None and port.tls.mutual else []
        # With --workers, the metrics page is the supervisor's, which has no interceptors.
        is_admitted = self._admission is not None and not (options.workers and port.transport == "metrics")
        for interceptor in self._admission.interceptors if self._admission is not None and is_admitted else ():
            if interceptor.first or interceptor.last:
                continue
            who = interceptor.allowed_callers(operation, port.transport)
            if who == NOBODY:
                return NOBODY
            if who is None:
                silent.append(f"'{interceptor.name}'")
            elif who:
                conditions.append(who)
        callers = " and ".join(conditions) or ANYBODY
        # An operation does not count as closed because of an interceptor that does not describe its callers.
        return f"{callers} whom {' and '.join(silent)} lets pass" if silent else callers

    # ------------------------------------------------------------------ limits and files

    def _limits(self) -> Iterator[Exposure]:
        options = self._options
        limits = [*fields(HttpLimitOptions)] * options.allow_http + [*fields(GrpcLimitOptions)] * options.allow_grpc
        for each in limits:
            if each.default and not getattr(options, each.name):
                flag = f"--{each.name.replace('_', '-')}"
                yield Exposure("limits", f"{flag}=0", "no limit", True, (flag,), f"no {flag}=0")
        reached = {"grpc" if port.transport == "grpc" else "http" for port in self.ports if not port.is_local}
        for protocol, host in (("http", options.http_server), ("grpc", options.grpc_server)):
            if protocol in reached and host != "native":
                flag, who = f"--{protocol}-server", "as far as its library bounds callers"
                if protocol == "grpc" and options.grpc_use_ssl:
                    who += ", which does not bound the number of TLS handshakes at once"
                yield Exposure("limits", f"{flag}={host}", who, True, (flag,), f"{flag}=native")

    def _files(self) -> Iterator[Exposure]:
        """Yield files that others can write, and operations that the flags of plugins open."""
        options = self._options
        for flag in ("http_server_key", "grpc_server_key"):
            path = getattr(options, flag)
            if path and (mode := _mode(path)) & 0o077:
                yield _file(path, "the private key can be read or written", mode, f"--{flag.replace('_', '-')}")
        for path in options.model_repository:
            if "://" not in path and (mode := _mode(path)) & 0o022:
                yield _file(path, "models, which are code, can be written", mode, "--model-repository")
        for group in options.plugin_options:
            for each in fields(group):  # type: ignore[arg-type]
                value, flag = getattr(group, each.name), f"--{group.name}-{each.name.replace('_', '-')}"
                if isinstance(value, str) and Path(value).is_file() and (mode := _mode(value)) & 0o022:
                    yield _file(value, "the file can be written", mode, flag)
                for text in each.metadata.get("opens", _nothing)(value):
                    yield Exposure(flag, text, "all callers of this feature", True, (flag,), f"{flag} without it")
        if options.dev:
            what, who = "Python models in the process of the server", "the models"
            yield Exposure("models", what, who, True, ("--dev",), "no --dev")

    # ------------------------------------------------------------------ models

    def _models(self) -> Iterator[Exposure]:
        for model in model_code(self._server):
            if isinstance(model, UnreadModel):
                yield Exposure("models", model.name or "all", f"not reviewed: {model.reason}", False)
            elif not model.in_server:
                yield Exposure("models", f"{model.name}, {model.code}", f"{_RUNS} a process of its own", False)
            else:
                flags = ("--backend-config", "--dev") if model.is_flag else ()
                remedy = "--backend-config=<backend>,isolation=process" if model.is_flag else _IN_PROCESS
                what = f"{model.name}, {model.code}"
                yield Exposure("models", what, f"{_RUNS} the server's process", True, flags, remedy)


def is_open(operation: AnyOperation, who: str) -> bool:
    """True if the profile ``public`` closes ``operation`` to ``who`` on a port that strangers reach."""
    if _is_control(operation):
        return who != NOBODY
    return who.startswith(ANYBODY) and operation.category != "health"


def _is_control(operation: AnyOperation) -> bool:
    return operation.category in _CONTROL or operation == Operation.REFLECTION


def _closing_control(operations: Sequence[AnyOperation]) -> tuple[tuple[str, ...], str]:
    """Return the flags that have opened ``operations``, and the flags that close them."""
    flags = ("--security-closed", "--model-control-mode", "--allow-client-shm")
    return flags, f"--security-closed={','.join(map(str, operations))}"


def _closing(port: ReviewedPort) -> tuple[tuple[str, ...], str]:
    """Return the flags that have opened operations of ``port`` to anybody, and the flags that close them."""
    flags = ("--access-open", *(("--metrics-address",) if port.transport == "metrics" else ()))
    mutual, restricted = "--http-use-ssl-mutual", "--http-restricted-api"
    if port.transport == "grpc":
        mutual, restricted = "--grpc-use-ssl-mutual", "--grpc-restricted-protocol"
    return flags, f"--access-keys (headrace-access), {mutual} or {restricted}"


def _unique(operations: Iterable[AnyOperation]) -> list[AnyOperation]:
    return list(dict.fromkeys(operations))


def _reach(port: ReviewedPort) -> str:
    return "this machine only" if port.is_local else "every machine that reaches the address"


def _nothing(_: object) -> Sequence[str]:
    return ()


def _mode(path: str) -> int:
    try:
        return Path(path).stat().st_mode & 0o777
    except (OSError, ValueError):
        return 0


def _file(path: str, what: str, mode: int, flag: str) -> Exposure:
    who = " and ".join(name for name, bits in (("its group", 0o070), ("all users", 0o007)) if mode & bits)
    return Exposure(path, f"{what} (mode {mode:04o})", who, True, (), f"chmod go-w,o-r '{path}' ({flag})")
