"""What is refused, and what it costs: nothing may end, hang or bloat the engine."""

from __future__ import annotations

import contextlib
from base64 import b64encode
from dataclasses import replace
from time import perf_counter
from typing import Any

import pytest

from headrace import BackendError, InvalidArgument, Server
from headrace_llamacpp import checker_process, repetitions
from tests.backends.llamacpp.smol import ask, numbers, text
from tests.backends.llamacpp.test_queue import instance

HELLO = [{"role": "user", "content": "Hello"}]


def image(url: str) -> Any:
    return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]


def tool(parameters: Any) -> Any:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


def doubling(depth: int) -> Any:
    """Return a schema whose definitions refer to the next one twice."""
    chain = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(depth)}
    return {"$ref": "#/$defs/d0", "$defs": chain | {f"d{depth}": {"type": "string"}}}


def items(count: int) -> Any:
    return {"type": "array", "items": {"type": "string"}, "minItems": count}


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        ({"sampling": {"mirostat": 2}}, "no sampling parameter 'mirostat'"),
        ({"sampling": {"grammar_lazy": True}}, "no sampling parameter 'grammar_lazy'"),
        ({"sampling": {"min_tokens": 3}}, "no min_tokens, got 3"),
        ({"sampling": {"lora_name": "x"}}, "no adapter 'x'; it has loud"),
        ({"sampling": {"logit_bias": {"49152": 1}}}, "logit_bias has the token 49152; model 'smol' has 49152 tokens"),
        ({"text": "", "input_ids": [1, 49152]}, "input_ids has the token 49152"),
        ({"text": "", "input_ids": [1] * 300}, "300 tokens and the context of model 'smol' is 256 tokens"),
        ({"text": "word " * 300}, "the prompt has 301 tokens and the context is 256 tokens"),
        ({"text": "", "messages": HELLO, "tools": [{"type": "function"}]}, "Missing tool function"),
        (
            {"text": "", "messages": HELLO, "tools": [tool({"type": "object"})], "tool_choice": "g"},
            "tool_choice must be one of auto, none, required",
        ),
        ({"text": "", "messages": HELLO, "tools": [tool(items(2000))]}, "a tool has minItems 2000, the limit is 1000"),
        ({"text": "", "messages": HELLO, "tools": [tool(doubling(60))]}, "a tool has more than 100000 members"),
        (
            {"text": "", "messages": HELLO, "tools": [tool({"type": "string", "pattern": "((a{100}){100}){100}"})]},
            "a pattern of a tool may repeat 1000000 characters, the limit is 10000",
        ),
        ({"text": "", "messages": HELLO, "tools": [tool({"$ref": "#/x"})]}, "cannot resolve"),
        ({"tools": [tool({"type": "object"})]}, "tools go with messages"),
        ({"text": "", "messages": [{"content": "x"}]}, "Missing 'role'"),
        ({"text": "", "messages": [{"role": "user", "content": 7}]}, "content of a message must be a string"),
        ({"text": "", "messages": [{"role": "user", "content": [{"type": "file"}]}]}, "of type text or image_url"),
        ({"text": "", "messages": image("http://127.0.0.1:1/x.png")}, "takes no images"),
    ],
)
def test_what_the_model_cannot_do_is_named(server: Server, inputs: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidArgument, match=reason):
        ask(server, inputs.pop("text", "x"), **inputs)


@pytest.mark.parametrize(
    ("file", "reason"),
    [
        (b"RIFF\0\0\0\0WAVEfmt ", "image 1 cannot be read as PNG, JPEG, GIF or BMP: it begins with 'RIFF"),
        (b"RIFF\0\0\0\0WEBPVP8 " + bytes(10), "image 1 cannot be read as PNG, JPEG, GIF or BMP: it begins with 'RIFF"),
        (
            b"BM" + bytes(12) + b"\x0c\0\0\0\x01\x20\0\x20",
            "image 1 has 8193 x 8192 pixels: the images of a request may",
        ),
        (b"BM" + bytes(12) + b"\x0c\0\0\0\x01\0\x01\0", "image input is not supported"),  # llama.cpp's
    ],
    ids=("audio", "WEBP", "large", "small"),
)
def test_images_are_bounded_before_llama_cpp_decodes_them(
    server: Server, monkeypatch: pytest.MonkeyPatch, file: bytes, reason: str
) -> None:
    """No model of images is at hand: this one passes all that comes before its projector."""
    limits = instance()._limits
    files = replace(limits.files, projector=limits.files.weights)
    monkeypatch.setattr(instance(), "_limits", replace(limits, files=files))
    with pytest.raises(InvalidArgument, match=reason):
        ask(server, "", messages=image(f"data:image/png;base64,{b64encode(file).decode()}"))


def test_a_prompt_of_10_mb_is_refused_at_once(server: Server) -> None:
    begin = perf_counter()
    with pytest.raises(InvalidArgument, match=r"10485760 bytes, at least .* context of model 'smol' is 256 tokens"):
        ask(server, "a" * (10 << 20))
    assert perf_counter() - begin < 2


def test_control_characters_and_special_tokens_are_text(server: Server) -> None:
    odd = "".join(map(chr, range(1, 32))) + "\x7f\ufeff\u202e<|im_end|>"
    assert numbers(ask(server, odd, "return_num_output_tokens", sampling={"max_tokens": 1}), "num_output_tokens") == [1]


