"""``/v1/audio/transcriptions``: a file with speech in, its text out.

Source: https://platform.openai.com/docs/api-reference/audio/createTranscription.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from math import isfinite
from typing import Any

import numpy as np
import orjson

from headrace import BackendError, BytesTensor, InferRequest, InferResponse, Tensor
from headrace_openai.catalog import LanguageModel
from headrace_openai.event_lines import event_line
from headrace_openai.forms import LENGTH_BYTES, Form
from headrace_openai.inferences import string_rows
from headrace_openai.openai_errors import BadMember

#: The forms of an answer, with the outputs of the model that each needs beside the text.
FORMS = {
    "json": (),
    "text": (),
    "verbose_json": ("language", "duration", "segments"),
    "srt": ("segments",),
    "vtt": ("segments",),
}


@dataclass(frozen=True, slots=True)
class TranscriptionRequest:
    """The request of a caller. ``audio`` is as in `Form`.

    ``options`` are the values of the inputs ``language``, ``prompt`` and ``temperature``.
    """

    audio: bytearray
    form: str
    options: dict[str, str | float]
    streams: bool
    has_words: bool = False


def read_transcription(form: Form) -> TranscriptionRequest:
    """Return the request in ``form``. Raises `BadMember`."""
    fields = form.fields
    if form.file is None or len(form.file) == LENGTH_BYTES:
        raise BadMember("file", "the form has no part 'file', or an empty one")
    asked = fields.get("response_format") or "json"
    if asked not in FORMS:
        raise BadMember("response_format", f"response_format must be one of {', '.join(FORMS)}, got {asked[:100]!r}")
    times = {each for name in fields if name.startswith("timestamp_granularities") for each in fields[name].split(",")}
    if unknown := times - {"word", "segment"}:
        raise BadMember(
            "timestamp_granularities", f"timestamp_granularities may be word and segment, got {min(unknown)[:100]!r}"
        )
    if "word" in times and asked != "verbose_json":
        raise BadMember(
            "timestamp_granularities", "timestamp_granularities 'word' needs response_format 'verbose_json'"
        )
    options: dict[str, str | float] = {name: fields[name] for name in ("language", "prompt") if fields.get(name)}
    if fields.get("temperature"):
        options["temperature"] = _temperature(fields["temperature"])
    streams = fields.get("stream", "false").lower()
    if streams not in ("true", "false"):
        raise BadMember("stream", f"stream must be true or false, got {streams[:100]!r}")
    return TranscriptionRequest(form.file, asked, options, streams == "true", "word" in times)


def _temperature(text: str) -> float:
    with suppress(ValueError):
        if isfinite(value := float(text)) and 0 <= value <= 2:
            return value
    raise BadMember("temperature", f"temperature must be a number from 0 to 2, got {text[:100]!r}")


def transcription_request(asked: TranscriptionRequest, model: LanguageModel, request_id: str) -> InferRequest:
    """Return the request to ``model``. Raises `BadMember` for what the model can not do."""
    for name in FORMS[asked.form]:
        if name not in model.contract.outputs:
            raise BadMember(
                "response_format",
                f"response_format '{asked.form}' needs a model with the output '{name}', which '{model.name}' lacks",
            )
    if asked.has_words and "words" not in model.contract.outputs:
        raise BadMember("timestamp_granularities", f"model '{model.name}' has no output 'words'")
    is_batched = model.view.max_batch_size > 0
    spec = model.contract.inputs["audio"]
    inputs: dict[str, Tensor] = {spec.name: BytesTensor(asked.audio, (1,) * (len(spec.dims) + is_batched))}
    for name, value in asked.options.items():
        option = model.contract.inputs.get(name)
        if option is None:
            if value == 0.0:
                continue  # the most likely text: what a model does that has no temperature
            raise BadMember(name, f"model '{model.name}' takes no {name}")
        if type(value) is str:
            inputs[option.name] = string_rows(option, [value.encode("utf-8", "replace")], is_batched)
        else:
            shape = (1,) * (len(option.dims) + is_batched)
            inputs[option.name] = np.full(shape, value, option.datatype.numpy)
    names = ("text_output", *FORMS[asked.form], *(("words",) if asked.has_words else ()))
    outputs = [model.contract.outputs[name].name for name in names]
    return InferRequest(model.name, inputs, outputs, request_id)


def text_in(response: InferResponse, model: LanguageModel, name: str = "text_output") -> str:
    """Return the text in the output ``name``."""
    tensor = response.outputs[model.contract.outputs[name].name]
    if not isinstance(tensor, BytesTensor):
        raise BackendError(f"output '{name}' is not of type BYTES")
    return b"".join(tensor.items()).decode("utf-8", "replace")


def print_transcription(responses: Sequence[InferResponse], model: LanguageModel, form: str) -> tuple[bytes, bytes]:
    """Return the content type and the body of the answer: the text of all ``responses``, the rest of the last one."""
    if not responses:
        raise BackendError(f"model '{model.name}' gave no response")
    text, response = "".join([text_in(each, model) for each in responses]), responses[-1]
    if form == "text":
        return b"text/plain; charset=utf-8", f"{text}\n".encode()
    if form == "json":
        return b"application/json", orjson.dumps({"text": text})
    segments = _segments(response, model)
    if form == "verbose_json":
        duration = np.asarray(response.outputs[model.contract.outputs["duration"].name]).ravel()
        document = {
            "task": "transcribe",
            "language": text_in(response, model, "language"),
            "duration": float(duration[0]),
            "text": text,
            "segments": segments,
        }
        if "words" in model.contract.outputs and model.contract.outputs["words"].name in response.outputs:
            document["words"] = orjson.loads(text_in(response, model, "words"))
        return b"application/json", orjson.dumps(document)
    return _subtitles(segments, form)


def _segments(response: InferResponse, model: LanguageModel) -> list[dict[str, Any]]:
    try:
        segments = orjson.loads(text_in(response, model, "segments"))
        for number, each in enumerate(segments):
            each |= {"id": number, "start": float(each["start"]), "end": float(each["end"]), "text": str(each["text"])}
        return list(segments)
    except (ValueError, TypeError, KeyError) as error:
        raise BackendError(
            f"output 'segments' is no JSON array of objects with start, end and text: {error!r}"
        ) from None


def _subtitles(segments: list[dict[str, Any]], form: str) -> tuple[bytes, bytes]:
    comma, kind = (",", b"application/x-subrip") if form == "srt" else (".", b"text/vtt; charset=utf-8")
    lines = [] if form == "srt" else ["WEBVTT", ""]
    for number, each in enumerate(segments, 1):
        lines += [str(number)] if form == "srt" else []
        lines += [f"{_clock(each['start'], comma)} --> {_clock(each['end'], comma)}", each["text"].strip(), ""]
    return kind, "\n".join(lines).encode()


def _clock(seconds: float, comma: str) -> str:
    whole_ms = round(seconds * 1000)
    return (
        f"{whole_ms // 3_600_000:02}:{whole_ms // 60_000 % 60:02}:{whole_ms // 1000 % 60:02}{comma}{whole_ms % 1000:03}"
    )


async def transcription_events(responses: AsyncIterator[InferResponse], model: LanguageModel) -> AsyncIterator[bytes]:
    """Yield the events of a streamed transcription: a delta for each response, then the whole text.

    Closing it closes ``responses``.
    """
    text = ""
    async with aclosing(responses):  # type: ignore[type-var]
        async for response in responses:
            delta = text_in(response, model)
            text += delta
            yield _event({"type": "transcript.text.delta", "delta": delta})
    yield _event({"type": "transcript.text.done", "text": text})


def _event(document: dict[str, Any]) -> bytes:
    return b"data: %b\n\n" % event_line(document)
