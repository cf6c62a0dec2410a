"""Key sets at addresses: a real server on the loopback answers, or does not."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from headrace import Operation, Unauthenticated, Unavailable, Watch
from headrace_access import AccessControl, key_sets
from headrace_hosts import file_changes
from tests.interceptors.access.access_files import (
    OTHER_RSA,
    RSA,
    TENANT,
    access_of,
    caller_with,
    extend,
    jwk,
    keys,
    make,
    token,
    write_issuer,
)

K1 = json.dumps({"keys": [jwk(RSA, kid="k1")]}).encode()
K2 = json.dumps({"keys": [jwk(OTHER_RSA, kid="k2")]}).encode()


class Issuer:
    """Answers each request by ``answer``, which writes to a socket file."""

    def __init__(self) -> None:
        self.requests = 0
        self.answer: Callable[[BaseHTTPRequestHandler], None] = sends(K1)
        self.free = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.requests += 1
                outer.answer(self)

            def log_message(self, *arguments: Any) -> None:
                """Print nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_port}/jwks.json"


def sends(content: bytes, status: int = 200, **headers: str) -> Callable[[BaseHTTPRequestHandler], None]:
    def answer(request: BaseHTTPRequestHandler) -> None:
        request.send_response(status)
        for name, value in headers.items():
            request.send_header(name, value)
        request.end_headers()
        request.wfile.write(content)

    return answer


@pytest.fixture
def issuer() -> Iterator[Issuer]:
    issuer = Issuer()
    thread = threading.Thread(target=issuer.server.serve_forever, args=(0.01,))
    thread.start()
    yield issuer
    issuer.free.set()
    issuer.server.shutdown()
    thread.join()
    issuer.server.server_close()