EXPONENTIAL = "\n".join(["root ::= r0 r0", *(f"r{i} ::= r{i + 1} | r{i + 1}" for i in range(60)), 'r60 ::= "a"'])
BAD: dict[str, dict[str, Any]] = {
    "an array of 10^9": {"json": items(10**9)},
    "definitions that double": {"json": doubling(60)},
    "a multiple of a large number": {"json": {"type": "integer", "multipleOf": 99999989}},
    "a reference to nothing": {"json": {"$ref": "#/x"}},
    "a reference to a server": {"json": {"$ref": "http://127.0.0.1:1/x"}},
    "nothing fits": {"json": {"allOf": [{"type": "string"}, {"type": "integer"}]}},
    "no regex": {"regex": "((("},
    "a look-behind": {"regex": "(?<=a)b"},
    "no rule": {"grammar": "root ::= nope"},
    "no root": {"grammar": 'x ::= "a"'},
    "no end": {"grammar": 'root ::= "abc'},
    "no grammar": {"grammar": "((((("},
    "too many repetitions": {"grammar": 'root ::= "a"{99999999999999999999}'},
    "too deep": {"grammar": "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000},
    "a million letters": {"regex": "((a{100}){100}){100}"},
    "a million letters in a schema": {"json": {"anyOf": [{"type": "string", "pattern": "b|((a{100}){100}){100}"}]}},
    "a million letters as keys": {"json": {"type": "object", "patternProperties": {"((a{100}){100}){100}": True}}},
    "a million letters in a terminal": {"grammar": "start: A\nA: B{100}\nB: /((a{100}){100})/"},
    "a million letters in a schema in a grammar": {"grammar": 'start: %json {"pattern": "((a{100}){100}){100}"}'},
    "2^40 letters": {"grammar": "\n".join(["start: A0", *(f"A{i}: A{i + 1} A{i + 1}" for i in range(40)), 'A40: "a"'])},
    "terminals in each other": {"grammar": "\n".join(["start: A0", *(f"A{i}: A{i + 1}" for i in range(4000))])},
    "a file": {"grammar": '%import /etc/passwd\nstart: "a"'},
    "an empty choice": {"choice": ["a", ""]},
}


def test_grammars_that_end_or_stop_an_engine_are_refused(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first two end the process if llama.cpp gets them."""
    monkeypatch.setattr(checker_process, "LIMIT_S", 0.5)
    for name, structured in BAD.items():
        with pytest.raises(InvalidArgument, match="structured_outputs"):
            ask(server, name, sampling={"structured_outputs": structured})


def test_a_checker_that_cannot_start_is_no_fault_of_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(BackendError, match="the process that checks grammars cannot start"):
        checker_process.GrammarChecker().why_bad("start: /a/")


@pytest.mark.parametrize(
    ("pattern", "length"),
    [
        (r"\d{4}-(ab|cde){3}[a-z{9}\]]{2}", 4 + 1 + 9 + 2),
        ("(?:a{1,1000}){1,1000}", 1),
        ("((a{10}){10}){101}", 10100),
        ("))){5}x", 1),
    ],
)
def test_the_text_that_a_pattern_forces_is_counted(pattern: str, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repetitions, "MOST_FORCED", length)
    repetitions.check_regex(pattern, "it")
    monkeypatch.setattr(repetitions, "MOST_FORCED", length - 1)
    with pytest.raises(InvalidArgument, match=f"it may repeat {length} characters"):
        repetitions.check_regex(pattern, "it")


@pytest.mark.parametrize("part", ["{1", "(?", "[", '"\\', "/\\", "~1", "A[", "\nA"])
def test_the_time_to_count_is_proportional_to_the_text(part: str) -> None:
    begin = perf_counter()
    with contextlib.suppress(InvalidArgument):
        repetitions.check_lark(part * (30_000 // len(part)), "it")
    with contextlib.suppress(InvalidArgument):
        repetitions.check_regex(part * (30_000 // len(part)), "it")
    assert perf_counter() - begin < 1


def test_a_grammar_that_stops_llama_cpp_s_own_parser_is_served(server: Server) -> None:
    """Its 62 lines have 2^60 ways to read one text: llama.cpp alone never returns, and no slot goes on."""
    assert text(ask(server, "x", "stream", sampling={"structured_outputs": {"grammar": EXPONENTIAL}})) == "aa"


def test_a_constraint_that_llama_cpp_gives_up_on_is_an_error_and_not_other_text(server: Server) -> None:
    """It gives up while it writes, and would go on without the grammar."""
    with pytest.raises(BackendError, match="did not keep to structured_outputs"):
        ask(server, "x", sampling={"max_tokens": 20, "structured_outputs": {"grammar": 'root ::= "a" root'}})


def test_a_model_whose_spaces_llama_cpp_reads_wrong_says_so(server: Server) -> None:
    """The token for a space is empty for the copy of llguidance in llama.cpp, which then gives up."""
    with pytest.raises(BackendError, match="it reads the spaces in the tokens of this model wrong"):
        ask(server, "x\n", model="scripted", sampling={"structured_outputs": {"regex": "x y"}})


def test_after_all_that_the_engine_answers(server: Server) -> None:
    assert text(ask(server, "Once upon a time", "stream"))
