"""SavedModels, frozen graphs and TensorFlow Lite, written by TensorFlow in a process of its own."""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace_testing.serving import serve

pytestmark = pytest.mark.skipif(find_spec("tensorflow") is None, reason="tensorflow, which writes them, is absent")

WEIGHTS = np.arange(6, dtype=np.float32).reshape(2, 3)
#: ``y = x @ WEIGHTS`` in each format, and a SavedModel whose table is filled from a file.
WRITE = """
import sys
from pathlib import Path
import numpy as np
import tensorflow as tf

root, weights = Path(sys.argv[1]), np.arange(6, dtype=np.float32).reshape(2, 3)
module = tf.Module()
module.weights = tf.Variable(weights)
module.function = tf.function(
    lambda x: {"y": x @ module.weights}, input_signature=[tf.TensorSpec([None, 2], tf.float32, name="x")])
tf.saved_model.save(module, str(root / "model.saved_model"), signatures=module.function)
(root / "model.tflite").write_bytes(
    tf.lite.TFLiteConverter.from_saved_model(str(root / "model.saved_model")).convert())

with tf.Graph().as_default() as graph:
    x = tf.compat.v1.placeholder(tf.float32, [None, 2], name="x")
    tf.matmul(x, weights, name="y")
(root / "model.pb").write_bytes(graph.as_graph_def().SerializeToString())

with tf.Graph().as_default() as graph:
    x = tf.compat.v1.placeholder(tf.float32, [None, 2], name="x")
    size = tf.strings.length(tf.io.read_file("/etc/passwd"))
    tf.multiply(x, tf.cast(size, tf.float32), name="y")
(root / "reader.pb").write_bytes(graph.as_graph_def().SerializeToString())

(root / "words.txt").write_text("zero\\none\\n")
module, index = tf.Module(), tf.lookup.TextFileIndex
rows = tf.lookup.TextFileInitializer(
    str(root / "words.txt"), tf.int64, index.LINE_NUMBER, tf.int64, index.LINE_NUMBER)
module.table = tf.lookup.StaticHashTable(rows, -1)
module.function = tf.function(
    lambda x: {"y": module.table.lookup(x)}, input_signature=[tf.TensorSpec([None, 2], tf.int64, name="x")])
tf.saved_model.save(module, str(root / "table.saved_model"), signatures=module.function)
"""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tensorflow")
    done = subprocess.run(
        [sys.executable, "-c", WRITE, str(root)], capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stderr
    return root


def place(models: Any, written: Path, name: str, config: str = "") -> Path:
    """Write the file or folder ``name`` as version 1 of the model ``m``. Return its path."""
    version: Path = models.root / "m" / "1"
    version.mkdir(parents=True)
    copy = shutil.copytree if (written / name).is_dir() else shutil.copy
    copy(written / name, version / name)
    models.config(f'backend: "openvino" default_model_filename: "{name}" {config}')
    return version / name


def reason(models: Any) -> str:
    with serve(models.root, exit_on_error=False) as server:
        (entry,) = server.index()
    return entry.reason


@pytest.mark.parametrize(
    ("name", "input_name", "answered"),
    [
        ("model.saved_model", "x", "y"),
        ("model.pb", "x:0", "y:0"),
        ("model.tflite", "serving_default_x:0", "StatefulPartitionedCall:0"),
    ],
)
def test_models_of_tensorflow_are_served(models: Any, written: Path, name: str, input_name: str, answered: str) -> None:
    place(models, written, name)
    x = np.array([[1, 2], [3, 4], [5, 6]], np.float32)
    with serve(models.root) as server:
        config = server.resolve("m").config
        y = server.infer("m", {input_name: x}).outputs[answered]
    np.testing.assert_array_equal(y, x @ WEIGHTS)
    assert (config.max_batch_size, [io.name for io in config.input]) == (4, [input_name])


@pytest.mark.parametrize(
    ("name", "damaged"),
    [
        ("model.saved_model", "saved_model.pb"),
        ("model.saved_model", "variables/variables.index"),
        ("model.saved_model", "variables/variables.data-00000-of-00001"),
        ("model.pb", ""),
        ("model.tflite", ""),
    ],
)
@pytest.mark.parametrize("how", ["cut", "noise"])
def test_a_damaged_file_is_refused_by_name(models: Any, written: Path, name: str, damaged: str, how: str) -> None:
    file = place(models, written, name) / damaged if damaged else place(models, written, name)
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2] if how == "cut" else b"\x00no model\xff" * 10)
    assert f"m/1/{name}" in reason(models)


@pytest.mark.parametrize("missing", ["saved_model.pb", "variables"])
def test_a_saved_model_that_is_not_whole_is_refused(models: Any, written: Path, missing: str) -> None:
    folder = place(models, written, "model.saved_model")
    if missing == "variables":
        shutil.rmtree(folder / missing)
    else:
        (folder / missing).unlink()
    assert "m/1/model.saved_model" in reason(models)


def test_variables_behind_a_link_that_leads_out_are_refused(models: Any, written: Path, tmp_path: Path) -> None:
    folder = place(models, written, "model.saved_model")
    shutil.move(folder / "variables", tmp_path / "elsewhere")
    (folder / "variables").symlink_to(tmp_path / "elsewhere")
    assert "is a link that leads out of the model repository" in reason(models)


def test_a_table_that_is_filled_from_an_asset_is_refused(models: Any, written: Path) -> None:
    """OpenVINO reads no assets, so that it is no matter where they lead."""
    place(models, written, "table.saved_model")
    assert "m/1/table.saved_model" in (message := reason(models))
    assert "HashTable" in message


def test_a_graph_that_reads_a_file_is_refused(models: Any, written: Path) -> None:
    place(models, written, "reader.pb")
    assert "No conversion rule found for operations: ReadFile" in reason(models)
