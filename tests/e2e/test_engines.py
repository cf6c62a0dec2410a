"""One net in the format of every engine (examples/engines), all served by one server: they answer alike.

The oracle is arithmetic with the net's weights, in twice the precision.
"""

from __future__ import annotations

import fcntl
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

if TYPE_CHECKING:
    from tests.conftest import Headrace
    from tests.e2e.conftest import Reply

Array: TypeAlias = "npt.NDArray[Any]"

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/engines"


@dataclass(frozen=True)
class Format:
    """``engine`` is a module, ``file`` the one to break, ``error_name`` its name in errors, ``names`` the tensors'
    names."""

    backend: str
    engine: str
    file: str
    error_name: str = ""
    names: tuple[str, str] = ("image", "probabilities")


FORMATS = {
    "onnx": Format("onnxruntime", "onnxruntime", "model.onnx"),
    "openvino": Format("openvino", "openvino", "model.xml"),
    "torchscript": Format("pytorch", "torch", "model.pt"),
    "eager": Format("pytorch", "torch", "model.py"),
    "exported": Format("pytorch", "torch", "model.pt2"),
    "aoti": Format("pytorch", "torch", "model.pt2"),
    "savedmodel": Format(
        "tensorflow", "tensorflow", "model.savedmodel/saved_model.pb", "model.savedmodel|saved_model.pb"
    ),
    "graphdef": Format("tensorflow", "tensorflow", "model.graphdef"),
    "python": Format("python", "", "model.py", "model.py|module '1.model'"),
}
if shutil.which("g++") is None:
    del FORMATS["aoti"]  # it is native code, and compiled on the spot
ENGINES = {form.engine for form in FORMATS.values()} - {""} | {"tensorrt"}
#: How each is served, by the end of its name: instances, and their executors.
VARIANTS = {"": (1, "thread"), "_four": (4, "thread"), "_apart": (1, "process")}
CONFIG = """
instance_group {{ kind: KIND_CPU count: {} }}
parameters {{ key: "isolation" value {{ string_value: "{}" }} }}
"""
#: Formats that run in a process, too: one of each engine.
APART = ("onnx", "openvino", "exported", "savedmodel", "python")
MODELS = [f"digits_{name}{variant}" for name in FORMATS for variant in VARIANTS if variant != "_apart" or name in APART]
PROTOCOLS = ("http", "grpc")
#: The tolerance for engines that add in another order, in single precision.
TOLERANCE = 1e-5


def format_of(model: str) -> Format:
    return FORMATS[model.split("_")[1]]


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder that make_models.py writes, once for all test processes."""
    base = tmp_path_factory.getbasetemp()
    root = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    with (root / "engines.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (root / "engines").exists():
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(root / "inductor"))
                make_models(root / "engines-in-the-making")
            (root / "engines-in-the-making").rename(root / "engines")
    return root / "engines"


def make_models(models: Path) -> None:
    """Half by half, since one format of PyTorch's takes as long as all others."""
    script = [sys.executable, str(EXAMPLE / "make_models.py")]
    (known,) = re.findall(r"of ([\w, ]+) \(default: all\)", " ".join(run([*script, "--help"]).split()))
    assert set(known.split(", ")) == FORMATS.keys() | {"aoti", "tensorrt"}, "this suite has every format"
    halves = (["aoti"], [name for name in known.split(", ") if name != "aoti"])
    with ThreadPoolExecutor(2) as pool:
        printed = list(pool.map(lambda names: run([*script, f"--models={models}", "--formats", *names]), halves))
    lines = dict(re.findall(r"^digits_(\w+) +(.*)$", "".join(printed), re.MULTILINE))
    assert {name for name, text in lines.items() if "left out" not in text} >= FORMATS.keys(), printed


