"""Packages of AOTInductor, compiled on the spot, with the module itself as the oracle."""

from __future__ import annotations

import os
import shutil
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.export import Dim

from headrace import BackendError, ConfigError, InvalidArgument, LoadError
from headrace_testing import BackendConformance, Example
from headrace_testing.serving import infer, serve

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="AOTInductor needs a compiler to make a package: g++"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),  # of PyTorch's compiler
]
A, B = np.random.default_rng(7).normal(size=(2, 5, 16)).astype(np.float32)
ROWS = Dim("rows", min=1, max=64)
CONFIG = """max_batch_size: 8
input { name: "%s" data_type: TYPE_FP32 dims: 16 } input { name: "%s" data_type: TYPE_FP32 dims: 16 }
output { name: "%s" data_type: TYPE_FP32 dims: 16 } output { name: "%s" data_type: TYPE_FP32 dims: 16 }"""
NAMES = ("INPUT__0", "INPUT__1", "OUTPUT__0", "OUTPUT__1")


class Mixed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = torch.nn.Linear(16, 16)

    def forward(self, a: torch.Tensor, *, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layer(a) + b, torch.relu(a - b)


class Squares(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(15):
            x = torch.tanh(x @ x) + 0.1
        return x


def expected() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    with torch.no_grad():
        one, other = Mixed()(torch.from_numpy(A), b=torch.from_numpy(B))
    return one.numpy(), other.numpy()


def compile_package(module: torch.nn.Module, path: Path, *arguments: Any, named: Any = None, sizes: Any = None) -> Path:
    program = torch.export.export(module.eval(), arguments, named, dynamic_shapes=sizes)
    torch._inductor.aoti_compile_and_package(program, package_path=str(path))
    return path


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One package for all tests. The compiler's cache is that of this run, in which `tests/e2e/test_engines.py` finds
    the compiled headers, too."""
    base = tmp_path_factory.getbasetemp()
    root = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(root / "inductor"))
        yield compile_package(
            Mixed(),
            tmp_path_factory.mktemp("package") / "model.pt2",
            torch.from_numpy(A),
            named={"b": torch.from_numpy(B)},
            sizes={"a": {0: ROWS}, "b": {0: ROWS}},
        )


@pytest.fixture
def package(programs: Any, compiled: Path) -> Path:
    path: Path = programs.root / "m" / "1" / "model.pt2"
    path.parent.mkdir(parents=True)
    shutil.copy(compiled, path)
    return path


def test_native_code_is_not_loaded_without_trust(programs: Any, package: Path) -> None:
    with pytest.raises(LoadError, match=r"model\.pt2' is a package of AOTInductor.* native code.*'trust' to 'true'"):
        programs.load(CONFIG % NAMES)


def test_trust_from_a_load_request_is_refused(programs: Any, package: Path) -> None:
    with pytest.raises(ConfigError, match="'trust' of model 'm' came with a load request"):
        programs.load(CONFIG % NAMES, trust=True, is_sent=True)


def test_a_gpu_package_uses_pytorchs_loader(programs: Any, package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our own call crashed there."""
    passed: list[Any] = []

    def load(*arguments: Any) -> None:
        passed.extend(arguments)
        raise RuntimeError("no GPU here")

    monkeypatch.setattr("headrace_torch.torch_process.device_of", lambda torch, model: "cuda:1")
    monkeypatch.setattr("headrace_torch.aoti._require_machine", lambda *arguments: None)
    monkeypatch.setattr(torch._C._aoti, "AOTIModelPackageLoader", load)
    with pytest.raises(LoadError, match="no GPU here"):
        programs.load(CONFIG % NAMES, trust=True)
    assert (passed[0], passed[-1]) == (str(package), 1)


@pytest.mark.parametrize(
    "names",
    [NAMES, ("ARGS[0]", "KWARGS[b]", "RESULT[0]", "RESULT[1]"), ("x", "y", "s", "d"), ("a__0", "b__1", "c__0", "d__1")],
)
def test_a_trusted_package_computes_results(programs: Any, package: Path, names: tuple[str, str, str, str]) -> None:
    instance = programs.load(CONFIG % names, trust=True)
    for rows in (1, 2, 5):
        found = instance.execute({names[0]: A[:rows], names[1]: B[:rows]})
        for name, whole in zip(names[2:], expected(), strict=True):
            np.testing.assert_allclose(found[name], whole[:rows], rtol=1e-5, atol=1e-6)


def test_names_in_another_order_are_still_the_same(programs: Any, package: Path) -> None:
    instance = programs.load(CONFIG % ("KWARGS[b]", "ARGS[0]", "RESULT[1]", "RESULT[0]"), trust=True)
    found = instance.execute({"ARGS[0]": A, "KWARGS[b]": B})
    np.testing.assert_allclose(found["RESULT[0]"], expected()[0], rtol=1e-5, atol=1e-6)


def test_a_config_is_checked_against_the_package(programs: Any, package: Path) -> None:
    good = CONFIG % NAMES
    with pytest.raises(ConfigError, match=r"'INPUT__0': the model expects 2 dimensions \(shape \[-1,16\]\)"):
        programs.load(good.replace("dims: 16", "dims: 17", 1), trust=True)
    with pytest.raises(ConfigError, match="expects datatype TYPE_FP64 for input 'INPUT__0', model provides TYPE_FP32"):
        programs.load(good.replace("TYPE_FP32", "TYPE_FP64", 1), trust=True)
    with pytest.raises(ConfigError, match="must contain at least one input, none were specified"):
        programs.load(trust=True)
    with pytest.raises(ConfigError, match="specified max-batch 65 but the program only supports max-batch 64"):
        programs.load(good.replace("max_batch_size: 8", "max_batch_size: 65"), trust=True)
    with pytest.raises(ConfigError, match=r"'KWARGS\[c\]' .* which has ARGS\[0\], KWARGS\[b\]"):
        programs.load(CONFIG % ("ARGS[0]", "KWARGS[c]", "s", "d"), trust=True)


def test_a_package_without_its_source_needs_the_config(programs: Any, package: Path, rewrite: Any) -> None:
    rewrite(package, {".wrapper.cpp": b"// removed"})
    with pytest.raises(ConfigError, match="does not tell whether its first dimension may vary"):
        programs.load(CONFIG % NAMES, trust=True)
    config = (CONFIG % NAMES).replace("max_batch_size: 8", "max_batch_size: 1")
    found = programs.load(config, trust=True).execute({"INPUT__0": A[:1], "INPUT__1": B[:1]})
    np.testing.assert_allclose(found["OUTPUT__0"], expected()[0][:1], rtol=1e-5, atol=1e-6)


def test_a_failure_has_the_librarys_error_and_the_next_succeeds(programs: Any, package: Path, rewrite: Any) -> None:
    rewrite(package, {".wrapper.cpp": b"// removed"})
    config = (CONFIG % NAMES).replace("max_batch_size: 8", "max_batch_size: 1").replace("dims: 16", "dims: -1")
    instance = programs.load(config, trust=True)
    with pytest.raises(BackendError, match=r"PyTorch execute failure: .*addmm.* API call failed"):
        instance.execute({"INPUT__0": A[:1, :15], "INPUT__1": B[:1]})
    found = instance.execute({"INPUT__0": A[:1], "INPUT__1": B[:1]})
    np.testing.assert_allclose(found["OUTPUT__0"], expected()[0][:1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("original", "other", "why"),
    [
        (b'"AOTI_DEVICE_KEY": "cpu"', b'"AOTI_DEVICE_KEY": "cuda"', "was compiled for 'cuda', and the instance runs"),
        (b'"AOTI_MACHINE": "', b'"AOTI_MACHINE": "z80', "was compiled for a machine 'z80"),
    ],
)
def test_code_for_another_machine_is_refused(
    programs: Any, package: Path, rewrite: Any, original: bytes, other: bytes, why: str
) -> None:
    rewrite(package, {"_metadata.json": lambda data: data.replace(original, other)})
    with pytest.raises(LoadError, match=why):
        programs.load(CONFIG % NAMES, trust=True)


def test_another_cpus_code_is_refused(
    programs: Any, package: Path, rewrite: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rewrite(package, {"_metadata.json": b'{"AOTI_DEVICE_KEY": "cpu", "AOTI_CPU_ISA": "AVX512 AMX_FP16"}'})
    monkeypatch.setattr("headrace_torch.aoti._cpu_flags", lambda: {"avx2", "avx512f"})
    with pytest.raises(LoadError, match="was compiled for a CPU with AMX_FP16, which this one does not have"):
        programs.load(CONFIG % NAMES, trust=True)


@pytest.mark.parametrize("content", [b"", b"no library", b"\x7fELF" + bytes(100)])
def test_a_broken_library_is_named(programs: Any, package: Path, rewrite: Any, content: bytes) -> None:
    rewrite(package, {".wrapper.so": content})
    with pytest.raises(LoadError, match=r"model\.pt2' "):
        programs.load(CONFIG % NAMES, trust=True)


def test_others_run_while_a_package_computes(programs: Any, compiled: Path) -> None:
    path: Path = programs.root / "m" / "1" / "model.pt2"
    path.parent.mkdir(parents=True)
    compile_package(Squares(), path, torch.ones(900, 900))
    config = "".join(f'{io} {{ name: "{io}" data_type: TYPE_FP32 dims: [900, 900] }} ' for io in ("input", "output"))
    instance = programs.load(config, trust=True)
    x = np.full((900, 900), 0.01, np.float32)
    instance.execute({"input": x})
    longest, began = 0.0, time.perf_counter()
    thread = threading.Thread(target=instance.execute, args=({"input": x},))
    thread.start()
    last = began
    while thread.is_alive():
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    took = time.perf_counter() - began
    assert longest < took / 2, f"nothing ran for {longest:.3f} s of an execution of {took:.3f} s"


def test_pytorch_calls_its_own_operators(programs: Any, compiled: Path, caplog: pytest.LogCaptureFixture) -> None:
    @torch.library.custom_op("headrace_test_aoti::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    twice.register_fake(torch.empty_like)

    class Custom(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.ops.headrace_test_aoti.twice(x) + 1  # type: ignore[no-any-return]

    path: Path = programs.root / "m" / "1" / "model.pt2"
    path.parent.mkdir(parents=True)
    compile_package(Custom(), path, torch.ones(3))
    config = "".join(f'{io} {{ name: "{io}" data_type: TYPE_FP32 dims: 3 }} ' for io in ("input", "output"))
    instance = programs.load(config, trust=True)
    np.testing.assert_array_equal(instance.execute({"input": np.ones(3, np.float32)})["output"], [3, 3, 3])
    assert "which holds the interpreter's lock" in caplog.text
    assert not instance.any_thread, "the event loop would stand still"


@pytest.mark.parametrize("shared", ["false", "true"])
def test_instances_of_a_package_answer_at_once(programs: Any, package: Path, shared: str) -> None:
    (programs.root / "m" / "config.pbtxt").write_text(
        CONFIG % NAMES + 'instance_group { count: 2 } parameters { key: "trust" value { string_value: "true" } }'
        f'parameters {{ key: "ENABLE_WEIGHT_SHARING" value {{ string_value: "{shared}" }} }}'
    )
    with serve(programs.root, listen=True) as server:
        for over in ("python", "http-binary", "grpc"):
            found = infer(server, "m", {"INPUT__0": A, "INPUT__1": B}, over)
            np.testing.assert_allclose(found["OUTPUT__1"], expected()[1], rtol=1e-5, atol=1e-6)

        result = expected()[0]
        with ThreadPoolExecutor(4) as callers:
            answers = [callers.submit(server.infer, "m", {"INPUT__0": A, "INPUT__1": B}) for _ in range(200)]
            for each in answers:
                np.testing.assert_allclose(each.result().outputs["OUTPUT__0"], result, rtol=1e-5, atol=1e-6)


def test_a_package_beside_its_program_needs_no_config(programs: Any, package: Path, rewrite: Any) -> None:
    beside = programs.save(
        Mixed(),
        torch.from_numpy(A),
        name="beside",
        named={"b": torch.from_numpy(B)},
        dynamic_shapes={"a": {0: ROWS}, "b": {0: ROWS}},
    )
    with zipfile.ZipFile(beside) as archive:
        document = archive.read("model/models/model.json")
    rewrite(package, {"models/model.json": document})
    found = programs.load(trust=True).execute({"a": A, "b": B})
    np.testing.assert_allclose(found["OUTPUT__0"], expected()[0], rtol=1e-5, atol=1e-6)
    with pytest.raises(InvalidArgument, match="'a': axis 0 is 65 long"):
        programs.load(trust=True).execute({"a": np.ones((65, 16), np.float32), "b": np.ones((65, 16), np.float32)})


class TestPackages(BackendConformance):
    plugin, backend, heavy = "headrace_torch", "pytorch", ("torch",)

    @pytest.fixture
    def example(self, compiled: Path, tmp_path: Path) -> Example:
        files = tmp_path / "files"
        files.mkdir()
        shutil.copy(compiled, files / "model.pt2")
        one, other = expected()
        return Example(
            files,
            {"INPUT__0": A, "INPUT__1": B},
            {"OUTPUT__0": one, "OUTPUT__1": other},
            {"trust": "true"},
            damage="model.pt2",
            config='default_model_filename: "model.pt2"',
        )

    @pytest.fixture(autouse=True)
    def _compiler(self, compiled: Path) -> None:
        self.compiled = compiled

    def example_of(self, kind: str, directory: Path) -> Example | None:
        make: Callable[[], Example] | None = {"FP32": lambda: self._floats(directory)}.get(kind)
        return make() if make else None  # each takes the compiler ten seconds; the types are those of programs

    def _floats(self, directory: Path) -> Example:
        shutil.copy(self.compiled, directory / "model.pt2")
        one, other = expected()
        config = 'default_model_filename: "model.pt2"'
        inputs, outputs = {"INPUT__0": A, "INPUT__1": B}, {"OUTPUT__0": one, "OUTPUT__1": other}
        return Example(directory, inputs, outputs, {"trust": "true"}, config=config)
