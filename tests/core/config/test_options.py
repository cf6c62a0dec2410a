"""The options compared with the list of tritonserver's flags, copied by hand from its documentation."""

from __future__ import annotations

import re
from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import pytest

import headrace
from headrace.config import support
from headrace.config.option_parts import HttpLimitOptions, Restriction, TraceSetting
from headrace.config.options import ServerOptions
from headrace.config.support import SUPPORT, FlagState
from headrace.errors import ConfigError
from headrace.server import Server
from headrace_http.caller_limits import port_limits

# Name and default, as written in docs/spec/behaviours.md section 8. Flags without a default are left out.
TRITON_DEFAULTS = """
id triton
exit-timeout-secs 30
log-verbose 0
log-info True
log-warning True
log-error True
log-format default
exit-on-error True
disable-auto-complete-config False
strict-readiness True
model-control-mode none
repository-poll-secs 15
model-load-thread-count 4
model-load-retry-count 0
model-namespacing False
dev False
enable-peer-access True
allow-http True
http-address 0.0.0.0
http-port 8000
reuse-http-port False
http-thread-count 8
http-max-input-size 67108864
allow-grpc True
grpc-address 0.0.0.0
grpc-port 8001
grpc-max-decompressed-size 67108864
reuse-grpc-port False
grpc-infer-thread-count 2
grpc-infer-allocation-pool-size 8
grpc-max-response-pool-size 2147483647
grpc-use-ssl False
grpc-use-ssl-mutual False
grpc-infer-response-compression-level none
grpc-keepalive-time 7200000
grpc-keepalive-timeout 20000
grpc-keepalive-permit-without-calls False
grpc-http2-max-pings-without-data 2
grpc-http2-min-recv-ping-interval-without-data 300000
grpc-http2-max-ping-strikes 2
allow-sagemaker False
sagemaker-port 8080
sagemaker-thread-count 8
allow-vertex-ai False
vertex-ai-port 8080
vertex-ai-thread-count 8
allow-metrics True
allow-gpu-metrics True
allow-cpu-metrics True
metrics-port 8002
metrics-interval-ms 2000
rate-limit off
pinned-memory-pool-byte-size 268435456
buffer-manager-thread-count 0
allow-client-shm False
"""

#: The packages of the distribution: `headrace`, and its frontends beside it.
SOURCE = Path(headrace.__file__).parents[1]


@pytest.mark.parametrize("line", TRITON_DEFAULTS.split("\n")[1:-1])
def test_default_is_that_of_tritonserver(line: str) -> None:
    flag, default = line.split()
    assert str(getattr(ServerOptions(), flag.replace("-", "_"))) == default


def test_options_do_not_change_after_the_start() -> None:
    with pytest.raises(FrozenInstanceError):
        ServerOptions().http_port = 1  # type: ignore[misc]


def test_metrics_use_the_address_of_http_by_default() -> None:
    assert ServerOptions(http_address="127.0.0.1").metrics_address == "127.0.0.1"
    assert ServerOptions(http_address="127.0.0.1", metrics_address="::1").metrics_address == "::1"


def test_without_metrics_there_are_no_device_metrics() -> None:
    options = ServerOptions(allow_metrics=False)
    assert (options.allow_gpu_metrics, options.allow_cpu_metrics) == (False, False)


def test_mutual_tls_is_tls() -> None:
    assert ServerOptions(grpc_use_ssl_mutual=True).grpc_use_ssl


def test_repositories_are_a_sorted_set() -> None:
    assert ServerOptions(model_repository=("b", "a", "b")).model_repository == ("a", "b")


def test_numbers_below_their_floor_are_raised_to_it() -> None:
    options = ServerOptions(exit_timeout_secs=-5, model_load_thread_count=0, model_load_retry_count=-1)
    assert (options.exit_timeout_secs, options.model_load_thread_count, options.model_load_retry_count) == (0, 1, 0)


def test_a_restriction_does_not_print_its_secret() -> None:
    options = ServerOptions(http_restricted_api={"health": Restriction("key", "canary")})
    assert "canary" not in repr(options)


def test_the_table_of_support_is_total() -> None:
    assert set(SUPPORT) == {field.name for field in fields(ServerOptions)}


def test_an_unsupported_option_is_refused_with_the_reason() -> None:
    assert all(bool(support.reason) == (support.state is not FlagState.BUILT) for support in SUPPORT.values())


@pytest.mark.parametrize("name", [name for name, support in SUPPORT.items() if support.state is FlagState.BUILT])
def test_an_option_called_built_is_read_somewhere(name: str) -> None:
    readers = [
        path
        for path in (*SOURCE.rglob("*.py"), *SOURCE.parents[1].glob("*/*/src/**/*.py"))
        if not path.is_relative_to(SOURCE / "headrace/config")
        and path.name not in ("flags.py", "command_line.py", "startup.py")
    ]
    # The registry of frontends reads the options of all protocols in one line.
    read = r"\{protocol\}_server" if name in ("http_server", "grpc_server") else rf"\.{name}\b"
    assert any(re.search(read, path.read_text()) for path in readers)


REFUSED = {
    "model_namespacing": True,
}


def test_every_refused_option_is_tried_here() -> None:
    assert set(REFUSED) == {name for name, support in SUPPORT.items() if support.state is FlagState.REFUSED}


@pytest.mark.parametrize("name", REFUSED)
def test_option_that_must_not_be_ignored_is_refused_by_name(name: str) -> None:
    options = ServerOptions(**{name: REFUSED[name]})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"^--{name.replace('_', '-')} is refused: "):
        support.refuse(options)


def test_tracing_without_its_distribution_is_refused_with_the_command_that_installs_it() -> None:
    options = ServerOptions(plugins=("http",), trace_config=(TraceSetting("", "rate", "1"),))
    with pytest.raises(ConfigError, match=r"^--trace-config is refused: .*pip install headrace-trace"):
        Server(options)


def test_option_without_effect_is_logged_once() -> None:
    options = ServerOptions(http_thread_count=3, cache_directory="/opt/c")
    lines = support.without_effect(options)
    assert [line.split()[0] for line in lines] == ["--http-thread-count", "--cache-directory"]


def test_the_defaults_are_neither_refused_nor_remarked_upon() -> None:
    support.refuse(ServerOptions())
    assert support.without_effect(ServerOptions()) == []


def test_each_option_is_in_one_class_of_options() -> None:
    """If two classes had one field, the default of the second would be lost."""
    own = [name for kind in ServerOptions.__mro__ for name in vars(kind).get("__annotations__", ())]
    assert sorted(own) == sorted(each.name for each in fields(ServerOptions))


def test_a_part_takes_the_server_options_as_its_own() -> None:
    assert port_limits(ServerOptions(http_max_connections=3)).connections == 3
    assert port_limits(HttpLimitOptions(http_max_connections=3)).connections == 3


def test_an_option_that_needs_an_extension_is_refused_without_it() -> None:
    options = ServerOptions(allow_client_shm=True)
    support.refuse_without({"system_shared_memory"}, options)
    support.refuse_without(set(), ServerOptions())
    with pytest.raises(ConfigError, match=r"^--allow-client-shm is refused: .*: pip install headrace-shm$"):
        support.refuse_without({"cuda_shared_memory"}, options)
