"""Models of the shapes of python_backend's own examples, written as loosely as people write them.

Names and shapes of inputs and outputs are those of the examples; the code is new. What is loose about a
model stands above it. A real Triton (2.51) serves this repository and gives the same answers.
"""

from __future__ import annotations

from pathlib import Path

HEAD = "import json\nimport numpy as np\nimport triton_python_backend_utils as pb_utils\n"


def io(inputs: str, outputs: str, dims: str, kind: str) -> str:
    """A config with these inputs and outputs, all of one kind."""
    listed = [("input", name) for name in inputs.split()] + [("output", name) for name in outputs.split()]
    return "".join(f'{what} {{ name: "{name}" data_type: {kind} dims: [{dims}] }}\n' for what, name in listed)


FLOATS = io("INPUT0 INPUT1", "OUTPUT0 OUTPUT1", "4", "TYPE_FP32")
#: No initialize, no finalize, a print; the dtype of the outputs is whatever NumPy makes of it.
ADD_SUB = """
class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            a, b = (pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in ("INPUT0", "INPUT1"))
            print("add_sub", a.shape)
            responses.append(pb_utils.InferenceResponse(output_tensors=(
                pb_utils.Tensor(b"OUTPUT0", a + b), pb_utils.Tensor(np.str_("OUTPUT1"), (a - b).astype(float)),
            )))
        return responses
"""
#: Completes fields that the config already has, twice; the class has a method that is never called.
AUTO_COMPLETE = """
class TritonPythonModel:
    unused = object()
    @staticmethod
    def auto_complete_config(auto_complete_model_config):
        for name in ("INPUT0", "INPUT1") * 2:
            auto_complete_model_config.add_input({"name": name, "data_type": "TYPE_FP32", "dims": [4]})
        for name in ("OUTPUT0", "OUTPUT1"):
            auto_complete_model_config.add_output({"name": name, "data_type": "TYPE_FP32", "dims": [4]})
        auto_complete_model_config.set_max_batch_size(BATCH)
        BATCHING
        return auto_complete_model_config
    def initialize(self, args):
        self.config = json.loads(args["model_config"])
        self.extra = pb_utils.get_output_config_by_name(self.config, "OUTPUT0")
        print(args)
    def execute(self, requests):
        dtype = pb_utils.triton_string_to_numpy(self.extra["data_type"])
        responses = []
        for request in requests:
            a = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
            b = pb_utils.get_input_tensor_by_name(request, "INPUT1").as_numpy()
            responses.append(pb_utils.InferenceResponse([
                pb_utils.Tensor("OUTPUT0", (a + b).astype(dtype)), pb_utils.Tensor("OUTPUT1", (a - b).astype(dtype)),
            ]))
        return responses
    def help(self): return "me"
"""
BLS_CONFIG = 'input { name: "MODEL_NAME" data_type: TYPE_STRING dims: [1] }\n' + FLOATS
#: The name of the other model is bytes, as the client sent it; NumPy's integers; an error is raised.
BLS_SYNC = """
class TritonPythonModel:
    def initialize(self, args):
        self.model_config = json.loads(args["model_config"])
    def execute(self, requests):
        responses = []
        for request in requests:
            in_0 = pb_utils.get_input_tensor_by_name(request, "INPUT0")
            in_1 = pb_utils.get_input_tensor_by_name(request, "INPUT1")
            name = pb_utils.get_input_tensor_by_name(request, "MODEL_NAME").as_numpy()[0]
            inner = pb_utils.InferenceRequest(
                model_name=name, requested_output_names=[b"OUTPUT0", "OUTPUT1"], inputs=[in_0, in_1],
                request_id=b"inner", timeout=np.int64(0), model_version=np.int32(-1), flags=np.uint8(0),
            )
            answer = inner.exec()
            if answer.has_error():
                raise pb_utils.TritonModelException(answer.error().message())
            responses.append(pb_utils.InferenceResponse(output_tensors=answer.output_tensors()))
        return responses
    def finalize(self):
        print("Cleaning up...")
"""
#: Awaits two models at once, and hands on the error object of the first that has one.
BLS_ASYNC = """
import asyncio

class TritonPythonModel:
    async def execute(self, requests):
        responses = []
        for request in requests:
            name = pb_utils.get_input_tensor_by_name(request, "MODEL_NAME").as_numpy()[0].decode("utf-8")
            both = [
                pb_utils.InferenceRequest(
                    model_name=model, requested_output_names=[output],
                    inputs=[pb_utils.get_input_tensor_by_name(request, f"INPUT{n}") for n in range(2)],
                ).async_exec()
                for model, output in ((name, "OUTPUT0"), (b"add_sub", "OUTPUT1"))
            ]
            answers = await asyncio.gather(*both)
            errors = [answer.error() for answer in answers if answer.has_error()]
            if errors:
                responses.append(pb_utils.InferenceResponse(output_tensors=[], error=errors[0]))
                continue
            found = [
                pb_utils.get_output_tensor_by_name(answer, name)
                for answer, name in zip(answers, ("OUTPUT0", "OUTPUT1"))
            ]
            responses.append(pb_utils.InferenceResponse(found))
        return responses
"""
INT = 'input { name: "IN" data_type: TYPE_INT32 dims: [1] }\n'
DECOUPLED = "model_transaction_policy { decoupled: True }\n"
#: Threads that only finalize joins; the output is of the wrong type (int64).
SQUARE = """
import threading

class TritonPythonModel:
    def initialize(self, args):
        self.model_config = model_config = json.loads(args["model_config"])
        if not pb_utils.using_decoupled_model_transaction_policy(model_config):
            raise pb_utils.TritonModelException("not decoupled")
        self.inflight, self.lock = 0, threading.Lock()
    def execute(self, requests):
        for request in requests:
            with self.lock:
                self.inflight += 1
            thread = threading.Thread(
                target=self.answer,
                args=(request.get_response_sender(), pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()),
            )
            thread.daemon = True
            thread.start()
    def answer(self, sender, value):
        for _ in range(value[0]):
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([int(value[0])]))]), 0)
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        with self.lock:
            self.inflight -= 1
    def finalize(self):
        while True:
            with self.lock:
                if not self.inflight:
                    break
"""
#: Sends from execute; the last response carries the final flag, as a NumPy integer.
REPEAT = """
import time

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            values, delays, waits = [tensor.as_numpy() for tensor in request.inputs()]
            for number, (value, delay) in enumerate(zip(values, delays), 1):
                time.sleep(delay / 1000)
                sender.send(
                    pb_utils.InferenceResponse(output_tensors=[
                        pb_utils.Tensor("IDX", np.array([number - 1], np.uint32)),
                        pb_utils.Tensor("OUT", np.array([value], np.int32)),
                    ]),
                    flags=np.int64(number == len(values)),
                )
            if len(values) == 0:
                sender.send(None, pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            time.sleep(waits[0] / 1000)
        return None
"""
REPEAT_CONFIG = """
input { name: "IN" data_type: TYPE_INT32 dims: [-1] }
input { name: "DELAY" data_type: TYPE_UINT32 dims: [-1] }
input { name: "WAIT" data_type: TYPE_UINT32 dims: [1] }
output { name: "OUT" data_type: TYPE_INT32 dims: [1] }
output { name: "IDX" data_type: TYPE_UINT32 dims: [1] }
"""
#: Adds up the responses of a decoupled model; the sum is an int64, although the config has an int32.
BLS_DECOUPLED = """
import asyncio

class TritonPythonModel:
    DEF execute(self, requests):
        if len(requests) != 1:
            raise pb_utils.TritonModelException("unsupported batch size " + len(requests))
        number = pb_utils.get_input_tensor_by_name(requests[0], "IN")
        inner_requests = [
            pb_utils.InferenceRequest(model_name="square_int32", inputs=[number], requested_output_names=["OUT"])
            for _ in range(2)
        ]
        response_sum = np.array([0])
        for responses in GATHER:
            for response in responses:
                if response.has_error():
                    raise pb_utils.TritonModelException(response.error().message())
                if len(response.output_tensors()) > 0:
                    response_sum += pb_utils.get_output_tensor_by_name(response, "OUT").as_numpy()
        return [pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor("SUM", response_sum)])]
"""
#: Metrics in bytes and NumPy's floats; one family is dropped before its metric is used.
CUSTOM_METRICS = """
class TritonPythonModel:
    def initialize(self, args):
        self.family = pb_utils.MetricFamily(
            name=b"shapes_requests_total", description="requests", kind=pb_utils.MetricFamily.COUNTER,
        )
        self.metric = self.family.Metric(labels={"model": "custom_metrics", "version": "1"})
        self.levels = pb_utils.MetricFamily("shapes_level", b"level", pb_utils.MetricFamily.GAUGE)
        self.level = self.levels.Metric({})
        dropped = pb_utils.MetricFamily("shapes_dropped", "dropped", pb_utils.MetricFamily.COUNTER)
        self.orphan = dropped.Metric(labels={"model": "custom_metrics"})
        self.logger = pb_utils.Logger
    def execute(self, requests):
        responses = []
        for request in requests:
            data = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
            self.metric.increment(data.sum())
            self.level.set(np.float32(data.max()))
            self.level.increment(np.int64(-1))
            self.logger.log_info(b"counted %d" % self.metric.value())
            self.logger.log("a warning", self.logger.WARNING)
            try:
                self.orphan.increment(1)
                message = "nothing"
            except Exception as error:
                message = str(error)
            out = np.array([self.metric.value() > 0, self.level.value()], np.float32)
            responses.append(pb_utils.InferenceResponse([
                pb_utils.Tensor("OUTPUT0", out), pb_utils.Tensor("SAID", np.array([message], dtype=object)),
            ]))
        return responses
"""
#: The example's arrays are JAX's, and reach pb_utils as NumPy's, which stand in for them here: JAX is a heavy
#: thing to install for one conversion. Strided, and of the default precision.
JAX = """
class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            a, b = (pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in ("INPUT0", "INPUT1"))
            both = np.stack([a + b, a - b], axis=-1)
            responses.append(pb_utils.InferenceResponse([
                pb_utils.Tensor("OUTPUT0", np.asarray(both[..., 0])), pb_utils.Tensor("OUTPUT1", both[..., 1]),
            ]))
        return responses
"""
#: Finds its files in two ways; decodes strings of a client; a batch, and an output of the wrong precision.
PREPROCESSING = """
import os

class TritonPythonModel:
    def initialize(self, args):
        here = pb_utils.get_model_dir()
        same = os.path.join(args["model_repository"], args["model_version"])
        with open(os.path.join(here, "mean.txt")) as file:
            self.mean = float(file.read())
        self.same = os.path.realpath(here) == os.path.realpath(same)
        output0_config = pb_utils.get_output_config_by_name(json.loads(args["model_config"]), "OUTPUT_0")
        self.output0_dtype = pb_utils.triton_string_to_numpy(output0_config["data_type"])
    def execute(self, requests):
        assert self.same
        responses = []
        for request in requests:
            images = []
            for encoded in pb_utils.get_input_tensor_by_name(request, "INPUT_0").as_numpy():
                pixels = np.frombuffer(encoded, np.uint8).reshape(2, 2, 3)
                images.append((pixels / 255 - self.mean).transpose(2, 0, 1))
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT_0", np.array(images))]))
        return responses
"""
PREPROCESSING_CONFIG = """
max_batch_size: 4
input { name: "INPUT_0" data_type: TYPE_UINT8 dims: [12] }
output { name: "OUTPUT_0" data_type: TYPE_FP32 dims: [3, 2, 2] }
"""
#: Says where it runs; DLPack out and in, where the example has PyTorch.
INSTANCE_KIND = """
class TritonPythonModel:
    def initialize(self, args):
        self.device = "cuda" if args["model_instance_kind"] == "GPU" else "cpu"
    def execute(self, requests):
        responses = []
        for request in requests:
            tensor = pb_utils.get_input_tensor_by_name(request, "INPUT")
            result = pb_utils.Tensor.from_dlpack("OUTPUT", tensor.to_dlpack())
            device = pb_utils.Tensor("DEVICE", np.array([self.device.encode()], dtype=np.object_))
            responses.append(pb_utils.InferenceResponse([result, device]))
        return responses
"""
INSTANCE_KIND_CONFIG = """
input { name: "INPUT" data_type: TYPE_FP32 dims: [4] }
output { name: "OUTPUT" data_type: TYPE_FP32 dims: [4] }
output { name: "DEVICE" data_type: TYPE_STRING dims: [1] }
"""
#: An error with a message in bytes, and a model that reads it. Only newer Tritons pass on the code.
ERROR_SOURCE = """
class TritonPythonModel:
    def execute(self, requests):
        error = pb_utils.TritonError(message=b"not found, in bytes", code=pb_utils.TritonError.NOT_FOUND)
        return [pb_utils.InferenceResponse(error=error) for _ in requests]
"""
ERROR_CALLER = """
class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            answer = pb_utils.InferenceRequest(
                model_name="error_source", requested_output_names=["OUT"], inputs=request.inputs()
            ).exec()
            code = "NOT_FOUND" if answer.error().code() == pb_utils.TritonError.NOT_FOUND else "another"
            ready = pb_utils.is_model_ready(b"error_source"), pb_utils.is_model_ready("nobody")
            out = np.array([code, answer.error().message(), str(ready)], dtype=np.object_)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", out)]))
        return responses
"""
TEXT_CONFIG = INT + 'output { name: "OUT" data_type: TYPE_STRING dims: [-1] }\n'
METRICS_CONFIG = """
input { name: "INPUT0" data_type: TYPE_FP32 dims: [-1] }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [2] }
output { name: "SAID" data_type: TYPE_STRING dims: [1] }
"""


