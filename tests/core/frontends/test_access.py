"""Access rules: calls by docs/spec/behaviours.md sections 1.2 and 2.2, and docs/spec/security.md C23 and C28; files of
a load request by the addresses of RFC 5735 and RFC 4291, and the rest by a table."""

from __future__ import annotations

import pytest

from headrace.config.option_parts import ModelFilesFrom, Restriction
from headrace.config.options import ServerOptions
from headrace.engine import Caller, Operation
from headrace.errors import CallerError, Code, PermissionDenied, Unsupported
from headrace.frontends.access import ModelFilesRule, RestrictedApis, host_of, is_loopback

RULES = {"inference": Restriction("Admin-Key", "s3cret"), "health": Restriction("h", "")}
RESTRICTED = RestrictedApis(ServerOptions(http_restricted_api=RULES, grpc_restricted_protocol=RULES))
FILES = ["config", "file:1/model.py"]


def admit(transport: str, operation: Operation, **headers: str) -> None:
    RESTRICTED.admit(Caller(transport, header=lambda name: headers.get(name.replace("-", "_"))), operation, "m")


@pytest.mark.parametrize("transport", ["http", "grpc"])
def test_right_value_opens(transport: str) -> None:
    admit(transport, Operation.INFER, admin_key="s3cret")


@pytest.mark.parametrize("key", ["", "S3cret", "s3cret ", "s3cre", "s3cret\0", "\xff", "é"])
def test_any_other_value_is_refused_without_saying_the_right_one(key: str) -> None:
    with pytest.raises(PermissionDenied, match=r"^This API is restricted, expecting header 'Admin-Key'$"):
        admit("http", Operation.INFER, admin_key=key)
    with pytest.raises(CallerError, match=r"^This protocol is restricted, expecting header 'Admin-Key'$") as refused:
        admit("grpc", Operation.INFER, admin_key=key)
    assert refused.value.code is Code.UNAVAILABLE


def test_a_key_beyond_ascii_is_compared_byte_by_byte() -> None:
    key = ServerOptions(http_restricted_api={"health": Restriction("h", "é")})
    sent = "é".encode().decode("latin-1")  # as a host reads the header
    RestrictedApis(key).admit(Caller("http", header=lambda name: sent), Operation.LIVE, "")


def test_missing_header_is_refused_even_if_the_value_is_empty() -> None:
    with pytest.raises(PermissionDenied):
        admit("http", Operation.LIVE)
    admit("http", Operation.LIVE, h="")


def test_other_categories_and_transports_are_open() -> None:
    admit("http", Operation.SERVER_METADATA)
    for transport in ("metrics", "model", "program", "other"):
        admit(transport, Operation.INFER)


def test_nothing_is_asked_where_nothing_is_restricted() -> None:
    assert RESTRICTED.enabled
    assert not RestrictedApis(ServerOptions()).enabled


@pytest.mark.parametrize(
    "address", ["127.0.0.1", "127.255.255.254", "::1", "::ffff:127.0.0.1", "::FFFF:7f00:1", "0:0:0:0:0:0:0:1", "::1%lo"]
)
def test_loopback_is_the_machine_itself(address: str) -> None:
    assert is_loopback(address)


@pytest.mark.parametrize(
    "address",
    [
        *("192.0.2.2", "10.0.0.1", "128.0.0.1", "0.0.0.0", "::", "fe80::1%eth0", "fd00::2", "::ffff:192.0.2.2"),
        *("", "localhost", "127.0.0.1:80", "127.1", "2130706433", "0x7f000001", "127.0.0.1.example.org", "/run/socket"),
    ],
)
def test_nothing_else_is(address: str) -> None:
    assert not is_loopback(address)


@pytest.mark.parametrize(
    ("peername", "host"),
    [
        (("127.0.0.1", 4711), "127.0.0.1"),
        (("::1", 4711, 0, 0), "::1"),
        (["192.0.2.2", 1], "192.0.2.2"),
        ("", ""),
        ("/run/x", ""),
        (None, ""),
        (b"\0x", ""),
    ],
)
def test_a_socket_without_an_address_has_none(peername: object, host: str) -> None:
    assert host_of(peername) == host


@pytest.mark.parametrize("header", ["", "x-forwarded-for", "forwarded", "via", "x-real-ip", "origin", "sec-fetch-site"])
@pytest.mark.parametrize("address", ["127.0.0.1", "192.0.2.2", ""])
@pytest.mark.parametrize("has_key", [False, True])
@pytest.mark.parametrize("allowed", ["loopback", "any", "none"])
def test_files_are_taken_from_the_machine_and_by_key(
    allowed: ModelFilesFrom, has_key: bool, address: str, header: str
) -> None:
    model_files_rule = ModelFilesRule(allowed, has_key, "--http-restricted-api")
    expected = allowed == "any" or (allowed == "loopback" and (has_key or (address == "127.0.0.1" and not header)))
    headers = {header: b"x"} if header else {}
    if expected:
        model_files_rule.check(FILES, address, headers.get)
    else:
        with pytest.raises(Unsupported, match="--model-files-from=") as refused:
            model_files_rule.check(FILES, address, headers.get)
        assert header in refused.value.message or allowed == "none"


@pytest.mark.parametrize("allowed", ["loopback", "none"])
def test_a_load_by_name_and_with_a_config_is_everybodys(allowed: ModelFilesFrom) -> None:
    model_files_rule = ModelFilesRule(allowed, False, "--http-restricted-api")
    model_files_rule.check([], "192.0.2.2", {"origin": "x"}.get)
    model_files_rule.check(["config"], "192.0.2.2", {"origin": "x"}.get)
