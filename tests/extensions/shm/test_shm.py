"""Shared memory from outside: a real Triton's answers, the kit, the stock clients, and what clients may not do."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import http.client
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import psutil
import pytest
import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http
import tritonclient.http.aio
from tritonclient.utils import shared_memory as client_shm

from headrace import Spec, TensorLocation, dtypes
from headrace_shm import ShmOptions
from headrace_testing import ExtensionConformance, ServedExtension
from headrace_testing.serving import on_loop
from headrace_testing.serving import serve as serve_here

from .recorded import QUESTIONS, Segments, write_repository

if TYPE_CHECKING:
    from tests.conftest import Gate, Headrace

DISABLED = "Client shared memory is disabled. Start the server with '--allow-client-shm=true' to enable."
ALLOW = "--allow-client-shm=true"
SYSTEM = "/v2/systemsharedmemory"
INFER = "/v2/models/numbers/infer"


GATED = """backend: "gated"
input { name: "IN" data_type: TYPE_FP32 dims: [-1] } output { name: "OUT" data_type: TYPE_FP32 dims: [-1] }
"""


class TestKit(ExtensionConformance):
    plugin, extension = "headrace_shm", "shm"

    def options(self) -> dict[str, Any]:
        return {"allow_client_shm": True}

    def ask(self, served: ServedExtension) -> None:
        with Segments() as segments:
            segments.buffer[:8] = np.array([1, 2], np.float32).tobytes()
            body = json.dumps({"key": segments.key, "byte_size": 4096}).encode()
            assert served.http("POST", f"{SYSTEM}/region/kit/register", body)[0] == 200
            status, _, answer = served.http("POST", "/v2/models/doubles/infer", infer_body("kit", 8, 64, [1, 2]))
            assert (status, "data" in json.loads(answer)["outputs"][0]) == (200, False)
            assert np.frombuffer(segments.buffer, np.float32, 2, 64).tolist() == [2, 4]
            assert served.http("POST", f"{SYSTEM}/region/kit/unregister", b"")[0] == 200
            assert json.loads(served.http("GET", f"{SYSTEM}/status", b"")[2]) == []


def infer_body(region: str, size: int, output_offset: int | None = None, shape: list[int] | None = None) -> bytes:
    place: dict[str, Any] = {"shared_memory_region": region, "shared_memory_byte_size": size}
    tensor = {"name": "x", "shape": shape or [size // 4], "datatype": "FP32", "parameters": place}
    request: dict[str, Any] = {"inputs": [tensor]}
    if output_offset is not None:
        request["outputs"] = [{"name": "y", "parameters": {**place, "shared_memory_offset": output_offset}}]
    return json.dumps(request).encode()


def post(port: int, path: str, body: Any = None) -> tuple[int, Any]:
    content = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    answer = httpx.post(f"http://127.0.0.1:{port}{path}", content=content, timeout=60)
    return answer.status_code, answer.json() if answer.content else None


def register(port: int, name: str, key: str, size: int, offset: int = 0) -> tuple[int, Any]:
    return post(port, f"{SYSTEM}/region/{name}/register", {"key": key, "byte_size": size, "offset": offset})


def status(port: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = httpx.get(f"http://127.0.0.1:{port}{SYSTEM}/status").json()
    return found


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("shm")
    write_repository(root, "identity")
    return root


@contextmanager
def segment(size: int, content: bytes = b"") -> Iterator[tuple[str, int]]:
    """Yield key and descriptor of a new segment."""
    key = f"headrace_test_{os.getpid()}_{random.getrandbits(48):x}"
    descriptor = os.open(f"/dev/shm/{key}", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.ftruncate(descriptor, size)
        os.pwrite(descriptor, content, 0)
        yield key, descriptor
    finally:
        os.close(descriptor)
        Path(f"/dev/shm/{key}").unlink(missing_ok=True)


@pytest.mark.parametrize("hosts", [(), ("--http-server=hypercorn", "--grpc-server=grpcio")])
def test_every_answer_equals_tritons(serve: Callable[..., Headrace], repository: Path, hosts: tuple[str, ...]) -> None:
    server = serve(f"--model-repository={repository}", ALLOW, *hosts)
    assert len(QUESTIONS) > 300
    with Segments() as segments:
        for number, question in enumerate(QUESTIONS):
            found = segments.ask(question, server.http, server.grpc)
            wanted = question.get("ours", question)
            for part in ("status", "answer", "written"):
                assert found.get(part) == wanted.get(part), (number, part, question)
    assert post(server.http, f"{SYSTEM}/unregister")[0] == 200


def test_a_server_that_does_not_allow_it_returns_an_error(serve: Callable[..., Headrace], repository: Path) -> None:
    server = serve(f"--model-repository={repository}")
    cuda = SYSTEM.replace("system", "cuda")
    for root in (SYSTEM, cuda):
        for path in ("/region/r/register", "/region/r/unregister", "/unregister"):
            assert post(server.http, root + path, {}) == (501, {"error": DISABLED})
        assert httpx.get(f"http://127.0.0.1:{server.http}{root}/status").json() == []
    client = tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{server.grpc}")
    for call in (
        lambda: client.register_system_shared_memory("r", "/k", 8),
        client.unregister_system_shared_memory,
        lambda: client.register_cuda_shared_memory("r", "AAAA", 0, 8),
        client.unregister_cuda_shared_memory,
    ):
        with pytest.raises(tritonclient.grpc.InferenceServerException, match=r"is disabled.*true' to enable") as error:
            call()
        assert error.value.status() == "StatusCode.UNIMPLEMENTED"
    assert post(server.http, INFER, infer_body("r", 32)) == (
        404,
        {"error": "Unable to find shared memory region: 'r'"},
    )
    with serve_here(repository) as here:
        assert not here.engine.additions(TensorLocation), "no request is searched for regions"


def test_impossible_options_are_refused(run_headrace: Callable[..., Headrace], repository: Path) -> None:
    server = run_headrace(f"--model-repository={repository}", ALLOW, "--shm-max-regions=0")
    assert server.finish() == 1
    assert "--shm-max-regions is 0, not 1 to 32768" in server.log


def test_a_region_is_registered_in_all_workers_and_later_ones(
    run_headrace: Callable[..., Headrace], repository: Path, wait_until: Callable[..., None]
) -> None:
    server = run_headrace(f"--model-repository={repository}", ALLOW, "--workers=2").wait_until_listening()
    wait_until(lambda: server.get("/v2/health/ready")[0] == 200, "a worker serves")
    server.wait_for_line("2 workers serve")
    numbers = np.arange(8, dtype=np.float32).tobytes()
    with segment(8192, numbers) as (key, _), segment(8192) as (removed, _):
        assert register(server.http, "r", key, 8192)[0] == 200
        assert register(server.http, "r", key, 8192)[0] == 400
        assert register(server.http, "gone", removed, 8192)[0] == 200
        assert register(server.http, "left", key, 8192)[0] == 200
        assert post(server.http, f"{SYSTEM}/region/left/unregister")[0] == 200

        def answers() -> set[int]:  # connections are assigned at random
            return {post(server.http, INFER, infer_body("r", 32))[0] for _ in range(40)}

        assert answers() == {200}
        Path(f"/dev/shm/{removed}").unlink()
        assert len(who_maps(key)) == 2
        os.kill(who_maps(key)[0], signal.SIGKILL)
        wait_until(lambda: "a change of extension 'shm' can not be repeated" in server.log, "another one has begun")
        wait_until(lambda: len(who_maps(key)) == 2, "both have the region")
        assert answers() == {200}
        assert {post(server.http, INFER, infer_body("left", 32))[0] for _ in range(40)} == {404}
        assert post(server.http, f"{SYSTEM}/unregister")[0] == 200
        assert answers() == {404}
    server.stop()


def who_maps(key: str) -> list[int]:
    """Return the processes that this one has started, directly or not, and that have the segment ``key`` mapped."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(OSError):
            if key in Path(f"/proc/{process.pid}/maps").read_text():
                found.append(process.pid)
    return found


