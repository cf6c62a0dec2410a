"""Programs of torch.export on a server, with the stock clients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import tritonclient.grpc
import tritonclient.http

from headrace import InvalidArgument, Server
from headrace_testing.serving import serve


class Scores(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))

    def forward(self, image: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"scores": self.layers(image)}


@pytest.fixture
def scores(programs: Any) -> Scores:
    torch.manual_seed(5)
    module = Scores()
    rows = torch.export.Dim("rows", min=1, max=6)
    programs.save(module, torch.ones(2, 4), dynamic_shapes={"image": {0: rows}})
    return module


def ask(kind: Any, port: int, image: np.ndarray[Any, Any]) -> Any:
    with kind.InferenceServerClient(f"127.0.0.1:{port}") as client:
        tensor = kind.InferInput("image", list(image.shape), "FP32")
        tensor.set_data_from_numpy(image)
        return client.infer("m", [tensor]).as_numpy("scores")


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_program_alone_is_served_by_both_protocols(programs: Any, scores: Scores, protocol: str) -> None:
    image = np.random.default_rng(2).normal(size=(3, 4)).astype(np.float32)
    with serve(programs.root, listen=True) as server:
        kind = {"http": tritonclient.http, "grpc": tritonclient.grpc}[protocol]
        found = ask(kind, getattr(server.options, f"{protocol}_port"), image)
    with torch.no_grad():
        np.testing.assert_allclose(found, scores(torch.from_numpy(image))["scores"], rtol=1e-5, atol=1e-6)


def test_the_batches_of_a_server_are_those_of_the_program(programs: Any, scores: Scores) -> None:
    (programs.root / "m" / "config.pbtxt").write_text("max_batch_size: 6")
    with serve(programs.root) as server:
        image = np.ones((6, 4), np.float32)
        assert server.infer("m", {"image": image}).outputs["scores"].shape == (6, 3)
        with pytest.raises(InvalidArgument):
            server.infer("m", {"image": np.ones((7, 4), np.float32)})


def reason(server: Server) -> str:
    return next(entry.reason for entry in server.index() if entry.name == "m")


def test_the_index_has_the_reason_of_a_failed_program(programs: Any, scores: Scores, rewrite: Any) -> None:
    path = programs.root / "m" / "1" / "model.pt2"
    rewrite(path, {"model.json": lambda data: data.replace(b"aten.relu.default", b"mine.relu.default")})
    with serve(programs.root, exit_on_error=False) as server:
        assert "it calls 'torch.ops.mine.relu.default', an operator of the library 'mine'" in reason(server)


def test_instances_in_processes_read_a_program_there(programs: Any, scores: Scores) -> None:
    (programs.root / "m" / "config.pbtxt").write_text(
        'instance_group { count: 2 } parameters { key: "isolation" value { string_value: "process" } }'
    )
    with serve(programs.root) as server:
        found = server.infer("m", {"image": np.zeros((1, 4), np.float32)}).outputs["scores"]
    with torch.no_grad():
        np.testing.assert_allclose(found, scores(torch.zeros(1, 4))["scores"], rtol=1e-5, atol=1e-6)
