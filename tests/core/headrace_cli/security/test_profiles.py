"""``--security-profile``: the operations that it closes, and its warnings about flags that open more."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path

import pytest

from headrace import Caller, ConfigError, Interceptor, Operation, PermissionDenied, Server
from headrace.frontends.access import RestrictedApis
from headrace_cli.command_line import read_options
from headrace_cli.security.profile_words import PROFILES, with_profile
from headrace_cli.security.profiles import enforce
from headrace_cli.security.review import SecurityReview
from headrace_cli.serve import enforce_profile, find_plugins

PUBLIC = "--security-profile=public"
TLS = [
    *("--http-use-ssl=true", "--http-server-cert=a.crt", "--http-server-key=a.key"),
    *("--grpc-use-ssl=true", "--grpc-server-cert=a.crt", "--grpc-server-key=a.key"),
]
#: A header for all that is not closed, and not health.
HEADERS = [
    f"--{flag}=inference,metadata,model-config,statistics:key=s3cret"
    for flag in ("http-restricted-api", "grpc-restricted-protocol")
]


@pytest.fixture
def models(tmp_path: Path) -> str:
    return f"--model-repository={tmp_path}"


def composed(*words: str) -> tuple[Server, Sequence[str]]:
    """A server with the flags ``words`` that has not started, and its command line."""
    all_words = with_profile(words)
    return Server(read_options(all_words, {}, list(find_plugins(all_words).options))[0]), all_words


def test_a_server_with_tls_and_credentials_starts_without_a_word(models: str, caplog: pytest.LogCaptureFixture) -> None:
    server, words = composed(models, PUBLIC, *TLS, *HEADERS)
    enforce(server, words)
    assert not caplog.records
    assert not any(each.is_open for each in SecurityReview(server).exposures())
    assert server.options.metrics_address == "127.0.0.1"


def test_without_a_profile_nothing_is_checked(models: str) -> None:
    enforce_profile(*composed(models))
    enforce_profile(*composed(models, PUBLIC, "--security-profile=none"))


@pytest.mark.parametrize(
    ("words", "texts"),
    [
        (TLS[3:] + HEADERS, ["HTTP on 0.0.0.0:8000: no TLS", "give --http-use-ssl=true with --http-server-cert and"]),
        (TLS[:3] + HEADERS, ["gRPC on 0.0.0.0:8001: no TLS", "give --grpc-use-ssl=true with --grpc-server-cert and"]),
        (TLS + HEADERS[1:], ["HTTP on 0.0.0.0:8000: ", "infer", ": anybody; give --access-keys (headrace-access), "]),
        (TLS + HEADERS[:1], ["gRPC on 0.0.0.0:8001: ", "infer", "--grpc-use-ssl-mutual or --grpc-restricted-protocol"]),
    ],
)
def test_operation_open_without_a_flag_is_named_and_the_server_does_not_start(
    models: str, words: list[str], texts: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ConfigError, match=r"^--security-profile=public starts no server that is open"):
        enforce(*composed(models, PUBLIC, *words))
    (record,) = caplog.records
    assert record.levelname == "ERROR"
    assert all(text in record.message for text in texts), record.message


def test_an_interceptor_without_allowed_callers_closes_nothing(
    models: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RestrictedApis, "allowed_callers", Interceptor.allowed_callers)
    with pytest.raises(ConfigError):
        enforce(*composed(models, PUBLIC, *TLS, *HEADERS))
    assert ": anybody whom 'restricted-apis' lets pass; give " in caplog.text


def test_an_unknown_frontend_counts_as_open(models: str) -> None:
    review = SecurityReview(composed(models, PUBLIC, *TLS, *HEADERS)[0])
    review.unknown.append("lines")
    assert [str(each) for each in review.exposures() if each.is_open] == ["lines: a protocol of its own: not reviewed"]


@pytest.mark.parametrize(
    ("flags", "warning"),
    [
        (["--http-use-ssl=false"], "--http-use-ssl opens: HTTP on 0.0.0.0:8000: no TLS"),
        (["--metrics-addr", "0.0.0.0"], "--metrics-address opens: metrics on 0.0.0.0:8002: no TLS"),
        (["--metrics-address=0.0.0.0"], "--metrics-address opens: metrics on 0.0.0.0:8002: no TLS"),
        (["--security-closed=trace"], "--security-closed opens: HTTP on 0.0.0.0:8000: index"),
        (["--http-max-connections=0"], "--http-max-connections opens: limits: --http-max-connections=0: no limit"),
        (["--dev"], "--dev opens: models: Python models in the process of the server"),
        (
            ["--security-closed=", "--model-control-mode=explicit"],
            "--security-closed, --model-control-mode opens: HTTP on 0.0.0.0:8000: index, load, unload",
        ),
    ],
)
def test_a_flag_overrides_the_profile_with_a_warning_about_the_operations_it_opens(
    models: str, flags: list[str], warning: str, caplog: pytest.LogCaptureFixture
) -> None:
    enforce(*composed(models, PUBLIC, *TLS, *HEADERS, *flags))
    assert any(f"{PUBLIC}: {warning}" in record.message for record in caplog.records), caplog.text
    assert {record.levelname for record in caplog.records} == {"WARNING"}


def test_ports_that_only_this_machine_reaches_need_nothing(models: str, caplog: pytest.LogCaptureFixture) -> None:
    enforce(*composed(models, PUBLIC, "--http-address=127.0.0.1", "--grpc-address=::1"))
    assert not caplog.records


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--security-profile=nope"], "expected <none|public>, got: nope"),
        (["--security-profile"], "option '--security-profile' requires an argument"),
        (["--security-closed=load,no such"], "--security-closed: 'no such' is no operation and no category"),
    ],
)
def test_a_wrong_value_is_named(models: str, words: list[str], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        composed(models, *words)
    assert text in caught.value.message


def test_the_words_of_a_profile_come_first_and_the_last_profile_counts() -> None:
    assert with_profile(["a"]) == ["a"]
    assert with_profile(["--security-profile", "public", "a"])[: len(PROFILES["public"])] == [*PROFILES["public"]]
    assert with_profile([PUBLIC, "--security-profile=none"]) == [PUBLIC, "--security-profile=none"]


def test_a_closed_operation_is_refused_to_every_caller_and_not_to_the_program(models: str) -> None:
    server, _ = composed(models, "--security-closed=load,trace")
    admission = server.engine.admission
    assert admission is not None
    for operation, transport in product((Operation.LOAD, Operation.TRACE_SETTINGS), ("http", "grpc", "metrics")):
        with pytest.raises(PermissionDenied, match=f"^the operation '{operation}' is closed on this server$"):
            admission.admit(Caller(transport), operation, "m")
        admission.admit(Caller("program"), operation, "m")
    admission.admit(Caller("http"), Operation.UNLOAD, "m")
