"""Transcription: models that convert speech to text, such as Whisper."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from headrace import (
    BytesTensor,
    HeadraceError,
    InferRequest,
    InferResponse,
    InvalidArgument,
    LoadError,
    Model,
    RequestInstance,
    Tensors,
    one_line,
)
from headrace_transformers.audio import load_soundfile, read_audio, windows_of
from headrace_transformers.encoders import texts_of
from headrace_transformers.parameters import is_trusted
from headrace_transformers.timed_speech import NO_WORDS, TimedSpeech, TimedText
from headrace_transformers.transformers_engine import OpenedTransformer, reworded_execution

#: Windows that are read together, and the seconds of one if the model has no such setting.
WINDOWS, WINDOW_S = 8, 30


@dataclass(frozen=True, slots=True)
class Transcript:
    """The text of a file. ``language`` is an English word, or empty if it is not known; ``duration`` is in seconds."""

    text: str
    language: str
    duration: float
    segments: Sequence[TimedText]
    words: Sequence[TimedText] = ()


class Transcriber(RequestInstance):
    """``audio`` BYTES[rows, 1], the bytes of files -> ``text_output`` BYTES[rows, 1].

    The windows of a file are read together, those of several files one after the other. A request for ``segments`` or
    ``language`` is read with timestamps, if the model has them.
    """

    def __init__(self, model: Model, opened: OpenedTransformer) -> None:
        self._opened, self._torch = opened, opened.torch
        self._soundfile = load_soundfile()
        self._most_s = model.parameters.max_audio_s
        self._declared = [io.name for io in model.config.output]
        self._usual = [name for name in self._declared if name != "words"]  # which cost a second reading
        self._has_rows = model.config.max_batch_size > 0
        try:
            self._processor = opened.transformers.AutoProcessor.from_pretrained(
                opened.files.folder, local_files_only=True, trust_remote_code=is_trusted(model)
            )
            self._features, self._tokenizer = self._processor.feature_extractor, self._processor.tokenizer
        except Exception as error:
            text = one_line(" ".join(str(error).split()))[:300]
            raise LoadError(
                f"unable to load the processor of model '{model.name}' (preprocessor_config.json, tokenizer.json) from "
                f"{opened.files.folder}: {text}"
            ) from error
        self._rate = int(self._features.sampling_rate)
        self._window_s = int(getattr(self._features, "chunk_length", WINDOW_S))
        self._languages = getattr(opened.model.generation_config, "lang_to_id", None) or {}
        self._timed = (
            TimedSpeech.of(opened, self._processor) if {"segments", "language", "words"} & {*self._declared} else None
        )

    def close(self) -> None:
        del self._opened, self._timed

    def execute_requests(self, requests: Sequence[InferRequest]) -> Sequence[InferResponse | HeadraceError]:
        return [self._answer(request) for request in requests]

    def _answer(self, request: InferRequest) -> InferResponse | HeadraceError:
        try:
            return InferResponse(self._outputs(cast("Tensors", request.inputs), request.outputs or self._usual))
        except HeadraceError as error:
            return error

    def _outputs(self, inputs: Tensors, wanted: Sequence[str]) -> Tensors:
        audio = inputs["audio"]
        if not isinstance(audio, BytesTensor):
            raise InvalidArgument("input 'audio' must be of type BYTES")
        files = [bytes(item) for item in audio.items()]
        rows = zip(files, self._options(inputs, len(files)), strict=True)
        is_timed = "segments" in wanted or "language" in wanted
        made = [self._transcribe(file, options, is_timed, "words" in wanted) for file, options in rows]
        shape = (len(made), 1) if self._has_rows else (len(made),)
        texts = {
            "text_output": [each.text for each in made],
            "language": [each.language for each in made],
            "segments": [json.dumps([segment.json() for segment in each.segments]) for each in made],
            "words": [json.dumps([word.json("word") for word in each.words]) for each in made],
        }
        outputs: dict[str, Any] = {
            name: BytesTensor.from_items([each.encode("utf-8", "replace") for each in values], shape)
            for name, values in texts.items()
        }
        outputs["duration"] = np.array([each.duration for each in made], np.float32).reshape(shape)
        return {name: outputs[name] for name in wanted if name in outputs}

    def _options(self, inputs: Tensors, rows: int) -> Sequence[dict[str, Any]]:
        found: list[dict[str, Any]] = [{} for _ in range(rows)]
        for row, language in enumerate(texts_of(inputs, "language") if "language" in inputs else ()):
            if language:
                found[row]["language"] = self._language(language)
        for row, prompt in enumerate(texts_of(inputs, "prompt") if "prompt" in inputs else ()):
            if prompt:
                found[row]["prompt_ids"] = self._prompt(prompt)
        temperatures = np.asarray(inputs["temperature"]).ravel().tolist() if "temperature" in inputs else ()
        for row, temperature in enumerate(temperatures):
            if not 0 <= temperature <= 2:
                raise InvalidArgument(f"temperature must be a number from 0 to 2, got {temperature:g}")
            if temperature:
                found[row] |= {"do_sample": True, "temperature": temperature}
        return found

    def _language(self, language: str) -> str:
        if not self._languages:
            raise InvalidArgument(f"language is '{one_line(language)}', but this model has one language only")
        known = sorted(token.strip("<|>") for token in self._languages)
        if language.lower() not in known:
            raise InvalidArgument(f"language is '{one_line(language)[:50]}', expected one of {', '.join(known)}")
        return language.lower()

    def _prompt(self, prompt: str) -> Any:
        if not hasattr(self._processor, "get_prompt_ids"):
            raise InvalidArgument("this model takes no prompt")
        with self._opened.tokenizing:
            return self._torch.tensor(self._processor.get_prompt_ids(prompt), device=self._opened.device)

    def _transcribe(self, file: bytes, options: dict[str, Any], is_timed: bool, has_words: bool) -> Transcript:
        if has_words and self._timed is None:
            raise InvalidArgument(NO_WORDS)
        samples = read_audio(self._soundfile, file, self._rate, self._most_s)
        duration = len(samples) / self._rate
        if (is_timed or has_words) and self._timed is not None:
            with reworded_execution(), self._torch.inference_mode():
                words = self._timed.words(samples, duration, options) if has_words else ()
                text, language, timed = self._timed.read(samples, duration, options)
            return Transcript(text, language, duration, timed, words)
        parts = windows_of(samples, self._rate, self._window_s)
        segments: list[TimedText] = []
        begin = 0.0
        for start in range(0, len(parts), WINDOWS):
            group = parts[start : start + WINDOWS]
            for part, text in zip(group, self._read(group, options), strict=True):
                end = begin + len(part) / self._rate
                if text.strip():
                    segments.append(TimedText(begin, end, text.strip()))
                begin = end
        return Transcript(" ".join(each.text for each in segments), "", duration, segments)

    def _read(self, parts: Sequence[npt.NDArray[np.float32]], options: dict[str, Any]) -> list[str]:
        opened = self._opened
        with reworded_execution(), self._torch.inference_mode():
            made = self._features(list(parts), sampling_rate=self._rate, return_tensors="pt")
            features = made.to(opened.device, opened.model.dtype)
            tokens = opened.model.generate(**features, **options)
            with opened.tokenizing:
                read: list[str] = self._tokenizer.batch_decode(tokens, skip_special_tokens=True)
        return read
