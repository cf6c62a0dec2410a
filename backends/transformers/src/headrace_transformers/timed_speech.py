"""Speech with the times of its parts, by transformers' own pipeline: Whisper writes timestamps into its text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace import InvalidArgument
from headrace_transformers.transformers_engine import OpenedTransformer

NO_WORDS = "this model has no times of words: its generation_config.json lacks 'alignment_heads'"


@dataclass(frozen=True, slots=True)
class TimedText:
    """A segment or a word of a file, in seconds from its beginning."""

    start: float
    end: float
    text: str

    def json(self, text_name: str = "text") -> dict[str, float | str]:
        return {"start": round(self.start, 3), "end": round(self.end, 3), text_name: self.text}


class TimedSpeech:
    """Reads files with timestamps. One thread at a time."""

    def __init__(self, pipeline: Any, rate: int) -> None:
        self._pipeline, self._rate = pipeline, rate
        #: The pipeline would take five beams.
        self._beams = pipeline.model.generation_config.num_beams or 1

    @classmethod
    def of(cls, opened: OpenedTransformer, processor: Any) -> TimedSpeech | None:
        """Return the reader for the model ``opened``; None if it writes no timestamps."""
        if getattr(opened.model.generation_config, "no_timestamps_token_id", None) is None:
            return None
        pipeline = opened.transformers.pipeline(
            "automatic-speech-recognition",
            model=opened.model,
            tokenizer=processor.tokenizer,
            feature_extractor=processor.feature_extractor,
            device=opened.device,
        )
        return cls(pipeline, int(processor.feature_extractor.sampling_rate))

    def words(self, samples: npt.NDArray[np.float32], duration: float, options: dict[str, Any]) -> Sequence[TimedText]:
        """Return the words of ``samples`` with their times. ``options`` are for ``generate``.

        Raises `InvalidArgument` if the model has no alignment heads, whose attention has the times.
        """
        if not getattr(self._pipeline.model.generation_config, "alignment_heads", None):
            raise InvalidArgument(NO_WORDS)
        found = self._run(samples, options, return_timestamps="word")
        words: list[TimedText] = []
        for chunk in found.get("chunks", ()):
            start, end = chunk["timestamp"]
            words.append(TimedText(start or 0.0, duration if end is None else end, chunk["text"].strip()))
        return words

    def read(
        self, samples: npt.NDArray[np.float32], duration: float, options: dict[str, Any]
    ) -> tuple[str, str, Sequence[TimedText]]:
        """Return the text of ``samples``, its language as an English word (empty if not known), and its segments.

        ``options`` are for ``generate``. A segment of which the model wrote no end ends with the file.
        """
        found = self._run(samples, options, return_timestamps=True, return_language=True)
        segments: list[TimedText] = []
        for chunk in found.get("chunks", ()):
            start, end = chunk["timestamp"]
            if start is None:
                start = segments[-1].end if segments else 0.0
            segments.append(TimedText(start, max(start, duration if end is None else end), chunk["text"]))
        language = next((chunk["language"] for chunk in found.get("chunks", ()) if chunk.get("language")), "")
        return found["text"].strip(), language, segments

    def _run(self, samples: npt.NDArray[np.float32], options: dict[str, Any], **asked: Any) -> dict[str, Any]:
        found: dict[str, Any] = self._pipeline(
            {"raw": samples, "sampling_rate": self._rate},
            generate_kwargs={"num_beams": self._beams, **options},
            **asked,
        )
        return found
