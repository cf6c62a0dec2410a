"""Models of the tasks beside generation, in Python: what each does is arithmetic, so that a test can say it again."""

from __future__ import annotations

import io
import wave
from pathlib import Path

_HEAD = """
import json
import pathlib
import time

import numpy as np
import triton_python_backend_utils as pb_utils


def strings(request, name):
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return None if tensor is None else [text.decode() for text in tensor.as_numpy().ravel()]


def answer(**outputs):
    return pb_utils.InferenceResponse([pb_utils.Tensor(name, np.asarray(value)) for name, value in outputs.items()])


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]
"""
#: A vector is the counts of a, b, c and d in a text; of tokens, the counts of 0, 1, 2 and 3.
EMBED = (
    """
backend: "python" max_batch_size: 8
input { name: "text" data_type: TYPE_STRING dims: [1] optional: true }
input { name: "input_ids" data_type: TYPE_INT32 dims: [-1] optional: true }
output { name: "embedding" data_type: TYPE_FP32 dims: [4] }
output { name: "num_input_tokens" data_type: TYPE_UINT32 dims: [1] }
""",
    """
    def answer(self, request):
        texts = strings(request, "text")
        if texts is None:
            rows = pb_utils.get_input_tensor_by_name(request, "input_ids").as_numpy()
            vectors = [[list(row).count(token) for token in range(4)] for row in rows]
            return answer(
                embedding=np.array(vectors, np.float32),
                num_input_tokens=np.array([[len(row)] for row in rows], np.uint32),
            )
        if "slow" in texts:
            time.sleep(0.1)
        if "fail" in texts:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError("this text makes it fail"))
        vectors = [[np.nan if text == "nan" else text.count(letter) for letter in "abcd"] for text in texts]
        return answer(
            embedding=np.array(vectors, np.float32),
            num_input_tokens=np.array([[len(text.split())] for text in texts], np.uint32),
        )
""",
)
#: The same without batches, tokens and counts, with other names and vectors that may be shortened.
SINGLE = (
    """
backend: "python"
input { name: "sentence" data_type: TYPE_STRING dims: [1] }
output { name: "vector" data_type: TYPE_FP32 dims: [4] }
parameters { key: "is_matryoshka" value { string_value: "true" } }
""",
    """
    def answer(self, request):
        (text,) = strings(request, "sentence")
        return answer(vector=np.array([text.count(letter) for letter in "abcd"], np.float32))
""",
)
#: A score is how many letters of a document are in the query.
RERANK = (
    """
backend: "python" max_batch_size: 4
input { name: "query" data_type: TYPE_STRING dims: [1] }
input { name: "document" data_type: TYPE_STRING dims: [1] }
output { name: "score" data_type: TYPE_FP32 dims: [1] }
""",
    """
    def answer(self, request):
        pairs = zip(strings(request, "query"), strings(request, "document"))
        return answer(score=np.array([[sum(letter in q for letter in d)] for q, d in pairs], np.float32))
""",
)
#: The text is what the header of a WAV file and the options say.
LISTEN = (
    """
backend: "python"
input { name: "audio" data_type: TYPE_STRING dims: [1] }
input { name: "language" data_type: TYPE_STRING dims: [1] optional: true }
input { name: "temperature" data_type: TYPE_FP32 dims: [1] optional: true }
output { name: "text_output" data_type: TYPE_STRING dims: [1] }
output { name: "language" data_type: TYPE_STRING dims: [1] }
output { name: "duration" data_type: TYPE_FP32 dims: [1] }
output { name: "segments" data_type: TYPE_STRING dims: [1] }
output { name: "words" data_type: TYPE_STRING dims: [1] }
""",
    """
    def answer(self, request):
        import io, wave

        audio = pb_utils.get_input_tensor_by_name(request, "audio").as_numpy().ravel()[0]
        try:
            with wave.open(io.BytesIO(audio)) as file:
                frames, rate = file.getnframes(), file.getframerate()
        except (wave.Error, EOFError) as error:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(f"no WAV file: {error}"))
        (language,) = strings(request, "language") or ["en"]
        temperature = pb_utils.get_input_tensor_by_name(request, "temperature")
        hot = "" if temperature is None else f" at {float(temperature.as_numpy().ravel()[0]):g}"
        words = [f"{frames} frames", f" of {rate} Hz{hot}"]
        half = frames / rate / 2
        segments = [{"start": n * half, "end": (n + 1) * half, "text": word} for n, word in enumerate(words)]
        return answer(
            text_output=np.array(["".join(words)], object),
            language=np.array([language], object),
            duration=np.array([frames / rate], np.float32),
            segments=np.array([json.dumps(segments)], object),
            words=np.array([json.dumps([{"start": 0.0, "end": half, "word": str(frames)}])], object),
        )
""",
)
#: Writes three words, one in each response, and fails if the file says so.
TALK = (
    """
backend: "python" model_transaction_policy { decoupled: true }
input { name: "file" data_type: TYPE_STRING dims: [1] }
output { name: "text" data_type: TYPE_STRING dims: [1] }
""",
    """
    def answer(self, request):
        sender = request.get_response_sender()
        audio = pb_utils.get_input_tensor_by_name(request, "file").as_numpy().ravel()[0]
        for word in ("one", " two", " three"):
            if audio == b"fail" + word.encode():
                sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError("it broke")))
                break
            sender.send(answer(text=np.array([word], object)))
            while audio == b"wait":  # until the caller has left
                if request.is_cancelled():
                    (pathlib.Path(__file__).parent / "left").write_text("yes")
                    audio = b""
                time.sleep(0.005)
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
""",
)
MODELS = {
    "embed": ("embedding", EMBED),
    "single": ("embedding", SINGLE),
    "rerank": ("reranking", RERANK),
    "listen": ("transcription", LISTEN),
    "talk": ("transcription", TALK),
}


def write_task_models(folder: Path) -> Path:
    """Write the models to ``folder``. Return it."""
    for name, (task, (config, source)) in MODELS.items():
        (folder / name / "1").mkdir(parents=True)
        parameters = {"task": task, "isolation": "thread"}
        lines = [
            f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}' for key, value in parameters.items()
        ]
        (folder / name / "config.pbtxt").write_text("\n".join([config, *lines]))
        (folder / name / "1/model.py").write_text(_HEAD + source)
    return folder


def speech(frames: int = 800, rate: int = 8000) -> bytes:
    """Return a WAV file of silence."""
    written = io.BytesIO()
    with wave.open(written, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(bytes(2 * frames))
    return written.getvalue()