# ---------------------------------------------------------------------- the stock clients

ARRAYS = [
    np.arange(24, dtype=dtype) for dtype in (np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32)
] + [
    np.arange(24, dtype=np.uint64),
    np.linspace(-1, 1, 24, dtype=np.float16),
    np.linspace(-1, 1, 24, dtype=np.float32),
    np.linspace(-1, 1, 24, dtype=np.float64),
    np.arange(24) % 2 == 0,
    np.array(["", "a", "wörld", "x" * 5000] * 6, np.object_),
]


@pytest.fixture(scope="module")
def every_type(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("types")
    for array in ARRAYS:
        kind = type_name(array)
        (root / kind / "1").mkdir(parents=True)
        config = "STRING" if kind == "BYTES" else kind
        tensors = "".join(
            f'{way} {{ name: "{name}" data_type: TYPE_{config} dims: [-1, 8] }}\n'
            for way, name in (("input", "x"), ("output", "y"))
        )
        (root / kind / "config.pbtxt").write_text(f'backend: "identity"\n{tensors}')
    return root


def type_name(array: Any) -> str:
    found = next(known for known in dtypes.ALL if known.numpy == array.dtype and known.name != "BF16")
    return str(found.name)


def _round_trip(client: Any, module: Any, array: Any, name: str) -> tuple[Any, Any, Any]:
    """Return input, output and handle of a request with tensors in one new region, the output at offset 65536."""
    kind = type_name(array)
    handle = client_shm.create_shared_memory_region(name, f"/{name}_{os.getpid()}", 262144 + 65536)
    matrix = array.reshape(3, 8)
    encoded = tritonclient.utils.serialize_byte_tensor(matrix) if kind == "BYTES" else matrix
    client_shm.set_shared_memory_region(handle, [encoded])
    size = len(encoded.item()) if kind == "BYTES" else matrix.nbytes
    tensor, wanted = module.InferInput("x", [3, 8], kind), module.InferRequestedOutput("y")
    tensor.set_shared_memory(name, size)
    wanted.set_shared_memory(name, 131072, offset=131072)
    return tensor, wanted, handle


def _check(handle: Any, array: Any, output: Any) -> None:
    kind = type_name(array)
    if kind == "BYTES":
        found = client_shm.get_contents_as_numpy(handle, np.object_, [3, 8], offset=131072)
        assert found.ravel().tolist() == [each.encode() for each in array.tolist()]
    else:
        found = client_shm.get_contents_as_numpy(handle, array.dtype, [3, 8], offset=131072)
        assert np.array_equal(found, array.reshape(3, 8))


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_the_stock_client_has_every_type_in_regions(
    serve: Callable[..., Headrace], every_type: Path, protocol: str
) -> None:
    server = serve(f"--model-repository={every_type}", ALLOW)
    module: Any = tritonclient.http if protocol == "http" else tritonclient.grpc
    with module.InferenceServerClient(f"127.0.0.1:{getattr(server, protocol)}") as client:
        for number, array in enumerate(ARRAYS):
            name = f"region{number}"
            tensor, wanted, handle = _round_trip(client, module, array, name)
            try:
                client.register_system_shared_memory(name, f"/{name}_{os.getpid()}", 262144 + 65536)
                answer = client.infer(type_name(array), [tensor], outputs=[wanted])
                assert "data':" not in str(answer.get_response()), "it is not sent as well"
                _check(handle, array, answer)
                assert len(client.get_system_shared_memory_status(name).regions if protocol == "grpc" else [1]) == 1
                client.unregister_system_shared_memory(name)
            finally:
                client_shm.destroy_shared_memory_region(handle)
        assert status(server.http) == []


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_the_asyncio_client_and_streams_have_regions(
    serve: Callable[..., Headrace], every_type: Path, protocol: str
) -> None:
    server = serve(f"--model-repository={every_type}", ALLOW)
    module: Any = tritonclient.http.aio if protocol == "http" else tritonclient.grpc.aio
    array = ARRAYS[9]

    async def ask() -> None:
        async with module.InferenceServerClient(f"127.0.0.1:{getattr(server, protocol)}") as client:
            tensor, wanted, handle = _round_trip(client, module, array, "aio")
            try:
                await client.register_system_shared_memory("aio", f"/aio_{os.getpid()}", 262144 + 65536)
                answer = await client.infer("FP32", [tensor], outputs=[wanted])
                _check(handle, array, answer)
                if protocol == "grpc":
                    client_shm.set_shared_memory_region(handle, [np.zeros((3, 8), np.float32)], offset=131072)
                    await stream(client, tensor, wanted)
                    _check(handle, array, None)
                await client.unregister_system_shared_memory()
            finally:
                client_shm.destroy_shared_memory_region(handle)

    async def stream(client: Any, tensor: Any, wanted: Any) -> None:
        async def requests() -> Any:
            yield {"model_name": "FP32", "inputs": [tensor], "outputs": [wanted]}

        async for answer, error in client.stream_infer(requests()):
            assert error is None
            assert answer.get_output("y").shape == [3, 8]
            return

    asyncio.run(ask())


# ---------------------------------------------------------------------- nothing outside of a region


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_nothing_outside_a_region_is_read_or_written(
    serve: Callable[..., Headrace], repository: Path, protocol: str
) -> None:
    """Two regions in the middle of a segment that is otherwise canaries. Oracle: arithmetic in Python."""
    server = serve(f"--model-repository={repository}", ALLOW)
    dice = random.Random(7)
    canary = b"\xa5" * 65536
    numbers = np.arange(1024, dtype=np.float32).tobytes()
    with segment(65536, canary) as (key, descriptor):
        assert register(server.http, "in", key, 4096, 12288 + 100)[0] == 200
        assert register(server.http, "out", key, 4096, 32768)[0] == 200
        client = http.client.HTTPConnection("127.0.0.1", server.http, timeout=60)
        stub = tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{server.grpc}")
        edges = [0, 1, 4, 100, 4092, 4095, 4096, 4097, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 4, 2**64 - 1, 2**64]
        accepted = 0
        for _ in range(400):
            os.pwrite(descriptor, canary, 0)
            os.pwrite(descriptor, numbers, 12288 + 100)
            offset, output_offset = (dice.choice([0, 1, 4, 100, dice.randrange(2048)]) for _ in "io")
            count = dice.choice([0, 1, 2, 8, dice.randrange(500)])
            size, output_size = count * 4, dice.choice([count * 4, 2048, 4096 - output_offset])
            match dice.randrange(8):  # at most one is wild
                case 0:
                    offset = dice.choice([*edges, -1, -4096, -100])
                case 1:
                    output_offset = dice.choice([*edges, -1, -4096, -100])
                case 2:
                    size = dice.choice([*edges, -1])
                case 3:
                    output_size = dice.choice([*edges, -1])
                case 4:
                    count = dice.choice([1023, 1024, 1025, 2**61])
                    size = count * 4
            placed = ("in", size, offset), ("out", output_size, output_offset)
            ok = _infer_placed(client if protocol == "http" else stub, count, *placed)
            fits = [0 <= each_offset < 4096 and 0 <= each_size <= 4096 - each_offset and each_offset + each_size > 0
                    for _, each_size, each_offset in placed]  # fmt: skip
            assert ok == (all(fits) and size == count * 4 <= output_size), (count, placed)
            accepted += ok
            wanted = bytearray(canary)
            wanted[12388 : 12388 + 4096] = numbers
            if ok:
                begin = 32768 + output_offset
                wanted[begin : begin + count * 4] = numbers[offset : offset + count * 4]
            assert os.pread(descriptor, 65536, 0) == bytes(wanted), (count, placed)
        assert accepted > 20, "the test tries what works, too"
        client.close()


def _infer_placed(client: Any, count: int, source: tuple[str, int, int], target: tuple[str, int, int]) -> bool:
    """True if the request is answered. Every refusal must be one of a client's error."""
    if isinstance(client, http.client.HTTPConnection):
        names = ("shared_memory_region", "shared_memory_byte_size", "shared_memory_offset")
        parameters = dict(zip(names, source, strict=True))
        body = {
            "inputs": [{"name": "x", "shape": [count], "datatype": "FP32", "parameters": parameters}],
            "outputs": [{"name": "y", "parameters": dict(zip(names, target, strict=True))}],
        }
        client.request("POST", INFER, json.dumps(body))
        answer = client.getresponse()
        text = answer.read().decode()
        assert answer.status in (200, 400, 500), text
        assert answer.status != 500 or "Unable to parse" in text or "should be at least" in text
        return answer.status == 200
    tensor, wanted = tritonclient.grpc.InferInput("x", [count], "FP32"), tritonclient.grpc.InferRequestedOutput("y")
    try:
        tensor.set_shared_memory(*source)
        wanted.set_shared_memory(*target)
        client.infer("numbers", [tensor], outputs=[wanted])
    except ValueError:  # protobuf has no such number
        return False
    except tritonclient.grpc.InferenceServerException as error:
        if error.status() == "StatusCode.INVALID_ARGUMENT" or "should be at least" in str(error):
            return False
        raise
    return True


def test_links_and_what_is_no_segment_are_not_opened(
    serve: Callable[..., Headrace], repository: Path, tmp_path: Path
) -> None:
    server = serve(f"--model-repository={repository}", ALLOW)
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret" * 1000)
    key = f"headrace_test_{os.getpid()}"
    root = Path("/dev/shm")
    special_files = [root / f"{key}_{kind}" for kind in ("link", "pipe", "folder", "socket")]
    listener = socket.socket(socket.AF_UNIX)
    try:
        special_files[0].symlink_to(secret)
        os.mkfifo(special_files[1])
        special_files[2].mkdir()
        listener.bind(str(special_files[3]))
        names = [path.name for path in special_files]
        for name in [
            *names,
            f"{names[2]}/x",
            f"../..{secret}",
            str(secret),
            "a\0b",
            "..",
            ".",
            "x" * 5000,
            "\u00e9" * 200,
        ]:
            code, answer = register(server.http, "r", name, 64)
            assert code in (400, 500), (name, answer)
            assert answer["error"].startswith("Unable to open shared memory region: ")
        for name in ("sem.any", "/sem.any", "triton_python_backend_shm_region_0"):
            code, answer = register(server.http, "r", name, 64)
            assert (code, "contains the reserved prefix" in answer["error"]) == (400, True)
        assert status(server.http) == []
    finally:
        listener.close()
        for path in special_files[:2] + special_files[3:]:
            path.unlink(missing_ok=True)
        special_files[2].rmdir()


def test_an_operator_names_the_segments_that_clients_may_use(serve: Callable[..., Headrace], repository: Path) -> None:
    server = serve(f"--model-repository={repository}", ALLOW, "--shm-key-prefix=/headrace_test_")
    with segment(64) as (key, _), Segments() as other:
        assert register(server.http, "mine", key, 64)[0] == 200
        code, answer = register(server.http, "theirs", other.key, 64)
        assert (code, "as --shm-key-prefix demands" in answer["error"]) == (403, True)


def test_the_number_of_regions_is_limited(serve: Callable[..., Headrace], repository: Path) -> None:
    server = serve(f"--model-repository={repository}", ALLOW, "--shm-max-regions=20")
    with segment(64) as (key, _):
        codes = [register(server.http, f"r{number}", key, 64)[0] for number in range(25)]
        assert codes == [200] * 20 + [429] * 5
        assert "--shm-max-regions" in register(server.http, "one%20more", key, 64)[1]["error"]
        assert post(server.http, f"{SYSTEM}/region/r3/unregister")[0] == 200
        assert register(server.http, "one%20more", key, 64)[0] == 200
        assert register(server.http, "n" * 1025, key, 64)[0] == 400


def test_regions_can_not_take_all_addresses(
    serve: Callable[..., Headrace], repository: Path, wait_until: Callable[..., None]
) -> None:
    """100 GiB are registered without a delay; 2^46 bytes, which a segment may have, are refused."""
    server = serve(f"--model-repository={repository}", ALLOW)
    with segment(100 << 30) as (key, descriptor):
        assert register(server.http, "large", key, 100 << 30)[0] == 200
        assert post(server.http, INFER, infer_body("large", 1024, 99 << 30))[0] == 200
        os.ftruncate(descriptor, 1 << 46)
        code, answer = register(server.http, "huge", key, 1 << 46)
        assert (code, "all regions together" in answer["error"]) == (429, True)
        assert server.rss_bytes < 2 << 30
        assert post(server.http, f"{SYSTEM}/unregister")[0] == 200
        wait_until(lambda: not mappings(server, key), "it is not mapped")


# ---------------------------------------------------------------------- how long regions last


def mappings(server: Headrace, key: str) -> list[str]:
    lines = Path(f"/proc/{server.process.pid}/maps").read_text().splitlines()
    return [line for line in lines if key in line]


def descriptors(server: Headrace) -> int:
    return len(list(Path(f"/proc/{server.process.pid}/fd").iterdir()))


def test_an_unregistered_region_leaves_nothing(
    serve: Callable[..., Headrace], repository: Path, wait_until: Callable[..., None]
) -> None:
    server = serve(f"--model-repository={repository}", ALLOW)
    with segment(1 << 20) as (key, _), httpx.Client(base_url=f"http://127.0.0.1:{server.http}") as client:
        before = 0
        for _ in range(5):
            for number in range(100):
                document = {"key": key, "byte_size": 8192, "offset": 4096 * (number % 9)}
                assert client.post(f"{SYSTEM}/region/r{number}/register", json=document).status_code == 200
                assert client.post(INFER, content=infer_body(f"r{number}", 2048, 2048)).status_code == 200
                assert client.post(INFER, content=infer_body(f"r{number}", 2048, 7000)).status_code == 400
                assert client.post(INFER, content=infer_body(f"r{number}", 8192, 4096)).status_code == 400
            assert len(mappings(server, key)) >= 10, "neighbours may be one line"
            assert client.post(f"{SYSTEM}/unregister").status_code == 200
            wait_until(lambda: not mappings(server, key), "nothing is mapped")
            before = before or descriptors(server)
            assert descriptors(server) <= before, "no descriptor per region"
            assert client.get(f"{SYSTEM}/status").json() == []


def test_a_region_that_a_request_uses_is_unregistered_after_it(
    serve: Callable[..., Headrace],
    make_gate: Callable[[Path], Gate],
    gated_environ: Mapping[str, str],
    tmp_path: Path,
    wait_until: Callable[..., None],
) -> None:
    (tmp_path / "waits" / "1").mkdir(parents=True)
    (tmp_path / "waits" / "config.pbtxt").write_text(GATED)
    gate = make_gate(tmp_path / "waits" / "1")
    server = serve(f"--model-repository={tmp_path}", ALLOW, environ=gated_environ)
    gate.close()
    numbers = np.arange(8, dtype=np.float32).tobytes()
    with segment(8192, numbers) as (key, descriptor), ThreadPoolExecutor(1) as pool:
        assert register(server.http, "r", key, 8192)[0] == 200
        body = infer_body("r", 32, 4096).replace(b'"x"', b'"IN"').replace(b'"y"', b'"OUT"')
        path = "/v2/models/waits/infer"
        asking = pool.submit(post, server.http, path, body)
        gate.wait_until_running()
        assert post(server.http, f"{SYSTEM}/region/r/unregister") == (200, None)
        assert [each["name"] for each in status(server.http)] == ["r"], "it is listed until the request is answered"
        assert register(server.http, "r", key, 64)[0] == 400, "its name is taken"
        assert post(server.http, path, body)[0] == 404, "no new request gets it"
        Path(f"/dev/shm/{key}").unlink()
        gate.open()
        assert asking.result(60)[0] == 200
        assert os.pread(descriptor, 32, 4096) == numbers
        wait_until(lambda: not status(server.http), "it has gone")
        wait_until(lambda: not mappings(server, key), "it is not mapped")


def test_two_requests_may_write_one_region(serve: Callable[..., Headrace], repository: Path) -> None:
    server = serve(f"--model-repository={repository}", ALLOW)
    size = 4 << 20
    with segment(5 * size) as (key, descriptor):
        for number in range(4):
            os.pwrite(descriptor, bytes([number + 1]) * size, number * size)
        assert register(server.http, "r", key, 5 * size)[0] == 200
        codes: list[int] = []

        def ask(number: int) -> None:
            place = {"shared_memory_region": "r", "shared_memory_byte_size": size}
            body = {
                "inputs": [{"name": "x", "shape": [size // 4], "datatype": "FP32",
                            "parameters": {**place, "shared_memory_offset": number * size}}],
                "outputs": [{"name": "y", "parameters": {**place, "shared_memory_offset": 4 * size}}],
            }  # fmt: skip
            codes.extend(post(server.http, INFER, body)[0] for _ in range(10))

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert codes == [200] * 40
        assert set(os.pread(descriptor, size, 4 * size)) <= {1, 2, 3, 4}
        for number in range(4):
            assert set(os.pread(descriptor, size, number * size)) == {number + 1}


# ---------------------------------------------------------------------- segments that shrink


@pytest.mark.parametrize("copying", ["--shm-copy-inputs=false", "--shm-copy-inputs=true"])
def test_a_segment_that_shrinks_is_an_error_and_no_more(
    serve: Callable[..., Headrace], repository: Path, copying: str
) -> None:
    server = serve(f"--model-repository={repository}", ALLOW, copying)
    numbers = np.arange(8192, dtype=np.float32).tobytes()
    with segment(65536, numbers) as (key, descriptor), segment(65536) as (other, _):
        assert register(server.http, "r", key, 65536)[0] == 200
        assert register(server.http, "other", other, 65536)[0] == 200
        assert post(server.http, INFER, infer_body("r", 32768, 32768))[0] == 200
        os.ftruncate(descriptor, 0)
        for body in (infer_body("r", 32768), infer_body("r", 32, 32768)):
            code, answer = post(server.http, INFER, body)
            assert (code, answer["error"]) == (
                400,
                "shared memory region 'r' is lost, because its segment was shrunk, or there was no memory for it: "
                "unregister it, and register it again",
            )
        assert register(server.http, "again", key, 64)[0] == 400
        os.ftruncate(descriptor, 65536)
        assert post(server.http, INFER, infer_body("r", 32))[0] == 400, "its pages are no longer those of the segment"
        assert post(server.http, INFER, infer_body("other", 32, 64))[0] == 200, "others go on"
        assert post(server.http, f"{SYSTEM}/region/r/unregister")[0] == 200
        assert register(server.http, "r", key, 65536)[0] == 200
        os.pwrite(descriptor, numbers, 0)
        code, answer = post(server.http, INFER, infer_body("r", 32))
        assert (code, answer["outputs"][0]["data"]) == (200, list(range(8)))
    server.stop()


def test_hundreds_of_requests_survive_a_segment_that_shrinks_and_grows(
    serve: Callable[..., Headrace], repository: Path
) -> None:
    """Large tensors, so that threads of the server are in the middle of a copy."""
    server = serve(f"--model-repository={repository}", ALLOW)
    size = 4 << 20
    before = 0
    with segment(2 * size) as (key, descriptor):
        assert register(server.http, "r0", key, 2 * size)[0] == 200
        turn, ended, codes = [0], threading.Event(), set[int]()

        def ask(with_output: bool) -> None:
            client = http.client.HTTPConnection("127.0.0.1", server.http, timeout=60)
            while not ended.is_set():
                body = infer_body(f"r{turn[0]}", size, size if with_output else None)
                client.request("POST", INFER, body)
                answer = client.getresponse()
                answer.read()
                codes.add(answer.status)
            client.close()

        threads = [threading.Thread(target=ask, args=(True,)) for _ in range(4)]
        for each in threads:
            each.start()
        number, deadline_s = 0, monotonic() + 60
        while number < 14 or not {200, 400} <= codes:  # whether a request is in the middle of a copy is chance
            assert monotonic() < deadline_s, codes
            number += 1
            os.ftruncate(descriptor, random.choice([0, 4096, size, size + 4096]))
            os.ftruncate(descriptor, 2 * size)
            assert register(server.http, f"r{number}", key, 2 * size)[0] == 200
            turn[0] = number
            assert post(server.http, f"{SYSTEM}/region/r{number - 1}/unregister")[0] == 200
            before = before or descriptors(server)
        ended.set()
        for each in threads:
            each.join()
        assert codes <= {200, 400, 404}
        assert server.get("/v2/health/live")[0] == 200
        assert descriptors(server) <= before + 8
        assert len(mappings(server, key)) <= 2
    server.stop()


def test_a_segment_that_shrinks_while_the_model_runs_is_an_error(
    serve: Callable[..., Headrace],
    make_gate: Callable[[Path], Gate],
    gated_environ: Mapping[str, str],
    tmp_path: Path,
) -> None:
    """Also if the output is the input itself, which is only read when it is written elsewhere, or sent."""
    (tmp_path / "waits" / "1").mkdir(parents=True)
    (tmp_path / "waits" / "config.pbtxt").write_text(GATED)
    gate = make_gate(tmp_path / "waits" / "1")
    server = serve(f"--model-repository={tmp_path}", ALLOW, environ=gated_environ)
    with segment(65536) as (key, descriptor), segment(65536) as (other, _), ThreadPoolExecutor(1) as pool:
        assert register(server.http, "out", other, 65536)[0] == 200
        place = {"shared_memory_byte_size": 16384, "shared_memory_region": "out"}
        for outputs in (
            [],
            [{"name": "OUT", "parameters": place}],
            [{"name": "OUT", "parameters": {"binary_data": True}}],
        ):
            os.ftruncate(descriptor, 65536)
            assert register(server.http, "r", key, 65536)[0] == 200
            body = json.loads(infer_body("r", 16384).replace(b'"x"', b'"IN"')) | {"outputs": outputs}
            gate.close()
            asking = pool.submit(post, server.http, "/v2/models/waits/infer", body)
            gate.wait_until_running()
            os.ftruncate(descriptor, 100)
            gate.open()
            code, answer = asking.result(60)
            assert (code, "shared memory region 'r' is lost" in answer["error"]) == (400, True)
            assert post(server.http, f"{SYSTEM}/region/r/unregister")[0] == 200


FAULT = """
import mmap, os, signal, sys
from headrace_shm.segments import register_segment
key, how = sys.argv[1:]
region = register_segment("r", key, 0, 8192, "")
other = os.open(f"/dev/shm/{key}", os.O_RDWR)
mine = mmap.mmap(other, 4096)
if how == "kill":
    os.kill(os.getpid(), signal.SIGBUS)
os.ftruncate(other, 0)
assert bytes(region.memory[:8]) == bytes(8) and region.is_lost
print("alive", flush=True)
mine[0]
print("never")
"""


@pytest.mark.parametrize("how", ["fault", "kill"])
def test_other_bus_errors_still_end_the_process(how: str) -> None:
    with segment(8192) as (key, _):
        command = [sys.executable, "-X", "faulthandler", "-c", FAULT, key, how]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == -7
    assert ended.stdout == ("alive\n" if how == "fault" else "")
    assert "Fatal Python error: Bus error" in ended.stderr


# ---------------------------------------------------------------------- copies


def test_inputs_of_fixed_size_are_not_copied_and_strings_are(repository: Path) -> None:
    for copies in (False, True):
        with serve_here(repository, **_copying(copies)) as server, segment(8192) as (key, descriptor):
            (location,) = server.engine.additions(TensorLocation)
            extension = location.extension
            on_loop(server, extension.register_system("r", key, 0, 8192))
            parameters: Mapping[str, Any] = {"shared_memory_region": "r", "shared_memory_byte_size": 64}
            numbers = location.source(parameters, Spec("x", dtypes.FP32, (16,)))
            texts = location.source(parameters, Spec("x", dtypes.BYTES, (1,)))
            os.pwrite(descriptor, b"later", 0)
            assert (bytes(numbers[:5]) == b"later") is not copies
            assert bytes(texts[:5]) == bytes(5)
            del numbers, texts


def test_an_output_that_is_too_large_keeps_no_region(repository: Path) -> None:
    """Without a garbage collection: the error and its frames must not form a cycle."""
    with serve_here(repository, listen=True, allow_client_shm=True) as server, segment(8192) as (key, _):
        tensor, wanted = tritonclient.grpc.InferInput("x", [8], "FP32"), tritonclient.grpc.InferRequestedOutput("y")
        tensor.set_shared_memory("r", 32)
        wanted.set_shared_memory("r", 31)
        port = server.options.http_port
        gc.collect()
        gc.disable()
        try:
            with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{server.options.grpc_port}") as client:
                client.register_system_shared_memory("r", key, 8192)
                with pytest.raises(tritonclient.grpc.InferenceServerException, match="should be at least 32 bytes"):
                    client.infer("numbers", [tensor], outputs=[wanted])
            assert post(port, INFER, infer_body("r", 31, 64, [8]))[0] == 400
            assert post(port, f"{SYSTEM}/unregister")[0] == 200
            assert status(port) == []
        finally:
            gc.enable()


def _copying(copies: bool) -> dict[str, Any]:
    return {"allow_client_shm": True, "plugin_options": (ShmOptions(copy_inputs=copies),)}


def test_a_body_that_is_nested_too_deep_is_refused_at_once(serve: Callable[..., Headrace], repository: Path) -> None:
    server = serve(f"--model-repository={repository}", ALLOW)
    for root in (SYSTEM, SYSTEM.replace("system", "cuda")):
        for depth in (101, 1_000_000):
            for body in (b"[" * depth + b"]" * depth, b'{"key":' * depth + b"1" + b"}" * depth):
                code, answer = post(server.http, f"{root}/region/r/register", body)
                assert (code, "nesting depth" in answer["error"] or "at most" in answer["error"]) == (400, True), answer


def test_only_a_caller_with_the_key_registers(serve: Callable[..., Headrace], repository: Path) -> None:
    words = ["--http-restricted-api=shared-memory:key=value", "--grpc-restricted-protocol=shared-memory:key=value"]
    server = serve(f"--model-repository={repository}", ALLOW, *words)
    with segment(64) as (key, _):
        assert register(server.http, "r", key, 64)[0] == 403
        assert httpx.get(f"http://127.0.0.1:{server.http}{SYSTEM}/status").status_code == 403
        client = tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{server.grpc}")
        with pytest.raises(tritonclient.grpc.InferenceServerException, match="restricted"):
            client.register_system_shared_memory("r", key, 64)
        headers = {"triton-grpc-protocol-key": "value"}
        client.register_system_shared_memory("r", key, 64, headers=headers)
        assert client.get_system_shared_memory_status(headers=headers).regions["r"].byte_size == 64
