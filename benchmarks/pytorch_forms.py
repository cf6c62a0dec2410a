"""The forms of PyTorch models: TorchScript, programs of torch.export, packages of AOTInductor and Python modules."""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import networks
from framework import MAX_BATCH, Call, Framework
from networks import NETWORKS, SHAPES, Array, TorchOperators

#: Networks for a GPU. One small network is enough, since launching kernels is most of its execution.
ON_GPU = ("transformer", "large_convnet", "large_transformer")

_MODULE = """import torch
from networks import NETWORKS, SHAPES, KeptTorchOperators


class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.operators = KeptTorchOperators(torch, self)
        self(torch.zeros(1, *SHAPES["{network}"]))

    def forward(self, INPUT0):
        return NETWORKS["{network}"](self.operators.rewind(), INPUT0)
"""


class PyTorch(Framework):
    """TorchScript."""

    name = backend = "pytorch"
    package, threads_key = "torch", "INTRA_OP_THREAD_COUNT"

    def write(self, network: str, version: Path) -> None:
        import torch

        with _quiet():  # PyTorch recommends torch.export, and weights become constants
            traced = torch.jit.trace(_written_out(network), torch.zeros(2, *SHAPES[network]))  # type: ignore[no-untyped-call]
        traced.save(str(version / "model.pt"))

    def open(self, version: Path, threads: int) -> Call:
        import torch

        torch.set_num_threads(threads)
        with _quiet():
            module = self.module(version)

        @torch.inference_mode()
        def call(rows: Array) -> Array:
            result: Array = module(torch.from_numpy(rows)).numpy()
            return result

        return call

    def module(self, version: Path) -> Any:
        """Return the function to call with a tensor."""
        import torch

        return torch.jit.load(version / "model.pt")  # type: ignore[no-untyped-call]


class _Form(PyTorch):
    """The other forms use the same operators or compiled ones, so two networks are enough."""

    networks: ClassVar[tuple[str, ...]] = ("mlp", "transformer")


class ExportedProgram(_Form):
    name = "pytorch-exported"
    config = 'platform: "torch_aoti"\n'

    def write(self, network: str, version: Path) -> None:
        import torch

        torch.export.save(_exported(network), version / "model.pt2")

    def module(self, version: Path) -> Any:
        import torch

        return torch.export.load(version / "model.pt2").module()


class AotPackage(_Form):
    """A package whose kernels use one thread, as they were compiled."""

    name = "pytorch-aoti"
    config = 'platform: "torch_aoti"\nparameters { key: "trust" value { string_value: "true" } }\n'

    def write(self, network: str, version: Path) -> None:
        import torch

        torch.set_num_threads(1)
        with _quiet():
            torch._inductor.aoti_compile_and_package(_exported(network), package_path=str(version / "model.pt2"))

    def module(self, version: Path) -> Any:
        import torch

        return torch._inductor.aoti_load_package(str(version / "model.pt2"))


class EagerModule(_Form):
    name = "pytorch-eager"
    config = 'runtime: "model.py"\n'

    def write(self, network: str, version: Path) -> None:
        (version / "model.py").write_text(_MODULE.replace("{network}", network))
        shutil.copy(networks.__file__, version)

    def module(self, version: Path) -> Any:
        return _made_by(version / "model.py")


class EagerOnGpu(EagerModule):
    name, kind, networks = "pytorch-gpu", "KIND_GPU", ON_GPU

    def open(self, version: Path, threads: int) -> Call:
        import torch

        with _quiet():
            module = self.module(version).cuda()

        @torch.inference_mode()
        def call(rows: Array) -> Array:
            result: Array = module(torch.from_numpy(rows).cuda()).cpu().numpy()
            return result

        return call


class GraphsOnGpu(EagerOnGpu):
    """Executions are captured as CUDA graphs; the direct calls have one for each number of rows."""

    name = "pytorch-graphs"
    config = EagerOnGpu.config + "optimization { cuda { graphs: true } }\n"

    def open(self, version: Path, threads: int) -> Call:
        import torch

        with _quiet():
            module = self.module(version).cuda()
        captured: dict[int, tuple[Any, Any, Any]] = {}

        def capture(rows: Array) -> tuple[Any, Any, Any]:
            buffer, graph = torch.from_numpy(rows).cuda(), torch.cuda.CUDAGraph()
            module(buffer)
            with torch.cuda.graph(graph):
                result = module(buffer)
            return graph, buffer, result

        @torch.inference_mode()
        def call(rows: Array) -> Array:
            if len(rows) not in captured:
                captured[len(rows)] = capture(rows)
            graph, buffer, result = captured[len(rows)]
            buffer.copy_(torch.from_numpy(rows))
            graph.replay()
            answer: Array = result.cpu().numpy()
            return answer

        return call


def _written_out(network: str) -> Any:
    import torch

    class Network(torch.nn.Module):
        def forward(self, INPUT0: Any) -> Any:  # noqa: N803
            return NETWORKS[network](TorchOperators(torch), INPUT0)

    return Network().eval()


def _made_by(path: Path) -> Any:
    """Return the module of the ``model.py`` at ``path``."""
    found = importlib.util.spec_from_file_location("model", path)
    assert found is not None
    assert found.loader is not None
    code = importlib.util.module_from_spec(found)
    found.loader.exec_module(code)
    return code.Network().eval()


def _exported(network: str) -> Any:
    """Export from the Python module: weights that are constants of the code would be copied in every call."""
    import torch

    with tempfile.TemporaryDirectory() as folder:
        EagerModule().write(network, Path(folder))
        module = _made_by(Path(folder, "model.py"))
    rows = torch.export.Dim("rows", min=1, max=MAX_BATCH)
    return torch.export.export(module, (torch.zeros(2, *SHAPES[network]),), dynamic_shapes=[{0: rows}])


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
