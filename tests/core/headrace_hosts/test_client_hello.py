"""The groups of a ClientHello, of the standard library's client and of damaged ones."""

from __future__ import annotations

from pathlib import Path

from headrace_hosts.client_hello import offered_groups
from tests.core.headrace_hosts.test_handshakes import hello
from tests.core.headrace_hosts.test_tls_files import pem

__all__ = ["pem"]
X25519, P256 = 29, 23


def test_the_groups_of_a_client_are_read_from_whatever_it_sends(pem: Path) -> None:
    words = hello(pem)
    assert offered_groups(words)[0] == X25519
    assert P256 in offered_groups(words)
    for size in range(len(words)):
        offered_groups(words[:size])
        offered_groups(words[:size] + b"\xff" * 300)
