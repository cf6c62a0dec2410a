"""Models that hand out what is in their memory: no caller of one gets what a caller of another has sent.

A caller sends tensors of a mark to one model of an engine, and then asks the attacker's model of the same engine, which
returns memory without writing it. Where the engine could do that, the model is refused, or the memory is zero.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pytest
import tritonclient.http
from tritonclient.utils import InferenceServerException

if TYPE_CHECKING:
    from tests.conftest import Headrace

#: Elements of 64 KiB, which an allocator hands out again soon.
COUNT = 16384
#: Bytes of what the other caller sends, and sees.
MARK = 0xA5
ROUNDS = 30
CONFIG = """
input {{ name: "x" data_type: TYPE_FP32 dims: [{count}] }}
output {{ name: "{output}" data_type: TYPE_FP32 dims: [{count}] }}
instance_group {{ kind: KIND_CPU count: 1 }}
"""
#: Models of each engine, made in a process of their own: ``echo`` copies what it is given, the others return memory.
MAKE = {
    "torch": """
import torch, warnings
warnings.simplefilter("ignore")
for name, code in {
    "echo": "x + 0", "empty": "torch.empty([COUNT])", "empty_like": "torch.empty_like(x)",
    "new_empty": "x.new_empty([COUNT])",
    "strided": "torch.as_strided(torch.empty_strided([2], [COUNT - 1]), [COUNT], [1])",
    "resized": "torch.zeros([1]).resize_([COUNT])", "beyond": "x._reshape_alias([COUNT], [5]) + 0",
}.items():
    scripted = torch.jit.script(type("Of_" + name, (torch.nn.Module,), {})())
    scripted.define("def forward(self, x):\\n    return " + code.replace("COUNT", "16384") + "\\n")
    scripted.save(folder(name) / "model.pt")
short = type("Of_short", (torch.nn.Module,), {})()
short.kept = torch.nn.Parameter(torch.zeros(COUNT))
scripted = torch.jit.script(short)
scripted.define("def forward(self, x):\\n    return self.kept + 0\\n")
whole = folder("short") / "model.pt"
scripted.save(whole)
reader = torch._C.PyTorchFileReader(str(whole))
content = {name: reader.get_record(name) for name in reader.get_all_records()}
writer = torch._C.PyTorchFileWriter(str(whole))
for name, data in content.items():
    if name not in ("version", "byteorder", ".data/serialization_id"):
        data = data[:8] if name == "data/0" else data
        writer.write_record(name, data, len(data))
writer.write_end_of_file()
class Empty(torch.nn.Module):
    def forward(self, x):
        return torch.empty_like(x)
torch.export.save(torch.export.export(Empty(), (torch.zeros(COUNT),)), folder("program") / "model.pt2")
""",
    "tensorflow": """
import tensorflow as tf
def save(name, build):
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [COUNT], name="x")
        tf.add(build(x), 0.0, name="y")
    (folder(name) / "model.graphdef").write_bytes(graph.as_graph_def().SerializeToString())
def temporary():
    made = tf.raw_ops.TemporaryVariable(shape=[COUNT], dtype=tf.float32, var_name="made")
    return tf.raw_ops.DestroyTemporaryVariable(ref=made, var_name="made")
save("echo", lambda x: x)
save("empty", lambda x: tf.raw_ops.Empty(shape=[COUNT], dtype=tf.float32))
save("temporary", lambda x: temporary())
save("fake", lambda x: tf.raw_ops.FakeParam(shape=[COUNT], dtype=tf.float32))
""",
}
START = """
import sys
from pathlib import Path
COUNT, root = int(sys.argv[1]), Path(sys.argv[2])
def folder(name):
    made = root / name / "1"
    made.mkdir(parents=True)
    return made
"""
PLATFORMS = {"model.pt": 'backend: "pytorch"', "model.pt2": 'backend: "pytorch" default_model_filename: "model.pt2"',
             "model.graphdef": 'platform: "tensorflow_graphdef"'}  # fmt: skip


@pytest.mark.parametrize("engine", MAKE)
def test_no_model_hands_out_what_others_have_sent(
    engine: str,
    serve_models: Callable[[Path], Headrace],
    tmp_path: Path,
    under_attack: Callable[..., AbstractContextManager[None]],
) -> None:
    if find_spec(engine) is None:
        pytest.skip(f"{engine} is not installed")
    repository = tmp_path / "repository"
    made = [sys.executable, "-c", START + MAKE[engine], str(COUNT), str(repository)]
    done = subprocess.run(made, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    outputs: dict[str, str] = {}
    for folder in sorted(repository.iterdir()):
        (file,) = (folder / "1").iterdir()
        outputs[folder.name] = "OUTPUT__0" if file.name == "model.pt2" else "y"
        (folder / "config.pbtxt").write_text(
            PLATFORMS[file.name] + CONFIG.format(count=COUNT, output=outputs[folder.name])
        )
    model_of_the_other = outputs.pop("echo")
    (repository / "echo").rename(repository / "other")
    server = serve_models(repository)
    mark = np.full(4 * COUNT, MARK, np.uint8).view(np.float32)
    zeros = np.zeros(COUNT, np.float32)
    with tritonclient.http.InferenceServerClient(f"127.0.0.1:{server.http}", network_timeout=100.0) as client:

        def ask(model: str, output: str, array: npt.NDArray[np.float32]) -> bytes:
            tensor = tritonclient.http.InferInput("x", [COUNT], "FP32")
            tensor.set_data_from_numpy(array)
            return bytes(client.infer(model, [tensor]).as_numpy(output).tobytes())

        client.load_model("other")
        assert ask("other", model_of_the_other, mark) == mark.tobytes()
        refused = set()
        for model in outputs:
            try:
                client.load_model(model)
            except InferenceServerException as error:
                assert re.search("trust|is damaged", str(error)), error  # noqa: PT017
                refused.add(model)
        wanted = {"torch": {"strided", "resized", "beyond", "short"}, "tensorflow": {"empty", "temporary", "fake"}}
        assert refused == wanted[engine]
        with under_attack(server, kept_bytes=64 << 20):
            for model in outputs.keys() - refused:
                for _ in range(ROUNDS):
                    assert ask("other", model_of_the_other, mark) == mark.tobytes()
                    assert not any(ask(model, outputs[model], zeros)), f"'{model}' returns memory that it did not write"
