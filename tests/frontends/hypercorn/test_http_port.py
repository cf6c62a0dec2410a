"""A second port on hypercorn, and with its TLS."""

from __future__ import annotations

import ssl
import sys
from pathlib import Path
from types import ModuleType
from typing import ClassVar

import httpx

from headrace_testing.serving import on_loop, serve
from tests.core.headrace_hosts.test_tls_files import pem
from tests.core.headrace_http.test_http_port import TestScores as Scores
from tests.core.headrace_http.test_http_port import (
    scores,
    test_other_paths_may_have_one_answer_and_bodies_their_own_limit,
)
from tests.core.headrace_http.test_tls import files

__all__ = ["pem", "scores", "test_other_paths_may_have_one_answer_and_bodies_their_own_limit"]


class TestScoresOnHypercorn(Scores):
    http_server: ClassVar[str] = "hypercorn"


def test_the_second_port_has_the_tls_of_the_first(scores: ModuleType, pem: Path, tmp_path: Path) -> None:
    groups = [sys.modules["headrace_scores"].ScoresOptions(enabled=True, address="127.0.0.1", port=0)]
    trusted = ssl.create_default_context(cafile=str(pem / "a.crt"))
    with serve(tmp_path, listen=True, http_server="hypercorn", allow_metrics=True, metrics_port=0,
               plugin_options=groups, **files(pem)) as server:  # fmt: skip
        ports = {each.name: each.port for each in server.frontends}  # type: ignore[attr-defined]
        with httpx.Client(verify=trusted, http2=True) as client:
            for port, path in ((ports["hypercorn"], "/v2/health/live"), (ports["scores"], "/ping")):
                reply = client.get(f"https://localhost:{port}{path}")
                assert (reply.status_code, reply.http_version) == (200, "HTTP/2")
        assert httpx.get(f"http://127.0.0.1:{ports['metrics']}/metrics").status_code == 200
        on_loop(server, server.check_ready())
