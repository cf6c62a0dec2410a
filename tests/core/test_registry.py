"""Which frontends a server runs: one host of each protocol, and all that are no host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest

from headrace import ConfigError, Frontend, OptionGroup, ServerOptions
from headrace.registry import FrontendRegistry, PluginInfo
from headrace_grpc.frontend import GrpcFrontend
from headrace_http.frontend import HttpFrontend
from headrace_http.metrics_frontend import MetricsFrontend


class Other(HttpFrontend):
    name: ClassVar[str] = "other"


@dataclass(frozen=True)
class OtherOptions(OptionGroup):
    name: ClassVar[str] = "other"
    certificate: str = ""


@pytest.fixture
def registry() -> FrontendRegistry:
    made, info = FrontendRegistry([]), PluginInfo("test", "test", "0")
    for part in (GrpcFrontend, HttpFrontend, MetricsFrontend, Other):
        made.add(part, info)
    return made


def test_the_native_hosts_run_unless_another_is_named(registry: FrontendRegistry) -> None:
    assert registry.chosen(ServerOptions()) == [GrpcFrontend, HttpFrontend, MetricsFrontend]
    assert registry.chosen(ServerOptions(http_server="other")) == [GrpcFrontend, MetricsFrontend, Other]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (ServerOptions(http_server="oter"), "--http-server=oter: .* did you mean 'other'"),
        (ServerOptions(http_server="grpc"), "--http-server=grpc: 'grpc' is no host of http; there are: native, other$"),
        (ServerOptions(grpc_server="metrics"), "'metrics' is no host of grpc; there are: native$"),
        (ServerOptions(http_server="hypercorn"), "--http-server=hypercorn: .*: pip install headrace-hypercorn;"),
        (ServerOptions(grpc_server="grpcio"), "--grpc-server=grpcio: .*: pip install headrace-grpcio;"),
    ],
)
def test_an_unknown_host_is_refused_by_name(registry: FrontendRegistry, options: ServerOptions, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        registry.chosen(options)


def test_options_of_a_host_that_does_not_run_are_refused(registry: FrontendRegistry) -> None:
    """Otherwise an operator who requests TLS and omits the host would serve without it."""
    options = ServerOptions(plugin_options=[OtherOptions(certificate="server.crt")])
    with pytest.raises(ConfigError, match=r"the options --other-\.\.\. have no effect without --http-server=other"):
        registry.chosen(options)
    registry.chosen(ServerOptions(plugin_options=[OtherOptions()]))
    assert Other in registry.chosen(ServerOptions(http_server="other", plugin_options=options.plugin_options))


def test_a_host_of_an_unknown_protocol_is_refused(registry: FrontendRegistry) -> None:
    class Misspelt(HttpFrontend):
        name: ClassVar[str] = "misspelt"
        protocol: ClassVar[str] = "htp"

    with pytest.raises(TypeError, match="frontend misspelt hosts the protocol 'htp'; protocols with hosts are http"):
        registry.require(Misspelt)
    assert issubclass(Misspelt, Frontend)
