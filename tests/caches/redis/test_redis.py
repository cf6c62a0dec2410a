"""Answers in a real Redis server: what servers share, what is not believed, and what happens when it dies."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import redis

from headrace import BytesTensor, CachedResponse, ConfigError, InvalidArgument, Server, pack_response
from headrace_redis import RedisCache, RedisParameters
from headrace_testing import CacheConformance

if TYPE_CHECKING:
    from tests.caches.redis.conftest import RedisServer, TlsFiles

CONFIG = """backend: "identity" max_batch_size: 8 response_cache {{ enable: true }} {rest}
input {{ name: "x" data_type: TYPE_FP32 dims: [ -1 ] }} output {{ name: "y" data_type: TYPE_FP32 dims: [ -1 ] }}
input {{ name: "s" data_type: TYPE_STRING dims: [ 1 ] }} output {{ name: "t" data_type: TYPE_STRING dims: [ 1 ] }}"""
ASKED = {"x": np.arange(3, dtype=np.float32).reshape(1, 3), "s": np.array([["word"]], np.object_)}
#: The timeout of a test that hangs.
DEADLINE_S = 90


def write_model(repository: Path, rest: str = "") -> None:
    (repository / "m/1").mkdir(parents=True, exist_ok=True)
    (repository / "m/config.pbtxt").write_text(CONFIG.format(rest=rest))


class TestRedis(CacheConformance):
    """The conformance tests of caches, with one server."""

    plugin, cache = "headrace_redis", "redis"

    @pytest.fixture(autouse=True)
    def _server(self, redis_server: RedisServer) -> None:
        self.server = redis_server

    def settings(self) -> dict[str, str]:
        return {**self.server.settings, "pool_size": "4"}


@contextmanager
def serving(repository: Path, of: RedisServer, **settings: str) -> Iterator[Server]:
    with Server(repository, cache_config={"redis": {**of.settings, **settings}}) as server:
        yield server


def numbers(server: Server) -> tuple[int, int, int]:
    """Hits, misses, and failures of the cache."""
    (model,) = server.served()
    found = model.snapshot()
    return found.cache_hit.count, found.cache_miss.count, found.cache_failures


def stored_keys(of: RedisServer, count: int) -> list[bytes]:
    """Wait until Redis has ``count`` keys, and return them. Answers are stored in the background."""
    end = time.monotonic() + DEADLINE_S
    while len(found := of.client.keys()) != count:
        assert time.monotonic() < end, f"{len(found)} answers are in Redis, and not {count}"
    return list(found)


def test_one_server_answers_what_another_has_executed(tmp_path: Path, redis_server: RedisServer) -> None:
    write_model(tmp_path)
    with serving(tmp_path, redis_server) as server:
        first = server.infer("m", ASKED)
        (key,) = stored_keys(redis_server, 1)
        assert key.startswith(b"headrace:1:")
    with serving(tmp_path, redis_server, pool_size="4") as other:
        answer = other.infer("m", ASKED)
        assert numbers(other) == (1, 0, 0)
        np.testing.assert_array_equal(answer.outputs["y"], ASKED["x"])
        strings = answer.outputs["t"]
        assert isinstance(strings, BytesTensor)
        assert strings.items() == [b"word"]
        assert list(answer.outputs) == list(first.outputs)


@pytest.mark.parametrize("change", ["config", "file"])
def test_a_changed_model_has_its_own_cached_answers(tmp_path: Path, redis_server: RedisServer, change: str) -> None:
    write_model(tmp_path)
    with serving(tmp_path, redis_server) as server:
        server.infer("m", ASKED)
        stored_keys(redis_server, 1)
    if change == "config":
        write_model(tmp_path, 'parameters { key: "k" value { string_value: "v" } }')
    else:
        (tmp_path / "m/1/weights").write_bytes(b"others")
    with serving(tmp_path, redis_server) as server:
        server.infer("m", ASKED)
        assert numbers(server) == (0, 1, 0)
        stored_keys(redis_server, 2)


@pytest.mark.parametrize(
    "planted",
    [
        b"\x80\x04cos\nsystem\n",
        b"x" * 5000,
        pack_response(CachedResponse({"y": np.zeros((1, 3), np.int64)}, {})),
        pack_response(CachedResponse({"z": np.zeros((1, 3), np.float32)}, {})),
        pack_response(CachedResponse({"y": np.zeros((1, 3), np.float32)}, {}))[:-4],
        pack_response(CachedResponse({"y": np.zeros((1, 3), np.float32)}, {"p": 1 << 64})),
        pack_response(CachedResponse({"y": np.zeros((1, 3), np.float32)}, {"p": "\ud800"})),
        pack_response(CachedResponse({"y": np.zeros((1, 3), np.float32)}, {"\udfff": 1})),
    ],
    ids=["pickle", "too large", "data type", "unknown output", "cut", "2^64", "surrogate", "surrogate in a name"],
)
def test_entries_written_by_others_are_not_trusted(tmp_path: Path, redis_server: RedisServer, planted: bytes) -> None:
    write_model(tmp_path)
    with serving(tmp_path, redis_server, max_entry_bytes="4096") as server:
        server.infer("m", ASKED)
        (key,) = stored_keys(redis_server, 1)
        redis_server.client.set(key, planted)
        np.testing.assert_array_equal(server.infer("m", ASKED).outputs["y"], ASKED["x"])
        assert numbers(server) == (0, 2, 1)
        # The cache stays in use: a wrong entry affects no other request.
        other = {name: value[::-1] for name, value in ASKED.items()} | {"x": ASKED["x"] + 1}
        server.infer("m", other)
        stored_keys(redis_server, 2)
        server.infer("m", other)
        assert numbers(server) == (1, 3, 1)


def test_a_crashed_redis_loses_only_cached_answers_and_may_restart(
    tmp_path: Path, redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    write_model(tmp_path)
    with serving(tmp_path, redis_server) as server:
        server.infer("m", ASKED)
        stored_keys(redis_server, 1)
        redis_server.kill()
        for _ in range(20):
            np.testing.assert_array_equal(server.infer("m", ASKED).outputs["y"], ASKED["x"])
        hits, misses, failures = numbers(server)
        assert (hits, misses) == (0, 21)
        assert 1 <= failures < 20  # no request is sent to it in this time
        redis_server.start()
        end = time.monotonic() + DEADLINE_S
        while not numbers(server)[0]:
            assert time.monotonic() < end, "the cache does not come back"
            server.infer("m", ASKED)
    assert len(logged(caplog, "failed, so models answer: ConnectionError")) == 1


def logged(caplog: pytest.LogCaptureFixture, what: str) -> list[str]:
    lines = [record.getMessage() for record in caplog.records]
    return [line for line in lines if line.startswith(f"response cache 'redis' {what}")]


def until_it_answers(server: Server) -> None:
    """Ask until the cache has answered once."""
    hits, end = numbers(server)[0], time.monotonic() + DEADLINE_S
    while numbers(server)[0] == hits:
        assert time.monotonic() < end, "the cache does not come back"
        server.infer("m", ASKED)


def test_a_hanging_redis_delays_one_request_only(
    tmp_path: Path, redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    write_model(tmp_path)
    with caplog.at_level("INFO"), serving(tmp_path, redis_server, socket_timeout="80000") as server:
        server.infer("m", ASKED)
        stored_keys(redis_server, 1)
        redis_server.stop()
        try:
            for _ in range(50):
                np.testing.assert_array_equal(server.infer("m", ASKED).outputs["y"], ASKED["x"])
            assert numbers(server) == (0, 51, 1)
        finally:
            redis_server.go_on()
        until_it_answers(server)
    assert logged(caplog, "failed") == ["response cache 'redis' failed, so models answer: no answer within 1 s"]
    assert len(logged(caplog, "answers again")) == 1


def test_a_full_redis_still_answers_stored_entries(
    tmp_path: Path, redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    write_model(tmp_path)
    with serving(tmp_path, redis_server) as server:
        server.infer("m", ASKED)
        stored_keys(redis_server, 1)
        redis_server.client.config_set("maxmemory", 1)
        end = time.monotonic() + DEADLINE_S
        while not numbers(server)[2]:  # failed stores are counted in the background
            assert time.monotonic() < end
            server.infer("m", {**ASKED, "x": np.full((1, 3), 7, np.float32)})
        until_it_answers(server)
        until_it_answers(server)
    assert len(logged(caplog, "stores no further responses: OutOfMemoryError")) == 1
    assert logged(caplog, "failed") == []


def test_a_redis_that_refuses_the_password_is_logged_once(
    tmp_path: Path, redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    redis_server.client.config_set("requirepass", "secret")
    write_model(tmp_path)
    with serving(tmp_path, redis_server, password="wrong", user="") as server:
        for _ in range(5):
            np.testing.assert_array_equal(server.infer("m", ASKED).outputs["y"], ASKED["x"])
        hits, misses, failures = numbers(server)
        assert (hits, misses) == (0, 5)
        assert failures >= 1
    (line,) = logged(caplog, "")
    assert line.startswith("response cache 'redis' failed, so models answer: AuthenticationError: ")


def test_a_redis_over_tls_accepts_a_client_certificate(
    tmp_path: Path, tls_redis_server: RedisServer, tls_files: TlsFiles
) -> None:
    write_model(tmp_path / "models")
    tls = {
        "host": "localhost",
        "tls_enabled": "true",
        "cacert": tls_files.authority,
        "cert": tls_files.client,
        "key": tls_files.client_key,
    }
    with serving(tmp_path / "models", tls_redis_server, **tls) as server:
        server.infer("m", ASKED)
        stored_keys(tls_redis_server, 1)
        until_it_answers(server)
        assert numbers(server)[2] == 0


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"host": "localhost", "cacert": "stranger"}, "CERTIFICATE_VERIFY_FAILED"),
        ({"host": "localhost"}, "CERTIFICATE_VERIFY_FAILED"),
        ({"host": "127.0.0.1", "cacert": "authority"}, "CERTIFICATE_VERIFY_FAILED"),  # it is localhost's only
        ({"host": "localhost", "cacert": "authority", "cert": "", "key": ""}, None),
        ({"host": "localhost", "tls_enabled": False, "cert": "", "key": ""}, None),
    ],
    ids=["stranger", "nobody known", "another name", "no certificate", "no tls"],
)
def test_an_untrusted_server_gets_no_request(
    tls_redis_server: RedisServer, tls_files: TlsFiles, settings: dict[str, Any], why: str | None
) -> None:
    files = {name: getattr(tls_files, settings[name]) for name in ("cacert",) if name in settings}
    certificate = {"cert": tls_files.client, "key": tls_files.client_key, "tls_enabled": True}
    cache = RedisCache(RedisParameters(port=tls_redis_server.port, **{**certificate, **settings, **files}))
    with pytest.raises(redis.ConnectionError, match=why):
        cache.get(bytes(32))
    cache.close()


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"cacert": "/nowhere"}, r"cannot use 'cacert' (/nowhere): [Errno 2] No such file or directory"),
        ({"cacert": __file__}, f"cannot use 'cacert' ({__file__}): "),
        ({"cert": __file__, "key": "/nowhere"}, f"cannot use 'cert' ({__file__}) and 'key' (/nowhere): "),
        ({"cacert_dir": __file__}, f"cannot use 'cacert_dir' ({__file__}): it is no directory"),
    ],
)
def test_unusable_tls_files_are_named_at_the_start(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        RedisCache(RedisParameters(host="localhost", port=1, tls_enabled=True, **settings))
    assert refusal.value.message.startswith(text)


def test_a_server_starts_without_its_redis(tmp_path: Path, redis_server: RedisServer) -> None:
    write_model(tmp_path)
    redis_server.kill()
    with serving(tmp_path, redis_server) as server:
        np.testing.assert_array_equal(server.infer("m", ASKED).outputs["y"], ASKED["x"])
        assert server.ready
    redis_server.start()


def test_a_refusal_of_redis_counts_as_a_failure(tmp_path: Path, redis_server: RedisServer) -> None:
    redis_server.client.config_set("requirepass", "secret")
    cache = RedisCache(RedisParameters(**_typed(redis_server), password="wrong", user=""))
    with pytest.raises(Exception, match=r"WRONGPASS|invalid username-password"):
        cache.get(bytes(32))
    cache.close()
    cache = RedisCache(RedisParameters(**_typed(redis_server), password="secret"))
    assert cache.get(bytes(32)) is None
    cache.close()


def test_a_password_comes_from_the_environment_and_is_shown_nowhere(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    redis_server.client.config_set("requirepass", "secret")
    monkeypatch.setenv("TRITONCACHE_REDIS_PASSWORD", "secret")
    parameters = RedisParameters(**_typed(redis_server))
    assert "secret" not in repr(parameters)
    cache = RedisCache(parameters)
    cache.put(bytes(32), CachedResponse({"y": np.ones(2)}, {"p": True}))
    found = cache.get(bytes(32))
    assert found is not None
    assert found.parameters == {"p": True}
    cache.close()


def test_entries_expire_and_the_first_put_wins(redis_server: RedisServer) -> None:
    cache = RedisCache(RedisParameters(**_typed(redis_server), expire_seconds=300, max_entry_bytes=1000))
    for value in (1, 2):
        cache.put(bytes(32), CachedResponse({"y": np.full(2, value)}, {}))
    found = cache.get(bytes(32))
    assert found is not None
    assert list(np.asarray(found.outputs["y"])) == [1, 1]
    (key,) = redis_server.client.keys()
    assert 0 < redis_server.client.ttl(key) <= 300
    cache.put(bytes(31) + b"1", CachedResponse({"y": np.zeros(1000)}, {}))  # too large
    assert redis_server.client.keys() == [key]
    redis_server.client.set(key, bytes(1001))
    with pytest.raises(InvalidArgument, match="takes more than 'max_entry_bytes', 1000"):
        cache.get(bytes(32))
    cache.close()


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({}, "Failed to initialize RedisCache, didn't specify a host and port"),
        ({"host": "h"}, "didn't specify a host and port"),
        ({"host": "h", "port": 70000}, "'port' is 70000, expected 1 to 65535"),
        ({"host": "h", "port": 1, "pool_size": 0}, "'pool_size' is 0, expected 1 to 64"),
        ({"host": "h", "port": 1, "sni": "n"}, "'sni' is 'n'"),
        ({"host": "h", "port": 1, "cacert": "ca.pem"}, "'cacert' is given, but 'tls_enabled' is false"),
        ({"host": "h", "port": 1, "tls_enabled": True, "cert": "c"}, "'cert' and 'key' belong together"),
    ],
)
def test_invalid_settings_are_refused_with_a_clear_error(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        RedisParameters(**settings)


def test_a_wrong_setting_stops_the_server_and_names_the_flag(tmp_path: Path) -> None:
    server = Server(tmp_path, cache_config={"redis": {"host": "h", "prot": "1"}})
    text = r"--cache-config=redis,\.{3}: unknown parameter 'prot'; did you mean 'port'"
    with pytest.raises(ConfigError, match=text):
        server.__enter__()


def _typed(of: RedisServer) -> dict[str, Any]:
    return {"host": "127.0.0.1", "port": of.port}