def run(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="session")
def repository(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a repository of `MODELS`."""
    root = tmp_path_factory.mktemp("repository")
    for name in MODELS:
        form, variant = re.fullmatch(r"(digits_[a-z]+)(\w*)", name).groups()  # type: ignore[union-attr]
        model = shutil.copytree(made / form, root / name)
        with (model / "config.pbtxt").open("a") as file:
            file.write(CONFIG.format(*VARIANTS[variant]))
    return root


@pytest.fixture(scope="session")
def server(repository: Path, keep_serving: Callable[..., Headrace]) -> Headrace:
    loads = [f"--load-model={model}" for model in MODELS]
    return keep_serving(f"--model-repository={repository}", "--model-control-mode=explicit", *loads)


@pytest.fixture(scope="session")
def arithmetic(made: Path) -> Callable[[Array], Array]:
    """``images`` u8[rows, 8, 8] -> probabilities f64[rows, 10]."""
    with np.load(made / "digits_python/1/weights.npz") as arrays:
        names = ("weight0", "bias0", "weight1", "bias1")
        weight0, bias0, weight1, bias1 = (arrays[name].astype(np.float64) for name in names)

    def compute(images: Array) -> Array:
        scores = np.maximum(images.reshape(-1, 64) / 16 @ weight0 + bias0, 0) @ weight1 + bias1
        powers = np.exp(scores)
        result: Array = powers / powers.sum(1, keepdims=True)
        return result

    return compute


def pictures(rows: int, seed: int = 0) -> Array:
    """u8[rows, 8, 8] of noise with the values of the digits."""
    return np.random.default_rng(seed).integers(0, 17, (rows, 8, 8)).astype(np.uint8)


def connect(server: Headrace, protocol: str) -> Any:
    """A stock client, as a context manager."""
    module = getattr(tritonclient, protocol)
    return module.InferenceServerClient(f"127.0.0.1:{getattr(server, protocol)}")


@pytest.fixture(params=PROTOCOLS)
def client(request: pytest.FixtureRequest, server: Headrace) -> Iterator[Any]:
    with connect(server, request.param) as client:
        yield client


def ask(client: Any, model: str, images: Array, name: str = "") -> Array:
    """Return the answer of ``model`` to one request, over the protocol of ``client``."""
    module = sys.modules[type(client).__module__.rpartition(".")[0]]
    takes, gives = format_of(model).names
    tensor = module.InferInput(name or takes, list(images.shape), np_to_triton_dtype(images.dtype))
    tensor.set_data_from_numpy(images)
    answer: Array = client.infer(model, [tensor]).as_numpy(gives)
    assert answer.dtype == np.float32
    return answer


@pytest.fixture(scope="session")
def check(arithmetic: Callable[[Array], Array]) -> Callable[..., None]:
    """Send noise of ``seed`` to ``model``, and compare the answer with arithmetic."""

    def check(client: Any, model: str, rows: int, seed: int = 0) -> None:
        images = pictures(rows, seed)
        np.testing.assert_allclose(ask(client, model, images), arithmetic(images), atol=TOLERANCE)

    return check


@pytest.mark.parametrize("model", MODELS)
def test_every_engine_answers_as_arithmetic_does(client: Any, model: str, check: Callable[..., None]) -> None:
    for rows in (1, 3, 64):
        check(client, model, rows, rows)


def test_many_callers_of_all_engines_at_once_each_get_the_answer_to_their_own_request(
    server: Headrace, check: Callable[..., None]
) -> None:
    def call(caller: int) -> None:
        choose = random.Random(caller)
        with connect(server, "http") as client:
            for number in range(30):
                check(client, choose.choice(MODELS), choose.randint(1, 8), 1000 * caller + number)

    with ThreadPoolExecutor(12) as pool:
        for _ in pool.map(call, range(12)):
            pass


@pytest.mark.parametrize("name", FORMATS)
def test_rows_of_many_requests_are_executed_together(
    server: Headrace,
    repository: Path,
    made: Path,
    post: Callable[..., Reply],
    check: Callable[..., None],
    name: str,
) -> None:
    model = f"together_{name}"
    path = shutil.copytree(made / f"digits_{name}", repository / model) / "config.pbtxt"
    batching = "dynamic_batching { preferred_batch_size: 8 max_queue_delay_microseconds: 500000 }"
    path.write_text(path.read_text().replace("dynamic_batching { }", batching))
    assert post(server, f"/v2/repository/models/{model}/load", {}).status == 200

    def call(seed: int) -> None:
        with connect(server, "http") as client:
            check(client, model, 1, seed)

    with ThreadPoolExecutor(8) as pool:
        for _ in pool.map(call, range(8)):
            pass
    assert server.metric("nv_inference_count", model) == 8
    assert server.metric("nv_inference_exec_count", model) < 8


#: Invalid requests: the tensor's name and array, and the error.
WRONG: dict[str, tuple[str, Array, str]] = {
    "shape": ("", np.zeros((2, 8, 9), np.uint8), r"shape for input '{input}' .*Expected \[-1,8,8\], got \[2,8,9\]"),
    "rank": ("", np.zeros(64, np.uint8), r"'{input}'.*\[64\]"),
    "data type": ("", np.zeros((1, 8, 8), np.float32), "input '{input}' data-type is 'FP32', .* expects 'UINT8'"),
    "name": ("picture", np.zeros((1, 8, 8), np.uint8), "'picture'"),
    "rows": ("", np.zeros((65, 8, 8), np.uint8), "batch-size must be <= 64"),
}


@pytest.mark.parametrize("name", FORMATS)
def test_an_invalid_request_is_refused_with_the_reason_and_affects_no_other(
    server: Headrace, name: str, check: Callable[..., None]
) -> None:
    model = f"digits_{name}"

    def well(seed: int) -> None:
        with connect(server, "http") as client:
            for number in range(10):
                check(client, model, 2, 100 * seed + number)

    def badly(what: str, protocol: str) -> None:
        other, images, words = WRONG[what]
        with connect(server, protocol) as client:
            for _ in range(5):
                with pytest.raises(InferenceServerException) as refused:
                    ask(client, model, images, other)
                assert refused.value.status() == {"http": "400", "grpc": "StatusCode.INVALID_ARGUMENT"}[protocol]
                assert re.search(words.format(input=format_of(model).names[0]), refused.value.message())
                assert model in refused.value.message()

    with ThreadPoolExecutor(14) as pool:
        calls = [pool.submit(well, seed) for seed in range(4)]
        calls += [pool.submit(badly, what, protocol) for what in WRONG for protocol in PROTOCOLS]
        for done in calls:
            done.result(60)


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "truncated": lambda content: content[: len(content) // 3],
    "noise": lambda content: random.Random(0).randbytes(4096),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", FORMATS)
def test_a_broken_file_stops_its_own_model_only_and_the_error_names_it(
    server: Headrace,
    repository: Path,
    made: Path,
    post: Callable[..., Reply],
    check: Callable[..., None],
    name: str,
    damage: str,
) -> None:
    model = f"broken_{name}_{damage}"
    path = shutil.copytree(made / f"digits_{name}", repository / model) / "1" / FORMATS[name].file
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    reply = post(server, f"/v2/repository/models/{model}/load", {})
    assert reply.status == 400
    assert model in reply.error
    assert re.search(FORMATS[name].error_name or path.name, reply.error)
    assert str(repository) not in reply.error  # docs/spec/security.md C7
    with connect(server, "http") as client:
        assert not client.is_model_ready(model)
        check(client, f"digits_{name}", 2)


def test_an_engine_that_is_not_there_is_named_with_the_command_that_installs_it(
    serve: Callable[..., Headrace], made: Path, tmp_path: Path, post: Callable[..., Reply]
) -> None:
    """All engines but that of Python models are hidden by modules which cannot be imported."""
    for engine in ENGINES:
        (tmp_path / f"{engine}.py").write_text(f"raise ImportError(\"No module named '{engine}'\")")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    flags = ["--model-control-mode=explicit", "--load-model=digits_python"]
    server = serve(f"--model-repository={made}", *flags, environ={"PYTHONPATH": path})
    for name, form in FORMATS.items():
        reply = post(server, f"/v2/repository/models/digits_{name}/load", {})
        assert reply.status == (400 if form.engine else 200)
        if form.engine:
            assert re.search(
                rf"'{form.backend}' needs the package {form.engine}.*pip install {form.engine}", reply.error
            )


IMPORTED = """
import sys
import numpy as np
import headrace

with headrace.Server(sys.argv[1], model_control_mode="explicit", load_model=(sys.argv[2],)) as server:
    server.infer(sys.argv[2], {sys.argv[3]: np.zeros((1, 8, 8), np.uint8)})
    print(*sorted({name.partition(".")[0] for name in sys.modules}))
"""


@pytest.mark.parametrize("name", ["onnx", "openvino", "exported", "savedmodel", "python"])
def test_a_server_imports_the_engine_of_its_model_and_no_other(made: Path, name: str) -> None:
    command = [sys.executable, "-c", IMPORTED, str(made), f"digits_{name}", FORMATS[name].names[0]]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ENGINES & set(done.stdout.split()) == {FORMATS[name].engine} - {""}


def test_the_page_has_the_config_of_each_format(
    made: Path,
    repository: Path,
    server: Headrace,
    post: Callable[..., Reply],
    check: Callable[..., None],
) -> None:
    page = (ROOT / "docs/getting-started.md").read_text()
    rows = re.findall(r"^\|.*\|.*\|(.*)\|.*\| ((?:none|as below).*)\|$", page, re.MULTILINE)
    wanted = {(frozenset(re.findall(r"`(model\.\w+)`", files)), "trust" in text): text for files, text in rows}
    (config,) = re.findall(r"```\n(max_batch_size: 64\n.*?)```", page, re.DOTALL)
    assert len(wanted) == len(FORMATS.keys() | {"aoti", "tensorrt"})
    with connect(server, "http") as client:
        for name in FORMATS:
            model = shutil.copytree(made / f"digits_{name}", repository / f"page_{name}")
            (model / "config.pbtxt").unlink()
            text = wanted[frozenset(path.name for path in (model / "1").glob("model.*")), name == "aoti"]
            if text.startswith("as below"):
                (model / "config.pbtxt").write_text(config + "".join(re.findall(r"`([^`]*: [^`]*)`", text)))
            assert post(server, f"/v2/repository/models/page_{name}/load", {}).status == 200
            check(client, f"page_{name}", 3)


def test_a_format_without_its_engine_is_skipped_and_printed(tmp_path: Path) -> None:
    if find_spec("tensorrt") is not None:
        pytest.skip("tensorrt is installed")
    command = [sys.executable, str(EXAMPLE / "make_models.py"), f"--models={tmp_path}", "--formats", "tensorrt", "onnx"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "left out: tensorrt is not installed; run: pip install tensorrt-cu13" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["digits_onnx"]


def test_ask_finds_that_all_read_the_held_out_digits_alike(server: Headrace) -> None:
    command = [sys.executable, str(EXAMPLE / "ask.py"), f"--http=127.0.0.1:{server.http}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split() for line in done.stdout.splitlines()[1:]]
    assert {line[0] for line in lines} == set(MODELS)
    assert {line[1] for line in lines} == {form.backend for form in FORMATS.values()}
    assert all(int(line[2]) > 0.95 * 360 and line[4] == "360" for line in lines)
