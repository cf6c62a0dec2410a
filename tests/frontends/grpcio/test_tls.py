"""The files of TLS, which grpcio itself says nothing about."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from headrace import ServerOptions
from headrace_grpcio.grpcio_server import _certificate, credentials_of
from headrace_hosts.tls_files import grpc_tls
from tests.core.headrace_hosts.test_tls_files import pem, test_a_file_that_will_not_do_is_named_with_its_flag

__all__ = ["pem", "test_a_file_that_will_not_do_is_named_with_its_flag"]


@pytest.fixture
def make() -> Callable[[ServerOptions], object]:
    def make(options: ServerOptions) -> object:
        files = grpc_tls(options)
        assert files is not None
        return credentials_of(files)

    return make


def test_a_client_has_one_object_for_its_certificate() -> None:
    names = ((b"tenant",), (("DNS", b"tenant.example"),))
    found = _certificate(*names)
    assert found is _certificate(*names)
    assert found == {"subject": ((("commonName", "tenant"),),), "subjectAltName": (("DNS", "tenant.example"),)}
    assert found is not _certificate((b"tenant",), ())
