"""The table of flags against docs/spec/behaviours.md section 8, the options, the help and docs/flags.md."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from headrace.config.options import ServerOptions
from headrace.config.support import SUPPORT
from headrace_cli import usage
from headrace_cli.flags import FLAGS, GROUPS, Flag

DOCUMENT = Path(__file__).parents[3] / "docs" / "flags.md"

# Every flag of tritonserver but --help, copied from docs/spec/behaviours.md section 8.
TRITON = """
id exit-timeout-secs log-verbose log-info log-warning log-error log-format log-file
model-repository model-store exit-on-error disable-auto-complete-config strict-readiness model-control-mode
repository-poll-secs load-model model-config-name model-load-thread-count model-load-retry-count model-namespacing
enable-peer-access
allow-http http-address http-port reuse-http-port http-header-forward-pattern http-thread-count http-max-input-size
http-restricted-api
allow-grpc grpc-address grpc-port reuse-grpc-port grpc-header-forward-pattern grpc-infer-thread-count
grpc-infer-allocation-pool-size grpc-max-response-pool-size grpc-use-ssl grpc-use-ssl-mutual grpc-server-cert
grpc-server-key grpc-root-cert grpc-infer-response-compression-level grpc-keepalive-time grpc-keepalive-timeout
grpc-keepalive-permit-without-calls grpc-http2-max-pings-without-data grpc-http2-min-recv-ping-interval-without-data
grpc-http2-max-ping-strikes grpc-max-connection-age grpc-max-connection-age-grace grpc-restricted-protocol
allow-sagemaker sagemaker-port sagemaker-safe-port-range sagemaker-thread-count
allow-vertex-ai vertex-ai-port vertex-ai-thread-count vertex-ai-default-model
allow-metrics allow-gpu-metrics allow-cpu-metrics metrics-address metrics-port metrics-interval-ms metrics-config
trace-config trace-file trace-level trace-rate trace-count trace-log-frequency
cache-config cache-directory response-cache-byte-size backend-directory backend-config repoagent-directory rate-limit
rate-limit-resource pinned-memory-pool-byte-size cuda-memory-pool-byte-size cuda-virtual-address-size
min-supported-compute-capability buffer-manager-thread-count host-policy model-load-gpu-limit allow-client-shm
strict-model-config
"""
OURS = {
    "allow-external-links",
    "dev",
    "grpc-max-decompressed-size",
    "grpc-max-held-size",
    "grpc-max-received-size",
    "grpc-max-stream-size",
    "grpc-max-unread-size",
    "grpc-message-timeout-secs",
    "grpc-server",
    "grpc-unread-timeout-secs",
    "http-header-timeout-secs",
    "http-keepalive-timeout-secs",
    "http-max-connections",
    "http-max-held-size",
    "http-min-data-rate",
    "http-root-cert",
    "http-server",
    "http-server-cert",
    "http-server-key",
    "http-stall-timeout-secs",
    "http-use-ssl",
    "http-use-ssl-mutual",
    "listen-while-loading",
    "memory-budget",
    "memory-wait-secs",
    "metrics-use-ssl",
    "model-files-from",
    "plugins",
    "strict-parameters",
    "workers",
}


def documented() -> dict[str, tuple[str, str]]:
    """Each flag with its default and state, as in docs/flags.md."""
    rows = re.findall(r"^\| `--([a-z0-9-]+)[^`]*` \| (.*?) \| (.*?) \|", DOCUMENT.read_text(), re.MULTILINE)
    return {name: (default, state) for name, default, state in rows}


def test_the_flags_are_tritons_and_some_of_our_own() -> None:
    assert set(FLAGS) == set(TRITON.split()) | OURS


def test_every_flag_stands_in_one_group() -> None:
    assert sum(map(len, GROUPS.values())) == len(FLAGS)


def test_flags_and_options_cover_each_other() -> None:
    options = {field.name for field in fields(ServerOptions)} - {"plugin_options"}
    assert {flag.option for flag in FLAGS.values()} == options


@pytest.mark.parametrize("flag", FLAGS.values(), ids=lambda flag: flag.name)
def test_the_document_has_the_default_and_the_state_of_each_flag(flag: Flag) -> None:
    known = usage.default(flag)
    assert documented()[flag.name] == (f"`{known}`" if known else "-", SUPPORT[flag.option].state.value)


def test_the_document_has_no_flag_that_does_not_exist() -> None:
    assert set(documented()) == set(FLAGS)


@pytest.mark.parametrize("flag", FLAGS.values(), ids=lambda flag: flag.name)
def test_the_help_shows_each_flag_with_an_example(flag: Flag) -> None:
    assert f"\n  --{flag.name}" in usage.render()
    assert flag.example or flag.read is None


def test_the_help_keeps_within_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert max(map(len, usage.render().splitlines())) <= 120
