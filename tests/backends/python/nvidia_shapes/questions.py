"""The questions to the repository, asked by the stock clients; the answers are plain, so that they can be compared.

To ask a Triton: ``python -m tests.backends.python.nvidia_shapes.questions write FOLDER``, serve that folder, and
the same with ``ask HTTP GRPC``, the ports, which prints every answer that is not as expected.
"""

from __future__ import annotations

import queue
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as grpc
import tritonclient.http as http
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from tests.backends.python.nvidia_shapes.repository import write

A, B = np.arange(4, dtype=np.float32), np.full(4, 2, np.float32)
SUMS: dict[str, Any] = {"OUTPUT0": ["FP32", [2, 3, 4, 5]], "OUTPUT1": ["FP32", [-2, -1, 0, 1]]}
PIXELS = np.arange(12, dtype=np.uint8)


def name(text: str) -> np.ndarray[Any, Any]:
    return np.array([text], np.object_)


#: Model, inputs by name, and the outputs: type and values. An error is how its text begins.
QUESTIONS: list[tuple[str, dict[str, np.ndarray[Any, Any]], Any]] = [
    ("add_sub", {"INPUT0": A, "INPUT1": B}, {**SUMS, "OUTPUT1": ["FP64", [-2, -1, 0, 1]]}),
    ("nobatch_auto_complete", {"INPUT0": A, "INPUT1": B}, SUMS),
    (
        "batch_auto_complete",
        {"INPUT0": np.stack([A, B]), "INPUT1": np.stack([B, B])},
        {"OUTPUT0": ["FP32", [[2, 3, 4, 5], [4] * 4]], "OUTPUT1": ["FP32", [[-2, -1, 0, 1], [0] * 4]]},
    ),
    (
        "bls_sync",
        {"MODEL_NAME": name("nobatch_auto_complete"), "INPUT0": A, "INPUT1": B},
        SUMS,
    ),
    (
        "bls_async",
        {"MODEL_NAME": name("jax"), "INPUT0": A, "INPUT1": B},
        {"OUTPUT0": ["FP32", [2, 3, 4, 5]], "OUTPUT1": ["FP64", [-2, -1, 0, 1]]},
    ),
    (
        "bls_async",
        {"MODEL_NAME": name("nobody"), "INPUT0": A, "INPUT1": B},
        "Model nobody - Error when running inference: Failed for execute the inference request. Model 'nobody' is not "
        "ready.",
    ),
    ("bls_decoupled_sync", {"IN": np.array([4], np.int32)}, {"SUM": ["INT64", [32]]}),
    ("bls_decoupled_async", {"IN": np.array([3], np.int32)}, {"SUM": ["INT64", [18]]}),
    ("bls_decoupled_async", {"IN": np.array([0], np.int32)}, {"SUM": ["INT64", [0]]}),
    (
        "custom_metrics",
        {"INPUT0": np.array([1.5, 2], np.float32)},
        {
            "OUTPUT0": ["FP32", [1.0, 1.0]],
            "SAID": [
                "BYTES",
                [
                    "Failed to increment metric value: Invalid metric operation as the corresponding 'MetricFamily' "
                    "has been deleted. The 'MetricFamily' object should be deleted AFTER its corresponding 'Metric' "
                    "objects have been deleted."
                ],
            ],
        },
    ),
    ("jax", {"INPUT0": A, "INPUT1": B}, SUMS),
    (
        "preprocessing",
        {"INPUT_0": np.stack([PIXELS, PIXELS])},
        {"OUTPUT_0": ["FP64", [(PIXELS.reshape(2, 2, 3) / 255 - 0.5).transpose(2, 0, 1).tolist()] * 2]},
    ),
    ("instance_kind", {"INPUT": A}, {"OUTPUT": ["FP32", [0, 1, 2, 3]], "DEVICE": ["BYTES", ["cpu"]]}),
    ("error_source", {"IN": np.array([1], np.int32)}, "not found, in bytes"),
    (
        "error_caller",
        {"IN": np.array([1], np.int32)},
        {"OUT": ["BYTES", ["NOT_FOUND", "not found, in bytes", "(True, False)"]]},
    ),
]
#: Model, inputs, and the outputs of each response of a stream.
STREAMS: list[tuple[str, dict[str, np.ndarray[Any, Any]], list[Any]]] = [
    ("square_int32", {"IN": np.array([3], np.int32)}, [{"OUT": ["INT64", [3]]}] * 3),
    ("square_int32", {"IN": np.array([0], np.int32)}, []),
    (
        "repeat_int32",
        {
            "IN": np.array([7, 8, 9], np.int32),
            "DELAY": np.array([1, 0, 2], np.uint32),
            "WAIT": np.array([1], np.uint32),
        },
        [{"IDX": ["UINT32", [number]], "OUT": ["INT32", [7 + number]]} for number in range(3)],
    ),
    (
        "repeat_int32",
        {"IN": np.zeros(0, np.int32), "DELAY": np.zeros(0, np.uint32), "WAIT": np.array([0], np.uint32)},
        [],
    ),
]


def inputs(module: Any, arrays: dict[str, np.ndarray[Any, Any]]) -> list[Any]:
    made = []
    for key, array in arrays.items():
        made.append(module.InferInput(key, list(array.shape), np_to_triton_dtype(array.dtype)))
        made[-1].set_data_from_numpy(array)
    return made


def plain(result: Any, module: Any) -> dict[str, Any]:
    response = result.get_response()
    listed = response["outputs"] if module is http else response.outputs
    found = {}
    for output in listed:
        key, datatype = (output["name"], output["datatype"]) if module is http else (output.name, output.datatype)
        values = result.as_numpy(key)
        found[key] = [datatype, [each.decode() for each in values] if datatype == "BYTES" else values.tolist()]
    return found


def ask(module: Any, port: int, model: str, arrays: dict[str, np.ndarray[Any, Any]]) -> Any:
    with module.InferenceServerClient(f"127.0.0.1:{port}") as client:
        try:
            return plain(client.infer(model, inputs(module, arrays)), module)
        except InferenceServerException as error:
            return error.message()


def stream(port: int, model: str, arrays: dict[str, np.ndarray[Any, Any]]) -> list[Any]:
    got: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
    found: list[Any] = []
    with grpc.InferenceServerClient(f"127.0.0.1:{port}") as client:
        client.start_stream(lambda result, error: got.put((result, error)))
        client.async_stream_infer(model, inputs(grpc, arrays), enable_empty_final_response=True)
        while True:
            result, error = got.get(timeout=30)
            if error is not None:
                return [*found, error.message()]
            if result.get_response().outputs:
                found.append(plain(result, grpc))
            if result.get_response().parameters["triton_final_response"].bool_param:
                return found


def agree(found: Any, expected: Any) -> bool:
    """Return True if the answers are equal. An error may have more text."""
    return bool(found.startswith(expected) if isinstance(found, str) else found == expected)


def main(command: str, *words: str) -> None:
    if command == "write":
        write(Path(words[0]))
        return
    ports = [int(word) for word in words]
    questions: list[tuple[str, Any, Callable[[], Any]]] = []
    for model, arrays, expected in QUESTIONS:
        for module, port in zip((http, grpc), ports, strict=True):
            questions.append((model, expected, partial(ask, module, port, model, arrays)))
    for model, arrays, answers in STREAMS:
        questions.append((model, answers, partial(stream, ports[1], model, arrays)))
    for model, expected, answer in questions:
        found = answer()
        if not agree(found, expected):
            print(f"{model}\n  expected {expected}\n  found    {found}")
    print(f"asked {len(questions)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
