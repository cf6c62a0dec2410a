"""``/v1/audio/transcriptions`` by the stock client: files, forms of answers, streams, and forms that are none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.frontends.openai.task_models import speech

TEXT = "800 frames of 8000 Hz"


def test_the_client_gets_the_text_of_a_file(client: openai.OpenAI) -> None:
    found = client.audio.transcriptions.create(model="listen", file=("a.wav", speech()), temperature=0.5)
    assert found.text == f"{TEXT} at 0.5"
    large = speech(frames=4_000_000)
    assert client.audio.transcriptions.create(model="listen", file=("a.wav", large)).text == "4000000 frames of 8000 Hz"


def test_an_answer_has_the_form_that_is_asked(client: openai.OpenAI) -> None:
    def ask(form: Any) -> Any:
        return client.audio.transcriptions.create(
            model="listen", file=("a.wav", speech()), response_format=form, language="de"
        )

    assert ask("text") == f"{TEXT}\n"
    verbose = ask("verbose_json")
    assert (verbose.text, verbose.language, verbose.duration) == (TEXT, "de", pytest.approx(0.1))
    assert [(each.id, each.start, each.end) for each in verbose.segments] == [(0, 0, 0.05), (1, 0.05, 0.1)]
    assert not verbose.words
    timed = client.audio.transcriptions.create(
        model="listen",
        file=("a.wav", speech()),
        response_format="verbose_json",
        timestamp_granularities=["word", "segment"],
    )
    assert timed.words is not None
    assert [(each.word, each.start, each.end) for each in timed.words] == [("800", 0, 0.05)]
    first, second = "00:00:00{0}000 --> 00:00:00{0}050", "00:00:00{0}050 --> 00:00:00{0}100"
    assert ask("srt") == f"1\n{first.format(',')}\n800 frames\n\n2\n{second.format(',')}\nof 8000 Hz\n"
    assert ask("vtt") == f"WEBVTT\n\n{first.format('.')}\n800 frames\n\n{second.format('.')}\nof 8000 Hz\n"


def test_a_stream_has_a_delta_for_each_response(client: openai.OpenAI) -> None:
    stream = client.audio.transcriptions.create(model="talk", file=("a.wav", b"x"), stream=True)
    events = [(event.type, getattr(event, "delta", None) or getattr(event, "text", None)) for event in stream]
    deltas = [("transcript.text.delta", word) for word in ("one", " two", " three")]
    assert events == [*deltas, ("transcript.text.done", "one two three")]
    assert client.audio.transcriptions.create(model="talk", file=("a.wav", b"x")).text == "one two three"


def test_an_error_is_the_status_or_an_event(web: httpx.Client) -> None:
    def ask(audio: bytes) -> httpx.Response:
        return web.post("/audio/transcriptions", data={"model": "talk", "stream": "true"}, files={"file": audio})

    assert ask(b"failone").status_code == 500
    later = ask(b"fail two")
    assert later.status_code == 200
    assert [line[:40] for line in later.text.split("\n\n")] == [
        'data: {"type":"transcript.text.delta","d',
        'data: {"error":{"message":"it broke","ty',
        "",
    ]


def test_a_caller_that_leaves_frees_the_model(
    web: httpx.Client, models: Path, wait_until: Callable[[Callable[[], bool], str], None]
) -> None:
    data, files = {"model": "talk", "stream": "true"}, {"file": b"wait"}
    with web.stream("POST", "/audio/transcriptions", data=data, files=files) as answer:
        assert "one" in next(answer.iter_lines())
    wait_until((models / "talk/1/left").exists, "the model hears of it")


@pytest.mark.parametrize(
    ("fields", "param", "why"),
    [
        ({"response_format": "xml"}, "response_format", "one of json, text, verbose_json, srt, vtt"),
        ({"model": "talk", "response_format": "srt"}, "response_format", "the output 'segments', which 'talk' lacks"),
        ({"temperature": "hot"}, "temperature", "a number from 0 to 2, got 'hot'"),
        ({"temperature": "nan"}, "temperature", "a number from 0 to 2, got 'nan'"),
        ({"prompt": "names"}, "prompt", "model 'listen' takes no prompt"),
        ({"stream": "maybe"}, "stream", "true or false"),
        ({"timestamp_granularities[]": "word"}, "timestamp_granularities", "needs response_format"),
        ({"timestamp_granularities[]": "char"}, "timestamp_granularities", "may be word and segment, got 'char'"),
        ({"model": "embed"}, "model", "does embedding"),
        ({"model": ""}, "model", "no field 'model'"),
        ({"prompt": "x" * 70_000}, None, "more than 65536 bytes"),
        ({str(number): "x" for number in range(70)}, None, "more than 64 parts"),
    ],
)
def test_what_is_wrong_is_named(web: httpx.Client, fields: dict[str, str], param: str | None, why: str) -> None:
    answer = web.post("/audio/transcriptions", data={"model": "listen"} | fields, files={"file": speech()})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert why in answer.json()["error"]["message"]


FORM = b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\nxyz\r\n'
MODEL = b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nlisten\r\n'


@pytest.mark.parametrize(
    ("kind", "body", "why"),
    [
        ("application/json", b"{}", "must be multipart/form-data, got 'application/json'"),
        ("multipart/form-data", b"", "has no boundary"),
        ("multipart/form-data; boundary=" + "b" * 300, b"", "can not be read"),
        ("multipart/form-data; boundary=b", b"", "not complete"),
        ("multipart/form-data; boundary=b", b"nothing of a form", "can not be read"),
        ("multipart/form-data; boundary=b", FORM, "not complete"),
        ("multipart/form-data; boundary=b", FORM + FORM + b"--b--", "the part 'file' twice"),
        ("multipart/form-data; boundary=b", b"--b\r\n\r\nx\r\n--b--", "has no name"),
        ("multipart/form-data; boundary=b", MODEL.replace(b"listen", b"\xff") + b"--b--", "is not UTF-8"),
        ("multipart/form-data; boundary=b", b"--b\r\n" + b"X" * 70_000 + b": 1\r\n\r\n--b--", "can not be read"),
        ("multipart/form-data; boundary=b", MODEL + b"--b--", "no part 'file'"),
        ("multipart/form-data; boundary=b", MODEL + FORM + b"--b--", "no WAV file"),
    ],
)
def test_a_form_that_is_none_is_refused(web: httpx.Client, kind: str, body: bytes, why: str) -> None:
    answer = web.post("/audio/transcriptions", content=body, headers={"content-type": kind})
    assert answer.status_code == (500 if "WAV" in why else 400), answer.text
    assert why in answer.json()["error"]["message"]