@pytest.fixture
def path(tmp_path: Path, issuer: Issuer) -> Path:
    path = tmp_path / "access.json"
    make(path, alice=TENANT)
    write_issuer(path, keys=issuer.address)
    return path


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The monotonic time of the key sets, which tests set."""
    now_s = [1000.0]
    monkeypatch.setattr(key_sets, "monotonic", lambda: now_s[0])
    return now_s


async def principal_or_reason(access: AccessControl, credential: str) -> str:
    """Return the principal of ``credential``, or why it is refused."""
    caller = caller_with(credential)
    try:
        waiting = access.admit(caller, Operation.INFER, "own_1")
        if waiting is not None:
            assert not isinstance(waiting, Watch)
            await waiting
    except (Unauthenticated, Unavailable) as error:
        return error.message
    return caller.principal


def test_keys_are_fetched_once_for_all_waiters(path: Path, issuer: Issuer) -> None:
    async def main() -> None:
        access = access_of(path)
        assert issuer.requests == 0
        found = await asyncio.gather(*(principal_or_reason(access, token(jti=str(number))) for number in range(100)))
        assert found == ["alice"] * 100
        assert await principal_or_reason(access, token(jti="later")) == "alice"
        assert issuer.requests == 1

    asyncio.run(main())


def test_an_unknown_key_fetches_the_set_again_at_most_every_ten_seconds(
    path: Path, issuer: Issuer, clock: list[float]
) -> None:
    unknown = "the token is refused: its key is not known"

    async def main() -> None:
        access = access_of(path)
        old, new = token(), token(OTHER_RSA, header={"kid": "k2"})
        assert await principal_or_reason(access, old) == "alice"
        issuer.answer = sends(K2)
        for number in range(50):
            assert await principal_or_reason(access, token(OTHER_RSA, header={"kid": f"guess-{number}"})) == unknown
        assert await principal_or_reason(access, new) == unknown
        assert issuer.requests == 1
        clock[0] += 10
        assert await principal_or_reason(access, new) == "alice"
        assert issuer.requests == 2
        # A token of a removed key is no longer valid.
        assert await principal_or_reason(access, old) == unknown

    asyncio.run(main())


def test_an_old_key_set_is_fetched_again(
    path: Path, issuer: Issuer, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_changes, "CHECK_S", 0.0)

    async def main() -> None:
        access, credential = access_of(path), token()
        assert await principal_or_reason(access, credential) == "alice"
        clock[0] += 299
        assert await principal_or_reason(access, credential) == "alice"
        assert issuer.requests == 1
        issuer.answer = sends(K2)
        clock[0] += 1
        for _ in range(2000):  # the fetch is in the background
            if await principal_or_reason(access, credential) != "alice":
                return
            await asyncio.sleep(0.001)
        raise AssertionError("the old key stays")

    asyncio.run(main())


def _slow(issuer: Issuer) -> Callable[[BaseHTTPRequestHandler], None]:
    def answer(request: BaseHTTPRequestHandler) -> None:
        sends(b"{")(request)
        with suppress(OSError):
            while not issuer.free.wait(0.05):
                request.wfile.write(b" ")

    return answer


def _endless(issuer: Issuer) -> Callable[[BaseHTTPRequestHandler], None]:
    def answer(request: BaseHTTPRequestHandler) -> None:
        request.wfile.write(b"HTTP/1.1 200 OK\r\nx: ")
        with suppress(OSError):
            while not issuer.free.wait(0.05):
                request.wfile.write(b"x")

    return answer


def _silent(issuer: Issuer) -> Callable[[BaseHTTPRequestHandler], None]:
    def answer(request: BaseHTTPRequestHandler) -> None:
        issuer.free.wait(20)

    return answer


FAILURES: list[tuple[Callable[[Issuer], Any], str]] = [
    (lambda issuer: sends(b"", 500), "the answer has the status 500"),
    (lambda issuer: sends(b"", 302, location="http://127.0.0.1:1/"), "the answer has the status 302"),
    (lambda issuer: sends(b"<html>"), "it is no JSON object with 'keys'"),
    (lambda issuer: sends(b'{"keys": []}'), "it has no key for RS256"),
    (lambda issuer: sends(b"x" * (2 << 20)), "the answer has more than 1048576 bytes"),
    (lambda issuer: lambda request: request.wfile.write(b"SSH-2.0\r\n"), "the answer is no HTTP"),
    (_silent, "timed out"),
    (_slow, "the answer takes more than 0.3 s"),
    (_endless, "it takes more than 0.6 s"),
]


@pytest.mark.parametrize(("answer", "text"), FAILURES, ids=range(len(FAILURES)))
def test_a_failed_fetch_keeps_the_former_keys(
    path: Path,
    issuer: Issuer,
    clock: list[float],
    answer: Callable[[Issuer], Any],
    text: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(key_sets, "FETCH_TIMEOUT_S", 0.3)
    if answer is _slow:
        monkeypatch.setattr(key_sets, "monotonic", time.monotonic)
        monkeypatch.setattr(key_sets, "FETCH_INTERVAL_S", 0.0)

    async def main() -> None:
        access = access_of(path)
        issuer.answer = answer(issuer)
        at_first = await principal_or_reason(access, token())
        assert at_first == "the keys of the issuer 'https://login.example.com' cannot be fetched"
        clock[0] += 10
        issuer.answer = sends(K1)
        assert await principal_or_reason(access, token()) == "alice"
        clock[0] += 10
        issuer.answer = answer(issuer)
        unknown = token(OTHER_RSA, header={"kid": "k2"})
        assert await principal_or_reason(access, unknown) == "the token is refused: its key is not known"
        assert await principal_or_reason(access, token(jti="1")) == "alice"

    asyncio.run(main())
    address = f"the keys at '{issuer.address}' cannot be fetched"
    assert f"{address}, there are none yet: " in caplog.text
    assert f"{address}, the former ones stay in use: " in caplog.text
    assert text in caplog.text


def test_a_disconnect_does_not_affect_other_waiters(path: Path, issuer: Issuer) -> None:
    async def main() -> None:
        access = access_of(path)
        leaves, stays = (asyncio.create_task(principal_or_reason(access, token(jti=name))) for name in "ab")
        await asyncio.sleep(0)
        leaves.cancel()
        assert await stays == "alice"
        assert leaves.cancelled()

    asyncio.run(main())


def test_the_number_of_waiters_is_bounded(path: Path, issuer: Issuer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_sets, "_MAX_WAITING", 3)

    async def main() -> None:
        access = access_of(path)
        found = await asyncio.gather(*(principal_or_reason(access, token(jti=str(number))) for number in range(5)))
        assert sorted(found) == ["3 others wait for the keys of the same issuer"] * 2 + ["alice"] * 3

    asyncio.run(main())


def test_a_changed_file_keeps_fetched_keys(path: Path, issuer: Issuer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_changes, "CHECK_S", 0.0)

    async def main() -> None:
        access, credential = access_of(path), token()
        assert await principal_or_reason(access, credential) == "alice"
        extend(path, roles={"r": []})
        assert access._watcher is not None
        before = access._watcher.file
        while access._watcher.file is before:
            assert await principal_or_reason(access, credential) == "alice"
            await asyncio.sleep(0)
        assert await principal_or_reason(access, credential) == "alice"
        assert issuer.requests == 1

    asyncio.run(asyncio.wait_for(main(), 30))


def test_a_changed_key_set_in_a_file_is_used(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_changes, "CHECK_S", 0.0)
    write_issuer(path)

    async def main() -> None:
        access, new = access_of(path), token(OTHER_RSA, header={"kid": "k2"})
        assert await principal_or_reason(access, token()) == "alice"
        path.with_name("jwks.json").write_bytes(K2)
        while await principal_or_reason(access, new) != "alice":
            await asyncio.sleep(0)
        assert await principal_or_reason(access, token()) == "the token is refused: its key is not known"

    asyncio.run(asyncio.wait_for(main(), 30))


def test_check_fetches_the_keys(path: Path, issuer: Issuer) -> None:
    assert keys("check", str(path)).returncode == 0
    ended = keys("check", str(path), "--key", "-", stdin=token())
    assert (ended.returncode, issuer.requests) == (0, 2)
    issuer.answer = sends(b"", 404)
    assert keys("check", str(path)).stderr == (
        f"headrace keys: the keys at '{issuer.address}' cannot be used: the answer has the status 404\n"
    )
    assert "cannot be fetched" in keys("check", str(path), "--key", token()).stderr