def models() -> dict[str, tuple[str, str]]:
    """Code and config by name."""
    batched = AUTO_COMPLETE.replace("BATCHING", "auto_complete_model_config.set_dynamic_batching()")
    return {
        "add_sub": (ADD_SUB, FLOATS),
        "nobatch_auto_complete": (AUTO_COMPLETE.replace("BATCHING", "").replace("BATCH", "0"), ""),
        "batch_auto_complete": (batched.replace("BATCH", "4"), ""),
        "bls_sync": (BLS_SYNC, BLS_CONFIG),
        "bls_async": (BLS_ASYNC, BLS_CONFIG),
        "square_int32": (SQUARE, DECOUPLED + INT + 'output { name: "OUT" data_type: TYPE_INT32 dims: [1] }\n'),
        "repeat_int32": (REPEAT, DECOUPLED + REPEAT_CONFIG),
        "bls_decoupled_sync": (
            BLS_DECOUPLED.replace("DEF", "def").replace(
                "GATHER", "[each.exec(decoupled=True) for each in inner_requests]"
            ),
            INT + 'output { name: "SUM" data_type: TYPE_INT32 dims: [1] }\n',
        ),
        "bls_decoupled_async": (
            BLS_DECOUPLED.replace("DEF", "async def").replace(
                "GATHER", "await asyncio.gather(*[each.async_exec(decoupled=True) for each in inner_requests])"
            ),
            INT + 'output { name: "SUM" data_type: TYPE_INT32 dims: [1] }\n',
        ),
        "custom_metrics": (CUSTOM_METRICS, METRICS_CONFIG),
        "jax": (JAX, FLOATS),
        "preprocessing": (PREPROCESSING, PREPROCESSING_CONFIG),
        "instance_kind": (INSTANCE_KIND, INSTANCE_KIND_CONFIG),
        "error_source": (ERROR_SOURCE, TEXT_CONFIG),
        "error_caller": (ERROR_CALLER, TEXT_CONFIG),
    }


def write(root: Path) -> Path:
    """The repository in ``root``."""
    for name, (code, config) in models().items():
        version = root / name / "1"
        version.mkdir(parents=True)
        (version / "model.py").write_text(HEAD + code)
        text = f'name: "{name}"\nbackend: "python"\ninstance_group [{{ kind: KIND_CPU }}]\n{config}'
        (version.parent / "config.pbtxt").write_text(text)
    (root / "preprocessing" / "1" / "mean.txt").write_text("0.5\n")
    return root
