"""The table of RPCs against tritonclient's service, its restrictions, and the small handlers."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from tritonclient.grpc import service_pb2 as triton

from headrace.builtins import register_interceptors
from headrace.config.option_parts import Restriction
from headrace.config.options import ServerOptions
from headrace.engine import Engine, RequestSubmitter
from headrace.errors import CallerError, Code, HeadraceError
from headrace.models.interceptors import InterceptorChain, make_interceptors
from headrace.models.open_streams import OpenStreams
from headrace.models.states import IndexEntry
from headrace_grpc.grpc_extensions import OWN
from headrace_grpc.own_methods import HEALTH_SERVICE, SERVICE
from headrace_grpc.rpc import Metadata, Rpc, only, serialize
from headrace_grpc.rpc_table import rpcs

#: docs/spec/behaviours.md section 2.1.
CATEGORIES = {
    "ServerLive": "health",
    "ServerReady": "health",
    "ModelReady": "health",
    "ServerMetadata": "metadata",
    "ModelMetadata": "metadata",
    "ModelInfer": "inference",
    "ModelStreamInfer": "inference",
    "ModelConfig": "model-config",
    "ModelStatistics": "statistics",
    "RepositoryIndex": "model-repository",
    "RepositoryModelLoad": "model-repository",
    "RepositoryModelUnload": "model-repository",
    "SystemSharedMemoryStatus": "shared-memory",
    "SystemSharedMemoryRegister": "shared-memory",
    "SystemSharedMemoryUnregister": "shared-memory",
    "CudaSharedMemoryStatus": "shared-memory",
    "CudaSharedMemoryRegister": "shared-memory",
    "CudaSharedMemoryUnregister": "shared-memory",
    "TraceSetting": "trace",
    "LogSettings": "logging",
}
SHM_DISABLED = "Client shared memory is disabled. Start the server with '--allow-client-shm=true' to enable."


@dataclass
class TrialService:
    """A server without models that records its loads."""

    options: ServerOptions = field(default_factory=ServerOptions)
    exiting: bool = False
    live: bool = True
    ready: bool = False
    calls: list[Any] = field(default_factory=list)
    off_loop_work: Any = None
    log: Any = None
    streams: OpenStreams = field(default_factory=OpenStreams)

    @property
    def admission(self) -> InterceptorChain | None:
        return make_interceptors(register_interceptors(), self.options)

    def submitter(self, single: Any = None, describe: Any = None) -> RequestSubmitter:
        return RequestSubmitter(cast("Any", None), single)

    def additions(self, kind: Any) -> list[Any]:
        made = [extension(cast("Engine", self)) for extension in OWN]
        return [addition(each) for each in made for addition in each.adds if issubclass(addition, kind)]

    async def list_repository(self, ready_only: bool) -> list[IndexEntry]:
        return [IndexEntry("m", "1", "READY")] if ready_only else [IndexEntry("m", "1", "READY"), IndexEntry("n")]

    async def load(self, name: str, parameters: dict[str, Any]) -> None:
        self.calls.append((name, parameters))

    async def unload(self, name: str, unload_dependents: bool) -> None:
        self.calls.append((name, unload_dependents))


@dataclass
class Call:
    metadata: Metadata = ()
    draining: bool = False
    has_left: bool = False
    peer: str = "127.0.0.1"
    certificate: None = None
    deadline_ns: int = 0
    streams: int = 1

    def only(self, name: bytes) -> str | None:
        return only(self.metadata, name)


def table(**options: Any) -> dict[str, Rpc]:
    return {rpc.name: rpc for rpc in rpcs(cast("Engine", TrialService(ServerOptions(**options))))}


def ask(service: TrialService, request: Any, metadata: Metadata = ()) -> Any:
    """Return the answer to the stock client's ``request``, as the stock client's message."""
    name = type(request).__name__.removesuffix("Request")
    (rpc,) = (rpc for rpc in rpcs(cast("Engine", service)) if rpc.name == name)
    assert rpc.unary is not None
    parsed = rpc.parse(request.SerializeToString())
    body = serialize(asyncio.run(cast("Any", rpc.unary(parsed, Call(metadata)))))
    return getattr(triton, f"{name}Response").FromString(body)


def refusal(service: TrialService, request: Any, metadata: Metadata = ()) -> tuple[Code, str]:
    with pytest.raises(HeadraceError) as caught:
        ask(service, request, metadata)
    return caught.value.code, caught.value.message


def test_every_rpc_is_there_in_its_category() -> None:
    (service,) = triton.DESCRIPTOR.services_by_name.values()
    found = {rpc.name: rpc.operation.category for rpc in table().values() if rpc.service == SERVICE}
    assert found == CATEGORIES
    assert set(found) == {method.name for method in service.methods}
    assert service.full_name == SERVICE


def test_health_is_restricted_like_the_other_health_calls() -> None:
    check = table()["Check"]
    assert (check.service, check.operation.category) == (HEALTH_SERVICE, "health")


@pytest.mark.parametrize("name", [*CATEGORIES, "Check"])
def test_no_rpc_passes_its_restriction_without_the_key(name: str) -> None:
    category = CATEGORIES.get(name, "health")
    rpc = table(grpc_restricted_protocol={category: Restriction("triton-grpc-protocol-k", "secret")})[name]

    async def call(*metadata: tuple[str, str | bytes]) -> None:
        request = rpc.parse(b"")
        if rpc.direct is not None:
            rpc.direct(request, Call(metadata), lambda answer: None)
        elif rpc.unary is not None:
            await rpc.unary(request, Call(metadata))
        else:
            assert rpc.stream is not None
            await rpc.stream(cast("Any", None), cast("Any", None), Call(metadata))

    text = "^This protocol is restricted, expecting header 'triton-grpc-protocol-k'$"
    for metadata in [(), (("triton-grpc-protocol-k", "wrong"),), (("k", "secret"),)]:
        with pytest.raises(CallerError, match=text):
            asyncio.run(call(*metadata))


def test_the_key_unlocks() -> None:
    key = Restriction("triton-grpc-protocol-Key", "secret")  # grpc sends names in lower case
    service = TrialService(ServerOptions(grpc_restricted_protocol={"health": key}))
    assert ask(service, triton.ServerLiveRequest(), (("triton-grpc-protocol-key", "secret"),)).live


def test_other_categories_stay_open() -> None:
    service = TrialService(
        ServerOptions(grpc_restricted_protocol={"metadata": Restriction("triton-grpc-protocol-k", "v")})
    )
    assert ask(service, triton.ServerLiveRequest()).live


def test_an_exiting_server_is_unavailable() -> None:
    service = TrialService(exiting=True)
    for request in (triton.ServerLiveRequest(), triton.ServerReadyRequest()):
        assert refusal(service, request) == (Code.UNAVAILABLE, "Server exiting")


def test_the_index_lists_models() -> None:
    models = ask(TrialService(), triton.RepositoryIndexRequest()).models
    assert [(m.name, m.version, m.state) for m in models] == [("m", "1", "READY"), ("n", "", "")]
    assert [m.name for m in ask(TrialService(), triton.RepositoryIndexRequest(ready=True)).models] == ["m"]


@pytest.mark.parametrize(
    "request_type",
    [triton.RepositoryIndexRequest, triton.RepositoryModelLoadRequest, triton.RepositoryModelUnloadRequest],
)
def test_repository_names_are_not_supported(request_type: Any) -> None:
    text = "'repository_name' specification is not supported"
    assert refusal(TrialService(), request_type(repository_name="r")) == (Code.UNSUPPORTED, text)


def test_load_parameters_arrive() -> None:
    service, request = TrialService(), triton.RepositoryModelLoadRequest(model_name="m")
    request.parameters["config"].string_param = "{}"
    request.parameters["file:1/model.onnx"].bytes_param = b"\xff\x00"
    ask(service, request)
    assert service.calls == [("m", {"config": "{}", "file:1/model.onnx": b"\xff\x00"})]


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("config", "invalid value type for load parameter 'config', expected string_param."),
        ("file:a", "invalid value type for load parameter 'file:a', expected bytes_param."),
        ("other", "unrecognized load parameter 'other'."),
    ],
)
def test_wrong_load_parameters_are_refused(key: str, text: str) -> None:
    request = triton.RepositoryModelLoadRequest(model_name="m")
    request.parameters[key].bool_param = True
    assert refusal(TrialService(), request) == (Code.INVALID_ARGUMENT, text)


def test_unload_parameters_arrive() -> None:
    service, request = TrialService(), triton.RepositoryModelUnloadRequest(model_name="m")
    ask(service, request)
    request.parameters["unload_dependents"].bool_param = True
    ask(service, request)
    assert service.calls == [("m", False), ("m", True)]
    request.parameters["unload_dependents"].int64_param = 1
    text = "invalid value type for 'unload_dependents' parameter, expected bool_param."
    assert refusal(service, request) == (Code.INVALID_ARGUMENT, text)


@pytest.mark.parametrize(
    "request_type",
    [
        triton.SystemSharedMemoryRegisterRequest,
        triton.SystemSharedMemoryUnregisterRequest,
        triton.CudaSharedMemoryRegisterRequest,
        triton.CudaSharedMemoryUnregisterRequest,
    ],
)
def test_shared_memory_is_refused(request_type: Any) -> None:
    assert refusal(TrialService(), request_type(name="r")) == (Code.UNSUPPORTED, SHM_DISABLED)


def test_there_are_no_regions() -> None:
    assert not ask(TrialService(), triton.SystemSharedMemoryStatusRequest()).regions
    assert not ask(TrialService(), triton.CudaSharedMemoryStatusRequest()).regions
    for kind, request in (
        ("system", triton.SystemSharedMemoryStatusRequest(name="r")),
        ("cuda", triton.CudaSharedMemoryStatusRequest(name="r")),
    ):
        assert refusal(TrialService(), request) == (Code.NOT_FOUND, f"Unable to find {kind} shared memory region: 'r'")


def test_settings_are_refused_in_one_line() -> None:
    for request in (triton.TraceSettingRequest(), triton.LogSettingsRequest()):
        code, text = refusal(TrialService(), request)
        assert code is Code.UNSUPPORTED
        assert text
        assert "\n" not in text


def test_no_file_can_be_set_over_the_network() -> None:
    trace, log = triton.TraceSettingRequest(), triton.LogSettingsRequest()
    trace.settings["trace_file"].value.append("/tmp/x")
    log.settings["log_file"].string_param = "/tmp/x"
    location = "file location can not be updated through network protocol"
    assert refusal(TrialService(), trace) == (Code.UNSUPPORTED, f"trace {location}")
    assert refusal(TrialService(), log) == (Code.UNSUPPORTED, f"log {location}")
