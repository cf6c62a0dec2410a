"""The cache of permits: inferences that pass by it, and its expiry."""

from __future__ import annotations

import asyncio
import gc
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from inspect import isawaitable
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
import numpy as np
import pytest
from tritonclient import grpc as grpc_client

from headrace import Caller, Operation, PermissionDenied, Unauthenticated
from headrace_access import AccessControl, AccessOptions, key_file_watcher, permit_cache
from headrace_access.permit_cache import PermitCache
from headrace_hosts import file_changes
from headrace_hosts.permitted import PermittedCaller
from headrace_testing.serving import serve
from tests.interceptors.access.access_files import (
    TENANT,
    access_of,
    caller_with,
    extend,
    keys,
    make,
    token,
    write_issuer,
)
from tests.interceptors.access.test_every_operation import CONFIG


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "access.json"
    path.with_name("key").write_text(write_issuer_into(path))
    return path


def write_issuer_into(path: Path) -> str:
    key = make(path, tenant=TENANT)["tenant"]
    write_issuer(path)
    return key


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ticks every 10 ms, and files that are checked each time."""
    monkeypatch.setattr(permit_cache, "TICK_S", 0.01)
    monkeypatch.setattr(file_changes, "CHECK_S", 0.0)


async def until(claim: Callable[[], bool]) -> None:
    while not claim():
        await asyncio.sleep(0.005)


def run(main: Any) -> None:
    asyncio.run(asyncio.wait_for(main, 30))


def test_an_inference_is_cached_by_credential_and_model(path: Path) -> None:
    key = write_issuer_into(path)

    async def main() -> None:
        access = access_of(path)
        permits = access.permits
        assert permits == {}
        for credential, transport in ((key, "grpc"), (token(sub="tenant"), "http")):
            access.admit(caller_with(credential, transport), Operation.INFER, "own_1")
            text = f"Bearer {credential}"
            assert permits is access.permits is not None
            assert permits[text] == permits[text.encode()] == {"own_1": "tenant"}
        assert permits is not None
        before = {name: dict(models) for name, models in permits.items()}
        for operation, model in ((Operation.MODEL_METADATA, "own_2"), (Operation.OPEN_STREAM, "")):
            access.admit(caller_with(key), operation, model)
        with pytest.raises(PermissionDenied):
            access.admit(caller_with(key), Operation.INFER, "other")
        with pytest.raises(Unauthenticated):
            access.admit(caller_with(key[:-1]), Operation.INFER, "own_1")
        assert permits == before

    run(main())


def test_a_changed_file_and_an_expired_token_clear_the_cache(
    path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(permit_cache, "_TICKS", 10_000)
    key = write_issuer_into(path)

    async def main() -> None:
        access = access_of(path)
        access.admit(caller_with(key), Operation.INFER, "own_1")
        ends = token(sub="tenant", exp=int(time.time()) - 29)  # 30 s of leeway
        access.admit(caller_with(ends), Operation.INFER, "own_1")
        assert access.permits is not None
        assert len(access.permits) == 4
        await until(lambda: len(access.permits or ()) == 2)
        assert f"Bearer {key}" in access.permits
        assert keys("revoke", str(path), key).returncode == 0
        await until(lambda: not access.permits)
        with pytest.raises(Unauthenticated):
            access.admit(caller_with(key), Operation.INFER, "own_1")

    run(main())


@pytest.mark.parametrize("header", ["Basic YTpi", "Bearer", ""])
def test_a_certificate_is_not_cached_for_the_header_beside_it(path: Path, header: str) -> None:
    extend(path, certificates={})

    async def main() -> None:
        access = access_of(path)
        sent = {"authorization": header}
        caller = Caller("http", header=sent.get, headers=lambda: list(sent.items()), certificate={"subject": ()})
        caller.principal = "tenant"
        access.admit(caller, Operation.INFER, "own_1")
        assert not access.permits  # otherwise every caller with this header would be 'tenant'

    run(main())


def test_a_certificate_is_cached_for_its_connection(path: Path) -> None:
    extend(path, certificates={"roles": "organizationalUnitName"}, roles={"labs": TENANT})

    def certificate(name: str, unit: str = "") -> dict[str, Any]:
        return {"subject": ((("commonName", name),), (("organizationalUnitName", unit),))}

    def caller(shown: dict[str, Any] | None, principal: str = "", **sent: str) -> Caller:
        headers = {name.replace("_", "-"): value for name, value in sent.items()}
        made = Caller("grpc", header=headers.get, headers=lambda: list(headers.items()), certificate=shown)
        made.principal = principal or made.principal
        return made

    async def main() -> None:
        access = access_of(path)
        permits = access.permits
        assert permits is not None
        tenant, other = certificate("tenant"), certificate("tenant")
        access.admit(caller(tenant), Operation.INFER, "own_1")
        assert dict(permits) == {id(tenant): {"own_1": "tenant"}}
        for wrong in (caller(None), caller(certificate("nobody")), caller(tenant, authorization="Bearer no")):
            with pytest.raises((Unauthenticated, PermissionDenied)):
                access.admit(wrong, Operation.INFER, "own_1")
        with pytest.raises(PermissionDenied):
            access.admit(caller(tenant), Operation.INFER, "other")
        # Not if another header or interceptor may change it.
        access.admit(caller(other, x_api_key=""), Operation.INFER, "own_1")
        access.admit(caller(certificate("nobody"), principal="tenant"), Operation.INFER, "own_1")
        with pytest.raises(PermissionDenied):
            access.admit(caller(tenant, principal="nobody"), Operation.INFER, "own_1")
        assert list(permits) == [id(tenant)]
        verified, access._authenticate = access._authenticate, None  # type: ignore[assignment, method-assign]
        again = caller(tenant)
        access.admit(again, Operation.INFER, "own_1")  # by the cache
        assert again.principal == "tenant"
        access._authenticate = verified  # type: ignore[method-assign]
        # The cache keeps the object alive: no other certificate gets its id.
        lab = certificate("anybody", "labs")
        access.admit(caller(lab), Operation.INFER, "own_1")
        certificate_id, holders = id(lab), sys.getrefcount(lab)
        assert certificate_id in permits
        access._permits.clear()
        assert (certificate_id in permits, sys.getrefcount(lab)) == (False, holders - 1)

    run(main())


def test_a_changed_file_clears_cached_certificates(path: Path, quick: None) -> None:
    extend(path, certificates={})

    def change() -> None:
        document = json.loads(path.read_text())
        del document["certificates"]
        path.write_text(json.dumps(document))

    async def main() -> None:
        access = access_of(path)
        sent: dict[str, str] = {}
        shown = {"subject": ((("commonName", "tenant"),),)}
        caller = Caller("http", header=sent.get, headers=list, certificate=shown)
        access.admit(caller, Operation.INFER, "own_1")
        assert access.permits
        change()
        await until(lambda: not access.permits)
        with pytest.raises(Unauthenticated):
            access.admit(caller, Operation.INFER, "own_1")

    run(main())


def test_a_key_revoked_during_idleness_is_refused_at_once(
    path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_file_watcher, "_TRUSTED_S", 5.0)
    key = write_issuer_into(path)

    async def main() -> None:
        access = access_of(path)
        access._watcher._checked_s -= 5  # type: ignore[union-attr]
        assert keys("revoke", str(path), key).returncode == 0
        waiting = [access.admit(caller_with(key), Operation.INFER, "own_1") for _ in range(2)]
        for each in waiting:
            assert isawaitable(each)
            with pytest.raises(Unauthenticated):
                await each
        assert not access.permits

    run(main())


def test_a_key_ends_at_midnight(path: Path) -> None:
    key = write_issuer_into(path)
    document = json.loads(path.read_text())
    next(iter(document["principals"]["tenant"]["keys"].values()))["expires"] = "2999-01-01"
    path.write_text(json.dumps(document))

    async def main() -> None:
        access = access_of(path)
        access.admit(caller_with(key), Operation.INFER, "own_1")
        assert isinstance(access.permits, PermitCache)
        assert set(access.permits._until_s.values()) == {32472144000.0}  # date -u -d 2999-01-01 +%s

    run(main())


def test_the_cache_is_bounded_and_expires(monkeypatch: pytest.MonkeyPatch, quick: None) -> None:
    monkeypatch.setattr(permit_cache, "_MAX_CREDENTIALS", 10)
    monkeypatch.setattr(permit_cache, "_MAX_MODELS", 3)
    monkeypatch.setattr(permit_cache, "_MAX_CHARACTERS", 1000)
    ticks = 0

    def count() -> None:
        nonlocal ticks
        ticks += 1

    async def main() -> None:
        permits = PermitCache(count)
        for number in range(50):
            permits.add(f"key-{number}", "m", "p", math.inf)
            assert permits[f"key-{number}"] == permits[f"key-{number}".encode()] == {"m": "p"}
            assert len(permits) <= 20
            permits.add("k", f"model-{number}", "p", math.inf)
            assert len(permits["k"]) <= 3
        permits.clear()
        for number in range(10):
            permits.add(f"{number}" * 400, "m", "p", math.inf)
            assert sum(len(each) for each in permits if not isinstance(each, int)) == 2 * permits._characters <= 2800
        shown = [{"subject": ((("commonName", str(number)),),)} for number in range(10)]
        for certificate in shown:
            permits.add_certificate(certificate, "m", "p")
            assert permits[id(certificate)] == {"m": "p"}
            assert len(permits._certificates) <= 1
        permits.add("Bearer \u2003", "m", "p", math.inf)
        assert "Bearer \u2003" not in permits
        await until(lambda: not permits)
        before = ticks
        assert 25 <= before <= 31
        await asyncio.sleep(0.05)
        assert ticks == before  # a server without callers does not wake up
        permits.add("k", "m", "p", math.inf)
        await until(lambda: ticks > before)

    run(main())


def test_a_key_in_x_api_key_is_cached_separately(path: Path) -> None:
    key = write_issuer_into(path)

    def caller(**sent: str) -> Caller:
        headers = {name.replace("_", "-"): value for name, value in sent.items()}
        return Caller("http", header=headers.get, headers=lambda: list(headers.items()))

    async def main() -> None:
        access = access_of(path)
        access.admit(caller(x_api_key=key), Operation.INFER, "own_1")
        forms = {(b"x-api-key", key), (b"x-api-key", key.encode())}
        assert set(access.permits or ()) == forms
        for wrong in ({"authorization": key}, {"x_api_key": f"Bearer {key}"}, {"authorization": "", "x_api_key": key}):
            with pytest.raises(Unauthenticated):
                access.admit(caller(**wrong), Operation.INFER, "own_1")
        assert set(access.permits or ()) == forms
        with pytest.raises(PermissionDenied):
            access.admit(caller(x_api_key=key), Operation.INFER, "other")
        verified = access._authenticate
        access._authenticate = None  # type: ignore[assignment, method-assign]
        again = caller(x_api_key=key)
        access.admit(again, Operation.INFER, "own_1")  # by the cache
        assert again.principal == "tenant"
        access._authenticate = verified  # type: ignore[method-assign]

    run(main())


# ---------------------------------------------------------------------- over sockets


@pytest.fixture
def admissions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    admit = AccessControl.admit

    def note(access: AccessControl, caller: Any, operation: Any, model: str) -> Any:
        found.append(f"{caller.transport} {operation} {model}")
        return admit(access, caller, operation, model)

    monkeypatch.setattr(AccessControl, "admit", note)
    return found


@pytest.fixture
def server(path: Path, tmp_path: Path) -> Iterator[Any]:
    (tmp_path / "models/own_1/1").mkdir(parents=True)
    (tmp_path / "models/own_1/config.pbtxt").write_text(CONFIG)
    with serve(tmp_path / "models", listen=True, plugin_options=[AccessOptions(keys=str(path))]) as server:
        yield server


def test_inferences_pass_without_admission_and_leak_nothing(
    server: Any, path: Path, admissions: list[str], quick: None
) -> None:
    key = token(sub="tenant")
    ports = {each.protocol or each.name: each.port for each in server.frontends}
    url = f"http://127.0.0.1:{ports['http']}/v2/models/own_1/infer"
    body = {"inputs": [{"name": "x", "shape": [1, 1], "datatype": "FP32", "data": [1]}]}
    headers = {"authorization": f"Bearer {key}"}
    tensor = grpc_client.InferInput("x", [1, 1], "FP32")
    tensor.set_data_from_numpy(np.ones((1, 1), np.float32))
    permit_cache.TICK_S = 5.0  # set back by ``quick``
    with (
        httpx.Client(headers=headers) as http,
        grpc_client.InferenceServerClient(f"127.0.0.1:{ports['grpc']}") as client,
    ):

        def ask() -> None:
            assert http.post(url, json=body).json()["outputs"][0]["data"] == [1]
            assert client.infer("own_1", [tensor], headers=headers).as_numpy("y").tolist() == [[1]]

        for _ in range(3):
            ask()
        assert admissions == ["http infer own_1"]
        gc.collect()
        gc.disable()
        try:
            for _ in range(20):
                ask()
            left = [each for each in gc.get_objects() if type(each) is PermittedCaller]
        finally:
            gc.enable()
        assert len(left) <= 2  # of the last ones
    assert admissions == ["http infer own_1"]


# ---------------------------------------------------------------------- the comparison, by count


def steps(function: Callable[[], Any]) -> int:
    """Return how many bytecodes ``function`` executes."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return count


