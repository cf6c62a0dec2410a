"""``headrace compare`` of two real servers whose models differ in one way each. Also bad files and addresses."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from headrace_cli import main
from headrace_compare.answer_differences import (
    Tolerances,
    compare_answers,
    compare_documents,
    compare_tensors,
    shape_of,
)
from headrace_compare.answers import ServerAnswer
from headrace_compare.documented import page_of_absent_statistics
from headrace_compare.named_tensors import BadTensor, NamedTensor
from headrace_compare.request_sources import made_requests, read_requests
from headrace_testing import CommandConformance
from tests.commands.compare.repositories import CHANGED, write_repository

if TYPE_CHECKING:
    from tests.conftest import Headrace


class TestCompare(CommandConformance):
    plugin, command = "headrace_compare", "compare"


@pytest.fixture(scope="module")
def servers(
    tmp_path_factory: pytest.TempPathFactory, keep_serving: Callable[..., Headrace]
) -> tuple[Headrace, Headrace]:
    paths = [tmp_path_factory.mktemp("repository") for _ in range(2)]
    for is_second, path in enumerate(paths):
        write_repository(path, is_second=bool(is_second))
    first, second = (keep_serving(f"--model-repository={path}", "--plugins=python,http,grpc") for path in paths)
    return first, second


def compared(servers: tuple[Headrace, Headrace], protocol: str, *words: str, same: bool = False) -> tuple[int, Any]:
    """Run the command with ``--format=json``. Return its exit code and what it prints."""
    first, second = servers[0], servers[0] if same else servers[1]
    urls = [f"{protocol}://127.0.0.1:{getattr(each, protocol)}" for each in (first, second)]
    text = StringIO()
    with redirect_stdout(text):
        code = main(["compare", *urls, "--format=json", "--count=3", *words])
    return code, json.loads(text.getvalue())


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_each_kind_of_difference_is_found(servers: tuple[Headrace, Headrace], protocol: str) -> None:
    code, report = compared(servers, protocol)
    assert code == 1
    found: dict[str, set[str]] = {}
    for each in report["differences"]:
        if not each["docs"]:
            found.setdefault(each["model"], set()).add(each["kind"])
    failed = {"status", "error text", "statistics"}
    assert found == {
        "values": {"values"},
        "shape": {"shape"},
        "datatype": {"datatype", "metadata", "config"},
        "renamed": {"outputs", "metadata", "config"},
        "status": failed & found["status"],
        "texts": {"error text"},
        "config": {"config"},
        "extra": {"index"},
    } | ({"stream": {"responses", "response", "outputs"}} if protocol == "grpc" else {})
    assert {"status", "error text"} <= found["status"]
    assert report["requests"] == dict.fromkeys([*CHANGED, "stream"], 3)
    (values, *_) = (each for each in report["differences"] if each["kind"] == "values")
    assert values["field"] == "output 'OUT'[2], first of 2 in 4; largest 7 at [3]"
    assert float(values["second"]) - float(values["first"]) == pytest.approx(0.5, abs=1e-3)
    assert all(each["p50"] > 0 for each in report["latency_ms"].values())


def test_a_server_equals_itself(servers: tuple[Headrace, Headrace]) -> None:
    for protocol in ("http", "grpc"):
        code, report = compared(servers, protocol, same=True)
        assert (code, report["differences"], len(report["requests"])) == (0, [], len(CHANGED) + 1)


def test_two_protocols_give_the_same_tensors(
    servers: tuple[Headrace, Headrace], capsys: pytest.CaptureFixture[str]
) -> None:
    urls = [f"http://127.0.0.1:{servers[0].http}", f"grpc://127.0.0.1:{servers[0].grpc}"]
    assert main(["compare", *urls, "--model=same", "--model=stream"]) == 0
    stdout = capsys.readouterr().out
    assert "'stream' is decoupled" in stdout
    assert stdout.endswith("10 requests to 1 model: no difference\n")


def test_tolerances_and_ignored_fields(servers: tuple[Headrace, Headrace]) -> None:
    assert compared(servers, "http", "--model=close")[0] == 0
    assert compared(servers, "http", "--model=close", "--rtol=1e-9", "--atol=0")[1]["kinds"] == {"values": 3}
    assert compared(servers, "http", "--model=config", "--ignore=config instance_group")[0] == 0
    assert compared(servers, "http", "--model=values", "--atol=10")[0] == 0


def test_recorded_requests(servers: tuple[Headrace, Headrace], tmp_path: Path) -> None:
    tensor = {"name": "IN", "datatype": "FP32", "shape": [4], "data": [[1, 2], [3, 4]]}
    lines = [
        {"model": "same", "id": "a", "inputs": [tensor]},
        {"path": "/v2/models/values/versions/1/infer", "headers": {"X-Tenant": "t"}, "body": {"inputs": [tensor]}},
        {"model": "nobody", "inputs": []},
        {"model": "same", "inputs": [{**tensor, "shape": [3]}]},
    ]
    file = tmp_path / "requests.jsonl"
    file.write_text("\n\n".join(map(json.dumps, lines)))
    code, report = compared(servers, "http", "--requests", str(file))
    assert (code, report["kinds"], report["requests"]) == (1, {"values": 1}, {"same": 2, "values": 1, "nobody": 1})
    assert report["differences"][0]["place"] == f"{file}:3"


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_headers_of_a_recorded_connection_are_not_sent(
    servers: tuple[Headrace, Headrace], tmp_path: Path, protocol: str
) -> None:
    recorded = {"Content-Length": "7", "Accept-Encoding": "gzip", "Connection": "close", "TE": "trailers", "X-A": "b"}
    line = {
        "path": "/v2/models/values/infer",
        "headers": recorded,
        "body": {
            "inputs": [{"name": "IN", "datatype": "FP32", "shape": [4], "data": [1, 2, 3, 4]}],
            "parameters": {"large": 10**20},
        },
    }
    (tmp_path / "file").write_text(json.dumps(line))
    code, report = compared(servers, protocol, "--requests", str(tmp_path / "file"))
    assert (code, report["kinds"]) == (1, {"values": 1})


def test_the_file_of_perf_analyzer(servers: tuple[Headrace, Headrace], tmp_path: Path) -> None:
    file = tmp_path / "data.json"
    steps = [
        {"IN": {"content": [1, 2, 3, 4], "shape": [4]}},
        [{"IN": [5, 6, 7, 8]}],
        {"IN": {"b64": "AACAPwAAAEAAAEBAAACAQA=="}},
    ]
    file.write_text(json.dumps({"data": steps}))
    code, report = compared(servers, "grpc", "--requests", str(file), "--model=values")
    assert (code, report["requests"]) == (1, {"values": 3})
    firsts = [float(each["first"]) for each in report["differences"]]
    assert firsts == [6, 14, 6]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no request is in it"),
        (b"{", ":1: no JSON"),
        (b'{"model": "m", "inputs": []}\n[1]\n', ":2: expected a JSON object"),
        (b'{"inputs": []}', ":1: it names no model"),
        (b'{"model": "m"}', ":1: expected an object with a list 'inputs'"),
        (b'{"path": "/v2/health/live", "body": {}}', "'path' is '/v2/health/live'"),
        (b'{"model": "m", "inputs": [{"name": "IN", "datatype": "FP31", "shape": [1], "data": [1]}]}', "FP31"),
        (b'{"model": "m", "inputs": [{"name": "IN", "datatype": "INT8", "shape": [1], "data": ["x"]}]}', "no tensor"),
        (b'{"model": "m", "inputs": [7]}', "no tensor"),
        (b'{"model": "m", "inputs": [], "parameters": 5}', ":1: 'parameters' is no object"),
        (b'{"model": "m", "inputs": [], "outputs": [5]}', ":1: 'outputs' is no list of objects with a 'name'"),
        (
            b'{"model": "m", "inputs": [], "headers": {"X": "a\\r\\nb: c"}}',
            ":1: the value of the header 'X' is no string",
        ),
        (b'{"model": "m", "inputs": [], "headers": {"": "x"}}', ":1: '' is no name of a header"),
        (b'{"data": [{"IN": [1]}]}', "give --model"),
        (b"[" * 100_000, "no JSON"),
        (b"\xff\xfe\x00", "no JSON"),
    ],
)
def test_a_wrong_file_is_refused_before_anything_is_sent(
    tmp_path: Path, servers: tuple[Headrace, Headrace], capsys: pytest.CaptureFixture[str], content: bytes, message: str
) -> None:
    (tmp_path / "file").write_bytes(content)
    urls = [f"http://127.0.0.1:{each.http}" for each in servers]
    assert main(["compare", *urls, "--requests", str(tmp_path / "file")]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert len(captured.err.splitlines()) == 1


def test_unreachable_servers_are_an_error(
    servers: tuple[Headrace, Headrace], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = f"http://127.0.0.1:{servers[0].http}"
    for other in ("http://127.0.0.1:1", "grpc://127.0.0.1:1", f"http://127.0.0.1:{servers[0].grpc}"):
        assert main(["compare", good, other, "--timeout=5"]) == 2
        assert "127.0.0.1" in capsys.readouterr().err
    for wrong in ("ftp://x:1", "localhost:8000", "http://x:y"):
        with pytest.raises(SystemExit, match="1"):
            main(["compare", good, wrong])
        assert "is no address" in capsys.readouterr().err
    assert main(["compare", good, good, "--requests", str(tmp_path / "nowhere")]) == 2
    assert main(["compare", good, good, "--model=nobody"]) == 2
    assert "'nobody' is no model that is ready on" in capsys.readouterr().err
    for header in ("nothing", "ü:x", "X:a\nb"):
        assert main(["compare", good, good, "--header", header]) == 2
        assert capsys.readouterr().err.startswith("--header: ")
    for words in ("--timeout=-1", "--timeout=nan", "--seed=-1", "--count=-1", "--rtol=nan", "--atol=-1"):
        with pytest.raises(SystemExit, match="1"):
            main(["compare", good, good, words])


# ---------------------------------------------------------------------- without a server


def tensor(values: Any, datatype: str = "FP32", shape: Any = None) -> NamedTensor:
    array = np.asarray(values)
    return NamedTensor("T", datatype, tuple(shape or array.shape), array.reshape(-1))


def test_values_by_datatype() -> None:
    def fields(one: NamedTensor, other: NamedTensor) -> list[str]:
        return [each.field for each in compare_tensors(one, other, Tolerances())]

    nan = [np.nan, np.inf, 1.0]
    assert fields(tensor(nan), tensor(nan)) == []
    assert fields(tensor(nan), tensor([0.0, np.inf, 1.0])) == ["output 'T'[0], first of 1 in 3; largest inf at [0]"]
    assert fields(tensor([1, 2], "INT64"), tensor([1, 3], "INT64")) == ["output 'T'[1], first of 1 in 2"]
    large = [2**60, 2**60 + 1], [2**60, 2**60 + 2]
    assert fields(tensor(large[0], "INT64"), tensor(large[1], "INT64")) == ["output 'T'[1], first of 1 in 2"]
    words = [np.array([b"a", b"b"], object), np.array([b"a", b"c"], object)]
    assert fields(tensor(words[0], "BYTES"), tensor(words[1], "BYTES")) == ["output 'T'[1], first of 1 in 2"]
    assert fields(tensor(np.zeros((2, 0))), tensor(np.zeros((2, 0)))) == []
    assert fields(tensor(np.zeros((2, 3))), tensor(np.zeros((3, 2)))) == ["output 'T': shape"]
    assert fields(tensor(np.float32(1), shape=()), tensor(np.float32(2), shape=())) == [
        "output 'T', first of 1 in 1; largest 1 at "
    ]
    assert fields(tensor([1.0, 2.0], shape=(3,)), tensor([1.0, 3.0], shape=(3,)))[0].startswith("output 'T'[1]")


def test_headers_and_fields() -> None:
    one = ServerAnswer("200", fields={"id": "1"}, headers={"content-type": "application/json"})
    other = ServerAnswer("200", fields={"id": "2", "parameters": {"a": True}}, headers={"content-type": "text/html"})
    found = list(compare_answers(one, other, Tolerances(), same_protocol=True))
    assert [(each.kind, each.field) for each in found] == [
        ("response", "id"),
        ("response", "parameters"),
        ("headers", "header content-type"),
    ]
    assert [each.kind for each in compare_answers(one, other, Tolerances(), same_protocol=False)] == ["response"] * 2


def test_documents() -> None:
    one, other = {"a": [1, {"b": 2}], "c": 1}, {"a": [1, {"b": 3}, 4], "c": True}
    assert [(each.field, each.first, each.second) for each in compare_documents(one, other, "config")] == [
        ("a[1].b", "2", "3"),
        ("a[2]", "absent", "4"),
        ("c", "1", "True"),
    ]
    assert shape_of({"a": [{"b": 1}, {"c": {"d": 2}}], "e": []}) == {"a[].b", "a[].c.d"}


PYTHON, DECOUPLED = {"backend": "python"}, {"backend": "python", "model_transaction_policy": {"decoupled": True}}
BATCH, RESPONSE = "model_stats[].batch_stats[].batch_size", "model_stats[].response_stats.0.success.count"


def counted(fail: int, success: int) -> dict[str, Any]:
    return {"model_stats": [{"inference_stats": {"fail": {"count": str(fail)}, "success": {"count": success}}}]}


@pytest.mark.parametrize(
    ("path", "config", "statistics", "is_documented"),
    [
        (BATCH, PYTHON, counted(3, 0), True),
        (BATCH, PYTHON, counted(3, 1), False),
        (BATCH, PYTHON, counted(0, 0), False),
        (BATCH, {"backend": "onnxruntime"}, counted(3, 0), False),
        (BATCH, PYTHON, {"error": "unknown model"}, False),
        (BATCH, PYTHON, None, False),
        (RESPONSE, DECOUPLED, counted(0, 3), True),
        (RESPONSE, PYTHON, counted(0, 3), False),
        ("model_stats[].inference_stats.fail.count", PYTHON, counted(3, 0), False),
    ],
)
def test_absent_statistics_are_reported_only_where_documented(
    path: str, config: Any, statistics: Any, is_documented: bool
) -> None:
    assert bool(page_of_absent_statistics(path, config, statistics)) is is_documented


@pytest.mark.parametrize("datatype", ["FP16", "BF16", "BYTES", "BOOL", "UINT64", "FP64"])
def test_tensors_survive_their_bytes(datatype: str) -> None:
    data = ["grün", ""] if datatype == "BYTES" else [True, False] if datatype == "BOOL" else [1, 2]
    document = {"name": "T", "datatype": datatype, "shape": [2], "data": data}
    one = NamedTensor.from_json(document)
    other = NamedTensor.from_bytes("T", datatype, [2], one.wire_bytes())
    assert not list(compare_tensors(one, other, Tolerances()))
    with pytest.raises(BadTensor):
        NamedTensor.from_bytes("T", datatype if datatype != "BOOL" else "FP32", [2], one.wire_bytes()[:-1] or b"x")


def test_generated_requests_depend_only_on_the_seed() -> None:
    metadata = {
        "inputs": [
            {"name": name, "datatype": datatype, "shape": ["-1", -1, 3]}
            for name, datatype in (("A", "FP32"), ("B", "BYTES"), ("C", "BOOL"), ("D", "INT64"))
        ]
    }
    one, again, other = (
        [each.body for each in made_requests("m", metadata, {"max_batch_size": 2}, 5, seed)] for seed in (1, 1, 2)
    )
    assert one == again != other
    for body in one:
        shapes = {tuple(each["shape"]) for each in body["inputs"]}
        assert len(shapes) == 1
        assert 1 <= next(iter(shapes))[0] <= 2
        assert all(len(each["data"]) == np.prod(each["shape"]) for each in body["inputs"])


def test_requests_are_read_one_by_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_text('{"model": "m", "inputs": []}\n{')
    assert next(read_requests(tmp_path / "file", "")).model == "m"