def test_a_wrong_key_takes_the_same_steps_for_any_matching_prefix(path: Path) -> None:
    key = write_issuer_into(path)
    access = access_of(path)
    assert access._watcher is not None
    file = access._watcher.file
    other = make(path.with_name("other.json"), a=[])["a"]
    counts = {}
    for right in range(43):
        wrong = key[:12] + key[12 : 12 + right] + ("A" if key[12 + right] != "A" else "B") * (43 - right)
        assert file.find(wrong) == "it is not known"
        counts[right] = steps(lambda wrong=wrong: file.find(wrong))  # type: ignore[misc]
    counts[-1] = steps(lambda: file.find(other))  # another id takes as many, but for the comparison itself
    assert len({count for right, count in counts.items() if right >= 0}) == 1, counts
    assert abs(counts[-1] - counts[0]) <= 8, counts


def test_keys_in_x_api_key_pass_without_admission(server: Any, path: Path, admissions: list[str]) -> None:
    key = path.with_name("key").read_text()
    ports = {each.protocol or each.name: each.port for each in server.frontends}
    url = f"http://127.0.0.1:{ports['http']}/v2/models/own_1/infer"
    body = {"inputs": [{"name": "x", "shape": [1, 1], "datatype": "FP32", "data": [1]}]}
    tensor = grpc_client.InferInput("x", [1, 1], "FP32")
    tensor.set_data_from_numpy(np.ones((1, 1), np.float32))
    headers = {"x-api-key": key}
    assert httpx.post(url, json=body, headers=headers).status_code == 200
    assert admissions == ["http infer own_1"]
    admissions.clear()
    with grpc_client.InferenceServerClient(f"127.0.0.1:{ports['grpc']}") as client:
        for _ in range(2):
            assert httpx.post(url, json=body, headers=headers).status_code == 200
            assert client.infer("own_1", [tensor], headers=headers).as_numpy("y").tolist() == [[1]]
        assert admissions == []
        for wrong in ({"authorization": key}, {"x-api-key": f"Bearer {key}"}, {**headers, "authorization": ""}):
            assert httpx.post(url, json=body, headers=wrong).status_code == 401
        with pytest.raises(Exception, match="UNAUTHENTICATED"):
            client.infer("own_1", [tensor], headers={**headers, "authorization": "Bearer no"})
    assert len(admissions) == 4
